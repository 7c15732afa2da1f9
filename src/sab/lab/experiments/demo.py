"""The demonstration: a dependency that truncated backpropagation cannot learn and attentive backtracking can."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sab.config import SABConfig
from sab.errors import UserValueError
from sab.lab.models import ModelConfig
from sab.lab.tasks import Copying
from sab.lab.training import Result, TrainConfig, train
from sab.lab.training.progress import progress_for, show_seconds


@dataclass(frozen=True)
class Recipe:
    """What is trained: small enough for two CPU cores, with a dependency several times longer than k_trunc."""

    task: Copying
    model: ModelConfig
    training: TrainConfig


RECIPE = Recipe(
    Copying(length=30, train_lengths="uniform"),
    ModelConfig(cell="gru", hidden_size=128, memory=SABConfig(k_trunc=5)),
    TrainConfig(
        iterations=800,
        batch_size=32,
        lr=4e-3,
        lr_decay=0.6,
        eval_every=50,
        checkpoint_every=100,
        moments_every=100,
        device="cpu",
    ),
)
"""A GRU learns this from every seed that was tried, an LSTM with the same memory in so few iterations not from all."""
CONTENTS = {"sab", "tbptt", "attention.png", "curves.png", "report.html"}
LABELS = {"sab": "SAB", "tbptt": "truncated BPTT"}


def demo(out: Path, seed: int = 0, recipe: Recipe = RECIPE, console: Console | None = None) -> dict[str, Result]:
    """Trains SAB and truncated backpropagation with the same size, data and truncation; `out` gets both runs.

    Runs of the same recipe and seed that are there already are not trained again, so an interrupted demonstration
    goes on. The result of an interrupted one lacks what was not begun.
    """
    _check_out(out)
    console = console or Console()
    training = replace(recipe.training, seed=seed)
    results: dict[str, Result] = {}
    for method, label in LABELS.items():
        path = out / method
        results[method] = train(
            recipe.task,
            replace(recipe.model, method=method),
            training,
            path,
            resume=path.exists(),
            progress=progress_for(console, label),
        )
        if results[method].status == "interrupted":
            return results
    return results


def _check_out(out: Path) -> None:
    """Refuses a folder with anything but a demonstration in it, since its pictures would be overwritten."""
    if out.is_file():
        raise UserValueError(f"out {str(out)!r} must be a folder; it is a file.", "out")
    foreign = sorted(path.name for path in out.iterdir() if path.name not in CONTENTS) if out.is_dir() else []
    if foreign:
        raise UserValueError(
            f"out {str(out)!r} must be a new or empty folder, or that of a demonstration; it holds {foreign[0]!r}.",
            "out",
        )


def table(results: dict[str, Result], recipe: Recipe = RECIPE) -> Table:
    """The results of both runs, for a terminal."""
    headline, dependency, k_trunc = recipe.task.headline, recipe.task.dependency, recipe.model.memory.k_trunc
    table = Table(title=f"copying: repeat digits seen {dependency} steps ago, chain cut every {k_trunc}")
    table.add_column("")
    for column in (headline.label, f"{headline.show(headline.solved)} reached after", "iterations", "time"):
        table.add_column(column, justify="right")
    for label, result in zip(LABELS.values(), results.values(), strict=True):
        value = result.metrics[headline.metric]
        table.add_row(
            label,
            "not finite" if value is None else headline.show(value),
            "never" if result.solved_at is None else f"{result.solved_at:,}",
            f"{result.iterations:,}",
            show_seconds(result.wall_time),
        )
    table.add_row("chance", headline.show(headline.chance), style="dim")
    return table
