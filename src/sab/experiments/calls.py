"""Calls of `sab reproduce`: what each was asked for and how long it took, one JSON line each in results/calls.jsonl."""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from sab.errors import Mistake, ValueMistake
from sab.files import write_text, writing
from sab.locks import locked
from sab.stored import as_dataclass, read_json_lines
from sab.training.run import provenance


@dataclass(frozen=True)
class Call:
    """What a call was asked for, and how far it came."""

    rows: list[str]
    seeds: list[int]
    iterations: int | None
    """How many every row was given, if it was not as many as its table says."""
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
    resumed: int = 0
    """How many runs it began with the checkpoint of another call."""

    @property
    def asked(self) -> tuple[Any, ...]:
        """What two calls have in common, the second of which went on with what the first had left."""
        return self.rows, self.seeds, self.iterations, self.device, self.commit


def make(
    rows: Iterable[str],
    seeds: Iterable[int],
    iterations: int | None,
    ended: Iterable[str],
    resumed: int,
    left: int,
    together: int,
    wall_time: float,
    device: torch.device,
    commit: str | None,
) -> Call:
    """The record of a call that is over, on this machine."""
    where = provenance(device)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where |= {"commit": commit or where["commit"], "date": date}
    where["resumed"] = resumed
    return Call(list(rows), list(seeds), iterations, list(ended), left, together, wall_time, **where)


def path_in(results: Path) -> Path:
    """The file that has the calls."""
    return results / "calls.jsonl"


def load(results: Path) -> list[Call]:
    """All calls, none where there is no file."""
    path = path_in(results)
    if not path.exists():
        return []
    wanted = f"results {str(path)!r} must be a file of JSON lines that `sab reproduce` wrote"
    try:
        lines = read_json_lines(path)
    except (OSError, ValueError) as error:
        raise ValueMistake(f"{wanted}; it cannot be read: {error}.", "results") from error
    calls: list[Call] = []
    for number, line in enumerate(lines, start=1):
        try:
            calls.append(as_dataclass(Call, line))
        except (TypeError, ValueError, Mistake) as error:
            raise ValueMistake(f"{wanted}; line {number} is none of this version.", "results") from error
    return calls


def save(call: Call, results: Path) -> None:
    """Adds a call to the file, in one move; several processes may do this at once."""
    path = path_in(results)
    with writing(path, "results"), locked(results):
        lines = (json.dumps(asdict(one)) + "\n" for one in (*load(results), call))
        write_text(path, "".join(lines), "results")


@dataclass(frozen=True)
class Whole:
    """Calls in a row that were asked for the same and brought all of it to its end."""

    rows: list[str]
    calls: int
    wall_time: float
    device: str


def largest(calls: Iterable[Call], among: Collection[str]) -> Whole | None:
    """What has most rows of all that was made from one seed, as the tables say and of these rows alone; if anything."""
    found: list[Whole] = []
    for _, group in groupby(calls, key=lambda call: call.asked):
        parts: list[Call] = []
        for call in group:
            parts.append(call)
            if call.left > 0:
                continue
            if set(call.rows) <= set(among) and _is_whole(parts):
                found.append(Whole(call.rows, len(parts), sum(part.wall_time for part in parts), call.device))
            parts = []
    return max(reversed(found), key=lambda whole: len(whole.rows), default=None)


def _is_whole(parts: Sequence[Call]) -> bool:
    """Whether calls that were asked for the same made all of it, from the start, of one seed and as the tables say."""
    asked = parts[0]
    if len(asked.seeds) != 1 or asked.iterations is not None or asked.resumed > 0:  # one that was killed told nothing
        return False
    return {label for part in parts for label in part.ended} == {f"{row} seed {asked.seeds[0]}" for row in asked.rows}
