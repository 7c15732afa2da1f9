"""How much of the distance between truncated and full backpropagation SAB closes, here and in the paper."""

from __future__ import annotations

from collections.abc import Sequence

from sab.lab.experiments.tables import ROWS, Row
from sab.lab.report.numbers import NONE, NOT_RUN, ByRow, mark, measures, median_of, notes_on, show
from sab.lab.tasks import TASKS
from tools.pages import markdown
from tools.summary import tables

HEADER = ["task", "truncated", "SAB", "full BPTT", "closed here", "closed in the paper"]
NOTE = (
    "*Closed* is (SAB − truncated) / (full − truncated), from medians on test data in our training. The LSTMs have "
    "SAB's hidden size but fewer parameters; the truncated one is cut as often as SAB. More than 100 % is better than "
    "full backpropagation; a small distance makes the share uncertain. The paper's share is from its own numbers, with "
    "its best truncated LSTM where none is cut as often. *Better training*: each method trained on fresh windows or "
    "with the state carried, whichever is better on validation data."
)
CREDITS = "tbptt", "sab", "bptt"
MOST = 999
"""Per cent; a larger share tells that the distance is next to nothing."""


def part(by_row: ByRow) -> str:
    """The table, a line for each of the paper's tables and each way that it is judged by, with its notes."""
    lines = [line for title, rows in tables(by_row) for line in _lines(title, rows, by_row)]
    return f"{markdown(HEADER, lines)}\n\n{' '.join([NOTE, *notes_on(lines)])}"


def _lines(title: str, rows: Sequence[Row], by_row: ByRow) -> list[list[str]]:
    higher = TASKS[rows[0].task].headline.higher_is_better
    sab = (max if higher else min)((row for row in rows if row.is_papers and row.credit == "sab"), key=_printed)
    controls = {row.credit: row for row in rows if row.is_control and row.k_trunc in (None, sab.k_trunc)}
    compared = [sab if credit == "sab" else controls.get(credit) for credit in CREDITS]
    printed = _in_paper(sab, [row for row in rows if row.is_papers])
    lines = [
        [f"{title}, {name}" if name else title, *_values(compared, metric, by_row), printed]
        for name, metric in measures(sab.task).items()
    ]
    carried = {row.credit: row for row in ROWS.values() if row.task == sab.task and row.is_carried}
    if carried:
        metric = measures(sab.task)["carried"]
        better = [_better(row, carried[credit], metric, by_row) for row, credit in zip(compared, CREDITS, strict=True)]
        lines.append([f"{title}, carried, better training", *_values(better, metric, by_row), NONE])
    return lines


def _better(row: Row | None, other: Row, metric: str, by_row: ByRow) -> Row:
    """The row with the better median on validation data; the other one where the first was not run."""
    higher = TASKS[other.task].headline.higher_is_better
    medians = {
        one.id: median_of(by_row.get(one.id, []), metric, higher, "valid") for one in (row, other) if one is not None
    }
    if row is None or (first := medians[row.id]) is None:
        return other
    second = medians[other.id]
    return row if second is None or (first > second) == higher else other


def _values(compared: Sequence[Row | None], metric: str, by_row: ByRow) -> list[str]:
    """Truncated backpropagation, SAB and full backpropagation, and the share that SAB closes."""
    higher = next(TASKS[row.task].headline.higher_is_better for row in compared if row is not None)
    values = [None if row is None else median_of(by_row.get(row.id, []), metric, higher) for row in compared]
    cells = [_cell(row, value, metric, by_row) for row, value in zip(compared, values, strict=True)]
    return [*cells, share(values[0], values[1], values[2], higher)]


def _printed(row: Row) -> float:
    return float(row.paper[row.judged])


def _in_paper(sab: Row, in_paper: Sequence[Row]) -> str:
    """The same share from the paper's own numbers."""
    higher = TASKS[sab.task].headline.higher_is_better
    truncated = [row for row in in_paper if row.credit == "tbptt"]
    truncated = [row for row in truncated if row.k_trunc == sab.k_trunc] or truncated
    (full,) = (row for row in in_paper if row.credit == "bptt")
    if not truncated:
        return NONE
    best = (max if higher else min)(truncated, key=_printed)
    return share(_printed(best), _printed(sab), _printed(full), higher)


def _cell(row: Row | None, value: float | None, metric: str, by_row: ByRow) -> str:
    if row is None or value is None:
        return NOT_RUN if row is None or not by_row.get(row.id) else "diverged"
    return show(metric, value) + max((mark(row, record) for record in by_row[row.id]), key=len)


def share(truncated: float | None, sab: float | None, full: float | None, higher_is_better: bool) -> str:
    """The share of the distance from truncated to full backpropagation that SAB goes, in per cent."""
    if truncated is None or sab is None or full is None:
        return NONE
    distance = full - truncated if higher_is_better else truncated - full
    if distance <= 0:
        return "full is not better"
    closed = 100 * (sab - truncated if higher_is_better else truncated - sab) / distance
    if closed < 0:
        return "none: behind truncated"
    return f"{closed:.0f} %" if closed <= MOST else f"over {MOST} %"
