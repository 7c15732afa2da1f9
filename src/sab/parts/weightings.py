"""The weightings: from the scores of the selected microstates to their weights.

Scores come highest first, `valid` marks those that are there (fewer than k_top microstates may exist yet), and what
is not valid gets weight 0. The softmax kinds do not mind the order, so they serve the dense forward as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Weighting(NamedTuple):
    """One way to weigh."""

    weigh: Callable[[Tensor, Tensor], Tensor]
    """(scores [B, k], valid [B, k]) -> weights [B, k]."""
    normalises_all: bool
    """Whether it can run over the whole macrostate (forward='dense')."""
    saves_norm: bool = False
    """Whether the backward needs the sum that weights were divided by."""


def relu(scores: Tensor, valid: Tensor) -> Tensor:
    lowest = (valid.sum(-1, keepdim=True) - 1).clamp_min(0)
    return torch.relu(scores - scores.gather(-1, lowest)).masked_fill(~valid, 0.0)


def relu_norm(scores: Tensor, valid: Tensor) -> Tensor:
    weights = relu(scores, valid)
    return weights / (weights.sum(-1, keepdim=True) + 1e-7)


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


WEIGHTINGS: dict[str, Weighting] = {
    "relu": Weighting(relu, False),
    "relu_norm": Weighting(relu_norm, False, saves_norm=True),
    "softmax": Weighting(softmax, True),
    "softmax_sink": Weighting(softmax_sink, True),
}
