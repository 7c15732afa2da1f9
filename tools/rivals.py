"""The generated parts of docs/rivals.md and its figures, from results/rivals.jsonl and results/rivals-costs.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from sab.lab.experiments import costs as measured
from sab.lab.experiments.records import Record
from sab.lab.experiments.rivals import CONTENDERS, PROBLEMS, Contender, Problem, RivalRow
from sab.lab.experiments.selection import is_stale
from sab.lab.report.figures import MARKERS
from sab.lab.report.numbers import NONE, NOT_RUN, median
from sab.plot.drawing import COLOURS, GREY, plain, use_log_scale, use_per_cent
from tools.groups import Group, about, selection_notes, show, shown_group, title
from tools.pages import markdown

TIME, LENGTH = "rivals-time.png", "rivals-length.png"
MOST_COLUMNS = 3
"""How many panels of a figure lie side by side."""
MIB = 2**20


def overview(records: Sequence[Record]) -> str:
    """The first table of the page: the five tasks in one; what was not run says so."""
    return "\n\n".join(_medians(_problems(is_matched=True), known(records)))


def page_part(records: Sequence[Record], costs: Sequence[Record]) -> str:
    """All other tables, and the figures."""
    records = known(records)
    matched, small = _problems(is_matched=True), _problems(is_matched=False)
    drawn = figures(records, costs)
    parts = [
        *(f"![{_caption(name, figure, costs)}](images/{name})" for name, figure in drawn.items()),
        *selection_notes(_labels(figure) for figure in drawn.values()),
        "### Online credit: medians on test data",
        *_medians(small, records),
        *_streams(costs),
        *(part for problem in (*matched, *small) for part in _section(problem, records, costs)),
        about(records, _is_stale) if records else "No method has been trained yet.",
    ]
    return "\n\n".join(parts)


def _problems(is_matched: bool) -> list[Problem]:
    return [problem for problem in PROBLEMS.values() if problem.is_matched == is_matched]


def known(records: Sequence[Record]) -> list[Record]:
    """The records of problems and contenders that the table still has."""
    return [one for one in records if one["problem"] in PROBLEMS and one["contender"] in CONTENDERS]


def _contenders(problem: Problem) -> list[Contender]:
    return [CONTENDERS[name] for name in problem.contenders]


def _shown(problem: Problem, contender: Contender, records: Sequence[Record]) -> tuple[Group | None, str]:
    return shown_group(problem, {"contender": contender.name}, records)


def _costs_of(problem: Problem, costs: Sequence[Record]) -> dict[str, Record]:
    """The record of each contender that has one, by its name."""
    found = {name: measured.find(list(costs), problem.name, name) for name in problem.contenders}
    return {name: cost for name, cost in found.items() if cost is not None}


def _medians(problems: Sequence[Problem], records: Sequence[Record]) -> list[str]:
    """A line for each contender, a column for each problem; a note where it has signs."""
    lines = [
        [contender.title, *(_median(problem, contender, records) for problem in problems)]
        for contender in _contenders(problems[0])
    ]
    return [markdown(["method", *(title(problem) for problem in problems)], lines), *selection_notes(lines)]


def _median(problem: Problem, contender: Contender, records: Sequence[Record]) -> str:
    group, sign = _shown(problem, contender, records)
    if group is None:
        return NOT_RUN
    return f"{show(problem, group.median)}{sign or f' ({len(group.records)})'}"


def _section(problem: Problem, records: Sequence[Record], costs: Sequence[Record]) -> list[str]:
    """A problem's table with its heading, where something of it was run."""
    if not any(one["problem"] == problem.name for one in (*records, *costs)):
        return []
    headline = problem.make_task().headline
    size = "as many parameters as the LSTM with" if problem.is_matched else "all with"
    about_it = f"{headline.label.capitalize()} on test data, {problem.iterations:,} updates on batches of "
    about_it += f"{problem.batch_size}, {size} hidden size {problem.hidden_size}; solved at "
    about_it += f"{headline.show(headline.solved)}."
    of_problem = _costs_of(problem, costs)
    if of_problem:
        about_it += f" *ms an update* and *MiB in training* are those on {_devices(of_problem.values())}."
    lines = []
    for contender in _contenders(problem):
        group, sign = _shown(problem, contender, records)
        cells = [*_numbers(problem, group, sign), *_costs(group, of_problem.get(contender.name))]
        lines.append([contender.title, *cells])
    header = ["method", "median", "worst", "solved", *(f"T = {length:,}" for length in problem.other_lengths[-1:])]
    header += ["rate", "parameters", "ms an update", "MiB in training"]
    return [f"### {title(problem)}", about_it, markdown(header, lines), *selection_notes(lines)]


