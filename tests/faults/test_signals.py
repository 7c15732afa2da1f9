"""Processes that are asked to end at random moments, and two that want the same folder."""

from __future__ import annotations

import shlex
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sab.lab.training import trainer
from tests.faults.lives import Life, contents, train
from tests.lab.training.runs import newest

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
def test_sixty_signals(tmp_path: Path) -> None:
    heard = 0
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        heard += interrupt_and_resume(tmp_path / str(number), ["SIGINT", "SIGTERM", "SIGUSR1"], seed=number)
    assert heard >= 30


def announce_evaluations(path: Path) -> None:
    """Makes a file when an evaluation begins."""
    evaluate = trainer.evaluate

    def announced(*arguments: Any) -> dict[str, float]:
        path.touch()
        return evaluate(*arguments)

    trainer.evaluate = announced


def in_an_evaluation(out: Path, batches: int) -> Life:
    """A process at the evaluation after its first iteration."""
    arguments = [*train(out, "--eval-every", "1", "--iterations", "2"), "--eval-batches", str(batches)]
    begun = out.with_suffix(".begun")
    life = Life(arguments, out.with_suffix(".told"), partial(announce_evaluations, begun))
    assert life.wait_for(begun.exists), life.told
    return life


def test_a_signal_in_an_evaluation_waits_for_its_end(tmp_path: Path) -> None:
    life = in_an_evaluation(tmp_path / "run", 400)
    life.send(signal.SIGTERM)
    assert life.end() == 143, life.told
    assert newest(tmp_path / "run").name == "step-00000001"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_second_ctrl_c_waits_for_nothing(tmp_path: Path) -> None:
    life = in_an_evaluation(tmp_path / "run", 1_000_000)
    life.send(signal.SIGINT)
    time.sleep(0.1)
    assert not life.is_over
    again = time.monotonic()
    while not life.is_over and time.monotonic() - again < 60:  # two that arrive before Python looks are one
        life.send(signal.SIGINT)
        for _ in range(50):
            time.sleep(0 if life.is_over else 0.1)
    assert life.end() == 130, life.told
    assert life.told[-1] == "sab: interrupted."
    assert newest(tmp_path / "run").name == "step-00000000"
    assert not (tmp_path / "run" / ".lock").exists()


def test_two_processes_and_one_folder(tmp_path: Path) -> None:
    """Of the two the first is then killed."""
    folder, out = tmp_path, tmp_path / "run"
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
