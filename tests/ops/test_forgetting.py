"""A bounded macrostate: what is forgotten, who can still read what, and what a state needs to go on.

`test_reference.py` compares every backend with an oracle that forgets by the text of docs/mathematics.md.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import sab
from sab.config import FORGETS
from sab.errors import UserError
from sab.ops import forgetting, operation
from sab.ops.cpu import loader
from sab.ops.types import LayerState
from tests.ops import oracle
from tests.ops.cases import BACKENDS, assert_close, gradients, make_layer, randn, randomize, run

EACH = pytest.mark.parametrize("forget", FORGETS)
ON_EACH = pytest.mark.parametrize("backend", BACKENDS)


def bounded(cell: Any = "lstm", **options: Any) -> Any:
    return randomize(make_layer(cell, 2, 4, **{"k_top": 2, "k_att": 1, "k_trunc": 3, "max_memory": 3, **options}))


def test_a_draw_is_splitmix64s() -> None:
    assert [forgetting.drawn(number) for number in range(50)] == [oracle.drawn(number) for number in range(50)]


def test_a_reservoir_is_a_uniform_sample() -> None:
    """Over 4,000 seeds each of 40 microstates is among the 10 that remain 1,000 times, give or take what a binomial
    distribution allows (sd 27); their scatter is that of a chi-square distribution with 39 degrees of freedom."""
    most, kept, seeds = 10, 40, 4000
    remained = [0] * kept
    for seed in range(seeds):
        slots = list(range(most))
        for number in range(most, kept):
            place = forgetting.drawn(number, seed * 0x632BE59BD9B4E019)
            if place < most:
                slots = [*slots[:place], *slots[place + 1 :], number]
        for number in slots:
            remained[number] += 1
    expected, share = seeds * most / kept, most / kept
    chi_square = sum((count - expected) ** 2 for count in remained) / (expected * (1 - share)) * (kept - 1) / kept
    assert 15 < chi_square < 75  # 39 on average; outside of this once in 1,000 times
    assert all(abs(count - expected) < 120 for count in remained)


@EACH
@ON_EACH
@pytest.mark.parametrize("scorer", ["cosine", "affine"])
def test_a_long_sequence_forgets_alike(forget: str, backend: str, scorer: str) -> None:
    """Far past the bound, where the counts have been discounted often and the sample has been drawn from often."""
    layer = bounded("gru", forget=forget, max_memory=7, scorer=scorer, backend=backend)
    row = oracle.run_row(
        list(randn(150, 1, 2)[:, 0]),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float64),
        {name.removesuffix("_l0"): parameter.detach() for name, parameter in layer.named_parameters()},
        "gru",
        layer.config,
    )
    with torch.no_grad():
        output, state, attention = run(layer, randn(150, 1, 2), return_attention=True)
    assert_close(output[:, 0], torch.stack(row.outputs))
    assert attention.numbers[2:, 0].tolist() == row.numbers[2:]
    assert state.numbers[0, 0].tolist() == row.kept
    if forget == "most_read":
        assert state.reads[0, 0].tolist() == [row.reads[number] for number in row.kept]
    elif forget == "recent":
        assert row.kept == list(range(143, 150))


@EACH
@ON_EACH
def test_of_equal_ones_the_oldest(forget: str, backend: str) -> None:
    """All microstates and all scores are equal: ties go to the older one in reading, and in being forgotten."""
    layer = bounded(forget=forget, backend=backend)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    _, state, attention = run(layer, randn(9, 2, 2), return_attention=True)
    numbers = attention.numbers[:, 0].tolist()
    assert all(line == sorted(line) for line in numbers[3:])
    if forget == "recent":
        assert numbers[-1] == [5, 6]
    elif forget == "most_read":  # 0 and 1 are read at every step, so that what comes after them never is
        assert numbers[-1] == [0, 1]
        assert state.numbers[0, 0].tolist() == [0, 1, 8]


@EACH
@ON_EACH
@pytest.mark.parametrize("more", [0, 5])
def test_a_bound_that_is_not_reached_changes_nothing(forget: str, backend: str, more: int) -> None:
    found = []
    for options in ({"max_memory": 6 + more, "forget": forget}, {"max_memory": None}):
        layer, x = bounded(k_att=2, backend=backend, **options), randn(12, 2, 2).requires_grad_()
        output, state, attention = run(layer, x, return_attention=True)
        seen = [output, *state, state.microstates, state.keys, attention.weights, attention.summary]
        found.append([*seen, *gradients(seen, [x, *layer.parameters()]), attention.numbers, state.numbers])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@ON_EACH
def test_what_was_forgotten_keeps_the_gradient_of_earlier_reads(backend: str) -> None:
    """With a bound of 1 and cuts before every step, step t reads microstate t - 2 alone, and never again."""
    layer = bounded("rnn_tanh", max_memory=1, k_top=1, k_trunc=1, backend=backend)
    x = randn(8, 1, 2).requires_grad_()
    output, _, attention = layer(x, return_attention=True)
    assert attention.numbers.flatten().tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]
    (of_x,) = gradients([output[3]], [x])
    assert of_x[:4].any(-1).all()
    assert not of_x[4:].any()
    (of_state,) = gradients([layer(x)[1].state.microstates], [x])
    assert of_state.any(-1).flatten().tolist() == [True] * 8  # through what the last one read


CARRIED = {
    "as it is": lambda state: state,
    "detach": lambda state: state.detach(),
    "clone": lambda state: state.clone(),
    "select": lambda state: getattr(state, "state", state).select([1, 0]).select([1, 0]),
    "to": lambda state: state.to(torch.float64, copy=True),
    "pickle": lambda state: pickle.loads(pickle.dumps(state.detach())),
    "copy": lambda state: copy.deepcopy(state.detach()),
    "pytree": lambda state: _pytree.tree_map(lambda tensor: tensor.clone(), state),
    "compact": lambda state: state,
}


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    return torch.load(file)


@EACH
@ON_EACH
@pytest.mark.parametrize("way", [*CARRIED, "save"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_carried_state_continues_exactly(forget: str, backend: str, way: str, kind: str) -> None:
    layer, x = bounded(kind, forget=forget, backend=backend, scorer="affine"), randn(21, 2, 2)
    with torch.no_grad():
        whole, end = run(layer, x)
        outputs: list[Tensor] = []
        state: Any = None
        for piece in x.split([7, 1, 1, 4, 8]):
            output, state = layer(piece, state)
            state = saved(state) if way == "save" else CARRIED[way](state)
            state = layer.compact(state) if way == "compact" else state
            outputs.append(output)
    assert_close(torch.cat(outputs), whole)
    state = state.state if isinstance(state, sab.SABHidden) else state
    assert torch.equal(state.numbers, end.numbers)
    assert (state.reads is None) == (forget != "most_read")
    if forget == "most_read":
        assert torch.equal(state.reads, end.reads)


@EACH
@pytest.mark.parametrize("k_att", [1, 2])
def test_rows_that_have_seen_different_steps_forget_each_for_itself(forget: str, k_att: int) -> None:
    layer, x, rest = bounded(forget=forget, k_att=k_att, backend="reference"), randn(9, 3, 2), randn(8, 3, 2, seed=4)
    leaves, lengths = [x.requires_grad_(), rest.requires_grad_(), *layer.parameters()], [2, 5, 9]
    _, state = run(layer, x, lengths=lengths)
    output, end, attention = run(layer, rest, state, return_attention=True)
    assert end.numbers.shape[-1] == 3
    alone = []
    for row, length in enumerate(lengths):
        row_output, row_end, row_attention = run(
            layer, torch.cat([x[:length, row], rest[:, row]]), return_attention=True
        )
        alone.append(row_output[length:])
        assert torch.equal(attention.numbers[:, row], row_attention.numbers[length:])
        assert torch.equal(end.numbers[:, row], row_end.numbers)
        assert end.reads is None or torch.equal(end.reads[:, row], row_end.reads)
    expected = torch.stack(alone, dim=1)
    assert_close(output, expected)
    for one, other in zip(gradients([output], leaves), gradients([expected], leaves), strict=True):
        assert_close(one, other, "gradient")


def test_a_batch_of_states_and_fresh_rows() -> None:
    layer = bounded(forget="most_read")
    one, other = (layer(randn(steps, 2, seed=steps))[1] for steps in (2, 9))
    batch = torch.utils.data.default_collate([one, other])
    assert batch.reads.shape == batch.numbers.shape == (1, 2, 3)
    x = randn(5, 2, seed=4)
    output = layer(torch.stack([x, x], 1), batch)[0]
    for row, state in enumerate((one, other)):
        assert_close(output[:, row], layer(x, state)[0])
    fresh = batch.reset([0])
    assert not fresh.reads[:, 0].any()
    assert_close(layer(torch.stack([x, x], 1), fresh)[0][:, 0], layer(x)[0])


def test_a_state_of_another_rule_begins_with_one_read_each() -> None:
    layer, counting = bounded(), bounded(forget="most_read")
    x, state = randn(6, 2, 2), layer(randn(6, 2, 2, seed=3))[1]
    state_of_old_file = pickle.loads(pickle.dumps(state.detach()))
    reads = torch.full_like(state.numbers, forgetting.READ)
    counted = sab.SABState(state.h, state.c, state.microstates, state.keys, state.numbers, state.steps, reads)
    assert_close(counting(x, state_of_old_file)[0], counting(x, counted)[0])
    assert_close(layer(x, counted)[0], layer(x, state)[0])
    assert layer(x, counted)[1].reads is None


def test_a_state_without_the_field_loads() -> None:
    state = bounded()(randn(4, 2, 2))[1].detach()
    stored = {name: value for name, value in state.__getstate__().items() if name != "reads"}
    old = object.__new__(sab.SABState)
    old.__setstate__(stored)
    assert old.reads is None
    assert torch.equal(old.microstates, state.microstates)


def test_what_is_refused() -> None:
    for options, sentence in (
        ({"max_memory": 0}, "max_memory must be a whole number of at least 1, or None; got 0"),
        ({"max_memory": 2.5}, "max_memory must be a whole number"),
        ({"forget": "oldest"}, "forget must be one of recent, most_read, reservoir; got 'oldest'"),
        ({"max_memory": None, "forget": "reservoir"}, "max_memory must be given where forget is 'reservoir'; got None"),
    ):
        with pytest.raises(UserError, match=sentence):
            bounded(**options)
    long = bounded(max_memory=None)(randn(9, 2, 2))[1]
    with pytest.raises(UserError, match=r"at most max_memory = 3 microstates; got 9: state.recent\(3\) has as many"):
        bounded()(randn(2, 2, 2), long)
    assert bounded()(randn(2, 2, 2), long.recent(3))[0].shape == (2, 2, 4)


def test_a_layer_shows_its_bound() -> None:
    assert "max_memory=3, forget=reservoir" in repr(bounded(forget="reservoir"))
    assert "max_memory" not in repr(bounded(max_memory=None))
    assert "max_memory" not in repr(bounded(k_top=0))


def test_from_torch_and_cells_take_it() -> None:
    layer = sab.SABLSTM.from_torch(torch.nn.LSTM(2, 4), max_memory=3, forget="reservoir", k_att=1)
    assert layer(torch.randn(9, 1, 2))[1].numbers.shape[-1] == 3
    cell = sab.SABLSTMCell.from_layer(layer)
    assert (cell.config.max_memory, cell.config.forget) == (3, "reservoir")


@pytest.mark.filterwarnings("ignore")  # of the exporter's own parts
def test_export_leaves_the_time_open() -> None:
    """Short and long calls of one program: with and without something to forget."""
    layer = bounded(forget="most_read").eval()
    open_sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(layer, (randn(9, 2, 2),), dynamic_shapes=(open_sizes,)).module()
        for steps in (2, 30):
            x = randn(steps, 4, 2)
            (output, state), (expected, end) = program(x), layer(x)
            assert_close(output, expected)
            assert torch.equal(state.numbers, end.numbers)
            assert torch.equal(state.reads, end.reads)


def test_onnx_refuses_it() -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(UserError, match="model must have SAB layers without max_memory; got max_memory=3"):
        sab.export.to_onnx(bounded().eval(), (randn(9, 2, 2),))


def test_samples_of_a_vmap_forget_each_for_itself() -> None:
    layer, xs = bounded(forget="most_read"), randn(3, 12, 2, 2)
    assert_close(torch.vmap(lambda x: layer(x)[0])(xs), torch.stack([layer(x)[0] for x in xs]))


@pytest.mark.skipif(loader.unavailable() is not None, reason="no compiled CPU backend")
def test_the_operation_by_itself_refuses_what_does_not_fit() -> None:
    layer = bounded(forget="most_read", backend="cpu")
    long = bounded(max_memory=None, backend="cpu")(randn(9, 2, 2))[1]
    weights, config = layer._weights(0), layer.config
    for state, sentence in ((long, "microstates must be at most 3; got 9"), (long.recent(2), "reads must be of shape")):
        with pytest.raises(UserError, match=sentence):
            operation.run("cpu", randn(2, 2, 2), None, LayerState.of(state, 0, 9), weights, "lstm", config)
