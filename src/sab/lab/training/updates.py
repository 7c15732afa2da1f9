"""Updates of a model's weights: batch, forward, backward, clip, Adam.

On the CPU each one is looked at before the next. On a GPU to look is to wait, so there nothing is looked at until
somebody asks: losses and gradient norms gather on the device, and so does the knowledge that one was not finite, which
keeps Adam from that update and, unless it is to be skipped, from every one from there on. Either way a run that breaks
has the weights from before it did.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sab.lab.training import distributed
from sab.lab.training.batches import Batches, kept_units
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.config import TrainConfig
from sab.lab.training.evaluation import predict
from sab.lab.training.graph import Capture, Graphs
from sab.lab.training.run import RunConfig

SECONDS_UNREAD = 0.1
"""How long a GPU goes on before somebody looks at what it did."""
MOST_UNREAD = 1024
"""How many updates it makes in that time at most."""
MOST_UNREAD_TOGETHER = 16
"""The same where several processes make a run."""
MOST_ON_THEIR_WAY = 8
"""How many updates the host may be ahead of the device, which has to be able to stop."""
MEMORY_PARAMETERS = ("attn_", "incorporate_")
"""How the names of a layer's parameters begin that belong to its memory and not to its cell."""
MOST_SKIPPED = 100
"""How many iterations in a row may have a loss or gradient that is not finite where such are skipped."""


class Updates(ABC):
    """Makes one update after the other, and tells about them when it is asked to."""

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState):
        self._config, self._model, self._optimizer = config, model, optimizer
        self._lr_factor = state.lr_factor
        self._most_broken = MOST_SKIPPED if config.training.on_nan == "skip" else 1
        self.loss = math.nan
        """The loss of the last update that was read."""

    @abstractmethod
    def make(self, step: int) -> None:
        """The update number `step`, from 0."""

    def have_room(self, step: int) -> bool:
        """Whether `make(step)` would not have to wait for the device."""
        return True

    @abstractmethod
    def wants_reading(self) -> bool:
        """Whether it is time to read, although nobody needs the numbers."""

    @abstractmethod
    def read(self, state: TrainingState) -> str | None:
        """Counts the updates since the last reading in `state`; tells which number was not finite, if one was.

        No update counts, or was made, from there on. One that was skipped is counted as such and not told of.
        """

    def close(self) -> None:  # noqa: B027
        """Gives back what is held outside of Python's memory."""

    def _descend(self, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss, and the norm of the gradient that the parameters then have, clipped."""
        kept = None if kept is None else distributed.rows_of(kept)
        inputs, targets, fraction = distributed.part_of(inputs, targets)
        loss = self._config.task.loss(predict(self._model, inputs, self._config.training, kept), targets)
        loss = loss if fraction == 1 else fraction * loss
        self._optimizer.zero_grad()
        loss.backward()
        loss = distributed.add_up((parameter.grad for parameter in self._model.parameters()), loss.detach())
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.training.clip or math.inf)
        return loss, norm

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

    def __init__(self, config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState):
        super().__init__(config, model, optimizer, state)
        self._unread: _Made | None = None

    def make(self, step: int) -> None:
        training = self._config.training
        started = time.perf_counter()
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
    """Updates on a GPU, on a stream of their own, of which the host never waits for a single one.

    `capture` makes them CUDA graphs; None runs them kernel by kernel, with the same result.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
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
        # As gradient scaling has it: Adam leaves everything as it is while this is 1.
        self._broken = optimizer.found_inf = torch.zeros((), device=self._device)  # pyright: ignore[reportAttributeAccessIssue]
        self._broken_in_a_row = torch.tensor(state.skipped_in_a_row, device=self._device)
        self._is_over = torch.zeros((), dtype=torch.bool, device=self._device)
        self._update = Graphs(self._eagerly, self._device, capture) if capture is not None else self._eagerly
        self._on_their_way = [torch.cuda.Event(blocking=True) for _ in range(MOST_ON_THEIR_WAY if stream else 0)]
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
        batch = self._batches.take()
        if self._stream is None:
            self._update(*batch)
        else:
            event = self._on_their_way[step % MOST_ON_THEIR_WAY]
            event.synchronize()
            self._update(*(tensor.pin_memory() for tensor in batch))  # a copy from elsewhere waits for the device
            event.record(self._stream)
        self._unread += 1

    def have_room(self, step: int) -> bool:
        return self._stream is None or self._on_their_way[step % MOST_ON_THEIR_WAY].query()

    def _eagerly(self, *sent: Tensor) -> None:
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
        if distributed.count() > 1:  # all look at the same time, since who finds trouble makes no further update
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


def build_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> torch.optim.Adam:
    """Adam, as `HostUpdates` or, on a GPU, `DeviceUpdates` want it."""
    if device.type == "cpu":
        return torch.optim.Adam(_parameter_groups(config, model), lr=config.lr, **_decay(config))
    return build_capturable_optimizer(config, model, device)


def build_capturable_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> torch.optim.Adam:
    """Adam in one kernel for each group, with all it depends on there, so that it can be part of a CUDA graph."""
    groups = _parameter_groups(config, model)
    for group in groups:
        group["lr"] = torch.tensor(group["share"] * config.lr, dtype=torch.float32, device=device)
    adam = torch.optim.Adam(groups, fused=True, capturable=True, **_decay(config))
    adam._warned_capturable_if_run_uncaptured = True  # pyright: ignore[reportAttributeAccessIssue]  # it is both
    return adam


def _decay(config: TrainConfig) -> dict[str, Any]:
    return {"weight_decay": config.weight_decay, "decoupled_weight_decay": config.weight_decay > 0}


def _parameter_groups(config: TrainConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters by the share of the learning rate that they have: one group unless the memory has its own."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_memorys = name.rpartition(".")[2].startswith(MEMORY_PARAMETERS)
        groups.setdefault(config.memory_lr if is_memorys else 1.0, []).append(parameter)
    return [{"params": parameters, "share": share} for share, parameters in groups.items()]
