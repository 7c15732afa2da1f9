"""A real Ray cluster: a worker killed while it trains, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sab.lab.experiments import records
from sab.lab.experiments.reproduce import Job, jobs_of, reproduce
from sab.lab.training import Run
from tests.faults.lives import wait_for
from tests.lab.experiments.conftest import tiny_rows

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

ROOT = Path(__file__).parents[2]
VARYING = ("wall_time", "date", "together", "commit")
PATIENCE = 300.0
"""Seconds after which something that was waited for does not happen any more."""


def start(folder: Path, iterations: int, *rows: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.lab.experiments.on_ray", str(iterations), *map(str, rows)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=folder, env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[str, dict[str, Any]]:
    """What the process said on its way, and what it came to."""
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    said, _, outcome = out.rstrip("\n").rpartition("\n")
    return said, json.loads(outcome)


def holder(job: Job) -> int | None:
    """The process that trains a run: the one that has its lock open."""
    lock = str(job.folder.with_suffix(".lock"))
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


@pytest.mark.slow
def test_a_killed_worker_s_run_goes_on_from_its_checkpoint_to_the_same_record(tmp_path: Path) -> None:
    rows, process = tiny_rows(), start(tmp_path, 200, 1, 2)
    victim = jobs_of([rows[2]], [0], tmp_path / "runs", 200, "cpu")[0]
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
    reproduce([rows[1], rows[2]], [0], tmp_path / "here", tmp_path / "alone", iterations=200, device="cpu")
    assert timeless(tmp_path / "results") == timeless(tmp_path / "alone")


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_and_nothing_running(tmp_path: Path) -> None:
    rows, process = tiny_rows(), start(tmp_path, 100_000, 1, 2)
    jobs = jobs_of([rows[1], rows[2]], [0], tmp_path / "runs", 100_000, "cpu")
    wait_for(lambda: any((job.made() or 0) >= 8 for job in jobs), process)
    process.send_signal(signal.SIGINT)
    _, outcome = finish(process)
    assert outcome["failed"] == {}
    assert sorted(outcome["left"]) == sorted(job.label for job in jobs)
    assert outcome["was_interrupted"]
    assert all(holder(job) is None for job in jobs)
    assert timeless(tmp_path / "results") == []
    for job in jobs:
        made = job.made()
        if made is not None:
            lines = Run.open(job.folder).evaluations()
            assert made >= lines[-1]["step"], "the checkpoint is of the end, and not of a multiple of four"
