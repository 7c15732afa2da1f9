"""Training a model on a task into a run folder."""

from __future__ import annotations

from sab.extras import require

require("rich", "safetensors", "tensorboard")

from sab.lab.training.config import TrainConfig
from sab.lab.training.evaluation import evaluate
from sab.lab.training.loop import train, train_seeds
from sab.lab.training.run import Result, Run, RunConfig

__all__ = ["Result", "Run", "RunConfig", "TrainConfig", "evaluate", "train", "train_seeds"]
