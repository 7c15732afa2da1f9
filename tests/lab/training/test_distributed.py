"""One run by several processes of this machine: the numbers of a single one, and what a killed process leaves."""

from __future__ import annotations

import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.errors import UserError
from sab.lab import cli
from sab.lab.tasks import Copying
from sab.lab.training import Run, distributed, train_seeds, trainer
from sab.lab.training.run import RunConfig
from sab.lab.training.updates import DeviceUpdates, build_capturable_optimizer
from tests.faults.lives import Life
from tests.lab.training.runs import lines

OPTIONS = {"length": 4, "hidden-size": 6, "k-top": 2, "k-trunc": 4, "batch-size": 7, "threads": 1, "keep": "best"}
OPTIONS |= {"iterations": 20, "eval-every": 4, "eval-batches": 3, "checkpoint-every": 5, "on-nan": "rollback"}
OPTIONS |= {"dropout": 0.2}


def words(out: Path, **options: Any) -> list[str]:
    """The command that trains a tiny run."""
    given = {**OPTIONS, **{name.replace("_", "-"): value for name, value in options.items()}, "out": out}
    return ["train", "copying", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def together(folder: Path, count: int, arguments: list[str], as_on_a_gpu: bool = False) -> list[Life]:
    """The processes that make a run, started without torchrun."""
    port = free_port()
    ways = [partial(be_one_of, number, count, port, as_on_a_gpu) for number in range(count)]
    return [Life(arguments, folder / f"told{number}", way) for number, way in enumerate(ways)]


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def updates_of_a_gpu(self: trainer.Trainer) -> DeviceUpdates:
    return DeviceUpdates(self.config, self.model, self.optimizer, self.state, None, None)


def be_one_of(number: int, count: int, port: int, as_on_a_gpu: bool) -> None:
    """Makes this process one of several; its updates are those of a GPU, at which nobody looks at once, or not."""
    if as_on_a_gpu:
        trainer.build_optimizer = build_capturable_optimizer
        trainer.Trainer._build_updates = updates_of_a_gpu
    os.environ |= dict(zip(distributed.NEEDED, map(str, (number, count, number, "127.0.0.1", port)), strict=True))


def assert_same(several: Path, one: Path) -> None:
    """The losses, the gradients and the metrics of two runs are the same to 1e-5."""
    ours, theirs = Run.open(several), Run.open(one)
    assert len(theirs.evaluations()) > 1
    assert_close(lines(several), lines(one))
    results = ours.result(), theirs.result()
    assert None not in results
    mine, other = (vars(result) for result in results)
    for name in ("status", "iterations", "best_at", "metrics", "valid"):
        assert_close(mine[name], other[name])


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)


def test_a_port_in_use_is_told_of(tmp_path: Path) -> None:
    with socket.socket() as used:
        used.bind(("0.0.0.0", 0))
        used.listen()
        port = used.getsockname()[1]
        life = Life(words(tmp_path / "run"), tmp_path / "told", partial(be_one_of, 0, 2, port, False))
        assert life.end() == 2
    (sentence,) = life.told
    assert sentence.startswith(f"sab: MASTER_PORT must be a port that is free; {port} is in use: choose another")


