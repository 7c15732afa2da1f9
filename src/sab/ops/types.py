"""What goes into and comes out of the operation: one layer, one direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sab.parts.scorers import ScorerWeights
from sab.state import Attention


class LayerWeights(NamedTuple):
    """Parameters of one layer in one direction; None where it has no such parameter."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    scorer: ScorerWeights
    incorporate_weight: Tensor | None
    incorporate_bias: Tensor | None


class LayerState(NamedTuple):
    """`SABState` of one layer in one direction: the same fields without their first dimension."""

    h: Tensor
    c: Tensor | None
    microstates: Tensor
    keys: Tensor
    numbers: Tensor
    steps: Tensor
    seen: int | None = None
    """How many steps all rows have seen; None where rows differ, or some slot of some row is not in use."""


class LayerResult(NamedTuple):
    """What running a sequence gives; what few callers look at is made when it is asked for."""

    output: Tensor
    """Hidden states, [T, B, n]; 0 past a row's length."""
    state: Callable[[], LayerState]
    attention: Callable[[], Attention]


def fresh_state(x: Tensor, weights: LayerWeights, has_c: bool) -> LayerState:
    """The state before the first step of x [T, B, input_size]: zeros and an empty memory."""
    batch, n = x.shape[1], weights.w_hh.shape[1]
    w_memory = weights.scorer.w_memory
    key_size = 0 if w_memory is None else w_memory.shape[0] if w_memory.dim() == 2 else 1
    dtype = weights.w_hh.dtype
    return LayerState(
        h=x.new_zeros(batch, n, dtype=dtype),
        c=x.new_zeros(batch, n, dtype=dtype) if has_c else None,
        microstates=x.new_zeros(batch, 0, n, dtype=dtype),
        keys=x.new_zeros(batch, 0, key_size, dtype=dtype),
        numbers=x.new_zeros(batch, 0, dtype=torch.int64),
        steps=torch.zeros(batch, dtype=torch.int64, device="cpu"),
        seen=0,
    )
