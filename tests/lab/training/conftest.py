"""A run that takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sab.config import SABConfig
from sab.lab.models import ModelConfig
from sab.lab.tasks import Copying
from sab.lab.training import Result, RunConfig, TrainConfig, train
from sab.lab.training.progress import Progress

Train = Callable[..., Result]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig(
        Copying(length=2),
        ModelConfig(hidden_size=6, memory=SABConfig(k_top=2, k_trunc=4)),
        TrainConfig(
            iterations=8, batch_size=3, eval_every=3, eval_batches=2, checkpoint_every=4, device="cpu", threads=1
        ),
    )


@pytest.fixture
def run_training(config: RunConfig) -> Train:
    """Trains that run, with other options of training where some are given."""

    def call(out: Path, resume: bool = False, progress: Progress | None = None, **options: Any) -> Result:
        training = TrainConfig(**{**vars(config.training), **options})
        return train(config.task, config.model, training, out, resume, progress)

    return call
