"""Checkpoints: safetensors and JSON, never pickle, so that loading one runs no code.

A checkpoint is a folder `step-00001000` with the weights (`model.safetensors`, loadable on their own), what else
training needs (`training.safetensors`: Adam's moments, the random states) and `state.json`, which names the run's
configuration and the digest of both files. It is written under another name, flushed to the disk and renamed, and
only then is its predecessor removed: at every moment there is a complete one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sab.errors import ValueMistake
from sab.files import sync, writing
from sab.models import SequenceModel
from sab.training.run import Run, RunConfig

FORMAT = "sab checkpoint 1"
MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"


@dataclass
class TrainingState:
    """Where a run stands, besides its weights."""

    step: int = 0
    """How many updates the weights have seen."""
    elapsed: float = 0.0
    """Seconds spent so far."""
    solved_at: int | None = None
    """The step of the first evaluation that was good enough."""
    window: int = 0
    """How many iterations the four numbers below are about: those since the last evaluation."""
    seconds: float = 0.0
    loss_sum: float = 0.0
    grad_norm_sum: float = 0.0
    grad_norm_max: float = 0.0

    def count(self, seconds: float, loss: float, grad_norm: float) -> None:
        """Counts one more iteration."""
        self.step += 1
        self.elapsed += seconds
        self.window += 1
        self.seconds += seconds
        self.loss_sum += loss
        self.grad_norm_sum += grad_norm
        self.grad_norm_max = max(self.grad_norm_max, grad_norm)

    def start_window(self) -> None:
        """Forgets the iterations that an evaluation has reported."""
        self.window = 0
        self.seconds = self.loss_sum = self.grad_norm_sum = self.grad_norm_max = 0.0


def save(
    folder: Path, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState
) -> None:
    """Writes the checkpoint of this step, then removes older ones."""
    final = folder / f"step-{state.step:08d}"
    if final.exists():  # an iteration is deterministic, so it can only be the same one
        return
    temporary = folder / ".writing"
    with writing(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_plain(model.state_dict()), temporary / MODEL)
        save_file(_plain(_training_tensors(model, optimizer)), temporary / TRAINING)
        contents = {
            "format": FORMAT,
            "config": config.to_json(),
            "state": asdict(state),
            "sha256": {name: _digest(temporary / name) for name in (MODEL, TRAINING)},
        }
        (temporary / STATE).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, final)
        sync(folder)
        for older in _complete(folder)[:-1]:
            shutil.rmtree(older)


def load(
    folder: Path, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> TrainingState:
    """Puts the newest checkpoint into `model` and, where given, `optimizer` and the random states."""
    complete = _complete(folder)
    if not complete:
        raise ValueMistake(f"{str(folder.parent)!r} must hold a checkpoint; there is none in {folder.name!r}.")
    checkpoint = complete[-1]
    state = _load_state(checkpoint, config)
    weights = _load_tensors(checkpoint / MODEL, model.state_dict())
    training = _load_tensors(checkpoint / TRAINING, _training_layout(model))
    model.load_state_dict(weights)
    if optimizer is not None:
        _restore_training(model, optimizer, training)
    return state


def load_model(run: Run, device: torch.device) -> SequenceModel:
    """The model of a run with the weights of its newest checkpoint, ready to be evaluated."""
    model = run.config.build_model(device)
    load(run.checkpoints, run.config, model)
    return model.eval()


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def _load_state(checkpoint: Path, config: RunConfig) -> TrainingState:
    path = checkpoint / STATE
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if contents["format"] != FORMAT:
            raise ValueError(f"its format is {contents['format']!r}")
        state = TrainingState(**contents["state"])
        if type(state.step) is not int:
            raise ValueError(f"its step is {state.step!r} and not a whole number")
        stored = RunConfig.from_json(contents["config"])
        digests = {name: contents["sha256"][name] for name in (MODEL, TRAINING)}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueMistake(f"{str(path)!r} must be the state of a checkpoint of sab; {_reason(error)}.") from error
    option = stored.difference(config)
    if option is not None:
        theirs, ours = stored.options().get(option), config.options().get(option)
        raise ValueMistake(
            f"{str(checkpoint)!r} must be a checkpoint of this run; "
            f"it is one of a run with {option} {theirs!r} and not {ours!r}."
        )
    for name, digest in digests.items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueMistake(f"{str(checkpoint)!r} must be a complete checkpoint; {name} is missing.")
        if _digest(path) != digest:
            raise ValueMistake(f"{str(path)!r} must be as it was written; it is truncated or was altered.")
    return state


def _load_tensors(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, which must have the names, shapes and types of those expected."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueMistake(f"{str(path)!r} must be a safetensors file; {_reason(error)}.") from error
    for name in sorted(expected.keys() | tensors.keys()):
        stored, wanted = tensors.get(name), expected.get(name)
        if stored is None or wanted is None:
            what = "is missing" if stored is None else "is none of its tensors"
            raise ValueMistake(f"{str(path)!r} must hold the tensors of this run's model; {name!r} {what}.")
        if (stored.shape, stored.dtype) != (wanted.shape, wanted.dtype):
            raise ValueMistake(
                f"{str(path)!r} must hold the tensors of this run's model; {name!r} is {_kind(stored)} "
                f"and not {_kind(wanted)}."
            )
    return tensors


def _training_layout(model: nn.Module) -> dict[str, Tensor]:
    """Stand-ins for what `_training_tensors` gives, to compare names, shapes and types with."""
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


def _restore_training(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    counts_on_device = optimizer.defaults["capturable"] or optimizer.defaults["fused"]
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": tensors[f"adam.{name}.step"].to(parameter.device if counts_on_device else "cpu"),
            "exp_avg": tensors[f"adam.{name}.exp_avg"].to(parameter.device),
            "exp_avg_sq": tensors[f"adam.{name}.exp_avg_sq"].to(parameter.device),
        }


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory, as safetensors wants them."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
