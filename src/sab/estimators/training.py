"""How an estimator is trained: Adam, clipped gradients, and the best weights by the loss of a validation split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sab.errors import UserValueError, check_bool, check_float, check_int

CLIP = 1.0
"""The largest norm of the gradient of all parameters."""
HALVINGS = 3
"""How often the rate is halved while no epoch is the best one, before the training ends."""


@dataclass(frozen=True)
class Schedule:
    """How long and in which steps to train; an estimator's docstring has what the fields mean."""

    learning_rate: float
    batch_size: int
    max_epochs: int
    patience: int
    validation_fraction: float
    verbose: bool

    def __post_init__(self) -> None:
        check_float("learning_rate", self.learning_rate, above=0)
        check_int("batch_size", self.batch_size, 1)
        check_int("max_epochs", self.max_epochs, 1)
        check_int("patience", self.patience, 1)
        check_float("validation_fraction", self.validation_fraction, minimum=0, below=1)
        check_bool("verbose", self.verbose)


class Epoch(NamedTuple):
    """The mean losses of an epoch; `validation` is None where no rows were kept for it."""

    training: float
    validation: float | None


def train(
    network: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    training: Tensor,
    validation: Tensor,
    schedule: Schedule,
    rows_in_epoch: int | None = None,
) -> list[Epoch]:
    """Train the network until no epoch has been the best for some time; returns what each epoch came to.

    `loss_of` gives the mean loss of some rows; `training` and `validation` are numbers of rows. An epoch has all of
    those to train on, in a random order, or the first `rows_in_epoch` of that order. The network ends with the weights
    of its best epoch: of the smallest loss in validation, or in training where `validation` is empty.
    """
    optimiser = torch.optim.Adam(network.parameters(), schedule.learning_rate)
    best, best_at, kept = math.inf, 0, network.state_dict()
    epochs: list[Epoch] = []
    for epoch in range(1, schedule.max_epochs + 1):
        network.train()
        losses = []
        drawn = training[torch.randperm(len(training))[:rows_in_epoch]]
        for rows in drawn.split(schedule.batch_size):
            loss = loss_of(rows)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimiser.step()
            losses.append(loss.detach() * len(rows))
        mean = torch.stack(losses).sum().item() / len(drawn)
        epochs.append(Epoch(mean, _mean_loss(network, loss_of, validation, schedule.batch_size)))
        watched = mean if epochs[-1].validation is None else epochs[-1].validation
        if not math.isfinite(watched):
            raise UserValueError(
                f"learning_rate must be smaller for these data: with {schedule.learning_rate:g} "
                f"the loss of epoch {epoch} is {watched}.",
                "learning_rate",
            )
        if schedule.verbose:
            told = "" if epochs[-1].validation is None else f", in validation {epochs[-1].validation:.4f}"
            print(f"epoch {epoch}: loss {mean:.4f}{told}", flush=True)  # noqa: T201 (what verbose asks for)
        if watched < best:
            best, best_at, kept = watched, epoch, deepcopy(network.state_dict())
        elif epoch - best_at >= schedule.patience:
            break
        elif (epoch - best_at) % max(schedule.patience // HALVINGS, 1) == 0:
            for group in optimiser.param_groups:
                group["lr"] /= 2
    network.load_state_dict(kept)
    network.eval()
    return epochs


@torch.no_grad()
def _mean_loss(network: nn.Module, loss_of: Callable[[Tensor], Tensor], rows: Tensor, batch_size: int) -> float | None:
    if len(rows) == 0:
        return None
    network.eval()
    return sum(loss_of(part).item() * len(part) for part in rows.split(batch_size)) / len(rows)


def split(groups: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to validate on: about a `fraction` of each group, and never all of one."""
    validation = []
    for group in groups.unique():
        (rows,) = torch.where(groups == group)
        count = min(round(fraction * len(rows)), len(rows) - 1)
        validation.append(rows[torch.randperm(len(rows))[:count]])
    chosen = torch.zeros(len(groups), dtype=torch.bool).index_fill_(0, torch.cat(validation), True)
    return torch.where(~chosen)[0], torch.where(chosen)[0]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from this seed inside; outside, torch's go on as if there had been nothing."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def choose_device(device: Any) -> torch.device:
    """The device of an option: `auto` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserValueError(f"device must be auto, or a device of torch; got {device!r}.", "device") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserValueError(
            f"device must be auto or cpu on a machine without a CUDA device; got {device!r}.", "device"
        )
    return chosen
