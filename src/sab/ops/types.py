"""What goes into and comes out of the operation: one layer, one direction."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sab.scorers import ScorerWeights
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
    """What running a sequence gives."""

    output: Tensor
    """Hidden states, [T, B, n]; 0 past a row's length."""
    state: LayerState
    attention: Attention
