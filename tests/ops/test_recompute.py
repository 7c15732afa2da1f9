"""Recomputation: the same results and gradients as without, from little that is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sab
from sab.errors import UserValueError
from sab.lab.experiments.timing import peak_on_cpu
from sab.ops import operation, recompute
from sab.ops.cpu import loader
from tests.comparing import selects_surely
from tests.ops.cases import BOUNDS, DOUBLE, Case, assert_close, cases, gradients, make_layer, randn, randomize, run

pytestmark = pytest.mark.skipif(loader.unavailable() is not None, reason="there is no CPU engine")


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of three to five steps, which divide nothing evenly."""
    monkeypatch.setattr(recompute, "SHORTEST", 3)
    monkeypatch.setattr(recompute, "LONGEST", 5)


def pair(cell: str, *sizes: int, **options: Any) -> tuple[Any, Any]:
    """A layer and the same with recomputation."""
    both = [make_layer(cell, *sizes, **options, **others) for others in ({}, {"recompute": True})]
    both[1].load_state_dict(randomize(both[0]).state_dict())
    return both[0], both[1]


def everything(layer: Any, pieces: list[Tensor], lengths: Tensor | None = None) -> list[Tensor]:
    """What a layer returns for pieces of a sequence, the last with these lengths, and all gradients of that."""
    pieces, hx, results = [piece.clone().requires_grad_() for piece in pieces], None, []
    torch.manual_seed(3)  # for dropout
    for number, piece in enumerate(pieces):
        output, hx = run(layer, piece, hx, lengths=lengths if number == len(pieces) - 1 else None)
        results.append(output)
    assert hx is not None
    results += [one for one in (hx.h, hx.c, hx.microstates, hx.keys) if one is not None]
    found = gradients([one for one in results if one.requires_grad], [*pieces, *layer.parameters()])
    return [*(one.detach() for one in results), hx.numbers, *found]


def compare(layers: tuple[Any, Any], pieces: list[Tensor], lengths: Tensor | None = None) -> None:
    expected, got = (everything(layer, pieces, lengths) for layer in layers)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_close(one, other, f"number {number}", 1e-9)


@settings(max_examples=80)
@given(case=cases(max_steps=24, backend="cpu", max_memory=BOUNDS), first=st.integers(0, 7), dropout=st.booleans())
def test_results_and_gradients_equal_those_without(case: Case, first: int, dropout: bool) -> None:
    case.options["recurrent_dropout"] = 0.5 * dropout
    layer, again = case.layer(), Case(case.cell, case.sizes, 0, 0, [], case.options | {"recompute": True}).layer()
    again.load_state_dict(layer.state_dict())
    before = [randn(first, case.batch, case.sizes[0], seed=case.seed + 5)] if first > 0 else []
    if not dropout:
        assume(selects_surely(layer, torch.cat([*before, case.x()]), None))
    compare((layer, again), [*before, case.x()], torch.tensor(case.lengths))


@pytest.mark.parametrize("lengths", [None, [40, 1, 17]])
@pytest.mark.parametrize("k_trunc", [None, 4])
@pytest.mark.parametrize("scorer", ["cosine", "affine"])
def test_long_sequences_equal_those_without(scorer: str, k_trunc: int | None, lengths: list[int] | None) -> None:
    layers = pair("lstm", 2, 4, scorer=scorer, k_top=3, k_trunc=k_trunc)
    compare(layers, [randn(40, 3, 2)], None if lengths is None else torch.tensor(lengths))


def test_a_narrow_type_keeps_its_microstates_apart() -> None:
    layers = pair("lstm", 2, 4, k_top=2, dtype=torch.bfloat16)
    x = randn(12, 2, 2).bfloat16()
    expected, got = (everything(layer, [x]) for layer in layers)
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, tolerance=2e-2)


def test_what_is_kept_does_not_grow_with_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "LONGEST", 64)
    monkeypatch.setattr(recompute, "SHORTEST", 64)
    n, batch, steps, kept = 32, 2, 512, []
    for layer in pair("lstm", 3, n, dtype=torch.float32):
        x = randn(steps, batch, 3).float()
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = layer(x)
        users = {one.data_ptr() for one in (x, output, *layer.parameters())}
        kept.append(sum(one.nbytes for place, one in saved.items() if place not in users) / steps / batch)
    every, few = kept
    assert every > 4 * 8 * n  # bytes of a step and row: the gates alone are 4 n numbers
    assert few < 4 * (n / 2 + 10) + 4 * 2 * n / 64 + 16  # a key every second step, the selected, spans' first states


def test_the_peak_of_training_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "LONGEST", 32)
    x, peaks = randn(2048, 4, 3).float(), []
    for layer in pair("lstm", 3, 32, dtype=torch.float32):
        layer(x)[0].sum().backward()
        peaks.append(peak_on_cpu(lambda layer=layer: layer(x)[0].sum().backward()) - 2048 * 4 * 32 * 4)
    assert peaks[1] < 0.2 * peaks[0]


