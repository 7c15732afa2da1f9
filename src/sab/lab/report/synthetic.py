"""The cells of the tables of copying and adding, whose rows have lengths."""

from __future__ import annotations

from collections.abc import Sequence

from sab.lab.experiments.records import Record
from sab.lab.experiments.tables import COLUMNS, K_ATT, Row
from sab.lab.report.numbers import (
    NONE,
    NOT_RUN,
    ByRow,
    mark,
    memory_cells,
    show_each,
    show_median,
    show_times,
    value_of,
    verdict,
)
from sab.lab.tasks import TASKS

NAMES = {
    "accuracy_last10": "accuracy, %",
    "cross_entropy_last10": "CE, last 10",
    "cross_entropy": "CE",
    "mse": "error",
}


def table_cells(rows: Sequence[Row], by_row: ByRow) -> tuple[list[str], list[list[str]]]:
    """The same as a header and lines of cells; columns that say nothing are left out."""
    columns = [_columns(row, by_row.get(row.id, [])) for row in rows]
    optional = {"T": len({row.length for row in rows}) > 1, "k_att": any(row.k_att != K_ATT for row in rows)}
    in_paper = any(row.paper for row in rows)
    shown = [name for name in columns[0] if optional.get(name, in_paper or "paper" not in name)]
    return shown, [[cells[name] for name in shown] for cells in columns]


def _columns(row: Row, records: Sequence[Record]) -> dict[str, str]:
    """A row's cells by the names of their columns."""
    metrics, headline = COLUMNS[row.task], TASKS[row.task].headline
    cells = {"T": str(row.length), **memory_cells(row)}
    cells |= {f"paper: {NAMES[metric]}": row.paper.get(metric, NONE) for metric in metrics}
    for metric in metrics:
        is_better = headline.higher_is_better and metric == headline.metric
        cells[f"here: {NAMES[metric]}"] = show_median(records, metric, is_better) if records else NOT_RUN
    took = dict.fromkeys(("each seed", "seeds", "iterations", "first solved", "wall time"), NONE)
    if records:
        took |= {"each seed": _each(row, records, headline.metric), "seeds": str(len(records))}
        took |= {"iterations": _iterations(records), "first solved": _solved(records), "wall time": show_times(records)}
    return {**cells, **took, "against the paper": verdict(row, records)}


def _each(row: Row, records: Sequence[Record], metric: str) -> str:
    return ", ".join(show_each(record, {metric: value_of(record, metric)}) + mark(row, record) for record in records)


def _iterations(records: Sequence[Record]) -> str:
    return ", ".join(f"{count:,}" for count in dict.fromkeys(record["iterations"] for record in records))


def _solved(records: Sequence[Record]) -> str:
    if all(record["solved_at"] is None for record in records):
        return "never"
    return ", ".join("never" if record["solved_at"] is None else f"{record['solved_at']:,}" for record in records)