def _numbers(problem: Problem, group: Group | None, sign: str) -> list[str]:
    if group is None:
        return [NOT_RUN, *[NONE] * (3 + len(problem.other_lengths[-1:]))]
    of_seeds = [NONE, NONE] if sign else [show(problem, group.worst), f"{group.solved}/{len(group.records)}"]
    longer = [show(problem, _at_length(group, length)) for length in problem.other_lengths[-1:]]
    return [f"{show(problem, group.median)}{sign}", *of_seeds, *longer, f"{group.records[0]['rate']:g}"]


def _at_length(group: Group, length: int) -> float | None:
    """The median at another length than trained at."""
    headline = group.headline
    found = [record["other_lengths"].get(str(length), {}).get(headline.metric) for record in group.records]
    return median(found, headline.higher_is_better)


def _costs(group: Group | None, cost: Record | None) -> list[str]:
    counted = group.records[-1] if group is not None else cost
    parameters = NONE if counted is None else f"{counted['parameters']:,}"
    if cost is None:
        return [parameters, NOT_RUN, NOT_RUN]
    return [parameters, f"{cost['update_milliseconds']:.2f}", _size(cost["train_bytes"])]


def _size(count: int | None) -> str:
    return NONE if count is None else f"{count / MIB:,.1f}" if count >= MIB else f"{count / MIB:.3f}"


def _streams(costs: Sequence[Record]) -> list[str]:
    """The cost of a step of streaming inference."""
    (problem,) = (problem for problem in PROBLEMS.values() if problem.streams)
    of_problem = _costs_of(problem, costs)
    lines = []
    for contender in _contenders(problem):
        cost = of_problem.get(contender.name)
        stream: Mapping[str, Any] | None = None if cost is None else cost["stream"]
        if stream is None:
            lines.append([contender.title, NOT_RUN, NOT_RUN, NONE])
            continue
        kind = {"constant": "does not grow", "grows": "grows with the stream"}.get(stream["kind"])
        kind = kind or f"cannot stream: a context of {stream['steps']:,} steps"
        lines.append([contender.title, f"{stream['microseconds']:,.0f}", _size(stream["bytes"]), kind])
    header = ["method", "µs a step", "MiB of state", "state"]
    heading = f"### Streaming inference: a step after {measured.LENGTH:,} steps, batch 1, models of {title(problem)}"
    return [heading, markdown(header, lines), *_measured_on(costs)]


def _measured_on(costs: Sequence[Record]) -> list[str]:
    """Where the costs on the page were measured, and at which commits."""
    places: dict[str, None] = {}
    for one in costs:
        commit = "" if one["commit"] is None else f", commit {one['commit'][:12]}"
        places[f"{_device(one)}{commit}"] = None
    return [f"Costs on this page were measured on {'; '.join(places)}."] if costs else []


def _device(cost: Record) -> str:
    threads = f", torch threads: {cost['threads']}" if cost["device"].startswith("cpu") else ""
    return f"{cost['device']}{threads}"


def _devices(costs: Iterable[Record]) -> str:
    return "; ".join(dict.fromkeys(map(_device, costs)))


def _is_stale(record: Record) -> bool:
    row = RivalRow(PROBLEMS[record["problem"]], CONTENDERS[record["contender"]], record["rate"])
    return is_stale(record, row)


