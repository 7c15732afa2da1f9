"""Figures: learning curves of runs, where a model's attention goes, gradient norms, and what a step costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter
from torch import Tensor

from sab.errors import UserValueError
from sab.lab.experiments.tables import Row
from sab.lab.files import replacing
from sab.lab.report import datasets, synthetic
from sab.lab.report.drawing import (
    COLOURS,
    GREY,
    figure_of,
    heat_map,
    legend_above,
    marker_of_few,
    plain,
    use_iterations,
    use_log_scale,
    use_per_cent,
    weight_bar,
)
from sab.lab.report.numbers import METHODS, ByRow
from sab.lab.report.performance import BOTH, FORWARD, SWEPT, Record, common_way, microseconds_a_step, swept_records
from sab.lab.tasks import TASKS, Headline
from sab.lab.training import evaluation
from sab.lab.training.checkpoint import load_model
from sab.lab.training.config import resolve_device
from sab.lab.training.run import Evaluation, Run
from sab.tracing import Trace, trace

DPI = 160
TORCH_LABEL = "torch.nn.LSTM"
MARKERS, MOST_MARKERS = "ovsD^Px*", 12

Runs = Run | str | Path | Sequence[Run | str | Path] | Mapping[str, Run | str | Path]
Points = Sequence[Mapping[str, Any]]


def labelled(runs: Runs) -> dict[str, Run]:
    """One run or several, given as such or by their folders, by label: as given, or as little of the folders' names as
    tells them apart."""
    if isinstance(runs, Run | str | Path):
        runs = [runs]
    several = dict(runs) if isinstance(runs, Mapping) else dict(enumerate(runs))
    if not several:
        raise UserValueError("runs must be at least one; got none.", "runs")
    opened = {label: run if isinstance(run, Run) else Run.open(run) for label, run in several.items()}
    if isinstance(runs, Mapping):
        return {str(label): run for label, run in opened.items()}
    places = [run.path.resolve() for run in opened.values()]
    return dict(zip(_told_apart(places), opened.values(), strict=True))


def _told_apart(places: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(places):
            return names
    raise UserValueError("runs must be different ones; got one of them twice.", "runs")


def learning_curves(runs: Mapping[str, Run]) -> Figure:
    """The training loss and the headline metric of one run or several of one task, by label, over the iterations."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_loss(left, runs)
    draw_headline(right, runs)
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_loss(axes: Axes, runs: Mapping[str, Run]) -> None:
    """The training loss of runs by label."""
    for label, style, lines in _evaluated(runs):
        _draw_curve(axes, lines, [line["loss"] for line in lines], label=label, linewidth=2, **style)
    use_log_scale(axes)
    axes.set(ylabel="training loss")
    use_iterations(axes)
    plain(axes)


