"""One run by several processes, as torchrun starts them: one is killed, or asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sab.lab import cli
from sab.lab.training import Run, distributed
from tests.faults.lives import wait_for
from tests.lab.training.test_distributed import words

PATIENCE = 150.0
"""Seconds after which something that was waited for does not happen any more."""


def torchrun(processes: int, arguments: list[str], *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *options]
    environment = {name: value for name, value in os.environ.items() if name not in distributed.NEEDED}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launcher, "-m", "sab", *arguments], env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, out, errors


def child_of(process: subprocess.Popen[str], rank: int) -> int | None:
    """The process id of one that torchrun has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    return None


def wait_and_kill(process: subprocess.Popen[str], out: Path, rank: int) -> None:
    """Kills a process of a run once that has a checkpoint of its twentieth iteration or a later one."""
    wait_for(lambda: [path for path in (out / "checkpoint").glob("step-*") if path.name >= "step-00000020"], process)
    pid = child_of(process, rank)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_killed_process_ends_the_run_and_a_restart_resumes_it(processes: int, tmp_path: Path) -> None:
    out = tmp_path / "several"
    long = words(out, iterations=300, eval_every=100)
    process = torchrun(processes, long, "--max-restarts", "1")
    wait_and_kill(process, out, rank=1)
    status, told, errors = finish(process)
    assert status == 0, errors
    lost = "sab: a run by several processes must keep all of them; one was lost: "
    assert errors.count(lost) == processes - 1
    assert "torch/distributed/distributed_c10d.py" not in errors, "a sentence, and no traceback"
    begun = [int(line.split("iterations ")[1].split()[0]) for line in told.splitlines() if "iterations " in line][:2]
    assert begun[0] == 0
    assert begun[1] >= 20
    assert cli.main(words(tmp_path / "one", iterations=300, eval_every=100)) == 0
    ours, theirs = (Run.open(tmp_path / name).evaluations() for name in ("several", "one"))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [100, 200, 300]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["torchrun is killed", "torchrun passes a signal on", "a process gets a signal"])
def test_what_ends_all_processes_leaves_a_checkpoint_and_no_lock(what: str, tmp_path: Path) -> None:
    """Else they would go on without torchrun, with the folder's lock, and nobody could resume the run."""
    out = tmp_path / "several"
    process = torchrun(2, words(out, iterations=100_000, eval_every=1000), "--signals-to-handle", "SIGTERM,SIGUSR1")
    wait_for(lambda: list((out / "checkpoint").glob("step-0000002*")), process)
    children = [child_of(process, rank) for rank in range(2)]
    assert children[1] is not None
    pid = children[1] if what == "a process gets a signal" else process.pid
    os.kill(pid, signal.SIGKILL if what == "torchrun is killed" else signal.SIGUSR1)
    status, told, errors = finish(process)  # whose pipes its processes have too
    assert what != "torchrun is killed" or status == -signal.SIGKILL
    assert "Interrupted after " in told, errors
    assert not any(Path(f"/proc/{child}/fd/0").exists() for child in children)
    made = int(told.partition("Interrupted after ")[2].split()[0])
    assert (out / "checkpoint" / f"step-{made:08d}").is_dir()
    assert not (out / ".lock").exists()
