"""The training loop: one run, or several that take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sab.errors import UserTypeError, UserValueError, check_bool, check_int
from sab.lab.models import ModelConfig
from sab.lab.tasks import Task
from sab.lab.training import distributed
from sab.lab.training.config import TrainConfig, resolve_device
from sab.lab.training.interrupt import Interrupt
from sab.lab.training.progress import Progress, SafeProgress
from sab.lab.training.run import Result, RunConfig
from sab.lab.training.trainer import Trainer, torch_settings
from sab.lab.training.turns import by_turns


def train(
    task: Task,
    model_config: ModelConfig,
    train_config: TrainConfig,
    out: Path | str,
    resume: bool = False,
    progress: Progress | None = None,
    interrupt: Interrupt | None = None,
) -> Result:
    """Trains a model on a task into the folder `out`.

    With `resume` the folder must hold a run of the same configuration, which continues from its last checkpoint as if
    it had never stopped; a run that has ended is left as it is. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after the
    current iteration, with a checkpoint and the status `interrupted`; `interrupt` then holds the signal. A loss or
    gradient that is not finite ends it before the weights change, with the status `diverged`.
    """
    _check_arguments(task, model_config, train_config, out, resume)
    config = RunConfig(task, model_config, train_config)
    (result,) = _train_by_turns([config], [Path(out)], resume, [progress or Progress()], interrupt or Interrupt())
    return result


def train_seeds(
    task: Task,
    model_config: ModelConfig,
    train_config: TrainConfig,
    seeds: Iterable[int],
    out: Path | str,
    resume: bool = False,
    progress: Sequence[Progress] | None = None,
    interrupt: Interrupt | None = None,
) -> dict[int, Result]:
    """Trains a model from each of `seeds`, which take turns, an iteration each; `train_config.seed` does not matter.

    The run of seed N is in the folder `out`/seed-N and equals that of `train`. On a GPU each run has its own stream, so
    that small models share it. A signal ends all of them, and `resume` continues all of them; if one diverges or is
    solved, the others continue. `progress` holds one display for each seed.
    """
    _check_arguments(task, model_config, train_config, out, resume)
    seeds = check_seeds(seeds)
    if distributed.processes_started() > 1:
        advice = "leave torchrun out, or train one seed at a time"
        raise UserValueError(f"seeds must not be given where several processes make a run: {advice}.", "seeds")
    out = Path(out)
    existed = out.exists()
    configs = [RunConfig(task, model_config, replace(train_config, seed=seed)) for seed in seeds]
    folders = [seed_folder(out, seed) for seed in seeds]
    try:
        displays = progress or [Progress() for _ in seeds]
        results = _train_by_turns(configs, folders, resume, displays, interrupt or Interrupt())
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):  # it holds a run that was begun
                out.rmdir()
        raise
    return dict(zip(seeds, results, strict=True))


def seed_folder(out: Path, seed: int) -> Path:
    """The folder of one of several seeds."""
    return out / f"seed-{seed}"


def check_seeds(seeds: Any) -> list[int]:
    """`seeds` as a list of different seeds."""
    allowed = "seeds must be different whole numbers of at least 0"
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise UserTypeError(f"{allowed}; got {seeds!r}.", "seeds")
    given = list(seeds)
    checked = [check_int("seeds", seed, 0, maximum=2**63 - 1) for seed in given]
    if not checked or len(set(checked)) < len(checked):
        raise UserValueError(f"{allowed}; got {given!r}.", "seeds")
    return checked


def _check_arguments(task: Any, model_config: Any, train_config: Any, out: Any, resume: Any) -> None:
    check_bool("resume", resume)
    kinds = {"task": (task, Task), "model_config": (model_config, ModelConfig)}
    kinds |= {"train_config": (train_config, TrainConfig), "out": (out, Path | str)}
    for argument, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            name = "path" if argument == "out" else kind.__name__
            raise UserTypeError(f"{argument} must be a {name}; got {value!r}.", argument)


def _train_by_turns(
    configs: Sequence[RunConfig],
    folders: Sequence[Path],
    resume: bool,
    progress: Sequence[Progress],
    interrupt: Interrupt,
) -> list[Result]:
    """Trains all runs, an iteration of each in turn."""
    training = configs[0].training
    if distributed.processes_started() > 1 and configs[0].task.carries_state:
        raise UserValueError("carried must be 1 where several processes make a run.", "carried")
    resolved = resolve_device(training.device)
    with (
        interrupt,
        distributed.process_group(resolved, training.batch_size) as device,
        torch_settings(training, device),
        contextlib.ExitStack() as opened,
    ):
        trainers: list[Trainer] = []
        displays = [SafeProgress(shown if distributed.is_first() else Progress()) for shown in progress]
        for config, folder, display in zip(configs, folders, displays, strict=True):
            trainers.append(Trainer(config, folder, resume, display, device))
            opened.callback(trainers[-1].close)
        active = [trainer for trainer in trainers if trainer.result is None]
        for trainer in active:
            trainer.begin()

        def is_over() -> bool:
            return interrupt.requested or any(display.failure is not None for display in displays)

        for _, error in by_turns(iter(active), len(active), is_over):
            if error is not None:
                raise error
        for display in displays:
            if display.failure is not None:
                raise display.failure
    return [trainer.result for trainer in trainers if trainer.result is not None]
