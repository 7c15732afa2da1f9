"""Rows that have seen different numbers of steps: those that have seen as many are a batch of their own.

The loops have one clock for all rows of a batch. So a batch whose rows went on to different lengths, as after a
`PackedSequence`, is divided by the steps that rows have seen, and the results are put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.ops.types import Ends, LayerMemory, LayerResult, LayerState, LayerWeights
from sab.state import Attention

MOST_GROUPS_A_STEP = 8
"""How many groups there may be for each step of a call: a call of the loops for a few rows takes a fraction of a
reference step for all."""


class Group(NamedTuple):
    """Rows that have seen equally many steps."""

    rows: Tensor
    """[rows], on the CPU."""
    state: LayerState
    """Theirs, in which every slot is in use."""


def split(state: LayerState, steps: int) -> list[Group] | None:
    """The groups for a call of so many steps; None where there are too many, or the rows of one use unlike slots."""
    seen, rows = state.steps.unique(return_inverse=True)
    if len(seen) > MOST_GROUPS_A_STEP * steps:
        return None
    counts = (state.numbers >= 0).sum(1).cpu()
    groups: list[Group] = []
    for number, one in enumerate(seen.tolist()):
        members = (rows == number).nonzero().squeeze(1)
        slots = counts[members].unique().tolist()
        if len(slots) > 1:
            return None
        groups.append(Group(members, _state_of(state, members, one, slots[0])))
    return groups


def _state_of(state: LayerState, members: Tensor, seen: int, count: int) -> LayerState:
    """The state of these rows, which have seen so many steps and use `count` slots each."""
    rows = members.to(state.h.device)
    h, c, microstates, keys, numbers, reads = (
        None if part is None else part.index_select(0, rows) for part in (*state[:5], state.reads)
    )
    assert h is not None
    assert microstates is not None
    assert keys is not None
    assert numbers is not None
    used = (numbers < 0).sort(dim=1, stable=True).indices[:, :count]  # the slots in use first, in their order

    def at(tensor: Tensor) -> Tensor:
        return tensor.gather(1, used.unsqueeze(-1).expand(-1, -1, tensor.shape[-1]))

    reads = None if reads is None else reads.gather(1, used)
    return LayerState(
        h, c, at(microstates), at(keys), numbers.gather(1, used), state.steps[members], seen=seen, reads=reads
    )


def run(
    run_group: Callable[[Tensor, Tensor | None, LayerState, LayerWeights], LayerResult],
    groups: list[Group],
    x: Tensor,
    lengths: Tensor | None,
    weights: LayerWeights,
) -> LayerResult:
    """Run each group by itself; the result is that of the whole batch in its order."""
    results: list[LayerResult] = []
    for group in groups:
        rows = group.rows.to(x.device)
        own = weights if weights.h_mask is None else weights._replace(h_mask=weights.h_mask.index_select(0, rows))
        own_lengths = None if lengths is None else lengths[group.rows]
        results.append(run_group(x.index_select(1, rows), own_lengths, group.state, own))
    order = torch.cat([group.rows for group in groups]).argsort().to(x.device)

    def joined(parts: list[Tensor], dim: int) -> Tensor:
        return torch.cat(parts, dim).index_select(dim, order)

    make_ends, make_memories = [result.ends for result in results], [result.memory for result in results]
    make_attentions = [result.attention for result in results]

    def ends() -> Ends:
        made = [make() for make in make_ends]
        c = [end.c for end in made if end.c is not None]
        return Ends(joined([end.h for end in made], 0), joined(c, 0) if c else None)

    def memory() -> LayerMemory:
        made = [make() for make in make_memories]
        slots = max(one.numbers.shape[1] for one in made)

        def padded(tensor: Tensor, value: float = 0) -> Tensor:
            missing = slots - tensor.shape[1]
            return F.pad(tensor, (0, missing) if tensor.dim() == 2 else (0, 0, 0, missing), value=value)

        reads = [padded(one.reads) for one in made if one.reads is not None]
        return LayerMemory(
            joined([padded(one.microstates) for one in made], 0),
            joined([padded(one.keys) for one in made], 0),
            joined([padded(one.numbers, -1) for one in made], 0),
            joined(reads, 0) if reads else None,
        )

    def attention() -> Attention:
        made = [make() for make in make_attentions]
        numbers, weights, summary = (
            joined([getattr(one, name) for one in made], 1) for name in ("numbers", "weights", "summary")
        )
        return Attention(numbers, weights, summary)

    return LayerResult(joined([result.output for result in results], 1), ends, memory, attention)
