"""Training a model on a task into a run folder."""

from __future__ import annotations

from sab.training.config import TrainConfig
from sab.training.evaluation import evaluate
from sab.training.loop import train, train_seeds
from sab.training.run import Result, Run, RunConfig

__all__ = ["Result", "Run", "RunConfig", "TrainConfig", "evaluate", "train", "train_seeds"]
