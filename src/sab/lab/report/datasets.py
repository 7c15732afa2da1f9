"""The tables of ptb, text8 and mnist, which are judged on validation and test data: docs/results.md and the README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.records import Record, largest
from sab.lab.experiments.settings import PAPERS, Setting
from sab.lab.experiments.tables import COLUMNS, ROWS, Row, find
from sab.lab.report.numbers import (
    NOT_RUN,
    STALE_TOLD,
    ByRow,
    against_truncation,
    any_is_stale,
    label,
    mark,
    measures,
    memory_cells,
    show_each,
    show_median,
    show_times,
    value_of,
    verdict,
)
from sab.lab.report.pages import NONE, command, markdown
from sab.lab.tasks import TASKS

CLIPPING = "clipping.png"
"""The file of the figure; those of the learning curves are `curves_of`."""
TITLES = {"ptb": "Penn Treebank", "mnist": "Pixel-by-pixel MNIST", "permuted mnist": "Permuted MNIST"}
"""What data are called in a heading, where that is not their own name."""
TBPTT = "better than TBPTT here"


class Section(NamedTuple):
    """Rows that make up a table: those that a command with these patterns runs."""

    task: str
    patterns: str

    @property
    def rows(self) -> list[Row]:
        return find([self.task], self.patterns.split(","))

    @property
    def command(self) -> str:
        return command(self.task, self.patterns)


PAPERS_TABLES = [Section(task, f"{task}-bptt*,{task}-tbptt-*,{task}-sab-*-as-*,{task}-sab-*-ours") for task in PAPERS]
PERMUTED = Section("mnist", "mnist-permuted-*")
CELLS = [
    Section(task, f"{row},{row}-gru,{row}-rnn_tanh")
    for task, row in (("ptb", "ptb-sab-5-10-ours"), ("mnist", "mnist-sab-14-10-ours"))
]
UNCLIPPED = [
    Section(task, f"{row},{row}-unclipped")
    for task, row in (("ptb", "ptb-sab-5-10-ours"), ("mnist", "mnist-sab-14-10-ours"))
]
README = {
    "ptb": {
        "LSTM, full BPTT": "ptb-bptt",
        "LSTM, TBPTT, k_trunc = 5": "ptb-tbptt-5",
        "LSTM, TBPTT, k_trunc = 5, our training": "ptb-tbptt-5-ours",
        "SAB, k_trunc = 5, k_top = 5": "ptb-sab-5-5-ours",
        "SAB, k_trunc = 5, k_top = 10": "ptb-sab-5-10-ours",
    },
    "text8": {
        "LSTM, full BPTT": "text8-bptt",
        "LSTM, TBPTT, k_trunc = 5": "text8-tbptt-5",
        "LSTM, TBPTT, k_trunc = 5, our training": "text8-tbptt-5-ours",
        "SAB, k_trunc = k_top = 5": "text8-sab-5-5-ours",
    },
    "mnist": {
        "LSTM, full BPTT": "mnist-bptt",
        "LSTM, TBPTT, k_trunc = 14, our training": "mnist-tbptt-14-ours",
        "SAB, k_trunc = 14, k_top = 5": "mnist-sab-14-5-ours",
        "SAB, k_trunc = 14, k_top = 10": "mnist-sab-14-10-ours",
        "SAB, k_trunc = k_top = 10": "mnist-sab-10-10-ours",
    },
}
"""What the README shows of each task: rows by what they are called there."""


def curves_of(task: str) -> str:
    """The file of a task's learning curves."""
    return f"{task}.png"


def title(rows: Iterable[Row], by_row: ByRow) -> str:
    """The data that the rows' numbers are of: those of their records or, without any, those of the rows."""
    rows = list(rows)
    found = [record["data"] for row in rows for record in by_row.get(row.id, [])]
    return ", ".join(dict.fromkeys(found or [row.config(0).task.title for row in rows]))


