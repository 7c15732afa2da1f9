"""What several tests do to a run, and what they compare of it."""

from __future__ import annotations

import json
import math
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sab.lab.tasks import Copying
from sab.lab.training.progress import Progress

CLOCK = ("iterations_per_second", "elapsed")
"""What a line of metrics.jsonl tells of the time that passed: all that may differ between two runs."""
OUTCOME = ("status", "message", "iterations", "solved_at", "metrics", "valid", "best_at")
"""What a result tells of what was computed."""


def spoil_loss(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Makes the copying task's loss NaN in one call, counted from 1."""
    loss, calls = Copying.loss, count(1)
    monkeypatch.setattr(Copying, "loss", lambda *given: loss(*given) * (math.nan if next(calls) == call else 1.0))


class PressCtrlC(Progress):
    """Ctrl-C after the iteration `at`."""

    def __init__(self, at: int):
        self.at = at

    def iteration(self, step: int, loss: float) -> None:
        if step == self.at:
            signal.raise_signal(signal.SIGINT)


def newest(out: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((out / "checkpoint").glob("step-*"))


def steps(out: Path, folder: str = "checkpoint") -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (out / folder).glob("step-*"))


def lines(out: Path) -> list[dict[str, Any]]:
    """What a run has logged but for the time it took."""
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in logged]


def contents(out: Path) -> dict[str, Any]:
    """All that a run computed, to the last bit: everything but the time it took."""
    state = json.loads((newest(out) / "state.json").read_text())["state"]
    result = json.loads((out / "result.json").read_text())
    return {
        "config": (out / "config.json").read_text(),
        "metrics": [json.dumps(line) for line in lines(out)],
        "result": {key: result[key] for key in OUTCOME},
        "state": {key: value for key, value in state.items() if key not in ("elapsed", "seconds")},
        "model": (newest(out) / "model.safetensors").read_bytes(),
        "training": (newest(out) / "training.safetensors").read_bytes(),
        "best": {path.name: (path / "model.safetensors").read_bytes() for path in (out / "best").glob("step-*")},
    }
