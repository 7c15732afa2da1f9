"""Lengths of training sequences: a task is evaluated at one length, and may be trained at several."""

from __future__ import annotations

from typing import Literal

import torch

Lengths = Literal["fixed", "uniform", "grid"]
MOST_LENGTHS = 16
"""Most lengths of a grid: few enough that each is used often, and its CUDA graph pays."""


def grid(shortest: int, longest: int) -> list[int]:
    """At most MOST_LENGTHS lengths, evenly spaced from the shortest to the longest."""
    count = min(MOST_LENGTHS, longest - shortest + 1)
    if count == 1:
        return [longest]
    return [shortest + (longest - shortest) * place // (count - 1) for place in range(count)]


def draw_length(generator: torch.Generator, lengths: Lengths, shortest: int, longest: int) -> int:
    """The length of a training batch."""
    if lengths == "fixed":
        return longest
    choices = range(shortest, longest + 1) if lengths == "uniform" else grid(shortest, longest)
    return choices[-1 - int(torch.randint(0, len(choices), (), generator=generator))]
