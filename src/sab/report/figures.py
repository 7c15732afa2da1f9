"""Figures: learning curves of runs, where a model's attention goes, gradient norms, and what a step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter
from torch import Tensor

from sab.errors import ValueMistake
from sab.experiments.tables import Row
from sab.files import replacing
from sab.report import datasets, synthetic
from sab.report.numbers import METHODS, ByRow
from sab.report.performance import BOTH, FORWARD, SWEPT, Record, common_way, microseconds_a_step
from sab.tasks import TASKS, Headline
from sab.training import evaluation
from sab.training.checkpoint import load_model
from sab.training.config import resolve_device
from sab.training.run import Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""
DPI = 160


def learning_curves(runs: Mapping[str, Run]) -> Figure:
    """The training loss and the headline metric of one run or several of one task, by label, over the iterations."""
    headline = next(iter(runs.values())).config.task.headline
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (label, run), colour in zip(runs.items(), cycle(COLOURS), strict=False):
        lines = run.evaluations()
        if not lines:
            raise ValueMistake(
                f"{str(run.path)!r} must hold evaluations to be plotted; its metrics.jsonl has none yet."
            )
        steps = [line["step"] for line in lines]
        # Few points are shown as points, since a line through one is none.
        style = {"color": colour, "label": label, "linewidth": 2, "marker": "o" if len(lines) < 10 else None}
        left.plot(steps, [line["loss"] for line in lines], **style)
        right.plot(steps, [line["metrics"][headline.metric] for line in lines], **style)
    _use_log_scale(left)
    left.set(ylabel="training loss")
    right.axhline(headline.chance, color="0.45", linestyle=":", linewidth=1.5, label="chance")
    right.set(ylabel=headline.label)
    if headline.spec.endswith("%"):
        right.set(ylim=(-0.02, 1.02))
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        _use_log_scale(right)
    for axes in (left, right):
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(left=0)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def attention_map(run: Run) -> Figure:
    """Rows are the attending steps, columns the attended microstates by their time step: a heat map for each layer."""
    weights = mean_attention(run)
    task, k_att = run.config.task, run.config.model.k_att
    rows, columns = weights.shape[1:]
    height = min(max(0.26 * rows, 2.2), 5.0)
    figure = Figure(figsize=(10, 1.1 + height * len(weights)), layout="constrained")
    panels = figure.subplots(len(weights), 1, squeeze=False)[:, 0]
    largest = weights.nan_to_num().max().item()
    first, last = task.attending_steps[0], task.attending_steps[-1]
    # In time steps, so that the ticks are; a column is as wide as the steps between two microstates.
    extent = (k_att / 2, (columns + 0.5) * k_att, last + 0.5, first - 0.5)
    for layer, (axes, panel) in enumerate(zip(panels, weights, strict=True)):
        axes.set_facecolor("0.88")
        axes.imshow(
            panel.numpy(), aspect="auto", cmap="Blues", vmin=0.0, vmax=largest, extent=extent, interpolation="nearest"
        )
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xticks(range(k_att, columns * k_att + 1, k_att * ceil(columns / 20)))
        axes.set_ylabel("attending step" if len(weights) == 1 else f"attending step, layer {layer + 1}")
    panels[-1].set_xlabel("time step of the attended microstate (grey: not kept yet)")
    panels[0].set_title(f"{task.name}: mean attention weight over a batch", loc="left", fontsize=11)
    figure.colorbar(panels[0].images[0], ax=list(panels), label="weight", pad=0.01, fraction=0.03)
    return figure


def mean_attention(run: Run) -> Tensor:
    """Attention weights averaged over a test batch, [layers, attending steps, microstates]; NaN before one exists."""
    task = run.config.task
    if run.config.model.memory().k_top == 0:
        raise ValueMistake(f"{str(run.path)!r} must be a run of a model with a memory; it has none (k_top is 0).")
    if task.steps <= run.config.model.k_att:
        raise ValueMistake(f"{str(run.path)!r} must have sequences longer than k_att; they have {task.steps} steps.")
    return evaluation.mean_attention(load_model(run, resolve_device("auto")), task, run.config.training)


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
        rows, columns = weights.shape
        extent = (k_att / 2, (columns + 0.5) * k_att, first + rows - 0.5, first - 0.5)
        axes.set_facecolor("0.88")
        axes.imshow(
            weights, aspect="auto", cmap="Blues", vmin=0.0, vmax=largest, extent=extent, interpolation="nearest"
        )
        axes.set_title(f"after {int(moment):,} iterations", loc="left", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlabel("time step of the attended microstate")
    panels[0].set_ylabel("attending step")
    figure.colorbar(panels[0].images[0], ax=list(panels), label="mean weight", pad=0.01, fraction=0.03)
    return figure


def seeds_over_time(groups: Mapping[str, Sequence[Record]], headline: Headline) -> Figure:
    """The headline metric of records by label over the iterations, a thin line for each seed."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    for (label, records), colour in zip(groups.items(), cycle(COLOURS), strict=False):
        for place, record in enumerate(records):
            steps = [point["step"] for point in record["history"]]
            values = [point["metrics"][headline.metric] for point in record["history"]]
            named = f"{label} ({len(records)} seed{'s' * (len(records) > 1)})"
            style = {"color": colour, "linewidth": 1.2, "alpha": 0.8, "marker": "o" if len(steps) < 10 else None}
            axes.plot(steps, values, label=named if place == 0 else None, **style)
    axes.axhline(headline.chance, color="0.45", linestyle=":", linewidth=1.5, label="chance")
    axes.set(xlabel="iteration", ylabel=headline.label, xscale="log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if headline.spec.endswith("%"):
        axes.set(ylim=(-0.02, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        _use_log_scale(axes)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
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
    axes.set(xlabel="epoch", ylabel=f"{headline.label}, validation data, {datasets.title(rows, by_row)}")
    axes.set_xlim(left=0)
    if headline.spec.endswith("%"):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def _styles(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Ours in full lines, what is trained as in the paper in broken ones; alike ones differ in colour and marker."""
    kinds = {"ours": "-", None: "--", "as written": ":", "as released": ":"}
    markers = "ovsD^Px*"
    return [
        {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": "-." if row.is_control else kinds[row.reading],
            "marker": markers[place % len(markers)],
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
    for axes, (title, records) in zip(panels, pairs.items(), strict=True):
        for record, name, colour in zip(records, ("clipped", "not clipped"), COLOURS, strict=False):
            steps = [point["step"] for point in record["history"]]
            for entry, told, line in (("grad_norm_max", "largest", "--"), ("grad_norm", "mean", "-")):
                norms = [point[entry] for point in record["history"]]
                marker = "o" if len(steps) < 30 else None
                style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 3.5, "linewidth": 1.5}
                axes.plot(steps, norms, label=f"{name}, {told}", **style)
        clip = records[0]["config"]["training"]["clip"]
        axes.axhline(clip, color="0.45", linestyle=":", linewidth=1.5, label="what it is clipped to")
        _use_log_scale(axes)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.set_xlim(left=0)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
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
    for section in datasets.PAPERS_TABLES:
        if rows := datasets.drawn_rows(section, by_row):
            drawn[datasets.curves_of(section.task)] = validation_curves(rows, by_row)
    pairs = datasets.clipping_pairs(by_row)
    if pairs:
        drawn[datasets.CLIPPING] = clipping(pairs)
    return drawn


def step_times(records: Sequence[Record], case: str) -> Figure:
    """What a step costs in a sweep of the benchmark, ours with each scorer and nn.LSTM's, over what is swept."""
    entry, symbol = SWEPT[case]
    way = common_way(records)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    scorers = list(dict.fromkeys(record["scorer"] for record in records))
    for axes, chosen in zip(panels, (BOTH, FORWARD), strict=True):
        for place, name in enumerate([*scorers, "nn.LSTM"]):
            points: dict[int, float] = {}
            for record in records:
                if name in (record["scorer"], "nn.LSTM"):
                    of = name if name == "nn.LSTM" else "ours"
                    time = microseconds_a_step(record, way, chosen, of)
                    points[record[entry]] = min(time, points.get(record[entry], time))
            is_torch = name == "nn.LSTM"
            axes.plot(
                sorted(points),
                [points[point] for point in sorted(points)],
                color="0.3" if is_torch else COLOURS[place],
                linestyle="--" if is_torch else "-",
                marker="s" if is_torch else "ovD^"[place],
                label="torch.nn.LSTM" if is_torch else f"SAB, {name}",
            )
        axes.set_xscale("log")
        _use_log_scale(axes)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(sorted({record[entry] for record in records}))
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_title(chosen.replace("+", " and "), loc="left", fontsize=11)
        axes.set_xlabel({"T": "steps T", "n": "hidden size n"}[symbol])
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    how = "from a CUDA graph" if way == "graph" else "as called"
    panels[0].set_ylabel(f"microseconds a step, {how}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _use_log_scale(axes: Axes) -> None:
    """A logarithmic axis with labels such as 0.2, where the default writes powers of ten and may write none."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG in one move."""
    with replacing(path, "out") as temporary:
        FigureCanvasAgg(figure)
        figure.savefig(temporary, format="png", dpi=DPI)
