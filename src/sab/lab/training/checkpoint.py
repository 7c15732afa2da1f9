"""Checkpoints: safetensors and JSON, never pickle, so that loading one runs no code.

A checkpoint is a folder `step-00001000` with the weights (`model.safetensors`, loadable on their own), what else
training needs (`training.safetensors`: Adam's moments, the random states) and `state.json`, which holds the run's
configuration, the digest of both files and its own digest. It is written under another name, flushed to the disk and
renamed; only then is an old one removed, so there are always two once there have been two. Where the newest is damaged,
a warning is logged and the one before it is used.

The best weights of a run that keeps them are checkpoints without `training.safetensors` in another folder. A run that
resumes from a checkpoint needs the best weights that this one records, so they stay as long as it does. The moments
that a run keeps are such checkpoints as well, in a third folder, and stay for good.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sab.errors import UserValueError
from sab.lab.files import sync, writing
from sab.lab.models import SequenceModel
from sab.lab.stored import as_dataclass, read_json
from sab.lab.tasks import Headline
from sab.lab.training import distributed
from sab.lab.training.run import Run, RunConfig
from sab.state import SABState

logger = logging.getLogger("sab")
T = TypeVar("T")

FORMAT = "sab checkpoint 1"
MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"
CARRIED = "carried.safetensors"
"""The state that the next batch begins with, in the checkpoints of a run that carries one; without tensors where that
batch begins with an empty one."""
INPUT_WEIGHTS = "layers.weight_ih_l0"
"""The name of the weights of a model's inputs."""
WRITING = ".writing"
"""The name of a checkpoint until it is complete."""
KEPT = 2
"""How many checkpoints a run keeps: the newest, and one in case it is damaged."""


@dataclass
class TrainingState:
    """Where a run stands, besides its weights."""

    step: int = 0
    """How many batches the run has seen."""
    elapsed: float = 0.0
    """Seconds spent so far."""
    solved_at: int | None = None
    """The step of the first evaluation that was good enough."""
    best: float | None = None
    """The best headline metric of an evaluation."""
    best_at: int | None = None
    """The step of that evaluation, of the first one among equals."""
    since_best: int = 0
    """How many evaluations followed it, or were made at all where none had a finite headline metric."""
    window: int = 0
    """The number of iterations since the last evaluation, which the next five fields describe."""
    window_skipped: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    grad_norm_sum: float = 0.0
    grad_norm_max: float = 0.0
    skipped: int = 0
    """How many iterations were skipped because their loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    """How many of them were the most recent iterations."""
    rollbacks: int = 0
    """How often the run rolled back to a checkpoint."""
    rollbacks_here: int = 0
    """How often it did since it last reached a checkpoint on schedule after the trouble."""
    trouble_at: int = 0
    """The iteration of the last rollback."""
    lr_factor: float = 1.0
    """The factor of the learning rate; a rollback halves it."""

    def count(self, seconds: float, loss: float, grad_norm: float) -> None:
        """Counts one more iteration."""
        self._pass(seconds)
        self.loss_sum += loss
        self.grad_norm_sum += grad_norm
        self.grad_norm_max = max(self.grad_norm_max, grad_norm)
        self.skipped_in_a_row = 0

    def skip(self, seconds: float) -> None:
        """Counts one more iteration, which was skipped."""
        self._pass(seconds)
        self.window_skipped += 1
        self.skipped += 1
        self.skipped_in_a_row += 1

    def _pass(self, seconds: float) -> None:
        self.step += 1
        self.elapsed += seconds
        self.window += 1
        self.seconds += seconds

    def compare(self, headline: Headline, value: float) -> bool:
        """Counts one more evaluation; returns whether it is finite and the best so far."""
        is_better = math.isfinite(value) and (self.best is None or not headline.reaches(self.best, value))
        if is_better:
            self.best, self.best_at, self.since_best = value, self.step, 0
        else:
            self.since_best += 1
        return is_better

    def start_window(self) -> None:
        """Resets the counts since the last evaluation."""
        self.window = self.window_skipped = 0
        self.seconds = self.loss_sum = self.grad_norm_sum = self.grad_norm_max = 0.0


@dataclass
class StateFile:
    """What state.json of a checkpoint holds."""

    format: str
    config: dict[str, Any]
    """The run's configuration, as `RunConfig.to_json` gives it."""
    state: dict[str, Any]
    """The entries of a `TrainingState`."""
    sha256: dict[str, str]
    """The digest of each file of tensors by its name."""
    digest: str | None = None
    """The digest of all other entries; None in a file of an older version."""

    def own_digest(self) -> str:
        """What `digest` is if nobody altered the file."""
        others = {name: entry for name, entry in asdict(self).items() if name != "digest"}
        return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def save(
    folder: Path,
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    carried: SABState | None = None,
) -> bool:
    """Writes the checkpoint of this step, then removes old ones; returns whether this step had none yet."""
    if _of_step(folder, state.step).exists():  # an iteration is deterministic, so it can only be the same one
        return False
    tensors: dict[str, Mapping[str, Tensor]] = {
        MODEL: model.state_dict(),
        TRAINING: _training_tensors(model, optimizer),
    }
    if config.task.carries_state:
        tensors[CARRIED] = {} if carried is None else _tensors_of(carried)
    _write(folder, config, tensors, state)
    remove_old(folder, config, state.step)
    return True


