"""What is asked of Ray, and what its tasks do; `tests/faults/test_ray.py` has a real cluster."""

from __future__ import annotations

import io
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sab.errors import UserError
from sab.extras import install_command
from sab.lab import cli
from sab.lab.experiments import records
from sab.lab.experiments.progress import Board
from sab.lab.experiments.reproduce import Job, jobs_of, reproduce
from sab.lab.experiments.tables import Row
from sab.lab.tasks import Copying

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
from sab.lab.experiments import cluster

VARYING = ("wall_time", "date", "together", "commit")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def run(*arguments: str) -> int:
    return cli.main(["reproduce", "--rows", "copying-100-tbptt-5", "--seeds", "0", *arguments])


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nowhere", "it has no host and port, as in 10.0.0.1:6379"),
        ("127.0.0.1:99999", "it has no host and port, as in 10.0.0.1:6379"),
        ("127.0.0.1:{free}", "Connection refused"),
    ],
)
def test_an_address_where_nobody_is(address: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = address.format(free=unused.getsockname()[1])
        assert run("--on", "ray", "--address", address) == 2
    told = capsys.readouterr().err
    wanted = "sab: --address must be that of a Ray cluster that can be reached, or auto"
    assert told.startswith(f"{wanted}; {address!r} is not: ")
    assert not any(Path().iterdir()), "no folder is made for nothing"
    assert reason in told
    assert told.count("\n") == 1


def test_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--address", "auto") == 2
    assert capsys.readouterr().err == "sab: --address must be given together with --on ray; got 'auto' alone.\n"
    assert run("--on", "ray", "--together", "0") == 2
    assert "--together must be a whole number of at least 1" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "sab.lab.experiments.cluster")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run("--on", "ray") == 2
    assert capsys.readouterr().err == (f"sab: ray is missing; install the extra 'ray': {install_command('ray')}\n")


def test_the_command_goes_on_with_the_same_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(rows: Any, seeds: Any, out: Path, *rest: Any) -> cluster.Outcome:
        return cluster.Outcome(left=jobs_of(rows, seeds, out), was_interrupted=True)

    monkeypatch.setattr(cluster, "reproduce_on_ray", left)
    assert run("--on", "ray", "--address", "auto") == 130
    assert capsys.readouterr().out.endswith(" --device auto --on ray --address auto\n")


class Answers:
    """Stands in for Ray where all that matters is what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: dict[str, dict[str, Any]] = {}
        self.cancelled: list[Any] = []
        self.told: list[Any] = []
        self.take = self
        for name in ("remote", "wait", "get", "cancel"):
            monkeypatch.setattr(cluster.ray, name, getattr(self, f"ray_{name}"))

    def options(self, name: str = "desk", **options: Any) -> Answers:
        self.asked[name] = options
        return self

    def remote(self, *arguments: Any) -> Any:
        return arguments[0].label if arguments else self

    def ray_remote(self, _: Any) -> Answers:
        return self

    def ray_wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [one for one in references if one in self.cancelled], references

    def ray_get(self, reference: Any) -> Any:
        if reference is self:
            return self.told
        raise cluster.TaskCancelledError

    def ray_cancel(self, reference: Any) -> None:
        self.cancelled.append(reference)


def test_large_models_have_a_whole_gpu_and_small_ones_share_it(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Answers(monkeypatch)
    plan = cluster.make_plan([rows[2]], [0], Path("runs"), None, None, "auto", None)
    (job,) = plan.jobs
    for device, together, is_large, gpus in (
        ("cuda", 8, False, 0.125),
        ("cuda", 2, False, 0.5),
        ("cuda", 8, True, 1.0),
        ("cpu", 8, False, 0),
    ):
        monkeypatch.setattr(Job, "is_large", is_large)
        cluster._Driver(plan, Path("results"), device, together, None, cluster.RemoteBoard(None))._begin(job)
        assert ray.asked[job.label] == {"num_cpus": 1, "num_gpus": gpus, "max_retries": cluster.RETRIES}


def test_when_the_time_is_over_every_task_is_cancelled(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Answers(monkeypatch)
    plan = cluster.make_plan(rows[:3], [0], Path("runs"), 1e-9, None, "auto", None)
    driver = cluster._Driver(plan, Path("results"), "cpu", 8, None, cluster.RemoteBoard(None))
    driver.run(plan.is_late)
    assert ray.cancelled == [job.label for job in plan.jobs]
    assert driver.outcome.left == plan.jobs
    assert driver.outcome.failed == {}


class Reports:
    """Stands in for the desk, an actor."""

    def __init__(self) -> None:
        self.said: list[tuple[str, list[cluster.Event]]] = []
        self.post = self

    def remote(self, label: str, events: list[cluster.Event]) -> None:
        self.said.append((label, events))


def test_a_task_makes_the_record_that_the_runner_makes(rows: list[Row]) -> None:
    reproduce(rows[:1], [0], Path("here"), Path("alone"), device="cpu", commit="abc")
    (job,) = jobs_of(rows[:1], [0], Path("runs"), device="cpu")
    reports = Reports()
    for _ in range(2):  # the second time it has only to be read
        record, failed, told = cluster.train(job, "cpu", 8, reports, "abc")
        assert failed is None
        assert record is not None
        assert record["together"] == 8
        assert told.startswith(f"{job.label}: accuracy on the last 10 ")
        (expected,) = records.load("copying", Path("alone"))
        assert {**record, **{name: expected[name] for name in VARYING}} == expected
    assert [event for _, (*_, (event, _)) in reports.said][:2] == ["begin", "evaluation"]
    assert not Path("results").exists(), "the caller writes the records"


def test_a_task_that_fails_tells_why(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the device is on fire\nand more")

    monkeypatch.setattr(Copying, "loss", fails)
    (job,) = jobs_of(rows[2:3], [0], Path("runs"), device="cpu")
    record, failed, told = cluster.train(job, "cpu", 1, Reports(), None)
    assert record is None
    assert failed is not None
    assert failed.startswith("RuntimeError: the device is on fire (more in runs/")
    assert told == f"{job.label}: failed: {failed}"


def test_reports_are_shown_and_a_lost_worker_is_told(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Answers(monkeypatch)
    plan = cluster.make_plan(rows[2:3], [0], Path("runs"), None, None, "cpu", None)
    (job,) = plan.jobs
    shown = Console(file=io.StringIO(), width=200)
    with Board(shown, 1) as board:
        driver = cluster._Driver(plan, Path("results"), "cpu", 8, None, board)
        driver._begin(job)
        begin = (job.label, [("begin", (Copying.headline, 0, 6, " by a"))])
        again = (job.label, [("begin", (Copying.headline, 4, 6, " by b")), ("iteration", (5, 1.0))])
        ray.told = [begin, again]
        driver._show_reports()
    file = shown.file
    assert isinstance(file, io.StringIO)
    assert file.getvalue().splitlines() == [
        f"{job.label}: iterations 0 to 6 by a",
        f"{job.label}: its worker was lost, another one goes on",
        f"{job.label}: iterations 4 to 6 by b",
    ]


def test_a_mistake_of_the_call_starts_no_cluster(rows: list[Row]) -> None:
    with pytest.raises(UserError, match="minutes must be"):
        cluster.reproduce_on_ray(rows, [0], Path("runs"), Path("results"), minutes=-1)
    assert not cluster.ray.is_initialized()
