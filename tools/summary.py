"""The paper's tables in one: the first thing on docs/results.md, and a sentence in the README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sab.lab.experiments.records import Record
from sab.lab.experiments.rivals import CONTENDERS, PROBLEMS
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.report.numbers import NONE, NOT_RUN, ByRow, mark, notes_on, show, show_median, verdict_word
from sab.lab.report.tables import PAPERS_TABLES, heading, summary_of
from sab.lab.tasks import TASKS
from tools.groups import SELECTION_NOTE, SELECTION_SIGN, best_selection_run, chosen_group
from tools.pages import markdown
from tools.rivals import known

HEADER = ["task", "SAB (seeds)", "paper's SAB", "verdict", "truncated", "full BPTT", "best rival"]
UNITS = {"accuracy_last10": "%", "accuracy": "%", "mse": "error", "bits_per_character": "bits"}
NOTE = (
    "Medians on test data: accuracy in per cent (copying: on the last 10), mean squared error, bits per character. "
    "*SAB* is the paper's best setting of each table as we train it; in a text every window begins with an empty "
    "memory. *Truncated* and *full BPTT* are the best LSTMs here without a memory, in the paper's training or in ours. "
    "*Best rival* is the best other method of the rivals' table, where all have equal parameters and another training "
    "(– where that table has no such task)."
)


def part(by_row: ByRow, rivals: Sequence[Record]) -> str:
    """The table with its note, from the records of the paper's rows and of the rivals' table."""
    lines = [_line(title, rows, by_row, known(rivals)) for title, rows in tables(by_row)]
    selected = [SELECTION_NOTE] if any(SELECTION_SIGN in cell for line in lines for cell in line) else []
    return f"{markdown(HEADER, lines)}\n\n{' '.join([NOTE, *notes_on(lines), *selected])}"


def sentence(by_row: ByRow) -> str:
    """How many of the paper's tables SAB reaches."""
    words = [_line(title, rows, by_row, [])[3] for title, rows in tables(by_row)]
    ways = {"reached": "in {}", "partly": "partly in {} (from some seeds, or in one of two evaluations)"}
    found = [text.format(words.count(word)) for word, text in ways.items() if word in words]
    reached = " and ".join(found) or "in none"
    return (
        f"**The paper's tables**: of {len(words)}, SAB in our training reaches the paper's best value {reached}. "
        "[Every row](docs/results-tables.md) has the paper's training, too."
    )


def tables(by_row: ByRow) -> Iterator[tuple[str, list[Row]]]:
    """The paper's tables by their titles."""
    for task, length in dict.fromkeys((row.task, row.length) for row in ROWS.values() if row.length and row.is_papers):
        rows = [row for row in ROWS.values() if (row.task, row.length) == (task, length)]
        yield f"{task.capitalize()} T = {length}", rows
    for section in PAPERS_TABLES:
        yield heading(section.rows, by_row), section.rows


def _line(title: str, rows: list[Row], by_row: ByRow, rivals: Sequence[Record]) -> list[str]:
    found = summary_of(rows, by_row)
    name = f"{title}, {UNITS[TASKS[rows[0].task].headline.metric]}"
    others = [_value(found.truncated, by_row), _value(found.full, by_row), _best_rival(rows[0], rivals)]
    if found.sab is None:
        return [name, NOT_RUN, NONE, NONE, *others]
    records = by_row[found.sab.id]
    older = max((mark(found.sab, record) for record in records), key=len)
    here = f"{_value(found.sab, by_row)} ({len(records)}){older}"
    return [name, here, found.sab.paper[found.sab.judged], verdict_word(found.sab, records), *others]


def _value(row: Row | None, by_row: ByRow) -> str:
    if row is None:
        return NOT_RUN
    headline = TASKS[row.task].headline
    return show_median(by_row[row.id], headline.metric, headline.higher_is_better)


def _best_rival(row: Row, rivals: Sequence[Record]) -> str:
    """The best method but SAB in the rivals' table of a task and length, and its median."""
    problem = PROBLEMS.get(row.task if row.length is None else f"{row.task}-{row.length}")
    if problem is None or not problem.is_matched:
        return NONE
    headline = TASKS[row.task].headline
    medians: dict[str, float] = {}
    for name in problem.contenders:
        contender = {"contender": name}
        group, sign = chosen_group(problem, contender, rivals), ""
        if group is None:
            group, sign = best_selection_run(problem, contender, rivals), f" {SELECTION_SIGN}"
        if CONTENDERS[name].is_rival and group is not None and group.median is not None:
            medians[f"{CONTENDERS[name].title}{sign}"] = group.median
    if not medians:
        return NOT_RUN
    best = (max if headline.higher_is_better else min)(medians, key=lambda title: medians[title])
    return f"{show(headline.metric, medians[best])} {best}"