def save_best(folder: Path, config: RunConfig, model: nn.Module, state: TrainingState) -> None:
    """Writes the weights of this step, the best so far; removes none."""
    _write(folder, config, {MODEL: model.state_dict()}, state)


def save_moment(folder: Path, config: RunConfig, model: nn.Module, state: TrainingState) -> None:
    """Writes the weights of this step for good; replaces later ones, made before the run was resumed."""
    remove_later_moments(folder, state.step - 1)
    _write(folder, config, {MODEL: model.state_dict()}, state)


def remove_later_moments(folder: Path, step: int) -> None:
    """Removes the moments after `step`."""
    _remove_others(folder, {one for one in moments(folder) if one <= step})


def moments(folder: Path) -> list[int]:
    """The steps of the moments in a folder."""
    return list(map(_step_of, _complete(folder)))


def remove_old(folder: Path, config: RunConfig, step: int) -> None:
    """Removes all checkpoints but the newest of a run at `step`, and what a crash left of one.

    Where the run may roll back, the last two on schedule stay too.
    """
    training = config.training
    known = [one for one in map(_step_of, _complete(folder)) if one <= step]
    on_schedule = [one for one in known if one % training.checkpoint_every == 0]
    _remove_others(folder, known[-KEPT:] + (on_schedule[-2:] if training.on_nan == "rollback" else []))


def remove_old_best(run: Run, best_at: int | None) -> None:
    """Removes all best weights but those of `best_at` and those that a checkpoint records."""
    _remove_others(run.best, {best_at, *map(_recorded_best, _complete(run.checkpoints))})


def load(
    folder: Path,
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    best: Path | None = None,
    every: int = 1,
    before: float = math.inf,
) -> TrainingState:
    """Loads the newest intact checkpoint into `model` and, where given, `optimizer` and the random states.

    Where `best` is given, a checkpoint is intact only if its best weights are, in that folder. Only steps that are
    multiples of `every` count; those from the step `before` on are used only where there are no others.
    """

    def read(checkpoint: Path) -> tuple[TrainingState, dict[str, Tensor], dict[str, Tensor]]:
        state = _load_state(checkpoint, config, _files(config), best)
        weights = _load_weights(checkpoint, config, model)
        return state, weights, _load_training(checkpoint / TRAINING, model)

    state, weights, training = _newest_intact(folder, read, every, before)
    _put(weights, model)
    if optimizer is not None:
        _restore_training(model, optimizer, training)
    return state


def load_carried(folder: Path, config: RunConfig, step: int, device: torch.device) -> SABState | None:
    """The state that a run's next batch begins with, from the checkpoint of this step, which `load` found intact."""
    if not config.task.carries_state:
        return None
    path = _of_step(folder, step) / CARRIED
    try:
        tensors = load_file(path)
        return SABState(**{"c": None, **tensors}).to(device) if tensors else None
    except (OSError, SafetensorError, TypeError) as error:
        raise UserValueError(f"{str(path)!r} must hold the state of a model; {_reason(error)}.") from error


def load_best(folder: Path, config: RunConfig, model: nn.Module, step: int) -> None:
    """Loads the best weights, those of `step`, into `model`."""
    check_best(folder, config, step)
    _put(_load_weights(_of_step(folder, step), config, model), model)


def check_best(folder: Path, config: RunConfig, step: int) -> None:
    """Raises an error unless the best weights, those of `step`, are there as they were written."""
    if not _of_step(folder, step).is_dir():
        raise UserValueError(
            f"{str(folder.parent)!r} must hold its best weights, those of iteration {step}; "
            f"they are not in {folder.name!r}."
        )
    _load_state(_of_step(folder, step), config, (MODEL,))


def load_model(run: Run, device: torch.device) -> SequenceModel:
    """The model of a run, ready to be evaluated, with its best weights or, where it keeps none, its newest ones."""
    return load_kept(run, device)[0]


