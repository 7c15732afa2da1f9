"""Images, a pixel a step: the last step predicts the class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sab.lab.tasks.stored import StoredTask


@dataclass(frozen=True)
class ImageTask(StoredTask):
    """Stored images [N, steps, input_size] of bytes, which the model sees as numbers from 0 to 1, with a class each."""

    encoding = "vector"

    def assemble(self, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return inputs.transpose(0, 1).to(dtype).div(255), targets.long()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[-1], targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {
            "accuracy": (outputs[-1].argmax(-1) == targets).double().mean(),
            "cross_entropy": self.loss(outputs, targets),
        }
