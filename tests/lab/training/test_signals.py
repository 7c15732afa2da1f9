"""What ends a run from outside, and the checkpoints that a clock asks for."""

from __future__ import annotations

import errno
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sab.lab.cli import main
from sab.lab.training import Result, RunConfig, trainer
from sab.lab.training.interrupt import SIGNALS, Interrupt
from sab.lab.training.progress import Progress
from sab.lab.training.updates import HostUpdates
from tests.lab.training.runs import steps

Train = Callable[..., Result]
Capture = pytest.CaptureFixture[str]
OPTIONS = "copying --length 2 --hidden-size 6 --k-top 2 --k-trunc 4 --iterations 8 --batch-size 3 --threads 1".split()


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """The signals act as in a shell's foreground, also where the tests run under nohup, which ignores SIGHUP."""
    default = dict.fromkeys(SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send_after(monkeypatch: pytest.MonkeyPatch, made: int, *numbers: int) -> None:
    """Sends signals to this very process, once so many updates were made."""
    make = HostUpdates.make

    def sending(self: HostUpdates, step: int) -> None:
        make(self, step)
        if step + 1 == made:
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr(HostUpdates, "make", sending)


@pytest.mark.parametrize(
    ("name", "status", "seeds"),
    [
        ("SIGINT", 130, []),
        ("SIGTERM", 143, []),
        ("SIGHUP", 129, []),
        ("SIGUSR1", 128 + signal.SIGUSR1, []),
        ("SIGTERM", 143, ["--seeds", "0,1"]),
    ],
)
def test_a_signal_writes_a_checkpoint_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, name: str, status: int, seeds: list[str]
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.chdir(tmp_path)
    send_after(monkeypatch, 3, getattr(signal, name))
    assert main(["train", *OPTIONS, "--out", "run", *seeds]) == status
    *_, message, resume = capsys.readouterr().out.splitlines()
    assert "nterrupted after " in message
    assert resume == " ".join(["Resume with: sab train copying --out run", *seeds, "--resume"])
    assert steps(Path("run/seed-0" if seeds else "run")) == [0, 3]
    assert [signal.getsignal(number) for number in SIGNALS] == before
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(resume.split()[3:]) == 0


def test_the_first_signal_counts_and_a_scheduler_may_repeat_itself(tmp_path: Path, run_training: Train) -> None:
    class Insist(Progress):
        def iteration(self, step: int, loss: float) -> None:
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                signal.raise_signal(number)

    assert run_training(tmp_path / "run", progress=Insist()).status == "interrupted"
    with Interrupt() as interrupt:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
        assert (interrupt.requested, interrupt.number) == (True, signal.SIGUSR1)


def test_under_nohup_the_end_of_the_terminal_is_no_end(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    send_after(monkeypatch, 3, signal.SIGHUP)
    assert run_training(tmp_path / "run").status == "finished"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("gone", ["terminal", "reader"])
def test_a_run_whose_output_cannot_be_shown_ends_with_a_checkpoint(
    tmp_path: Path, run_training: Train, gone: str
) -> None:
    """The terminal is gone, or whoever read the output; rich makes an exit of the latter."""

    class Gone(Progress):
        told = 0

        def iteration(self, step: int, loss: float) -> None:
            self.told += 1
            if step < 3:
                return
            if gone == "terminal":
                raise OSError(errno.EIO, "Input/output error")
            try:
                raise BrokenPipeError
            except BrokenPipeError:
                raise SystemExit(1)  # noqa: B904

        def end(self) -> None:
            self.told += 1

    progress = Gone()
    with pytest.raises(OSError if gone == "terminal" else SystemExit) as failure:
        run_training(tmp_path / "run", progress=progress)
    assert gone == "terminal" or isinstance(failure.value.__context__, BrokenPipeError)
    assert (progress.told, steps(tmp_path / "run")) == (3, [0, 3])
    assert run_training(tmp_path / "run", resume=True).metrics == run_training(tmp_path / "whole").metrics


def test_an_exit_that_progress_asks_for_is_one(tmp_path: Path, run_training: Train) -> None:
    class Leave(Progress):
        def iteration(self, step: int, loss: float) -> None:
            raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        run_training(tmp_path / "run", progress=Leave())


def test_a_signal_before_the_first_iteration_loses_nothing(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run = trainer.Trainer._create
    for place in ("run", "whole"):
        with monkeypatch.context() as patched:
            if place == "run":
                patched.setattr(
                    trainer.Trainer,
                    "_create",
                    lambda *arguments: (signal.raise_signal(signal.SIGTERM), open_run(*arguments))[1],
                )
            result = run_training(tmp_path / place)
        assert (result.status, result.iterations) == (("interrupted", 0) if place == "run" else ("finished", 8))
    assert run_training(tmp_path / "run", resume=True).metrics == result.metrics


def test_a_clock_asks_for_checkpoints_besides(
    tmp_path: Path, config: RunConfig, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update takes a minute here, and whoever sets the clock back in the meantime changes nothing."""
    now = 0.0
    make = HostUpdates.make
    seen: list[list[int]] = []

    def slow(self: HostUpdates, step: int) -> None:
        nonlocal now
        now += 60.0
        make(self, step)

    class Look(Progress):
        def iteration(self, step: int, loss: float) -> None:
            seen.append(steps(tmp_path / "run"))

    run_training(tmp_path / "whole", checkpoint_every=5)
    monkeypatch.setattr(HostUpdates, "make", slow)
    clock: dict[str, Any] = {"monotonic": lambda: now, "perf_counter": time.perf_counter, "time": lambda: -now}
    monkeypatch.setattr(trainer, "time", SimpleNamespace(**clock))
    run_training(tmp_path / "run", checkpoint_every=5, checkpoint_minutes=2.0, progress=Look())
    assert seen == [[0], [0], [0, 2], [0, 2], [2, 4], [4, 5], [4, 5], [5, 7]]
    assert steps(tmp_path / "run") == [7, 8]
    for place in ("run", "whole"):
        lines = (json.loads(line) for line in (tmp_path / place / "metrics.jsonl").read_text().splitlines())
        seen.append([(line["step"], line["loss"], line["metrics"]) for line in lines])  # pyright: ignore
    assert seen[-1] == seen[-2]
