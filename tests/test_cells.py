"""The cells: each step is the layer's, whatever is done with the states between the steps."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sab
from sab.config import FORGETS
from sab.errors import UserError
from sab.ops.cpu import loader
from sab.ops.cpu.stream import Streamed
from sab.parts import registry
from sab.state import SABHidden, SABState, memory_of

CELLS: list[Any] = [sab.SABLSTMCell, sab.SABGRUCell, sab.SABRNNCell]
needs_compiler = pytest.mark.skipif(loader.unavailable() is not None, reason="no compiled CPU backend")


def _cell(cls: Any = sab.SABLSTMCell, **options: Any) -> Any:
    """A small cell in float64 that reads from its memory as much as from its input."""
    return cls(4, 6, dtype=torch.float64, **{"k_top": 3, "initial_gate": 0.5, **options})


def _x(*sizes: int) -> Tensor:
    return torch.randn(*sizes, 4, dtype=torch.float64)


def _h(state: Any) -> Tensor:
    return state.h if isinstance(state, SABState) else state


def _memory(state: Any) -> Any:
    return (state if isinstance(state, SABState) else state.state).__dict__["_memory"]


def _run(cell: Any, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    outputs = []
    for step in x:
        state = cell(step, state)
        outputs.append(_h(state))
    return torch.stack([output.as_subclass(Tensor) for output in outputs]), state


def _same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def _same_state(cell_state: Any, layer_state: Any) -> None:
    """A cell's state and a layer's are equal but for the dimension of layers."""
    of_cell, of_layer = (one if isinstance(one, SABState) else one.state for one in (cell_state, layer_state))
    for name in ("h", "c", "microstates", "keys", "numbers", "reads"):
        one, other = getattr(of_cell, name), getattr(of_layer, name)
        if other is None:
            assert one is None
        else:
            _same(one.as_subclass(Tensor), other.as_subclass(Tensor).squeeze(0))
    assert of_cell.steps.tolist() == of_layer.steps.tolist()


@pytest.mark.parametrize("cls", CELLS)
def test_its_parameters_are_those_of_torch(cls: Any) -> None:
    torch.manual_seed(5)
    ours = cls(4, 6, input_start="torch")
    torch.manual_seed(5)
    theirs = cls.torch_class(4, 6)
    names = [name for name, _ in theirs.named_parameters()]
    assert [name for name, _ in ours.named_parameters()][:4] == names
    for name in names:
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name))
    assert {"attn_w_memory", "attn_w_query", "incorporate_weight"} <= dict(ours.named_parameters()).keys()
    assert not any("_l0" in name for name in ours.state_dict())


@pytest.mark.parametrize("cls", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_without_a_memory_it_is_torchs_cell(cls: Any, bias: bool) -> None:
    theirs = cls.torch_class(4, 6, bias=bias, dtype=torch.float64)
    ours = cls.from_torch(theirs, k_top=0, k_trunc=None)
    x = _x(5, 3)
    for steps in (x, x[:, 0]):
        expected, state = [], None
        for step in steps:
            state = theirs(step, state)
            expected.append(state[0] if isinstance(state, tuple) else state)
        with torch.no_grad():
            _same(_run(ours, steps)[0], torch.stack(expected))
        outputs, _ = _run(ours, steps)
        _same(outputs, torch.stack(expected))
    torch.stack(expected).sum().backward()
    outputs.sum().backward()
    for name, parameter in theirs.named_parameters():
        _same(ours.get_parameter(name).grad, parameter.grad)
    assert isinstance(ours.to_torch(), cls.torch_class)
    assert torch.equal(ours.to_torch().weight_hh, theirs.weight_hh)


@pytest.mark.parametrize("cls", CELLS)
@pytest.mark.parametrize("form", ["batched", "unbatched"])
def test_steps_are_those_of_the_layer(cls: Any, form: str) -> None:
    cell = _cell(cls, k_trunc=4)
    layer, x = cell.to_layer(), _x(25, 3) if form == "batched" else _x(25)
    with torch.no_grad():
        expected, layer_state = layer(x)
        outputs, state = _run(cell, x)
    _same(outputs, expected)
    _same_state(state, layer_state)
    assert type(state) is (SABState if cls is sab.SABLSTMCell else SABHidden)
    if cls is sab.SABLSTMCell:
        h, c = state
        assert h.shape == c.shape == outputs.shape[1:]


@pytest.mark.parametrize("cls", CELLS)
def test_gradients_are_those_of_the_layer(cls: Any) -> None:
    cell = _cell(cls, k_trunc=4)
    layer = cell.to_layer()
    x = _x(25, 3).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    weights = torch.randn(25, 3, 6, dtype=torch.float64)
    (layer(twin)[0] * weights).sum().backward()
    (_run(cell, x)[0] * weights).sum().backward()
    _same(x.grad, twin.grad)
    for name, parameter in cell.named_parameters():
        _same(parameter.grad, layer.get_parameter(name + "_l0").grad)


def product(microstates: Tensor, h: Tensor) -> Tensor:
    """A scorer of the user's own."""
    return (microstates * h.unsqueeze(1)).sum(-1)


