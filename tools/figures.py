"""The figures of docs/results.md and its appendix, from records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from sab.lab.experiments.records import Record
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.report.figures import draw_clip, draw_norms
from sab.lab.report.numbers import ByRow, method_name
from sab.lab.report.page.plots import Curve, band
from sab.lab.report.tables import PAPERS_TABLES, UNCLIPPED, heading, title
from sab.lab.tasks import TASKS, Headline
from sab.plot.drawing import (
    COLOURS,
    GREY,
    heat_map,
    label_lines,
    largest_outside,
    plain,
    signal_spans,
    use_iterations,
    use_log_scale,
    use_per_cent,
    weight_bar,
)
from sab.plot.drawing import METHODS as METHOD_COLOURS

CURVE_ROWS = {
    "SAB, k_trunc = k_top = 5": "copying-300-sab-5-5-ours",
    "SAB, k_trunc = k_top = 10": "copying-300-sab-10-10-ours",
    "LSTM, full BPTT": "copying-300-bptt",
    "LSTM, TBPTT 20": "copying-300-tbptt-20",
}
ATTENTION_ROW = next(row.id for row in ROWS.values() if row.moments)
DASHES = ("-", "--", ":", "-.")
"""Lines of one method differ in these."""


def attention_moments(record: Record) -> Figure:
    """The attention that a record keeps of several moments of training: a heat map for each, side by side, of the
    microstates where most is read at that moment."""
    kept = record["attention"]
    moments: dict[str, list[list[float | None]]] = kept["moments"]
    k_att, first = kept["k_att"], kept["first"]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(moments), sharey=True, squeeze=False)[0]
    maps = {moment: numpy.array(weights, dtype=float) for moment, weights in moments.items()}
    largest = max(numpy.nanmax(weights) for weights in maps.values())
    outside = 0.0
    for axes, (moment, weights) in zip(panels, maps.items(), strict=True):
        heat_map(axes, weights, first, k_att, largest)
        start, end = max(signal_spans(weights), key=lambda span: numpy.nanmax(weights[:, span[0] : span[1] + 1]))
        outside = max(outside, largest_outside(weights, [(start, end)]))
        axes.set_xlim((start + 0.5) * k_att, (end + 1.5) * k_att)
        axes.set_title(f"after {int(moment):,} iterations", loc="left", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.set(xlabel="", ylabel="attending step" if axes is panels[0] else "")
    figure.supxlabel(
        "time step of the attended microstate, in each panel those that are read most then "
        f"(no other one has a mean weight above {outside:.2f})",
        fontsize="medium",
    )
    weight_bar(figure, list(panels), "mean weight")
    return figure


def seeds_over_time(groups: Mapping[str, Sequence[Record]], headline: Headline) -> Figure:
    """The headline metric of records by label over the iterations: the median of the seeds in the band of all."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    used: Counter[str] = Counter()
    for label, records in groups.items():
        method = records[0]["config"]["model"]["method"]
        _draw_band(axes, label, records, lambda point: point["step"], headline, DASHES[used[method] % len(DASHES)])
        used[method] += 1
    axes.axhline(headline.chance, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    axes.set(xlabel="iteration", ylabel=headline.label, xscale="log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if headline.spec.endswith("%"):
        use_per_cent(axes)
    else:
        use_log_scale(axes)
    plain(axes)
    label_lines(axes)
    return figure


def _draw_band(
    axes: Axes,
    label: str,
    records: Sequence[Record],
    time_of: Callable[[Any], float],
    headline: Headline,
    dash: str,
) -> None:
    """The median of seeds in the colour of their method, and a band from the lowest to the highest."""
    curves = [
        Curve(
            [time_of(point) for point in record["history"]],  # pyright: ignore[reportArgumentType]
            [point["metrics"][headline.metric] for point in record["history"]],
        )
        for record in records
    ]
    times, low, middle, high = (numpy.array(one, dtype=float) for one in band(curves))
    colour = METHOD_COLOURS[records[0]["config"]["model"]["method"]]
    few = "o" if len(times) < 3 else None
    axes.plot(times, middle, color=colour, linestyle=dash, linewidth=2, label=label, marker=few)
    axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0)


def validation_curves(rows: Sequence[Row], by_row: ByRow) -> Figure:
    """The headline metric on validation data over the epochs, of the best row of each kind: SAB as we train it and as
    its authors do, truncated and full backpropagation, and the latter as we train it."""
    headline = TASKS[rows[0].task].headline
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()

    def epoch_of(record: Record) -> Callable[[Any], float]:
        return lambda point: round(point["step"] / record["iterations"] * record["epochs"], 4)

    chosen = best_of_each_kind(rows, by_row)
    for row in chosen:
        records = [record for record in by_row[row.id] if record["history"]]
        dash = "-" if _is_ours(row) else "--"
        _draw_band(axes, _name(row), records, epoch_of(records[0]), headline, dash)
    axes.set(xlabel="epoch", ylabel=f"{headline.label}, validation data, {title(rows, by_row)}")
    axes.set_xlim(left=0)
    if headline.spec.endswith("%"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    plain(axes)
    label_lines(axes)
    return figure


def best_of_each_kind(rows: Sequence[Row], by_row: ByRow) -> list[Row]:
    """At most five of the rows that have a learning curve: of each method and way of training the one that came best
    on validation data."""
    headline = TASKS[rows[0].task].headline

    def last(row: Row) -> float:
        values = [record["history"][-1]["metrics"][headline.metric] for record in by_row[row.id] if record["history"]]
        known = [value for value in values if value is not None]
        worst = -numpy.inf if headline.higher_is_better else numpy.inf
        return statistics.median(known) if known else worst

    best: dict[tuple[str, bool], Row] = {}
    for row in rows:
        kind = row.method, _is_ours(row)
        if kind not in best or headline.reaches(last(row), last(best[kind])):
            best[kind] = row
    return list(best.values())[:5]


def _is_ours(row: Row) -> bool:
    """Whether a row is trained as this library recommends; others are drawn dashed."""
    return row.is_control or row.reading == "ours"


def _name(row: Row) -> str:
    """A row at the end of its line."""
    name = method_name(row).removeprefix("LSTM, ")
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
    """Every figure that there are records for, by its file."""
    drawn: dict[str, Figure] = {}
    groups = {label: by_row[row] for label, row in CURVE_ROWS.items() if row in by_row}
    if groups:
        drawn["copying-300.png"] = seeds_over_time(groups, TASKS["copying"].headline)
    for record in by_row.get(ATTENTION_ROW, []):
        if record.get("attention", {}).get("moments"):
            drawn["attention-during-training.png"] = attention_moments(record)
            break
    for section in PAPERS_TABLES:
        rows = [row for row in section.rows if any(record["history"] for record in by_row.get(row.id, []))]
        if rows:
            drawn[f"{section.task}.png"] = validation_curves(rows, by_row)
    pairs = _clipping_pairs(by_row)
    if pairs:
        drawn["clipping.png"] = clipping(pairs)
    return drawn


def _clipping_pairs(by_row: ByRow) -> dict[str, tuple[Record, Record]]:
    """For each task whose two rows were both run a record of either, with clipping and without, by a title."""
    pairs: dict[str, tuple[Record, Record]] = {}
    for section in UNCLIPPED:
        clipped, unclipped = (by_row.get(row.id) for row in section.rows)
        if clipped and unclipped:
            pairs[heading(section.rows, by_row)] = clipped[0], unclipped[0]
    return pairs
