"""What the models of other papers share: their sizes, their state, and how a package is loaded."""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sab.extras import require


class Sizes(NamedTuple):
    """What a rival is made from."""

    cell: str
    input_size: int
    hidden_size: int
    num_layers: int
    steps: int
    """Length of the training sequences."""
    window: int | None = None
    """k_trunc, where the method has windows."""


Parts = tuple[Tensor, ...]
"""What a model carries from step to step: tensors whose first dimension is the batch."""


@dataclass(frozen=True)
class RivalState:
    """Where a stream is: what a model has to know of the past; without parts at the beginning."""

    parts: Parts | None = None
    grows: bool = False
    """Whether the parts have a place for every past step, in the last dimension but one."""

    def recent(self, count: int) -> RivalState:
        """The state with the latest `count` steps alone, where it has a place for each."""
        if self.parts is None or not self.grows:
            return self
        kept = tuple(part[..., max(part.shape[-2] - count, 0) :, :] for part in self.parts)
        return replace(self, parts=kept)

    def select(self, rows: Sequence[int]) -> RivalState:
        """The state of these rows of the batch."""
        return self if self.parts is None else replace(self, parts=tuple(part[list(rows)] for part in self.parts))


class Backbone(nn.Module, ABC):
    """An embedding of the inputs, blocks, and a norm of the last one; time first outside, batch first inside."""

    def __init__(self, sizes: Sizes, blocks: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.embed = nn.Linear(sizes.input_size, sizes.hidden_size)
        self.blocks = blocks
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Tensor, state: RivalState | None = None) -> tuple[Tensor, RivalState | None]:
        """Hidden states [T, B, w] of inputs [T, B, d]; with a state also the next one, else None in its place."""
        inside, parts = self.embed(x).transpose(0, 1), None
        if state is None:
            inside = self.whole(inside)
        else:
            inside, parts = self.stream(inside, state.parts)
        hidden = self.norm(inside).transpose(0, 1)
        return hidden, None if state is None else replace(state, parts=parts)

    @abstractmethod
    def whole(self, x: Tensor) -> Tensor:
        """The blocks' outputs for a whole sequence [B, T, w]."""

    @abstractmethod
    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        """The blocks' outputs for the next steps of a stream, and what to carry on."""


def load(module: str) -> Any:
    """A module of an optional package; a sentence tells which extra is missing."""
    require(module.partition(".")[0])
    # on the CPU even while a model is built on `meta` to count its parameters: a package may make constants when it is
    # imported
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")  # of the package's own use of torch
        return importlib.import_module(module)


def step_by_step(x: Tensor, step: Any, carried: Any) -> tuple[Tensor, Any]:
    """Outputs [B, T, w] of `step`, from (x [B, 1, w], carried) to (y [B, 1, w], carried), and what it carries last."""
    outputs: list[Tensor] = []
    for t in range(x.shape[1]):
        y, carried = step(x[:, t : t + 1], carried)
        outputs.append(y)
    return torch.cat(outputs, 1), carried