def draw_headline(axes: Axes, runs: Mapping[str, Run]) -> None:
    """The headline metric of runs of one task, by label, on validation data."""
    headlines = {run.config.task.name: run.config.task.headline for run in runs.values()}
    if len(headlines) > 1:
        raise UserValueError(f"runs must be of one task; got {', '.join(headlines)}.", "runs")
    (headline,) = headlines.values()
    for label, style, lines in _evaluated(runs):
        values = [line["metrics"][headline.metric] for line in lines]
        _draw_curve(axes, lines, values, label=label, linewidth=2, **style)
    axes.axhline(headline.chance, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    axes.set(ylabel=headline.label)
    if headline.spec.endswith("%"):
        use_per_cent(axes)
    else:
        use_log_scale(axes)
    use_iterations(axes)
    plain(axes)


def _evaluated(runs: Mapping[str, Run]) -> Iterator[tuple[str, dict[str, Any], list[Evaluation]]]:
    """Labels, evaluations and how to draw them: several runs differ in their markers as well, for print in black."""
    for (label, run), colour, marker in zip(runs.items(), cycle(COLOURS), cycle(MARKERS), strict=False):
        lines = run.evaluations()
        if not lines:
            raise UserValueError(
                f"{str(run.path)!r} must hold evaluations to be plotted; its metrics.jsonl has none yet."
            )
        style: dict[str, Any] = {"color": colour, "markersize": 5, "markevery": ceil(len(lines) / MOST_MARKERS)}
        yield label, style | ({"marker": marker} if len(runs) > 1 else {}), lines


def _draw_curve(axes: Axes, points: Points, values: Sequence[Any], few: int = 10, **style: Any) -> None:
    """Values over the iterations of the evaluations that they are of."""
    style.setdefault("marker", marker_of_few(len(points), few))
    axes.plot([point["step"] for point in points], values, **style)


def gradient_norms(runs: Mapping[str, Run], ax: Axes | None = None) -> Figure:
    """Gradient norms before clipping over the iterations: the mean since the last evaluation, and the largest."""
    figure = figure_of(ax) if ax else Figure(figsize=(7, 3.8), layout="constrained")
    axes = ax or figure.subplots()
    for label, style, lines in _evaluated(runs):
        _draw_norms(axes, lines, label, **style)
    clips = {run.config.training.clip for run in runs.values()}
    if len(clips) == 1 and (clip := clips.pop()) is not None:
        _draw_clip(axes, clip)
    use_iterations(axes)
    axes.set_ylabel("gradient norm\nsince the last evaluation")
    if ax:
        legend_above(ax)
    else:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def _draw_norms(axes: Axes, points: Points, name: str, **style: Any) -> None:
    for entry, told, line in (("grad_norm_max", "largest", "--"), ("grad_norm", "mean", "-")):
        own: dict[str, Any] = {"linestyle": line, "linewidth": 1.5, "markersize": 3.5, "label": f"{name}, {told}"}
        _draw_curve(axes, points, [point[entry] for point in points], few=30, **own | style)
    use_log_scale(axes)
    plain(axes)


def _draw_clip(axes: Axes, clip: float) -> None:
    axes.axhline(clip, color=GREY, linestyle=":", linewidth=1.5, label="what it is clipped to")


def attention_map(run: Run, ax: Axes | None = None) -> Figure:
    """Rows are the attending steps, columns the attended microstates by their time step: a heat map for each layer, or
    with `ax` that of the last one."""
    weights = mean_attention(run) if ax is None else mean_attention(run)[-1:]
    task, k_att = run.config.task, run.config.model.memory.k_att
    rows, columns = weights.shape[1:]
    height = min(max(0.26 * rows, 2.2), 5.0)
    figure = figure_of(ax) if ax else Figure(figsize=(10, 1.1 + height * len(weights)), layout="constrained")
    panels = [ax] if ax else list(figure.subplots(len(weights), 1, squeeze=False)[:, 0])
    largest = weights.nan_to_num().max().item()
    for layer, (axes, panel) in enumerate(zip(panels, weights, strict=True)):
        heat_map(axes, panel.numpy(), task.attending_steps[0], k_att, largest)
        axes.set_xticks(range(k_att, columns * k_att + 1, k_att * ceil(columns / 20)))
        axes.set_xlabel("")
        if len(weights) > 1:
            axes.set_ylabel(f"attending step, layer {layer + 1}")
    panels[-1].set_xlabel("time step of the attended microstate (grey: not kept yet)")
    panels[0].set_title(f"{task.name}: mean attention weight over a batch", loc="left", fontsize=11)
    weight_bar(figure, panels)
    return figure


def mean_attention(run: Run) -> Tensor:
    """Attention weights averaged over a test batch, [layers, attending steps, microstates]; NaN before one exists."""
    task = run.config.task
    if run.config.model.layer_config().k_top == 0:
        raise UserValueError(f"{str(run.path)!r} must be a run of a model with a memory; it has none (k_top is 0).")
    if task.steps <= run.config.model.memory.k_att:
        raise UserValueError(f"{str(run.path)!r} must have sequences longer than k_att; they have {task.steps} steps.")
    return evaluation.mean_attention(load_model(run, resolve_device("auto")), task, run.config.training)


def trace_of(run: Run, target_step: int | None = None, target_unit: int | None = None, row: int = 0) -> Trace:
    """The trace of a run's model on a sequence of the test split's first batch."""
    training, device = run.config.training, resolve_device("auto")
    inputs, _ = run.config.task.batch(training.seed, 0, training.batch_size, "test", device, training.dtype)
    return trace(load_model(run, device), inputs, target_step, target_unit, row=row)


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
            _draw_curve(axes, points, [point["metrics"][headline.metric] for point in points], **style)
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
    axes.set(xlabel="epoch", ylabel=f"{headline.label}, validation data, {datasets.title(rows, by_row)}")
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
    for axes, (title, records) in zip(panels, pairs.items(), strict=True):
        for record, name, colour in zip(records, ("clipped", "not clipped"), COLOURS, strict=False):
            _draw_norms(axes, record["history"], name, color=colour)
        _draw_clip(axes, records[0]["config"]["training"]["clip"])
        axes.set_title(title, loc="left", fontsize=11)
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
    for section in datasets.PAPERS_TABLES:
        if rows := datasets.drawn_rows(section, by_row):
            drawn[datasets.curves_of(section.task)] = validation_curves(rows, by_row)
    pairs = datasets.clipping_pairs(by_row)
    if pairs:
        drawn[datasets.CLIPPING] = clipping(pairs)
    return drawn


def step_times(records: Sequence[Record], case: str) -> Figure:
    """What a step costs in a sweep of the benchmark, ours with each scorer and nn.LSTM's, over what is swept."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, chosen in zip(panels, (BOTH, FORWARD), strict=True):
        draw_step_times(axes, records, case, chosen)
        axes.set_title(chosen.replace("+", " and "), loc="left", fontsize=11)
    panels[1].set_ylabel("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def scaling(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """What a step costs forward and backward, a panel for each sweep that records have; with `ax` the first alone."""
    sweeps = {case: swept for case in SWEPT if (swept := swept_records(records, case))}
    if not sweeps:
        raise UserValueError(f"records must hold a sweep, {' or '.join(SWEPT)} of `sab bench --cases`; they hold none.")
    if ax is not None:
        case, swept = next(iter(sweeps.items()))
        draw_step_times(ax, swept, case, BOTH)
        legend_above(ax)
        return figure_of(ax)
    figure = Figure(figsize=(1.5 + 3.9 * len(sweeps), 3.8), layout="constrained")
    panels = figure.subplots(1, len(sweeps), squeeze=False)[0]
    scorers = _scorers([record for swept in sweeps.values() for record in swept])
    for axes, (case, swept) in zip(panels, sweeps.items(), strict=True):
        draw_step_times(axes, swept, case, BOTH, scorers)
    keys = {key.get_label(): key for axes in panels for key in axes.get_legend_handles_labels()[0]}
    keys[TORCH_LABEL] = keys.pop(TORCH_LABEL)  # last
    figure.legend(handles=list(keys.values()), loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_step_times(axes: Axes, records: Sequence[Record], case: str, chosen: str, scorers: Sequence[str] = ()) -> None:
    """Microseconds a step in a sweep: `chosen` is forward and backward, or forward alone; `scorers` are all that the
    figure has, where it has more than the records."""
    entry, symbol = SWEPT[case]
    way = common_way(records)
    present = _scorers(records)
    for name in [*present, "nn.LSTM"]:
        points: dict[int, float] = {}
        for record in records:
            if name in (record["scorer"], "nn.LSTM"):
                of = name if name == "nn.LSTM" else "ours"
                time = microseconds_a_step(record, way, chosen, of)
                points[record[entry]] = min(time, points.get(record[entry], time))
        axes.plot(sorted(points), [points[point] for point in sorted(points)], **_style_of(name, scorers or present))
    axes.set_xscale("log")
    use_log_scale(axes)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({record[entry] for record in records}))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel({"T": "steps T", "n": "hidden size n"}[symbol])
    axes.set_ylabel(f"microseconds a step,\n{'from a CUDA graph' if way == 'graph' else 'as called'}")
    plain(axes)


def _scorers(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["scorer"] for record in records))


def _style_of(name: str, scorers: Sequence[str]) -> dict[str, Any]:
    """How a scorer of ours is drawn, or torch.nn.LSTM."""
    if name == "nn.LSTM":
        return {"color": "0.3", "linestyle": "--", "marker": "s", "markersize": 5, "label": TORCH_LABEL}
    place = scorers.index(name)
    return {"color": COLOURS[place], "marker": "ovD^"[place], "markersize": 5, "label": f"SAB, {name}"}


FORMATS = ("png", "pdf", "svg")
_SAVED: Any = {"pdf.fonttype": 42, "svg.hashsalt": "sab"}
"""Letters stay letters in a PDF, which publishers ask for, and the same figure is the same file."""


def check_picture(out: Path) -> str:
    """The format of a picture, by the end of its name."""
    kind = out.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UserValueError(
            f"out must end in one of {', '.join(f'.{one}' for one in FORMATS)}; got {str(out)!r}.", "out"
        )
    return kind


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in one move, in the format that the name of its file ends in."""
    kind = check_picture(path)
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with replacing(path, "out") as temporary, matplotlib.rc_context(_SAVED):
        figure.savefig(temporary, format=kind, dpi=DPI, metadata=undated)
