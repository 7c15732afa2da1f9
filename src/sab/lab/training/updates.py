"""Updates of a model's weights: batch, forward, backward, clip, Adam.

On the CPU the loss of each update is read before the next one. On a GPU reading waits for the device, so losses and
gradient norms are collected there and read at most ten times a second. A flag on the device records that a number was
not finite: it keeps Adam from that update and, unless such updates are skipped, from all later ones. Either way a run
that diverges keeps the weights from before it did.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sab.lab.models import SequenceModel
from sab.lab.tasks import CharacterTask
from sab.lab.training import distributed
from sab.lab.training.batches import Batches, kept_units
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.config import TrainConfig
from sab.lab.training.evaluation import predict_on, remember
from sab.lab.training.graph import Capture, CudaCapture, Graphs
from sab.lab.training.run import RunConfig
from sab.state import SABState

SECONDS_UNREAD = 0.1
"""How many seconds may pass between two readings of a GPU's losses."""
MOST_UNREAD = 1024
"""How many updates there are at most between two readings."""
MOST_UNREAD_TOGETHER = 16
"""The same where several processes make a run."""
MOST_IN_FLIGHT = 8
"""How many updates the host may be ahead of the device, so that it can stop soon."""
MEMORY_PARAMETERS = ("attn_", "incorporate_")
"""Prefixes of the names of a layer's parameters that belong to its memory, not to its cell."""
MOST_SKIPPED = 100
"""How many iterations in a row may be skipped because their loss or gradient is not finite."""


class Updates(ABC):
    """Makes updates one after the other, and reports their losses when asked."""

    carried: SABState | None = None
    """The state that the next batch begins with, unless it begins with an empty one."""

    def __init__(self, config: RunConfig, model: SequenceModel, optimizer: torch.optim.Optimizer, state: TrainingState):
        self._config, self._model, self._optimizer = config, model, optimizer
        self._lr_factor = state.lr_factor
        self._most_broken = MOST_SKIPPED if config.training.on_nan == "skip" else 1
        self.loss = math.nan
        """The loss of the last update read."""

    @abstractmethod
    def make(self, step: int) -> None:
        """Makes update number `step`, from 0."""

    def have_room(self, step: int) -> bool:
        """Whether `make(step)` would not have to wait for the device."""
        return True

    @abstractmethod
    def wants_reading(self) -> bool:
        """Whether it is time to read, even if nothing needs the numbers now."""

    @abstractmethod
    def read(self, state: TrainingState) -> str | None:
        """Counts the updates since the last reading in `state`; returns which number was not finite, if one was.

        No update from that one on counts or was made. Skipped updates are counted as skipped and not returned.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what is held outside of Python's memory."""

    def _descend(self, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes the clipped gradient; returns the loss and the gradient's norm before clipping."""
        kept = None if kept is None else distributed.own_rows_of(kept)
        inputs, targets, fraction = distributed.slice_of_batch(inputs, targets)
        outputs, end = predict_on(self._model, inputs, self.carried, self._config.training, kept)
        if isinstance(self._config.task, CharacterTask) and self._config.task.carries_state:
            self.carried = remember(self._model, self._config.task, end, None).detach()
        loss = self._config.task.loss(outputs, targets)
        loss = loss if fraction == 1 else fraction * loss
        self._optimizer.zero_grad()
        loss.backward()
        loss = distributed.sum_gradients((parameter.grad for parameter in self._model.parameters()), loss.detach())
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.training.clip or math.inf)
        return loss, norm

    def _drop_state(self, step: int) -> None:
        """Lets update number `step` begin with an empty memory, where its sequences do not go on."""
        if not self._config.task.continues(step, self._config.training.batch_size):
            self.carried = None

    def _rate_at(self, step: int) -> float:
        return self._config.training.lr_at(step) * self._lr_factor

    def _count(self, state: TrainingState, seconds: float, loss: float, norm: float) -> str | None:
        numbers = {"loss": loss, "gradient norm": norm}
        broken = next((what for what, value in numbers.items() if not math.isfinite(value)), None)
        if broken is None:
            self.loss = loss
            state.count(seconds, loss, norm)
            return None
        if state.skipped_in_a_row + 1 < self._most_broken:
            state.skip(seconds)
            return None
        in_a_row = f", the {self._most_broken}th in a row" if self._most_broken > 1 else ""
        return f"the {broken} of iteration {state.step + 1} is {numbers[broken]}{in_a_row}"


class _Made(NamedTuple):
    """An update that was made."""

    seconds: float
    loss: float
    grad_norm: float


class HostUpdates(Updates):
    """Updates on the CPU."""

    _unread: _Made | None = None

    def make(self, step: int) -> None:
        training = self._config.training
        started = time.perf_counter()
        self._drop_state(step)
        batch = self._config.task.batch(training.seed, step, training.batch_size, "train", "cpu", training.dtype)
        loss, norm = (number.item() for number in self._descend(*batch, kept_units(self._config, step)))
        if math.isfinite(loss) and math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = group["share"] * self._rate_at(step)
            self._optimizer.step()
        self._unread = _Made(time.perf_counter() - started, loss, norm)

    def wants_reading(self) -> bool:
        return True

    def read(self, state: TrainingState) -> str | None:
        unread, self._unread = self._unread, None
        return None if unread is None else self._count(state, *unread)


