"""Early stopping, and the best weights: which ones they are, and that no crash changes it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sab.errors import UserError
from sab.lab.tasks import Adding, Copying
from sab.lab.training import Result, Run, RunConfig, TrainConfig, train
from sab.lab.training import checkpoint as checkpoints
from sab.lab.training import trainer as trainer_module
from sab.lab.training.checkpoint import TrainingState, load_kept, load_model
from sab.lab.training.evaluation import evaluate
from sab.lab.training.run import Provenance
from sab.lab.training.trainer import Trainer
from tests.lab.training.runs import PressCtrlC, contents, newest, spoil_loss, steps

CPU = torch.device("cpu")
Train = Callable[..., Result]
Script = Callable[[Mapping[int, float]], None]
ACCURACY = Copying.headline
ERROR = Adding.headline


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    """Evaluations after every second iteration, and checkpoints after every third one."""
    return replace(config, training=replace(config.training, iterations=12, eval_every=2, checkpoint_every=3))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Gives the evaluations on the way the accuracies that are told, by their iteration."""

    def follow(accuracies: Mapping[int, float]) -> None:
        step = 0
        make = Trainer._evaluate

        def made(self: Trainer) -> None:
            nonlocal step
            step = self.state.step
            make(self)

        def found(*arguments: Any) -> dict[str, float]:
            return {**evaluate(*arguments), ACCURACY.metric: accuracies[step]}

        monkeypatch.setattr(Trainer, "_evaluate", made)
        monkeypatch.setattr(trainer_module, "evaluate", found)

    return follow


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


# What counts as better


@pytest.mark.parametrize(
    ("headline", "values", "best_at", "since_best"),
    [
        (ACCURACY, [0.1, 0.3, 0.2], 2, 1),
        (ACCURACY, [0.3, 0.3, 0.3], 1, 2),
        (ACCURACY, [math.nan, 0.0, math.nan, math.inf], 2, 2),
        (ERROR, [0.3, 0.1, 0.2], 2, 1),
        (ERROR, [0.3, 0.3, 0.2], 3, 0),
        (ERROR, [math.inf, 0.3, -math.inf, math.nan], 2, 2),
        (ERROR, [math.nan, math.nan], None, 2),
    ],
)
def test_the_first_of_the_best_finite_ones_counts(
    headline: Any, values: list[float], best_at: int | None, since_best: int
) -> None:
    state = TrainingState()
    found = []
    for state.step, value in enumerate(values, start=1):
        if state.compare(headline, value):
            found.append(state.step)
    assert (state.best_at, state.since_best) == (best_at, since_best)
    assert state.best == (None if best_at is None else values[best_at - 1])
    assert found[-1:] == ([] if best_at is None else [best_at])


# Patience


def test_patience_counts_evaluations_without_a_better_one(tmp_path: Path, run_training: Train, script: Script) -> None:
    script({2: 0.1, 4: 0.5, 6: 0.5, 8: math.nan, 10: 0.4})
    out = tmp_path / "run"
    result = run_training(out, patience=3)
    assert (result.status, result.iterations, result.best_at) == ("stopped", 10, None)
    assert result.message == (
        "stopped after 10 iterations: no better accuracy on the last 10 in 3 evaluations since iteration 4 (50.0%)."
    )
    assert newest(out).name == "step-00000010"
    assert not (out / "best").exists(), "it keeps the last weights"
    run_training(tmp_path / "last", iterations=10, patience=9)
    assert contents(out)["model"] == contents(tmp_path / "last")["model"]
    assert run_training(out, resume=True, patience=3) == result
    assert run_training(out, resume=True, patience=3, iterations=99) == result, "it is at its end"
    (out / "result.json").unlink()  # a crash right before it
    assert replace(run_training(out, resume=True, patience=3), wall_time=result.wall_time) == result


def test_patience_without_any_finite_metric(tmp_path: Path, run_training: Train, script: Script) -> None:
    script({2: math.nan, 4: math.inf})
    result = run_training(tmp_path / "run", patience=2, keep="best")
    assert result.message == "stopped after 4 iterations: no finite accuracy on the last 10 in 2 evaluations."
    assert result.best_at is None
    assert None not in result.metrics.values(), "of the last weights"
    _, best_at = load_kept(Run.open(tmp_path / "run"), CPU)
    assert best_at is None


def test_used_up_at_the_very_end_is_finished_and_a_longer_run_stops_there(
    tmp_path: Path, run_training: Train, script: Script
) -> None:
    script({2: 0.5, 4: 0.4, 6: 0.4})
    out = tmp_path / "pieces"
    assert run_training(out, patience=2, iterations=6).status == "finished"
    assert run_training(out, patience=2, iterations=8, resume=True).status == "stopped"
    run_training(tmp_path / "whole", patience=2, iterations=8)
    assert contents(out) == contents(tmp_path / "whole")


