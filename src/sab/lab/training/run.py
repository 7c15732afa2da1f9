"""A run is a folder: config.json, metrics.jsonl, TensorBoard events, checkpoint/ and, at its end, result.json.

best/ holds the best weights of a run that keeps them, moments/ those of the moments of training that it keeps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, get_type_hints

import numpy as np
import torch

from sab import __version__
from sab.errors import UserError, UserTypeError, UserValueError, check_choice, check_float
from sab.lab.files import temporary_of, write_text, writing
from sab.lab.models import OF_TORCH, OURS, ModelConfig, SequenceModel
from sab.lab.stored import as_dataclass, first_mismatch, parse_json, read_json, read_text
from sab.lab.tasks import TASKS, StoredTask, Task
from sab.lab.training import lock
from sab.lab.training.config import TrainConfig

FREE_ON_RESUME = (
    "iterations",
    "device",
    "cuda_graph",
    "recompute",
    "offload",
    "threads",
    "checkpoint_every",
    "checkpoint_minutes",
    "moments_every",
)
"""Options that may change when a run is resumed. `device` and `threads` change the order of the sums in an iteration,
so a resumed run equals the uninterrupted one bit for bit on the same device with the same number of threads, and to
rounding otherwise."""

BEFORE = {"input_start": "torch", "initial_gate": None}
"""The values of those options of a model that older runs did not store."""
ONLY_AT_THE_START = ("initial_score", "initial_summary")
"""Options of older runs that changed initial weights alone."""

Status = Literal["finished", "solved", "stopped", "diverged", "interrupted"]


class Evaluation(TypedDict):
    """A line of metrics.jsonl, as far as its readers rely on it; None stands for NaN and infinity."""

    step: int
    loss: float | None
    """Mean over the iterations since the last evaluation, as are the gradient norms."""
    metrics: dict[str, float | None]
    """The task's metrics on the validation split."""
    grad_norm: float | None
    grad_norm_max: float | None


class LoggedEvaluation(Evaluation):
    """All that a line of metrics.jsonl holds."""

    skipped: int
    """How many iterations of the run were skipped because their loss or gradient was not finite."""
    rollbacks: int
    iterations_per_second: float
    elapsed: float
    """Seconds of training and evaluation since the run began."""


class Provenance(NamedTuple):
    """What a number may depend on besides the configuration."""

    device: str
    versions: dict[str, str]
    commit: str | None


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run's numbers."""

    task: Task
    model: ModelConfig
    training: TrainConfig
    input_scale: float = 1.0
    """Factor of the inputs of a run of an older version, where this was an option. Such a run can be used, not resumed:
    its weights are loaded with the factor in the input weights, whose gradients would be others."""

    def __post_init__(self) -> None:
        if self.training.eval_batches is None and not isinstance(self.task, StoredTask):
            raise UserValueError(
                f"eval_batches must be a whole number for task {self.task.name}, whose data have no end; got None.",
                "eval_batches",
            )
        if self.task.carries_state:
            self._check_carried()

    def _check_carried(self) -> None:
        method, on_nan = self.model.method, self.training.on_nan
        if method not in (*OURS, *OF_TORCH):
            raise UserValueError(f"carried must be 1 where method is {method!r}.", "carried")
        if on_nan == "skip":  # the state that a skipped batch leaves is not finite either
            raise UserValueError("on_nan must be stop or rollback where carried is more than 1; got 'skip'.", "on_nan")

    @classmethod
    def default(cls, task: Task) -> RunConfig:
        """The defaults, changed by the task's recipe."""
        of_training = {field.name for field in fields(TrainConfig)}
        training = {option: value for option, value in task.recipe.items() if option in of_training}
        model = {option: value for option, value in task.recipe.items() if option not in of_training}
        return cls(task, ModelConfig.from_options(model), TrainConfig(**training))

    def to_json(self) -> dict[str, Any]:
        return {
            "task": {"name": self.task.name, **self.task.options()},
            "model": {**self.model.resolved().options(), **self._older_options()},
            "training": asdict(self.training),
        }

    def _older_options(self) -> dict[str, Any]:
        return {} if self.input_scale == 1 else {"input_scale": self.input_scale}

    @classmethod
    def from_json(cls, stored: Any) -> RunConfig:
        """The inverse of `to_json`, also for what older versions wrote: options that are newer than a run are as they
        were then. Other input raises KeyError, TypeError, ValueError or a UserError."""
        options = dict(stored["task"])
        name = check_choice("task", options.pop("name"), TASKS)
        if "data_dir" in options:  # no run stores it, and whoever made the file would choose the folder
            raise UserValueError("task must have the options that a run keeps; data_dir is none of them.", "task")
        task, model = TASKS[name](**options), {**BEFORE, **stored["model"]}
        input_scale = check_float("input_scale", model.pop("input_scale", 1.0), above=0)
        for option in ONLY_AT_THE_START:
            model.pop(option, None)
        of_model = ModelConfig.from_options(model)
        of_model = of_model.with_key_size(of_model.hidden_size)  # as large as hidden states where a run stored none
        return cls(task, of_model, TrainConfig(**stored["training"]), input_scale)

    def options(self) -> dict[str, Any]:
        """Every option by its name on the command line."""
        of_model = {**self.model.options(), **self._older_options()}
        return {"task": self.task.name, **self.task.options(), **of_model, **asdict(self.training)}

    def effective(self) -> RunConfig:
        """A copy in which the options that make no difference have their defaults."""
        is_sab = self.model.method == "sab"
        training = self.training if is_sab else replace(self.training, memory_lr=TrainConfig.memory_lr)
        return replace(self, model=self.model.effective(), training=training)

    def difference(self, other: RunConfig) -> str | None:
        """Name of the first option because of which the two compute something else; None if there is none."""
        mine, others = self.effective().options(), other.effective().options()
        for option in (*mine, *others):
            if option not in FREE_ON_RESUME and mine.get(option) != others.get(option):
                return option
        return None

    def build_model(self, device: torch.device) -> SequenceModel:
        """The model with new weights, drawn from torch's random state."""
        task = self.task
        model = SequenceModel(
            self.model,
            encoding=task.encoding,
            input_size=task.input_size,
            output_size=task.output_size,
            steps=task.steps,
        )
        return model.to(device, self.training.dtype)

    def default_out(self) -> Path:
        """The default folder of a run."""
        return Path(f"{self.default_out_of_seeds()}-seed{self.training.seed}")

    def default_out_of_seeds(self) -> Path:
        """The default folder for the runs of several seeds."""
        cell = self.model.cell if self.model.has_cell else ""
        return Path("runs") / f"{self.task.label}-{self.model.method}-{cell}{self.model.hidden_size}"


