"""The page: one file that holds everything it shows and loads nothing else."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import torch

from sab import __version__, palette
from sab.errors import UserValueError, printable
from sab.lab.experiments.records import Record
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.files import write_text, writing
from sab.lab.report import performance, results, tables
from sab.lab.report.numbers import (
    MISSED,
    NONE,
    NOT_RUN,
    PARTLY,
    REACHED,
    ByRow,
    footnotes,
    method_name,
    own_training,
    show_median,
    verdict_word,
)
from sab.lab.report.numbers import median as median_of_values
from sab.lab.report.page import elements, explorer, plots
from sab.lab.report.page.explorer import Explorer
from sab.lab.report.page.material import Material, groups_of, row_of, rows_of
from sab.lab.report.page.titles import METHODS, command, group_titles, task_name
from sab.lab.tasks import TASKS
from sab.lab.training.progress import show_seconds
from sab.lab.training.run import Run, RunConfig
from sab.palette import Colour

MOST_EXPLORERS = 6
"""How many models the explorer has; to trace more would take long, and much room."""
SUFFIXES = (".html", ".htm")
INTRODUCTION = (
    "The paper's numbers and ours: the median over the seeds, and each seed. A band reaches from the lowest to the "
    "highest seed. The numbers after a method are its k_trunc and k_top. SAB as written follows the paper, as released "
    "follows its authors' code; ours uses the layers' default memory and the training that this library recommends."
)
"""The text above the paper's tables."""
ARCS = (
    "An arc leads from a step to a past state that it read, as wide as the attention weight. Credit is the gradient of "
    "a step's answer: it returns over these arcs (skips) and along the chain of steps."
)
"""What the explorer draws."""


@dataclass
class Parts:
    """The parts of a page, and the data of its figures."""

    title: str
    summary: str
    sections: dict[str, tuple[str, str]]
    """Title and HTML by name."""
    data: dict[str, Any]

    def main(self) -> str:
        """What the page shows below its head."""
        return "".join(content for _, content in self.sections.values())

    def navigation(self) -> str:
        return "".join(
            f'<a href="#{elements.text(name)}">{elements.text(title)}</a>' for name, (title, _) in self.sections.items()
        )


def write(
    material: Material,
    out: Path,
    announce: Callable[[str], None] = lambda name: None,
    traced_steps: int | None = None,
) -> None:
    """Makes the page and writes it in one move; `announce` is called with what is about to be traced. `traced_steps` is
    over how many steps answers are traced, all models together; None takes the usual number."""
    check_out(out)
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(parts(material, explorers(material, announce, traced_steps))), "out")


def check_out(out: Path) -> None:
    """Whether a page can be called so."""
    if out.suffix.lower() not in SUFFIXES:
        raise UserValueError(f"out must end in .html; got {str(out)!r}.", "out")
    if out.is_dir():
        raise UserValueError(f"out {str(out)!r} must be a file; it is a folder.", "out")


def page(made: Parts, is_live: bool = False) -> str:
    """The whole file. A live page polls its server; any other page connects to nothing."""
    plotly, script = plotly_script(), _asset("page.js") + _asset("explorer.js") + _asset("start.js")
    scripts = " ".join(map(elements.digest, (plotly, script)))
    connect = "'self'" if is_live else "'none'"
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=elements.text(policy),
        title=elements.text(made.title),
        summary=elements.text(made.summary),
        navigation=made.navigation(),
        main=made.main(),
        style=_colours() + _asset("page.css"),
        data=elements.embedded({**made.data, "live": is_live}),
        plotly=plotly,
        script=script,
        version=elements.text(__version__),
    )


def part(made: Parts) -> str:
    """What of a live page may be new."""
    return (
        f'<h1 id="title">{elements.text(made.title)}</h1><p id="summary">{elements.text(made.summary)}</p>'
        f'<main id="main">{made.main()}</main>'
        f'<script type="application/json" id="data">{elements.embedded({**made.data, "live": True})}</script>'
    )


def plotly_script() -> str:
    """plotly.js, the part of it for axes in two dimensions."""
    packed = resources.files("sab.lab.report.page").joinpath("plotly-cartesian.min.js.gz").read_bytes()
    return gzip.decompress(packed).decode("utf-8")