# The best weights


def test_the_best_weights_are_those_of_their_iteration(
    tmp_path: Path, config: RunConfig, run_training: Train, script: Script
) -> None:
    script({2: 0.1, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.4, 12: 0.3})
    out = tmp_path / "run"
    result = run_training(out, keep="best")
    until = run_training(tmp_path / "until", iterations=4)
    run_training(tmp_path / "last")
    assert (result.status, result.iterations, result.best_at) == ("finished", 12, 4)
    assert (result.metrics, result.valid) == (until.metrics, until.valid)
    assert result.metrics != result.valid
    assert steps(out, "best") == [4]
    assert weights(out / "best" / "step-00000004") == weights(newest(tmp_path / "until"))
    assert weights(newest(out)) == weights(newest(tmp_path / "last")), "the last checkpoint is what it was"
    model, best_at = load_kept(Run.open(out), CPU)
    assert best_at == 4
    assert evaluate(model, config.task, config.training, "valid") == result.valid
    assert evaluate(load_model(Run.open(out), CPU), config.task, config.training) == result.metrics
    state = json.loads((out / "best" / "step-00000004" / "state.json").read_text())
    assert (state["state"]["step"], state["state"]["best"]) == (4, 0.5)
    assert state["sha256"].keys() == {"model.safetensors"}


@pytest.mark.gpu
def test_they_are_those_of_their_iteration_on_a_gpu(tmp_path: Path, run_training: Train, script: Script) -> None:
    script({2: 0.1, 4: 0.5, 6: 0.4, 8: 0.3})
    result = run_training(tmp_path / "run", keep="best", patience=2, device="cuda")
    until = run_training(tmp_path / "until", iterations=4, device="cuda")
    assert (result.status, result.iterations, result.best_at) == ("stopped", 8, 4)
    assert result.metrics == pytest.approx(until.metrics, rel=1e-5)
    found, expected = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "run" / "best" / "step-00000004", newest(tmp_path / "until"))
    )
    torch.testing.assert_close(found, expected)


# Resuming


SCRIPTS = {
    "the best one last": {2: 0.1, 4: 0.3, 5: 0.2, 6: 0.2, 7: 0.4},
    "the best one in between": {2: 0.1, 4: 0.4, 5: 0.6, 6: 0.3, 7: 0.2},
}


@pytest.mark.parametrize("accuracies", SCRIPTS.values(), ids=SCRIPTS)
def test_killed_at_any_point_and_resumed_equals_uninterrupted(
    tmp_path: Path, run_training: Train, script: Script, monkeypatch: pytest.MonkeyPatch, accuracies: dict[int, float]
) -> None:
    """The folder as it is before and after every change, and in the midst of a removal, is one to go on from.

    The changes are those of a run that ends off schedule and of a longer one that goes on from there.
    """
    script(accuracies)
    monkeypatch.setattr(trainer_module, "provenance", lambda device: Provenance("cpu", {}, None))  # which takes a while
    run_training(tmp_path / "whole", keep="best", iterations=7)
    expected = contents(tmp_path / "whole")
    assert expected["result"]["best_at"] == (7 if accuracies[7] == 0.4 else 4)
    out = tmp_path / "run"
    copies: dict[frozenset[tuple[str, bytes]], Path] = {}
    copytree, rmtree = shutil.copytree, shutil.rmtree

    def copy() -> None:
        if not list(out.glob("checkpoint/step-*")):  # there is nothing yet to go on from
            return
        files = ((path.relative_to(out).as_posix(), path) for path in out.rglob("*") if "tfevents" not in path.name)
        found = frozenset((name, path.read_bytes() if path.is_file() else b"") for name, path in files)
        if found not in copies:
            copies[found] = tmp_path / f"copy-{len(copies)}"
            copytree(out, copies[found], ignore=shutil.ignore_patterns("*tfevents*"))

    def watched(function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            copy()
            result = function(*arguments, **options)
            copy()
            return result

        return call

    def remove_by_and_by(folder: Path, ignore_errors: bool = False) -> None:
        for path in sorted(folder.glob("*")):
            path.unlink()
            copy()
        rmtree(folder, ignore_errors=ignore_errors)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "save_file", watched(checkpoints.save_file))
        patched.setattr(os, "rename", watched(os.rename))
        patched.setattr(os, "replace", watched(os.replace))
        patched.setattr(shutil, "rmtree", watched(remove_by_and_by))
        patched.setattr(Run, "log", watched(Run.log))
        run_training(out, keep="best", iterations=5)
        run_training(out, keep="best", iterations=7, resume=True)
    assert len(copies) > 50
    for place in (*copies.values(), out):
        run_training(place, keep="best", iterations=7, resume=True)
        assert contents(place) == expected, place


