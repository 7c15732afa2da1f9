"""Sequences of different lengths with one label each, which the last step of a sequence predicts.

All sequences of a task are padded to the same length, so that the shapes of batches never change and a CUDA graph of a
training step serves all of them. The padding comes after a sequence, and the model reads forwards: its output at the
sequence's own last step is that of the sequence alone. Loss and metrics read the outputs there, so nothing that
follows has a part in them or in their gradients, and the model need not know the lengths. The steps of the padding are
computed all the same: a state that overflows there makes the gradients NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sab.lab.tasks.base import Headline
from sab.lab.tasks.stored import StoredTask


def accuracy_headline(solved: float, chance: float) -> Headline:
    """The headline metric of a task with labels."""
    return Headline(
        metric="accuracy",
        label="accuracy",
        short="accuracy",
        higher_is_better=True,
        solved=solved,
        chance=chance,
        spec=".1%",
    )


@dataclass(frozen=True)
class LabelledTask(StoredTask):
    """Stored sequences with a label each; the targets of a batch are [2, B]: the labels, and the lengths."""

    @abstractmethod
    def encode(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The model's inputs, time first, for rows [B, steps] of the examples."""

    def assemble(self, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.encode(inputs, dtype), targets.t().long()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        labels, lengths = targets
        return F.cross_entropy(last_real(outputs, lengths), labels)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        labels, lengths = targets
        last = last_real(outputs, lengths)
        return {
            "accuracy": (last.argmax(-1) == labels).double().mean(),
            "cross_entropy": F.cross_entropy(last, labels),
        }


def last_real(outputs: Tensor, lengths: Tensor) -> Tensor:
    """The outputs [B, output_size] at the last step of each sequence, of outputs [T, B, output_size]."""
    places = (lengths - 1).view(1, -1, 1).expand(1, -1, outputs.shape[-1])
    return outputs.gather(0, places).squeeze(0)


def padded(rows: Sequence[np.ndarray], steps: int, dtype: type[Any]) -> Tensor:
    """The rows with zeros after them, [N, steps]."""
    filled = np.zeros((len(rows), steps), dtype)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return torch.from_numpy(filled)


def labels_and_lengths(labels: Sequence[int] | np.ndarray, rows: Sequence[Any]) -> Tensor:
    """The targets [N, 2] of all examples."""
    return torch.stack([torch.as_tensor(labels), torch.tensor([len(row) for row in rows])], dim=1)