OPTIONS = [
    *({"scorer": name} for name in registry.SCORERS),
    *({"weighting": name} for name in registry.WEIGHTINGS),
    *({"incorporate": name, "initial_gate": None} for name in registry.INCORPORATIONS),
    {"forward": "dense"},
    {"k_top": 0, "initial_gate": None},
    {"k_top": 1},
    {"k_top": 10**9},
    {"k_att": 1},
    {"k_att": 7},
    {"k_trunc": None},
    {"attention_size": 5},
    {"scorer": "affine", "max_microstates": 4},
    {"scorer": product},
    {"bias": False},
    {"backend": "reference"},
    {"layer_norm": True},
    *({"max_memory": 4, "forget": name, "k_att": 1} for name in FORGETS),
    *({"max_memory": 3, "forget": name, "scorer": "affine", "k_top": 2, "k_att": 1} for name in FORGETS),
    {"max_memory": 2, "forget": "most_read", "forward": "dense"},
]


def named(options: dict[str, Any]) -> str:
    """Options as a test's name, the same in every process."""
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "default"


@pytest.mark.parametrize("options", OPTIONS, ids=named)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_option_is_as_in_the_layer(options: dict[str, Any], batch: int) -> None:
    cell = _cell(sab.SABGRUCell, **options)
    layer, x = cell.to_layer(), _x(20, batch)
    with torch.no_grad():
        expected, layer_state = layer(x)
        outputs, state = _run(cell, x)
        of_layer, stepped_state = [], None
        for step in x:
            output, stepped_state = layer(step.unsqueeze(0), stepped_state)
            of_layer.append(output)
    _same(outputs, expected)
    _same(torch.cat(of_layer), expected)
    _same_state(state, layer_state)


