"""Every registered part on every backend: equal to the reference, gradients included, or refused in a sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sab
from sab.errors import UserValueError
from sab.layers import SABLayer
from sab.ops import dispatch
from sab.parts import registry
from sab.parts.cells import Cell
from sab.parts.incorporations import Incorporation
from sab.parts.scorers import Scorer, ScorerWeights
from sab.parts.weightings import Weighting
from tests.ops.cases import assert_close, gradients, make_layer, randn, randomize, registries_restored, run

BACKENDS = [name for name in dispatch.BACKENDS if name != "reference"]
OPTIONS = {"scorer": "scorer", "weighting": "weighting", "incorporation": "incorporate"}
"""The layers' option for each kind of part but the cell."""
PARTS = [(kind, name) for kind, parts in registry.PARTS.items() for name in parts]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter


def layer_with(kind: str, name: str, **options: Any) -> Any:
    """A small layer with one part chosen and the other parts as by default."""
    if kind != "cell":
        options[OPTIONS[kind]] = name
    layer = make_layer(name if kind == "cell" else "lstm", 3, 5, k_top=2, k_att=2, k_trunc=3, **options)
    return randomize(layer)


def results(layer: Any, x: Tensor) -> list[Tensor]:
    """What a layer gives for a sequence with two lengths, and the gradients of everything."""
    x = x.clone().requires_grad_()
    output, state, attention = run(layer, x, lengths=torch.tensor([7, 4]), return_attention=True)
    outputs = [output, state.h, *([] if state.c is None else [state.c]), attention.weights, attention.summary]
    return [*outputs, *gradients(outputs, [x, *layer.parameters()])]


