"""Figures of runs and benchmark records: learning curves, gradient norms, attention, and what a step costs.

Every function returns a matplotlib `Figure`, which `figure.savefig("figure.pdf")` writes. With `ax` it draws into the
given axes and returns the figure that they are part of. `sab plot KIND` draws the same from the command line; figures
of a trace are in `sab.plot`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from math import ceil
from pathlib import Path
from typing import Any

from sab.extras import require

require("matplotlib")

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor

from sab.errors import UserValueError, printable
from sab.lab.experiments.timing import BOTH
from sab.lab.files import replacing
from sab.lab.report.performance import SWEPT, WAYS, Record, common_way, load, microseconds_a_step, swept_records
from sab.lab.tasks import Copying
from sab.lab.tasks.copying import DIGITS
from sab.lab.training import evaluation
from sab.lab.training.checkpoint import load_model
from sab.lab.training.config import resolve_device
from sab.lab.training.run import Evaluation, Run
from sab.plot.drawing import (
    COLOURS,
    GREY,
    METHODS,
    bracket,
    cut_between,
    figure_of,
    heat_map,
    label_lines,
    largest_outside,
    legend_above,
    marker_of_few,
    plain,
    signal_spans,
    use_iterations,
    use_log_scale,
    use_per_cent,
    weight_bar,
)
from sab.tracing import Trace, trace

DPI = 160
TORCH_LABEL = "torch.nn.LSTM"
MARKERS, MOST_MARKERS = "ovsD^Px*", 12
MOST_LABELLED = 5
"""Up to so many lines have their names at their ends; more have a legend."""

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
    # A name is no formula, though matplotlib takes what lies between two dollars for one.
    names = [printable(name).replace("$", r"\$") for name in _shortest_names(places)]
    return dict(zip(names, opened.values(), strict=True))


def _shortest_names(places: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(places):
            return names
    raise UserValueError("runs must be different ones; got one of them twice.", "runs")


def learning_curve(runs: Runs, *, ax: Axes | None = None) -> Figure:
    """Draw the training loss and the headline metric over the iterations; with `ax` the headline metric alone.

    `runs` is a run, or several of one task, or their folders; a mapping gives them labels.
    """
    runs = labelled(runs)
    if ax is not None:
        draw_headline(ax, runs)
        legend_above(ax)
        return figure_of(ax)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_loss(left, runs)
    draw_headline(right, runs)
    if len(runs) <= MOST_LABELLED:
        label_lines(right)
    else:
        figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_loss(axes: Axes, runs: Mapping[str, Run]) -> None:
    """The training loss of runs by label."""
    for label, style, lines in _evaluated(runs):
        draw_curve(axes, lines, [line["loss"] for line in lines], label=label, linewidth=2, **style)
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
        draw_curve(axes, lines, values, label=label, linewidth=2, **style)
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
    methods = [run.config.model.method for run in runs.values()]
    colours = [METHODS[method] for method in methods] if len(set(methods)) == len(runs) else cycle(COLOURS)
    for (label, run), colour, marker in zip(runs.items(), colours, cycle(MARKERS), strict=False):
        lines = run.evaluations()
        if not lines:
            raise UserValueError(
                f"{str(run.path)!r} must hold evaluations to be plotted; its metrics.jsonl has none yet."
            )
        style: dict[str, Any] = {"color": colour, "markersize": 5, "markevery": ceil(len(lines) / MOST_MARKERS)}
        yield label, style | ({"marker": marker} if len(runs) > 1 else {}), lines


def draw_curve(axes: Axes, points: Points, values: Sequence[Any], few: int = 10, **style: Any) -> None:
    """Values over the iterations of the evaluations that they are of."""
    style.setdefault("marker", marker_of_few(len(points), few))
    axes.plot([point["step"] for point in points], values, **style)


def gradient_norms(runs: Runs, *, ax: Axes | None = None) -> Figure:
    """Draw gradient norms before clipping over the iterations: the mean since the last evaluation, and the largest.

    `runs` as for `learning_curve`.
    """
    runs = labelled(runs)
    figure = figure_of(ax) if ax else Figure(figsize=(7, 3.8), layout="constrained")
    axes = ax or figure.subplots()
    for label, style, lines in _evaluated(runs):
        draw_norms(axes, lines, label, **style)
    clips = {run.config.training.clip for run in runs.values()}
    if len(clips) == 1 and (clip := clips.pop()) is not None:
        draw_clip(axes, clip)
    use_iterations(axes)
    axes.set_ylabel("gradient norm\nsince the last evaluation")
    if ax:
        legend_above(ax)
    else:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_norms(axes: Axes, points: Points, name: str, **style: Any) -> None:
    """Draws the largest and the mean gradient norms of a run's evaluations."""
    for entry, kind, line in (("grad_norm_max", "largest", "--"), ("grad_norm", "mean", "-")):
        own: dict[str, Any] = {"linestyle": line, "linewidth": 1.5, "markersize": 3.5, "label": f"{name}, {kind}"}
        draw_curve(axes, points, [point[entry] for point in points], few=30, **own | style)
    use_log_scale(axes)
    plain(axes)