@pytest.mark.parametrize(
    ("name", "given"),
    [("WORLD_SIZE", "x"), ("WORLD_SIZE", "0"), ("RANK", "2"), ("LOCAL_RANK", ""), ("MASTER_PORT", "70000")],
)
def test_a_wrong_variable_is_told_of(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in zip(distributed.NEEDED, ("0", "2", "0", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv(name, given)
    assert cli.main(words(tmp_path / "run")) == 2
    assert capsys.readouterr().err.startswith(f"sab: {name} must be a whole number of at least ")


@pytest.mark.parametrize(("processes", "as_on_a_gpu"), [(2, False), (4, False), (2, True)])
def test_several_processes_make_the_run_of_one(processes: int, as_on_a_gpu: bool, tmp_path: Path) -> None:
    lives = together(tmp_path, processes, words(tmp_path / "several"), as_on_a_gpu)
    assert cli.main(words(tmp_path / "one")) == 0
    assert [life.end() for life in lives] == [0] * processes, [life.told for life in lives]
    assert_same(tmp_path / "several", tmp_path / "one")
    result = Run.open(tmp_path / "several").result()
    assert result is not None
    assert result.device.endswith(f", {processes} processes")
    assert "Finished all 20 iterations." in lives[0].told
    assert not any(life.told for life in lives[1:]), "one of them speaks"
    assert sorted(path.name.partition(".")[0] for path in (tmp_path / "several").iterdir()) == [
        *("best", "checkpoint", "config", "events", "metrics", "result")
    ]


def spoil_a_loss(number: int, count: int, port: int) -> None:
    """The last process's eighth loss is not a number, once."""
    be_one_of(number, count, port, as_on_a_gpu=True)
    loss, calls = Copying.loss, 0

    def spoilt(self: Copying, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss(self, outputs, targets) * (float("nan") if calls == 8 else 1.0)

    if number == count - 1:
        Copying.loss = spoilt


def test_trouble_of_one_is_trouble_of_all_and_all_go_back(tmp_path: Path) -> None:
    port = free_port()
    ways = [partial(spoil_a_loss, number, 2, port) for number in range(2)]
    arguments = words(tmp_path / "several", eval_every=20)
    lives = [Life(arguments, tmp_path / f"told{number}", way) for number, way in enumerate(ways)]
    assert [life.end() for life in lives] == [0, 0], [life.told for life in lives]
    (line,) = lines(tmp_path / "several")
    assert (line["step"], line["rollbacks"]) == (20, 1)


def test_one_that_cannot_begin_ends_all(tmp_path: Path) -> None:
    (tmp_path / "several").write_text("")
    lives = together(tmp_path, 2, words(tmp_path / "several"))
    assert [life.end() for life in lives] == [2, 2]
    assert lives[0].told[0].startswith("sab: --out ")
    assert lives[1].told == ["sab: the first process must be able to begin; it tells why it is not."]


def lose_the_parent(number: int, count: int, port: int) -> None:
    """To the second process it seems, from its third iteration on, that the one that has started it is gone."""
    be_one_of(number, count, port, as_on_a_gpu=False)
    parent, iterate = os.getppid(), trainer.Trainer._iterate
    calls = 0

    def counted(self: trainer.Trainer, updates: Any) -> None:
        nonlocal calls
        calls += 1
        iterate(self, updates)

    if number == 1:
        trainer.Trainer._iterate = counted
        os.getppid = lambda: 1 if calls >= 3 else parent


def test_processes_that_nobody_looks_after_end_with_a_checkpoint(tmp_path: Path) -> None:
    port = free_port()
    ways = [partial(lose_the_parent, number, 2, port) for number in range(2)]
    lives = [Life(words(tmp_path / "several"), tmp_path / f"told{number}", way) for number, way in enumerate(ways)]
    assert [life.end() for life in lives] == [130, 130], [life.told for life in lives]
    assert "Interrupted after 3 iterations." in lives[0].told
    assert (tmp_path / "several" / "checkpoint" / "step-00000003").is_dir()


# In one process


@pytest.fixture
def started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(distributed.NEEDED, ("0", "4", "0", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("started_by_torchrun")
def test_mistakes(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^seeds must not be given where several processes make a run"):
        train_seeds(config.task, config.model, config.training, [0, 1], tmp_path / "out")
    assert cli.main(words(tmp_path / "out", batch_size=3)) == 2
    told = capsys.readouterr().err
    assert told == "sab: --batch-size must be at least 4, the number of processes; got 3.\n"
    assert not (tmp_path / "out").exists()


def test_a_restart_that_left_nothing_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(distributed.RESTARTS, "1")
    assert cli.main(words(tmp_path / "out")) == 0
    assert cli.main(words(tmp_path / "out", iterations=30)) == 0
    assert "iterations 20 to 30" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "result.json").read_text())["iterations"] == 30
