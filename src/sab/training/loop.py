"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.tensorboard.writer import SummaryWriter

from sab.errors import TypeMistake, check_bool, check_int
from sab.models import ModelConfig
from sab.tasks import Split, Task
from sab.training import checkpoint
from sab.training.checkpoint import TrainingState
from sab.training.config import TrainConfig, resolve_device
from sab.training.interrupt import Interrupt
from sab.training.progress import Progress
from sab.training.run import Result, Run, RunConfig, Status, finite, provenance

Ending = tuple[Status, str]
"""How training ended, and the same in a sentence."""


def train(
    task: Task,
    model_config: ModelConfig,
    train_config: TrainConfig,
    out: Path | str,
    resume: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Trains a model on a task into the folder `out`.

    With `resume` the folder must hold a run of the same configuration, which goes on from its last checkpoint as if
    it had never stopped; a run that has come to its end is left as it is. Ctrl-C ends a run after the current
    iteration, with a checkpoint and the status `interrupted`; a loss or gradient that is not finite ends it before
    the weights change, with the status `diverged`.
    """
    check_bool("resume", resume)
    kinds = {"task": (task, Task), "model_config": (model_config, ModelConfig)}
    kinds |= {"train_config": (train_config, TrainConfig), "out": (out, Path | str)}
    for argument, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            name = "path" if argument == "out" else kind.__name__
            raise TypeMistake(f"{argument} must be a {name}; got {value!r}.", argument)
    config = RunConfig(task, model_config, train_config)
    device = resolve_device(train_config.device)
    with _torch_settings(train_config, device):
        model = config.build_model(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=train_config.lr)
        if resume:
            run = Run.open(Path(out), "out")
            run.check_resumable(config)
            state = checkpoint.load(run.checkpoints, config, model, optimizer)
            result = run.result()
            if result is not None and (result.status != "finished" or state.step == train_config.iterations):
                return result
            run.rewind(state.step, config)
        else:
            run, state = Run.create(Path(out), config), TrainingState()
            checkpoint.save(run.checkpoints, config, model, optimizer, state)
        with Interrupt() as interrupt, SummaryWriter(str(run.path), purge_step=state.step + 1) as events:
            log = _Log(run, events, progress or Progress())
            log.progress.begin(task.headline, state.step, train_config.iterations, f" on {device}, into {run.path}")
            try:
                status, message = _iterate(config, model, optimizer, state, log, interrupt)
            except BaseException:
                if not resume and state.step == 0:
                    run.discard()
                raise
            finally:
                log.progress.end()
            result = Result(status, message, state.step, state.solved_at, {}, state.elapsed, **provenance(device))
            if status != "diverged":
                checkpoint.save(run.checkpoints, config, model, optimizer, state)
            if status != "interrupted":
                result = replace(result, metrics=finite(evaluate(model, task, train_config, "test")))
                run.finish(result)
    return result


def evaluate(
    model: nn.Module, task: Task, config: TrainConfig, split: Split = "test", batches: int | None = None
) -> dict[str, float]:
    """Means of the task's metrics over the first `batches` batches of a split, by default as many as `config` says."""
    count = config.eval_batches if batches is None else check_int("batches", batches, 1)
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for index in range(count):
            inputs, targets = task.batch(config.seed, index, config.batch_size, split, device, config.dtype)
            for name, value in task.metrics(_predict(model, inputs, config), targets).items():
                sums[name] = sums.get(name, 0.0) + value.item()
    model.train(was_training)
    return {name: total / count for name, total in sums.items()}


def _iterate(
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    log: _Log,
    interrupt: Interrupt,
) -> Ending:
    """Trains on from where `state` stands until something ends it."""
    task, training = config.task, config.training
    device = next(model.parameters()).device
    while (ending := _ending(config, state, interrupt)) is None:
        started = time.perf_counter()
        inputs, targets = task.batch(training.seed, state.step, training.batch_size, "train", device, training.dtype)
        loss = task.loss(_predict(model, inputs, training), targets)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(state.step)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip or math.inf)
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not torch.isfinite(value):
                where = f"the {what} of iteration {state.step + 1} is {value.item()}"
                return "diverged", f"{where}; the weights were left as they were before it."
        optimizer.step()
        state.count(time.perf_counter() - started, loss.item(), grad_norm.item())
        log.progress.iteration(state.step, loss.item())
        if state.step % training.eval_every == 0 or state.step == training.iterations:
            _evaluate_on_the_way(config, model, state, log)
        if state.step % training.checkpoint_every == 0:
            checkpoint.save(log.run.checkpoints, config, model, optimizer, state)
    return ending


def _ending(config: RunConfig, state: TrainingState, interrupt: Interrupt) -> Ending | None:
    """Whether no further iteration is to follow, and why."""
    headline, stop_at = config.task.headline, config.training.stop_at
    if stop_at is not None and state.solved_at is not None:
        return "solved", f"reached {headline.label} {headline.show(stop_at)} after {state.step} iterations."
    if state.step >= config.training.iterations:
        return "finished", f"finished all {state.step} iterations."
    if interrupt.requested:
        return "interrupted", f"interrupted after {state.step} iterations."
    return None


def _evaluate_on_the_way(config: RunConfig, model: nn.Module, state: TrainingState, log: _Log) -> None:
    """Evaluates, logs, and notes whether the task is solved."""
    task, training = config.task, config.training
    started = time.perf_counter()
    metrics = evaluate(model, task, training, "valid")
    state.elapsed += time.perf_counter() - started
    threshold = task.headline.solved if training.stop_at is None else training.stop_at
    if state.solved_at is None and task.headline.reaches(metrics[task.headline.metric], threshold):
        state.solved_at = state.step
    log.evaluation(state, finite(metrics))
    # The end of a run may lie between two evaluations of a longer one, which must not see the difference.
    if state.step % training.eval_every == 0:
        state.start_window()


class _Log:
    """Everyone who is told of an evaluation."""

    def __init__(self, run: Run, events: SummaryWriter, progress: Progress):
        self.run, self.events, self.progress = run, events, progress

    def evaluation(self, state: TrainingState, metrics: dict[str, float | None]) -> None:
        line = {
            "step": state.step,
            "loss": state.loss_sum / state.window,
            "metrics": metrics,
            "grad_norm": state.grad_norm_sum / state.window,
            "grad_norm_max": state.grad_norm_max,
            "iterations_per_second": state.window / state.seconds,
            "elapsed": state.elapsed,
        }
        self.run.log(line)
        scalars = {name: line[name] for name in ("loss", "grad_norm", "iterations_per_second")} | metrics
        for name, value in scalars.items():
            self.events.add_scalar(name, math.nan if value is None else value, state.step)
        self.events.flush()
        self.progress.evaluation(line)


def _predict(model: nn.Module, inputs: Tensor, config: TrainConfig) -> Tensor:
    """The model's outputs, in full precision also where the model computes in less."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        outputs, _ = model(inputs)
    return outputs.to(config.dtype)


@contextmanager
def _torch_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Torch's random state and threads are the run's own for a while, then the caller's again."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
