"""Draws the two pictures of docs/method.md from a run on copying, such as the demonstration's: `make pictures`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from sab import Trace, trace
from sab.lab.report.figures import save
from sab.lab.tasks.copying import BLANK, DIGITS, MARKER, Copying
from sab.lab.training import Run
from sab.lab.training.checkpoint import load_model
from sab.plot.drawing import CREDIT, GREY
from sab.plot.traces import arc

READ, SKIP, ALONG, DIRECT = (CREDIT[name] for name in ("read", "skip", "chain", "direct"))
CUT, FAINT = "0.15", "0.87"
WIDEST = 12.0
"""Width in points of an arc with all the weight, or all the credit."""
DOT = 5.5
"""Size of a hidden state in points; that of a kept one is larger."""
ARROW = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 3, "shrinkB": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run on copying, with one layer")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "docs" / "images", help="folder for the pictures"
    )
    parser.add_argument(
        "--target-step", type=int, help="the step that is explained; default: in the middle of the last 10"
    )
    options = parser.parse_args()
    symbols, answers, traced = explain(Run.open(options.run), options.target_step)
    save(forward_pass(symbols, answers, traced), options.out / "forward.svg")
    save(backward_pass(symbols, answers, traced), options.out / "backward.svg")


def explain(run: Run, target_step: int | None = None) -> tuple[list[str], list[str], Trace]:
    """What a model is shown, what it says, and the trace of a digit that it says, for an unseen sequence."""
    task, training = run.config.task, run.config.training
    if not isinstance(task, Copying):
        raise SystemExit(f"The run must be on copying; it is on {task.name}.")
    step = task.steps - DIGITS // 2 if target_step is None else target_step
    model = load_model(run, torch.device("cpu"))
    inputs, _ = task.batch(training.seed, 0, 1, "test", torch.device("cpu"), training.dtype)
    with torch.no_grad():
        outputs, _ = model(inputs)
    symbols = ["·" if one == BLANK else "»" if one == MARKER else str(one) for one in inputs[:, 0].tolist()]
    answers = ["" if one == BLANK else str(one) for one in outputs[:, 0].argmax(-1).tolist()]
    return symbols, answers, trace(model, inputs, step)


def forward_pass(symbols: list[str], answers: list[str], traced: Trace) -> Figure:
    """The hidden states in a row, those that were kept, and what the steps after the marker read, as wide as its
    weight."""
    figure, axes = _canvas(len(symbols), height=3.3)
    target = _target_step(traced)
    steps = len(symbols)
    for reader in (*(step for step in range(steps - DIGITS + 1, steps + 1) if step != target), target):
        _draw_reads(axes, traced, reader, READ if reader == target else FAINT)
    for step in range(1, steps):
        axes.add_patch(FancyArrowPatch((step, 0.0), (step + 1, 0.0), color=GREY, linewidth=0.8, **ARROW))
    _draw_states(axes, traced)
    _write(axes, symbols, answers)
    figure.legend(
        handles=[
            _dot("hidden state", "white"),
            _dot("kept as a microstate", "0.15"),
            Line2D([], [], color=GREY, linewidth=0.8, label="chain"),
            Line2D([], [], color=READ, linewidth=3, label=f"read by step {target}, as wide as its weight"),
            Line2D([], [], color=FAINT, linewidth=3, label="read by the other answers"),
        ],
        loc="outside upper center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    return figure


def backward_pass(symbols: list[str], answers: list[str], traced: Trace) -> Figure:
    """The same, backwards: along the chain as far as the next cut, and over the skips that were read."""
    figure, axes = _canvas(len(symbols), height=3.3)
    target = _target_step(traced)
    shares: dict[tuple[int, int], float] = {}
    for path in traced.paths:
        for skip in path.skips:
            shares[skip] = shares.get(skip, 0.0) + path.share
    for (step, kept_at), share in shares.items():
        _draw_arc(axes, step, kept_at, len(symbols), SKIP, WIDEST * share)
    chain = traced.credit.chain
    strongest = chain.max().clamp_min(1e-30)
    for step in range(1, len(symbols)):
        if traced.k_trunc is not None and step % traced.k_trunc == 0:
            axes.plot([step + 0.5] * 2, [-0.13, 0.13], color=CUT, linewidth=1.2)
            continue
        part = (chain[step - 1] / strongest).item()
        look = {"color": FAINT, "linewidth": 0.8} if part < 1e-3 else {"color": ALONG, "linewidth": 0.8 + 2.2 * part}
        axes.add_patch(FancyArrowPatch((step + 1, 0.0), (step, 0.0), **look, **ARROW))
    _draw_states(axes, traced)
    axes.plot([target], [0.0], marker="*", markersize=15, color=DIRECT, zorder=4)
    _write(axes, symbols, answers)
    figure.legend(
        handles=[
            Line2D([], [], marker="*", markersize=11, linestyle="none", color=DIRECT, label=f"answer of step {target}"),
            Line2D([], [], color=SKIP, linewidth=3, label="skip, as wide as its share of the credit"),
            Line2D([], [], color=ALONG, linewidth=2, label="credit along the chain"),
            Line2D([], [], color=FAINT, linewidth=2, label="chain that none came along"),
            Line2D([], [], color=CUT, linewidth=1.2, label=f"cut, every {traced.k_trunc} steps"),
        ],
        loc="outside upper center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    return figure


def _target_step(traced: Trace) -> int:
    assert traced.target_step is not None
    return traced.target_step


def _canvas(steps: int, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, steps + 1), ylim=(-0.75, 1.05), yticks=[], xlabel="time step")
    axes.set_xticks([1, *range(5, steps + 1, 5)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def _draw_reads(axes: Axes, traced: Trace, reader: int, colour: str) -> None:
    for kept_at, weight in zip(traced.kept_at[reader - 1].tolist(), traced.weights[reader - 1].tolist(), strict=True):
        if kept_at > 0:
            _draw_arc(axes, reader, kept_at, len(traced.numbers), colour, WIDEST * weight)


def _draw_arc(axes: Axes, reader: int, kept_at: int, steps: int, colour: str, width: float) -> None:
    axes.plot(
        *arc(reader, kept_at, steps + 1).T,
        color=colour,
        linewidth=width,
        solid_capstyle="round",
        zorder=1 if colour == FAINT else 2,
    )


def _draw_states(axes: Axes, traced: Trace) -> None:
    for step in range(1, len(traced.numbers) + 1):
        kept = step % traced.k_att == 0
        axes.plot(
            [step],
            [0.0],
            marker="o",
            markersize=DOT,
            markerfacecolor="0.15" if kept else "white",
            markeredgecolor="0.15",
            markeredgewidth=0.9,
            zorder=3,
        )


def _write(axes: Axes, symbols: list[str], answers: list[str]) -> None:
    """What goes in and what comes out, under the hidden states."""
    for step, (symbol, answer) in enumerate(zip(symbols, answers, strict=True), start=1):
        axes.text(step, -0.33, symbol, ha="center", va="center", fontsize=9)
        axes.text(step, -0.58, answer, ha="center", va="center", fontsize=9, fontweight="bold")
    axes.text(-0.2, -0.33, "in", ha="right", va="center", fontsize=8, color=GREY)
    axes.text(-0.2, -0.58, "out", ha="right", va="center", fontsize=8, color=GREY)


def _dot(label: str, colour: str) -> Line2D:
    return Line2D(
        [],
        [],
        marker="o",
        markersize=DOT,
        linestyle="none",
        markerfacecolor=colour,
        markeredgecolor="0.15",
        label=label,
    )


if __name__ == "__main__":
    main()
