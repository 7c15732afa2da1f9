"""The Markdown tables of copying and adding, whose rows have lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sab.lab.experiments.records import Record
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.report.numbers import (
    NONE,
    NOT_RUN,
    ByRow,
    footnotes,
    mark,
    median,
    method_name,
    show,
    show_each,
)
from sab.lab.tasks import TASKS
from tools.pages import command, markdown, table

LONGEST_OF_THE_PAPER = {"copying": 300, "adding": 400}


def tables(by_row: ByRow) -> list[str]:
    """The paper's tables."""
    parts: list[str] = []
    for task, longest in LONGEST_OF_THE_PAPER.items():
        for length in _lengths(task, longest):
            chosen = [row for row in ROWS.values() if (row.task, row.length) == (task, length)]
            text = f"## {task.capitalize()}, T = {length}"
            parts += [text, command(task, f"{task}-{length}-*"), table(chosen, by_row)]
    return parts


def _lengths(task: str, longest: int) -> list[int]:
    lengths = [row.length for row in ROWS.values() if row.task == task and row.length is not None]
    return [length for length in dict.fromkeys(lengths) if length <= longest]


def beyond(by_row: ByRow) -> list[str]:
    """What is not in the paper."""
    rows = [row for row in ROWS.values() if row.length and row.length > LONGEST_OF_THE_PAPER[row.task]]
    lengths = list(dict.fromkeys(row.length for row in rows))
    patterns = ",".join(f"copying-{length}-*" for length in lengths)
    text = f"## Beyond the paper: copying, T = {', '.join(map(str, lengths))}"
    tested = [row for row in ROWS.values() if row.other_lengths]
    return [
        *(text, command("copying", patterns), table(rows, by_row)),
        "## Beyond the paper: trained at T = 100, tested longer",
        command("copying", ",".join(row.id for row in tested)),
        "Accuracy on the last 10 in per cent with the same weights: the median, and each seed.",
        other_lengths_table(tested, by_row),
    ]


def other_lengths_table(rows: Sequence[Row], by_row: ByRow) -> str:
    """The headline metric of models that are tested at other lengths than they were trained at."""
    headline = TASKS[rows[0].task].headline
    lengths = rows[0].other_lengths
    lines: list[list[str]] = []
    for row in rows:
        start = [f"{method_name(row)}, {row.reading}", str(row.k_trunc or NONE), str(row.k_top or NONE)]
        cells: list[str] = []
        for length in (row.length or 0, *lengths):
            tested = [
                (record, metrics.get(headline.metric))
                for record in by_row.get(row.id, [])
                if (metrics := metrics_at(row, record, length)) is not None
            ]
            if not tested:
                cells.append(NOT_RUN)
                continue
            middle = median([value for _, value in tested], headline.higher_is_better)
            each = ", ".join(
                show_each(record, {headline.metric: value}) + mark(row, record) for record, value in tested
            )
            cells.append(f"**{'diverged' if middle is None else show(headline.metric, middle)}** ({each})")
        lines.append([*start, *cells])
    header = ["method", "k_trunc", "k_top", f"T={rows[0].length}, trained", *(f"T={length}" for length in lengths)]
    return "\n\n".join([markdown(header, lines), *footnotes(rows, by_row)])


def metrics_at(row: Row, record: Record, length: int) -> dict[str, Any] | None:
    """A run's metrics on test data of a length, none of them where it diverged; None if it was not tested there."""
    found = record["metrics"] if length == row.length else record.get("other_lengths", {}).get(str(length))
    return {} if found is not None and record["status"] == "diverged" else found
