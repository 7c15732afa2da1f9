"""`sab plot`, `sab report` and `sab watch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from sab.errors import UserValueError, printable
from sab.lab.commands.parsing import Picture, RunFolder, RunFolders
from sab.lab.files import writing
from sab.lab.training import Run
from sab_cli.exits import DONE


def plot(run: RunFolder, out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None) -> int:
    """Draw a run's learning curve and, where it has a memory, its attention; `sab plot KIND` draws one figure.

    KIND is attention, credit-paths, learning-curve, gradient-norms or scaling; `sab plot KIND --help` shows its
    options.

    Args:
        run: Folder of the run.
        out: Folder for the pictures, each as PNG, PDF and SVG; None means that of the run.
    """
    from sab.lab.report import figures  # matplotlib takes a while to import

    opened = Run.open(run)
    folder = run if out is None else out
    if folder.suffix.removeprefix(".") in figures.FORMATS:
        raise UserValueError(
            f"out must be a folder for several pictures; got {str(folder)!r}: `sab plot KIND` draws one.", "out"
        )
    drawn = {"learning_curve.png": figures.learning_curve({opened.config.model.method: opened})}
    if opened.config.task.steps <= opened.config.model.memory.k_att:
        print("No attention map: the sequences are not longer than k_att, so there is nothing to attend to.")
    elif opened.config.model.layer_config().k_top > 0:
        drawn["attention.png"] = figures.attention(opened)
    with writing(folder, "out"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        for path in figures.save_in_every_format(figure, folder / name):
            print(printable(path))
    return DONE


def plot_attention(run: RunFolder, out: Picture = None) -> int:
    """Draw what a run's model reads: a heat map of the mean weights over a test batch.

    Args:
        run: Folder of the run.
        out: The picture, which ends in .png, .pdf or .svg; None means attention.png in the run's folder.
    """
    from sab.lab.report import figures  # matplotlib takes a while to import

    return _draw(lambda: figures.attention(run), out, run / "attention.png")


def plot_credit_paths(
    run: RunFolder, target_step: int | None = None, target_unit: int | None = None, row: int = 0, out: Picture = None
) -> int:
    """Draw to which past moments an output is credited, and by which paths: `sab.trace` on a test sequence.

    Args:
        run: Folder of the run.
        target_step: The step whose output it is, counted from 1; None means the last.
        target_unit: Which entry of that output, counted from 0; None means the largest.
        row: Which sequence of the test batch.
        out: The picture, which ends in .png, .pdf or .svg; None means credit-paths.png in the run's folder.
    """
    from sab.lab.report import figures  # matplotlib takes a while to import
    from sab.plot import credit_paths

    def figure() -> Any:
        return credit_paths(figures.trace_of(Run.open(run), target_step, target_unit, row))

    return _draw(figure, out, run / "credit-paths.png")


def plot_learning_curve(runs: RunFolders, out: Picture = None) -> int:
    """Draw the training loss and the headline metric of runs of one task over the iterations.

    Args:
        runs: Folders of the runs.
        out: The picture, which ends in .png, .pdf or .svg; None means learning-curve.png in the first run's folder.
    """
    from sab.lab.report import figures  # matplotlib takes a while to import

    opened = figures.labelled(runs)
    return _draw(lambda: figures.learning_curve(opened), out, runs[0] / "learning-curve.png")


def plot_gradient_norms(runs: RunFolders, out: Picture = None) -> int:
    """Draw the gradient norms of runs, before clipping, over the iterations.

    Args:
        runs: Folders of the runs.
        out: The picture, which ends in .png, .pdf or .svg; None means gradient-norms.png in the first run's folder.
    """
    from sab.lab.report import figures  # matplotlib takes a while to import

    opened = figures.labelled(runs)
    return _draw(lambda: figures.gradient_norms(opened), out, runs[0] / "gradient-norms.png")


def plot_scaling(
    records: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("scaling.png"),
) -> int:
    """Draw what a step costs against the number of steps, the hidden size and the batch size.

    Args:
        records: What `sab bench --output` wrote; of several records about the same thing the newest counts.
        out: The picture, which ends in .png, .pdf or .svg.
    """
    from sab.lab.report import figures  # matplotlib takes a while to import

    if not records:
        raise UserValueError("FILE must be given at least once; got none.")
    return _draw(lambda: figures.scaling(records), out, out)


def _draw(figure: Callable[[], Any], out: Path | None, default: Path) -> int:
    """Writes a figure, after a look at whether the place suits."""
    from sab.lab.report.figures import check_picture, save

    path = default if out is None else out
    check_picture(path)
    made = figure()
    with writing(path, "out"):
        path.parent.mkdir(parents=True, exist_ok=True)
    save(made, path)
    print(printable(path))
    return DONE


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")] = (),
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html"),
) -> int:
    """Make one HTML page of runs or records: tables, curves, the credit explorer.

    Args:
        runs: Folders of runs, folders with runs below them, folders of records such as results/, or files of records
            that `sab bench --output` wrote.
        out: The page, one file that needs nothing else to be opened.
    """
    from sab.lab.report.page import document, material

    document.check_out(out)
    with Console(stderr=True).status("reading") as status:  # on a terminal alone
        found = material.gather(runs)
        document.write(found, out, lambda what: status.update(Text(f"tracing {what}")))
    for mistake in found.left_out.values():
        print(f"sab: left out: {mistake}", file=sys.stderr)
    print(printable(out))
    return DONE


def watch(run: RunFolder, port: int = 8765) -> int:
    """Serve the report page of a run to this machine alone, renewed while it trains.

    Args:
        run: Folder of the run.
        port: Port on 127.0.0.1; 0 takes one that is free.
    """
    from sab.lab.report.page import live

    try:
        live.serve(
            run, port, lambda address: print(f"{printable(run)} is at {address}; Ctrl-C ends the watch.", flush=True)
        )
    except KeyboardInterrupt:
        print()
    return DONE


PLOTS: dict[str, Callable[..., int]] = {
    "attention": plot_attention,
    "credit-paths": plot_credit_paths,
    "learning-curve": plot_learning_curve,
    "gradient-norms": plot_gradient_norms,
    "scaling": plot_scaling,
}
"""What `sab plot KIND` draws."""
