"""Several seeds in one process: the runs that each would have made alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sab.lab.tasks import Copying
from sab.lab.training import Run, RunConfig, train, train_seeds
from sab.lab.training.progress import Progress, progress_for_each
from tests.lab.training.runs import PressCtrlC, contents, spoil_loss


def train_alone(config: RunConfig, seed: int, out: Path) -> None:
    train(config.task, config.model, replace(config.training, seed=seed), out)


def test_each_seed_makes_the_run_that_it_makes_alone(tmp_path: Path, config: RunConfig) -> None:
    random = torch.get_rng_state()
    results = train_seeds(config.task, config.model, config.training, [3, 0, 7], tmp_path / "many")
    assert torch.equal(random, torch.get_rng_state())
    assert list(results) == [3, 0, 7]
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == ["seed-0", "seed-3", "seed-7"]
    for seed, result in results.items():
        train_alone(config, seed, tmp_path / str(seed))
        assert contents(tmp_path / "many" / f"seed-{seed}") == contents(tmp_path / str(seed))
        assert Run.open(tmp_path / "many" / f"seed-{seed}").result() == result
    assert len({json.dumps(result.metrics) for result in results.values()}) > 1


def test_ctrl_c_stops_all_and_all_go_on(tmp_path: Path, config: RunConfig) -> None:
    arguments = config.task, config.model, config.training, (0, 1), tmp_path / "many"
    results = train_seeds(*arguments, progress=[PressCtrlC(5), Progress()])
    assert [(result.status, result.iterations) for result in results.values()] == [
        ("interrupted", 5),
        ("interrupted", 4),
    ]
    results = train_seeds(*arguments, resume=True)
    assert {result.status for result in results.values()} == {"finished"}
    for seed in (0, 1):
        train_alone(config, seed, tmp_path / str(seed))
        assert contents(tmp_path / "many" / f"seed-{seed}") == contents(tmp_path / str(seed))
    assert train_seeds(*arguments, resume=True) == results


def test_one_that_ends_early_leaves_the_others_to_go_on(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_loss(monkeypatch, 3)
    results = train_seeds(config.task, config.model, config.training, [0, 1], tmp_path / "many")
    assert [(result.status, result.iterations) for result in results.values()] == [("diverged", 1), ("finished", 8)]


def test_a_folder_in_use_is_refused_before_any_run_begins(tmp_path: Path, config: RunConfig) -> None:
    train_alone(config, 1, tmp_path / "many" / "seed-1")
    before = contents(tmp_path / "many" / "seed-1")
    with pytest.raises(ValueError, match=r"^out '.*seed-1' already holds a run"):
        train_seeds(config.task, config.model, config.training, [0, 1], tmp_path / "many")
    assert [path.name for path in (tmp_path / "many").iterdir()] == ["seed-1"]
    assert contents(tmp_path / "many" / "seed-1") == before


def test_runs_that_never_began_leave_nothing(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Copying, "loss", fails)
    with pytest.raises(MemoryError):
        train_seeds(config.task, config.model, config.training, [0, 1], tmp_path / "many")
    assert not (tmp_path / "many").exists()


@pytest.mark.parametrize("seeds", [[], [0, 0], [-1], ["0"], [1.5], "01", 3, None, [True]])
def test_seeds_that_are_none(tmp_path: Path, config: RunConfig, seeds: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^seeds must be .*whole number.* of at least 0.*; got"):
        train_seeds(config.task, config.model, config.training, seeds, tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_plain_lines_tell_the_seeds_apart(tmp_path: Path, config: RunConfig) -> None:
    written = io.StringIO()
    progress = progress_for_each(Console(file=written), ["seed 0", "seed 1"])
    train_seeds(config.task, config.model, config.training, [0, 1], tmp_path / "many", progress=progress)
    lines = written.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines[2:]] == [
        f"seed {seed}  {step}/8" for step in (3, 6, 8) for seed in (0, 1)
    ]


def test_a_live_display_has_a_bar_for_each_seed(tmp_path: Path, config: RunConfig) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system=None)
    progress = progress_for_each(console, ["seed 0", "seed 1"])
    train_seeds(config.task, config.model, config.training, [0, 1], tmp_path / "many", progress=progress)
    last = written.getvalue().split("\x1b[?25h")[0].split("seed 0")[-1]
    assert "8/8" in last
    assert "seed 1" in last
    assert written.getvalue().count("\x1b[?25h") == 1, "the cursor comes back once, when the last run has ended"
