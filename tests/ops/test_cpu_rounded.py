"""Products of the compiled loops whose factors are rounded to bfloat16, as autocast asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sab.ops.cpu import engine as cpu
from sab.ops.cpu import loader
from tests.ops.cases import CELLS, INCORPORATIONS, SCORERS, gradients, make_layer, randn, randomize

needs_bfloat16 = pytest.mark.skipif(not loader.has_bfloat16(), reason="this processor has no instructions for bfloat16")


class RoundedLinear(torch.autograd.Function):
    """`torch.nn.functional.linear` with the factors of its products, and of those of its backward, in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        outer = rounded(gradient.flatten(0, -2)).t() @ rounded(x.flatten(0, -2))
        return rounded(gradient) @ rounded(weight), outer


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def rounded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = RoundedLinear.apply(x, weight)  # pyright: ignore[reportAssignmentType]
    return product if bias is None else product + bias


def results(layer: Any, x: Tensor) -> list[Tensor]:
    """The output and the gradients of a pass in two pieces."""
    output, state = layer(x[:5])
    again, _ = layer(x[5:], state)
    leaves = list(layer.parameters())
    return [output, again, *gradients([output.double(), again.double()], leaves)]


def error(one: Tensor, other: Tensor) -> float:
    """Relative, but for gradients that are nothing but rounding."""
    return ((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-3)).item()


@needs_bfloat16
@pytest.mark.parametrize("size", [1, 2, 15, 33, 50])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("shares", [False, True])
def test_products_are_those_of_rounded_factors(
    cell: str, size: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All selected, so that rounding selects nothing else; sizes that fill no panel and no pair."""
    if shares:
        monkeypatch.setattr(cpu, "LARGEST_CACHED", 0)
        monkeypatch.setattr(cpu, "LARGEST_WITH_OWN_ROWS", 0)
    options: dict[str, Any] = {"k_top": 20, "k_att": 1, "dtype": torch.float32}
    layers = {
        backend: randomize(make_layer(cell, 3, size, **options, backend=backend), scale=1 / size**0.5)
        for backend in ("cpu", "reference")
    }
    x = randn(9, 7, 3).float()
    exact = results(layers["reference"], x)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(layers["cpu"], x)
    monkeypatch.setattr(functional, "linear", rounded_linear)
    expected = results(layers["reference"], x)
    for one, other, unrounded in zip(found, expected, exact, strict=True):
        assert one.dtype == torch.float32
        assert error(one, other) <= 0.2 * error(other, unrounded) + 2e-5, (error(one, other), error(other, unrounded))


@needs_bfloat16
@pytest.mark.parametrize("incorporate", INCORPORATIONS)
@pytest.mark.parametrize("scorer", SCORERS)
def test_every_part_is_within_rounding(scorer: str, incorporate: str) -> None:
    options: dict[str, Any] = {"scorer": scorer, "incorporate": incorporate, "k_top": 20, "k_att": 1, "k_trunc": 3}
    layer = randomize(make_layer("lstm", 3, 24, **options, weighting="softmax", dtype=torch.float32), scale=0.2)
    x = randn(9, 7, 3).float()
    exact = results(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(layer, x)
    assert not torch.equal(found[0], exact[0])
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-4


@needs_bfloat16
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 50, 3), (64, 10, 513), (130, 241, 300)])
def test_gradients_of_weights_are_products_of_rounded_factors(m: int, n: int, k: int) -> None:
    left, right = randn(k, m + 3).float()[:, :m], randn(k, n, seed=2).float()
    found = torch.full((m, n), float("nan"))
    sizes = m, n, k, torch.get_num_threads()
    run = cpu.function("outer", torch.float32)
    run(left.data_ptr(), left.stride(0), right.data_ptr(), found.data_ptr(), *sizes, True)
    assert error(found, rounded(left).double().t() @ rounded(right).double()) < 1e-6


@needs_bfloat16
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_what_is_not_finite_is_so_in_bfloat16(value: float) -> None:
    """3.4e38 is beyond the largest number in bfloat16, to which it is rounded as to infinity."""
    layer = make_layer("rnn_tanh", 2, 40, dtype=torch.float32, backend="cpu")
    x = torch.ones(3, 2, 2)
    with torch.no_grad():
        layer.weight_hh_l0[0, 0] = value
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)[0]
        layer.weight_hh_l0[0, 0] = rounded(torch.tensor(value))
        expected = layer(x)[0]
    assert expected.isnan().any()
    assert torch.equal(found.isnan(), expected.isnan())


@needs_bfloat16
@pytest.mark.parametrize("way", ["recompute", "compiled", "called outside"])
def test_each_way_of_training_rounds_alike(way: str) -> None:
    """Products of the backward are rounded as those of the forward, wherever autocast ends."""
    options: dict[str, Any] = {"dtype": torch.float32, "backend": "cpu", "k_top": 5}
    layer = make_layer("lstm", 4, 20, **options)
    other = make_layer("lstm", 4, 20, **options, recompute=way == "recompute")
    other.load_state_dict(layer.state_dict())
    call = torch.compile(other, backend="aot_eager", fullgraph=True) if way == "compiled" else other
    found = []
    for one, inside in ((layer, True), (call, way != "called outside")):
        x = randn(300 if way == "recompute" else 30, 3, 4).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = one(x)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            output.square().sum().backward()
        assert x.grad is not None
        found.append([output, x.grad, *(p.grad for p in (layer if one is layer else other).parameters())])
    for one, two in zip(*found, strict=True):
        assert error(one, two) < 1e-4


def test_what_was_recorded_where_it_could_round_runs_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an exported program does."""
    layer, x = make_layer("lstm", 3, 20, dtype=torch.float32), randn(9, 4, 3).float()
    expected = layer(x)[0]
    monkeypatch.setattr(cpu, "can_round", lambda: False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x)[0], expected)


def test_only_autocast_to_bfloat16_rounds() -> None:
    layer = make_layer("lstm", 3, 20, dtype=torch.float32)
    x = randn(9, 4, 3).float()
    expected = layer(x)[0]
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(layer(x)[0], expected)
    double = make_layer("lstm", 3, 20)
    exact = double(x.double())[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x)[0], expected) != loader.has_bfloat16()
        assert torch.equal(double(x.double())[0], exact)