class DeviceUpdates(Updates):
    """Updates on a GPU, on their own stream, without waiting for any single one.

    `capture` makes them CUDA graphs; None runs them kernel by kernel, with the same result.
    """

    def __init__(
        self,
        config: RunConfig,
        model: SequenceModel,
        optimizer: torch.optim.Optimizer,
        state: TrainingState,
        stream: torch.cuda.Stream | None,
        capture: Capture | None,
    ):
        super().__init__(config, model, optimizer, state)
        self._stream = stream
        self._device = next(model.parameters()).device
        self._batches = Batches(config, state.step)
        self._rate_set: float | None = None
        self._found = torch.zeros(MOST_UNREAD, 2, dtype=torch.float64, device=self._device)
        self._place = torch.zeros(1, dtype=torch.int64, device=self._device)
        # As with gradient scaling: Adam changes nothing while this is 1.
        self._broken = optimizer.found_inf = torch.zeros((), device=self._device)  # pyright: ignore[reportAttributeAccessIssue]
        self._broken_in_a_row = torch.tensor(state.skipped_in_a_row, device=self._device)
        self._is_over = torch.zeros((), dtype=torch.bool, device=self._device)
        eager = self._update_eagerly
        self._update = eager if capture is None else Graphs(eager, self._device, capture)
        self._in_flight = [torch.cuda.Event(blocking=True) for _ in range(MOST_IN_FLIGHT if stream else 0)]
        self._unread = 0
        self._since = 0.0

    def make(self, step: int) -> None:
        if self._unread == 0:
            self._since = time.perf_counter()
        rate = self._rate_at(step)
        if rate != self._rate_set:
            for group in self._optimizer.param_groups:
                group["lr"].fill_(group["share"] * rate)
            self._rate_set = rate
        self._drop_state(step)
        batch = self._batches.take()
        if self._stream is None:
            self._update(*batch)
        else:
            event = self._in_flight[step % MOST_IN_FLIGHT]
            event.synchronize()
            self._update(
                *(tensor.pin_memory() for tensor in batch)
            )  # a copy from memory that is not pinned waits for the device
            event.record(self._stream)
        self._unread += 1

    def have_room(self, step: int) -> bool:
        return self._stream is None or self._in_flight[step % MOST_IN_FLIGHT].query()

    def _update_eagerly(self, *sent: Tensor) -> None:
        """One update, in which nothing waits for the device."""
        there = tuple(tensor.to(self._device, non_blocking=True) for tensor in sent)
        kept = None
        if self._config.training.dropout > 0:
            *there, kept = there
        inputs, targets = self._config.task.receive(tuple(there), "train", self._config.training.dtype)
        found = torch.stack(self._descend(inputs, targets, kept))
        self._found.index_copy_(0, self._place, found.double().unsqueeze(0))
        self._place.add_(1)
        is_broken = ~torch.isfinite(found).all()
        self._broken_in_a_row.add_(1).mul_(is_broken)
        self._is_over.logical_or_(self._broken_in_a_row >= self._most_broken)
        self._broken.copy_(is_broken | self._is_over)
        self._optimizer.step()

    def wants_reading(self) -> bool:
        if distributed.count() > 1:  # all read at the same time, since one that finds trouble makes no further update
            return self._unread == MOST_UNREAD_TOGETHER
        return self._unread == MOST_UNREAD or time.perf_counter() - self._since > SECONDS_UNREAD

    def read(self, state: TrainingState) -> str | None:
        if self._unread == 0:
            return None
        found = self._found[: self._unread].tolist()
        seconds = (time.perf_counter() - self._since) / self._unread
        self._unread = 0
        self._place.zero_()
        for loss, norm in found:
            trouble = self._count(state, seconds, loss, norm)
            if trouble is not None:
                return trouble
        return None

    def close(self) -> None:
        self._batches.close()
        if self._stream is not None:
            self._stream.synchronize()
        if isinstance(self._update, Graphs):
            self._update.clear()


def build_updates(
    config: RunConfig,
    model: SequenceModel,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    stream: torch.cuda.Stream | None,
) -> Updates:
    """The updates of a run: on a GPU, which is where there is a stream, as CUDA graphs if that is asked for.

    A state that is carried is made anew in every update, so a graph would not find it.
    """
    if stream is None:
        return HostUpdates(config, model, optimizer, state)
    is_captured = config.training.cuda_graph and distributed.count() == 1 and not config.task.carries_state
    capture = CudaCapture(stream) if is_captured else None
    return DeviceUpdates(config, model, optimizer, state, stream, capture)


def build_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> torch.optim.Adam:
    """Adam for `HostUpdates` or, on a GPU, for `DeviceUpdates`."""
    if device.type == "cpu":
        return torch.optim.Adam(_parameter_groups(config, model), lr=config.lr, **_decay(config))
    return build_capturable_optimizer(config, model, device)


def build_capturable_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> torch.optim.Adam:
    """Adam in one kernel per group, with its state on the device, so that it can be part of a CUDA graph."""
    groups = _parameter_groups(config, model)
    for group in groups:
        group["lr"] = torch.tensor(group["share"] * config.lr, dtype=torch.float32, device=device)
    adam = torch.optim.Adam(groups, fused=True, capturable=True, **_decay(config))
    adam._warned_capturable_if_run_uncaptured = True  # pyright: ignore[reportAttributeAccessIssue]  # it is both
    return adam


def _decay(config: TrainConfig) -> dict[str, Any]:
    return {"weight_decay": config.weight_decay, "decoupled_weight_decay": config.weight_decay > 0}


def _parameter_groups(config: TrainConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters grouped by their share of the learning rate: one group unless the memory has its own rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_memory = name.rpartition(".")[2].startswith(MEMORY_PARAMETERS)
        groups.setdefault(config.memory_lr if is_memory else 1.0, []).append(parameter)
    return [{"params": parameters, "share": share} for share, parameters in groups.items()]
