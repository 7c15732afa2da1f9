"""Runs that are killed again and again, and resumed each time."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults.lives import Life, contents, train

OPTIONS = "--eval-every 20 --checkpoint-every 15 --keep best".split()
Half = tuple[str, int, int]


class Killer:
    """Kills a process at a random moment; every other time while it writes a checkpoint."""

    def __init__(self, seed: int, longest: float):
        self._random = Random(seed)
        self._longest = longest
        self.kills = 0
        self.while_writing = 0
        """How many of them left half a checkpoint behind."""

    def strike(self, life: Life, out: Path) -> bool:
        """Whether the process was still alive to be killed."""
        left = _halves(out)
        if self.kills % 2 == 0:
            self._wait_for_a_checkpoint(life, out, left)
        else:
            time.sleep(self._random.uniform(0.0, self._longest))
        if life.is_over:
            return False
        life.kill()
        self.kills += 1
        self.while_writing += bool(_halves(out) - left)
        return True

    def _wait_for_a_checkpoint(self, life: Life, out: Path, left: set[Half]) -> None:
        """Waits for the start of one of the next checkpoints, and then for a part of the time that it takes."""
        for _ in range(self._random.randint(1, 4)):
            while not _halves(out) - left and not life.is_over:
                time.sleep(1e-4)
            time.sleep(self._random.uniform(0.0, 0.01))
            if self._random.random() < 0.5:
                return
            while _halves(out) - left and not life.is_over:
                time.sleep(1e-4)


def _halves(out: Path) -> set[Half]:
    """The checkpoints that are being written, or were when the process was killed."""
    found: set[Half] = set()
    for folder in ("checkpoint", "best"):
        with contextlib.suppress(FileNotFoundError):
            status = (out / folder / ".writing").stat()
            found.add((folder, status.st_ino, status.st_mtime_ns))
    return found


def kill_and_resume(folder: Path, kills: int, longest: float, iterations: int, seed: int) -> Killer:
    """Runs that are killed so often in all, each resumed until it ends as the one that nobody killed."""
    options = [*OPTIONS, "--iterations", str(iterations)]
    assert Life(train(folder / "whole", *options), folder / "told").end() == 0
    expected: dict[str, Any] = contents(folder / "whole")
    killer, runs = Killer(seed, longest), 0
    while killer.kills < kills:
        out, runs = folder / f"run-{runs}", runs + 1
        while True:
            before = complete(out)
            life = Life(train(out, *options), folder / "told")
            was_killed = killer.kills < kills and killer.strike(life, out)
            assert was_killed or life.end() == 0, life.told
            begun = re.search("iterations ([0-9]+) to", " ".join(life.told))
            assert begun is None or int(begun[1]) == max(before, default=0), "no more is repeated than has to be"
            assert len(complete(out)) >= min(len(before), 2), "and there are two to go on from"
            if not was_killed:
                break
        assert contents(out) == expected
    return killer


def complete(out: Path) -> list[int]:
    """The steps of the checkpoints that are there as a whole."""
    return [int(path.name.removeprefix("step-")) for path in (out / "checkpoint").glob("step-*")]


def test_killed_three_times(tmp_path: Path) -> None:
    killer = kill_and_resume(tmp_path, 3, 0.6, 70, seed=0)
    assert killer.kills == 3


@pytest.mark.slow
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    killer = kill_and_resume(tmp_path, 100, 1.5, 600, seed=1)
    assert killer.while_writing >= 20
