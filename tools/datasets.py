"""The Markdown tables of ptb, text8 and mnist, which are judged on validation and test data."""

from __future__ import annotations

from collections.abc import Iterable

from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.settings import PAPERS, Setting
from sab.lab.report.numbers import NONE, ByRow, label, measures
from sab.lab.report.tables import CARRIED, CELLS, CIFAR10, PAPERS_TABLES, PERMUTED, UNCLIPPED, Section, heading
from sab.lab.tasks import TASKS
from tools.pages import command, markdown, table

LATER = {PERMUTED: "LSTM 90.3, Transformer 97.9", CIFAR10: "LSTM 58.3, Transformer 62.2"}
"""The tables of the authors' later paper (arXiv 1809.03702), with its accuracies as far as they are remembered."""


def tables(by_row: ByRow) -> list[str]:
    """The paper's tables."""
    parts: list[str] = []
    for section in PAPERS_TABLES:
        rows = section.rows
        parts += [f"## {heading(rows, by_row)}", _command(section), _unit(section.task), table(rows, by_row)]
    return parts


def settings_table() -> str:
    """How the rows are trained, in the paper's setting and in ours."""
    settings = [(task, name, one[task]) for task in PAPERS for name, one in (("the paper's", PAPERS), ("ours", OURS))]
    rows = ("hidden size", "batch", "steps", "learning rate", "falls from", "clip", "dropout", "weight decay")
    rows += ("shifted", "epochs", "patience", "precision")
    columns = [_setting_cells(task, setting) for task, _, setting in settings]
    lines = [[row, *cells] for row, *cells in zip(rows, *columns, strict=True)]
    return markdown(["", *(f"{task}, {name}" for task, name, _ in settings)], lines)


def _setting_cells(task: str, setting: Setting) -> list[str]:
    config = setting.config(TASKS[task](**setting.options))  # pyright: ignore[reportArgumentType]
    model, training = config.model, config.training
    decay = NONE if training.lr_decay is None else f"{100 * training.lr_decay:g} %"
    clip = "none" if training.clip is None else f"{training.clip:g}"
    cells = [model.hidden_size, training.batch_size, config.task.steps, f"{training.lr:g}", decay, clip]
    cells += [f"{number:g}" for number in (training.dropout, training.weight_decay)]
    cells += ["yes" if config.options().get("shifted") else "no", f"{setting.epochs:g}"]
    return [str(cell) for cell in (*cells, training.patience or NONE, training.precision)]


def _unit(task: str) -> str:
    what = label(TASKS[task].headline).capitalize()
    if len(measures(task)) == 1:
        return f"{what}; each seed's is that on test data."
    steps = TASKS[task]().steps
    return (
        f"{what}: *fresh* with an empty state at every window of {steps} characters, as in training, *carried* with "
        "state and memory carried on from window to window. Each seed's are those on test data, fresh / carried."
    )


def beyond(by_row: ByRow) -> list[str]:
    """What is not in the paper."""
    parts: list[str] = []
    for section, recalled in LATER.items():
        note = f"The later paper's numbers could not be verified, so the table has none. As recalled: {recalled}."
        parts += [f"## The later paper: {heading(section.rows, by_row)}", _command(section), note]
        parts.append(table(section.rows, by_row))
    parts += ["## Beyond the paper: other cells", *_several(CELLS, by_row)]
    parts += ["## Beyond the paper: with and without clipping", *_several(UNCLIPPED, by_row)]
    parts += ["## Beyond the paper: trained with the state carried", *_several([CARRIED], by_row)]
    return parts


def _command(section: Section) -> str:
    return command(section.task, section.patterns)


def _several(sections: Iterable[Section], by_row: ByRow) -> list[str]:
    return [
        part
        for section in sections
        for part in (f"{heading(section.rows, by_row)}:", _command(section), table(section.rows, by_row))
    ]
