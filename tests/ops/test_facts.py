"""The facts that the specification states, each as a property: what may be relied on, whatever the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sab.parts.scorers import turn
from sab.state import SABState
from tests.comparing import selects_surely
from tests.ops.cases import (
    BOUNDS,
    CELLS,
    INCORPORATIONS,
    SCORERS,
    WEIGHTINGS,
    WEIGHTINGS_AND_FORWARDS,
    Case,
    assert_close,
    cases,
    gradients,
    make_layer,
    pieces,
    randn,
    randomize,
    run,
)

AFFINE = st.sampled_from(["affine", "affine_tanh"])
SPARSE = st.sampled_from([pair for pair in WEIGHTINGS_AND_FORWARDS if pair[1] == "sparse"])
SOFTMAX_KINDS = st.sampled_from([pair for pair in WEIGHTINGS_AND_FORWARDS if pair[0].startswith("softmax")])


def draw_query_anew(layer: Any, seed: int = 5) -> None:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("attn_w_query"):
                parameter.copy_(3 * randn(*parameter.shape, seed=seed))


# The query cancels ---------------------------------------------------------------------------------------------------


@given(cases(scorer=AFFINE, weighting_and_forward=SPARSE.filter(lambda pair: pair[0] != "softmax_sink")))
def test_the_query_cancels_in_affine_scorers(case: Case) -> None:
    layer, x, lengths = case.layer(), case.x(), torch.tensor(case.lengths)
    assume(selects_surely(layer, x, lengths=lengths))
    output, state, attention = run(layer, x, lengths=lengths, return_attention=True)
    gradient = gradients([output], [layer.get_parameter("weight_hh_l0")])[0]
    draw_query_anew(layer)
    output_2, state_2, attention_2 = run(layer, x, lengths=lengths, return_attention=True)
    assert torch.equal(attention_2.numbers, attention.numbers)
    assert_close(attention_2.weights, attention.weights)
    assert_close(output_2, output)
    assert_close(state_2.h, state.h)
    assert_close(gradients([output_2], [layer.get_parameter("weight_hh_l0")])[0], gradient)


@given(cases(scorer=AFFINE, weighting_and_forward=("softmax", "dense")))
def test_the_query_cancels_in_a_dense_forward(case: Case) -> None:
    layer, x = case.layer(), case.x()
    output = layer(x)[0]
    draw_query_anew(layer)
    assert_close(layer(x)[0], output)


@given(
    cases(
        cell=st.sampled_from(["lstm", "gru", "rnn_tanh"]), scorer=AFFINE, weighting_and_forward=SOFTMAX_KINDS,
        ragged=False, bidirectional=False, k_top=st.integers(1, 3),
    )
)  # fmt: skip
def test_the_query_never_decides_what_an_affine_scorer_selects(case: Case) -> None:
    """With a sink the query does change the weights, and through them later hidden states: one step is compared."""
    layer, x = case.layer(), case.x()
    state = layer(x)[1]
    _, _, (numbers, weights) = layer(x[:1], state, return_attention=True)
    draw_query_anew(layer)
    _, _, (numbers_2, weights_2) = layer(x[:1], state, return_attention=True)
    first = (0,) if layer.num_layers > 1 else ()  # the next layer's input has changed already
    assert torch.equal(numbers_2[first], numbers[first])
    if case.options["weighting"] == "softmax_sink" and (numbers[first] >= 0).any():
        assert not torch.equal(weights_2[first], weights[first])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1e6), (torch.float32, 1e6), (torch.bfloat16, 100.0)])
@pytest.mark.parametrize("scorer", ["affine", "affine_tanh"])
def test_a_large_query_does_not_drown_the_selection(scorer: str, dtype: torch.dtype, scale: float) -> None:
    """Where rounding makes scores equal, the microstates' own parts still tell which are the highest."""
    layer = randomize(make_layer("lstm", 2, 3, k_top=2, k_att=1, scorer=scorer, dtype=dtype))
    x = randn(12, 4, 2).to(dtype)
    state = layer(x)[1]
    with torch.no_grad():
        layer.attn_w_query_l0.zero_()
    _, _, (numbers, _) = layer(x[:1], state, return_attention=True)
    with torch.no_grad():
        layer.attn_w_query_l0.fill_(scale)
    _, _, (numbers_2, _) = layer(x[:1], state, return_attention=True)
    assert torch.equal(numbers_2, numbers)


# A running top-k is the whole memory ---------------------------------------------------------------------------------


