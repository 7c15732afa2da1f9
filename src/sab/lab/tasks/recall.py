"""Associative recall: pairs of a key and a value are shown once; at the end each key asks for its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sab.errors import check_choice, check_int
from sab.lab.tasks.base import DrawnTask, Headline, Split
from sab.lab.tasks.lengths import Lengths, draw_length

BLANK = 0
STEPS_OF_PAIR = 3
"""Each pair takes two steps where it is shown and one where it is asked for."""
MOST_KEYS = 10_000


@dataclass(frozen=True)
class Recall(DrawnTask):
    """Pairs (key, value) at random places among blanks; the last steps ask for all keys in another order.

    Symbol 0 is the blank; then come the keys, the values, and the questions, one for each key.
    """

    name: ClassVar[str] = "recall"
    summary: ClassVar[str] = (
        "recall the values of `pairs` keys shown among blanks; judged by accuracy on the questions (chance: 6.25%)"
    )
    headline: ClassVar[Headline] = Headline(
        metric="accuracy",
        label="accuracy on the questions",
        short="accuracy",
        higher_is_better=True,
        solved=0.99,
        chance=1 / 16,  # at the default number of keys
        spec=".1%",
    )
    recipe: ClassVar[Mapping[str, Any]] = {}
    encoding = "onehot"

    length: int = 200
    """T: how many steps a sequence has in all, the questions included."""
    pairs: int = 8
    """How many pairs are shown, each at two consecutive steps; the last `pairs` steps ask for them."""
    keys: int = 16
    """How many different keys there are, and as many values; chance is 1 / keys."""
    train_lengths: Lengths = "fixed"
    """How long the training sequences are: all of `length` (fixed), or drawn anew for each batch from
    3 * `pairs`..`length` (uniform) or from at most 16 lengths evenly spaced there (grid). The model is judged at
    `length` either way."""

    def __post_init__(self) -> None:
        keys = check_int("keys", self.keys, 1, maximum=MOST_KEYS)
        pairs = check_int("pairs", self.pairs, 1, maximum=keys)
        checked = {"keys": keys, "pairs": pairs, "length": check_int("length", self.length, STEPS_OF_PAIR * pairs)}
        for option, value in checked.items():
            object.__setattr__(self, option, value)  # a plain int, for JSON
        check_choice("train_lengths", self.train_lengths, get_args(Lengths))
        object.__setattr__(self, "headline", replace(type(self).headline, chance=1 / keys))

    @property
    def input_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 + 3 * self.keys

    @property
    def output_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.keys

    @property
    def steps(self) -> int:
        return self.length

    @property
    def attending_steps(self) -> range:
        """The steps of the questions."""
        return range(self.length - self.pairs + 1, self.length + 1)

    @property
    def first_value(self) -> int:
        """The symbol of value 0."""
        return 1 + self.keys

    @property
    def first_question(self) -> int:
        """The symbol that asks for key 0."""
        return 1 + 2 * self.keys

    def draw(self, generator: torch.Generator, batch_size: int, split: Split) -> tuple[Tensor, Tensor]:
        """Inputs [steps, batch_size]; targets [pairs, batch_size], the values asked for at the last steps."""
        lengths = self.train_lengths if split == "train" else "fixed"
        steps = draw_length(generator, lengths, STEPS_OF_PAIR * self.pairs, self.length)

        def chosen(count: int) -> Tensor:
            """`pairs` different numbers below `count` in random order, for each row."""
            return torch.rand(count, batch_size, generator=generator).argsort(0)[: self.pairs]

        keys = chosen(self.keys)
        values = torch.randint(0, self.keys, (self.pairs, batch_size), generator=generator)
        # A pair counts as one place when places are drawn; each then moves by the second steps of those before it.
        places = chosen(steps - 2 * self.pairs).sort(0).values + torch.arange(self.pairs).unsqueeze(1)
        asked = chosen(self.pairs)
        inputs = torch.full((steps, batch_size), BLANK)
        inputs.scatter_(0, places, 1 + keys)
        inputs.scatter_(0, places + 1, self.first_value + values)
        inputs[-self.pairs :] = self.first_question + keys.gather(0, asked)
        return inputs, values.gather(0, asked)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[-self.pairs :].flatten(0, 1), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {
            "accuracy": (outputs[-self.pairs :].argmax(-1) == targets).double().mean(),
            "cross_entropy": self.loss(outputs, targets),
        }
