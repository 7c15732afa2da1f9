"""Every backend against an independently written oracle, gradients included, and against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from torch import Tensor

from sab.errors import UserError
from tests.comparing import randomize_surely, selects_surely
from tests.ops import oracle
from tests.ops.cases import (
    BACKENDS,
    BOUNDS,
    CELLS,
    INCORPORATIONS,
    SCORERS,
    WEIGHTINGS_AND_FORWARDS,
    Case,
    assert_close,
    cases,
    gradients,
    make_layer,
    randn,
    randomize,
    run,
)


def compare_with_oracle(layer: Any, x: Tensor, lengths: list[int] | None, h0: Tensor, c0: Tensor) -> None:
    """Outputs, states, attention and all gradients of a layer equal the oracle's."""
    x, h0, c0 = (tensor.clone().requires_grad_() for tensor in (x, h0, c0))
    leaves = {"x": x, "h0": h0, "c0": c0} | dict(layer.named_parameters())
    has_c = layer.cell == "lstm"

    expected = oracle.run(layer, x, lengths or [len(x)] * x.shape[1], h0, c0)
    output, state, attention = run(
        layer,
        x,
        (h0, c0) if has_c else h0,
        lengths=None if lengths is None else torch.tensor(lengths),
        return_attention=True,
    )
    if len(state.h) == 1:
        attention = attention.map(lambda tensor: tensor.unsqueeze(0))
    kept = [
        [microstates[numbers >= 0] for microstates, numbers in zip(*rows, strict=True)]
        for rows in zip(state.microstates, state.numbers, strict=True)
    ]
    if layer.config.k_top == 0:  # a memory that is never read is not kept
        expected.microstates = [[microstates[:0] for microstates in rows] for rows in expected.microstates]

    assert torch.equal(attention.numbers, expected.numbers)
    actuals = {"output": output, "h": state.h, "weights": attention.weights, "summary": attention.summary}
    expecteds = {"output": expected.output, "h": expected.h, "weights": expected.weights, "summary": expected.summary}
    if has_c:
        actuals["c"], expecteds["c"] = state.c, expected.c
    else:
        assert state.c is None
    for index, rows in enumerate(expected.microstates):
        for row, microstates in enumerate(rows):
            actuals[f"microstates of {index}, {row}"] = kept[index][row]
            expecteds[f"microstates of {index}, {row}"] = microstates
    for name, value in expecteds.items():
        assert_close(actuals[name], value, name)
    assert state.steps.tolist() == (lengths or [len(x)] * x.shape[1])

    inputs = list(leaves.values())
    actual_gradients = gradients(list(actuals.values()), inputs)
    expected_gradients = gradients(list(expecteds.values()), inputs)
    for name, actual, wanted in zip(leaves, actual_gradients, expected_gradients, strict=True):
        assert_close(actual, wanted, f"gradient of {name}")


def require(backend: str, case: Case) -> None:
    """Skip where a backend says that it cannot run here."""
    try:
        case.layer()(case.x())
    except UserError as mistake:
        if mistake.option == "backend" and backend != "reference":
            pytest.skip(str(mistake))
        raise


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("incorporate", INCORPORATIONS)
@pytest.mark.parametrize(("weighting", "forward"), WEIGHTINGS_AND_FORWARDS)
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_combination_equals_the_oracle(
    cell: str, scorer: str, weighting: str, forward: str, incorporate: str, backend: str
) -> None:
    options = {
        "k_top": 2, "k_att": 2, "k_trunc": 3, "scorer": scorer, "weighting": weighting, "forward": forward,
        "incorporate": incorporate, "attention_size": 2, "max_microstates": 2, "backend": backend,
    }  # fmt: skip
    case = Case(cell, (2, 3, 1), 8, 2, [8, 8], options)
    require(backend, case)
    h0, c0 = randn(1, 2, 3, seed=2), randn(1, 2, 3, seed=3)
    layer = randomize_surely(case.layer(), case.x(), (h0, c0) if cell == "lstm" else h0)
    compare_with_oracle(layer, case.x(), None, h0, c0)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100)
@given(case=cases(max_steps=12, max_memory=BOUNDS))
def test_random_shapes_and_options_equal_the_oracle(backend: str, case: Case) -> None:
    case.options["backend"] = backend
    require(backend, case)
    layer = case.layer()
    shape = (len(layer._suffixes), case.batch, layer.hidden_size)
    h0, c0 = randn(*shape, seed=case.seed + 2), randn(*shape, seed=case.seed + 3)
    hx = (h0, c0) if case.cell == "lstm" else h0
    assume(selects_surely(layer, case.x(), hx, lengths=torch.tensor(case.lengths)))
    compare_with_oracle(layer, case.x(), case.lengths, h0, c0)


class Bilinear(torch.nn.Module):
    """A scorer that no name stands for."""

    def __init__(self, size: int):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.eye(size, dtype=torch.float64))

    def forward(self, microstates: Tensor, h: Tensor) -> Tensor:
        return torch.einsum("bsn,nm,bm->bs", microstates, self.matrix, torch.sin(h))


@pytest.mark.parametrize("lengths", [None, [7, 3]])
@pytest.mark.parametrize(("weighting", "forward"), WEIGHTINGS_AND_FORWARDS)
def test_a_module_as_scorer_equals_the_oracle(weighting: str, forward: str, lengths: list[int] | None) -> None:
    layer = make_layer("gru", 2, 3, scorer=Bilinear(3), weighting=weighting, forward=forward, k_top=2, k_att=1,
                       k_trunc=2)  # fmt: skip
    assert "scorer.matrix" in dict(layer.named_parameters())
    compare_with_oracle(randomize(layer), randn(7, 2, 2), lengths, randn(1, 2, 3), randn(1, 2, 3))


