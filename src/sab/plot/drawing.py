"""What figures have in common: colours, axes, legends, heat maps of attention. It needs matplotlib alone."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart."""
GREY = "0.45"


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
