"""What figures have in common: colours, axes, legends, heat maps of attention. It needs matplotlib alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from sab import palette

COLOURS = tuple(colour.light for colour in palette.SERIES)
METHODS = {name: colour.light for name, colour in palette.METHODS.items()}
CREDIT = {name: colour.light for name, colour in palette.CREDIT.items()}
GREY = "0.45"
DASHES = {"--": " (dashed)", ":": " (dotted)", "-.": " (dash-dotted)"}
LEAST_SIGNAL = 0.04
"""Microstates whose weights are all below this share of the largest may be left out of a heat map."""


def plain(axes: Axes) -> None:
    """A light grid, and no frame above and to the right."""
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def use_log_scale(axes: Axes) -> None:
    """A logarithmic axis with labels such as 0.2, where the default writes powers of ten and may write none."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def use_per_cent(axes: Axes) -> None:
    """All of 0 to 100 %."""
    axes.set(ylim=(-0.02, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def use_iterations(axes: Axes) -> None:
    """An axis of iterations, from 0."""
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlim(left=0)


def marker_of_few(count: int, few: int = 10) -> str | None:
    """Few points are shown as points, since a line through one is none."""
    return "o" if count < few else None


def legend_above(axes: Axes, **options: Any) -> None:
    """A legend above given axes, in two columns, so that it is not wider than they are."""
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    axes.legend(ncols=2, fontsize="small", frameon=False, **place, **options)


def label_lines(axes: Axes, room: float = 0.065) -> None:
    """Names every line at its end, in its colour; names that would lie on each other move apart.

    It comes last, when the axes have their limits. `room` is the height of a name as a part of that of the axes. Where
    lines share a colour, the names of dashed ones include it.
    """
    colours = Counter(line.get_color() for line in axes.lines if not str(line.get_label()).startswith("_"))
    places: list[tuple[float, float, Any]] = []
    to_axes = axes.transData + axes.transAxes.inverted()
    axes.get_ylim()  # which sets the limits
    for line in axes.lines:
        x, y = numpy.asarray(line.get_xdata(), float), numpy.asarray(line.get_ydata(), float)
        known = numpy.flatnonzero(numpy.isfinite(y))
        if str(line.get_label()).startswith("_") or not len(known):
            continue
        spans_axes = line.get_transform() != axes.transData  # as a line at chance does
        at = numpy.array([1.0, to_axes.transform((0, y[-1]))[1]]) if spans_axes else None
        at = to_axes.transform((x[known[-1]], y[known[-1]])) if at is None else at
        places.append((float(at[0]), min(max(float(at[1]), 0.0), 1.0), line))
    placed: list[tuple[float, float]] = []
    for x, y, line in sorted(places, key=lambda place: place[1]):
        for other_x, other_y in placed:
            if abs(other_x - x) < 0.35 and y < other_y + room:
                y = other_y + room
        placed.append((x, y))
        options: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        options |= {"path_effects": [withStroke(linewidth=3, foreground="white")], "zorder": 5}  # above other lines
        dash = DASHES.get(str(line.get_linestyle()), "") if colours[line.get_color()] > 1 else ""
        axes.annotate(
            f"{line.get_label()}{dash}",
            (x, y),
            xycoords="axes fraction",
            color=line.get_color(),
            annotation_clip=False,
            **options,
        )


def bracket(axes: Axes, first: float, last: float, text: str) -> None:
    """A bracket above axes over the steps from `first` to `last`, with a name."""
    across = axes.get_xaxis_transform()
    axes.plot(
        [first, first, last, last], [1.02, 1.05, 1.05, 1.02], transform=across, color="0.25", clip_on=False, linewidth=1
    )
    axes.text((first + last) / 2, 1.07, text, transform=across, ha="center", va="bottom", fontsize="small")


def signal_spans(weights: NDArray[Any], least: float = LEAST_SIGNAL) -> list[tuple[int, int]]:
    """The first and the last column of the parts of a heat map that have something to show; short gaps are kept."""
    strongest = numpy.nan_to_num(weights).reshape(-1, weights.shape[-1]).max(axis=0)
    shown = numpy.flatnonzero(strongest >= least * max(strongest.max(), 1e-30))
    columns = weights.shape[-1]
    spans: list[tuple[int, int]] = []
    for column in shown.tolist():
        if spans and column - spans[-1][1] <= max(4, columns // 6):
            spans[-1] = (spans[-1][0], column)
        else:
            spans.append((column, column))
    return [(max(first - 1, 0), min(last + 1, columns - 1)) for first, last in spans] or [(0, columns - 1)]


def largest_outside(weights: NDArray[Any], spans: list[tuple[int, int]]) -> float:
    """The largest weight in the columns that no span holds."""
    outside = numpy.ones(weights.shape[-1], dtype=bool)
    for first, last in spans:
        outside[first : last + 1] = False
    return float(numpy.nan_to_num(weights[..., outside]).max(initial=0.0))


def cut_between(left: Axes, right: Axes) -> None:
    """Marks two axes next to each other as one with a stretch cut out."""
    left.spines["right"].set_visible(False)
    right.spines["left"].set_visible(False)
    right.tick_params(left=False, labelleft=False)
    mark: dict[str, Any] = {"marker": [(-0.5, -1), (0.5, 1)], "markersize": 9, "linestyle": "none", "color": "0.25"}
    left.plot([1, 1], [0, 1], transform=left.transAxes, clip_on=False, **mark)
    right.plot([0, 0], [0, 1], transform=right.transAxes, clip_on=False, **mark)


def figure_of(axes: Axes) -> Figure:
    """The figure that axes are part of."""
    figure = axes.figure
    found = figure.figure if isinstance(figure, SubFigure) else figure
    assert isinstance(found, Figure)
    return found


def heat_map(axes: Axes, weights: NDArray[Any], first: int, k_att: int, largest: float) -> None:
    """Weights [attending steps from `first` on, microstates]; grey where they are NaN, as those of microstates are that
    were not kept yet."""
    rows, columns = weights.shape
    # In time steps, so that the ticks are; a column is as wide as the steps between two microstates.
    extent = (k_att / 2, (columns + 0.5) * k_att, first + rows - 0.5, first - 0.5)
    axes.set_facecolor("0.88")
    axes.imshow(weights, aspect="auto", cmap="Blues", vmin=0.0, vmax=largest, extent=extent, interpolation="nearest")
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    axes.set(ylabel="attending step", xlabel="time step of the attended microstate")


def weight_bar(figure: Figure, panels: list[Axes], label: str = "weight") -> None:
    """The colour bar of heat maps."""
    figure.colorbar(
        panels[0].images[0],
        ax=panels if len(panels) > 1 else panels[0],
        label=label,
        pad=0.01,
        fraction=0.03,
        aspect=35,
    )
