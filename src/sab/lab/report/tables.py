"""The cells of the paper's tables with our numbers: those of tasks with lengths, and those of tasks with data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sab.lab.experiments.records import Record, largest
from sab.lab.experiments.settings import PAPERS
from sab.lab.experiments.tables import COLUMNS, K_ATT, Row, find
from sab.lab.report.numbers import (
    NONE,
    NOT_RUN,
    REACHED,
    ByRow,
    against_truncation,
    mark,
    measures,
    median_of,
    memory_cells,
    show_each,
    show_median,
    show_times,
    value_of,
    verdict,
    verdict_word,
)
from sab.lab.tasks import TASKS

TITLES = {"ptb": "Penn Treebank", "mnist": "Pixel-by-pixel MNIST", "permuted mnist": "Permuted MNIST"}
TITLES |= {"cifar10": "Pixel-by-pixel CIFAR-10"}
"""What data are called in a heading, where that is not their own name."""
NAMES = {"accuracy_last10": "accuracy, %", "cross_entropy_last10": "CE, last 10", "cross_entropy": "CE", "mse": "error"}
VERDICT = "against the paper"
TBPTT = "better than TBPTT here"


class Section(NamedTuple):
    """Rows that make up a table: those that a command with these patterns runs."""

    task: str
    patterns: str

    @property
    def rows(self) -> list[Row]:
        return find([self.task], self.patterns.split(","))


PAPERS_TABLES = [Section(task, f"{task}-bptt*,{task}-tbptt-*,{task}-sab-*-as-*,{task}-sab-*-ours") for task in PAPERS]
PERMUTED, CIFAR10 = Section("mnist", "mnist-permuted-*"), Section("cifar10", "cifar10-*")
CELLS = [
    Section(task, f"{row},{row}-gru,{row}-rnn_tanh")
    for task, row in (("ptb", "ptb-sab-5-10-ours"), ("mnist", "mnist-sab-14-10-ours"))
]
UNCLIPPED = [
    Section(task, f"{row},{row}-unclipped")
    for task, row in (("ptb", "ptb-sab-5-10-ours"), ("mnist", "mnist-sab-14-10-ours"))
]
CARRIED = Section("ptb", "ptb-bptt-ours,ptb-tbptt-5-ours,ptb-sab-5-10-ours,ptb-carried-*")
"""Rows that are trained with the state carried, and the same rows as every other one is trained."""


def title(rows: Iterable[Row], by_row: ByRow) -> str:
    """The data that the rows' numbers are of: those of their records or, without any, those of the rows."""
    rows = list(rows)
    found = [record["data"] for row in rows for record in by_row.get(row.id, [])]
    return ", ".join(dict.fromkeys(found or [row.config(0).task.title for row in rows]))


def heading(rows: Sequence[Row], by_row: ByRow) -> str:
    """The data's names as a heading."""
    return ", ".join(TITLES.get(name, name) for name in title(rows, by_row).split(", "))


class Summary(NamedTuple):
    """A table in a line: a row of each method, where there is one with records."""

    sab: Row | None
    """SAB as we train it, in the setting in which the paper's own SAB is best."""
    full: Row | None
    truncated: Row | None
    """The LSTMs without a memory that are best here, in whichever training."""
    reached: str
    """How many rows of SAB as we train it reach the paper, of those that it has."""


def summary_of(rows: Sequence[Row], by_row: ByRow) -> Summary:
    """The rows that tell most of a table."""
    headline = TASKS[rows[0].task].headline
    choose = max if headline.higher_is_better else min

    def best(credit: str) -> Row | None:
        found: list[tuple[float, Row]] = []
        for row in rows:
            value = median_of(by_row.get(row.id, []), headline.metric, headline.higher_is_better)
            if row.credit == credit and value is not None:
                found.append((value, row))
        return choose(found, key=lambda one: one[0])[1] if found else None

    ours = [row for row in rows if row.method == "sab" and row.reading == "ours" and row.paper and by_row.get(row.id)]
    words = [verdict_word(row, by_row[row.id]) for row in ours]
    return Summary(
        sab=choose(ours, key=lambda row: float(row.paper[row.judged])) if ours else None,
        full=best("bptt"),
        truncated=best("tbptt"),
        reached=f"{words.count(REACHED)} of {len(ours)}" if ours else NONE,
    )