@pytest.mark.parametrize("n", [1, 3, 16, 33, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_size(n: int, dtype: torch.dtype) -> None:
    cell = sab.SABLSTMCell(n + 2, n, dtype=dtype)
    layer = cell.to_layer()
    for batch in (1, 2, 3, 9):
        x = torch.randn(12, batch, n + 2, dtype=dtype)
        with torch.no_grad():
            outputs, _ = _run(cell, x)
            expected, _ = layer(x)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-11)


@needs_compiler
@pytest.mark.parametrize("cls", CELLS)
def test_a_stream_shares_its_memory(cls: Any) -> None:
    cell = _cell(cls)
    layer = cell.to_layer()
    with torch.no_grad():
        _, state = _run(cell, _x(40, 2))
        later = cell(_x(2), state)
        assert _memory(later).buffer is _memory(state).buffer is not None
        _, state = layer(_x(1, 2))
        _, later = layer(_x(1, 2), state)
        assert _memory(later).buffer is _memory(state).buffer is not None
        assert isinstance(_memory(layer(_x(1, 2).transpose(0, 1), None)[1]), Streamed) is False  # two steps


@needs_compiler
def test_the_layers_forms_of_a_step() -> None:
    cell = _cell()
    with torch.no_grad():
        for batch_first in (False, True):
            layer = sab.SABLSTM(4, 6, batch_first=batch_first, dtype=torch.float64)
            for x in (_x(6, 3), _x(6)):
                whole = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
                expected, end = layer(whole)
                outputs: list[Tensor] = []
                state: Any = None
                for step in x.split(1):
                    output, state = layer(step.transpose(0, 1) if batch_first and x.dim() == 3 else step, state)
                    assert isinstance(_memory(state), Streamed)
                    outputs.append(output)
                _same(torch.cat(outputs, dim=1 if batch_first and x.dim() == 3 else 0), expected)
                _same(state.microstates, end.microstates)
                _same(state.h.as_subclass(Tensor), end.h.as_subclass(Tensor))
                before = state.h.clone()
                outputs[-1].zero_()  # the caller's own
                assert torch.equal(state.h, before)
    assert cell.training


@st.composite
def _trees(draw: st.DrawFn) -> list[tuple[int, str]]:
    """From which earlier state each state goes on, and what is done to it before."""
    size = draw(st.integers(2, 24))
    kinds = st.sampled_from(["", "", "", "look", "detach", "clone", "pickle", "layer", "grad", "tuple"])
    return [(draw(st.integers(max(-1, index - 4), index - 1)), draw(kinds)) for index in range(size)]


BOUNDS: list[dict[str, Any]] = [{}, *({"max_memory": 3, "k_top": 2, "forget": name} for name in FORGETS)]


@given(
    tree=_trees(),
    cls=st.sampled_from(CELLS),
    k_att=st.integers(1, 3),
    batch=st.sampled_from([None, 1, 3]),
    bound=st.sampled_from(BOUNDS),
)
def test_a_tree_of_continuations(
    tree: list[tuple[int, str]], cls: Any, k_att: int, batch: int | None, bound: dict[str, Any]
) -> None:
    torch.manual_seed(len(tree))
    cell = _cell(cls, k_att=k_att, **bound)
    layer = cell.to_layer()
    x = _x(len(tree), *([] if batch is None else [batch]))
    states: list[Any] = []
    paths: list[list[int]] = []
    for index, (parent, kind) in enumerate(tree):
        state = None if parent < 0 else states[parent]
        if state is not None:
            if kind == "look":
                kept = len(paths[parent]) // k_att
                assert _all_of(state)[-2].shape[-1] == min(kept, bound.get("max_memory", kept))
            elif kind == "detach":
                state = state.detach()
            elif kind == "clone":
                state = state.clone()
            elif kind == "pickle":
                state = pickle.loads(pickle.dumps(state))
            elif kind == "tuple" and isinstance(state, SABState):
                state = tuple(state)
        with torch.set_grad_enabled(kind == "grad"):
            if kind == "layer":
                states.append(layer(x[index].unsqueeze(0), state)[1])
            else:
                states.append(cell(x[index], state))
        paths.append([*(paths[parent] if parent >= 0 else []), index])
    with torch.no_grad():
        for state, path in zip(states, paths, strict=True):
            output, expected = layer(x[path])
            _same(_h(state).reshape(output[-1].shape).detach(), output[-1])
            whole = expected if isinstance(expected, SABState) else expected.state
            for one, other in zip(_all_of(state), _all_of(whole), strict=True):
                _same(one.detach().reshape(other.shape), other)


def _all_of(state: Any) -> list[Tensor]:
    whole = state if isinstance(state, SABState) else state.state
    parts = whole.h.as_subclass(Tensor), whole.c, whole.reads, whole.microstates, whole.keys, whole.numbers, whole.steps
    return [part for part in parts if part is not None]


@needs_compiler
@pytest.mark.parametrize("forget", FORGETS)
def test_the_memory_of_a_bounded_stream_does_not_grow(forget: str) -> None:
    cell, sizes = _cell(k_att=1, max_memory=20, forget=forget), []
    state: Any = None
    with torch.no_grad():
        for step in range(1, 2001):
            state = cell(_x(2), state)
            if step in (200, 2000):
                memory = _memory(state)
                held = [] if memory.held is None else [part for part in memory.held[:2] if part is not None]
                sizes.append([sum(part.nbytes for part in memory.buffer.parts), sum(part.nbytes for part in held)])
                assert memory.buffer.capacity <= 40
    assert sizes[0] == sizes[1]
    assert state.numbers.shape == (2, 20)


@needs_compiler
@pytest.mark.parametrize("forget", FORGETS)
def test_recent_microstates_of_a_bounded_stream(forget: str) -> None:
    cell = _cell(k_att=1, max_memory=5, forget=forget)
    layer, x, y = cell.to_layer(), _x(30, 2), _x(12, 2)
    with torch.no_grad():
        state, layer_state = _run(cell, x)[1], layer(x)[1]
        assert _memory(state.recent(3)).buffer is _memory(state).buffer is not None
        state, layer_state = _run(cell, y, state.recent(3))[1], layer(y, layer_state.recent(3))[1]
    _same_state(state, layer_state)


@pytest.mark.parametrize("change", ["optimiser", "no_grad", "data", "data_swap", "new_parameter", "load", "functional"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_changed_weight_counts_at_once(change: str, batch: int) -> None:
    cell, x = _cell(), _x(9, batch)
    with torch.no_grad():
        _, state = _run(cell, x[:8])
    weight, new = cell.weight_hh, torch.randn_like(cell.weight_hh)
    if change == "optimiser":
        weight.grad = weight.detach() - new
        torch.optim.SGD([weight], lr=1.0).step()
    elif change == "no_grad":
        with torch.no_grad():
            weight.copy_(new)
    elif change == "data":
        weight.data.copy_(new)
    elif change == "data_swap":
        weight.data = new.clone()
    elif change == "new_parameter":
        cell.weight_hh = nn.Parameter(new.clone())
    elif change == "load":
        cell.load_state_dict({**cell.state_dict(), "weight_hh": new.clone()}, assign=True)
    with torch.no_grad():
        if change == "functional":
            after = torch.func.functional_call(cell, {"weight_hh": new}, (x[8], state))
            cell.weight_hh.copy_(new)
        else:
            after = cell(x[8], state)
        expected = copy.deepcopy(cell).to_layer()(x[8].unsqueeze(0), _of_layer(state))[1]
    _same_state(after, expected)


def _of_layer(state: SABState) -> SABState:
    """A copy of a cell's state as a layer's, made by hand."""
    parts = [None if part is None else part.detach().clone().as_subclass(Tensor)[None] for part in _fields(state)]
    return SABState(*parts, steps=state.steps.clone())  # type: ignore[misc]


def _fields(state: SABState) -> list[Tensor | None]:
    return [state.h, state.c, state.microstates, state.keys, state.numbers]


def test_a_parametrized_weight() -> None:
    cell, x = _cell(), _x(9, 2)

    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    with torch.no_grad():
        halved = copy.deepcopy(cell)
        halved.weight_hh.mul_(0.5)
        expected, _ = _run(halved, x)
        nn.utils.parametrize.register_parametrization(cell, "weight_hh", Half())
        _same(_run(cell, x)[0], expected)
        _same(sab.SABLSTMCell.from_layer(cell.to_layer()).weight_hh, halved.weight_hh)


@pytest.mark.parametrize("cls", CELLS)
@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_recent_microstates_alone(cls: Any, count: int) -> None:
    cell = _cell(cls)
    layer, x, y = cell.to_layer(), _x(19, 3), _x(40, 3)
    with torch.no_grad():
        state, layer_state = _run(cell, x)[1], layer(x)[1]
        for step in y:  # the window slides past the end of its first buffer
            whole, layer_whole = (one if isinstance(one, SABState) else one.state for one in (state, layer_state))
            state, (output, layer_state) = (
                cell(step, whole.recent(count)),
                layer(step.unsqueeze(0), layer_whole.recent(count)),
            )
            _same(_h(state).as_subclass(Tensor), output[0])
        _same_state(state, layer_state)


@needs_compiler
def test_recent_and_detach_copy_nothing() -> None:
    cell = _cell()
    with torch.no_grad():
        _, state = _run(cell, _x(30, 2))
        assert _memory(state.recent(5)).buffer is _memory(state).buffer is not None
        assert state.recent(5).numbers.tolist() == [list(range(10, 15))] * 2
        assert _memory(state.detach()).buffer is _memory(state).buffer is not None


def test_selected_and_compacted_states() -> None:
    cell = _cell(scorer="affine")
    layer, x, y = cell.to_layer(), _x(19, 3), _x(9, 4)
    with torch.no_grad():
        state, layer_state = _run(cell, x)[1], layer(x)[1]
        compact = cell.compact(state)
        assert compact.numbers.shape == (3, 3)
        _same_state(compact, layer.compact(layer_state))
        for rows in ([2, 0, 0, 1], torch.tensor([0, 1, 1, 2])):
            expected, end = layer(y, layer_state.select(rows))
            outputs, after = _run(cell, y, compact.select(rows))
            _same(outputs, expected)
            _same_state(cell.compact(after), layer.compact(end))
        _same_state(state.select(1), layer_state.select(1))
        _same_state(state.select(slice(0, 2)), layer_state.select(slice(0, 2)))
        _same_state(state.select(torch.tensor([True, False, True])), layer_state.select([0, 2]))


@pytest.mark.parametrize("cls", CELLS)
def test_rows_that_have_seen_different_numbers_of_steps(cls: Any) -> None:
    cell = _cell(cls)
    layer, x, y = cell.to_layer(), _x(9, 3), _x(7, 3)
    with torch.no_grad():
        _, begun = layer(x, lengths=torch.tensor([9, 2, 5]))
        expected, end = layer(y, begun)
        outputs, state = _run(cell, y, begun)
    _same(outputs, expected)
    _same_state(state, end)


def test_states_of_the_layer_and_back() -> None:
    cell = _cell()
    layer, x = cell.to_layer(), _x(30, 2)
    with torch.no_grad():
        expected, end = layer(x)
        _, state = layer(x[:10])
        outputs, state = _run(cell, x[10:20], state)
        _same(outputs, expected[10:20])
        output, state = layer(x[20:], state)
        _same(output, expected[20:])
        _same(state.microstates, end.microstates)
        _, begun = layer(x[:10, 0])
        _same(_run(cell, x[10:20, 0], begun)[0], expected[10:20, 0])


def test_a_state_is_the_callers_own() -> None:
    """What is seen of a memory may be changed in place; it changes what goes on from there, and nothing else."""
    cell = _cell()
    with torch.no_grad():
        _, before = _run(cell, _x(20, 2))
        untouched = before.clone()
        x = _x(2)
        after = cell(x, before)
        kept = after.clone()
        before.microstates.zero_()
        before.c.zero_()
        _same_state(after, _of_layer(kept))
        changed = cell(x, before)
        untouched.microstates.zero_()
        untouched.c.zero_()
        _same_state(changed, _of_layer(cell(x, untouched)))
        assert not torch.equal(changed.h, after.h)


def test_copies_and_files_of_a_state_and_of_a_cell() -> None:
    cell, x = _cell(), _x(8, 2)
    with torch.no_grad():
        _, state = _run(cell, x[:7])
        expected = cell(x[7], state)
        stored = io.BytesIO()
        torch.save(state, stored)
        stored.seek(0)
        for twin in (copy.deepcopy(state), copy.copy(state), pickle.loads(pickle.dumps(state)), torch.load(stored)):
            _same_state(cell(x[7], twin), _of_layer(expected))
        for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
            _same_state(other(x[7], state), _of_layer(expected))
            other.weight_hh.mul_(2)  # a copy reads its own weights
            assert not torch.equal(other(x[7], state).h, expected.h)


def test_threads_that_go_on_from_one_state() -> None:
    cell, x = _cell(k_att=1), _x(16, 50, 2)
    layer = cell.to_layer()
    with torch.no_grad():
        _, begun = _run(cell, x[0, :10])
        _, layer_begun = layer(x[0, :10])

    def go_on(index: int) -> Tensor:
        with torch.no_grad():
            return _run(cell, x[index], begun)[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(go_on, range(len(x))))
    for index, outputs in enumerate(found):
        with torch.no_grad():
            _same(outputs, layer(x[index], layer_begun)[0])


def test_modes_may_change_between_steps() -> None:
    cell = _cell()
    layer, x = cell.to_layer(), _x(24, 2)
    with torch.no_grad():
        expected, _ = layer(x)
    state: Any = None
    outputs = []
    modes = itertools.cycle([torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad])
    for step, mode in zip(x, modes, strict=False):
        with mode():
            if mode is torch.enable_grad and state is not None:
                state = state.clone()  # of inference tensors
            state = cell(step, state)
        outputs.append(state.h.detach().as_subclass(Tensor))
    _same(torch.stack(outputs), expected)
    assert state.h.requires_grad
    state.h.sum().backward()
    assert cell.weight_hh.grad is not None


def test_frozen_weights_and_an_input_with_a_gradient() -> None:
    cell, x = _cell().requires_grad_(False), _x(10, 2)
    outputs, state = _run(cell, x)  # nothing requires a gradient
    assert not outputs.requires_grad
    last = _x(2).requires_grad_()
    cell(last, state).h.sum().backward()
    assert last.grad is not None
    assert last.grad.abs().sum() > 0
    h = state.h.clone().requires_grad_()
    cell(x[0], (h, state.c)).h.sum().backward()
    assert h.grad is not None


@needs_compiler
def test_what_is_more_than_numbers_goes_the_ordinary_way() -> None:
    """Tangents, records of operations, other types: the native step reads memory, and would lose them."""
    cell, x = _cell(), _x(2)
    with torch.no_grad():
        _, state = _run(cell, _x(3, 2))
        assert cell._stream(x, state) is not None
        with torch.autograd.forward_ad.dual_level():
            assert cell._stream(x, state) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert cell._stream(x, state) is None
        with FlopCounterMode(display=False):
            assert cell._stream(x, state) is None
        assert torch.vmap(lambda one: torch.tensor(cell._stream(one, None) is None))(_x(2, 2)).all()
        assert (
            cell._stream(torch.view_as_complex(_x(2, 2).reshape(2, 4, 2)).conj().imag.contiguous(), state) is not None
        )
        negative = torch.view_as_complex(_x(2, 2).reshape(2, 4, 2)).conj().imag
        assert negative.is_neg()
        _same(
            _h(cell(negative, state)).as_subclass(Tensor), _h(cell(negative.resolve_neg(), state)).as_subclass(Tensor)
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_types_go_the_ordinary_way(dtype: torch.dtype) -> None:
    cell = sab.SABGRUCell(4, 6, dtype=dtype)
    layer, x = cell.to_layer(), torch.randn(6, 2, 4, dtype=dtype)
    with torch.no_grad():
        # Computed in float32; steps round their state to the type, a whole sequence only its end.
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(_run(cell, x)[0], layer(x)[0], atol=rounding, rtol=rounding)


def test_growing_states_are_warned_of() -> None:
    cell = sab.SABGRUCell(4, 6, incorporate="add", k_att=1)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(3)
        state = cell(torch.randn(1, 4))
        x = torch.randn(200, 1, 4)
        with pytest.warns(UserWarning, match="have left") as caught:
            _run(cell, x, state)
    assert caught[0].filename == __file__


def test_nan_is_refused_and_the_stream_goes_on() -> None:
    cell, x = _cell(), _x(9, 2)
    with torch.no_grad():
        expected, _ = _run(cell, x)
        _, state = _run(cell, x[:8])
        with pytest.raises(UserError, match=r"^input must be free of NaN; got NaN at step 0 of row 1\.$"):
            cell(torch.full_like(x[0], torch.nan).where(torch.tensor([[False], [True]]), x[0]), state)
        _same(cell(x[8], state).h.as_subclass(Tensor), expected[8])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1.0],), "input must be a tensor; got list."),
        (
            (torch.zeros(1, 2, 4),),
            "input must be of shape [B, input_size] or [input_size] with input_size 4; got [1, 2, 4].",
        ),
        ((torch.zeros(2, 5),), "input must be of shape [B, input_size] or [input_size] with input_size 4; got [2, 5]."),
        (
            (torch.zeros(2, 4, dtype=torch.float64),),
            "input must be of the layer's type torch.float32; got torch.float64.",
        ),
        ((torch.zeros(2, 4), torch.zeros(2, 6)), "hx must be (h, c) or a SABState; got 1 tensor."),
        ((torch.zeros(2, 4), 3), "hx must be (h, c) or a SABState; got int."),
        ((torch.zeros(2, 4), (torch.zeros(3, 6),) * 2), "hx must have h of shape [2, 6]; got [3, 6]."),
        ((torch.zeros(4), (torch.zeros(2, 6),) * 2), "hx must have h of shape [6]; got [2, 6]."),
        ((torch.zeros(2, 4), (torch.zeros(2, 6), torch.zeros(2, 5))), "hx must have c of shape [2, 6]; got [2, 5]."),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], sentence: str) -> None:
    cell = sab.SABLSTMCell(4, 6)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(UserError) as raised:
            cell(*arguments)
        assert str(raised.value) == sentence


