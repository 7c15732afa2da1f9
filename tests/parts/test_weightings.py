"""The weightings at their edges; the oracle of the layers has their formulas."""

from __future__ import annotations

import pytest
import torch

from sab.parts.registry import WEIGHTINGS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [[1e4, 1e4], [-1e4, -1e4], [1e4, -1e4], [0.0, 0.0], [1e4, 1e4 - 1]])
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_extreme_scores_give_no_nan(name: str, scores: list[float], dtype: torch.dtype) -> None:
    row = torch.tensor([[*scores, 0.0]], dtype=dtype, requires_grad=True)
    weights = WEIGHTINGS[name].weigh(row, torch.tensor([[True, True, False]]))
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    if name != "relu":
        assert weights.sum() <= 1.01
    assert torch.autograd.grad(weights[0, 0], row)[0].isfinite().all()


def test_scores_that_are_all_minus_infinity_read_nothing() -> None:
    """A heuristic may mask microstates that way."""
    scores = torch.full((1, 3), -torch.inf, dtype=torch.float64, requires_grad=True)
    for name in ("softmax", "softmax_sink"):
        weights = WEIGHTINGS[name].weigh(scores, torch.ones(1, 3, dtype=torch.bool))
        assert weights.tolist() == [[0.0, 0.0, 0.0]]
        assert torch.autograd.grad(weights.sum(), scores)[0].tolist() == [[0.0, 0.0, 0.0]]