def table_cells(rows: Sequence[Row], by_row: ByRow) -> tuple[list[str], list[list[str]]]:
    """The header and the lines of a table of one task's rows; columns without information are left out."""
    cells = [_length_cells(row, by_row) if row.length else _dataset_cells(row, by_row) for row in rows]
    has_length = rows[0].length is not None
    has_unclipped = any(not row.is_clipped for row in rows)
    optional = {
        "T": len({row.length for row in rows}) > 1,
        "k_att": not has_length or any(row.k_att != K_ATT for row in rows),
        "cell": any(row.cell != "lstm" for row in rows),
        "clip": has_unclipped,
        "data": has_length or title(rows, by_row) != title(rows, {}),
        "largest gradient norm": has_unclipped,
        TBPTT: any(one.get(TBPTT, NONE) != NONE for one in cells),
    }
    in_paper = any(row.paper for row in rows)
    shown = [name for name in cells[0] if optional.get(name, in_paper or "paper" not in name)]
    shown.sort(key=_rank)
    return shown, [[one[name] for name in shown] for one in cells]


def _rank(column: str) -> int:
    """Where a column stands: what a reader looks for comes first, the verdict, then our numbers and the paper's."""
    if column in ("T", "method", "reading", "k_trunc", "k_top", "k_att", "cell", "clip"):
        return 0
    if column == VERDICT:
        return 1
    return 2 if column.startswith(("here:", "fresh:", "carried:")) else 3 if column.startswith("paper:") else 4


def _length_cells(row: Row, by_row: ByRow) -> dict[str, str]:
    """The cells of a row of copying or adding by column."""
    records, headline = by_row.get(row.id, []), TASKS[row.task].headline
    cells = {"T": str(row.length), **memory_cells(row)}
    cells |= {f"paper: {name}": row.paper.get(metric, NONE) for metric, name in _named(row)}
    for metric, name in _named(row):
        is_better = headline.higher_is_better and metric == headline.metric
        cells[f"here: {name}"] = show_median(records, metric, is_better) if records else NOT_RUN
    took = dict.fromkeys(("each seed", "seeds", "iterations", "first solved", "wall time"), NONE)
    if records:
        took |= {"each seed": _each(row, records), "seeds": str(len(records)), "wall time": show_times(records)}
        took["iterations"] = ", ".join(f"{one:,}" for one in dict.fromkeys(record["iterations"] for record in records))
        solved = ["never" if record["solved_at"] is None else f"{record['solved_at']:,}" for record in records]
        took["first solved"] = "never" if set(solved) == {"never"} else ", ".join(solved)
    return {**cells, **took, VERDICT: verdict(row, records)}


def _named(row: Row) -> list[tuple[str, str]]:
    """The metrics of a row of copying or adding, with their names in a table."""
    return [(metric, NAMES[metric]) for metric in COLUMNS[row.task]]


def _dataset_cells(row: Row, by_row: ByRow) -> dict[str, str]:
    """The cells of a row of a task with a data set by column."""
    records = by_row.get(row.id, [])
    higher = TASKS[row.task].headline.higher_is_better
    clip = row.config(0).training.clip
    cells = {**memory_cells(row), "cell": row.cell, "clip": "none" if clip is None else f"{clip:g}"}
    cells["data"] = title([row], {row.id: records}) if records else NONE
    cells |= {f"paper: {column}": row.paper.get(column, NONE) for column in COLUMNS[row.task]}
    for name, metric in measures(row.task).items():
        for split in ("valid", "test"):
            column = f"{name}: {split}" if name else f"here: {split}"
            cells[column] = show_median(records, metric, higher, split) if records else NOT_RUN
    took = dict.fromkeys(("each seed", "seeds", "epochs", "best epoch", "largest gradient norm", "wall time"), NONE)
    if records:
        took |= {"each seed": _each(row, records), "seeds": str(len(records))}
        took |= {"epochs": _each_once(record["epochs"] for record in records)}
        took |= {"best epoch": _each_once(map(_best_epoch, records))}
        took |= {"largest gradient norm": _largest_norm(records), "wall time": show_times(records)}
    return {**cells, **took, VERDICT: verdict(row, records), TBPTT: against_truncation(row, by_row)}


def _each(row: Row, records: Sequence[Record]) -> str:
    """Every seed's numbers on test data, in each way that the task is judged by."""
    metrics = measures(row.task).values()
    return ", ".join(
        show_each(record, {metric: value_of(record, metric) for metric in metrics}) + mark(row, record)
        for record in records
    )


def _best_epoch(record: Record) -> float | None:
    return None if record["best_at"] is None else record["best_at"] / record["iterations"] * record["epochs"]


def _each_once(epochs: Iterable[float | None]) -> str:
    """Every seed's number of epochs, or that of all."""
    shown = [NONE if one is None else f"{round(one, 2):g}" for one in epochs]
    return ", ".join(shown if len(set(shown)) > 1 else shown[:1])


def _largest_norm(records: Sequence[Record]) -> str:
    norms = [largest(point["grad_norm_max"] for point in record["history"]) for record in records]
    return ", ".join(NONE if norm is None else f"{norm:.3g}" for norm in norms)
