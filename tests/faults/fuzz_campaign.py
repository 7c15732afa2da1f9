"""Fuzzing at length: `make fuzz`. What came of it is kept in fuzz.jsonl, a line for each kind of input.

Every kind has a process of its own with little memory, an alarm for an input that takes too long, and a watch that ends
it where something is written outside of its folder, unpickled, started or connected to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

COMMANDS = "command lines"
INPUTS, COMMAND_LINES = 50_000, 5_000
LONGEST = 60
"""Seconds after which an input has taken too long."""
MOST_MEMORY = 2**30
"""How many bytes a process may have beyond those that it had before the first input."""
MOST_BUGS = 5
"""After so many the rest of a kind's inputs is left."""
MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where files that live for a millisecond are written."""
RESULTS = Path(__file__).with_name("fuzz.jsonl")
PAGE = Path(__file__).parents[2] / "SECURITY.md"


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

    def with_part(self, part: Tally) -> Tally:
        """What came of these inputs and of some more."""
        sums = {name: getattr(self, name) + getattr(part, name) for name in ("inputs", "accepted", "mistakes", "bugs")}
        most = {name: max(getattr(self, name), getattr(part, name)) for name in ("slowest", "memory")}
        return replace(self, **sums, **most, seconds=self.seconds + part.seconds)


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


def _alone(target: str, inputs: range, seed: int) -> Tally:
    """The same in a process of its own."""
    import torch

    import sab.lab.cli  # noqa: F401  # what is imported later would count as memory of the inputs

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, size + MOST_MEMORY))
    return fuzz_commands(inputs, seed) if target == COMMANDS else fuzz_files(target, inputs, seed)


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


def campaign(targets: list[str], inputs: int, lines: int, seed: int, processes: int) -> Iterator[Tally]:
    """Every kind part by part, in processes that see nothing of each other; tells what came of a kind so far."""
    context = multiprocessing.get_context("spawn")
    so_far = {target: Tally(target, seed) for target in targets}
    with ProcessPoolExecutor(processes, context, max_tasks_per_child=1) as pool:
        begun = [
            pool.submit(_alone, target, part, seed)
            for target in targets
            for part in _parts(lines if target == COMMANDS else inputs)
        ]
        for done in as_completed(begun):
            part = done.result()
            so_far[part.target] = so_far[part.target].with_part(part)
            yield so_far[part.target]


def _parts(inputs: int) -> list[range]:
    """The numbers of so many inputs in five parts."""
    size = -(-inputs // 5)
    return [range(start, min(start + size, inputs)) for start in range(0, inputs, size)]


def record(tally: Tally, path: Path) -> None:
    """Puts what came of a kind into a file, in the place of what was there of it, and tells it."""
    import torch

    from sab.lab.training.run import provenance

    facts = provenance(torch.device("cpu"))._asdict()
    facts["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    told = asdict(tally) | {"seconds": round(tally.seconds, 1), "slowest": round(tally.slowest, 3)}
    told["memory_mib"] = round(told.pop("memory"), 1)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = {one["target"]: one for one in (*known, told | facts)}
    path.write_text("".join(json.dumps(one) + "\n" for one in lines.values()), encoding="utf-8")
    sys.stdout.write(
        f"{tally.target}: {tally.inputs} inputs, {tally.accepted} accepted, {tally.mistakes} refused, "
        f"{len(tally.bugs)} bugs, {tally.seconds:.0f} s, slowest {tally.slowest:.2f} s, {tally.memory:.0f} MiB\n"
    )
    sys.stdout.writelines(f"{bug}\n" for bug in tally.bugs)
    sys.stdout.flush()


def page_part(path: Path) -> str:
    """The table in SECURITY.md."""
    from sab.lab.report.pages import markdown

    header = ("inputs", "how many", "accepted", "refused in a sentence", "anything else", "slowest", "memory")
    rows: list[list[str]] = []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        counts = [f"{line[name]:,}" for name in ("inputs", "accepted", "mistakes")]
        ends = [str(len(line["bugs"])), f"{line['slowest']:.2f} s", f"{line['memory_mib']:.0f} MiB"]
        rows.append([f"`{line['target']}`" if "." in line["target"] else line["target"], *counts, *ends])
    return markdown(header, sorted(rows))


def main() -> int:
    from sab.lab.report.pages import renew
    from tests.faults.fuzz_files import TARGETS

    parser = argparse.ArgumentParser(description="Fuzz every file that sab reads, and its command line.")
    parser.add_argument("targets", nargs="*", default=[*TARGETS, COMMANDS], help="which kinds; all by default")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="inputs of each kind of file")
    parser.add_argument("--lines", type=int, default=COMMAND_LINES, help=COMMANDS)
    parser.add_argument("--seed", type=int, default=0, help="what the inputs depend on")
    parser.add_argument("--processes", type=int, default=2, help="how many kinds at once")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file for what came of it")
    given = parser.parse_args()
    has_bugs = False
    for tally in campaign(given.targets, given.inputs, given.lines, given.seed, given.processes):
        record(tally, given.output)
        has_bugs |= bool(tally.bugs)
    if given.output == RESULTS:
        renew(PAGE, "fuzz", page_part(RESULTS))
    return 1 if has_bugs else 0


if __name__ == "__main__":
    sys.exit(main())
