from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sab.lab.tasks import PTB, Adding
from sab.lab.training.progress import Lines, Live, progress_for, show_seconds


def test_plain_lines_without_a_terminal(tmp_path: Path, run_training: Any) -> None:
    written = io.StringIO()
    progress = progress_for(Console(file=written, width=20), "copying sab")
    assert isinstance(progress, Lines)
    run_training(tmp_path / "run", progress=progress)
    lines = written.getvalue().splitlines()
    assert len(lines) == 4, "a narrow terminal must not fold them"
    assert lines[0] == f"copying sab: iterations 0 to 8 on cpu, into {tmp_path / 'run'}"
    assert lines[1].startswith("3/8  loss ")
    assert all(word in lines[1] for word in ("accuracy on the last 10", "%", "gradient norm", "it/s", "left"))
    assert "\x1b" not in written.getvalue()


def test_a_live_display_on_a_terminal(tmp_path: Path, run_training: Any) -> None:
    written = io.StringIO()
    progress = progress_for(Console(file=written, force_terminal=True, width=80, color_system=None), "copying sab")
    assert isinstance(progress, Live)
    run_training(tmp_path / "run", progress=progress)
    for words in ("copying sab", "8/8", "loss 2.", "accuracy ", "%"):
        assert words in written.getvalue()


def test_the_best_so_far_is_shown_beside_a_worse_one() -> None:
    line: Any = {"metrics": {"mse": 0.2}, "loss": 1.0, "grad_norm": 1.0, "iterations_per_second": 9.0, "best": 0.1}
    written = io.StringIO()
    console = Console(file=written, width=120)
    lines, live = Lines(console, "adding"), Live(console, "adding")
    for progress in (lines, live):
        progress.begin(Adding.headline, 0, 9)
        progress.evaluation(line | {"step": 3, "best_at": None, "best": None})
        progress.evaluation(line | {"step": 6, "best_at": 6})
        progress.evaluation(line | {"step": 9, "best_at": 6})
        progress.end()
    found = [text.split("  ")[2] for text in written.getvalue().splitlines() if "loss" in text]
    assert found[:3] == ["mean squared error 0.2", "mean squared error 0.2", "mean squared error 0.2 (best 0.1)"]
    assert live._bars.tasks[0].fields["headline"] == f"{Adding.headline.short} 0.2 (best 0.1)"


@pytest.mark.parametrize("width", [80, 140])
def test_a_bar_loses_nothing_that_matters(width: int) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    live = Live(console, "text8 prefix torch_start seed 12")
    live.begin(PTB.headline, 0, 100_000, " on cpu, into a/folder")
    live.iteration(99_998, 12.3456)
    line: Any = {"metrics": {"bits_per_character": 1.391}, "step": 99_998, "best": 1.39, "best_at": 7}
    live.evaluation(line)
    live.end()
    shown = [one for one in written.getvalue().splitlines() if "loss" in one][-1]
    assert len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).rstrip()) <= width
    for words in ("text8 prefix", "99998/100000", "loss 12.3456", "1.391", "--:--"):
        assert words in shown, shown
    assert ("(best 1.390)" in shown) == (width > 100)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (200, "3:20 min"), (3600, "1:00 h"), (86399, "23:59 h")],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown
