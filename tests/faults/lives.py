"""Real processes that train, to be killed or hindered, and what is compared of the runs that they leave.

All are forked from one process that has imported everything, so that a life begins at once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sab.lab.cli import main
from tests.lab.training import runs

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["sab.lab.cli", "sab.lab.training.trainer", "torch._dynamo"])
TINY = "copying --length 2 --hidden-size 16 --k-top 2 --k-trunc 4 --batch-size 4 --eval-batches 1 --threads 1".split()
LONGEST = 120.0
"""Seconds after which a life should have come to its end."""


class Life:
    """A process that does what the command `sab` does with some arguments, after `before` has been called in it."""

    def __init__(self, arguments: list[str], told: Path, before: Callable[[], object] | None = None):
        self._told = told
        told.unlink(missing_ok=True)  # what an earlier one told
        self._process = CONTEXT.Process(target=_live, args=(arguments, str(told), before))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._process.exitcode is not None

    @property
    def told(self) -> list[str]:
        """The lines of its stdout and stderr so far."""
        return self._told.read_text().splitlines() if self._told.exists() else []

    def send(self, number: int) -> None:
        if not self.is_over:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Its exit status, once it has ended."""
        self._process.join(LONGEST)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"the process did not end within {LONGEST} s: {self.told}")
        return self._process.exitcode

    def wait_for(self, is_there: Callable[[], object]) -> bool:
        """Waits until something is so; whether it was before the process ended."""
        deadline = time.monotonic() + LONGEST
        while not is_there():
            if self.is_over or time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Waits until something is so while a process runs; returns it."""
    deadline = time.monotonic() + 2 * LONGEST
    while time.monotonic() < deadline and process.poll() is None:
        if found := what():
            return found
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"it did not happen: {process.communicate()}")


def _live(arguments: list[str], told: str, before: Callable[[], object] | None) -> None:
    descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
    if before is not None:
        before()
    sys.exit(main(arguments))


def train(out: Path, *options: str) -> list[str]:
    """The arguments that begin a run, or go on with it where it was begun."""
    resume = ["--resume"] if (out / "config.json").exists() else []
    return ["train", *TINY, *options, "--out", str(out), *resume]


def contents(out: Path) -> dict[str, Any]:
    """All that a run computed, to the last bit; options that change nothing and older best weights do not count."""
    found = runs.contents(out)
    return found | {"config": "", "best": found["best"].get(max(found["best"], default=""))}


def obey_permissions() -> None:
    """Takes from this process what lets an administrator write where nobody may; of use to the administrator alone."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of the first 32 and of the other ones
    for call in (libc.capget, libc.capset):
        if call is libc.capset:
            for place in (0, 1):
                data[place] &= ~0b111  # to own, to write and to read whatever the permissions say
        if call(header, data) != 0:
            raise OSError(ctypes.get_errno(), "capabilities cannot be changed")


def go_back_in_time() -> None:
    """Makes the clock jump back an hour whenever somebody looks at it."""
    now = time.time()

    def earlier() -> float:
        nonlocal now
        now -= 3600.0
        return now

    time.time = earlier
