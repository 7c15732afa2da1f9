"""Losses and gradients that are not finite: they never reach the weights, whatever is done about them."""

from __future__ import annotations

import io
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from sab.lab.training import Result, Run, RunConfig, checkpoint, trainer, updates
from sab.lab.training.progress import Lines, Progress
from sab.lab.training.run import Provenance
from sab.lab.training.updates import Updates
from tests.lab.training.runs import contents, lines, steps
from tests.lab.training.test_graph import Recorder, pretend

Train = Callable[..., Result]
Spoil = Callable[..., None]


@pytest.fixture(params=["looked at", "as graphs on a GPU"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Updates that are looked at one by one, and such that are not."""
    if request.param != "looked at":
        pretend(monkeypatch, Recorder())
    return request.param


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "provenance", lambda device: Provenance("cpu", {}, None))


@pytest.fixture
def spoil(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Makes the loss, or the gradient, of some batches NaN, as long as the learning rate is above a part of it."""

    def by(numbers: set[int], above: float = 0.0, what: str = "loss") -> None:
        training = config.training
        batches = [config.task.batch(training.seed, number, training.batch_size)[1] for number in numbers]
        descend = Updates._descend

        def spoilt(self: Updates, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
            loss, norm = descend(self, inputs, targets, kept)
            if self._lr_factor <= above or not any(torch.equal(targets, batch) for batch in batches):
                return loss, norm
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.nan)
            return (loss * math.nan, norm) if what == "loss" else (loss, norm * math.inf)

        monkeypatch.setattr(Updates, "_descend", spoilt)

    return by


class PressCtrlC(Progress):
    """Ctrl-C after so many iterations were heard of, those before a rollback included."""

    def __init__(self, after: int):
        self.left = after

    def iteration(self, step: int, loss: float) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def tensors(out: Path, step: int) -> dict[str, bytes]:
    folder = out / "checkpoint" / f"step-{step:08d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "training.safetensors")}


def assert_finite(out: Path) -> None:
    files = list(out.rglob("*.safetensors"))
    assert files
    for path in files:
        assert all(torch.isfinite(tensor.float()).all() for tensor in load_file(path).values()), path


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("what", "clip"), [("loss", 1.0), ("gradient norm", None)])
def test_a_batch_that_is_skipped_changes_neither_the_weights_nor_adam(
    tmp_path: Path, run_training: Train, spoil: Spoil, what: str, clip: float | None
) -> None:
    spoil({5}, what=what)
    out = tmp_path / "run"
    options = {"on_nan": "skip", "clip": clip, "checkpoint_every": 1}
    run_training(out, iterations=6, **options)
    assert steps(out) == [5, 6]
    before, after = tensors(out, 5), tensors(out, 6)
    assert before == after
    result = run_training(out, iterations=8, resume=True, **options)
    assert (result.status, result.iterations, result.message) == (
        "finished",
        8,
        "finished all 8 iterations (1 skipped).",
    )
    assert tensors(out, 8)["model.safetensors"] != after["model.safetensors"]
    assert_finite(out)
    logged = lines(out)
    assert [(line["step"], line["skipped"], line["rollbacks"]) for line in logged] == [(3, 0, 0), (6, 1, 0), (8, 1, 0)]
    assert all(math.isfinite(line[name]) for line in logged for name in ("loss", "grad_norm", "grad_norm_max"))


@pytest.mark.usefixtures("way")
def test_where_all_were_skipped_there_is_no_loss_to_tell(tmp_path: Path, run_training: Train, spoil: Spoil) -> None:
    spoil({3, 4, 5})
    written = io.StringIO()
    run_training(tmp_path / "run", on_nan="skip", progress=Lines(Console(file=written), "copying"))
    logged = lines(tmp_path / "run")
    assert [line["loss"] is None for line in logged] == [False, True, False]
    assert [line["grad_norm"] is None for line in logged] == [False, True, False]
    shown = written.getvalue().splitlines()[2]
    assert "6/8  loss not finite  " in shown
    assert "  gradient norm not finite  skipped 3  " in shown


@pytest.mark.usefixtures("way")
def test_too_many_in_a_row_are_too_many(
    tmp_path: Path, run_training: Train, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "MOST_SKIPPED", 3)
    spoil({1, 2, 4, 5, 6})
    out, options = tmp_path / "run", {"on_nan": "skip", "eval_every": 20, "checkpoint_every": 20, "iterations": 12}
    result = run_training(out, **options)
    assert (result.status, result.iterations) == ("diverged", 6)
    assert result.message.startswith("the loss of iteration 7 is nan, the 3th in a row; the weights were left as they")
    until = run_training(tmp_path / "until", **(options | {"iterations": 4}))
    assert (until.status, until.metrics) == ("finished", result.metrics), "nothing came after the last good one"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("after", [2, 5])
def test_skipping_interrupted_and_resumed_equals_uninterrupted(
    tmp_path: Path, run_training: Train, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(updates, "MOST_SKIPPED", 3)
    monkeypatch.setattr(updates, "SECONDS_UNREAD", 0.0)
    spoil({1, 3, 4})
    run_training(tmp_path / "whole", on_nan="skip")
    out = tmp_path / "pieces"
    assert run_training(out, on_nan="skip", progress=PressCtrlC(after)).status == "interrupted"
    run_training(out, on_nan="skip", resume=True)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("way")
def test_a_rollback_halves_the_learning_rate_until_it_gets_past(
    tmp_path: Path,
    run_training: Train,
    spoil: Spoil,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rates: list[float] = []
    rate_at = Updates._rate_at

    def watched(self: Updates, step: int) -> float:
        rates.append(rate_at(self, step))
        return rates[-1]

    monkeypatch.setattr(Updates, "_rate_at", watched)
    monkeypatch.setattr(updates, "SECONDS_UNREAD", 0.0)
    spoil({6}, above=0.25)
    out = tmp_path / "run"
    result = run_training(out, on_nan="rollback", lr=1.0, clip=None)
    assert (result.status, result.iterations) == ("finished", 8)
    assert result.message == "finished all 8 iterations (2 rollbacks)."
    called = [rate for rate in rates if rate > 0]
    assert called.count(0.5) in (2, 3), "iterations 5, 6 and perhaps 7 again, from the checkpoint of iteration 4"
    assert called[-4:] == [0.25] * 4
    assert caplog.messages == [
        f"the loss of iteration 7 is nan; the run goes back to iteration 4, and on with {part} of the learning rate."
        for part in ("1/2", "1/4")
    ]
    logged = lines(out)
    assert [(line["step"], line["rollbacks"], line["skipped"]) for line in logged] == [(3, 0, 0), (6, 2, 0), (8, 2, 0)]
    assert_finite(out)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("batches", "iterations", "after"),
    [
        *(({2, 6}, 8, after) for after in (2, 5, 7, 8, 11, 12)),
        *(({8}, 12, after) for after in (3, 8, 9, 11, 12, 13)),
    ],
)
def test_rolling_back_interrupted_and_resumed_equals_uninterrupted(
    tmp_path: Path,
    run_training: Train,
    spoil: Spoil,
    monkeypatch: pytest.MonkeyPatch,
    batches: set[int],
    iterations: int,
    after: int,
) -> None:
    """Although the interruption leaves a checkpoint off schedule; batch 8 is right after one on schedule."""
    monkeypatch.setattr(updates, "SECONDS_UNREAD", 0.0)
    spoil(batches, above=0.25)
    options: dict[str, Any] = {"on_nan": "rollback", "iterations": iterations}
    run_training(tmp_path / "whole", **options)
    out = tmp_path / "pieces"
    result = run_training(out, progress=PressCtrlC(after), **options)
    assert result.status == ("finished" if iterations == 8 and after == 12 else "interrupted")
    run_training(out, resume=True, **options)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.fixture
def poison(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the weights that the run first comes to a batch with such that its loss is NaN, whatever the rate."""

    def by(number: int) -> None:
        training = config.training
        batch = config.task.batch(training.seed, number, training.batch_size)[1]
        descend, bad = Updates._descend, []

        def poisoned(self: Updates, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
            loss, norm = descend(self, inputs, targets, kept)
            if torch.equal(targets, batch):
                weights = torch.cat([parameter.detach().flatten() for parameter in self._model.parameters()])
                bad.extend([] if bad else [weights])
                loss = loss * (math.nan if torch.equal(weights, bad[0]) else 1.0)
            return loss, norm

        monkeypatch.setattr(Updates, "_descend", poisoned)

    return by


@pytest.mark.usefixtures("way")
def test_a_checkpoint_that_trouble_follows_from_at_once_is_not_gone_back_to(
    tmp_path: Path, run_training: Train, poison: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    poison(8)
    options: dict[str, Any] = {"on_nan": "rollback", "iterations": 16, "checkpoint_minutes": 1e-9}
    result = run_training(tmp_path / "run", **options)
    assert result.message == "finished all 16 iterations (1 rollback)."
    (warning,) = caplog.messages
    assert "the loss of iteration 9 is nan; the run goes back to iteration 4" in warning


def test_checkpoints_that_a_clock_asks_for_change_nothing(tmp_path: Path, run_training: Train, spoil: Spoil) -> None:
    spoil({2, 6}, above=0.25)
    run_training(tmp_path / "whole", on_nan="rollback", keep="best")
    run_training(tmp_path / "often", on_nan="rollback", keep="best", checkpoint_minutes=1e-9)
    assert contents(tmp_path / "often") | {"config": ""} == contents(tmp_path / "whole") | {"config": ""}


@pytest.mark.usefixtures("way")
def test_moments_of_the_way_that_the_run_went_back_on_are_gone(
    tmp_path: Path, run_training: Train, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "SECONDS_UNREAD", 0.0)
    spoil({6}, above=0.5)
    out = tmp_path / "run"
    result = run_training(out, on_nan="rollback", moments_every=2, progress=PressCtrlC(7))
    assert result.message == "interrupted after 5 iterations (1 rollback)."
    assert checkpoint.moments(out / "moments") == [2, 4], "that of iteration 6 had weights that the run gave up"


@pytest.mark.parametrize("number", [4, 6])
@pytest.mark.parametrize("at", ["remove_old", "rewind", "remove_old_best"])
def test_killed_in_a_rollback_and_resumed_equals_uninterrupted(
    tmp_path: Path, run_training: Train, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, at: str, number: int
) -> None:
    spoil({number}, above=0.25)
    options: dict[str, Any] = {"on_nan": "rollback", "keep": "best", "checkpoint_minutes": 1e-9}
    run_training(tmp_path / "whole", **options)
    out = tmp_path / "pieces"
    owner: Any = Run if at == "rewind" else trainer.checkpoint
    do, roll_back = getattr(owner, at), trainer.Trainer._roll_back

    def dies(*arguments: Any) -> None:
        do(*arguments)
        raise MemoryError

    def roll(*arguments: Any) -> None:
        monkeypatch.setattr(owner, at, dies)
        roll_back(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "_roll_back", roll)
        with pytest.raises(MemoryError):
            run_training(out, **options)
    monkeypatch.setattr(owner, at, do)
    run_training(out, resume=True, **options)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("way")
def test_rolling_back_has_an_end(
    tmp_path: Path, run_training: Train, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "MOST_ROLLBACKS", 3)
    spoil({2}, above=1 / 4)
    spoil({5})
    out = tmp_path / "run"
    result = run_training(out, on_nan="rollback")
    assert (result.status, result.iterations) == ("diverged", 5)
    assert result.message == (
        "the loss of iteration 6 is nan, after 3 rollbacks; the weights were left as they were before it."
    )
    assert steps(out) == [0, 4], "and those that got past iteration 3 do not count"
    assert_finite(out)
    assert run_training(out, on_nan="rollback", resume=True) == result


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_stopping_leaves_the_weights_alone(
    tmp_path: Path, run_training: Train, spoil: Spoil, clip: float | None, what: str
) -> None:
    until = run_training(tmp_path / "until", iterations=5, clip=clip)
    spoil({5}, what=what)
    out = tmp_path / "run"
    result = run_training(out, clip=clip)
    assert (result.status, result.iterations, result.metrics) == ("diverged", 5, until.metrics)
    assert result.message.startswith(f"the {what} of iteration 6 is ")
    assert steps(out) == [0, 4]
    assert_finite(out)
    assert run_training(out, clip=clip, resume=True) == result


def test_a_gradient_that_is_not_finite_is_noticed(
    tmp_path: Path, config: RunConfig, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0 the derivative of the square root is infinite, while the loss is what it was."""
    loss = config.task.loss
    monkeypatch.setattr(
        type(config.task), "loss", lambda self, *given: loss(*given) + (loss(*given) - loss(*given).detach()).sqrt()
    )
    result = run_training(tmp_path / "run")
    assert (result.status, result.iterations) == ("diverged", 0)
    assert result.message.startswith("the gradient norm of iteration 1 is ")


def test_checkpoints_to_go_back_to_stay_on_their_schedule(tmp_path: Path, config: RunConfig) -> None:
    going_back = replace(config, training=replace(config.training, on_nan="rollback"))
    run = Run.create(tmp_path / "run", going_back)
    with pytest.raises(ValueError, match=r"^checkpoint_every must be 4 to resume '.*', which goes back .*; got 5"):
        run.check_resumable(replace(going_back, training=replace(going_back.training, checkpoint_every=5)))
