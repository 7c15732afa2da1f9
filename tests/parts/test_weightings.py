"""The weightings against their formulas, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sab.parts.registry import WEIGHTINGS
from tests.ops.cases import DOUBLE, assert_close, gradients

SCORES = st.lists(st.floats(-30, 30), min_size=1, max_size=6)


def formula(name: str, scores: list[float]) -> list[float]:
    if name in ("relu", "relu_norm"):
        weights = [max(a - min(scores), 0.0) for a in scores]
        return weights if name == "relu" else [w / (sum(weights) + 1e-7) for w in weights]
    exponentials = [math.exp(a) for a in scores]
    return [e / (sum(exponentials) + (name == "softmax_sink")) for e in exponentials]


@given(SCORES, st.integers(0, 3), st.sampled_from(sorted(WEIGHTINGS)))
def test_weights_are_the_formula_and_what_is_not_valid_gets_zero(scores: list[float], missing: int, name: str) -> None:
    scores = sorted(scores, reverse=True)
    row = torch.tensor([scores + [77.0] * missing], dtype=DOUBLE)
    valid = torch.tensor([[True] * len(scores) + [False] * missing])
    weights = WEIGHTINGS[name].weigh(row, valid)
    assert_close(weights[0, : len(scores)], torch.tensor(formula(name, scores), dtype=DOUBLE))
    assert not weights[0, len(scores) :].any()


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_rows_do_not_meet(name: str) -> None:
    scores = torch.tensor([[3.0, 1.0, 0.5], [2.0, -1.0, 9.0], [9.0, 9.0, 9.0]], dtype=DOUBLE)
    valid = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    weights = WEIGHTINGS[name].weigh(scores, valid)
    assert_close(weights[0], torch.tensor(formula(name, [3.0, 1.0, 0.5]), dtype=DOUBLE))
    assert_close(weights[1, :2], torch.tensor(formula(name, [2.0, -1.0]), dtype=DOUBLE))
    assert not weights[1, 2].any()
    assert not weights[2].any()


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_row_without_microstates_has_weight_and_gradient_zero(name: str) -> None:
    scores = torch.tensor([[0.0, 0.0], [2.0, 1.0]], dtype=DOUBLE, requires_grad=True)
    weights = WEIGHTINGS[name].weigh(scores, torch.tensor([[False, False], [True, True]]))
    gradient = gradients([weights], [scores])[0]
    assert not weights[0].any()
    assert gradient.isfinite().all()
    assert not gradient[0].any()


@pytest.mark.parametrize("name", ["relu", "relu_norm"])
def test_the_threshold_has_a_gradient(name: str) -> None:
    """Raising the lowest of the selected scores lowers every other weight."""
    scores = torch.tensor([[3.0, 2.0, 0.5]], dtype=DOUBLE, requires_grad=True)
    weights = WEIGHTINGS[name].weigh(scores, torch.ones(1, 3, dtype=torch.bool))
    slope = torch.autograd.grad(weights[0, 1], scores)[0]
    if name == "relu":
        assert slope.tolist() == [[0.0, 1.0, -1.0]]
    else:
        assert_close(slope, torch.tensor([[-1.5 / 16, 2.5 / 16, -1.0 / 16]], dtype=DOUBLE), tolerance=1e-6)


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


def test_a_sink_lets_a_step_read_nothing_and_softmax_does_not() -> None:
    scores, valid = torch.tensor([[-40.0, -41.0]], dtype=DOUBLE), torch.ones(1, 2, dtype=torch.bool)
    assert WEIGHTINGS["softmax_sink"].weigh(scores, valid).sum() < 1e-15
    assert WEIGHTINGS["softmax"].weigh(scores, valid).sum() == pytest.approx(1)


def test_which_weightings_run_over_everything() -> None:
    assert {name for name, weighting in WEIGHTINGS.items() if weighting.normalises_all} == {"softmax", "softmax_sink"}


def test_scores_that_are_all_minus_infinity_read_nothing() -> None:
    """A heuristic may mask microstates that way."""
    scores = torch.full((1, 3), -torch.inf, dtype=torch.float64, requires_grad=True)
    for name in ("softmax", "softmax_sink"):
        weights = WEIGHTINGS[name].weigh(scores, torch.ones(1, 3, dtype=torch.bool))
        assert weights.tolist() == [[0.0, 0.0, 0.0]]
        assert torch.autograd.grad(weights.sum(), scores)[0].tolist() == [[0.0, 0.0, 0.0]]
