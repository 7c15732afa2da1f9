"""SABState and Attention: unpacking, detaching, moving, selecting rows, storing, and going on from there exactly."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sab
from tests.comparing import selects_surely
from tests.ops.cases import BACKENDS, DOUBLE, Case, assert_close, cases, make_layer, randn, randomize, run


def ragged_state(cell: str = "lstm", **options: Any) -> tuple[Any, sab.SABState]:
    """A layer and the state after three rows of different length."""
    layer = randomize(make_layer(cell, 2, 3, 2, **{"k_top": 2, "k_att": 1} | options))
    return layer, run(layer, randn(6, 3, 2), lengths=[6, 2, 5])[1]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_it_is_a_tuple_like_torchs(cell: str) -> None:
    _, state = ragged_state(cell)
    parts = (state.h,) if cell == "gru" else (state.h, state.c)
    assert len(state) == len(parts)
    assert all(one is other is state[place] for place, (one, other) in enumerate(zip(state, parts, strict=True)))
    assert state[-1] is parts[-1]
    assert (state.c is None) == (cell == "gru")
    with pytest.raises(IndexError):
        state[2]


def test_its_h_and_c_have_the_memory_and_plain_tensors_start_with_an_empty_one() -> None:
    layer, state = ragged_state()
    output, end = layer(randn(1, 3, 2), tuple(state))
    assert_close(output, layer(randn(1, 3, 2), state)[0])
    assert end.steps.tolist() == [7, 3, 6]
    plain = tuple(part * 1 for part in state)
    output, fresh = layer(randn(1, 3, 2), plain)
    assert_close(output, layer.to_torch()(randn(1, 3, 2), plain)[0])
    assert fresh.steps.tolist() == [1, 1, 1]


def test_what_it_holds() -> None:
    layer, state = ragged_state(k_att=2)
    assert state.steps.tolist() == [6, 2, 5]
    assert state.steps.dtype == torch.int64
    assert state.numbers[0].tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]
    assert state.microstates.shape == (2, 3, 3, 3)
    assert state.keys.shape == (2, 3, 3, 3)
    output = layer(randn(6, 3, 2))[0]
    assert_close(state.microstates[1, 0], output[1::2, 0])


def test_states_can_be_compared_without_an_error() -> None:
    layer, state = ragged_state()
    other = layer(randn(6, 3, 2), lengths=[6, 2, 5])[1]
    assert state == state
    assert isinstance(state == other, bool)
    assert len({state, other}) in (1, 2)


def test_detach_cuts_everything_and_copies_nothing() -> None:
    _, state = ragged_state()
    assert state.h.requires_grad
    assert state.microstates.requires_grad
    detached = state.detach()
    assert isinstance(detached, sab.SABState)
    for name in ("h", "c", "microstates", "keys"):
        before, after = getattr(state, name), getattr(detached, name)
        assert not after.requires_grad
        assert after.data_ptr() == before.data_ptr()
    assert torch.equal(detached.steps, state.steps)
    assert torch.equal(detached.numbers, state.numbers)
    assert state.h.requires_grad


@pytest.mark.parametrize("arguments", [(torch.float32,), ("cpu", torch.float32), (torch.zeros(1),)])
def test_to_another_type_leaves_whole_numbers(arguments: Any) -> None:
    layer, state = ragged_state()
    moved = state.to(*arguments)
    assert isinstance(moved, sab.SABState)
    assert moved.h.dtype == moved.microstates.dtype == moved.keys.dtype == torch.float32
    assert moved.c is not None
    assert moved.c.dtype == torch.float32
    assert moved.numbers.dtype == moved.steps.dtype == torch.int64
    output = layer.float()(randn(3, 3, 2).float(), moved)[0]
    assert_close(output.double(), layer.double()(randn(3, 3, 2), state)[0], tolerance=1e-4)


def test_to_another_device_leaves_steps_on_the_cpu() -> None:
    _, state = ragged_state()
    for moved in (state.to("meta"), state.to(torch.device("meta")), state.to(device="meta")):
        assert moved.h.is_meta
        assert moved.microstates.is_meta
        assert moved.keys.is_meta
        assert moved.numbers.is_meta
        assert moved.steps.device.type == "cpu"


ROWS: list[tuple[Any, list[int]]] = [
    (1, [1]),
    (-1, [2]),
    (slice(1, None), [1, 2]),
    (slice(None), [0, 1, 2]),
    ([2, 0], [2, 0]),
    ((2, 0), [2, 0]),
    (range(2), [0, 1]),
    ([1, 1, 1, 0], [1, 1, 1, 0]),
    ([True, False, True], [0, 2]),
    (torch.tensor([True, False, True]), [0, 2]),
    (torch.tensor([2, 1]), [2, 1]),
    (torch.tensor([2, 1], dtype=torch.int32), [2, 1]),
    (np.array([2, 1]), [2, 1]),
    (torch.tensor(1), [1]),
    (np.int64(1), [1]),
]


@pytest.mark.parametrize(("rows", "expected"), ROWS, ids=[str(rows) for rows, _ in ROWS])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_selected_rows_continue_exactly(cell: str, rows: Any, expected: list[int]) -> None:
    layer, state = ragged_state(cell, incorporate="add_bounded")
    x = randn(5, 3, 2, seed=4)
    assert selects_surely(layer, x, state)
    whole, whole_state = run(layer, x, state)
    selected = state.select(rows)
    assert selected.h.shape == (2, len(expected), 3)
    assert selected.steps.tolist() == [[6, 2, 5][row] for row in expected]
    output, end = run(layer, x[:, expected], selected)
    assert_close(output, whole[:, expected])
    assert_close(end.h, whole_state.h[:, expected])
    assert torch.equal(end.steps, whole_state.steps[expected])


def test_selection_keeps_the_gradient() -> None:
    layer = randomize(make_layer("gru", 2, 3, k_top=2, k_att=1))
    x = randn(4, 2, 2).requires_grad_()
    output = layer(randn(2, 1, 2), layer(x)[1].state.select(1))[0]
    gradient = torch.autograd.grad(output.sum(), x)[0]
    assert gradient[:, 1].any()
    assert not gradient[:, 0].any()


@pytest.mark.parametrize("rows", [3, -4, [0, 3], [True, False], "a", 1.5, [0.5], None])
def test_rows_that_are_not_there(rows: Any) -> None:
    _, state = ragged_state()
    with pytest.raises((IndexError, TypeError)):
        state.select(rows)


@given(cases(), st.integers(0, 6))
def test_recent_keeps_the_latest_of_each_row(case: Case, count: int) -> None:
    state = run(case.layer(), case.x(), lengths=torch.tensor(case.lengths))[1]
    recent = state.recent(count)
    assert recent.numbers.shape[-1] == min(count, state.numbers.shape[-1])
    for layer, row in np.ndindex(*state.numbers.shape[:2]):
        there = {int(number): slot for slot, number in enumerate(state.numbers[layer, row]) if number >= 0}
        kept = {int(number): slot for slot, number in enumerate(recent.numbers[layer, row]) if number >= 0}
        assert list(kept) == sorted(there)[max(len(there) - count, 0) :]
        for number, slot in kept.items():
            assert torch.equal(recent.microstates[layer, row, slot], state.microstates[layer, row, there[number]])
            assert torch.equal(recent.keys[layer, row, slot], state.keys[layer, row, there[number]])


@given(cases(), st.integers(0, 4))
def test_distinct_keeps_the_newest_and_covers_the_others(case: Case, count: int) -> None:
    state = run(case.layer(), case.x(), lengths=torch.tensor(case.lengths))[1]
    distinct = state.distinct(count)
    assert distinct.numbers.shape[-1] == min(count, state.numbers.shape[-1])
    for layer, row in np.ndindex(*state.numbers.shape[:2]):
        numbers = [number for number in state.numbers[layer, row].tolist() if number >= 0]
        kept = [number for number in distinct.numbers[layer, row].tolist() if number >= 0]
        assert kept == sorted(set(kept)), "in the order of age, each once"
        assert set(kept) <= set(numbers)
        assert len(kept) == min(count, len(numbers))
        if not kept:
            continue
        assert kept[-1] == numbers[-1], "the newest stays"
        microstates = state.microstates[layer, row, state.numbers[layer, row] >= 0].detach()
        between = torch.cdist(microstates, microstates)
        radius = between[:, [numbers.index(number) for number in kept]].amin(1).amax()
        every = itertools.combinations(range(len(numbers)), len(kept))
        least = min(between[:, list(chosen)].amin(1).amax() for chosen in every)
        assert radius <= 2 * least + 1e-6


@pytest.mark.parametrize("cls", [sab.SABLSTM, sab.SABGRU])
def test_distinct_keeps_what_stood_out_long_ago(cls: Any) -> None:
    layer = cls(2, 16, k_att=1)
    x = torch.zeros(200, 2)
    x[20], x[60] = torch.tensor([[9.0, -9.0], [-9.0, 9.0]])
    with torch.no_grad():
        output, state = layer(x)
    state = state if isinstance(state, sab.SABState) else state.state
    kept = state.distinct(40)
    assert {20, 60, 199} <= set(kept.numbers[0].tolist())
    assert torch.equal(kept.microstates[0], output[kept.numbers[0]])
    selected = layer(torch.randn(3, 2), kept, return_attention=True)[2].numbers
    assert set(selected.flatten().tolist()) <= {*kept.numbers[0].tolist(), 200, 201}
    with pytest.raises(ValueError, match="count must be a whole number of at least 0; got -1"):
        state.distinct(-1)


def test_a_layer_goes_on_without_what_is_forgotten() -> None:
    layer = randomize(make_layer("lstm", 2, 3, k_top=2, k_att=1))
    state = layer(randn(6, 3, 2), lengths=[6, 2, 5])[1]
    x = randn(4, 3, 2)
    assert_close(layer(x, state.recent(6))[0], layer(x, state)[0])
    numbers = layer(x, state.recent(1), return_attention=True)[2].numbers
    assert set(numbers[0].flatten().tolist()) == {5, 1, 4, -1}
    with pytest.raises(ValueError, match="count must be a whole number of at least 0; got -1"):
        state.recent(-1)


@pytest.mark.parametrize("unbatched", [False, True])
def test_copies_and_pickles_continue_exactly(unbatched: bool) -> None:
    layer, state = ragged_state()
    x = randn(4, 3, 2, seed=2)
    if unbatched:
        state, x = layer(randn(6, 2))[1], x[:, 0]
    expected = layer(x, state)[0]
    state = state.detach()
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), copy.copy(state)):
        assert isinstance(twin, sab.SABState)
        assert torch.equal(layer(x, twin)[0], expected)


def test_torch_save_and_load() -> None:
    """With `torch.load`'s default, which loads no classes but those that were declared safe."""
    layer, state = ragged_state()
    _, _, attention = layer(randn(2, 3, 2), state, return_attention=True)
    file = io.BytesIO()
    torch.save({"state": state.detach(), "attention": attention.map(torch.Tensor.detach)}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(layer(randn(4, 3, 2), loaded["state"])[0], layer(randn(4, 3, 2), state)[0])
    assert torch.equal(loaded["attention"].numbers, attention.numbers)


def test_a_plain_layer_keeps_no_memory() -> None:
    layer = make_layer("gru", 2, 3, k_top=0, k_att=1)
    state = layer(randn(6, 2, 2))[1].state
    assert state.microstates.shape == (1, 2, 0, 3)
    assert state.keys.shape[:3] == (1, 2, 0)
    assert state.microstates.dtype == DOUBLE
    assert layer(randn(6, 2, 2), state, return_attention=True)[2].numbers.shape == (6, 2, 0)


@pytest.mark.parametrize(
    ("change", "scorer", "k_att"),
    [("steps", "mlp", 3), ("seen", "cosine", 2), ("seen without microstates", "affine", 1)],
)
def test_a_hostile_file_does_not_reach_the_loops(change: str, scorer: str, k_att: int) -> None:
    """In a process of its own, which such numbers once ended."""
    program = f"""
import torch, sab
layer = sab.SABLSTM(3, 64, k_top=2, k_att={k_att}, scorer={scorer!r})
x = torch.randn(300, 8, 3)
state = layer(x)[1].detach()
stored = state.__getstate__() | {{"_seen": 2**63 - 2}}
if {change!r} == "steps":
    stored["steps"] = torch.full((8,), 2**63 - 2)
if {change!r} == "seen without microstates":
    stored |= {{name: stored[name][:, :, :0] for name in ("microstates", "keys", "numbers")}}
hostile = object.__new__(sab.SABState)
hostile.__setstate__(stored)
try:
    output, end = layer(x, hostile)
    output.sum().backward()
    print("ran", end.steps[0].item(), bool(output.isfinite().all()))
except ValueError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    refusal = "hx must have steps from 0 to 2147483647; got [9223372036854775806,"
    wanted = refusal if change == "steps" else "ran 600 True"
    assert ran.stdout.startswith(wanted)


class TestMadeWhenAskedFor:
    """What a state holds is made when someone looks, and is then what it was after the call."""

    def layer(self) -> Any:
        return randomize(make_layer("lstm", 2, 3, k_top=2, k_att=1))

    def test_a_change_of_the_output_in_place_is_not_seen(self) -> None:
        layer, x = self.layer(), randn(5, 2, 2)
        expected = layer(x)[1].h.clone()
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                output, state = layer(x)
                output.zero_()
                assert_close(state.h, expected)
                assert state.microstates.all()

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_a_look_without_gradients_does_not_cut_them(self, mode: Any) -> None:
        state = self.layer()(randn(5, 2, 2))[1]
        with mode():
            assert state.h.shape == (1, 2, 3)
        assert state.h.requires_grad
        assert state.microstates.requires_grad

    def test_no_gradient_comes_with_a_late_look(self) -> None:
        with torch.no_grad():
            state = self.layer()(randn(5, 2, 2))[1]
        assert not state.h.requires_grad

    def test_copies_before_a_look(self) -> None:
        layer = self.layer()
        for twin in (copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
            with torch.no_grad():
                state = layer(randn(5, 2, 2))[1]
            assert torch.equal(twin(state).h, state.h)

    def test_what_is_not_there(self) -> None:
        state = self.layer()(randn(5, 2, 2))[1]
        assert not hasattr(state, "hidden")
        assert "microstates=" in repr(state)
        with pytest.raises(dataclasses.FrozenInstanceError):
            state.h = state.c  # type: ignore[misc]

    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    @pytest.mark.parametrize("steps", [1, 5])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_what_went_in_may_be_changed_after_the_call(self, backend: str, steps: int, cell: str) -> None:
        """One step keeps no microstate, so that the new memory is the old one."""
        layer = randomize(make_layer(cell, 2, 3, 2, k_top=2, k_att=2, backend=backend))
        x, lengths = randn(steps, 2, 2), torch.full((2,), steps)
        with torch.no_grad():
            before = run(layer, randn(4, 2, 2, seed=3))[1]
            expected = run(layer, x, before.clone(), lengths=lengths.clone())[1].clone()
            given = before.clone()
            state = run(layer, x, given, lengths=lengths)[1]
            for tensor in (*given, given.microstates, given.keys, given.numbers, given.steps, lengths, x):
                tensor.fill_(7)
        for name in ("h", "microstates", "keys", "numbers", "steps"):
            assert_close(getattr(state, name), getattr(expected, name), name)

    def test_several_threads_look_first(self) -> None:
        layer = self.layer()
        for _ in range(20):
            state, start = layer(randn(50, 4, 2))[1], Barrier(8)

            def look(name: str, state: Any = state, start: Barrier = start) -> Any:
                start.wait()
                return getattr(state, name)

            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(look, ["h", "c", "microstates", "keys"] * 2))
            assert all(one is other for one, other in zip(found[:4], found[4:], strict=True))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("steps", [1, 6])
    def test_steps_that_were_changed_in_place_count(self, backend: str, steps: int) -> None:
        """They say where the chain is cut and what is kept, also while there is no microstate."""
        layer, x = randomize(make_layer("lstm", 2, 3, k_top=2, k_att=3, backend=backend)), randn(5, 2, 2)
        state = layer(randn(steps, 2, 2))[1].detach()
        state.steps.add_(1)
        expected, end = layer(x, dataclasses.replace(state))
        assert_close(layer(x, state)[0], expected)
        assert end.steps.tolist() == [steps + 6] * 2
        assert end.numbers[0, 0, -1] == (steps + 6) // 3 - 1

    @pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
    def test_a_compiled_layer_goes_on_from_one_that_nobody_looked_at(self) -> None:
        torch._dynamo.reset()
        layer, x = self.layer(), randn(5, 2, 2)
        compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x, layer(x)[1])[0], layer(x, layer(x)[1])[0])