@pytest.mark.parametrize("forward", ["sparse", "dense"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_a_backend_equals_the_reference_or_refuses(kind: str, name: str, backend: str, forward: str) -> None:
    if forward == "dense" and kind == "weighting" and not registry.WEIGHTINGS[name].normalises_all:
        pytest.skip("this weighting has no dense forward")
    x = randn(7, 2, 3)
    if forward == "dense" and backend == "triton":
        with pytest.raises(UserValueError, match="'triton' does not: it has the sparse forward only"):
            layer_with(kind, name, backend=backend, forward=forward)(x)
        return
    got = results(layer_with(kind, name, backend=backend, forward=forward), x)
    for index, expected in enumerate(results(layer_with(kind, name, backend="reference", forward=forward), x)):
        assert_close(got[index], expected, f"{kind} {name}, tensor {index}", tolerance=1e-9)


EXTRAS: list[dict[str, Any]] = [{"layer_norm": True}, {"recurrent_dropout": 0.4}]
"""Options of the layers that are no parts, and that a backend takes for every cell or refuses."""


@pytest.mark.parametrize("k_top", [0, 2])
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", registry.CELLS)
def test_a_backend_has_the_cells_other_options_or_refuses(
    cell: str, backend: str, extra: dict[str, Any], k_top: int
) -> None:
    found = []
    for name in (backend, "reference"):
        layer = randomize(make_layer(cell, 3, 5, 2, k_top=k_top, k_trunc=3, bidirectional=True, backend=name, **extra))
        if name == "triton":
            with pytest.raises(UserValueError, match=f"'triton' does not: it has no {next(iter(extra))}"):
                layer(randn(7, 2, 3))
            return
        torch.manual_seed(4)
        found.append(results(layer, randn(7, 2, 3)))
    for index, (got, expected) in enumerate(zip(*found, strict=True)):
        assert_close(got, expected, f"tensor {index}", tolerance=1e-9)


# Parts that a user registers


def sine(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.sin(x_gates + h_gates), None


def distance(weights: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert weights.w_query is not None
    return -(keys - (h @ weights.w_query.t()).unsqueeze(1)).square().mean(-1)


def key(weights: ScorerWeights, microstate: Tensor, number: Tensor) -> Tensor:
    assert weights.w_memory is not None
    return microstate @ weights.w_memory.t()


def halves(scores: Tensor, valid: Tensor) -> Tensor:
    return torch.sigmoid(scores).masked_fill(~valid, 0.0) / 2


def average(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return (h + summary) / 2


USERS: dict[str, tuple[str, Any]] = {
    "cell": ("rnn_sine", Cell(1, False, sine)),
    "scorer": ("distance", Scorer(lambda n, d, _: {"w_memory": (d, n), "w_query": (d, n)}, key, distance)),
    "weighting": ("halves", Weighting(halves, normalises_all=True)),
    "incorporation": ("average", Incorporation(average)),
}


@pytest.fixture(params=list(USERS))
def users(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The kind and the name of a part that has been registered with its reference alone."""
    name, part = USERS[request.param]
    monkeypatch.setitem(registry.PARTS[request.param], name, part)
    return request.param, name


def test_a_users_part_computes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.CELLS, *USERS["cell"])
    layer = sab.SABRNN(3, 5, nonlinearity="sine", bias=False)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        layer.get_parameter("weight_ih_l0").fill_(1.0)
    assert layer(torch.full((1, 1, 3), 0.7))[0].flatten().tolist() == pytest.approx([math.sin(2.1)] * 5)


def test_a_users_scorer_has_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCORERS, *USERS["scorer"])
    layer = sab.SABGRU(3, 4, k_top=2, scorer="distance", attention_size=2)
    attention = {name: p for name, p in layer.named_parameters() if name.startswith("attn")}
    assert attention.keys() == {"attn_w_memory_l0", "attn_w_query_l0"}
    assert all(0 < p.abs().max() <= 0.5 for p in attention.values())
    assert layer(torch.randn(1, 2, 3))[1].state.keys.shape == (1, 2, 0, 2)


def test_a_users_part_goes_on_from_a_state_and_is_traced(users: tuple[str, str]) -> None:
    layer, x = layer_with(*users), randn(9, 2, 3)
    first, state = layer(x[:5])
    assert_close(torch.cat([first, layer(x[5:], state)[0]]), layer(x)[0])
    assert sab.trace(layer, x).numbers.max() >= 0


def test_a_layer_for_a_users_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sine(SABLayer):
        cell = "rnn_sine"

    monkeypatch.setitem(registry.CELLS, *USERS["cell"])
    assert Sine(3, 4)(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)
    with pytest.raises(TypeError, match=r"torch\.nn must have a layer with the cell 'rnn_sine' for this; it has none"):
        Sine(3, 4).to_torch()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_users_part_is_refused_elsewhere(users: tuple[str, str], backend: str) -> None:
    kind, name = users
    with pytest.raises(UserValueError, match=f"{backend!r} does not: it does not have the {kind} {name!r}"):
        layer_with(kind, name, backend=backend)(randn(7, 2, 3))


def test_auto_passes_over_what_lacks_a_users_part(users: tuple[str, str]) -> None:
    layer, x = layer_with(*users, backend="auto"), randn(7, 2, 3)
    assert layer.backend_for(x) == "reference"
    for got, expected in zip(results(layer, x), results(layer_with(*users, backend="reference"), x), strict=True):
        assert torch.equal(got, expected)


def test_a_part_of_no_registry_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="incorporate must be one of add, concat, add_bounded, gate; got 'average'"):
        sab.SABConfig(incorporate="average")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_part_took_over_from_another_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `softmax` would be computed in the name of the other weighting."""
    monkeypatch.setitem(registry.WEIGHTINGS, "mine", registry.WEIGHTINGS["softmax"]._replace(weigh=halves))
    with pytest.raises(UserValueError, match=f"{backend!r} does not: it does not have the weighting 'mine'"):
        layer_with("weighting", "mine", backend=backend)(randn(7, 2, 3))
    layer_with("weighting", "softmax", backend=backend)(randn(7, 2, 3))


def test_a_parameter_that_no_scorer_has() -> None:
    with registries_restored():
        registry.SCORERS["mine"] = registry.SCORERS["dot"]._replace(shapes=lambda n, d, most: {"w_gate": (n,)})
        with pytest.raises(ValueError, match="a parameter of the scorer 'mine' must be one of w_memory, w_query"):
            sab.SABLSTM(2, 3, scorer="mine")
