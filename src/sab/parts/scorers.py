"""The scorers: how relevant a microstate is to a provisional hidden state.

A scorer works in two parts. `key` is a microstate's own part: it never changes once the microstate is kept, so it
is computed once. `score` combines all keys with the provisional hidden state of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScorerWeights(NamedTuple):
    """A scorer's parameters; None where it has no such parameter."""

    w_memory: Tensor | None = None
    w_query: Tensor | None = None
    bias: Tensor | None = None
    v: Tensor | None = None


Shapes = Callable[[int, int, int | None], dict[str, tuple[int, ...]]]


class Scorer(NamedTuple):
    """One way to score, in two parts."""

    shapes: Shapes
    """(hidden_size, attention_size, max_microstates) -> shapes of the parameters it has, by name in ScorerWeights."""
    key: Callable[[ScorerWeights, Tensor, Tensor], Tensor]
    """(weights, microstate [B, n], number [B]) -> key [B, d]."""
    score: Callable[[ScorerWeights, Tensor, Tensor], Tensor]
    """(weights, keys [B, S, d], provisional hidden state [B, n]) -> scores [B, S]."""
    query_cancels: bool = False
    """Whether scores are keys [B, S, 1] plus the same number for all. Then keys alone decide the selection, also
    where a large query would drown their differences in rounding, and `bias` is indexed by a microstate's number."""
    mark: Callable[[Tensor], Tensor] = lambda state: state
    """What of a state the weights are multiplied with: the state itself, or a bounded form of it."""


def _affine_shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    shapes = {"w_memory": (n,), "w_query": (n,)}
    return shapes if max_microstates is None else {**shapes, "bias": (max_microstates,)}


def _bias_of_number(bias: Tensor | None, number: Tensor) -> Tensor | float:
    """b_i, which is 0 past the end of b."""
    if bias is None:
        return 0.0
    return F.pad(bias, (0, 1))[number.clamp(0, len(bias))]


def _affine_key(w: ScorerWeights, microstate: Tensor, number: Tensor) -> Tensor:
    assert w.w_memory is not None
    return (microstate @ w.w_memory + _bias_of_number(w.bias, number)).unsqueeze(-1)


def _affine_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.w_query is not None
    return keys.squeeze(-1) + (h @ w.w_query).unsqueeze(-1)


def _mlp_shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    return {"w_memory": (d, n), "w_query": (d, n), "bias": (d,), "v": (d,)}


def _linear_key(w: ScorerWeights, microstate: Tensor, number: Tensor) -> Tensor:
    assert w.w_memory is not None
    return F.linear(microstate, w.w_memory)


def _mlp_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.w_query is not None
    assert w.v is not None
    return torch.tanh(keys + F.linear(h, w.w_query, w.bias).unsqueeze(-2)) @ w.v


def _dot_shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    return {"w_memory": (d, n), "w_query": (d, n)}


def _dot_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.w_query is not None
    return (keys @ F.linear(h, w.w_query).unsqueeze(-1)).squeeze(-1) / math.sqrt(keys.shape[-1])


SCORERS: dict[str, Scorer] = {
    "affine": Scorer(_affine_shapes, _affine_key, _affine_score, query_cancels=True),
    "affine_tanh": Scorer(
        _affine_shapes,
        lambda w, microstate, number: _affine_key(w, torch.tanh(microstate), number),
        lambda w, keys, h: _affine_score(w, keys, torch.tanh(h)),
        query_cancels=True,
        mark=torch.tanh,
    ),
    "mlp": Scorer(_mlp_shapes, _linear_key, _mlp_score),
    "dot": Scorer(_dot_shapes, _linear_key, _dot_score),
}
