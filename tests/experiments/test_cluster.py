"""The runner on a real Ray cluster: the same records, a worker killed while it trains, and an early end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sab import cli
from sab.errors import Mistake
from sab.experiments import records
from sab.experiments.reproduce import Job, jobs_of, reproduce
from sab.experiments.tables import Row
from sab.training import Run

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
from sab.experiments import cluster

ROOT = Path(__file__).parents[2]
VARYING = ("wall_time", "date", "together", "commit")
PATIENCE = 120.0
"""Seconds after which something that was waited for does not happen any more."""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def start(iterations: int, *rows: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.experiments.on_ray", str(iterations), *map(str, rows)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[str, dict[str, Any]]:
    """What the process said on its way, and what it came to."""
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    said, _, outcome = out.rstrip("\n").rpartition("\n")
    return said, json.loads(outcome)


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if found := what():
            return found
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"it did not happen: {process.communicate()}")


def holder(job: Job) -> int | None:
    """The process that trains a run: the one that has its lock open."""
    lock = str(job.folder.with_suffix(".lock").absolute())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == lock:
                return int(link.parts[2])
        except OSError:  # it has ended meanwhile
            continue
    return None


def timeless(results: Path) -> list[dict[str, Any]]:
    found = sorted(records.load("copying", results), key=lambda record: record["row"])
    return [{name: value for name, value in record.items() if name not in VARYING} for record in found]


def test_a_killed_worker_s_run_goes_on_from_its_checkpoint_to_the_same_record(rows: list[Row]) -> None:
    process = start(200, 1, 2)
    victim = jobs_of([rows[2]], [0], Path("runs"), 200, "cpu")[0]
    wait_for(lambda: (victim.made() or 0) >= 8, process)
    pid = holder(victim)
    assert pid is not None
    assert pid != process.pid
    os.kill(pid, signal.SIGKILL)
    said, outcome = finish(process)
    assert outcome == {"failed": {}, "left": [], "was_interrupted": False}
    assert f"{victim.label}: its worker was lost, another one goes on\n" in said
    begun = [line for line in said.splitlines() if line.startswith(f"{victim.label}: iterations ")]
    assert int(begun[-1].removeprefix(f"{victim.label}: iterations ").split()[0]) >= 8
    assert "[2/2] " in said
    reproduce([rows[1], rows[2]], [0], Path("here"), Path("alone"), iterations=200, device="cpu")
    assert timeless(Path("results")) == timeless(Path("alone"))


def test_ctrl_c_leaves_checkpoints_and_nothing_running(rows: list[Row]) -> None:
    process = start(100_000, 1, 2)
    jobs = jobs_of([rows[1], rows[2]], [0], Path("runs"), 100_000, "cpu")
    wait_for(lambda: any((job.made() or 0) >= 8 for job in jobs), process)
    process.send_signal(signal.SIGINT)
    _, outcome = finish(process)
    assert outcome["failed"] == {}
    assert sorted(outcome["left"]) == sorted(job.label for job in jobs)
    assert outcome["was_interrupted"]
    assert all(holder(job) is None for job in jobs)
    assert timeless(Path("results")) == []
    for job in jobs:
        made = job.made()
        if made is not None:
            lines = Run.open(job.folder).evaluations()
            assert made >= lines[-1]["step"], "the checkpoint is of the end, and not of a multiple of four"


# Without a cluster


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
    assert reason in told
    assert told.count("\n") == 1


def test_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--address", "auto") == 2
    assert capsys.readouterr().err == "sab: --address must be given together with --on ray; got 'auto' alone.\n"
    assert run("--on", "ray", "--together", "0") == 2
    assert "--together must be a whole number of at least 1" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "sab.experiments.cluster")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run("--on", "ray") == 2
    assert capsys.readouterr().err == (
        "sab: ray is missing; install the extra 'ray': pip install '.[ray]' in the repository\n"
    )


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
            return []
        raise cluster.TaskCancelledError

    def ray_cancel(self, reference: Any) -> None:
        self.cancelled.append(reference)


def test_large_models_have_a_whole_gpu_and_small_ones_share_it(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Answers(monkeypatch)
    plan = cluster.make_plan([rows[2]], [0], Path("runs"), Path("results"), None, None, "auto", None)
    (job,) = plan.jobs
    for device, together, is_large, gpus in (
        ("cuda", 8, False, 0.125),
        ("cuda", 2, False, 0.5),
        ("cuda", 8, True, 1.0),
        ("cpu", 8, False, 0),
    ):
        monkeypatch.setattr(Job, "is_large", is_large)
        cluster._Driver(plan, Path("results"), device, together, None, cluster.FarBoard(None))._begin(job)
        assert ray.asked[job.label] == {"num_cpus": 1, "num_gpus": gpus, "max_retries": cluster.RETRIES}


def test_when_the_time_is_over_every_task_is_cancelled(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Answers(monkeypatch)
    plan = cluster.make_plan(rows[:3], [0], Path("runs"), Path("results"), 1e-9, None, "auto", None)
    driver = cluster._Driver(plan, Path("results"), "cpu", 8, None, cluster.FarBoard(None))
    driver.run(plan.is_late)
    assert ray.cancelled == [job.label for job in plan.jobs]
    assert driver.outcome.left == plan.jobs
    assert driver.outcome.failed == {}


def test_a_mistake_of_the_call_starts_no_cluster(rows: list[Row]) -> None:
    with pytest.raises(Mistake, match="minutes must be"):
        cluster.reproduce_on_ray(rows, [0], Path("runs"), Path("results"), minutes=-1)
    assert not cluster.ray.is_initialized()
