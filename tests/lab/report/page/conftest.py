"""A run that was trained for a moment, and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from sab.config import SABConfig
from sab.lab.models import ModelConfig
from sab.lab.report.page import explorer, live
from sab.lab.tasks import Copying
from sab.lab.training import Run, TrainConfig, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "one"
    training = TrainConfig(iterations=4, batch_size=3, eval_every=2, eval_batches=1)
    train(Copying(length=3), ModelConfig(hidden_size=6, memory=SABConfig(k_top=3, k_trunc=4)), training, path)
    return Run.open(path)


@pytest.fixture(scope="session")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One without a memory."""
    path = tmp_path_factory.mktemp("runs") / "other"
    training = TrainConfig(iterations=2, batch_size=3, eval_every=2, eval_batches=1)
    train(Copying(length=3), ModelConfig(hidden_size=6, method="tbptt", memory=SABConfig(k_trunc=4)), training, path)
    return Run.open(Path(path))


@pytest.fixture(autouse=True)
def _few_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer of a run is traced, where the test does not say how many."""
    for module in (explorer, live):
        monkeypatch.setattr(module, "TRACED_STEPS", 1)
