"""The copying problem: repeat ten digits after a long blank, with nothing but the memory of them to go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sab.errors import check_choice, check_int
from sab.lab.tasks.base import DrawnTask, Headline, Split
from sab.lab.tasks.lengths import Lengths, draw_length

DIGITS = 10
BLANK, LARGEST_DIGIT, MARKER = 0, 8, 9

Encoding = Literal["onehot", "scalar"]


@dataclass(frozen=True)
class Copying(DrawnTask):
    """Ten digits from 1..8, length - 1 blanks, a marker, ten blanks; the last ten steps repeat the digits."""

    name: ClassVar[str] = "copying"
    summary: ClassVar[str] = (
        "repeat ten digits after `length` blanks; judged by accuracy on the last 10 (chance: 12.5%)"
    )
    headline: ClassVar[Headline] = Headline(
        metric="accuracy_last10",
        label="accuracy on the last 10",
        short="accuracy",
        higher_is_better=True,
        solved=0.99,
        chance=1 / LARGEST_DIGIT,
        spec=".1%",
    )
    recipe: ClassVar[Mapping[str, Any]] = {"iterations": 20_000}
    input_size: ClassVar[int] = MARKER + 1
    output_size: ClassVar[int] = LARGEST_DIGIT + 1

    length: int = 100
    """T: how many steps lie between the last digit and the first one to be repeated; a sequence has T + 20 steps."""
    encoding: Encoding = "onehot"  # pyright: ignore[reportIncompatibleVariableOverride]
    """What the model sees of a symbol: a one-hot vector, or its number as one scalar (the authors' code)."""

    train_lengths: Lengths = "fixed"
    """How long the training sequences are: all of `length` (fixed), or drawn anew for each batch, so that the model
    meets problems that it can learn from the first iteration on: from 1..`length` (uniform), or from at most 16 lengths
    evenly spaced there (grid), so that each is met often and its CUDA graph pays. It is judged at `length` either
    way."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_int("length", self.length, 1, maximum=2**62))  # a plain int, for JSON
        check_choice("train_lengths", self.train_lengths, get_args(Lengths))
        check_choice("encoding", self.encoding, get_args(Encoding))

    @property
    def steps(self) -> int:
        return self.length + 2 * DIGITS

    @property
    def dependency(self) -> int:
        """How many steps lie between a digit and its repetition."""
        return self.length + DIGITS

    @property
    def attending_steps(self) -> range:
        """The marker's step and the ten that repeat the digits."""
        return range(self.steps - DIGITS, self.steps + 1)

    def draw(self, generator: torch.Generator, batch_size: int, split: Split) -> tuple[Tensor, Tensor]:
        lengths = self.train_lengths if split == "train" else "fixed"
        steps = draw_length(generator, lengths, 1, self.length) + 2 * DIGITS
        digits = torch.randint(1, LARGEST_DIGIT + 1, (DIGITS, batch_size), generator=generator)
        inputs = torch.full((steps, batch_size), BLANK)
        inputs[:DIGITS] = digits
        inputs[-DIGITS - 1] = MARKER
        targets = torch.full((steps, batch_size), BLANK)
        targets[-DIGITS:] = digits
        return inputs, targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        recalled, digits = outputs[-DIGITS:], targets[-DIGITS:]
        return {
            "accuracy_last10": (recalled.argmax(-1) == digits).double().mean(),
            "cross_entropy_last10": _cross_entropy(recalled, digits),
            "cross_entropy": _cross_entropy(outputs, targets),
        }


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