def test_a_state_of_another_batch_or_cell_is_refused() -> None:
    cell = sab.SABLSTMCell(4, 6)
    with torch.no_grad():
        _, state = _run(cell, torch.randn(9, 2, 4))
        with pytest.raises(UserError, match=r"hx must have h of shape \[3, 6\]; got \[2, 6\]"):
            cell(torch.randn(3, 4), state)
        for other in (sab.SABLSTMCell(4, 7), sab.SABLSTMCell(4, 6, attention_size=5)):
            with pytest.raises(UserError, match="hx must have"):
                other(torch.randn(2, 4), state)
        with pytest.raises(UserError, match="hx must have c"):
            sab.SABGRUCell(4, 6)(torch.randn(2, 4), state)


def test_mistakes_of_construction() -> None:
    layer = sab.SABLSTM(4, 6, num_layers=2)
    assert sab.SABLSTMCell.from_layer(layer, 1).input_size == 6
    for make, sentence in (
        (lambda: sab.SABLSTMCell.from_layer(sab.SABGRU(4, 6)), "layer must be a SABLSTM; got SABGRU."),
        (lambda: sab.SABLSTMCell.from_layer(layer, 2), "index must be a whole number of at least 0"),
        (lambda: sab.SABLSTMCell.from_layer(sab.SABLSTM(4, 6, bidirectional=True)), "layer must have one direction"),
        (lambda: sab.SABGRUCell.from_torch(nn.LSTMCell(4, 6)), "module must be a torch.nn.GRUCell; got LSTMCell."),
        (lambda: sab.SABRNNCell(4, 6, nonlinearity="sin"), "nonlinearity must be one of tanh, relu"),
        (lambda: sab.SABLSTMCell(4, 6, recurrent_dropout=0.5), "an option of a cell must be one of k_top, k_att"),
        (
            lambda: sab.SABLSTMCell.from_torch(nn.LSTMCell(4, 6), layer_norm=True),
            "layer_norm must be False in from_torch",
        ),
        (lambda: sab.SABLSTMCell(4, 6, layer_norm=True).to_torch(), "layer_norm must be False for to_torch"),
        (lambda: sab.SABLSTMCell(4, 6, k_top=-1), "k_top must be a whole number of at least 0"),
        (lambda: sab.trace(sab.SABLSTMCell(4, 6), torch.randn(3, 4)), "module must be or have one SAB layer"),
    ):
        with pytest.raises(UserError) as raised:
            make()
        assert str(raised.value).startswith(sentence)


