"""The adding problem: two of many numbers are marked, one in each half; predict their sum at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sab.errors import check_choice, check_int
from sab.lab.tasks.base import DrawnTask, Headline, Split
from sab.lab.tasks.lengths import Lengths, draw_length

SHORTEST = 2
"""Each half has a number to be marked."""


@dataclass(frozen=True)
class Adding(DrawnTask):
    """Pairs (value in [0, 1), mask) with one masked entry in each half; the last step predicts their sum."""

    name: ClassVar[str] = "adding"
    summary: ClassVar[str] = "add the two marked numbers among `length`; judged by mean squared error (chance: 0.167)"
    headline: ClassVar[Headline] = Headline(
        metric="mse",
        label="mean squared error",
        short="mse",
        higher_is_better=False,
        solved=1e-3,
        chance=1 / 6,  # the variance of the sum of two uniform numbers
        spec=".3g",
    )
    recipe: ClassVar[Mapping[str, Any]] = {}
    encoding = "vector"
    input_size: ClassVar[int] = 2
    output_size: ClassVar[int] = 1

    length: int = 200
    """T: how many pairs a sequence has."""
    train_lengths: Lengths = "fixed"
    """How long the training sequences are: all of `length` (fixed), or drawn anew for each batch from 2..`length`
    (uniform) or from at most 16 lengths evenly spaced there (grid). The model is judged at `length` either way."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_int("length", self.length, SHORTEST))  # a plain int, for JSON
        check_choice("train_lengths", self.train_lengths, get_args(Lengths))

    @property
    def steps(self) -> int:
        return self.length

    def draw(self, generator: torch.Generator, batch_size: int, split: Split) -> tuple[Tensor, Tensor]:
        length = draw_length(generator, self.train_lengths if split == "train" else "fixed", SHORTEST, self.length)
        half = length // 2
        values = torch.rand(length, batch_size, generator=generator)
        marked = torch.stack(
            [
                torch.randint(0, half, (batch_size,), generator=generator),
                torch.randint(half, length, (batch_size,), generator=generator),
            ]
        )
        mask = torch.zeros_like(values).scatter_(0, marked, 1.0)
        return torch.stack([values, mask], dim=-1), values.gather(0, marked).sum(0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[-1, :, 0], targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mse": self.loss(outputs, targets)}
