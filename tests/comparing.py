"""Comparing two computations of one thing on a machine that nobody has seen.

Another order of additions changes the last digits, and where two scores are within rounding of each other it also
changes which microstate is selected, and with it every later number and gradient. Tests that run a layer in two ways
therefore compare where selections are certain: `selects_surely` tells whether the scores that compete for a place are
further apart than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sab.ops import reference
from tests.ops.cases import randomize

APART = {torch.float64: 1e-5, torch.float32: 1e-3}
"""How far apart scores of a type must be, relative to their size where that is above 1.

Far above rounding: `relu_norm` divides by the distance of scores, which multiplies their rounding errors."""


@dataclass
class Distances:
    """The smallest distance of competing scores in the selections of the reference."""

    smallest: float = torch.inf
    of_selections: list[Tensor] = field(default_factory=list)
    """For each selection, [B]; infinite where nothing competes."""

    def certain(self, dtype: torch.dtype = torch.float64) -> bool:
        return self.smallest > APART[dtype]

    def add(self, scores: Tensor, numbers: Tensor, k: int) -> None:
        """Note the distances between the k highest scores of each row, and to the highest that is not selected."""
        highest = scores.detach().masked_fill(numbers < 0, -torch.inf).sort(dim=1, descending=True).values[:, : k + 1]
        apart = (highest[:, :-1] - highest[:, 1:]) / highest[:, :-1].abs().clamp(min=1.0)
        apart = apart.nan_to_num(nan=torch.inf)  # of two slots that hold no microstate
        smallest = apart.amin(1) if apart.shape[1] > 0 else apart.new_full((len(apart),), torch.inf)
        self.of_selections.append(smallest)
        self.smallest = min(self.smallest, smallest.min().item())


@contextmanager
def distances_of_scores() -> Iterator[Distances]:
    """Watch the selections that the reference backend makes in this context."""
    distances, select = Distances(), reference._select

    def watched(scores: Tensor, numbers: Tensor, k: int) -> Tensor:
        distances.add(scores, numbers, k)
        return select(scores, numbers, k)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "_select", watched)
        yield distances


def selects_surely(layer: Any, x: Tensor, *arguments: Any, **options: Any) -> bool:
    """Whether `layer(x, ...)` selects the same microstates in every arithmetic of its type."""
    configured = layer.config
    layer.config = replace(configured, backend="reference")
    try:
        with torch.no_grad(), distances_of_scores() as distances:
            layer(x, *arguments, **options)
    finally:
        layer.config = configured
    return distances.certain(x.dtype)


def randomize_surely(layer: Any, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """Draw all parameters of the layer with the first seed with which `layer(x, ...)` selects surely."""
    return next(layer for seed in range(100) if selects_surely(randomize(layer, seed), x, *arguments, **options))
