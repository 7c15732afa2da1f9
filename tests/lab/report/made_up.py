"""Records that nobody ran, and a table's cells by their columns."""

from __future__ import annotations

from typing import Any

from sab.lab.experiments import records as stored
from sab.lab.experiments import rivals
from sab.lab.experiments.dropin import DropInRow, Problem
from sab.lab.experiments.selection import Row
from sab.lab.experiments.settings import epochs_in
from sab.lab.experiments.tables import COLUMNS, ROWS
from sab.lab.models import Method
from sab.lab.report.numbers import ByRow, measures
from sab.lab.report.tables import table_cells

SAB = "copying-300-sab-5-5-ours"


def record(row: str = SAB, seed: int = 0, value: float = 1.0, part: Any = "full", **entries: Any) -> dict[str, Any]:
    """A record whose every metric has the same value on test data; `part` is that of text8."""
    chosen = ROWS[row]._on_part(part) if ROWS[row].task == "text8" else ROWS[row]
    config = chosen.config(seed)
    task, training = config.task, config.training
    metrics = dict.fromkeys(COLUMNS[task.name] if chosen.length else measures(task.name).values(), value)
    steps = (training.eval_every, 2 * training.eval_every)
    norms = {"grad_norm": 0.5, "grad_norm_max": 2.0}
    history = [{"step": step, "loss": 1.0, "metrics": metrics, **norms} for step in steps]
    made = {"schema": stored.SCHEMA, "row": row, "task": task.name, "seed": seed, "status": "finished"}
    made |= {"message": "finished.", "iterations": training.iterations, "solved_at": 400, "metrics": metrics}
    made |= {"wall_time": 75.0, "together": 8, "other_lengths": {}, "device": "cuda (GPU)", "commit": "abcdef0123456"}
    made |= {"versions": {"torch": "2.11"}, "date": "2026-01-02T03:04:05+00:00"}
    if chosen.length is None:  # of an older version, as the committed ones are, where it is copying or adding
        made |= {"data": task.title, "epochs": epochs_in(task, training.iterations), "best_at": steps[1]}
        made["valid"] = dict.fromkeys(metrics, value + 0.01)
    return {**made, "config": config.to_json(), "history": history, **entries}


def drop_in_record(
    problem: Problem, rate: float, seed: int, valid: float, test: float | None, method: Method = "sab", **entries: Any
) -> dict[str, Any]:
    """A record of the drop-in table, with the problem's first cell."""
    row = DropInRow(problem, problem.cells[0], method, rate)
    return {**_of_table(row, seed, valid, test), **row.entries, **entries}


def _of_table(row: Row, seed: int, valid: float | None, test: float | None) -> dict[str, Any]:
    """What the records of tables have whose learning rates are chosen."""
    problem, metric = row.problem, row.problem.make_task().headline.metric
    record = {"schema": stored.SCHEMA, "row": row.id, "task": row.task, "seed": seed, "status": "finished"}
    record |= {"message": "finished.", "iterations": 4, "solved_at": None, "metrics": {metric: test}}
    record |= {"valid": {metric: valid}, "best_at": 2 if problem.is_real else None, "epochs": 1.0, "history": []}
    record |= {"wall_time": 5.0, "device": "cpu", "versions": {"torch": "2.11"}, "commit": None, "data": problem.task}
    record |= {"date": "2026-01-02T03:04:05+00:00", "config": row.config(seed).to_json(), "problem": problem.name}
    return record | {"rate": row.rate, "parameters": 9, "is_finite": True, "best": valid}


def rival_record(
    problem: rivals.Problem, name: str, rate: float, seed: int, valid: float | None, test: float | None, **entries: Any
) -> dict[str, Any]:
    """A record of the rivals' table."""
    row = rivals.RivalRow(problem, rivals.CONTENDERS[name], rate)
    metric = problem.make_task().headline.metric
    made = _of_table(row, seed, valid, test) | row.entries
    made["other_lengths"] = {str(length): {metric: test} for length in problem.other_lengths}
    return {**made, **entries}


def rival_cost(problem: str, name: str, milliseconds: float = 2.5, **entries: Any) -> dict[str, Any]:
    """A record of a rival's costs."""
    made = {"problem": problem, "contender": name, "hidden_size": 8, "parameters": 900, "train_bytes": 3 * 2**20}
    made |= {"update_milliseconds": milliseconds, "stream": None, "device": "cpu", "threads": 1}
    made |= {"versions": {"torch": "2.11"}}
    return {**made, "commit": None, "date": "2026-01-02T03:04:05+00:00", **entries}


def diverged(row: str = SAB, seed: int = 0, after: int = 240) -> dict[str, Any]:
    message = f"the loss of iteration {after + 1} is nan; the weights were left as they were before it."
    ended = {"status": "diverged", "iterations": after, "solved_at": None, "best_at": None, "message": message}
    return record(row, seed, 0.5, **ended)


def by_row(*made: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for one in made:
        grouped.setdefault(one["row"], []).append(one)
    return grouped


def cells(row: str, by_row: ByRow) -> dict[str, str]:
    """The cells of a row by their columns."""
    header, (line,) = table_cells([ROWS[row]], by_row)
    return dict(zip(header, line, strict=True))
