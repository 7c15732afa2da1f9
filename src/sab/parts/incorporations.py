"""The incorporations: how the summary of what was read enters the hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Incorporation(NamedTuple):
    """One way to incorporate."""

    apply: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """(provisional hidden state, summary, weight, bias) -> hidden state."""
    has_weights: bool
    """Whether it has a weight [n, 2n] and a bias [n]."""


def add(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return h + summary


def add_bounded(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return h + torch.tanh(summary)


def concat(h: Tensor, summary: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.linear(torch.cat([h, summary], dim=-1), weight, bias)


INCORPORATIONS: dict[str, Incorporation] = {
    "add": Incorporation(add, False),
    "concat": Incorporation(concat, True),
    "add_bounded": Incorporation(add_bounded, False),
}
