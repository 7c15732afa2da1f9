"""Records: what a run of a table's row came to, one JSON line each in results/<task>.jsonl."""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Iterable, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypedDict, cast

from sab.errors import UserError, UserValueError
from sab.lab.experiments.settings import epochs_in
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.files import write_text, writing
from sab.lab.locks import locked
from sab.lab.stored import first_mismatch, matches, read_json, read_json_lines
from sab.lab.training.run import Evaluation, Run, RunConfig

Record = dict[str, Any]
SCHEMA = 1
"""Changes when records can no longer be read as before."""
MOST_POINTS = 40
"""How many evaluations a record keeps."""
Metrics = dict[str, float | None]
NOTES = {"together": int, "other_lengths": dict[str, Metrics], "attention": dict[str, Any]}
ATTENTION = {"k_att": int, "first": int, "moments": dict[str, list[list[float | None]]]}
"""The types by which stored notes are checked."""
NEEDED = {
    "row": str,
    "seed": int,
    "config": dict[str, dict[str, Any]],
    "status": str,
    "message": str,
    "iterations": int,
    "solved_at": int | None,
    "metrics": Metrics,
    "history": list[dict[str, Any]],
    "wall_time": float,
    "device": str,
    "versions": dict[str, str],
    "commit": str | None,
    "date": str,
}
"""The entries of every record; older records lack others that `make` writes."""
ON_DATA = {"data": str, "valid": Metrics, "best_at": int | None, "epochs": float | None}
"""Further entries of the records of tasks with data."""
ENTRIES = NEEDED | NOTES | ON_DATA | {"task": str}
POINT = {"step": int, "metrics": Metrics} | dict.fromkeys(("loss", "grad_norm", "grad_norm_max"), float | None)
"""What every point of a history has; older ones lack the mean norm."""


class TableRow(Protocol):
    """What the runner and the records need to know of a row of any table."""

    @property
    def id(self) -> str:
        """Stable row id."""
        ...

    @property
    def task(self) -> str:
        """The file of its records: results/<task>.jsonl."""
        ...

    @property
    def other_lengths(self) -> tuple[int, ...]: ...

    @property
    def moments(self) -> tuple[int, ...]: ...


class Attention(TypedDict):
    """Mean attention weights at some moments of training."""

    k_att: int
    first: int
    """The first attending step."""
    moments: dict[str, list[list[float | None]]]
    """By iteration: weights [attending steps, microstates], None before a microstate is kept."""


class Notes(TypedDict, total=False):
    """What the runner notes on a run, next to its folder."""

    together: int
    """How many runs were under way at once, at most."""
    other_lengths: dict[str, Metrics]
    """Metrics by the length that the model was tested at."""
    attention: Attention


def make(row: TableRow, run: Run, notes: Notes, commit: str | None = None) -> Record:
    """The record of a run at its end; `notes` are the runner's, `commit` replaces the one that is recorded."""
    result = run.result()
    assert result is not None
    entries = vars(result)
    task = run.config.task
    record = {"schema": SCHEMA, "row": row.id, "task": row.task, "data": task.title, "seed": run.config.training.seed}
    record |= {name: entries[name] for name in ("status", "message", "iterations", "solved_at", "metrics", "wall_time")}
    record |= {"valid": result.valid, "best_at": result.best_at, "epochs": epochs_in(task, result.iterations)}
    record["together"] = notes.get("together", 1)
    record["other_lengths"] = notes.get("other_lengths", {})
    record |= {"device": result.device, "versions": result.versions, "commit": commit or result.commit}
    record["date"] = now()
    record["config"] = run.config.to_json()
    record["history"] = thinned(run.evaluations())
    if "attention" in notes:
        record["attention"] = notes["attention"]
    return record


def now() -> str:
    """The time, as records have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def config_of(record: Record) -> RunConfig | None:
    """The configuration of a record's run, options that are newer than it as they were then; None where it has none."""
    try:
        return RunConfig.from_json(record["config"])
    except (KeyError, TypeError, UserError):
        return None


def is_stale(row: Row, record: Record) -> bool:
    """Whether a record was made with another configuration than the row now has."""
    config = config_of(record)
    if config is None:
        return True
    wanted = row.as_in(config).config(record["seed"])
    return config.difference(wanted) is not None or config.training.iterations != wanted.training.iterations


def other_memory(row: Row, record: Record) -> str | None:
    """The memory of a SAB record in a few words, where the row now has another one; else None."""
    config = config_of(record)
    if row.method != "sab" or config is None:
        return None
    model, wanted = config.model.effective(), row.as_in(config).config(record["seed"]).model.effective()
    if (model.memory, model.readout, config.input_scale) == (wanted.memory, wanted.readout, 1):
        return None
    memory = model.memory
    words = [str(memory.scorer), memory.weighting, memory.incorporate]
    words += [] if memory.attention_size is None else [f"keys of size {memory.attention_size}"]
    words += [] if model.readout == "hidden" else [f"readout {model.readout}"]
    words += [] if config.input_scale == 1 else [f"inputs × {config.input_scale:g}"]
    return ", ".join(words)