def test_a_stack_of_cells_is_the_stacked_layer() -> None:
    layer = sab.SABGRU(4, 6, num_layers=2, dtype=torch.float64)
    cells, x = [sab.SABGRUCell.from_layer(layer, index) for index in range(2)], _x(20, 3)
    with torch.no_grad():
        expected, _ = layer(x)
        states: list[Any] = [None, None]
        for step, output in zip(x, expected, strict=True):
            given = step
            for index, cell in enumerate(cells):
                states[index] = cell(given, states[index])
                given = states[index]
            _same(given.as_subclass(Tensor), output)


def test_a_relu_cell_and_a_scorer_that_is_a_module() -> None:
    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.float64))

        def forward(self, microstates: Tensor, h: Tensor) -> Tensor:
            return (microstates * self.weight * h.unsqueeze(1)).sum(-1)

    layer = sab.SABRNN(4, 6, nonlinearity="relu", scorer=Scorer(), dtype=torch.float64)
    cell, x = sab.SABRNNCell.from_layer(layer), _x(12, 2)
    assert cell.nonlinearity == "relu"
    assert cell.scorer is not layer.scorer
    with torch.no_grad():
        _same(_run(cell, x)[0], layer(x)[0])
        _same(_run(cell, x)[0], cell.to_layer()(x)[0])


