"""Records: what a run of a table's row came to, one JSON line each in results/<task>.jsonl."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from sab.errors import ValueMistake
from sab.experiments.locks import locked
from sab.experiments.settings import epochs_in
from sab.experiments.tables import Row
from sab.files import write_text, writing
from sab.training.run import Run

Record = dict[str, Any]
SCHEMA = 1
"""Changes when records can no longer be read as before."""
MOST_POINTS = 40
"""How many evaluations a record keeps."""
NEEDED = {"row", "seed", "config", "status", "message", "iterations", "solved_at", "metrics", "history", "wall_time"}
"""What every record has; older ones lack what `make` has besides."""


def make(row: Row, run: Run, beside: dict[str, Any], commit: str | None = None) -> Record:
    """The record of a run at its end; `beside` is what the runner noted, `commit`, if given, the commit to name."""
    result = run.result()
    assert result is not None
    told = vars(result)
    task = run.config.task
    record = {"schema": SCHEMA, "row": row.id, "task": row.task, "data": task.title, "seed": run.config.training.seed}
    record |= {name: told[name] for name in ("status", "message", "iterations", "solved_at", "metrics", "wall_time")}
    record |= {"valid": result.valid, "best_at": result.best_at, "epochs": epochs_in(task, result.iterations)}
    record["together"] = beside.get("together", 1)
    record["other_lengths"] = beside.get("other_lengths", {})
    record |= {"device": result.device, "versions": result.versions, "commit": commit or result.commit}
    record["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record["config"] = run.config.to_json()
    record["history"] = thinned(run.evaluations())
    if "attention" in beside:
        record["attention"] = beside["attention"]
    return record


def thinned(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_POINTS evaluations, the last among them; gradient norms are about all since the one before."""
    every = max(ceil(len(evaluations) / MOST_POINTS), 1)
    kept: list[dict[str, Any]] = []
    for end in range(len(evaluations), 0, -every):
        group = evaluations[max(end - every, 0) : end]
        point = {name: group[-1][name] for name in ("step", "loss", "metrics")}
        norms = {"grad_norm": fmean(line["grad_norm"] for line in group)}
        norms["grad_norm_max"] = max(line["grad_norm_max"] for line in group)
        kept.append({**point, **norms})
    return kept[::-1]


def path_of(task: str, results: Path) -> Path:
    """The file that has a task's records."""
    return results / f"{task}.jsonl"


def load(task: str, results: Path) -> list[Record]:
    """A task's records, none where there is no file."""
    path = path_of(task, results)
    if not path.exists():
        return []
    wanted = f"results {str(path)!r} must be a file of JSON lines that `sab reproduce` wrote"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueMistake(f"{wanted}; it cannot be read: {error}.", "results") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or record.get("schema") != SCHEMA or not record.keys() >= NEEDED:
            raise ValueMistake(f"{wanted}; line {number} is none of this version.", "results")
    return records


def save(record: Record, results: Path) -> bool:
    """Adds a record to its task's file, in one move, in the place of an older one of the same row and seed.

    One that was meant to be trained for longer stays, which is told. Several processes may do this at once.
    """
    path = path_of(record["task"], results)
    with writing(path, "results"):
        results.mkdir(parents=True, exist_ok=True)
    with locked(results):
        known = load(record["task"], results)
        same = [one for one in known if (one["row"], one["seed"]) == (record["row"], record["seed"])]
        if any(_iterations_of(one) > _iterations_of(record) for one in same):
            return False
        others = [one for one in known if one not in same]
        lines = (json.dumps(one, allow_nan=False) + "\n" for one in (*others, record))
        write_text(path, "".join(lines), "results")
    return True


def _iterations_of(record: Record) -> int:
    """For how long a run was to be trained, however it ended."""
    return record["config"]["training"]["iterations"]
