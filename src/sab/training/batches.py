"""Batches drawn ahead, so that a GPU does not wait for them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from sab.training.run import RunConfig

AHEAD = 4
"""How many batches are drawn before they are asked for."""
Batch = tuple[Tensor, ...]
"""What a task sends to the device for a batch."""


class Batches:
    """What a task sends for the training batches of a run, in order, made by a thread that is a few of them ahead.

    `Task.receive` makes of them what `Task.batch` gives anywhere else, since each depends on its number alone.
    """

    def __init__(self, config: RunConfig, first: int):
        training = config.training
        self._last = training.iterations
        self._draw = lambda index: config.task.send(training.seed, index, training.batch_size, "train", training.dtype)
        self._next = first
        self._drawn: deque[Future[Batch]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sab-batches")

    def take(self) -> Batch:
        """The next batch."""
        while len(self._drawn) <= AHEAD and self._next < self._last:
            self._drawn.append(self._thread.submit(self._draw, self._next))
            self._next += 1
        return self._drawn.popleft().result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)