# Figures


def figures(records: Sequence[Record], costs: Sequence[Record]) -> dict[str, Figure]:
    """The figures for which there are records, by file name."""
    records = known(records)
    matched = _problems(is_matched=True)
    times = {problem.name: _times(problem, records, costs) for problem in matched}
    lengths = {problem.name: _lengths(problem, records) for problem in matched if problem.other_lengths}
    found = {
        TIME: _panels(times, "training time in s, by the measured costs"),
        LENGTH: _panels(lengths, "length of the test"),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _caption(name: str, figure: Figure, costs: Sequence[Record]) -> str:
    """What a figure shows, by the panels that it has."""
    panels = [axes.get_title() for axes in figure.axes]
    words = "Test metric against the length of the test"
    if name == TIME:
        drawn = [problem for problem in _problems(is_matched=True) if title(problem) in panels]
        devices = _devices(cost for problem in drawn for cost in _costs_of(problem, costs).values())
        words = f"Test metric against training time (updates times the cost of one on {devices})"
    return f"{words}: {'; '.join(panels)}"


def _labels(figure: Figure) -> list[str]:
    """The names in a figure's legend."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


class Line(NamedTuple):
    """A contender in a panel."""

    label: str
    points: Sequence[tuple[float, float]]
    """x and metric of each."""


Lines = dict[str, Line]
"""By contender."""


def _times(problem: Problem, records: Sequence[Record], costs: Sequence[Record]) -> Lines:
    found: Lines = {}
    of_problem = _costs_of(problem, costs)
    for contender in _contenders(problem):
        (group, sign), cost = _shown(problem, contender, records), of_problem.get(contender.name)
        if group is not None and cost is not None and group.median is not None:
            seconds = cost["update_milliseconds"] * group.records[-1]["iterations"] / 1e3
            found[contender.name] = Line(f"{contender.title}{sign}", [(seconds, group.median)])
    return found


def _lengths(problem: Problem, records: Sequence[Record]) -> Lines:
    found: Lines = {}
    length = int(problem.options["length"])
    for contender in _contenders(problem):
        group, sign = _shown(problem, contender, records)
        if group is not None:
            values = {length: group.median} | {one: _at_length(group, one) for one in problem.other_lengths}
            points = [(one, value) for one, value in sorted(values.items()) if value is not None]
            found[contender.name] = Line(f"{contender.title}{sign}", points)
    return found


def _panels(by_problem: Mapping[str, Lines], x_label: str) -> Figure | None:
    """A panel for each problem that has points; None where none has."""
    drawn = [(PROBLEMS[name], lines) for name, lines in by_problem.items() if any(one.points for one in lines.values())]
    if not drawn:
        return None
    columns = min(len(drawn), MOST_COLUMNS)
    rows = ceil(len(drawn) / columns)
    figure = Figure(figsize=(4.2 * max(columns, 2), 3.4 * rows + 1), layout="constrained")  # the legend needs two
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(len(drawn))]
    for axes, (problem, lines) in zip(panels, drawn, strict=True):
        _draw(axes, problem, lines)
        axes.set(title=title(problem), xlabel=x_label, ylabel=problem.make_task().headline.label, xscale="log")
        found = [x for line in lines.values() for x, _ in line.points]
        axes.set_xlim(min(found) / 1.6, max(found) * 1.6)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    named = dict(pair for axes in panels for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw(axes: Axes, problem: Problem, lines: Lines) -> None:
    headline = problem.make_task().headline
    for name, line in lines.items():
        place = problem.contenders.index(name)
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        style["linestyle"] = "-" if place < len(COLOURS) else "--"
        x, y = zip(*line.points, strict=True) if line.points else ((), ())
        axes.plot(x, y, linewidth=1.2, label=line.label, **style)
    axes.axhline(headline.chance, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    if headline.spec.endswith("%"):
        use_per_cent(axes)
    else:
        use_log_scale(axes)
    plain(axes)
