"""The incorporations: how the summary of what was read enters the hidden state.

Each is written as the reference computes it and, below that, as the Triton kernels do; `ops/cpu/incorporations.h` has
it in C++. One with weights sees the linear map W [ĥ; s] + b, which the kernels compute for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.parts.pointwise import pointwise, sigmoid, tanh


class IncorporationFunctions(NamedTuple):
    """An incorporation in Triton. What it does not have (`mapped` without weights) or does not ask for comes as any
    tensor and is not looked at."""

    forward: Callable[..., Any]
    """(provisional hidden state, summary, mapped, MATH) -> hidden state."""
    backward: Callable[..., Any]
    """(gradient of the hidden state; provisional hidden state, summary, mapped; MATH) -> (gradients of the provisional
    hidden state and of the summary, both besides the map, and of the map)."""
    reads_state: bool = False
    """Whether the backward looks at the provisional hidden state."""
    reads_summary: bool = False
    """Whether the backward looks at the summary."""


class Incorporation(NamedTuple):
    """One way to incorporate."""

    apply: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """(provisional hidden state, summary, weight, bias) -> hidden state."""
    start: Callable[[Tensor, Tensor], None] | None = None
    """Fills its weight [n, 2n] and its bias [n] as they start; None: it has no weights."""
    set_share: Callable[[Tensor, Tensor, float], None] | None = None
    """(weight, bias, share): changes their start such that the hidden state begins as this share of the summary and
    the rest of the provisional one; None: the share cannot be set."""
    is_bounded: bool = False
    """Whether the hidden state is within [-1, 1] where the provisional one and the summary are."""
    saves_map: bool = False
    """Whether the backward needs the map W [ĥ; s] + b."""
    triton: IncorporationFunctions | None = None
    """None: the Triton backend refuses the incorporation."""
    cpp: str | None = None
    """Name of its struct in `ops/cpu/incorporations.h`; None: the CPU backend refuses the incorporation."""

    @property
    def has_weights(self) -> bool:
        """Whether it has a weight [n, 2n] and a bias [n]."""
        return self.start is not None


def add(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return h + summary


@pointwise
def add_forward(h_hat, summary, mapped, MATH):
    return h_hat + summary


@pointwise
def add_backward(dh, h_hat, summary, mapped, MATH):
    return dh, dh, dh


def add_bounded(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return h + torch.tanh(summary)


@pointwise
def add_bounded_forward(h_hat, summary, mapped, MATH):
    return h_hat + tanh(summary, MATH)


@pointwise
def add_bounded_backward(dh, h_hat, summary, mapped, MATH):
    bounded = tanh(summary, MATH)
    return dh, dh * (1 - bounded * bounded), dh


def concat(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.linear(torch.cat([h, summary], dim=-1), weight, bias)


def concat_start(weight: Tensor, bias: Tensor) -> None:
    """As `add`: the sum of hidden state and summary."""
    identity = torch.eye(len(weight), device=weight.device, dtype=weight.dtype)
    weight.copy_(torch.cat([identity, identity], dim=1))
    bias.zero_()


@pointwise
def concat_forward(h_hat, summary, mapped, MATH):
    return mapped


@pointwise
def concat_backward(dh, h_hat, summary, mapped, MATH):
    return 0.0 * dh, 0.0 * dh, dh


def gate(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    share = torch.sigmoid(concat(h, summary, weight, bias))
    return h + share * (summary - h)


def gate_start(weight: Tensor, bias: Tensor) -> None:
    """As `torch.nn.Linear` for the weight; about a quarter of the summary at first."""
    bound = len(weight) ** -0.5
    weight.uniform_(-bound, bound)
    gate_set_share(weight, bias, 0.25)


def gate_set_share(weight: Tensor, bias: Tensor, share: float) -> None:
    bias.fill_(math.log(share) - math.log1p(-share))


@pointwise
def gate_forward(h_hat, summary, mapped, MATH):
    return h_hat + sigmoid(mapped, MATH) * (summary - h_hat)


@pointwise
def gate_backward(dh, h_hat, summary, mapped, MATH):
    share = sigmoid(mapped, MATH)
    return dh * (1 - share), dh * share, dh * (summary - h_hat) * share * (1 - share)


ADD = Incorporation(add, triton=IncorporationFunctions(add_forward, add_backward), cpp="add")
CONCAT = Incorporation(
    concat, concat_start, triton=IncorporationFunctions(concat_forward, concat_backward), cpp="concat"
)
ADD_BOUNDED = Incorporation(
    add_bounded,
    triton=IncorporationFunctions(add_bounded_forward, add_bounded_backward, reads_summary=True),
    cpp="add_bounded",
)
GATE = Incorporation(
    gate,
    gate_start,
    gate_set_share,
    is_bounded=True,
    saves_map=True,
    triton=IncorporationFunctions(gate_forward, gate_backward, reads_state=True, reads_summary=True),
    cpp="gate",
)