def constant(microstates: Tensor, h: Tensor) -> Tensor:
    return microstates.new_zeros(microstates.shape[:2])


def newest_of_pairs(microstates: Tensor, h: Tensor) -> Tensor:
    """Scores that come in equal pairs, rising with age in the macrostate."""
    return (torch.arange(microstates.shape[1]) // 2).expand(len(microstates), -1)


@pytest.mark.parametrize("weighting", ["relu", "relu_norm", "softmax", "softmax_sink"])
def test_ties_go_to_the_older_microstate(weighting: str) -> None:
    layer = make_layer("lstm", 2, 3, scorer=constant, weighting=weighting, k_top=2, k_att=1)
    _, _, (numbers, _) = layer(randn(6, 2, 2), return_attention=True)
    assert numbers[:, 0].tolist() == [[-1, -1], [0, -1], [0, 1], [0, 1], [0, 1], [0, 1]]
    layer = make_layer("lstm", 2, 3, scorer=newest_of_pairs, weighting=weighting, k_top=3, k_att=1)
    _, _, (numbers, _) = layer(randn(7, 1, 2), return_attention=True)
    assert numbers[5:, 0].tolist() == [[4, 2, 3], [4, 5, 2]]


@pytest.mark.parametrize("scorer", SCORERS)
def test_ties_of_equal_microstates_go_to_the_older_one(scorer: str) -> None:
    """Zero weights everywhere: every hidden state, and so every score, is the same."""
    layer = make_layer("rnn_tanh", 2, 3, scorer=scorer, k_top=3, k_att=1, max_microstates=None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    _, _, (numbers, weights) = layer(randn(40, 2, 2), return_attention=True)
    assert numbers[-1].tolist() == [[0, 1, 2]] * 2
    assert_close(weights[-1], torch.full((2, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("scorer", "cell"), [("affine", "lstm"), ("affine_tanh", "lstm"), ("mlp", "gru"), ("dot", "rnn_tanh")]
)
@pytest.mark.parametrize(
    ("weighting", "incorporate"),
    [("relu", "add"), ("relu_norm", "concat"), ("softmax", "add_bounded"), ("softmax_sink", "concat")],
)
def test_gradcheck_where_nothing_is_cut(scorer: str, cell: str, weighting: str, incorporate: str) -> None:
    """Finite differences know nothing of selections, so scores must be apart; a cut would be another function."""
    layer = make_layer(
        cell, 1, 2, k_top=3, k_att=1, k_trunc=None, scorer=scorer, weighting=weighting, incorporate=incorporate,
        max_microstates=3,
    )  # fmt: skip
    randomize(layer, seed=5)
    x, h, c = (randn(*shape).requires_grad_() for shape in ((5, 1, 1), (1, 1, 2), (1, 1, 2)))

    def outputs(x: Tensor, h: Tensor, c: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        output, state, attention = run(layer, x, (h, c) if cell == "lstm" else h, return_attention=True)
        return output, *state, attention.weights

    assert torch.autograd.gradcheck(outputs, (x, h, c, *layer.parameters()))


def test_gradcheck_of_a_dense_forward_that_selects_everything() -> None:
    """With k_top at least the macrostate's size, dense and sparse are one function, and its gradient is whole."""
    layer = make_layer("gru", 1, 2, k_top=9, k_att=1, k_trunc=None, scorer="mlp", forward="dense")
    randomize(layer, seed=5)
    x = randn(5, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x)[0], (x, *layer.parameters()))


def test_second_derivatives_of_a_smooth_configuration() -> None:
    layer = make_layer("lstm", 1, 2, k_top=9, k_att=1, k_trunc=None, scorer="dot", backend="reference")
    randomize(layer, seed=3)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (randn(4, 1, 1).requires_grad_(),))


@given(cases(ragged=False, max_batch=1, num_layers=1, bidirectional=False))
@example(
    Case("lstm", (1, 2, 1), 9, 1, [9], {"k_top": 1, "k_att": 2, "k_trunc": 3, "scorer": "affine", "weighting": "relu"})
)
def test_gradients_do_not_depend_on_what_else_is_in_the_batch(case: Case) -> None:
    """A second row, far away, changes neither outputs nor gradients of the first."""
    layer, x = case.layer(), case.x()
    alone = x.clone().requires_grad_()
    together = torch.cat([x, 3 * randn(*x.shape, seed=99)], dim=1).requires_grad_()
    assume(selects_surely(layer, together))
    output_alone, output_together = layer(alone)[0], layer(together)[0][:, :1]
    assert_close(output_together, output_alone)
    gradient = gradients([output_together], [together])[0]
    assert_close(gradient[:, :1], gradients([output_alone], [alone])[0])
    assert not gradient[:, 1:].any()


def test_a_row_with_an_empty_macrostate_does_not_depend_on_the_others() -> None:
    """Both rows forget everything; one of them keeps a state one step before the other does."""
    layer = randomize(make_layer("lstm", 3, 4, k_top=2, k_att=2, incorporate="concat", backend="reference"))
    _, state = run(layer, randn(5, 2, 3), lengths=torch.tensor([5, 4]))
    state, x = state.recent(0), randn(3, 2, 3, seed=2)
    both, _ = layer(x, state)
    for row in range(2):
        alone, _ = layer(x[:, [row]], state.select(row))
        assert_close(both[:, [row]], alone)