def test_a_stream_goes_on_from_a_whole_sequence() -> None:
    """Also with several rows, whose microstates the operation leaves in another order."""
    layer = sab.SABGRU(4, 6, k_att=1)
    with torch.no_grad():
        _, h = layer(torch.randn(9, 3, 4))
        _, h = layer(torch.randn(1, 3, 4), h)
        assert type(memory_of(h)) is Streamed


def test_a_step_has_the_options_that_a_whole_sequence_has() -> None:
    layer, x = sab.SABGRU(4, 6, k_top=3, k_att=1, scorer="dot", dtype=torch.float64), _x(9, 2)
    with torch.no_grad():
        h = None
        for step in x:
            _, h = layer(step[None], h)
        layer.config = replace(layer.config, k_top=1)
        expected = layer(x[:2], h)[0][:1]
        _same(layer(x[:1], h)[0], expected)


@pytest.mark.parametrize("scorer", ["cosine", "mlp", "affine"])
def test_a_step_refuses_weights_of_another_size(scorer: str) -> None:
    """The native step would read past their ends."""
    layer, x = sab.SABGRU(4, 6, scorer=scorer, max_microstates=3, dtype=torch.float64), _x(1, 2)
    for name, parameter in layer.named_parameters():
        if scorer == "affine" and name.startswith("attn_bias"):
            continue  # it may have any length
        short = parameter.detach()[: len(parameter) - 1].clone()
        with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"must be of shape|size"):
            torch.func.functional_call(layer, {name: short}, (x, layer(_x(8, 2))[1]))
