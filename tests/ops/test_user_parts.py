"""Parts that a user registers at run time work through the layers on the reference backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sab
from sab.layers import SABLayer
from sab.parts.cells import Cell
from sab.parts.incorporations import Incorporation
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS, WEIGHTINGS
from sab.parts.scorers import Scorer, ScorerWeights
from sab.parts.weightings import Weighting
from tests.ops.cases import DOUBLE, randn


def sine(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    a, b = (x_gates + h_gates).chunk(2, dim=-1)
    return torch.sin(a) * torch.sigmoid(b), None


def cosine_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.v is not None
    return (keys @ F.normalize(h, dim=-1).unsqueeze(-1)).squeeze(-1) * w.v


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CELLS, "rnn_sine", Cell(2, False, sine))
    keys = Scorer(lambda n, d, most: {"v": (1,)}, lambda w, m, number: F.normalize(m, dim=-1), cosine_score)
    monkeypatch.setitem(SCORERS, "cosine", keys)
    monkeypatch.setitem(WEIGHTINGS, "equal", Weighting(lambda scores, valid: valid / valid.sum(-1, True), False))
    monkeypatch.setitem(INCORPORATIONS, "halve", Incorporation(lambda h, s, weight, bias: (h + s) / 2))


OPTIONS: list[dict[str, Any]] = [{"scorer": "cosine"}, {"weighting": "equal"}, {"incorporate": "halve"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_part_of_the_memory(options: dict[str, Any]) -> None:
    check(sab.SABLSTM(3, 4, dtype=DOUBLE, k_top=2, k_trunc=3, **options))


def test_a_cell() -> None:
    layer = sab.SABRNN(3, 4, 2, "sine", dtype=DOUBLE, k_top=2, k_trunc=3)
    assert layer.weight_hh_l0.shape == (8, 4)
    check(layer)


def test_a_scorer_has_its_parameters() -> None:
    layer = sab.SABGRU(3, 4, k_top=2, scorer="cosine")
    assert {name for name, _ in layer.named_parameters() if name.startswith("attn")} == {"attn_v_l0"}
    assert 0 < layer.get_parameter("attn_v_l0").abs() <= 0.5
    assert layer(torch.randn(1, 2, 3))[1].keys.shape == (1, 2, 0, 4)


def check(layer: Any) -> None:
    """A call in two pieces equals one in one piece; every parameter has a gradient; only the reference runs it."""
    x = randn(9, 2, 3).requires_grad_()
    assert layer.backend_for(x) == "reference"
    whole, state = layer(x)
    first, middle = layer(x[:5])
    second, _ = layer(x[5:], middle)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    h = torch.zeros_like(state.h)
    torch.testing.assert_close(layer(x, (h, h) if state.c is not None else h)[0], whole)
    gradients = torch.autograd.grad(whole.square().sum(), [x, *layer.parameters()], materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)
    trace = sab.trace(layer, x)
    assert trace.numbers.max() >= 0


def test_a_layer_for_a_cell() -> None:
    class Sine(SABLayer):
        cell = "rnn_sine"

    check(Sine(3, 4, dtype=DOUBLE, k_top=2))
    with pytest.raises(TypeError, match=r"torch\.nn must have a layer with the cell 'rnn_sine' for this; it has none"):
        Sine(3, 4).to_torch()
