from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from sab.config import SABConfig
from sab.errors import UserError
from sab.lab.models import ModelConfig
from sab.lab.tasks import Adding, Copying
from sab.lab.training import Result, Run, RunConfig, TrainConfig, evaluate, train
from sab.lab.training.checkpoint import load_model
from sab.lab.training.events import picture
from tests.lab.training.runs import CLOCK, PressCtrlC, contents, lines, newest

Train = Callable[..., Result]


def test_a_run_is_a_folder(tmp_path: Path, config: RunConfig, run_training: Train) -> None:
    out = tmp_path / "new" / "run"
    result = run_training(out)
    assert (result.status, result.iterations) == ("finished", 8)
    assert newest(out).name == "step-00000008"
    run = Run.open(out)
    assert run.config == config
    assert run.result() == result
    logged: Any = run.evaluations()
    assert [line["step"] for line in logged] == [3, 6, 8]
    for line in logged:
        assert line.keys() == {"step", "loss", "metrics", "grad_norm", "grad_norm_max", "skipped", "rollbacks", *CLOCK}
        assert line["metrics"].keys() == {"accuracy_last10", "cross_entropy_last10", "cross_entropy"}
        assert 0 < line["grad_norm"] <= line["grad_norm_max"]
    assert result.metrics.keys() == logged[-1]["metrics"].keys()
    assert result.versions["torch"] == torch.__version__
    assert result.device.startswith("cpu")
    assert result.wall_time > 0
    assert sorted(path.name for path in out.iterdir() if "tfevents" not in path.name) == [
        "checkpoint",
        "config.json",
        "metrics.jsonl",
        "result.json",
    ]


def test_tensorboard_has_what_metrics_jsonl_has(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("valid/accuracy_last10")]
    evaluations = Run.open(tmp_path / "run").evaluations()
    assert logged == [(line["step"], pytest.approx(line["metrics"]["accuracy_last10"])) for line in evaluations]
    tags = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in ("mean_loss", "grad_norm", "grad_norm_max", "iterations_per_second")} <= tags
    assert {"valid/cross_entropy", "test/accuracy_last10"} <= tags
    config = Run.open(tmp_path / "run").config.training
    rates = [(event.step, event.value) for event in events.Scalars("train/learning_rate")]
    assert rates == [(step, pytest.approx(config.lr_at(step))) for step in (3, 6, 8)]
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9)), "more often than evaluations"
    result = Run.open(tmp_path / "run").result()
    assert result is not None
    (tested,) = events.Scalars("test/accuracy_last10")
    assert (tested.step, tested.value) == (8, pytest.approx(result.metrics["accuracy_last10"]))
    plugins = events.summary_metadata
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= plugins.keys()
    (image,) = events.Images("attention")
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_the_picture_of_attention_is_light_dark_and_grey() -> None:
    image = picture(torch.tensor([[0.0, 1.0, torch.nan]]))
    assert image.shape == (3, 134, 402)
    assert [tuple(image[:, 5, place].tolist()) for place in (5, 200, 400)] == [
        (255, 255, 255),
        (8, 48, 107),
        (224, 224, 224),
    ]


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path, run_training: Train) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(3)  # whatever the caller does with torch's random state
        run_training(tmp_path / name, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_training_leaves_the_callers_settings_alone(tmp_path: Path, run_training: Train) -> None:
    random, threads, handler = torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    run_training(tmp_path / "run", threads=threads + 1)
    assert torch.equal(random, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"memory_lr": 0.25, "weight_decay": 0.3, "lr_decay": 0.5}])
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_interrupted_and_resumed_equals_uninterrupted(
    tmp_path: Path, run_training: Train, at: int, options: dict[str, Any]
) -> None:
    run_training(tmp_path / "whole", **options)
    out = tmp_path / "pieces"
    result = run_training(out, progress=PressCtrlC(at), **options)
    assert (result.status, result.iterations, result.metrics) == ("interrupted", at, {})
    assert newest(out).name == f"step-{at:08d}"
    assert not (out / "result.json").exists()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # as a crash leaves it
    assert run_training(out, resume=True, threads=None, checkpoint_every=5, **options).status == "finished"
    assert contents(out) | {"config": ""} == contents(tmp_path / "whole") | {"config": ""}


