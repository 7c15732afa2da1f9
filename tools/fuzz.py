"""The whole fuzz campaign, `python -m tools.fuzz`: renews tests/faults/fuzz.jsonl and the table in SECURITY.md.

Every part of a campaign has its own process with little memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import multiprocessing
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from sab.lab.training.run import provenance
from tests.faults.fuzz import COMMANDS, Tally, fuzz_commands, fuzz_files
from tests.faults.fuzz_files import TARGETS
from tools.pages import ROOT, markdown, replace_part

INPUTS, COMMAND_LINES, PARTS = 50_000, 5_000, 5
MOST_MEMORY = 2**30
"""How many bytes a process may have beyond those that it had before the first input."""
RESULTS = ROOT / "tests" / "faults" / "fuzz.jsonl"
PAGE = ROOT / "SECURITY.md"


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz every file that sab reads, and its command line.")
    parser.add_argument("targets", nargs="*", default=[*TARGETS, COMMANDS], help="which kinds; all by default")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="inputs of each kind of file")
    parser.add_argument("--lines", type=int, default=COMMAND_LINES, help="number of command lines")
    parser.add_argument("--seed", type=int, default=0, help="what the inputs depend on")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file for the results")
    given = parser.parse_args()
    has_bugs = False
    for tally in campaign(given.targets, given.inputs, given.lines, given.seed, given.processes):
        record(tally, given.output)
        has_bugs |= bool(tally.bugs)
    if given.output == RESULTS:
        replace_part(PAGE, "fuzz", page_part(RESULTS))
    return 1 if has_bugs else 0


def campaign(targets: list[str], inputs: int, lines: int, seed: int, processes: int) -> Iterator[Tally]:
    """Tries the inputs of every kind in PARTS parts, each in its own process; yields a kind's tally after each part."""
    so_far = {target: Tally(target, seed) for target in targets}
    parts = [
        (target, range(part, lines if target == COMMANDS else inputs, PARTS), seed)
        for target in targets
        for part in range(PARTS)
    ]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        for part in pool.imap_unordered(_limited, parts):
            so_far[part.target] += part
            yield so_far[part.target]


def _limited(part: tuple[str, range, int]) -> Tally:
    """The tally of a kind's inputs from a seed, in a process whose memory is limited."""
    target, inputs, seed = part
    import sab.lab.cli  # noqa: F401  # what is imported later would count as memory of the inputs

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, size + MOST_MEMORY))
    return fuzz_commands(inputs, seed) if target == COMMANDS else fuzz_files(target, inputs, seed)


def record(tally: Tally, path: Path) -> None:
    """Replaces a kind's line in a file, and prints it."""
    line = asdict(tally) | {"seconds": round(tally.seconds, 1), "slowest": round(tally.slowest, 3)}
    line["memory_mib"] = round(line.pop("memory"), 1)
    line |= provenance(torch.device("cpu"))._asdict()
    line["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    known = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
    lines = {one["target"]: one for one in (*known, line)}
    path.write_text("".join(json.dumps(one) + "\n" for one in lines.values()), encoding="utf-8")
    sys.stdout.write(
        f"{tally.target}: {tally.inputs} inputs, {tally.accepted} accepted, {tally.mistakes} refused, "
        f"{len(tally.bugs)} bugs, {tally.seconds:.0f} s, slowest {tally.slowest:.2f} s, {tally.memory:.0f} MiB\n"
    )
    sys.stdout.writelines(f"{bug}\n" for bug in tally.bugs)
    sys.stdout.flush()


def page_part(path: Path) -> str:
    """The table in SECURITY.md."""
    header = ("inputs", "how many", "accepted", "refused in a sentence", "anything else", "slowest", "memory")
    rows: list[list[str]] = []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        counts = [f"{line[name]:,}" for name in ("inputs", "accepted", "mistakes")]
        ends = [str(len(line["bugs"])), f"{line['slowest']:.2f} s", f"{line['memory_mib']:.0f} MiB"]
        rows.append([f"`{line['target']}`" if "." in line["target"] else line["target"], *counts, *ends])
    return markdown(header, sorted(rows))


if __name__ == "__main__":
    sys.exit(main())
