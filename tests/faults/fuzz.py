"""Fuzzing: tries damaged files and random command lines, and counts what came of them.

An alarm ends an input that takes too long. An audit hook ends one that writes outside of its folder, unpickles
something, starts a process or connects to a network.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

COMMANDS = "command lines"
SUMMED = ("inputs", "accepted", "mistakes", "bugs", "seconds")
LONGEST = 60
"""Seconds after which an input has taken too long."""
MOST_BUGS = 5
"""After so many the rest of a kind's inputs is left."""
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where files that live for a millisecond are written."""


class TooSlow(BaseException):
    """An input took too long."""


@dataclass
class Tally:
    """What came of the inputs of a kind."""

    target: str
    seed: int
    inputs: int = 0
    accepted: int = 0
    mistakes: int = 0
    bugs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0
    """Seconds of the slowest input."""
    memory: float = 0.0
    """MiB of the process's peak beyond what it had before the first input."""

    def __add__(self, part: Tally) -> Tally:
        sums = {name: getattr(self, name) + getattr(part, name) for name in SUMMED}
        return replace(self, **sums, slowest=max(self.slowest, part.slowest), memory=max(self.memory, part.memory))


def fuzz(target: str, attempt: Callable[[Random], Any], inputs: range, seed: int = 0) -> Tally:
    """Tries the inputs of these numbers, each from random numbers of its own; `UserError` tells that one is refused."""
    from sab.errors import UserError
    from sab.lab.data.formats import Unreadable

    tally = Tally(target, seed)
    before, started = _peak(), time.perf_counter()
    for number in inputs:
        begun = time.perf_counter()
        try:
            with _alarm():
                attempt(Random(f"{target} {seed} {number}"))
            tally.accepted += 1
        except (UserError, Unreadable) as mistake:
            tally.mistakes += 1
            if not (sentence := str(mistake)) or not sentence.isprintable():
                tally.bugs.append(f"input {number}: no sentence: {sentence!r}")
        except BaseException as bug:  # Forbidden and TooSlow among them
            if isinstance(bug, KeyboardInterrupt):
                raise
            tally.bugs.append(f"input {number}: {''.join(traceback.format_exception(bug))[-1500:]}")
        tally.inputs += 1
        tally.slowest = max(tally.slowest, time.perf_counter() - begun)
        if len(tally.bugs) >= MOST_BUGS:
            break
    tally.seconds = time.perf_counter() - started
    tally.memory = (_peak() - before) / 2**20
    return tally


def fuzz_files(target: str, inputs: range, seed: int = 0) -> Tally:
    """Has a kind of file read again and again, damaged each time in another way."""
    from tests.faults.fuzz_files import TARGETS
    from tests.faults.fuzz_watch import watching

    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER, prefix="sab-fuzz-") as name:
        folder = Path(name) / "inside"
        folder.mkdir()
        attempt = TARGETS[target](folder)
        with watching(folder):
            return fuzz(target, attempt, inputs, seed)


def fuzz_commands(inputs: range, seed: int = 0) -> Tally:
    """Gives random command lines to `sab`."""
    from tests.faults.fuzz_commands import command_lines
    from tests.faults.fuzz_watch import watching

    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER, prefix="sab-fuzz-") as name, _in_folder(Path(name)):
        attempt = command_lines(Path(name))
        caches = [Path.home() / folder for folder in (".cache/sab", ".triton")]  # `sab doctor` tries to write there
        with watching(Path(name), *caches, also=("subprocess.Popen", "socket.bind")):  # for git, and Ray looks for IPv6
            return fuzz(COMMANDS, attempt, inputs, seed)


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"it took longer than {LONGEST} seconds")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _peak() -> int:
    """The most memory that the process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
