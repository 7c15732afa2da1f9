"""A long run: it takes no more memory and no more files as it goes on, and another process can read along."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from sab.lab.training.run import Evaluation, Run
from tests.faults.lives import Life, train


class Sample(NamedTuple):
    step: int
    pages: int
    files: int


def follow(folder: Path, iterations: int, every: int) -> list[Sample]:
    """Trains a run and reads along; returns the last step, the resident memory and the open files at each reading."""
    out = folder / "run"
    options = f"--hidden-size 8 --iterations {iterations} --eval-every {every} --checkpoint-every {every}"
    life = Life(train(out, *options.split()), folder / "told")
    lines: list[Evaluation] = []
    samples: list[Sample] = []
    while not life.is_over:
        time.sleep(1e-3)
        if not (out / "metrics.jsonl").exists():
            continue
        found = Run.open(out).evaluations()
        assert found[: len(lines)] == lines, "what was read once stays"
        lines = found
        try:
            pages = int(Path(f"/proc/{life.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{life.pid}/fd"))
        except (OSError, IndexError):  # it has just ended
            break
        if lines and pages:  # one that is ending has none left
            samples.append(Sample(lines[-1]["step"], pages, files))
    assert life.end() == 0, life.told
    assert len(Run.open(out).evaluations()) == iterations // every
    return samples


def usual_files(samples: list[Sample]) -> int:
    """How many files are open most of the time; a write opens one for a moment."""
    return statistics.mode(sample.files for sample in samples)


def test_a_short_run_can_be_read_along(tmp_path: Path) -> None:
    samples = follow(tmp_path, 200, 10)
    assert len(samples) >= 5
    half = len(samples) // 2
    assert usual_files(samples[:half]) == usual_files(samples[half:])


@pytest.mark.slow
def test_twenty_thousand_iterations(tmp_path: Path) -> None:
    samples = [sample for sample in follow(tmp_path, 20_000, 100) if sample.step >= 2_000]
    pages = [sample.pages for sample in samples]
    assert max(pages) <= 1.02 * min(pages)
    fifth = len(samples) // 5
    assert usual_files(samples[:fifth]) == usual_files(samples[-fifth:])