def load_kept(run: Run, device: torch.device) -> tuple[SequenceModel, int | None]:
    """The same, and the iteration of the weights where they are the best ones, at the run's end or so far."""
    model, best_at = _build_without_memory(run), _best_at(run)
    if best_at is None:
        load(run.checkpoints, run.config, model)
    else:
        load_best(run.best, run.config, model, best_at)
    return model.to(device).eval(), best_at


def load_moment(run: Run, device: torch.device, step: int) -> SequenceModel:
    """The model of a run at one of its moments, ready to be evaluated."""
    model = _build_without_memory(run)
    load_best(run.moments, run.config, model, step)
    return model.to(device).eval()


def _build_without_memory(run: Run) -> SequenceModel:
    """The model of a run on torch's meta device: weights come from files, so no configuration exhausts memory."""
    nowhere = torch.device("meta")
    try:
        with nowhere:
            return run.config.build_model(nowhere)
    except (RuntimeError, TypeError) as error:  # a size that no integer of torch holds
        raise UserValueError(f"{str(run.path)!r} must be a run whose model can be made; it is too large.") from error


def _best_at(run: Run) -> int | None:
    if run.config.training.keep == "last":
        return None
    result = run.result()
    if result is not None:
        return result.best_at
    return _newest_intact(
        run.checkpoints, lambda checkpoint: _load_state(checkpoint, run.config, _files(run.config), run.best).best_at
    )