@given(cases(scorer=AFFINE, weighting_and_forward=SPARSE, bidirectional=False, max_steps=12), st.data())
def test_k_top_microstates_are_the_whole_memory_of_affine_scorers(case: Case, data: st.DataObject) -> None:
    layer, x = case.layer(), case.x()
    assume(selects_surely(layer, x))
    whole, whole_state, whole_attention = run(layer, x, return_attention=True)
    outputs, numbers, state = [], [], None
    for piece in data.draw(pieces(case.steps)):
        output, state, attention = run(layer, x[piece], state, return_attention=True)
        state = layer.compact(state)
        assert state.microstates.shape[-2] <= case.options["k_top"]
        outputs.append(output)
        numbers.append(attention.numbers)
    assert_close(torch.cat(outputs), whole)
    assert torch.equal(torch.cat(numbers, dim=-3), whole_attention.numbers)
    assert state is not None
    assert_close(state.h, whole_state.h)


@given(cases(scorer=AFFINE, weighting_and_forward=SPARSE, bidirectional=False), st.data())
def test_a_compact_state_continues_ragged_rows(case: Case, data: st.DataObject) -> None:
    layer, x = case.layer(), case.x()
    state = run(layer, x, lengths=torch.tensor(case.lengths))[1]
    compact = layer.compact(state)
    assert compact.microstates.shape[-2] <= max(case.options["k_top"], 0)
    assert compact.steps.tolist() == case.lengths
    for numbers in compact.numbers.flatten(0, 1).tolist():
        kept = [number for number in numbers if number >= 0]
        assert kept == sorted(kept), "slots are in the order of age"
    assume(selects_surely(layer, x, state))
    assert_close(layer(x, compact)[0], layer(x, state)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compact_state_continues_exactly_in_low_precision(dtype: torch.dtype) -> None:
    """Scores that rounding makes equal must not be told apart by one of the two and not by the other.

    The products of the input are exact, so that those of 5 steps equal those of 60 on every machine.
    """
    layer = randomize(make_layer("lstm", 2, 3, k_top=2, k_att=1, k_trunc=None, scorer="affine", dtype=dtype))
    draw_query_anew(layer)
    with torch.no_grad():
        for parameter in (layer.weight_ih_l0, layer.bias_ih_l0):
            parameter.copy_((4 * parameter).round() / 4)
    x = ((2 * randn(60, 8, 2)).round() / 2).to(dtype)

    def in_pieces(of_state: Any) -> torch.Tensor:
        state, outputs = None, []
        for piece in x.split(5):
            output, state = layer(piece, state)
            state = of_state(state)
            outputs.append(output)
        return torch.cat(outputs)

    compact = in_pieces(layer.compact)
    assert torch.equal(compact, in_pieces(lambda state: state))
    if dtype == torch.float32:  # the loops compute in it, so only a bfloat16 state is rounded between calls
        assert torch.equal(compact, layer(x)[0])


@pytest.mark.parametrize(
    "options", [{"scorer": "mlp"}, {"scorer": "dot"}, {"scorer": "affine", "weighting": "softmax", "forward": "dense"}]
)
def test_what_may_select_everything_again_keeps_everything(options: dict[str, str]) -> None:
    layer = make_layer("gru", 2, 3, k_top=1, k_att=1, **options)
    state = layer(randn(6, 2, 2))[1].state
    assert layer.compact(state) is state
    assert state.microstates.shape[-2] == 6


def test_compact_works_without_a_batch() -> None:
    layer = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1, scorer="affine"))
    x = randn(8, 2)
    state = layer(x)[1]
    assert layer.compact(state).state.microstates.shape == (1, 2, 3)
    assert_close(layer(x, layer.compact(state))[0], layer(x, state)[0])


# Pieces equal the whole ----------------------------------------------------------------------------------------------


def run_pieces(layer: Any, x: Tensor, division: list[slice], lengths: Tensor) -> tuple[Tensor, list[SABState | None]]:
    """Outputs and each row's final state of running x in pieces; rows that ended are left out of later pieces."""
    output = x.new_zeros(len(x), x.shape[1], layer.hidden_size)
    final: list[SABState | None] = [None] * x.shape[1]
    state, alive = None, list(range(x.shape[1]))
    for piece in division:
        still = [row for row in alive if lengths[row] > piece.start]
        if not still:
            break
        state = state if state is None else state.select([alive.index(row) for row in still])
        alive = still
        part = x[piece, alive]
        part_lengths = (lengths[alive] - piece.start).clamp_max(len(part))
        part_output, state = run(layer, part, state, lengths=part_lengths)
        output = output.index_put((torch.arange(piece.start, piece.stop)[:, None], torch.tensor(alive)), part_output)
        for position, row in enumerate(alive):
            if lengths[row] <= piece.stop:
                final[row] = state.select(position)
    return output, final