def test_spans_without_a_gradient_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "SHORTEST", 5)
    layer = make_layer("gru", 2, 4, k_top=0, k_trunc=5, recompute=True)
    x = randn(30, 2, 2).requires_grad_()
    output, _ = layer(x)
    runs, forward = [], operation._forward
    monkeypatch.setattr(operation, "_forward", lambda *args: runs.append(args) or forward(*args))
    output[-1].sum().backward()
    assert len(runs) == 1
    assert x.grad is not None
    assert x.grad[:25].abs().max() == 0
    assert x.grad[25:].abs().min() > 0
    output, _ = layer(x)
    assert torch.autograd.grad(0 * output.sum(), layer.weight_hh_l0)[0].abs().max() == 0


def test_a_backward_can_be_run_twice() -> None:
    layer = make_layer("lstm", 2, 4, recompute=True)
    output, _ = layer(randn(12, 2, 2))
    once, twice = (torch.autograd.grad(output.sum(), layer.weight_hh_l0, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)


def test_an_output_that_was_changed_in_place_is_refused() -> None:
    layer = make_layer("lstm", 2, 4, recompute=True)
    output, state = layer(randn(12, 2, 2))
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    with pytest.raises(UserValueError, match="recompute must be False where the output is changed in place"):
        state.microstates  # noqa: B018


def test_other_calls_run_as_without() -> None:
    layer, again = pair("lstm", 2, 4)
    x = randn(12, 2, 2)
    expected, got = layer(x, return_attention=True), again(x, return_attention=True)
    assert_close(got[2].summary, expected[2].summary)
    with torch.no_grad():
        assert_close(again(x)[0], layer(x)[0])
    parameters = [{name: one.detach() for name, one in one.named_parameters()} for one in (layer, again)]

    def loss(weights: dict[str, Tensor], one: Any) -> Tensor:
        return torch.func.functional_call(one, weights, (x,))[0].sum()

    grads = [torch.func.grad(loss)(weights, one) for weights, one in zip(parameters, (layer, again), strict=True)]
    assert_close(grads[1]["weight_hh_l0"], grads[0]["weight_hh_l0"])


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(UserValueError, match="offload must be False where recompute is False"):
        sab.SABLSTM(2, 4, offload=True)
    with pytest.raises(UserValueError, match="recompute must be False where backend is 'reference'"):
        sab.SABLSTM(2, 4, recompute=True, backend="reference")
    layer = make_layer("lstm", 2, 4, recompute=True)
    output, _ = layer(randn(12, 2, 2))
    with pytest.raises(UserValueError, match="recompute must be False for several backwards at once"):
        torch.autograd.grad(output, layer.weight_hh_l0, torch.ones(2, *output.shape).double(), is_grads_batched=True)
    first = torch.autograd.grad(output.square().sum(), layer.weight_hh_l0, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivatives"):
        first.sum().backward()


def test_torch_compile_is_refused() -> None:
    layer = make_layer("lstm", 2, 4, recompute=True)
    with pytest.raises(UserValueError, match=r"recompute must be False under torch\.compile"):
        torch.compile(layer, backend="eager")(randn(12, 2, 2))


def test_offload_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    monkeypatch.setattr(recompute, "_off_device", lambda tensor: moved.append(tensor) or tensor.clone())
    layer, _ = pair("lstm", 2, 4, k_top=2)
    again = make_layer("lstm", 2, 4, k_top=2, recompute=True, offload=True)
    again.load_state_dict(layer.state_dict())
    compare((layer, again), [randn(12, 2, 2), randn(9, 2, 2)])
    assert [one.dtype for one in moved] == [DOUBLE, torch.int32] * 2  # keys and selections


@pytest.mark.parametrize("size", [2, 3])
def test_lists_hold_the_chosen_slots_in_order(size: int) -> None:
    selected = torch.tensor([[[1, -1], [4, 0]], [[5, 1], [0, 3]]])
    is_chosen = recompute.chosen(selected, 4)
    assert is_chosen.tolist() == [[False, True, False, False], [True, False, False, True]]
    lists = recompute.list_of(is_chosen, size).tolist()
    assert lists == ([[0, 1], [0, 3]] if size == 2 else [[0, 1, 2], [0, 1, 3]])


@pytest.mark.parametrize("largest_small", [128, 4])
@pytest.mark.filterwarnings("ignore:overflow encountered in (exp|multiply):RuntimeWarning")
def test_kernels_run_spans_as_whole_sequences(largest_small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from sab.ops.triton import engine

    if not engine.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 must be set before triton is imported")
    monkeypatch.setattr(engine, "LARGEST_SMALL", largest_small)
    layers = pair("lstm", 2, 8, k_top=2, k_trunc=3, backend="triton")
    compare(layers, [randn(5, 2, 2)], torch.tensor([2, 5]))