@dataclass(frozen=True)
class Result:
    """How a run ended; `result.json` holds the same."""

    status: Status
    message: str
    """The same in a sentence."""
    iterations: int
    """How many updates were made."""
    solved_at: int | None
    """The iteration of the first evaluation that reached `stop_at` or, without it, the task's threshold."""
    metrics: dict[str, float | None]
    """Metrics of the final weights on the test split; None stands for NaN and infinity."""
    wall_time: float
    """Seconds of training and evaluation, over all resumptions."""
    device: str
    versions: dict[str, str]
    commit: str | None
    """Git commit of the sab package, where it is a checkout."""
    valid: dict[str, float | None] = field(default_factory=dict)
    """Metrics of the same weights on the validation split; empty in a result of an older version."""
    best_at: int | None = None
    """The iteration of the final weights, where the run keeps its best ones and there were any."""


class Run:
    """The folder of one run; made by `create` or `open`."""

    def __init__(self, path: Path, config: RunConfig):
        self.path = path
        self.config = config

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> Run:
        """Makes the folder, which must be empty if it exists."""
        cls.check_empty(path)
        with writing(path, "out"):
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, config)
            run._write_config()
        return run

    @staticmethod
    def check_empty(path: Path) -> None:
        """Raises an error unless the path is free or an empty folder."""
        with writing(path, "out"):
            if path.is_file():
                raise UserValueError(f"out {str(path)!r} must be a folder; it is a file.", "out")
            config = path / "config.json"
            left_by_a_crash = {lock.NAME, temporary_of(config).name}
            if path.is_dir() and any(one.name not in left_by_a_crash for one in path.iterdir()):
                holds = "files, and no run;"
                if config.exists():
                    holds = "a run; resume it (--resume, or resume=True from Python) or"
                raise UserValueError(f"out {str(path)!r} already holds {holds} choose another folder.", "out")

    @classmethod
    def open(cls, path: Path | str, option: str = "run") -> Run:
        """The run in a folder; errors name the folder as `option`."""
        if not isinstance(path, Path | str):
            raise UserTypeError(f"{option} must be a path; got {path!r}.", option)
        path = Path(path)
        wanted = f"{option} {str(path)!r} must be the folder of a run"
        if not path.is_dir():
            raise UserValueError(f"{wanted}; there is no such folder.", option)
        if not (path / "config.json").is_file():
            raise UserValueError(f"{wanted}; it holds no config.json.", option)
        try:
            config = RunConfig.from_json(read_json(path / "config.json"))
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {error}"
            raise UserValueError(f"{wanted}; its config.json is not one: {reason.rstrip('.')}.", option) from error
        return cls(path, config)

    def is_untouched(self) -> bool:
        """Whether the run has not computed anything yet."""
        written = (self.path / "metrics.jsonl", self.path / "result.json", *self.checkpoints.glob("step-*"))
        return not any(path.exists() for path in written)

    def discard(self) -> None:
        """Removes the files of a run without an iteration, so that its folder can be used again."""
        for folder in (self.checkpoints, self.best):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (self.path / "config.json", self.path / lock.NAME, *self.path.glob("events.out.tfevents.*")):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):  # it holds something else
            self.path.rmdir()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def moments(self) -> Path:
        return self.path / "moments"

    def check_resumable(self, config: RunConfig) -> None:
        """Raises an error unless the run can continue with `config`, which may differ only where no number changes."""
        if self.config.input_scale != 1:
            raise UserValueError(
                f"out {str(self.path)!r} must be a run without input_scale to be resumed; it was trained with "
                f"input_scale {self.config.input_scale:g}, which is no option any more.",
                "out",
            )
        option = self.config.difference(config)
        if option is not None:
            stored, given = self.config.options().get(option), config.options().get(option)
            raise UserValueError(f"{option} must be {stored!r} to resume {str(self.path)!r}; got {given!r}.", option)
        stored, given = self.config.training.checkpoint_every, config.training.checkpoint_every
        if given != stored and config.training.on_nan == "rollback":
            raise UserValueError(
                f"checkpoint_every must be {stored} to resume {str(self.path)!r}, which goes back to its checkpoints; "
                f"got {given}.",
                "checkpoint_every",
            )
        stored, given = self.config.training.iterations, config.training.iterations
        if given != stored and config.training.lr_decay is not None:
            raise UserValueError(
                f"iterations must be {stored} to resume {str(self.path)!r}, whose learning rate falls over them; "
                f"got {given}.",
                "iterations",
            )
        if given < stored:
            raise UserValueError(
                f"iterations must be at least {stored} to resume {str(self.path)!r}; got {given}.", "iterations"
            )

    def rewind(self, step: int, config: RunConfig) -> None:
        """Resets the run to `step`, to continue with `config`.

        Evaluations after that step are dropped, and so is one off schedule, which marked an end. The result is removed
        first: without it a run has not ended, whatever a crash leaves undone here.
        """
        every = config.training.eval_every
        kept = [line for line in self.evaluations() if line["step"] <= step and line["step"] % every == 0]
        (self.path / "result.json").unlink(missing_ok=True)
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        self.config = config
        self._write_config()

    def check_there(self) -> None:
        """Raises an error if the run's folder was removed: files written now would be left over."""
        with writing(self.path):
            os.stat(self.path / "config.json")

    def log(self, evaluation: Evaluation) -> None:
        """Adds a line to metrics.jsonl."""
        self.check_there()
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(evaluation, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # no checkpoint may record an evaluation that is lost

    def evaluations(self) -> list[Evaluation]:
        """The lines of metrics.jsonl, without a last one that a crash cut short."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        wanted = f"{str(path)!r} must hold one evaluation a line"
        try:
            evaluations = [parse_json(line) for line in read_text(path).split("\n")[:-1]]
        except (OSError, ValueError) as error:
            raise UserValueError(f"{wanted}; {error}.") from error
        for number, evaluation in enumerate(evaluations, start=1):
            if not isinstance(evaluation, dict) or not evaluation.keys() >= {"step", "loss", "metrics"}:
                raise UserValueError(f"{wanted}; line {number} is none.")
            metric, metrics = self.config.task.headline.metric, evaluation["metrics"]
            if not isinstance(metrics, dict) or metric not in metrics:
                raise UserValueError(f"{wanted}; line {number} has no {metric}.")
            kinds = get_type_hints(Evaluation)
            wrong = first_mismatch(evaluation, kinds)
            if wrong is not None or not evaluation.keys() >= kinds.keys():
                raise UserValueError(f"{wanted}; line {number} has no {wrong or 'gradient norm'} as one has it.")
        return evaluations

    def finish(self, result: Result) -> None:
        """Writes result.json."""
        self.check_there()
        write_text(self.path / "result.json", json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")

    def result(self) -> Result | None:
        """The result of the run; None if it has not ended."""
        path = self.path / "result.json"
        if not path.is_file():
            return None
        wanted = f"{str(path)!r} must be the result of a run"
        try:
            stored = read_json(path)
        except OSError as error:
            raise UserValueError(f"{wanted}; it cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UserValueError(f"{wanted}; it is not JSON.") from error
        try:
            return as_dataclass(Result, stored)
        except ValueError as error:
            raise UserValueError(f"{wanted}; {error}.") from error

    def _write_config(self) -> None:
        write_text(self.path / "config.json", json.dumps(self.config.to_json(), indent=2) + "\n", "out")


def finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """The metrics with None for NaN and infinity, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def provenance(device: torch.device) -> Provenance:
    """The device, the versions and the commit that a result is computed with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {"sab": __version__, "torch": torch.__version__, "numpy": np.__version__}
    versions["python"] = platform.python_version()
    return Provenance(f"{device.type} ({name})", versions, _commit())


def _commit() -> str | None:
    """The commit of this file; None if git does not track it, as in an installation inside another repository."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
