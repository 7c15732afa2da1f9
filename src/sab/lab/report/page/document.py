"""The page: one file that holds everything it shows and loads nothing else."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from sab import __version__
from sab.errors import UserValueError, printable
from sab.lab.experiments.records import Record
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.files import write_text, writing
from sab.lab.report import performance, results, tables
from sab.lab.report.numbers import METHODS, NONE, ByRow, footnotes
from sab.lab.report.page import elements, explorer, plots
from sab.lab.report.page.explorer import Explorer
from sab.lab.report.page.material import Material, groups_of, row_of, rows_of
from sab.lab.tasks import TASKS
from sab.lab.training.run import Run

MOST_EXPLORERS = 6
"""How many models the explorer has; to trace more would take long, and much room."""
SUFFIXES = (".html", ".htm")
INTRODUCTION = (
    "The paper's numbers beside ours: the median over the seeds, and each seed. A band reaches from the lowest to the "
    "highest of the seeds that were evaluated at an iteration. The numbers after a method are its k_trunc and k_top. "
    "SAB is read as the paper has it written, as its authors' code has it released, or as ours: with the "
    "layers' default memory and the training that this library recommends."
)
"""The text above the paper's tables."""


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


def write(material: Material, out: Path, announce: Callable[[str], None] = lambda name: None) -> None:
    """Makes the page and writes it in one move; `announce` is called with each model's name before it is traced."""
    check_out(out)
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(parts(material, explorers(material, announce))), "out")


def check_out(out: Path) -> None:
    """Whether a page can be called so."""
    if out.suffix.lower() not in SUFFIXES:
        raise UserValueError(f"out must end in .html; got {str(out)!r}.", "out")
    if out.is_dir():
        raise UserValueError(f"out {str(out)!r} must be a file; it is a folder.", "out")


def page(made: Parts, is_live: bool = False) -> str:
    """The whole file. A live page polls its server; any other page connects to nothing."""
    plotly, script = plotly_script(), _asset("page.js")
    scripts = " ".join(map(elements.digest, (plotly, script)))
    connect = "'self'" if is_live else "'none'"
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=elements.text(policy),
        title=elements.text(made.title),
        summary=elements.text(made.summary),
        navigation=made.navigation(),
        main=made.main(),
        style=_asset("page.css"),
        data=elements.embedded({**made.data, "live": is_live}),
        plotly=plotly,
        script=script,
        version=elements.text(__version__),
    )


def part(made: Parts) -> str:
    """What of a live page may be new."""
    return (
        f'<p id="summary">{elements.text(made.summary)}</p><main id="main">{made.main()}</main>'
        f'<script type="application/json" id="data">{elements.embedded({**made.data, "live": True})}</script>'
    )


def plotly_script() -> str:
    """plotly.js, the part of it for axes in two dimensions."""
    packed = resources.files("sab.lab.report.page").joinpath("plotly-cartesian.min.js.gz").read_bytes()
    return gzip.decompress(packed).decode("utf-8")


def _asset(name: str) -> str:
    return resources.files("sab.lab.report.page").joinpath(name).read_text(encoding="utf-8")


# What is on it


