"""The paper's tables in one: the first thing on docs/results.md, and in the README."""

from __future__ import annotations

from collections.abc import Iterator

from sab.lab.experiments.tables import ROWS, Row
from sab.lab.report.numbers import NONE, NOT_RUN, ByRow, label, mark, show_median, verdict_word
from sab.lab.report.tables import PAPERS_TABLES, heading, summary_of
from sab.lab.tasks import TASKS
from tools.pages import markdown

HEADER = ["task", "SAB here (seeds)", "the paper's SAB", "verdict", "truncated BPTT here", "full BPTT here"]
NOTE = (
    "Medians on test data. *SAB* is the paper's best setting of each table as we train it; in a text every window "
    "begins with an empty memory. The LSTMs are the best ones here, in the paper's training or in ours."
)
OLDER = "‡ Recorded with an earlier memory."


def part(by_row: ByRow) -> str:
    """The table with its note."""
    lines = [_line(title, rows, by_row) for title, rows in _tables(by_row)]
    note = f"{NOTE} {OLDER}" if any("‡" in cell for line in lines for cell in line) else NOTE
    return f"{markdown(HEADER, lines)}\n\n{note}"


def _tables(by_row: ByRow) -> Iterator[tuple[str, list[Row]]]:
    """The paper's tables by their titles."""
    for task, length in dict.fromkeys((row.task, row.length) for row in ROWS.values() if row.length and row.is_papers):
        rows = [row for row in ROWS.values() if (row.task, row.length) == (task, length)]
        yield f"{task.capitalize()} T = {length}", rows
    for section in PAPERS_TABLES:
        yield heading(section.rows, by_row), section.rows


def _line(title: str, rows: list[Row], by_row: ByRow) -> list[str]:
    found = summary_of(rows, by_row)
    name = f"{title}, {label(TASKS[rows[0].task].headline)}"
    if found.sab is None:
        return [name, NOT_RUN, NONE, NONE, _value(found.truncated, by_row), _value(found.full, by_row)]
    records = by_row[found.sab.id]
    older = max((mark(found.sab, record) for record in records), key=len)
    here = f"{_value(found.sab, by_row)} ({len(records)}){older}"
    printed, word = found.sab.paper[found.sab.judged], verdict_word(found.sab, records)
    return [name, here, printed, word, _value(found.truncated, by_row), _value(found.full, by_row)]


def _value(row: Row | None, by_row: ByRow) -> str:
    if row is None:
        return NOT_RUN
    headline = TASKS[row.task].headline
    return show_median(by_row[row.id], headline.metric, headline.higher_is_better)
