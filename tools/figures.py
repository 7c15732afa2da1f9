"""The figures of docs/results.md, from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from sab.lab.experiments.records import Record
from sab.lab.experiments.tables import Row
from sab.lab.report.figures import MARKERS, draw_clip, draw_curve, draw_norms
from sab.lab.report.numbers import METHODS, ByRow
from sab.lab.report.tables import PAPERS_TABLES, title
from sab.lab.tasks import TASKS, Headline
from sab.plot.drawing import COLOURS, GREY, heat_map, plain, use_iterations, use_log_scale, use_per_cent, weight_bar
from tools import datasets, synthetic


def attention_moments(record: Record) -> Figure:
    """The attention that a record keeps of several moments of training: a heat map for each, side by side."""
    kept = record["attention"]
    moments: dict[str, list[list[float | None]]] = kept["moments"]
    k_att, first = kept["k_att"], kept["first"]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(moments), sharey=True, squeeze=False)[0]
    maps = {moment: numpy.array(weights, dtype=float) for moment, weights in moments.items()}
    largest = max(numpy.nanmax(weights) for weights in maps.values())
    for axes, (moment, weights) in zip(panels, maps.items(), strict=True):
        heat_map(axes, weights, first, k_att, largest)
        axes.set_title(f"after {int(moment):,} iterations", loc="left", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.set_ylabel("attending step" if axes is panels[0] else "")
    weight_bar(figure, list(panels), "mean weight")
    return figure


def seeds_over_time(groups: Mapping[str, Sequence[Record]], headline: Headline) -> Figure:
    """The headline metric of records by label over the iterations, a thin line for each seed."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    for (label, records), colour in zip(groups.items(), cycle(COLOURS), strict=False):
        for place, record in enumerate(records):
            points = record["history"]
            named = f"{label} ({len(records)} seed{'s' * (len(records) > 1)})"
            style = {"color": colour, "linewidth": 1.2, "alpha": 0.8, "label": named if place == 0 else None}
            draw_curve(axes, points, [point["metrics"][headline.metric] for point in points], **style)
    axes.axhline(headline.chance, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    axes.set(xlabel="iteration", ylabel=headline.label, xscale="log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if headline.spec.endswith("%"):
        use_per_cent(axes)
    else:
        use_log_scale(axes)
    plain(axes)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def validation_curves(rows: Sequence[Row], by_row: ByRow) -> Figure:
    """The headline metric on validation data over the epochs: a colour and a kind of line for each row, and a line for
    each of its seeds."""
    headline = TASKS[rows[0].task].headline
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    for row, style in zip(rows, _styles(rows), strict=True):
        for place, record in enumerate(by_row[row.id]):
            epochs = [point["step"] / record["iterations"] * record["epochs"] for point in record["history"]]
            values = [point["metrics"][headline.metric] for point in record["history"]]
            axes.plot(epochs, values, label=_name(row) if place == 0 else None, linewidth=1.5, markersize=4, **style)
    axes.set(xlabel="epoch", ylabel=f"{headline.label}, validation data, {title(rows, by_row)}")
    axes.set_xlim(left=0)
    if headline.spec.endswith("%"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    plain(axes)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _styles(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Ours in full lines, what is trained as in the paper in broken ones; alike ones differ in colour and marker."""
    kinds = {"ours": "-", None: "--", "as written": ":", "as released": ":"}
    return [
        {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": "-." if row.is_control else kinds[row.reading],
            "marker": MARKERS[place % len(MARKERS)],
        }
        for place, row in enumerate(rows)
    ]


def _name(row: Row) -> str:
    """A row in a legend."""
    name = METHODS[row.method].removeprefix("LSTM, ")
    name += f" {row.k_trunc}" if row.k_trunc else ""
    name += f", {row.k_top}" if row.k_top else ""
    if row.is_control:
        return f"{name}, our training"
    return name if row.reading in (None, "ours") else f"{name}, {row.reading}"


def clipping(pairs: Mapping[str, tuple[Record, Record]]) -> Figure:
    """Gradient norms before clipping over the iterations, of a run with it and one without, a panel for each pair."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(pairs), squeeze=False)[0]
    for axes, (pair, records) in zip(panels, pairs.items(), strict=True):
        for record, name, colour in zip(records, ("clipped", "not clipped"), COLOURS, strict=False):
            draw_norms(axes, record["history"], name, color=colour)
        draw_clip(axes, records[0]["config"]["training"]["clip"])
        axes.set_title(pair, loc="left", fontsize=11)
        use_iterations(axes)
    panels[0].set_ylabel("gradient norm since the last evaluation")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def of_results(by_row: ByRow) -> dict[str, Figure]:
    """Every figure of the results' page that there are records for, by its file."""
    drawn: dict[str, Figure] = {}
    groups = {label: by_row[row] for label, row in synthetic.CURVE_ROWS.items() if row in by_row}
    if groups:
        drawn[synthetic.CURVES] = seeds_over_time(groups, TASKS["copying"].headline)
    record = synthetic.attention_record(by_row)
    if record is not None:
        drawn[synthetic.ATTENTION] = attention_moments(record)
    for section in PAPERS_TABLES:
        if rows := datasets.drawn_rows(section, by_row):
            drawn[datasets.curves_of(section.task)] = validation_curves(rows, by_row)
    pairs = datasets.clipping_pairs(by_row)
    if pairs:
        drawn[datasets.CLIPPING] = clipping(pairs)
    return drawn
