"""Prefetched batches, so that a GPU does not wait for them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sab.lab.tasks.base import generator_for
from sab.lab.training.run import RunConfig

DROPOUT = 2**62
"""The first number that dropout's random numbers are drawn with; those of batches and epochs are far below."""
PREFETCHED = 4
"""How many batches are prefetched."""
Batch = tuple[Tensor, ...]
"""What a task sends to the device for a batch and, where units are dropped, which of them are kept."""


class Batches:
    """What `Task.send` gives for the training batches of a run, in order, prefetched by a thread.

    `Task.receive` turns it into the batches of `Task.batch`, since each depends on its number alone.
    """

    def __init__(self, config: RunConfig, first: int):
        self._config = config
        self._last = config.training.iterations
        self._next = first
        self._drawn: deque[Future[Batch]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sab-batches")

    def take(self) -> Batch:
        """The next batch."""
        while len(self._drawn) <= PREFETCHED and self._next < self._last:
            self._drawn.append(self._thread.submit(self._draw, self._next))
            self._next += 1
        return self._drawn.popleft().result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _draw(self, index: int) -> Batch:
        training = self._config.training
        sent = self._config.task.send(training.seed, index, training.batch_size, "train", training.dtype)
        kept = kept_units(self._config, index)
        return sent if kept is None else (*sent, kept)


def kept_units(config: RunConfig, step: int) -> Tensor | None:
    """Factors of each sequence's hidden units for the readout, [B, n], 0 for dropped ones; None without dropout.

    They depend on the seed and the step alone, like the batch, so a resumed run drops the same units.
    """
    training = config.training
    if training.dropout == 0:
        return None
    drawn = torch.rand(
        training.batch_size, config.model.hidden_size, generator=generator_for(training.seed, "train", DROPOUT + step)
    )
    return (drawn >= training.dropout) / (1 - training.dropout)
