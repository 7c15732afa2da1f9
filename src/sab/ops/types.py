"""What goes into and comes out of the operation: one layer, one direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.parts.registry import CELLS, SCORERS
from sab.parts.scorers import ScorerWeights
from sab.state import Attention, SABState


class LayerWeights(NamedTuple):
    """Parameters of one layer in one direction; None where it has no such parameter."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    scorer: ScorerWeights
    incorporate_weight: Tensor | None
    incorporate_bias: Tensor | None
    norm_ih: Tensor | None = None
    norm_hh: Tensor | None = None
    norm_c_weight: Tensor | None = None
    norm_c_bias: Tensor | None = None
    h_mask: Tensor | None = None
    """No parameter: what the hidden states are multiplied with where they enter the recurrent product, [B, n]; None
    without recurrent dropout."""


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

    @classmethod
    def of(cls, state: SABState, index: int, seen: int | None) -> LayerState:
        """The state of one layer in one direction."""
        return cls(
            h=state.h[index],
            c=None if state.c is None else state.c[index],
            microstates=state.microstates[index],
            keys=state.keys[index],
            numbers=state.numbers[index],
            steps=state.steps,
            seen=seen,
        )


class LayerResult(NamedTuple):
    """The result of running a sequence; state and attention are made on demand, since few callers read them."""

    output: Tensor
    """Hidden states, [T, B, n]; 0 past a row's length."""
    state: Callable[[], LayerState]
    attention: Callable[[], Attention]


def key_size(weights: LayerWeights, config: SABConfig) -> int:
    """Size d of the keys that the scorer makes; 0 where nothing is cached."""
    if config.k_top == 0 or not isinstance(config.scorer, str):
        return 0
    nothing = weights.w_hh.new_zeros(0, weights.w_hh.shape[1])
    with torch.no_grad():
        return SCORERS[config.scorer].key(weights.scorer, nothing, nothing.new_zeros(0, dtype=torch.int64)).shape[-1]


def fresh_state(x: Tensor, weights: LayerWeights, cell_name: str, config: SABConfig) -> LayerState:
    """The state before the first step of x [T, B, input_size]: zeros and an empty memory."""
    batch, n, dtype = x.shape[1], weights.w_hh.shape[1], weights.w_hh.dtype
    return LayerState(
        h=x.new_zeros(batch, n, dtype=dtype),
        c=x.new_zeros(batch, n, dtype=dtype) if CELLS[cell_name].has_c else None,
        microstates=x.new_zeros(batch, 0, n, dtype=dtype),
        keys=x.new_zeros(batch, 0, key_size(weights, config), dtype=dtype),
        numbers=x.new_zeros(batch, 0, dtype=torch.int64),
        steps=torch.zeros(batch, dtype=torch.int64, device="cpu"),
        seen=0,
    )


def stack_states(states: list[LayerState]) -> SABState:
    """The state of all layers and directions."""
    return SABState(
        h=_stack([state.h for state in states]),
        c=_stack([state.c for state in states if state.c is not None]) if states[0].c is not None else None,
        microstates=_stack([state.microstates for state in states]),
        keys=_stack([state.keys for state in states]),
        numbers=_stack([state.numbers for state in states]),
        steps=states[0].steps,
    )


def stack_attentions(attentions: list[Attention]) -> Attention:
    """The attention of all layers and directions; without a first dimension where there is one of them."""
    if len(attentions) == 1:
        return attentions[0]
    return Attention(
        torch.stack([attention.numbers for attention in attentions]),
        torch.stack([attention.weights for attention in attentions]),
        torch.stack([attention.summary for attention in attentions]),
    )


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)  # one: a view, no copy
