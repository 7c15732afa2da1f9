"""The generated parts of docs/rivals.md and its figures, from results/rivals.jsonl and results/rivals-costs.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

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
from tools.groups import (
    SELECTION_NOTE,
    SELECTION_SIGN,
    Group,
    about,
    best_selection_run,
    chosen_group,
    show,
    title,
)
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
        *(f"![{words}](images/{name})" for name, words in _captions(matched).items() if name in drawn),
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


def _captions(problems: Sequence[Problem]) -> dict[str, str]:
    tasks = ", ".join(title(problem) for problem in problems)
    return {TIME: f"Test metric against training time: {tasks}", LENGTH: "Test metric against the length of the test"}


def _contenders(problem: Problem) -> list[Contender]:
    return [CONTENDERS[name] for name in problem.contenders]


def _group(problem: Problem, contender: Contender, records: Sequence[Record]) -> Group | None:
    return chosen_group(problem, {"contender": contender.name}, records)


def _medians(problems: Sequence[Problem], records: Sequence[Record]) -> list[str]:
    """A line for each contender, a column for each problem; a note where it has signs."""
    lines = [
        [contender.title, *(_median(problem, contender, records) for problem in problems)]
        for contender in _contenders(problems[0])
    ]
    notes = [SELECTION_NOTE] if any(SELECTION_SIGN in cell for line in lines for cell in line) else []
    return [markdown(["method", *(title(problem) for problem in problems)], lines), *notes]


def _median(problem: Problem, contender: Contender, records: Sequence[Record]) -> str:
    group = _group(problem, contender, records)
    if group is not None:
        return f"{show(problem, group.median)} ({len(group.records)})"
    selected = best_selection_run(problem, {"contender": contender.name}, records)
    return NOT_RUN if selected is None else f"{show(problem, selected.median)} {SELECTION_SIGN}"


def _section(problem: Problem, records: Sequence[Record], costs: Sequence[Record]) -> list[str]:
    """A problem's table with its heading, where something of it was run."""
    if not any(one["problem"] == problem.name for one in (*records, *costs)):
        return []
    headline = problem.make_task().headline
    size = "as many parameters as the LSTM with" if problem.is_matched else "all with"
    about_it = f"{headline.label.capitalize()} on test data, {problem.iterations:,} updates on batches of "
    about_it += f"{problem.batch_size}, {size} hidden size {problem.hidden_size}; solved at "
    about_it += f"{headline.show(headline.solved)}."
    lines = []
    for contender in _contenders(problem):
        group = _group(problem, contender, records)
        cost = measured.find(list(costs), problem.name, contender.name)
        lines.append([contender.title, *_numbers(problem, group), *_costs(group, cost)])
    header = ["method", "median", "worst", "solved", *(f"T = {length:,}" for length in problem.other_lengths[-1:])]
    header += ["rate", "parameters", "ms an update", "MiB in training"]
    return [f"### {title(problem)}", about_it, markdown(header, lines)]


def _numbers(problem: Problem, group: Group | None) -> list[str]:
    if group is None:
        return [NOT_RUN, *[NONE] * (3 + len(problem.other_lengths[-1:]))]
    solved = f"{group.solved}/{len(group.records)}"
    longer = [show(problem, _at_length(group, length)) for length in problem.other_lengths[-1:]]
    return [show(problem, group.median), show(problem, group.worst), solved, *longer, f"{group.records[0]['rate']:g}"]


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
    lines = []
    for contender in _contenders(problem):
        cost = measured.find(list(costs), problem.name, contender.name)
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
    """Where the costs on the page were measured."""
    places: dict[str, None] = {}
    for one in costs:
        threads = f", torch threads: {one['threads']}" if one["device"].startswith("cpu") else ""
        commit = "" if one["commit"] is None else f", commit {one['commit'][:12]}"
        places[f"{one['device']}{threads}{commit}"] = None
    return [f"Costs were measured on {'; '.join(places)}."] if costs else []


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
    found = {TIME: _panels(times, "training time in s"), LENGTH: _panels(lengths, "length of the test")}
    return {name: figure for name, figure in found.items() if figure is not None}


Lines = dict[str, list[tuple[float, float]]]
"""Points (x, metric) by contender."""


def _times(problem: Problem, records: Sequence[Record], costs: Sequence[Record]) -> Lines:
    found: Lines = {}
    for contender in _contenders(problem):
        group, cost = _group(problem, contender, records), measured.find(list(costs), problem.name, contender.name)
        if group is not None and cost is not None and group.median is not None:
            seconds = cost["update_milliseconds"] * group.records[-1]["iterations"] / 1e3
            found[contender.name] = [(seconds, group.median)]
    return found


def _lengths(problem: Problem, records: Sequence[Record]) -> Lines:
    found: Lines = {}
    length = int(problem.options["length"])
    for contender in _contenders(problem):
        group = _group(problem, contender, records)
        if group is not None:
            values = {length: group.median} | {one: _at_length(group, one) for one in problem.other_lengths}
            found[contender.name] = [(one, value) for one, value in sorted(values.items()) if value is not None]
    return found


def _panels(by_problem: Mapping[str, Lines], x_label: str) -> Figure | None:
    """A panel for each problem that has points; None where none has."""
    drawn = [(PROBLEMS[name], lines) for name, lines in by_problem.items() if any(lines.values())]
    if not drawn:
        return None
    columns = min(len(drawn), MOST_COLUMNS)
    lines = ceil(len(drawn) / columns)
    figure = Figure(figsize=(4.2 * max(columns, 2), 3.4 * lines + 1), layout="constrained")  # the legend needs two
    panels = [figure.add_subplot(lines, columns, place + 1) for place in range(len(drawn))]
    for axes, (problem, points) in zip(panels, drawn, strict=True):
        _draw(axes, problem, points)
        axes.set(title=title(problem), xlabel=x_label, ylabel=problem.make_task().headline.label, xscale="log")
        found = [x for line in points.values() for x, _ in line]
        axes.set_xlim(min(found) / 1.6, max(found) * 1.6)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    named = dict(pair for axes in panels for pair in zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw(axes: Axes, problem: Problem, lines: Lines) -> None:
    headline = problem.make_task().headline
    for name, points in lines.items():
        place = problem.contenders.index(name)
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        style["linestyle"] = "-" if place < len(COLOURS) else "--"
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, linewidth=1.2, label=CONTENDERS[name].title, **style)
    axes.axhline(headline.chance, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    if headline.spec.endswith("%"):
        use_per_cent(axes)
    else:
        use_log_scale(axes)
    plain(axes)
