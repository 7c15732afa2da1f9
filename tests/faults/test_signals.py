"""Processes that are asked to end at random moments, and two that want the same folder."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path
from random import Random

import pytest

from tests.faults.conftest import Record
from tests.faults.lives import Life, contents, train

OPTIONS = "--eval-every 20 --checkpoint-every 50".split()


def options(iterations: int) -> list[str]:
    return [*OPTIONS, "--iterations", str(iterations)]


def interrupt_and_resume(folder: Path, names: list[str], seed: int) -> int:
    """A run that each of the signals ends once, resumed by the command that it told; how many of them it heard."""
    assert Life(train(folder / "whole", *options(300)), folder / "told").end() == 0
    random, heard, out = Random(seed), 0, folder / "a run"
    arguments = train(out, *options(300))
    for name in names:
        life = Life(arguments, folder / "told")
        assert life.wait_for((out / "checkpoint").exists)
        life.wait_for(lambda life=life: any("iterations " in line for line in life.told))
        time.sleep(random.uniform(0.0, 0.3))
        life.send(getattr(signal, name))
        status = life.end()
        if status == 0:  # it was at its end before
            break
        assert status == 128 + getattr(signal, name), life.told
        told, resume = life.told[-2:]
        assert told.startswith("Interrupted after "), life.told
        assert resume.startswith("Resume with: sab train copying --out "), life.told
        arguments, heard = shlex.split(resume)[3:], heard + 1
    life = Life(arguments, folder / "told")
    assert life.end() == 0, life.told
    assert contents(out) == contents(folder / "whole")
    return heard


def test_two_signals(tmp_path: Path) -> None:
    assert interrupt_and_resume(tmp_path, ["SIGTERM", "SIGUSR1"], seed=0) > 0


@pytest.mark.slow
def test_sixty_signals(tmp_path: Path, record: Record) -> None:
    heard = 0
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        heard += interrupt_and_resume(tmp_path / str(number), ["SIGINT", "SIGTERM", "SIGUSR1"], seed=number)
    assert heard >= 30
    record(
        "SIGINT, SIGTERM and SIGUSR1 at random moments",
        heard,
        "a checkpoint, exit status 130, 143 or 138, and the command to resume, with which the run equals the whole one",
    )


def compete(folder: Path) -> None:
    """Two processes on one folder, of which the first is then killed."""
    out = folder / "run"
    first = Life(train(out, *options(100_000)), folder / "first")
    assert first.wait_for((out / "metrics.jsonl").exists)
    second = Life(train(out, *options(100_000)), folder / "second")
    assert second.end() == 2
    (sentence,) = second.told
    assert f"must be a run that nobody else is training; process {first.pid} on " in sentence
    assert not first.is_over
    first.kill()
    third = Life(train(out, *options(100_000)), folder / "third")
    assert third.wait_for(lambda: any("iterations " in line for line in third.told)), third.told
    third.send(signal.SIGTERM)
    assert third.end() == 143


def test_two_processes_and_one_folder(tmp_path: Path) -> None:
    compete(tmp_path)


@pytest.mark.slow
def test_two_processes_and_one_folder_twenty_times(tmp_path: Path, record: Record) -> None:
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        compete(tmp_path / str(number))
    record(
        "two processes on one folder",
        20,
        "the second is refused in a sentence with the host and process id of the first; once that was killed, the next "
        "one takes over",
    )
