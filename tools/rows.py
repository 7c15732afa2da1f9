"""Every row, seed and number of the paper's tables as CSV: docs/results.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from sab.lab.experiments.records import Record, is_stale, other_memory
from sab.lab.experiments.tables import COLUMNS, ROWS, Row
from sab.lab.report.numbers import NONE, NOT_RUN, ByRow, measures, memory_cells, scaled, value_of
from tools.synthetic import metrics_at

HEADER = ["task", "length", "data", "row", "method", "reading", "cell", "k_trunc", "k_top", "k_att", "seed", "status"]
HEADER += ["metric", "split", "tested_length", "value", "paper", "outdated", "iterations", "wall_time"]
HEADER += ["device", "commit", "date"]


def text(by_row: ByRow) -> str:
    """A line for each number of each seed; lines without a seed for a row that was not run."""
    out = io.StringIO()
    writer = csv.DictWriter(out, HEADER, restval="", lineterminator="\n")
    writer.writeheader()
    for row in ROWS.values():
        for record in by_row.get(row.id) or [None]:
            about = _about_row(row) | _about_run(row, record)
            writer.writerows(about | number for number in _numbers(row, record))
    return out.getvalue()


def _about_row(row: Row) -> dict[str, Any]:
    cells = {name: "" if cell == NONE else cell for name, cell in memory_cells(row).items()}
    return {"task": row.task, "length": row.length, "row": row.id, "cell": row.cell, **cells}


def _about_run(row: Row, record: Record | None) -> dict[str, Any]:
    if record is None:
        return {"status": NOT_RUN}
    memory = other_memory(row, record)
    outdated = f"memory: {memory}" if memory else "configuration" if is_stale(row, record) else ""
    names = ("data", "seed", "status", "iterations", "device", "commit", "date")
    run = {name: record.get(name) for name in names}
    return run | {"outdated": outdated, "wall_time": f"{record['wall_time']:.1f}"}


def _numbers(row: Row, record: Record | None) -> Iterator[dict[str, Any]]:
    """Every number of a run with the paper's; `value` is empty where there is none."""
    if row.length is None:
        for metric in measures(row.task).values():
            for split in COLUMNS[row.task]:
                value = None if record is None else value_of(record, metric, split)
                yield {"metric": metric, "split": split, "value": _show(metric, value), "paper": row.paper.get(split)}
        return
    for length in (row.length, *row.other_lengths):
        found = metrics_at(row, record, length) if record else None
        if record and found is None:
            continue
        for metric in COLUMNS[row.task]:
            value = (found or {}).get(metric)
            number = {"metric": metric, "split": "test", "tested_length": length, "value": _show(metric, value)}
            yield number | {"paper": row.paper.get(metric) if length == row.length else None}


def _show(metric: str, value: float | None) -> str:
    return "" if value is None else f"{scaled(metric, value):.6g}"