def draw_clip(axes: Axes, clip: float) -> None:
    """Draws the norm that gradients are clipped to."""
    axes.axhline(clip, color=GREY, linestyle=":", linewidth=1.5, label="what it is clipped to")


def attention(run: Run | str | Path, *, ax: Axes | None = None) -> Figure:
    """Draw a heat map of the mean attention weights over a test batch for each layer; with `ax` for the last layer.

    Rows are the attending steps, columns the attended microstates by their time step. Long stretches of microstates
    that nothing reads are cut out; with `ax` all are shown.
    """
    (run,) = labelled(run).values()
    weights = mean_attention(run) if ax is None else mean_attention(run)[-1:]
    task, k_att = run.config.task, run.config.model.memory.k_att
    rows, columns = weights.shape[1:]
    height = min(max(0.26 * rows, 2.2), 5.0)
    figure = figure_of(ax) if ax else Figure(figsize=(8, 1.4 + height * len(weights)), layout="constrained")
    spans = [(0, columns - 1)] if ax else signal_spans(weights.numpy())
    ratios = [last - first + 1 for first, last in spans]
    grid = [[ax]] if ax else figure.subplots(len(weights), len(spans), squeeze=False, width_ratios=ratios).tolist()
    largest = weights.nan_to_num().max().item()
    for layer, (panels, own) in enumerate(zip(grid, weights, strict=True)):
        for axes, (first, last) in zip(panels, spans, strict=True):
            heat_map(axes, own.numpy(), task.attending_steps[0], k_att, largest)
            axes.set_xlim((first + 0.5) * k_att, (last + 1.5) * k_att)
            axes.set_xticks(range((first + 1) * k_att, (last + 1) * k_att + 1, k_att * ceil(sum(ratios) / 20)))
            axes.set(xlabel="", ylabel="")
        panels[0].set_ylabel("attending step" + (f", layer {layer + 1}" if len(weights) > 1 else ""))
        for left, right in pairwise(panels):
            cut_between(left, right)
    if isinstance(task, Copying) and (not ax):
        bracket(grid[0][0], 1, min(DIGITS, (spans[0][1] + 1) * k_att), "the ten digits")
    label = TIME_LABEL
    if sum(ratios) < columns:
        label += f"; left out: no mean weight above {largest_outside(weights.numpy(), spans):.3f}"
    if ax:
        ax.set_xlabel(label)
        ax.set_title(f"{task.name}: mean attention weight over a batch", loc="left", fontsize=11)
    else:
        figure.supxlabel(label, fontsize="medium")
    weight_bar(figure, [axes for panels in grid for axes in panels], "mean weight over a batch")
    return figure


