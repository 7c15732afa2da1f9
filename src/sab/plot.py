"""Figures: what a model reads, how credit comes back, how it learns, what it costs.

Every function gives a matplotlib `Figure`, which `figure.savefig("figure.pdf")` writes; with `ax` it draws into axes of
yours and gives the figure that they are part of. Those of a trace need matplotlib alone (the extra `report`), those of
runs and records what trains them too (the extra `train`). `sab plot KIND` draws the same from the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sab.tracing import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sab.lab.report.figures import Runs
    from sab.lab.training import Run

__all__ = ["attention", "credit_paths", "gradient_norms", "learning_curve", "scaling"]


def attention(trace_or_run: Trace | Run | str | Path, *, ax: Axes | None = None) -> Figure:
    """A heat map of weights: rows are the attending steps, columns the attended microstates by their time step.

    Of a trace it is that of its sequence; of a run, or its folder, the mean over a test batch, with a panel for each
    layer (with `ax`, the last layer's).
    """
    if isinstance(trace_or_run, Trace):
        from sab.lab.report import traces

        return traces.attention(trace_or_run, ax)
    from sab.lab.report import figures

    return figures.attention_map(_only(trace_or_run), ax)


def credit_paths(trace: Trace, *, ax: Axes | None = None, paths: int = 24) -> Figure:
    """The largest `paths` of a trace as arcs over time, as wide as their shares, above the credit of every step; with
    `ax` the arcs alone."""
    from sab.lab.report import traces

    return traces.credit_paths(trace, ax, paths)


def learning_curve(runs: Runs, *, ax: Axes | None = None) -> Figure:
    """The training loss and the headline metric over the iterations; with `ax` the headline metric alone.

    `runs` is a run, or several of one task, or their folders; a mapping gives them labels.
    """
    from sab.lab.report import drawing, figures

    labelled = figures.labelled(runs)
    if ax is None:
        return figures.learning_curves(labelled)
    figures.draw_headline(ax, labelled)
    drawing.legend_above(ax)
    return drawing.figure_of(ax)


def gradient_norms(runs: Runs, *, ax: Axes | None = None) -> Figure:
    """Gradient norms before clipping over the iterations, their means and the largest; `runs` as for
    `learning_curve`."""
    from sab.lab.report import figures

    return figures.gradient_norms(figures.labelled(runs), ax)


def scaling(records: str | Path | Sequence[str | Path | Mapping[str, Any]], *, ax: Axes | None = None) -> Figure:
    """What a step costs against the number of steps and the hidden size; with `ax` against the first one measured.

    `records` are those of `sab bench --output`, or the files that hold them.
    """
    from sab.lab.report import figures, performance

    given = [records] if isinstance(records, str | Path) else list(records)
    files = [Path(one) for one in given if isinstance(one, str | Path)]
    read = [dict(one) for one in given if isinstance(one, Mapping)]
    return figures.scaling([*read, *(performance.load(files) if files else [])], ax)


def _only(run: Run | str | Path) -> Run:
    from sab.lab.report import figures

    (opened,) = figures.labelled(run).values()
    return opened
