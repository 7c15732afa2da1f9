"""The scorers: how relevant a microstate is to a provisional hidden state.

A scorer works in two parts. `key` is a microstate's own part: it never changes once the microstate is kept, so it
is computed once. `score` combines all keys with the provisional hidden state of a step. Each scorer is written as the
reference computes it and, below that, as the Triton kernels do; `ops/cpu/scorers.h` has it in C++.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.parts.pointwise import pointwise, tanh

SLOWEST = 0.01
"""Radians a step by which the slowest of the turned pairs is turned, about; the fastest is turned by 1."""
SMALLEST_SQUARE = 1e-5
"""Added to the mean square of a vector's entries before it is brought to length 1, so that 0 stays 0 and its gradient
is finite."""


class ScorerWeights(NamedTuple):
    """A scorer's parameters; None where it has no such parameter."""

    w_memory: Tensor | None = None
    w_query: Tensor | None = None
    bias: Tensor | None = None
    v: Tensor | None = None


Shapes = Callable[[int, int, int | None], dict[str, tuple[int, ...]]]


class NumberFunctions(NamedTuple):
    """In Triton, a scorer whose keys are numbers (`query_cancels`): how it sees a state, where not as it is."""

    mark: Callable[..., Any] | None = None
    """(h, MATH) -> what the weights are multiplied with; None: h itself."""
    slope: Callable[..., Any] | None = None
    """(h, MATH) -> the derivative of `mark`."""


class VectorFunctions(NamedTuple):
    """In Triton, a scorer whose keys W_m m and queries are vectors, which meet entry by entry."""

    query: Callable[..., Any]
    """(W_q h, bias, SCALE) -> the query; SCALE is 1 / sqrt(d). The bias is 0 for a scorer without one."""
    query_backward: Callable[..., Any]
    """(gradient of the query, SCALE) -> that of W_q h."""
    terms: Callable[..., Any]
    """(key, query, v, MATH) -> numbers whose sum over the entries is the score."""
    backward: Callable[..., Any]
    """(gradient of the score; key, query, v; MATH) -> (those of key, query and v)."""
    is_product: bool = False
    """Whether the score is the inner product of key and query, so that tensor cores can score."""


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
    normalises: bool = False
    """Whether directions alone count: keys are W_m m brought to length 1 (`unit`) and turned by the step at which the
    microstate was kept (`turn`), queries W_q ĥ + b brought to length 1, times v, and turned by the step that reads; the
    score is sqrt(d) times their inner product. In the reference `key` and `score` are without the turns, which the loop
    makes; the other backends do all of it, and the part provides only how a query is finished."""
    is_linear: bool = False
    """Whether a score is the inner product of the key with a query that is the same for all keys. Then the largest and
    smallest entries of many keys bound their scores."""
    initial_v: float | None = None
    """What every entry of `v` starts at; None: a random number, as the entries of the other parameters."""
    mark: Callable[[Tensor], Tensor] = lambda state: state
    """What of a state the weights are multiplied with: the state itself, or a bounded form of it."""
    triton: NumberFunctions | VectorFunctions | None = None
    """None: the Triton backend refuses the scorer."""
    cpp: str | None = None
    """Name of its struct in `ops/cpu/scorers.h`; None: the CPU backend refuses the scorer."""


# Affine: keys are numbers


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


@pointwise
def bounded_mark(h, MATH):
    return tanh(h, MATH)


@pointwise
def bounded_slope(h, MATH):
    bounded = tanh(h, MATH)
    return 1 - bounded * bounded


# One hidden layer


def _mlp_shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    return {"w_memory": (d, n), "w_query": (d, n), "bias": (d,), "v": (d,)}


def _linear_key(w: ScorerWeights, microstate: Tensor, number: Tensor) -> Tensor:
    assert w.w_memory is not None
    return F.linear(microstate, w.w_memory)


def _mlp_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.w_query is not None
    assert w.v is not None
    return torch.tanh(keys + F.linear(h, w.w_query, w.bias).unsqueeze(-2)) @ w.v


@pointwise
def mlp_query(product, bias, SCALE):
    return product + bias


@pointwise
def mlp_query_backward(dquery, SCALE):
    return dquery


@pointwise
def mlp_terms(key, query, v, MATH):
    return v * tanh(key + query, MATH)