def test_events_that_cannot_be_written_are_told_of_once(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes them by a thread of its own."""

    def fails(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hook = threading.excepthook
    monkeypatch.setattr(RecordWriter, "write", fails)
    with pytest.raises(UserError, match="it is not: No space left on device"):
        run_training(tmp_path / "run")
    assert capsys.readouterr() == ("", "")
    assert threading.excepthook is hook


def test_resuming_what_is_finished_changes_nothing(tmp_path: Path, run_training: Train) -> None:
    result = run_training(tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run_training(tmp_path / "run", resume=True) == result
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_early_stop_when_solved(tmp_path: Path, run_training: Train) -> None:
    result = run_training(tmp_path / "run", stop_at=0.0)  # any accuracy will do
    assert (result.status, result.iterations, result.solved_at) == ("solved", 3, 3)
    assert "accuracy on the last 10 0.0% after 3 iterations" in result.message
    assert run_training(tmp_path / "run", resume=True, stop_at=0.0) == result
    # A crash between the checkpoint and the result must not make it train past the solution.
    (tmp_path / "run" / "result.json").unlink()
    assert run_training(tmp_path / "run", resume=True, stop_at=0.0).iterations == 3


def test_no_early_stop_without_being_asked(tmp_path: Path, run_training: Train) -> None:
    assert run_training(tmp_path / "run", stop_at=1.1).solved_at is None
    config = TrainConfig(iterations=4, batch_size=2, eval_every=2, eval_batches=1)

    class Easy(Adding):
        headline = replace(Adding.headline, solved=1e6)

    result = train(Easy(length=4), ModelConfig(hidden_size=4, memory=SABConfig(k_trunc=2)), config, tmp_path / "easy")
    assert (result.status, result.iterations, result.solved_at) == ("finished", 4, 2)


def test_no_clipping_and_clipping_differ_and_report_the_unclipped_norm(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path / "free", clip=None)
    run_training(tmp_path / "tight", clip=1e-3)
    free, tight = (lines(tmp_path / name)[0] for name in ("free", "tight"))
    assert tight["grad_norm"] > 0.1
    assert free["loss"] != tight["loss"]


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("task", [Copying(length=2), Copying(length=2, encoding="scalar"), Adding(length=4)])
def test_precisions_and_encodings(tmp_path: Path, precision: Any, task: Any) -> None:
    config = TrainConfig(iterations=2, batch_size=2, eval_every=2, eval_batches=1, precision=precision)
    result = train(task, ModelConfig(hidden_size=4, memory=SABConfig(k_top=2, k_trunc=3)), config, tmp_path / "run")
    assert result.status == "finished"
    weights = load_model(Run.open(tmp_path / "run"), torch.device("cpu")).readout.weight
    assert weights.dtype == (torch.float64 if precision == "float64" else torch.float32)


def test_evaluation_is_the_mean_over_unseen_batches(tmp_path: Path, config: RunConfig, run_training: Train) -> None:
    result = run_training(tmp_path / "run")
    model = load_model(Run.open(tmp_path / "run"), torch.device("cpu")).train()
    assert evaluate(model, config.task, config.training, "test") == result.metrics
    assert model.training
    assert evaluate(model, config.task, config.training, "valid") != result.metrics
    assert evaluate(model, config.task, config.training, "test", batches=1) != result.metrics
    with pytest.raises(ValueError, match=r"^batches must be a whole number of at least 1; got 0"):
        evaluate(model, config.task, config.training, batches=0)


@pytest.mark.parametrize("argument", ["task", "model_config", "train_config", "out"])
def test_an_argument_of_another_kind_is_named(tmp_path: Path, config: RunConfig, argument: str) -> None:
    arguments: dict[str, Any] = {"task": config.task, "model_config": config.model, "train_config": config.training}
    with pytest.raises(TypeError, match=f"^{argument} must be a .*; got None"):
        train(**{**arguments, "out": tmp_path / "run", argument: None})
