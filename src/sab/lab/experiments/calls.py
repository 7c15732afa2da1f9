"""Calls of `sab reproduce`: what each was asked for and how long it took, one JSON line each in results/calls.jsonl."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sab.lab.experiments.records import none_of_ours, read_lines
from sab.lab.files import write_text, writing
from sab.lab.locks import locked
from sab.lab.stored import as_dataclass


@dataclass(frozen=True)
class Call:
    """What a call was asked for, and how far it came."""

    rows: list[str]
    data: list[str]
    """The titles of what they are trained on."""
    seeds: list[int]
    iterations: int | None
    """How many every row was given, if it was not as many as its table says."""
    resumed: int
    """How many runs it began with the checkpoint of another call."""
    ended: list[str]
    """The labels of the runs that it brought to their end."""
    left: int
    """How many were not at their end after it."""
    together: int
    """How many took turns, at most."""
    wall_time: float
    """Seconds from the call to its last record."""
    device: str
    versions: dict[str, str]
    commit: str | None
    date: str

    @property
    def is_whole(self) -> bool:
        """Whether it made all that it was asked for by itself, from one seed and as the tables say."""
        if len(self.seeds) != 1 or self.iterations is not None or self.resumed > 0 or self.left > 0:
            return False
        return set(self.ended) == {f"{row} seed {self.seeds[0]}" for row in self.rows}


def path_in(results: Path) -> Path:
    """The file that has the calls."""
    return results / "calls.jsonl"


def load(results: Path) -> list[Call]:
    """All calls, none where there is no file."""
    path = path_in(results)
    calls: list[Call] = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            calls.append(as_dataclass(Call, line))
        except ValueError as error:
            raise none_of_ours(path, f"line {number} is none of this version") from error
    return calls


def save(call: Call, results: Path) -> None:
    """Adds a call to the file, in one move; several processes may do this at once."""
    path = path_in(results)
    with writing(path, "results"), locked(results):
        lines = (json.dumps(asdict(one)) + "\n" for one in (*load(results), call))
        write_text(path, "".join(lines), "results")


def largest(calls: Iterable[Call], among: Collection[str]) -> Call | None:
    """The latest of the whole calls that made most rows, all of them among these; if there is one."""
    found = [call for call in calls if call.is_whole and set(call.rows) <= set(among)]
    return max(reversed(found), key=lambda call: len(call.rows), default=None)
