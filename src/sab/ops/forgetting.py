"""What a bounded macrostate forgets: the rules of `forget`, which `cpu/forgetting.h` and `triton/forgetting.py` repeat.

A rule sees the slots of a row, oldest first, and the microstate that was just kept as the last of them. It decides by
whole numbers alone, so that every backend decides alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sab.config import SABConfig

READ = 1 << 24
"""What one read adds to a microstate's count: so much that rounding a discounted count to a whole number is nothing."""
SEED = 0x5AB
"""What draws the sample of `reservoir`."""
_ALL = (1 << 64) - 1


def drawn(number: int, seed: int = SEED) -> int:
    """A number from 0 to `number`, all equally likely: what the microstate of this number draws in `reservoir`.

    SplitMix64 (Steele, Lea and Flood, 2014) with the microstate's number as its counter.
    """
    bits = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _ALL
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _ALL
    return (bits ^ (bits >> 31)) % (number + 1)


class Kept(NamedTuple):
    """The slots of a memory after a microstate was kept, oldest first."""

    numbers: Tensor
    """[B, S], -1 where a slot holds nothing."""
    reads: Tensor | None
    """As the numbers; None unless reads are counted."""
    stay: Tensor | None
    """Which of the slots before it, and of its own, the last, these are, [B, S]; None for all."""


def count(reads: Tensor, numbers: Tensor, selected: Tensor) -> Tensor:
    """The counts [B, S] after a read of the microstates of the numbers `selected` [B, k], -1 for none."""
    was_read = (numbers.unsqueeze(-1) == selected.unsqueeze(1)).any(-1) & (numbers >= 0)
    return torch.where(was_read, reads + READ, reads)


def keep(numbers: Tensor, reads: Tensor | None, newest: Tensor, rows: Tensor, config: SABConfig) -> Kept:
    """The slots after the microstates `newest` [B] were kept in these rows [B], both on the CPU.

    In the other rows a slot that holds nothing is kept.
    """
    most = config.max_memory
    number = torch.where(rows, newest, -1).to(numbers.device)
    numbers = torch.cat([numbers, number.unsqueeze(1)], dim=1)
    if reads is not None and most is not None:
        keeps = (number >= 0).unsqueeze(1)
        reads = torch.where(keeps, reads - (reads >> shift(most)), reads)
        reads = torch.cat([reads, torch.where(keeps, READ, 0)], dim=1)
    if most is None or numbers.shape[1] <= most:
        return Kept(numbers, reads, None)
    slots = torch.arange(most, device=numbers.device)
    stay = slots + (slots >= _forgotten(numbers, reads, newest, config).unsqueeze(1))
    return Kept(numbers.gather(1, stay), None if reads is None else reads.gather(1, stay), stay)


def shift(most: int) -> int:
    """The s of the discount: a count loses the part 1 / 2^s, with 2^s the smallest power of 2 from `most` on."""
    return (most - 1).bit_length()


def _forgotten(numbers: Tensor, reads: Tensor | None, newest: Tensor, config: SABConfig) -> Tensor:
    """The slot of each row that goes, [B], of one more than may be; one that holds nothing goes first."""
    if config.forget == "recent":
        gone = torch.zeros_like(numbers[:, 0])
    elif config.forget == "most_read":
        assert reads is not None
        gone = reads[:, :-1].argmin(1)  # the first of equal ones
    else:
        places = [min(drawn(number), numbers.shape[1] - 1) for number in newest.tolist()]
        gone = torch.tensor(places, dtype=torch.int64, device=numbers.device)
    unused = numbers < 0
    return torch.where(unused.any(1), unused.int().argmax(1), gone)
