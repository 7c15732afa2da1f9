"""Two levels of memory: the blocks of a macrostate and their scores; `cpu/blocks.h` has the same rules in C++.

The key of a block has the largest and the smallest of each entry over the keys in it. So it bounds their scores, and it
is exact: no backend, and no division of a sequence into pieces, rounds it in another way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Levels(NamedTuple):
    """The blocks of each row of a batch."""

    scores: Tensor
    """Of the blocks, oldest first, [B, J]."""
    numbers: Tensor
    """0, 1, ... for those that compete, [B, J]; -1 for the last of a row, which is read in any case, and beyond."""
    of_slot: Tensor
    """The block of each slot, [B, S]."""
    last: Tensor
    """The last block, [B, 1]."""

    def read(self, numbers: Tensor, best: Tensor) -> Tensor:
        """The microstates' numbers [B, S], with -1 for all but those of the `best` blocks [B, k] and of the last."""
        chosen = torch.cat([best, self.last], dim=1)
        is_read = torch.zeros_like(self.scores, dtype=torch.bool).scatter(1, chosen, True)
        return numbers.masked_fill(~is_read.gather(1, self.of_slot), -1)


def sizes(used: Tensor, smallest: int) -> Tensor:
    """The size of the blocks of macrostates with so many microstates, as `used`.

    It doubles for as long as the next one is at most half the square root of their number.
    """
    size = torch.full_like(used, smallest)
    while (is_larger := 16 * size * size <= used).any():
        size = torch.where(is_larger, 2 * size, size)
    return size


def score(query: Tensor, keys: Tensor, numbers: Tensor, smallest: int) -> Levels:
    """Score the blocks of the keys [B, S, d] with the query [B, d]; a slot that holds nothing has number -1."""
    is_there = numbers >= 0
    used = is_there.sum(1, keepdim=True)
    size = sizes(used, smallest)
    block = (is_there.cumsum(1) - 1).clamp(min=0) // size
    last = (used - 1).clamp(min=0) // size
    index, shape = block.unsqueeze(-1).expand_as(keys), (len(keys), int(last.max()) + 1, keys.shape[-1])

    def extreme(way: str, nothing: float) -> Tensor:
        present = keys.masked_fill(~is_there.unsqueeze(-1), nothing)
        return keys.new_full(shape, nothing).scatter_reduce(1, index, present, way)

    highest, lowest = extreme("amax", -torch.inf), extreme("amin", torch.inf)
    scores = (highest @ query.clamp(min=0).unsqueeze(-1) + lowest @ query.clamp(max=0).unsqueeze(-1)).squeeze(-1)
    each = torch.arange(shape[1], device=keys.device).expand_as(scores)
    return Levels(scores, each.masked_fill(each >= last, -1), block, last)