@settings(max_examples=80)
@given(cases(bidirectional=False, max_steps=10, max_memory=BOUNDS), st.data())
def test_pieces_equal_the_whole(case: Case, data: st.DataObject) -> None:
    layer, lengths = case.layer(), torch.tensor(case.lengths)
    assume(selects_surely(layer, case.x(), lengths=lengths))
    leaves = [case.x().requires_grad_(), *layer.parameters()]
    whole, whole_state = run(layer, leaves[0], lengths=lengths)
    output, final = run_pieces(layer, leaves[0], data.draw(pieces(case.steps)), lengths)
    assert_close(output, whole)
    for actual, expected in zip(gradients([output], leaves), gradients([whole], leaves), strict=True):
        assert_close(actual, expected, "gradient through an attached state")
    for row, state in enumerate(final):
        assert state is not None
        assert_close(state.h[:, 0], whole_state.h[:, row])
        assert state.steps.tolist() == [case.lengths[row]]
        numbers, whole_numbers = state.numbers[:, 0], whole_state.numbers[:, row]
        assert torch.equal(numbers[numbers >= 0], whole_numbers[whole_numbers >= 0])
        assert_close(state.microstates[:, 0][numbers >= 0], whole_state.microstates[:, row][whole_numbers >= 0])


@given(cases(bidirectional=False, ragged=False), st.integers(1, 4))
def test_a_detached_state_stops_every_gradient(case: Case, more: int) -> None:
    layer, x = case.layer(), case.x().requires_grad_()
    rest = randn(more, case.batch, layer.input_size, seed=4).requires_grad_()
    attached = run(layer, x)[1]
    state = attached.detach()
    assert not any(tensor.requires_grad for tensor in (*state, state.microstates, state.keys))
    output, _ = layer(rest, state)
    assert not gradients([output], [x])[0].any()
    assert gradients([output], [rest])[0].shape == rest.shape
    assert_close(output, layer(rest, attached)[0])


@given(cases(bidirectional=False, max_batch=3, ragged=True), st.integers(1, 7))
def test_rows_that_have_seen_different_steps_continue_as_if_alone(case: Case, more: int) -> None:
    """Cuts, keeps and numbers follow each row's own count of steps."""
    layer, x = case.layer(), case.x()
    rest = randn(more, case.batch, layer.input_size, seed=4)
    leaves = [x.requires_grad_(), rest.requires_grad_(), *layer.parameters()]
    state = layer(x, lengths=torch.tensor(case.lengths))[1]
    assume(selects_surely(layer, x, lengths=torch.tensor(case.lengths)) and selects_surely(layer, rest, state))
    output, _, attention = layer(rest, state, return_attention=True)
    alone = []
    for row, length in enumerate(case.lengths):
        joined = torch.cat([x[:length, row], rest[:, row]])
        row_output, _, (numbers, weights) = layer(joined, return_attention=True)
        alone.append(row_output[length:])
        assert torch.equal(attention.numbers[..., row, :], numbers[..., length:, :])
        assert_close(attention.weights[..., row, :], weights[..., length:, :])
    alone_output = torch.stack(alone, dim=1)
    assert_close(output, alone_output)
    for actual, expected in zip(gradients([output], leaves), gradients([alone_output], leaves), strict=True):
        assert_close(actual, expected, "gradient")


# Where gradient flows ------------------------------------------------------------------------------------------------


def reachable(step: int, numbers: list[list[int]], k_att: int, k_trunc: int | None) -> set[int]:
    """Steps (from 1) that gradient reaches from the output of `step`: back to the chunk's start, and over skips."""
    reached: set[int] = set()
    open_steps = [step]
    while open_steps:
        t = open_steps.pop()
        if t in reached:
            continue
        reached.add(t)
        if t > 1 and (k_trunc is None or (t - 1) % k_trunc != 0):
            open_steps.append(t - 1)
        open_steps += [(number + 1) * k_att for number in numbers[t - 1] if number >= 0]
    return reached


@settings(max_examples=60)
@given(
    cases(
        cell=st.sampled_from(["lstm", "gru", "rnn_tanh"]), num_layers=1, bidirectional=False, ragged=False,
        max_batch=1, max_steps=12, k_trunc=st.integers(1, 5),
    )
)  # fmt: skip
def test_gradient_reaches_the_chunk_and_the_selected_and_nothing_else(case: Case) -> None:
    layer, x = case.layer(), case.x().requires_grad_()
    output, _, (numbers, _) = layer(x, return_attention=True)
    chosen = numbers[:, 0].tolist()
    for step in range(1, case.steps + 1):
        gradient = gradients([output[step - 1]], [x])[0]
        touched = {t + 1 for t in range(case.steps) if gradient[t].any()}
        expected = reachable(step, chosen, layer.config.k_att, layer.config.k_trunc)
        assert touched <= expected
        if layer.config.weighting.startswith("softmax"):  # a relu kind may select with weight 0
            assert touched == expected