def heading(rows: Sequence[Row], by_row: ByRow) -> str:
    return ", ".join(TITLES.get(name, name) for name in title(rows, by_row).split(", "))


# Tables


def table(rows: Sequence[Row], by_row: ByRow) -> str:
    """The rows with the paper's values, ours, and what they took, in Markdown."""
    made = markdown(*table_cells(rows, by_row))
    return f"{made}\n\n{STALE_TOLD}" if any_is_stale(rows, by_row) else made


def table_cells(rows: Sequence[Row], by_row: ByRow) -> tuple[list[str], list[list[str]]]:
    """The same as a header and lines of cells; columns that say nothing are left out."""
    cells = [_cells(row, by_row) for row in rows]
    has_unclipped = any(not row.is_clipped for row in rows)
    optional = {
        "cell": any(row.cell != "lstm" for row in rows),
        "clip": has_unclipped,
        "data": title(rows, by_row) != title(rows, {}),
        "largest gradient norm": has_unclipped,
        TBPTT: any(one[TBPTT] != NONE for one in cells),
    }
    in_paper = any(row.paper for row in rows)
    shown = [name for name in cells[0] if optional.get(name, in_paper or "paper" not in name)]
    return shown, [[one[name] for name in shown] for one in cells]


def _cells(row: Row, by_row: ByRow) -> dict[str, str]:
    """A row's cells by the names of their columns."""
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
        took |= {"epochs": _epochs(records), "best epoch": _best_epochs(records)}
        took |= {"largest gradient norm": _largest_norm(records), "wall time": show_times(records)}
    return {**cells, **took, "against the paper": verdict(row, records), TBPTT: against_truncation(row, by_row)}


def _each(row: Row, records: Sequence[Record]) -> str:
    """Every seed's numbers on test data, in each way that the task is judged by."""
    metrics = measures(row.task).values()
    return ", ".join(
        show_each(record, {metric: value_of(record, metric) for metric in metrics}) + mark(row, record)
        for record in records
    )


def _epochs(records: Sequence[Record]) -> str:
    return _each_once(record["epochs"] for record in records)


def _best_epochs(records: Sequence[Record]) -> str:
    return _each_once(
        None if record["best_at"] is None else record["best_at"] / record["iterations"] * record["epochs"]
        for record in records
    )


def _each_once(epochs: Iterable[float | None]) -> str:
    """Every seed's number of epochs, or that of all."""
    told = [NONE if one is None else f"{round(one, 2):g}" for one in epochs]
    return ", ".join(told if len(set(told)) > 1 else told[:1])


def _largest_norm(records: Sequence[Record]) -> str:
    norms = [largest(point["grad_norm_max"] for point in record["history"]) for record in records]
    return ", ".join(NONE if norm is None else f"{norm:.3g}" for norm in norms)


def settings_table() -> str:
    """How the rows are trained, in the paper's setting and in ours."""
    lines = [
        [task, name, *_setting_cells(task, setting)]
        for task in PAPERS
        for name, setting in (("the paper's", PAPERS[task]), ("ours", OURS[task]))
    ]
    header = ("task", "training", "hidden size", "batch", "steps", "learning rate", "falls from", "clip", "input scale")
    return markdown([*header, "dropout", "weight decay", "shifted", "epochs", "patience", "precision"], lines)


def _setting_cells(task: str, setting: Setting) -> list[str]:
    config = setting.config(TASKS[task](**setting.options))  # pyright: ignore[reportArgumentType]
    model, training = config.model, config.training
    decay = NONE if training.lr_decay is None else f"{100 * training.lr_decay:g} %"
    clip = "none" if training.clip is None else f"{training.clip:g}"
    cells = [model.hidden_size, training.batch_size, config.task.steps, f"{training.lr:g}", decay, clip]
    cells += [f"{number:g}" for number in (model.input_scale, training.dropout, training.weight_decay)]
    cells += ["yes" if config.options().get("shifted") else "no", f"{setting.epochs:g}"]
    return [str(cell) for cell in (*cells, training.patience or NONE, training.precision)]


