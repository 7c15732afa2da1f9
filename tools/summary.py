"""The paper's tables in one: the first thing on docs/results.md, and a sentence in the README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sab.lab.experiments.records import Record
from sab.lab.experiments.rivals import CONTENDERS, PROBLEMS
from sab.lab.experiments.tables import FULL_BUDGET, ITERATIONS, ROWS, Row
from sab.lab.report.numbers import NONE, NOT_RUN, ByRow, mark, notes_on, show, show_median, verdict_word
from sab.lab.report.tables import PAPERS_TABLES, heading, summary_of
from sab.lab.tasks import TASKS
from tools.groups import selection_notes, shown_group
from tools.pages import markdown
from tools.rivals import known

HEADER = ["task", "SAB", "paper's SAB", "verdict", "truncated", "full BPTT", "best rival"]
UNITS = {"accuracy_last10": "%", "accuracy": "%", "mse": "error", "bits_per_character": "bits"}
BUDGET_SIGN = "¶"
BUDGET_NOTE = (
    f"{BUDGET_SIGN} With the paper's {FULL_BUDGET:,} iterations; the other LSTMs on copying and adding have at most "
    f"{ITERATIONS:,}."
)
NOTE = (
    "Medians on test data, with the number of seeds: accuracy in per cent (copying: on the last 10), mean squared "
    "error, bits per character. *SAB* is the paper's best setting of each table as we train it; in a text every window "
    "begins with an empty memory. *Truncated* and *full BPTT* are the best LSTMs here without a memory, in the paper's "
    "training or in ours. "
    "*Best rival* is the best of the methods run so far in the rivals' table, SAB left out (– where that table has no "
    "such task). There all have equally many parameters, and one training of their own; its LSTM is full BPTT."
)


def part(by_row: ByRow, rivals: Sequence[Record]) -> str:
    """The table with its note, from the records of the paper's rows and of the rivals' table."""
    lines = [_line(title, rows, by_row, known(rivals)) for title, rows in tables(by_row)]
    budget = [BUDGET_NOTE] if any(BUDGET_SIGN in cell for line in lines for cell in line) else []
    return f"{markdown(HEADER, lines)}\n\n{' '.join([NOTE, *notes_on(lines), *budget, *selection_notes(lines)])}"


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
    verdict = verdict_word(found.sab, by_row[found.sab.id])
    return [name, _value(found.sab, by_row), found.sab.paper[found.sab.judged], verdict, *others]


def _value(row: Row | None, by_row: ByRow) -> str:
    """A row's median with the number of seeds, and the signs of what is special about it."""
    if row is None:
        return NOT_RUN
    headline, records = TASKS[row.task].headline, by_row[row.id]
    value = show_median(records, headline.metric, headline.higher_is_better)
    older = max((mark(row, record) for record in records), key=len)
    return f"{value} ({len(records)}){older}{f' {BUDGET_SIGN}' * row.is_full_budget}"


def _best_rival(row: Row, rivals: Sequence[Record]) -> str:
    """The best method but SAB in the rivals' table of a task and length, and its median."""
    problem = PROBLEMS.get(row.task if row.length is None else f"{row.task}-{row.length}")
    if problem is None or not problem.is_matched:
        return NONE
    headline = TASKS[row.task].headline
    found: list[tuple[float, str]] = []  # medians and their cells
    for contender in (CONTENDERS[name] for name in problem.contenders if CONTENDERS[name].is_rival):
        group, sign = shown_group(problem, {"contender": contender.name}, rivals)
        if group is not None and group.median is not None:
            count = sign or f" ({len(group.records)})"
            found.append((group.median, f"{show(headline.metric, group.median)}{count} {contender.title}"))
    if not found:
        return NOT_RUN
    return (max if headline.higher_is_better else min)(found, key=lambda one: one[0])[1]
