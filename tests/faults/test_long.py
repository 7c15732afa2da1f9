"""A long run: it takes no more memory and no more files as it goes on, and another process can read along."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from sab.lab.training.run import Evaluation, Run
from tests.faults.lives import Life, train

PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """What a process takes while it trains, and what can be read of its run meanwhile."""

    def __init__(self, life: Life, out: Path):
        self._life, self._out = life, out
        self.samples: list[tuple[int, int, int]] = []
        """The iteration of the last evaluation, the resident memory in bytes and the number of open files."""
        self.readings = 0

    def follow(self) -> None:
        """Looks again and again until the run has ended."""
        lines: list[Evaluation] = []
        while not self._life.is_over:
            time.sleep(1e-3)
            if not (self._out / "metrics.jsonl").exists():
                continue
            found = Run.open(self._out).evaluations()
            assert found[: len(lines)] == lines, "what was read once stays"
            lines, self.readings = found, self.readings + 1
            try:
                memory = int(Path(f"/proc/{self._life.pid}/statm").read_text().split()[1]) * PAGE
                files = len(os.listdir(f"/proc/{self._life.pid}/fd"))
            except (OSError, IndexError):  # it has just ended
                break
            if lines and memory:  # one that is ending has none left
                self.samples.append((int(str(lines[-1]["step"])), memory, files))

    def after(self, step: int) -> Watch:
        """The same without what was before an iteration."""
        later = Watch(self._life, self._out)
        later.samples = [sample for sample in self.samples if sample[0] >= step]
        later.readings = self.readings
        return later

    @property
    def growth(self) -> float:
        """By how much the largest memory exceeds the smallest."""
        sizes = [memory for _, memory, _ in self.samples]
        return max(sizes) / min(sizes) - 1

    def usual_files(self, first: float, last: float) -> int:
        """How many files are open most of the time, in a part of what was seen; to write one opens it for a moment."""
        part = self.samples[int(first * len(self.samples)) : int(last * len(self.samples))]
        return statistics.mode(files for _, _, files in part)


def run(folder: Path, iterations: int, every: int) -> Watch:
    out = folder / "run"
    options = ["--hidden-size", "8", "--iterations", str(iterations)]
    options += ["--eval-every", str(every), "--checkpoint-every", str(every)]
    life = Life(train(out, *options), folder / "told")
    watch = Watch(life, out)
    watch.follow()
    assert life.end() == 0, life.told
    assert len(Run.open(out).evaluations()) == iterations // every
    return watch


def test_a_short_run_can_be_read_along(tmp_path: Path) -> None:
    watch = run(tmp_path, 200, 10)
    assert watch.readings >= 5
    assert watch.usual_files(0.0, 0.5) == watch.usual_files(0.5, 1.0)


@pytest.mark.slow
def test_twenty_thousand_iterations(tmp_path: Path) -> None:
    watch = run(tmp_path, 20_000, 100)
    steady = watch.after(2_000)
    assert steady.growth <= 0.02
    assert steady.usual_files(0.0, 0.2) == steady.usual_files(0.8, 1.0)