def _colours() -> str:
    """The palette as variables of the style sheet."""
    light, dark = (
        "".join(f"--{name}:{getattr(one, theme)};" for name, one in palette.named().items()) for theme in Colour._fields
    )
    return f':root{{{light}}}:root[data-theme="dark"]{{{dark}}}\n'


def _asset(name: str) -> str:
    return resources.files("sab.lab.report.page").joinpath(name).read_text(encoding="utf-8")


# What is on it


def explorers(
    material: Material, announce: Callable[[str], None] = lambda name: None, traced_steps: int | None = None
) -> list[Explorer]:
    """One for the first seed of each model, as far as they are not too many, and for each record with attention."""
    groups = list(groups_of(material.runs).items())[:MOST_EXPLORERS]
    most = 2 * explorer.TRACED_STEPS if traced_steps is None else traced_steps
    traced_steps, room = (one // max(len(groups), 2) for one in (most, 2 * explorer.ROOM))
    made: list[Explorer] = []
    titles = group_titles(dict(groups))
    for place, (name, runs) in enumerate(groups, start=1):
        announce(f"model {place} of {len(groups)}: {printable(titles[name])}")
        made.append(explorer.of_run_or_reason(titles[name], runs[0], traced_steps, room))
    for record in with_attention(material.by_row)[: MOST_EXPLORERS - len(made)]:
        with suppress(Exception):  # of another version, or a hostile one, whose numbers are shown all the same
            made.append(explorer.of_record(record))
    return made


def with_attention(by_row: ByRow) -> list[Record]:
    """The records that keep the attention of some moments."""
    return [one for found in by_row.values() for one in found if one.get("attention", {}).get("moments")]


def parts(material: Material, explored: Sequence[Explorer]) -> Parts:
    """The page's sections, those that there is something for."""
    title, sentences = _head(material)
    made = Parts(title, "", {}, {"figures": {}, "explorers": []})
    _add_left_out(made, material)
    if material.runs:
        _add_explorers(made, explored, material)
        _add_runs(made, material.runs)
    _add_tables(made, material)
    if not material.runs:
        _add_explorers(made, explored, material)
    _add_benchmark(made, material.benchmark)
    made.summary = " ".join([*sentences, *([ARCS] if made.data["explorers"] else [])])
    return made


def _head(material: Material) -> tuple[str, list[str]]:
    """The title, and what the page is about and what came out, in a sentence each."""
    title, sentences = "Sparse attentive backtracking", list[str]()
    if material.runs:
        title, sentences = _head_of_runs(material.runs)
    if material.by_row:
        of_records, further = _head_of_records(material.by_row)
        title = title if material.runs else of_records
        sentences += further
    if material.benchmark:
        sentences.append(f"{_count(len(material.benchmark), 'measurement')} of speed.")
    return title, sentences


def _head_of_runs(runs: Mapping[str, Run]) -> tuple[str, list[str]]:
    groups = groups_of(dict(runs))
    tasks = {group[0].config.task.label: group[0].config.task for group in groups.values()}
    if len(tasks) > 1:
        names = ", ".join(dict.fromkeys(map(task_name, tasks.values())))
        return f"{_count(len(runs), 'run')} on {names}", [f"{_count(len(runs), 'run')} on {names}."]
    (task,) = tasks.values()
    headline = task.headline
    values, split = _outcomes(list(groups.values()))
    shown = ", ".join(f"{METHODS[method]} {headline.show(value)}" for method, value in values.items())
    length = task.options().get("length")
    about = task.summary.partition(";")[0].replace("`length`", NONE if length is None else f"{length:,}")
    sentences = [f"Task: {about}."]
    if shown:
        chance = f"chance {headline.show(headline.chance)}"
        sentences.append(f"Outcome on {split} data, {headline.label}: {shown}; {chance}.")
    else:
        sentences.append("There is no evaluation yet.")
    unit = "" if headline.spec.endswith("%") else f" {headline.label}"
    return f"{task_name(task)}: " + (f"{shown}{unit}" if shown else _count(len(runs), "run")), sentences


def _outcomes(groups: Sequence[Sequence[Run]]) -> tuple[dict[str, float], str]:
    """The headline metric by method, the best group's median over its seeds: on test data, where all have ended."""
    headline = groups[0][0].config.task.headline
    ended = [[run.result() for run in group] for group in groups]
    is_test = all(one is not None for ends in ended for one in ends)
    best: dict[str, float] = {}
    for group, ends in zip(groups, ended, strict=True):
        found = [one.metrics if one and is_test else _last_metrics(run) for run, one in zip(group, ends, strict=True)]
        value = median_of_values([one.get(headline.metric) for one in found], headline.higher_is_better)
        method = group[0].config.model.method
        if value is not None and not (method in best and headline.reaches(best[method], value)):
            best[method] = value
    return best, "test" if is_test else "validation"


def _last_metrics(run: Run) -> dict[str, float | None]:
    evaluations = run.evaluations()
    return evaluations[-1]["metrics"] if evaluations else {}


def _head_of_records(by_row: ByRow) -> tuple[str, list[str]]:
    records = sum(map(len, by_row.values()))
    tasks = ", ".join(dict.fromkeys(ROWS[row].task for row in by_row if row in ROWS))
    judged = [row for row in ROWS.values() if row.method == "sab" and row.reading == "ours" and row.paper]
    judged = [row for row in judged if row.id in by_row]
    reached = sum(verdict_word(row, by_row[row.id]) == REACHED for row in judged)
    sentences = [
        f"{_count(records, 'recorded run')} of {_count(len(by_row), 'row')} on {tasks}; "
        f"{sum(row in ROWS and ROWS[row].is_papers for row in by_row)} rows are the paper's.",
    ]
    title = "The paper's tables, run again"
    if judged:
        title = f"SAB reaches the paper's numbers in {reached} of {len(judged)} rows"
        sentences.append(
            f"As we train it, SAB reaches the paper's number with every seed in {reached} of the {len(judged)} rows "
            "that the paper has one for."
        )
    return title, sentences


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _add_figure(made: Parts, name: str, drawn: elements.Drawn) -> str:
    made.data["figures"][name] = drawn.figure
    return elements.figure(name, drawn)


def _add_left_out(made: Parts, material: Material) -> None:
    if material.left_out:
        body = [elements.paragraph(f"{name}: {mistake}") for name, mistake in material.left_out.items()]
        made.sections["left-out"] = ("Left out", elements.section("left-out", "Left out", body))


def _add_explorers(made: Parts, explored: Sequence[Explorer], material: Material) -> None:
    shown = [one for one in explored if one.moments]
    notes = [f"{one.name}: {one.about}" for one in explored if not one.moments]
    left = len(groups_of(material.runs)) - MOST_EXPLORERS
    notes += [f"{_count(left, 'more model')} not traced: give fewer runs to see them."] if left > 0 else []
    if not shown and not notes:
        return
    made.data["explorers"] = [explorer.spec(one) for one in shown]
    body = _asset("explorer.html") if shown else ""
    made.sections["explorer"] = (
        "Credit explorer",
        elements.section("explorer", "Credit explorer", [body, *map(elements.paragraph, notes)]),
    )


def _add_runs(made: Parts, runs: Mapping[str, Run]) -> None:
    if not runs:
        return
    groups = groups_of(dict(runs))
    titles = group_titles(groups)
    named = {id(run): titles[name] for name, group in groups.items() for run in group}
    titled = {path: f"{named[id(run)]}, seed {run.config.training.seed}" for path, run in runs.items()}
    header = "run,test,valid,first solved,time,iterations,parameters,status,paper".split(",")
    lines = [[titled[path], *_run_line(run)] for path, run in runs.items()]
    body = [elements.folded(f"{_count(len(runs), 'run')}: results", elements.table(header, lines, "Runs"))]
    by_task: dict[str, dict[str, list[Run]]] = {}
    for name, group in groups.items():
        by_task.setdefault(task_name(group[0].config.task), {})[titles[name]] = group
    for task, found in by_task.items():
        curves = {name: [_curve_of_run(run) for run in group] for name, group in found.items()}
        curves = {name: seeds for name, group in curves.items() if (seeds := [one for one in group if one.steps])}
        if curves:
            headline = next(iter(found.values()))[0].config.task.headline
            methods = {name: group[0].config.model.method for name, group in found.items()}
            caption = f"{task}: {headline.label} on validation data, median and range of the seeds"
            drawn = plots.curves(curves, headline, caption, methods=methods)
            body.append(_add_figure(made, f"runs-{_id(task)}", drawn))
        else:
            body.append(elements.paragraph(f"{task}: no curve, since there is no evaluation yet."))
    commands = {titled[path]: command(run.config, run.path) or "made by an older version" for path, run in runs.items()}
    body.append(elements.folded("The commands that made them", elements.commands(commands), is_wide=False))
    made.sections["runs"] = ("Runs", elements.section("runs", "Runs", body))


def _run_line(run: Run) -> list[str]:
    """A run in the table of runs."""
    config, result, evaluations = run.config, run.result(), run.evaluations()
    headline, row = config.task.headline, row_of(run)
    valid = _last_metrics(run) if result is None else result.valid
    values = [None if result is None else result.metrics.get(headline.metric), valid.get(headline.metric)]
    last: Mapping[str, Any] = evaluations[-1] if evaluations else {}
    seconds = last.get("elapsed") if result is None else result.wall_time
    solved = "not yet" if result is None else "never"
    if result is not None and result.solved_at is not None:
        solved = f"{result.solved_at:,}"
    cells = [NONE if value is None else headline.show(value) for value in values]
    cells += [solved, NONE if seconds is None else show_seconds(seconds)]
    cells += [f"{last.get('step', 0) if result is None else result.iterations:,}", f"{_parameters(config):,}"]
    cells += ["under way" if result is None else result.status]
    return [*cells, row.paper.get(row.judged, NONE) if row else NONE]


def _parameters(config: RunConfig) -> int:
    """How many numbers a model learns."""
    meta = torch.device("meta")  # nothing is computed, however large a configuration says that it is
    with meta:
        return sum(parameter.numel() for parameter in config.build_model(meta).parameters())


def _curve_of_run(run: Run) -> plots.Curve:
    metric, lines = run.config.task.headline.metric, run.evaluations()
    return plots.Curve([line["step"] for line in lines], [line["metrics"][metric] for line in lines])


def _add_tables(made: Parts, material: Material) -> None:
    """The paper's tables with our numbers, each below its learning curves; a summary of all of them first."""
    by_row = _merged(material.by_row, rows_of(material.runs.values()))
    blocks: list[str] = []
    places: dict[str, str] = {}
    summary: list[list[elements.Cell]] = []
    not_run: list[str] = []
    for title, rows, cells in _tables(by_row):
        if not any(row.id in by_row for row in rows):
            not_run.append(title)
            continue
        name = f"table-{_id(title)}"
        places[name] = title
        summary.append(_summary_line(title, name, rows, by_row))
        blocks.append(_table_block(made, title, name, rows, by_row, cells))
    if not blocks:
        return
    end = [f"Not run: {'; '.join(not_run)}."] if not_run and material.by_row else []
    end += results.total_time(material.by_row)
    body = [elements.paragraph(INTRODUCTION)]
    if len(blocks) > 1:
        body.append(elements.folded("Summary of all tables", elements.table(SUMMARY, summary, "Summary of all tables")))
        body += [elements.links("Tables", places), _asset("filters.html")]
    title = "Compared with the paper"
    whole = elements.section("tables", title, [*body, *blocks, *map(elements.paragraph, end)])
    made.sections["tables"] = (title, whole)


def _table_block(made: Parts, title: str, name: str, rows: Sequence[Row], by_row: ByRow, cells: Cells) -> str:
    """A table with its title, its learning curves and its notes."""
    parts = [elements.heading(title, name)]
    curves = {
        _row_name(row): [_curve_of_record(row, record) for record in records]
        for row in rows
        if (records := [one for one in by_row.get(row.id, []) if one["history"]])
    }
    if curves:
        methods = {_row_name(row): row.credit for row in rows}
        hidden = {_row_name(row) for row in rows if row.is_control or row.reading not in (None, "ours")}
        headline = TASKS[rows[0].task].headline
        caption = f"{title}: {headline.label} on validation data, median and range of the seeds"
        hidden = hidden if curves.keys() - hidden else set()
        drawn = plots.curves(curves, headline, caption, True, methods, hidden)
        parts.append(_add_figure(made, f"curves-{_id(title)}", drawn))
    header, lines = cells
    marks = [{"method": row.credit, "verdict": verdict_word(row, by_row.get(row.id, []))} for row in rows]
    counts = Counter(one["verdict"] for one in marks)
    judged = counts[REACHED] + counts[PARTLY] + counts[MISSED]
    told = f"Table: {_count(len(rows), 'row')}" + (f", {counts[REACHED]} of {judged} reach the paper" if judged else "")
    parts.append(elements.folded(told, elements.table(header, lines, f"Table: {title}", marks)))
    parts += [elements.paragraph(note) for note in footnotes(rows, by_row)]
    return f'<div class="block">{"".join(parts)}</div>'


SUMMARY = ("table", "SAB here", "the paper's SAB", "truncated BPTT", "full BPTT", "SAB rows that reach the paper")


def _summary_line(title: str, name: str, rows: Sequence[Row], by_row: ByRow) -> list[elements.Cell]:
    """A table in a line."""
    found, headline = tables.summary_of(rows, by_row), TASKS[rows[0].task].headline

    def value(row: Row | None) -> str:
        return NONE if row is None else show_median(by_row[row.id], headline.metric, headline.higher_is_better)

    printed = NONE if found.sab is None else found.sab.paper[found.sab.judged]
    return [
        elements.Link(title, name),
        NOT_RUN if found.sab is None else value(found.sab),
        printed,
        value(found.truncated),
        value(found.full),
        found.reached,
    ]


Cells = tuple[Sequence[str], Sequence[Sequence[str]]]


def _tables(by_row: ByRow) -> Iterable[tuple[str, list[Row], Cells]]:
    """Every table by its title, with its rows and its cells."""
    lengths = dict.fromkeys((row.task, row.length) for row in ROWS.values() if row.length)
    for task, length in lengths:
        rows = [row for row in ROWS.values() if (row.task, row.length) == (task, length)]
        yield f"{task.capitalize()}, T = {length}", rows, tables.table_cells(rows, by_row)
    sections = [(one, "") for one in (*tables.PAPERS_TABLES, tables.PERMUTED, tables.CIFAR10)]
    sections += [(one, ", other cells") for one in tables.CELLS]
    sections += [(one, ", with and without clipping") for one in tables.UNCLIPPED]
    sections.append((tables.CARRIED, ", trained with the state carried"))
    for section, what in sections:
        rows = section.rows
        yield f"{tables.heading(rows, by_row)}{what}", rows, tables.table_cells(rows, by_row)


def _merged(one: ByRow, other: ByRow) -> ByRow:
    """The records of both, a seed's once."""
    merged: dict[str, list[Record]] = {}
    for row in dict.fromkeys((*one, *other)):
        by_seed = {record["seed"]: record for record in (*one.get(row, []), *other.get(row, []))}
        merged[row] = [by_seed[seed] for seed in sorted(by_seed)]
    return merged


def _row_name(row: Row) -> str:
    """A row in a legend."""
    parts = [method_name(row).removeprefix("LSTM, ")]
    parts[0] += "".join(
        f" {k}" if place == 0 else f", {k}" for place, k in enumerate(k for k in (row.k_trunc, row.k_top) if k)
    )
    parts += ["our training"] if row.is_control else [row.reading] if row.reading not in (None, "ours") else []
    parts += own_training(row)
    parts += [] if row.cell == "lstm" else [row.cell]
    parts += [] if row.is_clipped else ["not clipped"]
    return ", ".join(parts)


def _curve_of_record(row: Row, record: Record) -> plots.Curve:
    metric = TASKS[row.task].headline.metric
    return plots.Curve(
        [point["step"] for point in record["history"]], [point["metrics"].get(metric) for point in record["history"]]
    )


def _add_benchmark(made: Parts, records: Sequence[performance.Record]) -> None:
    if not records:
        return
    body = [elements.paragraph(sentence) for sentence in performance.summary(records)]
    if performance.verdicts(records):
        body.append(_add_figure(made, "ratios", plots.ratios(records)))
    swept = {case: performance.swept_records(records, case) for case in performance.SWEPT}
    body += [_add_figure(made, f"sweep-{case}", plots.sweep(found, case)) for case, found in swept.items() if found]
    for kind, title in (("required", "Every case of the benchmark"), ("earlier", "Other memories, measured earlier")):
        rows = [line for record in records if record["kind"] == kind for line in performance.lines(record)]
        body += [elements.folded(title, elements.table(performance.HEADER, rows, title))] if rows else []
    made.sections["speed"] = ("Speed", elements.section("speed", "Speed", body))


def _id(name: str) -> str:
    """A name for an element from anything."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
