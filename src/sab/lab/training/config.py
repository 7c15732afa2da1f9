"""TrainConfig: how a model is trained, validated once, here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from sab.errors import UserValueError, check_bool, check_choice, check_float, check_int

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "float64", "bfloat16"]
Keep = Literal["last", "best"]
OnNan = Literal["stop", "skip", "rollback"]

MOST_THREADS = 1024
"""Most CPU threads that torch may use; with many more the process dies without a message."""

LARGEST_LR = 1e30
"""With a larger rate Adam's corrected step overflows float32."""
LARGEST_MEMORY_LR = 1e3
"""The largest share for which the rate of the memory does not overflow either."""
MOST_DROPPED = 0.99


@dataclass(frozen=True)
class TrainConfig:
    """How long, how fast and on what a model is trained."""

    iterations: int = 10_000
    """How many batches to train on."""
    batch_size: int = 64
    """How many sequences a batch has, in training and in evaluation."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    memory_lr: float = 1.0
    """The learning rate of the memory's own parameters (scorer and incorporation), as a share of lr."""
    lr_decay: float | None = None
    """From this fraction of the iterations on, the learning rate falls along a line to a fiftieth; None keeps it."""
    clip: float | None = 1.0
    """Largest norm of the gradient, which is scaled down to it; None clips nothing."""
    dropout: float = 0.0
    """Share of the hidden units that the readout does without in training, drawn for each sequence and the same at all
    of its steps."""
    weight_decay: float = 0.0
    """Every update takes this share, times the learning rate, off all weights, apart from what Adam does (AdamW)."""
    seed: int = 0
    """Seed of the data and of the initial weights."""
    device: Device = "auto"
    """Where to train; auto takes CUDA where there is one."""
    precision: Precision = "float32"
    """Type of the numbers; bfloat16 is autocast, with weights in float32."""
    cuda_graph: bool = True
    """On a GPU, whether an iteration is recorded as a CUDA graph, one for each shape of a batch, and then replayed:
    the same numbers in less time. Where that fails, a warning is logged and the iterations run without it."""
    threads: int | None = None
    """How many CPU threads torch may use; None leaves that to torch."""
    eval_every: int = 500
    """How many iterations lie between two evaluations."""
    eval_batches: int | None = 10
    """How many unseen batches an evaluation takes its means over; None takes all the data there are, where they have
    an end. The last one, on test data, then takes all of them either way."""
    checkpoint_every: int = 500
    """How many iterations lie between two checkpoints."""
    checkpoint_minutes: float | None = None
    """After how many minutes without a checkpoint an extra one is written; None writes none."""
    moments_every: int | None = None
    """How many iterations lie between two moments whose weights stay, for `sab report` to step through; None: none."""
    stop_at: float | None = None
    """Stop at the first evaluation whose headline metric is as good as this; None trains to the end."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a better headline metric; None trains to the end."""
    keep: Keep = "last"
    """Which weights a run ends with: the last ones, or those of the evaluation with the best headline metric."""
    on_nan: OnNan = "stop"
    """What to do about a loss or gradient that is not finite, which never reaches the weights: stop the run, skip the
    batch, or go back to the last of the checkpoints that checkpoint_every asks for, with half the learning rate."""

    def __post_init__(self) -> None:
        checked = {
            "iterations": check_int("iterations", self.iterations, 1),
            "batch_size": check_int("batch_size", self.batch_size, 1),
            "lr": check_float("lr", self.lr, above=0, maximum=LARGEST_LR),
            "dropout": check_float("dropout", self.dropout, minimum=0, maximum=MOST_DROPPED),
            "weight_decay": check_float("weight_decay", self.weight_decay, minimum=0, maximum=1),
            "memory_lr": check_float("memory_lr", self.memory_lr, above=0, maximum=LARGEST_MEMORY_LR),
            "seed": check_int("seed", self.seed, 0, maximum=2**63 - 1),
            "threads": check_int("threads", self.threads, 1, optional=True, maximum=MOST_THREADS),
            "eval_every": check_int("eval_every", self.eval_every, 1),
            "eval_batches": check_int("eval_batches", self.eval_batches, 1, optional=True),
            "checkpoint_every": check_int("checkpoint_every", self.checkpoint_every, 1),
            "moments_every": check_int("moments_every", self.moments_every, 1, optional=True),
            "patience": check_int("patience", self.patience, 1, optional=True),
        }
        if self.lr_decay is not None:
            checked["lr_decay"] = check_float("lr_decay", self.lr_decay, minimum=0, maximum=1)
        if self.checkpoint_minutes is not None:
            checked["checkpoint_minutes"] = check_float("checkpoint_minutes", self.checkpoint_minutes, above=0)
        if self.clip is not None:
            checked["clip"] = check_float("clip", self.clip, above=0)
        if self.stop_at is not None:
            checked["stop_at"] = check_float("stop_at", self.stop_at)
        for option, value in checked.items():
            object.__setattr__(self, option, value)  # a plain number also where a NumPy one was given
        check_bool("cuda_graph", self.cuda_graph)
        check_choice("device", self.device, get_args(Device))
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("keep", self.keep, get_args(Keep))
        check_choice("on_nan", self.on_nan, get_args(OnNan))

    def lr_at(self, step: int) -> float:
        """The learning rate after `step` iterations."""
        start = self.iterations * (1.0 if self.lr_decay is None else self.lr_decay)
        if step <= start:
            return self.lr
        return self.lr * (1 - 0.98 * (step - start) / (self.iterations - start))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of whatever is computed outside autocast."""
        return torch.float64 if self.precision == "float64" else torch.float32


def resolve_device(device: str) -> torch.device:
    """The device that an option `device` stands for on this machine."""
    check_choice("device", device, get_args(Device))
    if device == "cuda" and not torch.cuda.is_available():
        raise UserValueError("device must be auto or cpu on a machine without a CUDA device; got 'cuda'.", "device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
