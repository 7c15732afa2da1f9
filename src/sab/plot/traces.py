"""Figures of a trace: what each step read, and the paths by which credit came back."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from sab.errors import UserValueError
from sab.plot.drawing import CREDIT, GREY, figure_of, heat_map, legend_above, plain, weight_bar
from sab.tracing import Path, Skip, Trace

DIRECT, CHAIN, SKIP = CREDIT["direct"], CREDIT["chain"], CREDIT["skip"]
HOPS = (1.0, 0.6, 0.35)
"""How opaque the first skip of a path is, the second, and all further ones."""
ORDINALS = ("1st skip", "2nd skip", "later skips")
WIDEST = 12.0
"""Width in points of an arc with all the credit; others are as wide as their shares of it."""
MANY = 150
"""From so many steps on a bar is as wide as its edge, and would else be hard to see."""


def attention(trace: Trace, *, ax: Axes | None = None) -> Figure:
    """Draw a heat map of a trace's attention weights.

    Rows are the attending steps, columns the attended microstates by their time step.
    """
    weights = weight_matrix(trace)
    rows, columns = weights.shape
    if columns == 0:
        raise UserValueError("trace must be of a layer with a memory and of more steps than k_att; nothing was kept.")
    figure = figure_of(ax) if ax else Figure(figsize=(7, min(1.2 + 0.09 * rows, 6.0)), layout="constrained")
    axes = ax or figure.subplots()
    heat_map(axes, weights, 1, trace.k_att, float(numpy.nanmax(weights)))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("time step of the attended microstate (grey: not kept yet)")
    weight_bar(figure, [axes])
    return figure


def weight_matrix(trace: Trace) -> NDArray[Any]:
    """The weights of a trace, [steps, microstates that a step could select]; NaN before one was kept."""
    steps, columns = len(trace.numbers), (len(trace.numbers) - 1) // trace.k_att if trace.numbers.shape[1] else 0
    weights = numpy.zeros((steps, columns + 1))
    numpy.add.at(weights, (numpy.arange(steps)[:, None], trace.numbers.numpy()), trace.weights.numpy())
    kept_at = (numpy.arange(columns) + 1) * trace.k_att
    return numpy.where(kept_at < numpy.arange(1, steps + 1)[:, None], weights[:, :columns], numpy.nan)


def credit_paths(trace: Trace, *, ax: Axes | None = None, paths: int = 24) -> Figure:
    """Draw the largest `paths` of a trace as arcs over time, as wide as their shares, above the credit of each step.

    With `ax` only the arcs are drawn.
    """
    drawn = trace.paths[:paths]
    if ax is not None:
        _draw_paths(ax, trace, drawn)
        legend_above(ax, handles=_keys(trace, drawn))
        ax.set_xlabel(_time_label(trace))
        return figure_of(ax)
    figure = Figure(figsize=(9, 5.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.3, 1.0])
    _draw_paths(above, trace, drawn)
    above.tick_params(labelbottom=False)
    _draw_credit(below, trace)
    handles = [*_keys(trace, drawn), *below.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=ceil(len(handles) / 2), frameon=False)
    return figure


def _draw_paths(axes: Axes, trace: Trace, paths: Iterable[Path]) -> None:
    """An arc for each skip, as wide as the share of the paths that take it, and the chain between them."""
    steps = len(trace.numbers)
    _shade_pieces(axes, trace)
    arcs: dict[tuple[Skip, int], float] = {}
    along: dict[tuple[int, int], float] = {}
    for path in paths:
        at = trace.target_step
        for place, hop in enumerate(path.skips):
            arcs[hop, place] = arcs.get((hop, place), 0.0) + path.share
            if at is not None and at > hop.step:
                along[at, hop.step] = along.get((at, hop.step), 0.0) + path.share
            at = hop.kept_at
    for place in reversed(range(len(HOPS))):
        chosen = {hop: share for (hop, hops), share in arcs.items() if min(hops, len(HOPS) - 1) == place}
        lines = [arc(*hop, steps) for hop in chosen]
        widths = [WIDEST * share for share in chosen.values()]
        style: Any = {"colors": SKIP, "alpha": HOPS[place], "capstyle": "round"}
        axes.add_collection(LineCollection(lines, linewidths=widths, **style))
    segments = [[(start, 0.0), (end, 0.0)] for start, end in along]
    widths = [WIDEST * share for share in along.values()]
    axes.add_collection(LineCollection(segments, colors=CHAIN, linewidths=widths, capstyle="butt", zorder=1.5))
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    ends = sorted({hop.kept_at for hop, _ in arcs})
    axes.plot(ends, [0.0] * len(ends), linestyle="none", marker="o", markersize=3.5, color="0.15", zorder=3)
    if trace.target_step is not None:
        axes.plot([trace.target_step], [0.0], linestyle="none", marker="*", markersize=11, color="0.15", zorder=3)
    _use_steps(axes, steps)
    axes.set(ylim=(-0.06, 1.06), yticks=[], ylabel="paths over skips")
    axes.spines[["top", "right", "left"]].set_visible(False)


def arc(step: int, kept_at: int, steps: int) -> NDArray[Any]:
    """Points [60, 2] on half an ellipse between two steps, the higher the farther they are apart."""
    angle = numpy.linspace(0.0, numpy.pi, 60)
    middle, half = (step + kept_at) / 2, (step - kept_at) / 2
    height = (2 * half / max(steps - 1, 1)) ** 0.7
    return numpy.column_stack([middle + half * numpy.cos(angle), height * numpy.sin(angle)])


def _use_steps(axes: Axes, steps: int) -> None:
    """An axis of all steps, with some room on both sides."""
    room = max(1.0, 0.012 * steps)
    axes.set_xlim(1 - room, steps + room)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))


def _time_label(trace: Trace) -> str:
    cuts = "" if trace.k_trunc is None else f" (shading: the chain is cut every {trace.k_trunc} steps)"
    return f"time step{cuts}"


def _shade_pieces(axes: Axes, trace: Trace) -> None:
    """Every other piece of the chain, which is cut between them."""
    if trace.k_trunc is not None:
        for start in range(trace.k_trunc, len(trace.numbers), 2 * trace.k_trunc):
            axes.axvspan(start + 0.5, start + trace.k_trunc + 0.5, color="0.95", linewidth=0, zorder=0)


def _keys(trace: Trace, paths: Iterable[Path]) -> list[Line2D]:
    """What the arcs are, for a legend."""
    deepest = max((len(path.skips) for path in paths), default=0)
    largest = max((path.share for path in paths), default=0.0)
    names = [f"1st skip (largest path: {largest:.0%} of the credit)", *ORDINALS[1:]][:deepest]
    keys = [
        Line2D([], [], color=SKIP, linewidth=3, alpha=alpha, label=name)
        for alpha, name in zip(HOPS, names, strict=False)
    ]
    dot: Any = {"linestyle": "none", "color": "0.15"}
    keys.append(Line2D([], [], marker="o", markersize=3.5, label="microstate that is credited", **dot))
    if trace.target_step is not None:
        keys.append(Line2D([], [], marker="*", markersize=10, label=f"target, step {trace.target_step}", **dot))
    return keys


def _draw_credit(axes: Axes, trace: Trace) -> None:
    """The norms of what arrived at each step, a bar for each way."""
    _shade_pieces(axes, trace)
    steps = numpy.arange(1, len(trace.numbers) + 1)
    credit = trace.credit
    ways = {
        "over skips": (credit.skip, SKIP),
        "along the chain": (credit.chain, CHAIN),
        "direct": (credit.direct, DIRECT),
    }
    for place, (name, (norms, colour)) in enumerate(ways.items()):
        edge = 0.0 if len(steps) <= MANY else 0.8
        axes.bar(
            steps + 0.3 * (place - 1), norms.numpy(), 0.3, color=colour, label=name, edgecolor=colour, linewidth=edge
        )
    plain(axes)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel=_time_label(trace), ylabel="gradient norm at\nthe hidden state")
    _use_steps(axes, len(steps))
    axes.axhline(0.0, color=GREY, linewidth=0.8)
