"""What goes into and comes out of the operation: one layer, one direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops.precision import own_type
from sab.parts.registry import CELLS, SCORERS
from sab.parts.scorers import ScorerWeights
from sab.state import Attention, Memory, SABState, plain


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
    reads: Tensor | None = None

    @classmethod
    def of(cls, state: SABState, index: int, seen: int | None) -> LayerState:
        """The state of one layer in one direction."""
        return cls(
            h=plain(state.h)[index],
            c=None if state.c is None else state.c[index],
            microstates=state.microstates[index],
            keys=state.keys[index],
            numbers=state.numbers[index],
            steps=state.steps,
            seen=seen,
            reads=None if state.reads is None else state.reads[index],
        )


class Ends(NamedTuple):
    """The states of the cell after each row's last step, [B, n]."""

    h: Tensor
    c: Tensor | None


class LayerMemory(NamedTuple):
    """`Memory` of one layer in one direction after the last step, without its first dimension and the steps."""

    microstates: Tensor
    keys: Tensor
    numbers: Tensor
    reads: Tensor | None = None


class LayerResult(NamedTuple):
    """The result of running a sequence; all but the output is made on demand, since few callers read it.

    It is made from nothing that a caller could have changed in place since.
    """

    output: Tensor
    """Hidden states, [T, B, n]; 0 past a row's length."""
    ends: Callable[[], Ends]
    memory: Callable[[], LayerMemory]
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
        reads=x.new_zeros(batch, 0, dtype=torch.int64) if config.counts_reads else None,
    )


def stack_ends(ends: list[Ends]) -> Ends:
    """The ends of all layers and directions."""
    c = [end.c for end in ends if end.c is not None]
    return Ends(_stack([end.h for end in ends]), _stack(c) if c else None)


def stack_memories(memories: list[LayerMemory], steps: Tensor, seen: int | None) -> Memory:
    """The memory of all layers and directions."""
    parts = [None if tensors[0] is None else _stack(list(tensors)) for tensors in zip(*memories, strict=True)]
    microstates, keys, numbers, reads = parts
    return Memory(microstates, keys, numbers, steps, seen, reads)  # pyright: ignore[reportArgumentType]


def stack_attentions(attentions: list[Attention]) -> Attention:
    """The attention of all layers and directions; without a first dimension where there is one of them."""
    if len(attentions) == 1:
        return attentions[0]
    return Attention(
        _stack([attention.numbers for attention in attentions]),
        _stack([attention.weights for attention in attentions]),
        _stack([attention.summary for attention in attentions]),
    )


def _stack(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)  # a view, no copy
    with own_type(tensors[0]):
        return torch.stack(tensors)