def thinned(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """At most MOST_POINTS evaluations, the last among them; gradient norms are about all since the one before."""
    every = max(ceil(len(evaluations) / MOST_POINTS), 1)
    kept: list[dict[str, Any]] = []
    for end in range(len(evaluations), 0, -every):
        group = evaluations[max(end - every, 0) : end]
        point = {name: group[-1][name] for name in ("step", "loss", "metrics")}
        means = [line["grad_norm"] for line in group if line["grad_norm"] is not None]
        norms = {"grad_norm": fmean(means) if means else None}
        norms["grad_norm_max"] = largest(line["grad_norm_max"] for line in group)
        kept.append({**point, **norms})
    return kept[::-1]


def largest(numbers: Iterable[float | None]) -> float | None:
    """The largest of the numbers that there are; None where there is none."""
    return max((number for number in numbers if number is not None), default=None)


def path_of(task: str, results: Path) -> Path:
    """The file that has a task's records."""
    return results / f"{task}.jsonl"


def load(task: str, results: Path) -> list[Record]:
    """A task's records, none where there is no file."""
    path = path_of(task, results)
    records = read_lines(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or record.get("schema") != SCHEMA or not record.keys() >= NEEDED.keys():
            raise invalid_file(path, f"line {number} is none of this version")
        wrong = _first_wrong(record)
        if wrong is not None:
            raise invalid_file(path, f"the {wrong} of line {number} is not as it writes it")
    return records


def read_lines(path: Path) -> list[Any]:
    """The lines of a file in the folder of the records, none where there is no file."""
    if not path.exists():
        return []
    try:
        return read_json_lines(path)
    except (OSError, ValueError) as error:
        raise invalid_file(path, f"it cannot be read: {error}") from error


def invalid_file(path: Path, reason: str) -> UserValueError:
    """The error for a file that `sab reproduce` did not write."""
    wanted = f"results {str(path)!r} must be a file of JSON lines that `sab reproduce` wrote"
    return UserValueError(f"{wanted}; {reason}.", "results")


def _first_wrong(record: Record) -> str | None:
    """The first entry of a record that is not what it should be."""
    wrong = first_mismatch(record, ENTRIES)
    if wrong is not None:
        return wrong
    if not matches(record["config"].get("training", {}).get("iterations"), int):
        return "config"
    if not all(_has_entries(point, POINT, optional={"grad_norm"}) for point in record["history"]):
        return "history"
    if record["row"] in ROWS and ROWS[record["row"]].length is None and not record.keys() >= ON_DATA.keys():
        return "data"
    best_at = record.get("best_at")
    if best_at is not None and not (0 < best_at <= record["iterations"] and record.get("epochs") is not None):
        return "best_at"
    return None if _is_attention(record.get("attention")) else "attention"


def _is_attention(noted: Any) -> bool:
    """Whether stored attention is missing, or a table of numbers for each moment."""
    if noted is None:
        return True
    tables = noted["moments"].values() if _has_entries(noted, ATTENTION) else [[]]
    return all(table and len({len(line) for line in table}) == 1 for table in tables)


def _has_entries(stored: dict[str, Any], kinds: dict[str, Any], optional: Collection[str] = ()) -> bool:
    """Whether all of these entries are there, but for optional ones, and of their types."""
    return stored.keys() >= kinds.keys() - set(optional) and first_mismatch(stored, kinds) is None


def read_notes(path: Path) -> Notes:
    """The notes on a run in a file; empty where there is none."""
    if not path.is_file():
        return {}
    wanted = f"{str(path)!r} must be what `sab reproduce` noted of a run"
    try:
        notes = read_json(path)
    except (OSError, ValueError) as error:
        raise UserValueError(f"{wanted}; it cannot be read: {error}.") from error
    if not isinstance(notes, dict) or first_mismatch(notes, NOTES) or not _is_attention(notes.get("attention")):
        raise UserValueError(f"{wanted}; it has other entries than that.")
    return cast(Notes, notes)


def save(record: Record, results: Path) -> bool:
    """Adds a record to its task's file, in one move, in the place of an older one of the same row and seed.

    Returns False where an older record stays: it was meant to be trained for longer, and the row has not changed since
    or the new run is shorter than the row asks for. Several processes may do this at once.
    """
    path = path_of(record["task"], results)
    with writing(path, "results"), locked(results):
        known = load(record["task"], results)
        same = [one for one in known if (one["row"], one["seed"]) == (record["row"], record["seed"])]
        if any(_stays(one, record) for one in same):
            return False
        others = [one for one in known if one not in same]
        lines = (json.dumps(one, allow_nan=False) + "\n" for one in (*others, record))
        write_text(path, "".join(lines), "results")
    return True


def _stays(older: Record, newer: Record) -> bool:
    """Whether a record keeps its place: it was to be trained for longer, however it ended, and does not lag behind."""
    if _iterations_of(older) <= _iterations_of(newer):
        return False
    row, config, other = ROWS.get(newer["row"]), config_of(older), config_of(newer)
    is_as_wanted = row is not None and not is_stale(row, newer)
    return not is_as_wanted or (config is not None and other is not None and config.difference(other) is None)


def _iterations_of(record: Record) -> int:
    """For how long a run was to be trained."""
    return record["config"]["training"]["iterations"]