@pytest.mark.parametrize("k_trunc", [1, 2, 3, 5, None])
@pytest.mark.parametrize("cell", CELLS[:3])
def test_chunks_are_exactly_k_trunc_steps_long(cell: str, k_trunc: int | None) -> None:
    layer = randomize(make_layer(cell, 2, 3, k_top=0, k_trunc=k_trunc))
    x, h, c = randn(7, 1, 2).requires_grad_(), randn(1, 1, 3).requires_grad_(), randn(1, 1, 3).requires_grad_()
    output = layer(x, (h, c) if cell == "lstm" else h)[0]
    for step in range(7):
        gradient, of_h = gradients([output[step]], [x, h])
        start = 0 if k_trunc is None else step // k_trunc * k_trunc
        assert [bool(gradient[t].any()) for t in range(7)] == [start <= t <= step for t in range(7)]
        assert bool(of_h.any()) == (start == 0)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(("weighting", "forward"), WEIGHTINGS_AND_FORWARDS)
def test_only_selected_microstates_and_their_scores_receive_gradient(scorer: str, weighting: str, forward: str) -> None:
    """In one step from a state whose microstates and keys are leaves, the gradient shows who was touched."""
    layer = make_layer("gru", 2, 3, k_top=2, k_att=1, scorer=scorer, weighting=weighting, forward=forward)
    randomize(layer)
    state = layer(randn(7, 1, 2))[1].detach().state
    state.microstates.requires_grad_()
    state.keys.requires_grad_()
    output, _, (numbers, weights) = layer(randn(1, 1, 2), state, return_attention=True)
    of_microstates, of_keys = gradients([output], [state.microstates, state.keys])
    chosen = set(numbers.flatten().tolist())
    assert len(chosen) == 2
    read = {i for i in range(7) if of_microstates[0, 0, i].any()}
    scored = {i for i in range(7) if of_keys[0, 0, i].any()}
    assert scored == chosen  # the threshold of the relu kinds included
    assert read == {i for i, w in zip(numbers.flatten().tolist(), weights.flatten().tolist(), strict=True) if w > 0}


def test_a_dense_forward_reads_everything_and_a_sparse_one_only_the_selected() -> None:
    sparse = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1, weighting="softmax"))
    dense = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1, weighting="softmax", forward="dense"))
    state = sparse(randn(7, 1, 2))[1].detach().state
    x = randn(1, 1, 2)
    _, _, attention = sparse(x, state, return_attention=True)
    other = next(i for i in range(7) if i not in attention.numbers.flatten().tolist())
    moved = state.to("cpu", copy=True)
    moved.microstates[0, 0, other] += 1.0
    assert torch.equal(sparse(x, moved)[0], sparse(x, state)[0])
    assert not torch.allclose(dense(x, moved)[0], dense(x, state)[0])
    assert dense(x, state, return_attention=True)[2].weights.sum() < 1 - 1e-3


# Weights -------------------------------------------------------------------------------------------------------------


@given(cases(bidirectional=False, num_layers=1, k_top=st.integers(1, 4), max_steps=12))
def test_how_many_weights_are_positive_and_what_they_sum_to(case: Case) -> None:
    layer, k_top, k_att = case.layer(), case.options["k_top"], case.options["k_att"]
    _, _, (numbers, weights) = layer(case.x(), lengths=torch.tensor(case.lengths), return_attention=True)
    weighting, dense = case.options["weighting"], case.options["forward"] == "dense"
    for row, length in enumerate(case.lengths):
        for step in range(case.steps):
            held = step // k_att if step < length else 0
            k = min(k_top, held)
            here, w = numbers[step, row].tolist(), weights[step, row]
            assert here[k:] == [-1] * (k_top - k)
            assert not w[k:].any()
            assert len(set(here[:k])) == k
            assert all(0 <= number < held for number in here[:k])
            assert (w[:-1] >= w[1:] - 1e-12).all(), "highest first"
            if k == 0:
                continue
            if weighting.startswith("softmax"):
                assert (w[:k] > 0).all()
            else:
                assume(len(set(w[:k].tolist())) == k)  # scores that are equal get 0 together
                assert (w[: k - 1] > 0).all()
                assert w[k - 1] == 0
            total = w.sum().item()
            if weighting == "softmax" and not (dense and held > k):
                assert total == pytest.approx(1, abs=1e-12)
            elif weighting in ("softmax", "softmax_sink"):
                assert 0 < total < 1 + 1e-12
            elif weighting == "relu_norm" and k > 1:
                raw = total / (1 - total) * 1e-7 if total < 1 else 1.0  # Σ/(Σ + 1e-7) = total
                assert raw > 0
                assert total <= 1 + 1e-12


