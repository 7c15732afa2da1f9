"""How rows of the tasks with data sets are trained: the paper's setting, and for how long here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sab.lab.models import ModelConfig
from sab.lab.tasks import StoredTask, Task
from sab.lab.training import RunConfig, TrainConfig
from sab.lab.training.config import Precision

BATCHES = {"ptb": 1_567, "text8": 7_812, "text8 prefix": 5_563, "mnist": 781, "cifar10": 703}
"""How many batches an epoch of each data set has, at the batch sizes below."""


@dataclass(frozen=True)
class Setting:
    """How a task's rows are trained."""

    hidden_size: int
    batch_size: int
    lr: float
    """Learning rate of Adam."""
    epochs: float
    """How many epochs a row is trained for at most."""
    patience: int | None
    """After how many evaluations without a better one training stops; None trains to the end."""
    precision: Precision
    lr_decay: float | None = None
    clip: float | None = 1.0
    dropout: float = 0.0
    weight_decay: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task itself."""

    def config(self, task: StoredTask, **model: Any) -> RunConfig:
        """The run on a task of a model with these further options."""
        batches = BATCHES[task.dataset]
        training = TrainConfig(
            iterations=round(self.epochs * batches),
            batch_size=self.batch_size,
            lr=self.lr,
            lr_decay=self.lr_decay,
            clip=self.clip,
            dropout=self.dropout,
            weight_decay=self.weight_decay,
            precision=self.precision,
            eval_every=batches,
            eval_batches=None,
            checkpoint_every=batches,
            patience=self.patience,
            keep="best",
        )
        return RunConfig(task, ModelConfig.from_options({"hidden_size": self.hidden_size, **model}), training)


PAPERS = {
    "ptb": Setting(hidden_size=1000, batch_size=32, lr=2e-3, epochs=12, patience=3, precision="bfloat16"),
    "text8": Setting(hidden_size=1000, batch_size=64, lr=1e-3, epochs=3, patience=None, precision="bfloat16"),
    "mnist": Setting(hidden_size=128, batch_size=64, lr=1e-3, epochs=25, patience=8, precision="float32"),
}
"""The paper's sizes, learning rates and clip. Its authors train for 100 epochs (ptb, mnist) and at most 30 (text8);
precision and patience are ours."""


def epochs_in(task: Task, iterations: int) -> float | None:
    """How many epochs of a table's row some iterations are; None where data have no end, or none of these tables."""
    return iterations / BATCHES[task.dataset] if isinstance(task, StoredTask) and task.dataset in BATCHES else None
