"""An electrocardiogram: how does it go on?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sab.errors import UserValueError, check_int
from sab.lab import data
from sab.lab.data.formats import Unreadable
from sab.lab.data.rows import read_column
from sab.lab.tasks.base import SPLITS, Headline, Split
from sab.lab.tasks.stored import StoredTask

HORIZON = 24
"""How many samples are predicted."""
STRIDE = 4
"""How many samples the windows for validation and testing are apart."""
COLUMNS = ("data", "label")


@dataclass(frozen=True)
class ECG(StoredTask):
    """Windows of a record; the last step predicts what follows.

    The record is standardised by mean and deviation of its training part. Training uses the first 70 % of the record,
    validation the next 10 %, testing the rest; no window reaches from one part into another. Training windows begin at
    every sample, the others at every STRIDE-th.
    """

    name: ClassVar[str] = "ecg"
    summary: ClassVar[str] = (
        "predict the next 24 samples of a heart's record from `length`; judged by mean squared error (chance: 1.12)"
    )
    headline: ClassVar[Headline] = Headline(
        metric="mse",
        label="mean squared error",
        short="mse",
        higher_is_better=False,
        solved=0.25,
        chance=1.12,  # the training part's mean for every sample; the test part differs in level and deviation
        spec=".3g",
    )
    encoding = "vector"
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = HORIZON
    recipe: ClassVar[Mapping[str, Any]] = {
        "iterations": 1_500,  # 20 epochs
        "eval_every": 75,
        "eval_batches": None,
        "checkpoint_every": 75,
    }

    length: int = 400
    """How many samples are seen before the prediction."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_int("length", self.length, 1))  # a plain int, for JSON

    @property
    def dataset(self) -> str:
        return "ecg"

    @property
    def steps(self) -> int:
        return self.length

    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        counts = data.DATASETS[self.dataset].counts
        most = min(counts) - HORIZON
        if self.length > most:
            raise UserValueError(
                f"length must be at most {most}, what every part of {self.dataset} allows; got {self.length}.", "length"
            )
        record = self._record(sum(counts))
        training = record[: counts[0]]
        end = list(accumulate(counts))[SPLITS.index(split)]
        part = record[end - counts[SPLITS.index(split)] : end]
        standardised = ((part - training.mean()) / training.std(correction=0)).float()
        windows = standardised.unfold(0, self.length + HORIZON, 1 if split == "train" else STRIDE)
        return windows[:, : self.length], windows[:, self.length :]

    def _record(self, count: int) -> Tensor:
        (content,) = data.load(self.dataset, self.data_dir)
        name = data.DATASETS[self.dataset].files[0].name
        try:
            record = torch.from_numpy(read_column(content, COLUMNS, "data"))
        except Unreadable as trouble:
            raise UserValueError(f"{name} must hold the record of {self.dataset}; {trouble}.") from trouble
        if len(record) != count:
            raise UserValueError(f"{name} must hold {count} samples; it holds {len(record)}.")
        return record

    def assemble(self, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return inputs.t().to(dtype).unsqueeze(-1), targets.t().to(dtype)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[-1], targets.t())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mse": self.loss(outputs, targets)}
