"""Time series of the UCR archive: which class is it of?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from sab.errors import UserValueError, check_choice
from sab.lab import data
from sab.lab.data.formats import Unreadable
from sab.lab.data.rows import read_ts
from sab.lab.tasks.base import Headline, Split
from sab.lab.tasks.labelled import LabelledTask, accuracy_headline, labels_and_lengths, padded

Name = Literal["osuleaf", "plaid"]


class Archive(NamedTuple):
    """What is known of a data set before it is read."""

    steps: int
    """Length of its longest series."""
    classes: int
    headline: Headline


ARCHIVES: dict[str, Archive] = {
    # Chance is the share of the commonest class in the test series.
    "osuleaf": Archive(427, 6, accuracy_headline(solved=0.9, chance=0.227)),
    "plaid": Archive(1344, 11, accuracy_headline(solved=0.9, chance=0.162)),
}


@dataclass(frozen=True)
class Series(LabelledTask):
    """A number a step, standardised by mean and deviation of all training series; the last step predicts the class."""

    name: ClassVar[str] = "series"
    summary: ClassVar[str] = (
        "classify a time series, a leaf's outline (osuleaf) or an appliance's current (plaid); judged by accuracy "
        "(chance: 22.7% and 16.2%)"
    )
    headline: ClassVar[Headline] = ARCHIVES["osuleaf"].headline
    encoding = "vector"
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = ARCHIVES["osuleaf"].classes
    recipe: ClassVar[Mapping[str, Any]] = {
        "batch_size": 32,
        "iterations": 2_000,
        "eval_every": 100,
        "eval_batches": None,
        "checkpoint_every": 100,
    }

    dataset: Name = "osuleaf"  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """Which data set: osuleaf, 427 steps and 6 classes, or plaid, 100 to 1,344 steps and 11 classes."""

    def __post_init__(self) -> None:
        check_choice("dataset", self.dataset, get_args(Name))
        # The class has those of the default data set.
        object.__setattr__(self, "headline", ARCHIVES[self.dataset].headline)
        object.__setattr__(self, "output_size", ARCHIVES[self.dataset].classes)

    @property
    def steps(self) -> int:
        return ARCHIVES[self.dataset].steps

    def _is_left_out(self, field: Field[Any]) -> bool:
        return False  # a label names the data set, the default one too

    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        train, test = (self._read(place) for place in range(2))
        train_count, valid_count, test_count = data.DATASETS[self.dataset].counts
        if (len(train[0]), len(test[0])) != (train_count + valid_count, test_count):
            sizes = f"{train_count + valid_count} and {test_count}"
            raise UserValueError(f"the files of {self.dataset} must hold {sizes} series; they do not.")
        order = validation_first(self.dataset, len(train[0]))
        rows = {"valid": order[:valid_count], "train": order[valid_count:], "test": range(test_count)}[split]
        training = np.concatenate([train[0][row] for row in order[valid_count:]])
        values, labels = test if split == "test" else train
        chosen = [(values[row] - training.mean()) / training.std() for row in sorted(rows)]
        return padded(chosen, self.steps, np.float32), labels_and_lengths(labels[sorted(rows)], chosen)

    def _read(self, place: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The series and the labels of one of the two files."""
        name = data.DATASETS[self.dataset].files[place].name
        try:
            series = read_ts(data.load(self.dataset, self.data_dir)[place])
        except Unreadable as trouble:
            raise UserValueError(f"{name} must hold the series of {self.dataset}; {trouble}.") from trouble
        longest = max(map(len, series.values))
        if longest > self.steps or series.classes != self.output_size:
            expected = f"{self.output_size} classes and at most {self.steps} steps"
            raise UserValueError(
                f"{name} must have {expected}; it has {series.classes} and a series of {longest} steps."
            )
        return series.values, series.labels

    def encode(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return inputs.t().to(dtype).unsqueeze(-1)


def validation_first(dataset: str, count: int) -> list[int]:
    """The numbers of the training series, those for validation first.

    The order comes from a hash, so that no library's version changes it.
    """
    return sorted(range(count), key=lambda row: hashlib.sha256(f"{dataset} {row}".encode()).digest())