TIME_LABEL = "time step of the attended microstate (grey: not kept yet)"


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
    rows, _ = evaluation.rows_of_figure(run.config.model, run.config.task, training.batch_size)
    inputs, _ = run.config.task.batch(training.seed, 0, rows, "test", device, training.dtype)
    if 0 <= row < rows:  # else the trace says what it may be
        inputs, row = inputs[:, row : row + 1], 0
    return trace(load_model(run, device), inputs, target_step, target_unit, row=row)


def scaling(records: str | Path | Sequence[str | Path | Mapping[str, Any]], *, ax: Axes | None = None) -> Figure:
    """Draw what a step costs, forward and backward, against the number of steps, the hidden size and the batch size.

    `records` are those of `sab bench --output`, or the files that hold them. There is a panel for each size that they
    vary; with `ax` only the first is drawn.
    """
    given = [records] if isinstance(records, str | Path) else list(records)
    files = [Path(one) for one in given if isinstance(one, str | Path)]
    read = [dict(one) for one in given if isinstance(one, Mapping)]
    found = [*read, *(load(files) if files else [])]
    sweeps = {case: swept for case in SWEPT if (swept := swept_records(found, case))}
    if not sweeps:
        cases = ", ".join(dict.fromkeys(case for _, _, along in SWEPT.values() for case in along))
        raise UserValueError(f"records must hold two of the cases {cases} that differ in T, n or B; they hold none.")
    if ax is not None:
        case, swept = next(iter(sweeps.items()))
        draw_step_times(ax, swept, case, common_way(swept), _scorers(swept))
        legend_above(ax)
        return figure_of(ax)
    figure = Figure(figsize=(1.5 + 3.2 * len(sweeps), 3.6), layout="constrained")
    panels = figure.subplots(1, len(sweeps), squeeze=False)[0]
    drawn = [record for swept in sweeps.values() for record in swept]
    scorers, way = _scorers(drawn), common_way(drawn)
    for axes, (case, swept) in zip(panels, sweeps.items(), strict=True):
        draw_step_times(axes, swept, case, way, scorers)
        axes.set_ylabel(axes.get_ylabel() if axes is panels[0] else "")
    keys = {key.get_label(): key for axes in panels for key in axes.get_legend_handles_labels()[0]}
    keys[TORCH_LABEL] = keys.pop(TORCH_LABEL)  # last
    figure.legend(handles=list(keys.values()), loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_step_times(axes: Axes, records: Sequence[Record], case: str, way: str, scorers: Sequence[str]) -> None:
    """Microseconds a step, forward and backward, in a sweep, called in one of WAYS; `scorers` are all that the figure
    has."""
    entry, called, _ = SWEPT[case]
    for name in [*_scorers(records), "torch.nn"]:
        points: dict[int, float] = {}
        for record in records:
            if name in (record["scorer"], "torch.nn"):
                side = name if name == "torch.nn" else "ours"
                time = microseconds_a_step(record, way, BOTH, side)
                points[record[entry]] = min(time, points.get(record[entry], time))
        axes.plot(sorted(points), [points[point] for point in sorted(points)], **_style_of(name, scorers))
    axes.set_xscale("log")
    use_log_scale(axes)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({record[entry] for record in records}))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel(called)
    axes.set_ylabel(f"microseconds a step,\n{WAYS[way]}")
    plain(axes)


def _scorers(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["scorer"] for record in records))


def _style_of(name: str, scorers: Sequence[str]) -> dict[str, Any]:
    """How a scorer of ours is drawn, or torch.nn.LSTM."""
    if name == "torch.nn":
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


def save_in_every_format(figure: Figure, path: Path) -> list[Path]:
    """Writes a figure next to each other as PNG, PDF and SVG; `path` is the name of any of them."""
    paths = [path.with_suffix(f".{kind}") for kind in FORMATS]
    for one in paths:
        save(figure, one)
    return paths


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in one move, in the format that the name of its file ends in."""
    kind = check_picture(path)
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with replacing(path, "out") as temporary, matplotlib.rc_context(_SAVED):
        figure.savefig(temporary, format=kind, dpi=DPI, metadata=undated)