def share(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sends all that a checkpoint of the first process holds to the other processes of the run."""
    weights, training = _plain(model.state_dict()), _plain(_training_tensors(model, optimizer))
    distributed.broadcast((*weights.values(), *training.values()))
    model.load_state_dict(weights)
    _restore_training(model, optimizer, training)


def _files(config: RunConfig) -> tuple[str, ...]:
    """The files of tensors of a run's checkpoints."""
    return (MODEL, TRAINING, CARRIED) if config.task.carries_state else (MODEL, TRAINING)


def _of_step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _remove_others(folder: Path, needed: Collection[int | None]) -> None:
    """Removes all checkpoints but those of the needed steps, and what a crash left of one."""
    _check_own(folder)
    with writing(folder):
        shutil.rmtree(folder / WRITING, ignore_errors=True)
        for one in _complete(folder):
            if _step_of(one) not in needed:
                shutil.rmtree(one)


def _write(folder: Path, config: RunConfig, tensors: Mapping[str, Mapping[str, Tensor]], state: TrainingState) -> None:
    """Writes a checkpoint with the tensors of each file, in one move."""
    temporary = folder / WRITING
    _check_own(folder)
    with writing(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        folder.mkdir(exist_ok=True)  # but not the run's folder: if that is gone, a user removed it
        temporary.mkdir()
        for name, held in tensors.items():
            _write_tensors(_plain(held), temporary / name)
        digests = {name: _digest(temporary / name) for name in tensors}
        contents = StateFile(FORMAT, config.to_json(), asdict(state), digests)
        contents.digest = contents.own_digest()
        (temporary / STATE).write_text(json.dumps(asdict(contents), indent=2) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary, folder.parent):
            sync(path)
        os.rename(temporary, _of_step(folder, state.step))
        sync(folder)


def _check_own(folder: Path) -> None:
    """Raises an error where a folder of checkpoints is a link: in a run from somebody else it may lead anywhere."""
    if folder.is_symlink():
        raise UserValueError(
            f"{str(folder)!r} must be a folder of the run to be written to; it is a link to {os.readlink(folder)!r}."
        )


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def _newest_intact(folder: Path, read: Callable[[Path], T], every: int = 1, before: float = math.inf) -> T:
    """The result of `read` for the newest intact checkpoint; logs a warning about newer ones."""
    wrong: list[str] = []
    known = [one for one in _complete(folder) if _step_of(one) % every == 0]
    for checkpoint in sorted(known, key=lambda one: (_step_of(one) < before, _step_of(one)), reverse=True):
        try:
            found = read(checkpoint)
        except UserValueError as mistake:
            wrong.append(str(mistake).rstrip("."))
            continue
        if wrong:
            logger.warning(f"{'; and '.join(wrong)}; the checkpoint {checkpoint.name} is used instead.")
        return found
    if not wrong:
        raise UserValueError(f"{str(folder.parent)!r} must hold a checkpoint; there is none in {folder.name!r}.")
    raise UserValueError(f"{'; and '.join(wrong)}.")


def _recorded_best(checkpoint: Path) -> int | None:
    """The step of the best weights that a checkpoint records; None where it is damaged."""
    try:
        return as_dataclass(TrainingState, read_json(checkpoint / STATE)["state"]).best_at
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _load_state(checkpoint: Path, config: RunConfig, files: Sequence[str], best: Path | None = None) -> TrainingState:
    """The state of a checkpoint; raises an error unless it is of a run of this configuration and its files are intact.

    Where `best` is given, the best weights that it records must be intact too.
    """
    path = checkpoint / STATE
    try:
        contents = as_dataclass(StateFile, read_json(path))
        if contents.format != FORMAT:
            raise ValueError(f"its format is {contents.format!r}")
        state = as_dataclass(TrainingState, contents.state)
        stored = RunConfig.from_json(contents.config)
        digests = {name: contents.sha256[name] for name in files}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserValueError(f"{str(path)!r} must be the state of a checkpoint of sab; {_reason(error)}.") from error
    option = stored.difference(config)
    if option is not None:
        theirs, ours = stored.options().get(option), config.options().get(option)
        raise UserValueError(
            f"{str(checkpoint)!r} must be a checkpoint of this run; "
            f"it is one of a run with {option} {theirs!r} and not {ours!r}."
        )
    if contents.digest not in (None, contents.own_digest()) or state.step != _step_of(checkpoint):
        raise UserValueError(f"{str(path)!r} must be as it was written; it was altered.")
    for name, digest in digests.items():
        path = checkpoint / name
        if not path.is_file():
            raise UserValueError(f"{str(checkpoint)!r} must be a complete checkpoint; {name} is missing.")
        if _digest(path) != digest:
            raise UserValueError(f"{str(path)!r} must be as it was written; it is truncated or was altered.")
    if best is not None and state.best_at is not None:
        check_best(best, config, state.best_at)
    return state


def _load_tensors(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file; raises an error unless names, shapes and types are as expected."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserValueError(f"{str(path)!r} must be a safetensors file; {_reason(error)}.") from error
    for name in sorted(expected.keys() | tensors.keys()):
        stored, wanted = tensors.get(name), expected.get(name)
        if stored is None or wanted is None:
            what = "is missing" if stored is None else "is none of its tensors"
            raise UserValueError(f"{str(path)!r} must hold the tensors of this run's model; {name!r} {what}.")
        if (stored.shape, stored.dtype) != (wanted.shape, wanted.dtype):
            raise UserValueError(
                f"{str(path)!r} must hold the tensors of this run's model; {name!r} is {_kind(stored)} "
                f"and not {_kind(wanted)}."
            )
    return tensors


def _load_weights(checkpoint: Path, config: RunConfig, model: nn.Module) -> dict[str, Tensor]:
    """The weights in a checkpoint, with the input scale of an older run in those of the inputs."""
    weights = _load_tensors(checkpoint / MODEL, model.state_dict())
    if config.input_scale != 1:
        weights[INPUT_WEIGHTS] = weights[INPUT_WEIGHTS] * config.input_scale
    return weights


def _put(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Loads weights into a model, also into one on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    else:
        model.load_state_dict(weights)


def _load_training(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """What else training needs; checks that torch accepts the random state."""
    tensors = _load_tensors(path, _training_layout(model))
    try:
        torch.Generator().set_state(tensors["rng.cpu"])
    except RuntimeError as error:
        raise UserValueError(f"{str(path)!r} must hold a random state of torch; {_reason(error)}.") from error
    return tensors


def _training_layout(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the names, shapes and types that `_training_tensors` gives."""
    layout = {"rng.cpu": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        layout |= {f"adam.{name}.exp_avg": parameter, f"adam.{name}.exp_avg_sq": parameter}
        layout[f"adam.{name}.step"] = torch.zeros(())
    return layout


def _training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's state by the parameter's name, zeros before its first step, and torch's random state."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        adam = optimizer.state.get(parameter) or {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        tensors |= {f"adam.{name}.{key}": value for key, value in adam.items()}
    return tensors


def _tensors_of(state: SABState) -> dict[str, Tensor]:
    """The tensors of a layer's state by name."""
    found = {one.name: getattr(state, one.name) for one in fields(SABState)}
    return {name: tensor.as_subclass(Tensor) for name, tensor in found.items() if tensor is not None}


def _restore_training(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    counts_on_device = optimizer.defaults["capturable"] or optimizer.defaults["fused"]
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": tensors[f"adam.{name}.step"].to(parameter.device if counts_on_device else "cpu"),
            "exp_avg": tensors[f"adam.{name}.exp_avg"].to(parameter.device),
            "exp_avg_sq": tensors[f"adam.{name}.exp_avg_sq"].to(parameter.device),
        }


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory, as safetensors requires."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it hides the system's error
        raise OSError(f"{path.name}: {error}") from error


def _digest(path: Path) -> str:
    """The digest of a file; an empty text where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
