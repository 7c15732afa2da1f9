"""Tasks with stored examples: a batch is a selection of them, and every epoch visits all in a new order.

The examples are on the model's device. The host sends only their numbers, or where they begin, so a CUDA graph of a
training step gathers the batch from the examples itself.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sab.errors import UserValueError
from sab.lab.tasks.base import SPLITS, Split, Task, generator_for


@dataclass(frozen=True)
class StoredTask(Task):
    """A task whose data come from files; subclasses name the data set and turn its examples into batches."""

    data_dir: Path | None = field(default=None, compare=False, kw_only=True)
    """Folder of the data sets; None means that of the environment variable SAB_DATA or, without one, the user's
    cache."""

    @property
    @abstractmethod
    def dataset(self) -> str:
        """The name of the data set, the label of its figures."""

    @property
    def title(self) -> str:
        return self.dataset

    @abstractmethod
    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all examples, an example a row, on the CPU and in as few bytes as they need."""

    @abstractmethod
    def assemble(self, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A batch, time first, of these rows of the examples; it must not wait for the device."""

    def examples_on(self, split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
        """The examples on a device, where they are cached."""
        return _examples_on(self, split, device)

    def count(self, split: Split) -> int:
        """How many examples there are."""
        return len(self.examples_on(split, torch.device("cpu"))[1])

    def batches_per_epoch(self, batch_size: int) -> int:
        """Training batches per epoch; an incomplete last batch is left out."""
        return self.count("train") // batch_size

    def check_data(self, batch_size: int) -> None:
        for split in SPLITS:
            self.count(split)
        self._check_batch_size(batch_size, "train")

    def _check_batch_size(self, batch_size: int, split: Split) -> int:
        count = self.count(split)
        if batch_size > count:
            limit = f"the number of {split} sequences in {self.dataset}"
            raise UserValueError(f"batch_size must be at most {count}, {limit}; got {batch_size}.", "batch_size")
        return count

    def send(self, seed: int, index: int, batch_size: int, split: Split, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The numbers of the batch's examples."""
        count = self._check_batch_size(batch_size, split)
        epoch, place = divmod(index, count // batch_size)
        return (_order(seed, split, epoch, count)[place * batch_size : (place + 1) * batch_size],)

    def receive(self, sent: tuple[Tensor, ...], split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        (rows,) = sent
        inputs, targets = self.examples_on(split, rows.device)
        return self.assemble(inputs[rows], targets[rows], dtype)

    def whole(
        self, split: Split, batch_size: int, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All of a split in its own order, each example once; the last batch may be smaller."""
        inputs, targets = self.examples_on(split, device)
        for start in range(0, len(targets), batch_size):
            rows = slice(start, start + batch_size)
            yield self.assemble(inputs[rows], targets[rows], dtype)


@functools.lru_cache(maxsize=16)
def _order(seed: int, split: Split, epoch: int, count: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=generator_for(seed, split, epoch))


@functools.lru_cache(maxsize=16)
def _examples_on(task: StoredTask, split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """The examples of a split on a device, once for all runs there."""
    inputs, targets = (tensor.to(device) for tensor in task.examples(split))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other runs, on streams of their own, will read them
    return inputs, targets


def forget_examples() -> None:
    """Frees all cached examples, on every device."""
    _examples_on.cache_clear()
