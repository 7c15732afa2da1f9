"""The base of all tasks: data for (seed, split, index), a loss, metrics, and the headline metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sab.errors import UserValueError, check_choice, check_int

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Headline:
    """The one metric that a task is judged by."""

    metric: str
    """Its name among the task's metrics."""
    label: str
    """Its name in tables and on axes."""
    short: str
    """A shorter name."""
    higher_is_better: bool
    solved: float
    """The value at which the task counts as solved."""
    chance: float
    """The value of a model that learned only the distribution of the answers."""
    spec: str
    """How a value is shown, as a format specification."""

    def reaches(self, value: float, threshold: float) -> bool:
        """Whether `value` is at least as good as `threshold`."""
        return value >= threshold if self.higher_is_better else value <= threshold

    def show(self, value: float) -> str:
        return format(value, self.spec)


class Task(ABC):
    """A supervised sequence problem; subclasses are frozen dataclasses whose fields are the task's options.

    The command line is made from those fields: their docstrings are its help, `__post_init__` its validation. A field
    with `compare=False` changes nothing that is computed, and no run stores it. The two kinds of tasks are `DrawnTask`
    and `StoredTask`.
    """

    name: ClassVar[str]
    """Its name in the registry and on the command line."""
    summary: ClassVar[str]
    """One line for `sab tasks`."""
    headline: ClassVar[Headline]
    recipe: ClassVar[Mapping[str, Any]]
    """Defaults of the model and of training that this task changes."""

    encoding: str
    """How the model encodes the inputs: `onehot`, `scalar` or `vector`."""
    input_size: ClassVar[int]
    output_size: ClassVar[int]

    @property
    @abstractmethod
    def steps(self) -> int:
        """Length of the sequences."""

    @property
    def attending_steps(self) -> range:
        """The steps, counted from 1, whose attention is of interest."""
        return range(1, self.steps + 1)

    @property
    def title(self) -> str:
        """The label of its figures."""
        return self.name

    @property
    def label(self) -> str:
        """Name and options, as part of a folder's name."""
        shown = [field for field in self._fields() if not self._is_left_out(field)]
        return "-".join([self.name, *map(self._show, shown)])

    def _is_left_out(self, field: Field[Any]) -> bool:
        """Whether a label leaves out an option: a word, a switch or one that needs its name, at its default."""
        value = getattr(self, field.name)
        return (isinstance(value, str | bool) or field.kw_only) and value == field.default

    def _show(self, field: Field[Any]) -> str:
        value = getattr(self, field.name)
        return field.name if value is True else f"{field.name}{value}" if field.kw_only else str(value)

    def _fields(self) -> list[Field[Any]]:
        return [field for field in fields(self) if field.compare]  # pyright: ignore[reportArgumentType]

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in self._fields()}

    def check_data(self, batch_size: int) -> None:  # noqa: B027
        """Raises an error if there are no data for batches of this size; called before training."""

    @property
    def carries_state(self) -> bool:
        """Whether a model in training carries its state from one batch to the next."""
        return False

    def continues(self, index: int, batch_size: int) -> bool:
        """Whether the sequences of a training batch begin with the state at the end of those of the batch before."""
        return False

    @abstractmethod
    def send(self, seed: int, index: int, batch_size: int, split: Split, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What the host sends to the device for a batch: the batch, or the numbers of its examples."""

    @abstractmethod
    def receive(self, sent: tuple[Tensor, ...], split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The batch, from what was sent, now on the device; it must not wait for the device."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss of the model's outputs [steps, batch_size, output_size]."""

    @abstractmethod
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The metrics of an evaluation: scalars, means over the batch."""

    def batch(
        self,
        seed: int,
        index: int,
        batch_size: int,
        split: Split = "train",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Batch number `index` of `split`: it depends on (seed, split, index) alone, so resuming needs no data state.

        `dtype` is the type of the numbers in it; symbols stay int64.
        """
        check_int("seed", seed, 0)
        check_int("index", index, 0)
        check_int("batch_size", batch_size, 1)
        check_choice("split", split, SPLITS)
        sent = self.send(seed, index, batch_size, split, dtype)
        return self.receive(tuple(tensor.to(device) for tensor in sent), split, dtype)


class DrawnTask(Task):
    """A task with unlimited data: every batch is drawn when it is needed."""

    @abstractmethod
    def draw(self, generator: torch.Generator, batch_size: int, split: Split) -> tuple[Tensor, Tensor]:
        """Inputs [steps, batch_size] or [steps, batch_size, input_size] and their targets, on the CPU.

        Batches of the training split may have fewer steps.
        """

    def send(self, seed: int, index: int, batch_size: int, split: Split, dtype: torch.dtype) -> tuple[Tensor, ...]:
        drawn = self.draw(generator_for(seed, split, index), batch_size, split)
        for what, tensor in zip(("inputs", "targets"), drawn, strict=True):
            if tensor.is_floating_point() and not all(map(torch.isfinite, tensor.aminmax())):  # NaN propagates to both
                raise UserValueError(f"{what} of task {self.name} must be finite; {split} batch {index} is not.")
        return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in drawn)

    def receive(self, sent: tuple[Tensor, ...], split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs, targets = sent
        return inputs, targets


def generator_for(seed: int, split: Split, number: int) -> torch.Generator:
    """Random numbers for a batch or an epoch, which depend on these three alone."""
    # Hashed, and not added up: neighbouring seeds must not share batches. Of the 64 bits torch's CPU generator uses
    # the lower 32, so every one of them has to depend on all three numbers.
    mixed = np.random.SeedSequence((seed, SPLITS.index(split), number)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))
