"""The weightings: from the scores of the selected microstates to their weights.

Scores come highest first, `valid` marks those that are there (fewer than k_top microstates may exist yet), and what
is not valid gets weight 0. The softmax kinds do not depend on the order, so they serve the dense forward as well. Each
weighting is written as the reference computes it and, below that, as the Triton kernels do; `ops/cpu/weightings.h` has
it in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab.parts.pointwise import from_sortable, pointwise, sortable, tl


class WeightingFunctions(NamedTuple):
    """A weighting in Triton, over the last dimension of tensors with any number of dimensions."""

    forward: Callable[..., Any]
    """(scores [..., K], valid [..., K]) -> (weights [..., K], the norm [..., 1] that they were divided by)."""
    backward: Callable[..., Any]
    """(gradients of the weights, weights, norm, is_last) -> gradients of the scores.

    All but the norm are tuples of tensors [..., C], C of the selected in each; `is_last` marks the lowest score, the
    threshold of `relu`.
    """


class Weighting(NamedTuple):
    """One way to weigh."""

    weigh: Callable[[Tensor, Tensor], Tensor]
    """(scores [B, k], valid [B, k]) -> weights [B, k]."""
    normalises_all: bool
    """Whether it can run over the whole macrostate (forward='dense')."""
    is_bounded: bool = True
    """Whether weights are not negative and add up to at most 1."""
    saves_norm: bool = False
    """Whether the backward needs the sum that weights were divided by."""
    sees_level: bool = True
    """Whether a number added to all scores changes the weights. Where it does not, affine scorers need no query."""
    triton: WeightingFunctions | None = None
    """None: the Triton backend refuses the weighting."""
    cpp: str | None = None
    """Name of its struct in `ops/cpu/weightings.h`; None: the CPU backend refuses the weighting."""


def relu(scores: Tensor, valid: Tensor) -> Tensor:
    lowest = (valid.sum(-1, keepdim=True) - 1).clamp_min(0)
    return torch.relu(scores - scores.gather(-1, lowest)).masked_fill(~valid, 0.0)


def relu_norm(scores: Tensor, valid: Tensor) -> Tensor:
    weights = relu(scores, valid)
    return weights / (weights.sum(-1, keepdim=True) + 1e-7)


@pointwise
def highest(x):
    """The largest number along the last dimension, which is kept."""
    return from_sortable(tl.max(sortable(x), len(x.shape) - 1, keep_dims=True))


@pointwise
def lowest(x):
    """The smallest number along the last dimension, which is kept."""
    return from_sortable(tl.min(sortable(x), len(x.shape) - 1, keep_dims=True))


@pointwise
def total(x):
    """The sum over the last dimension, which is kept."""
    return tl.sum(x, len(x.shape) - 1, keep_dims=True)


@pointwise
def total_of_all(values):
    """The sum over the last dimension of all tensors of a tuple."""
    added = values[0]
    for g in tl.static_range(1, len(values)):
        added += values[g]
    return total(added)


@pointwise
def relu_forward(scores, valid):
    threshold = lowest(tl.where(valid, scores, float("inf")))
    # A compiler may join the difference with the product that made the scores: then the lowest would not become 0.
    weights = tl.where(valid & (scores > threshold), scores - threshold, 0.0)
    return weights, total(weights) + 1e-7


@pointwise
def relu_backward(dweights, weights, norm, is_last):
    above = ()
    for g in tl.static_range(len(weights)):
        above = above + (tl.where(weights[g] > 0, dweights[g], 0.0),)
    inner = total_of_all(above)
    dscores = ()
    for g in tl.static_range(len(weights)):
        dscores = dscores + (tl.where(is_last[g], above[g] - inner, above[g]),)
    return dscores


@pointwise
def relu_norm_forward(scores, valid):
    weights, norm = relu_forward(scores, valid)
    return weights / norm, norm


@pointwise
def inner_product(dweights, weights):
    """The sum of weight times gradient over all of the selected."""
    parts = ()
    for g in tl.static_range(len(weights)):
        parts = parts + (weights[g] * dweights[g],)
    return total_of_all(parts)


@pointwise
def relu_norm_backward(dweights, weights, norm, is_last):
    inner = inner_product(dweights, weights)
    before = ()
    for g in tl.static_range(len(weights)):
        before = before + ((dweights[g] - inner) / norm,)
    return relu_backward(before, weights, norm, is_last)


def softmax(scores: Tensor, valid: Tensor) -> Tensor:
    scores = scores.masked_fill(~valid, -torch.inf)
    shift = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)  # where all are -inf
    exponentials = torch.exp(scores - shift)
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1.0)


def softmax_sink(scores: Tensor, valid: Tensor) -> Tensor:
    scores = scores.masked_fill(~valid, -torch.inf)
    shift = scores.detach().amax(-1, keepdim=True).clamp_min(0.0)  # the sink's own score
    exponentials = torch.exp(scores - shift)
    return exponentials / (torch.exp(-shift) + exponentials.sum(-1, keepdim=True))


@pointwise
def softmax_forward(scores, valid):
    shift = highest(tl.where(valid, scores, float("-inf")))
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    weights = tl.where(valid, tl.exp(scores - shift), 0.0)
    norm = total(weights)
    return weights / tl.where(norm == 0.0, 1.0, norm), norm


@pointwise
def softmax_sink_forward(scores, valid):
    shift = tl.maximum(highest(tl.where(valid, scores, float("-inf"))), 0.0)
    weights = tl.where(valid, tl.exp(scores - shift), 0.0)
    norm = total(weights) + tl.exp(-shift)
    return weights / norm, norm


@pointwise
def softmax_backward(dweights, weights, norm, is_last):
    inner = inner_product(dweights, weights)
    dscores = ()
    for g in tl.static_range(len(weights)):
        dscores = dscores + (weights[g] * (dweights[g] - inner),)
    return dscores


RELU = Weighting(
    relu,
    False,
    is_bounded=False,
    sees_level=False,
    triton=WeightingFunctions(relu_forward, relu_backward),
    cpp="relu",
)
RELU_NORM = Weighting(
    relu_norm,
    False,
    saves_norm=True,
    sees_level=False,
    triton=WeightingFunctions(relu_norm_forward, relu_norm_backward),
    cpp="relu_norm",
)
SOFTMAX = Weighting(
    softmax, True, sees_level=False, triton=WeightingFunctions(softmax_forward, softmax_backward), cpp="softmax"
)
SOFTMAX_SINK = Weighting(
    softmax_sink, True, triton=WeightingFunctions(softmax_sink_forward, softmax_backward), cpp="softmax_sink"
)