@pytest.mark.parametrize("weighting", ["relu", "relu_norm"])
@pytest.mark.parametrize("incorporate", ["add", "add_bounded"])
def test_with_k_top_1_the_relu_kinds_read_nothing(weighting: str, incorporate: str) -> None:
    options: dict[str, Any] = {"k_att": 1, "weighting": weighting, "incorporate": incorporate, "scorer": "dot"}
    layer = randomize(make_layer("lstm", 2, 3, k_top=1, **options))
    plain = make_layer("lstm", 2, 3, k_top=0, **options)
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if name in plain.state_dict()})
    x = randn(6, 2, 2)
    output, _, (numbers, weights) = layer(x, return_attention=True)
    assert_close(output, plain(x)[0])
    assert (numbers[1:] >= 0).all()
    assert not weights.any()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("incorporate", INCORPORATIONS)
def test_before_the_first_microstate_the_layer_is_its_cell(weighting: str, incorporate: str) -> None:
    """`concat` too: with an empty macrostate its map is not applied."""
    layer = randomize(make_layer("gru", 2, 3, k_top=2, k_att=4, weighting=weighting, incorporate=incorporate))
    x = randn(5, 2, 2)
    plain = layer.to_torch()(x)[0]
    output = layer(x)[0]
    assert_close(output[:4], plain[:4])
    if not weighting.startswith("relu") or incorporate == "concat":
        assert not torch.allclose(output[4], plain[4])


@given(cases(num_layers=1, bidirectional=False, ragged=False, scorer=AFFINE, max_steps=12, max_batch=1))
def test_bias_of_a_microstate_follows_its_number_and_is_zero_past_the_end(case: Case) -> None:
    """A bias that tells numbers apart by far decides the selection alone."""
    assume(case.options["max_microstates"] is not None and case.options["k_top"] > 0)
    layer = case.layer()
    bias = layer.get_parameter("attn_bias_l0")
    with torch.no_grad():
        bias.copy_(1e4 * torch.arange(len(bias), 0, -1))
    _, _, (numbers, _) = layer(case.x(), return_attention=True)
    for step in range(case.steps):
        k = min(case.options["k_top"], step // case.options["k_att"], len(bias))
        assert numbers[step, 0, :k].tolist() == list(range(k))


# Directions and age --------------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 40),
    step=st.integers(0, 2**31 - 1),
    age=st.integers(0, 10_000),
    earlier=st.integers(0, 2**30),
    seed=st.integers(0, 99),
)
def test_turned_vectors_know_the_difference_of_their_steps_alone(
    size: int, step: int, age: int, earlier: int, seed: int
) -> None:
    key, query = randn(2, size, seed=seed)
    assume(step >= age)
    products = [
        turn(key, torch.tensor(one - age)) @ turn(query, torch.tensor(one))
        for one in (step, step % 1000 + age, earlier + age)
    ]
    assert_close(products[1], products[0], tolerance=1e-9)
    assert_close(products[2], products[0], tolerance=1e-9)
    assert_close(turn(key, torch.tensor(step)).norm(), key.norm())
    assert_close(turn(turn(key, torch.tensor(step)), torch.tensor(-step)), key)
    untouched = size // 4 * 2
    assert torch.equal(turn(key, torch.tensor(step))[untouched:], key[untouched:])


@given(cases(scorer=st.just("cosine"), incorporate=st.just("gate"), max_steps=8), st.sampled_from([1e-3, 1e3]))
def test_the_size_of_the_weights_changes_no_cosine_score(case: Case, factor: float) -> None:
    """But for what keeps a length of 0 finite: so large weights may not be made small."""
    layer, x, lengths = case.layer(), case.x(), torch.tensor(case.lengths)
    scaled = ("attn_w_memory", "attn_w_query", "attn_bias")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(scaled):
                parameter.mul_(1e6 / min(factor, 1.0))
    assume(selects_surely(layer, x, lengths=lengths))
    expected = layer(x, lengths=lengths)[0]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(scaled):
                parameter.mul_(factor)
    assert_close(layer(x, lengths=lengths)[0], expected, tolerance=1e-6)