@pointwise
def mlp_backward(dscore, key, query, v, MATH):
    bounded = tanh(key + query, MATH)
    inside = dscore * v * (1 - bounded * bounded)
    return inside, inside, dscore * bounded


# Inner product


def _dot_shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    return {"w_memory": (d, n), "w_query": (d, n)}


def _dot_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.w_query is not None
    return (keys @ F.linear(h, w.w_query).unsqueeze(-1)).squeeze(-1) / math.sqrt(keys.shape[-1])


@pointwise
def dot_query(product, bias, SCALE):
    return product * SCALE


@pointwise
def dot_query_backward(dquery, SCALE):
    return dquery * SCALE


@pointwise
def dot_terms(key, query, v, MATH):
    return key * query


@pointwise
def dot_backward(dscore, key, query, v, MATH):
    return dscore * query, dscore * key, 0.0 * dscore


# Cosine


def _cosine_shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    return {"w_memory": (d, n), "w_query": (d, n), "bias": (d,), "v": (d,)}


def unit(x: Tensor) -> Tensor:
    """Vectors brought to length 1; very short ones stay shorter."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = wide.square().sum(-1, keepdim=True) + SMALLEST_SQUARE * x.shape[-1]
    return (wide * torch.rsqrt(length)).to(x.dtype)


@lru_cache(maxsize=256)
def turn_rates(d: int) -> tuple[int, ...]:
    """By how much each of d entries is turned a step, in 2**-32 of a full turn.

    The first half of the entries are pairs, the two of a pair next to each other; the others are not turned. Whole
    numbers, so that angles are exact at any step and the same in every backend.
    """
    pairs = d // 4
    radians = [SLOWEST ** (pair / pairs) for pair in range(pairs)]
    rates = [round(2**32 / (2 * math.pi) * one) for one in radians for _ in range(2)]
    return (*rates, *[0] * (d - len(rates)))


def turn(x: Tensor, step: Tensor) -> Tensor:
    """The vectors x [..., d] with pairs of entries turned by angles in proportion to the step [...].

    The inner product of two vectors that are turned by different steps depends on the difference of the steps alone.
    """
    d = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rates, entry = torch.tensor(turn_rates(d), device=x.device), torch.arange(d, device=x.device)
    turns = (step.unsqueeze(-1) * rates + 2**31) % 2**32 - 2**31  # less than half a turn either way
    angle = turns.to(wide.dtype) * (2 * math.pi / 2**32)
    other = torch.where(rates != 0, entry ^ 1, entry)  # the other entry of a pair
    return (wide * angle.cos() + (entry % 2 * 2 - 1) * wide[..., other] * angle.sin()).to(x.dtype)


def _cosine_key(w: ScorerWeights, microstate: Tensor, number: Tensor) -> Tensor:
    return unit(_linear_key(w, microstate, number))


def _cosine_score(w: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert w.w_query is not None
    assert w.v is not None
    query = w.v * unit(F.linear(h, w.w_query, w.bias))
    return (keys @ query.unsqueeze(-1)).squeeze(-1) * math.sqrt(keys.shape[-1])


AFFINE = Scorer(_affine_shapes, _affine_key, _affine_score, query_cancels=True, triton=NumberFunctions(), cpp="affine")
AFFINE_TANH = Scorer(
    _affine_shapes,
    lambda w, microstate, number: _affine_key(w, torch.tanh(microstate), number),
    lambda w, keys, h: _affine_score(w, keys, torch.tanh(h)),
    query_cancels=True,
    mark=torch.tanh,
    triton=NumberFunctions(bounded_mark, bounded_slope),
    cpp="affine_tanh",
)
MLP = Scorer(
    _mlp_shapes,
    _linear_key,
    _mlp_score,
    triton=VectorFunctions(mlp_query, mlp_query_backward, mlp_terms, mlp_backward),
    cpp="mlp",
)
DOT = Scorer(
    _dot_shapes,
    _linear_key,
    _dot_score,
    is_linear=True,
    triton=VectorFunctions(dot_query, dot_query_backward, dot_terms, dot_backward, is_product=True),
    cpp="dot",
)
COSINE = Scorer(
    _cosine_shapes,
    _cosine_key,
    _cosine_score,
    normalises=True,
    is_linear=True,
    initial_v=0.3,
    triton=VectorFunctions(mlp_query, mlp_query_backward, dot_terms, dot_backward, is_product=True),
    cpp="cosine",
)