def explorers(material: Material, announce: Callable[[str], None] = lambda name: None) -> list[Explorer]:
    """One for the first seed of each model, as far as they are not too many, and for each record with attention."""
    groups = list(groups_of(material.runs).items())[:MOST_EXPLORERS]
    traced_steps, room = (2 * most // max(len(groups), 2) for most in (explorer.TRACED_STEPS, explorer.ROOM))
    made: list[Explorer] = []
    for name, runs in groups:
        announce(printable(name))
        made.append(explorer.of_run_or_reason(name, runs[0], traced_steps, room))
    for record in with_attention(material.by_row)[: MOST_EXPLORERS - len(made)]:
        with suppress(Exception):  # of another version, or a hostile one, whose numbers are shown all the same
            made.append(explorer.of_record(record))
    return made


def with_attention(by_row: ByRow) -> list[Record]:
    """The records that keep the attention of some moments."""
    return [one for found in by_row.values() for one in found if one.get("attention", {}).get("moments")]


def parts(material: Material, explored: Sequence[Explorer]) -> Parts:
    """The page's sections, those that there is something for."""
    made = Parts(_title(material), _summary(material), {}, {"figures": {}, "explorers": []})
    _add_left_out(made, material)
    _add_explorers(made, explored, material)
    _add_runs(made, material.runs)
    _add_tables(made, material)
    _add_benchmark(made, material.benchmark)
    return made


def _title(material: Material) -> str:
    names = list(material.runs)
    if len(names) == 1 and not material.by_row:
        return names[0]
    return "Sparse attentive backtracking"


def _summary(material: Material) -> str:
    sentences: list[str] = []
    if material.runs:
        tasks = ", ".join(dict.fromkeys(run.config.task.title for run in material.runs.values()))
        sentences.append(f"{_count(len(material.runs), 'run')} on {tasks}")
    if material.by_row:
        records = sum(map(len, material.by_row.values()))
        sentences.append(f"{_count(records, 'recorded run')} of {_count(len(material.by_row), 'row')} of the tables")
    if material.benchmark:
        sentences.append(f"{_count(len(material.benchmark), 'measurement')} of speed")
    return "; ".join(sentences) + "."


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
    header = "run task method k_trunc k_top k_att seed status iterations valid test paper".split()
    body = [elements.table(header, (_run_line(name, run) for name, run in runs.items()), "Runs")]
    by_task: dict[str, dict[str, list[Run]]] = {}
    for name, group in groups_of(dict(runs)).items():
        by_task.setdefault(group[0].config.task.label, {})[name] = group
    for task, groups in by_task.items():
        curves = {name: [_curve_of_run(run) for run in group] for name, group in groups.items()}
        curves = {name: seeds for name, group in curves.items() if (seeds := [one for one in group if one.steps])}
        if curves:
            headline = next(iter(groups.values()))[0].config.task.headline
            drawn = plots.curves(curves, headline, f"{task}: validation data, median and range of the seeds")
            body.append(_add_figure(made, f"runs-{_id(task)}", drawn))
    made.sections["runs"] = ("Runs", elements.section("runs", "Runs", body))


def _run_line(name: str, run: Run) -> list[str]:
    """A run in the table of runs."""
    config, result, evaluations = run.config, run.result(), run.evaluations()
    headline, memory = config.task.headline, config.model.layer_config()
    row = row_of(run)
    valid = evaluations[-1]["metrics"] if evaluations and result is None else {} if result is None else result.valid
    made = evaluations[-1]["step"] if evaluations else 0
    values = [valid.get(headline.metric), None if result is None else result.metrics.get(headline.metric)]
    memories = [str(one or NONE) for one in (memory.k_trunc, memory.k_top, memory.k_att if memory.k_top else None)]
    cells = [name, config.task.label, METHODS[config.model.method], *memories, str(config.training.seed)]
    cells += ["under way" if result is None else result.status, f"{made if result is None else result.iterations:,}"]
    cells += [NONE if value is None else headline.show(value) for value in values]
    return [*cells, row.paper.get(row.judged, NONE) if row else NONE]


def _curve_of_run(run: Run) -> plots.Curve:
    metric, lines = run.config.task.headline.metric, run.evaluations()
    return plots.Curve([line["step"] for line in lines], [line["metrics"][metric] for line in lines])


def _add_tables(made: Parts, material: Material) -> None:
    """The paper's tables with our numbers, each below its learning curves."""
    by_row = _merged(material.by_row, rows_of(material.runs.values()))
    body: list[str] = []
    not_run: list[str] = []
    for title, rows, cells in _tables(by_row):
        if not any(row.id in by_row for row in rows):
            not_run.append(title)
            continue
        body.append(elements.heading(title))
        curves = {
            _row_name(row): [_curve_of_record(row, record) for record in records]
            for row in rows
            if (records := [one for one in material.by_row.get(row.id, []) if one["history"]])
        }
        if curves:
            caption = f"{title}: validation data, median and range of the seeds"
            drawn = plots.curves(curves, TASKS[rows[0].task].headline, caption, over_decades=True)
            body.append(_add_figure(made, f"curves-{_id(title)}", drawn))
        body.append(elements.table(*cells, f"Table: {title}"))
        body += [elements.paragraph(note) for note in footnotes(rows, by_row)]
    if not body:
        return
    end = [f"Not run: {'; '.join(not_run)}."] if not_run and material.by_row else []
    end += results.total_time(material.by_row)
    whole = elements.section(
        "tables", "Beside the paper", [elements.paragraph(INTRODUCTION), *body, *map(elements.paragraph, end)]
    )
    made.sections["tables"] = ("Beside the paper", whole)


Cells = tuple[Sequence[str], Sequence[Sequence[str]]]


def _tables(by_row: ByRow) -> Iterable[tuple[str, list[Row], Cells]]:
    """Every table by its title, with its rows and its cells."""
    lengths = dict.fromkeys((row.task, row.length) for row in ROWS.values() if row.length)
    for task, length in lengths:
        rows = [row for row in ROWS.values() if (row.task, row.length) == (task, length)]
        yield f"{task.capitalize()}, T = {length}", rows, tables.table_cells(rows, by_row)
    sections = [(one, "") for one in (*tables.PAPERS_TABLES, tables.PERMUTED)]
    sections += [(one, ", other cells") for one in tables.CELLS]
    sections += [(one, ", with and without clipping") for one in tables.UNCLIPPED]
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
    parts = [METHODS[row.method].removeprefix("LSTM, ")]
    parts[0] += "".join(
        f" {k}" if place == 0 else f", {k}" for place, k in enumerate(k for k in (row.k_trunc, row.k_top) if k)
    )
    parts += ["our training"] if row.is_control else [row.reading] if row.reading not in (None, "ours") else []
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
        body += [elements.table(performance.HEADER, rows, title)] if rows else []
    made.sections["speed"] = ("Speed", elements.section("speed", "Speed", body))


def _id(name: str) -> str:
    """A name for an element from anything."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