# Parts of the pages


def tables(by_row: ByRow, images: str) -> list[str]:
    """The paper's tables; `images` is where the page finds the figures."""
    parts = [
        "### How ptb, text8 and mnist are trained",
        "Epochs are those that a row is trained for at most; validation data are read after each. The learning rate "
        "falls along a line to a fiftieth from that share of them on.",
        settings_table(),
    ]
    for section in PAPERS_TABLES:
        rows = section.rows
        parts += [f"### {heading(rows, by_row)}", section.command, _unit(section.task), table(rows, by_row)]
        if drawn_rows(section, by_row):
            parts.append(f"![Learning curves of {title(rows, by_row)}]({images}/{curves_of(section.task)})")
    return parts


def _unit(task: str) -> str:
    what = label(TASKS[task].headline).capitalize()
    if len(measures(task)) == 1:
        return f"{what}; each seed's is that on test data."
    steps = TASKS[task]().steps
    return (
        f"{what}: *fresh* with an empty state at every window of {steps} characters, as in training, *carried* with "
        "state and memory carried on from window to window. Each seed's are those on test data, fresh / carried."
    )


def beyond(by_row: ByRow, images: str) -> list[str]:
    """What is not in the paper."""
    parts = ["### Beyond the paper: permuted MNIST", PERMUTED.command, table(PERMUTED.rows, by_row)]
    parts += ["### Beyond the paper: other cells", *_several(CELLS, by_row)]
    parts += ["### Beyond the paper: with and without clipping", *_several(UNCLIPPED, by_row)]
    if clipping_pairs(by_row):
        told = "Gradient norms before clipping, with it and without it"
        parts += [f"![{told}]({images}/{CLIPPING})", f"{told}: the largest and the mean since the last evaluation."]
    return parts


def _several(sections: Iterable[Section], by_row: ByRow) -> list[str]:
    return [
        part
        for section in sections
        for part in (f"{heading(section.rows, by_row)}:", section.command, table(section.rows, by_row))
    ]


def clipping_pairs(by_row: ByRow) -> dict[str, tuple[Record, Record]]:
    """For each task whose two rows were both run a record of either, with clipping and without, by a title."""
    pairs: dict[str, tuple[Record, Record]] = {}
    for section in UNCLIPPED:
        clipped, unclipped = (by_row.get(row.id) for row in section.rows)
        if clipped and unclipped:
            pairs[heading(section.rows, by_row)] = clipped[0], unclipped[0]
    return pairs


def drawn_rows(section: Section, by_row: ByRow) -> list[Row]:
    """The rows that there is a learning curve of."""
    return [row for row in section.rows if any(record["history"] for record in by_row.get(row.id, []))]


def readme(by_row: ByRow) -> list[str]:
    """The README's short tables."""
    parts: list[str] = []
    for task, names in README.items():
        rows = {name: ROWS[row] for name, row in names.items()}
        lines = [[name, *_brief(row, by_row.get(row.id, []))] for name, row in rows.items()]
        name = heading(list(rows.values()), by_row)
        told = f"{name}: {label(TASKS[task].headline)}, the paper's / here, median (seeds)"
        carried = ["test, state carried: here"] if len(measures(task)) > 1 else []
        parts += [f"{told}; `sab reproduce {task}`:", markdown(["", "valid", "test", *carried], lines)]
    return parts


def _brief(row: Row, records: Sequence[Record]) -> list[str]:
    metric, *carried = measures(row.task).values()
    here = [f"{row.paper.get(split, NONE)} / {_here(row, records, metric, split)}" for split in COLUMNS[row.task]]
    return [*here, *(_here(row, records, one, "test") for one in carried)]


def _here(row: Row, records: Sequence[Record], metric: str, split: str) -> str:
    if not records:
        return NOT_RUN
    return f"{show_median(records, metric, TASKS[row.task].headline.higher_is_better, split)} ({len(records)})"
