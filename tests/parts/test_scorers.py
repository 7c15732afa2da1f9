"""The scorers against their formulas, one number at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sab.parts.registry import SCORERS
from sab.parts.scorers import ScorerWeights
from tests.ops.cases import assert_close, gradients, randn

N, D, BATCH, SLOTS = 4, 3, 2, 5


def weights_of(name: str, max_microstates: int | None) -> ScorerWeights:
    shapes = SCORERS[name].shapes(N, D, max_microstates)
    return ScorerWeights(
        **{part: randn(*shape, seed=i).requires_grad_() for i, (part, shape) in enumerate(shapes.items())}
    )


def dot(a: Tensor, b: Tensor) -> Tensor:
    return sum((a[j] * b[j] for j in range(len(a))), torch.zeros((), dtype=a.dtype))


def formula(name: str, w: ScorerWeights, m: Tensor, number: int, h: Tensor) -> Tensor:
    assert w.w_memory is not None
    assert w.w_query is not None
    if name in ("affine", "affine_tanh"):
        b = 0.0 if w.bias is None or number >= len(w.bias) else w.bias[number]
        if name == "affine_tanh":
            m, h = torch.tanh(m), torch.tanh(h)
        return dot(w.w_memory, m) + dot(w.w_query, h) + b
    key, query = w.w_memory @ m, w.w_query @ h
    if name == "dot":
        return dot(key, query) / math.sqrt(D)
    assert w.bias is not None
    assert w.v is not None
    return dot(w.v, torch.tanh(key + query + w.bias))


@pytest.mark.parametrize("max_microstates", [None, 1, 3, 9])
@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_the_formula(name: str, max_microstates: int | None) -> None:
    scorer, w = SCORERS[name], weights_of(name, max_microstates)
    microstates, h = randn(BATCH, SLOTS, N, seed=8).requires_grad_(), randn(BATCH, N, seed=9).requires_grad_()
    numbers = torch.tensor([[0, 1, 2, 3, 4], [2, 4, 7, 9, 40]])
    keys = torch.stack([scorer.key(w, microstates[:, slot], numbers[:, slot]) for slot in range(SLOTS)], dim=1)
    scores = scorer.score(w, keys, h)
    expected = torch.stack(
        [
            torch.stack([formula(name, w, microstates[b, s], int(numbers[b, s]), h[b]) for s in range(SLOTS)])
            for b in range(BATCH)
        ]
    )
    assert scores.shape == (BATCH, SLOTS)
    assert_close(scores, expected)
    leaves = [microstates, h, *(part for part in w if part is not None)]
    for one, other in zip(gradients([scores], leaves), gradients([expected], leaves), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("name", ["affine", "affine_tanh"])
def test_no_bias_without_max_microstates(name: str) -> None:
    assert set(SCORERS[name].shapes(N, D, None)) == {"w_memory", "w_query"}
    assert SCORERS[name].shapes(N, D, 7)["bias"] == (7,)