@pytest.mark.parametrize("at", range(1, 9))
def test_interrupted_and_resumed_equals_uninterrupted(
    tmp_path: Path, run_training: Train, script: Script, at: int
) -> None:
    script({2: 0.1, 4: 0.3, 6: 0.2, 8: 0.3})
    out, options = tmp_path / "pieces", {"keep": "best", "patience": 2}
    run_training(tmp_path / "whole", **options)
    result = run_training(out, progress=PressCtrlC(at), **options)
    if at < 8:
        assert (result.status, result.valid, result.best_at) == ("interrupted", {}, None)
        assert load_kept(Run.open(out), CPU)[1] == (None if at < 2 else 2 if at < 4 else 4), "the best so far"
        result = run_training(out, resume=True, **options)
    assert (result.status, result.iterations, result.best_at) == ("stopped", 8, 4)
    assert contents(out) == contents(tmp_path / "whole")


def test_an_end_off_schedule_that_solves_it_leaves_no_trace_either(
    tmp_path: Path, run_training: Train, script: Script
) -> None:
    script({2: 0.3, 4: 0.4, 5: 1.0, 6: 0.2})
    assert run_training(tmp_path / "run", iterations=5).solved_at == 5
    assert run_training(tmp_path / "run", iterations=6, resume=True).solved_at is None


# Trouble


def test_a_run_that_diverges_ends_with_its_best_weights(
    tmp_path: Path, run_training: Train, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script({2: 0.1, 4: 0.2, 6: 0.1})
    until = run_training(tmp_path / "until", iterations=4)
    spoil_loss(monkeypatch, 6)
    out = tmp_path / "run"
    result = run_training(out, keep="best")
    assert (result.status, result.iterations, result.best_at) == ("diverged", 5, 4)
    assert result.message == (
        "the loss of iteration 6 is nan; the weights were left as they were before it, "
        "and the metrics are of the best ones, those of iteration 4."
    )
    assert newest(out).name == "step-00000003", "which knows of others"
    assert steps(out, "best") == [2, 4]
    assert (result.metrics, result.valid) == (until.metrics, until.valid)
    assert load_kept(Run.open(out), CPU)[1] == 4
    assert run_training(out, keep="best", resume=True) == result


def truncate(best: Path) -> None:
    path = best / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (truncate, r"model\.safetensors' must be as it was written; it is truncated or was altered\.$"),
        (shutil.rmtree, r"run' must hold its best weights, those of iteration 4; they are not in 'best'\.$"),
    ],
)
def test_damaged_best_weights_are_told_in_a_sentence(
    tmp_path: Path,
    run_training: Train,
    script: Script,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    complaint: str,
) -> None:
    script({2: 0.1, 4: 0.5, 6: 0.4})
    out = tmp_path / "run"
    run_training(out, keep="best", iterations=6)
    expected = contents(out)
    damage(out / "best" / "step-00000004")
    with pytest.raises(UserError, match=complaint):
        load_model(Run.open(out), CPU)
    other = tmp_path / "other" / "run"
    shutil.copytree(out, other)
    run_training(out, keep="best", iterations=6, resume=True)
    (warning,) = caplog.messages
    assert warning.endswith("; the checkpoint step-00000003 is used instead."), "which knows of others"
    assert contents(out) == expected
    shutil.rmtree(other / "checkpoint" / "step-00000003")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=complaint):
        run_training(other, keep="best", iterations=8, resume=True)
    assert before == {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}


def test_the_last_test_is_on_all_data_that_have_an_end(tmp_path: Path, tiny_data: Path, config: RunConfig) -> None:
    """Whatever the evaluations on the way take."""
    from sab.lab.tasks import PTB
    from sab.lab.training.evaluation import evaluate_fully

    task, training = PTB(length=20), TrainConfig(**{**vars(config.training), "iterations": 4, "keep": "best"})
    result = train(task, config.model, replace(training, eval_batches=1), tmp_path / "run")
    model = load_model(Run.open(tmp_path / "run"), CPU)
    assert result.valid == evaluate_fully(model, task, training, "valid")
    assert result.metrics == evaluate_fully(model, task, training, "test")
    assert list(result.valid) == ["bits_per_character", "bits_per_character_carried"]
