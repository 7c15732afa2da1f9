"""The choice of backend: `auto` takes the first that supports a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops import reference
from sab.ops.types import LayerResult, LayerState, LayerWeights


class Backend(NamedTuple):
    """One implementation of the operation."""

    run: Callable[[Tensor, Tensor | None, LayerState, LayerWeights, str, SABConfig], LayerResult]


BACKENDS: dict[str, Backend] = {"reference": Backend(reference.run)}
"""By name, fastest first."""


@torch.compiler.disable(reason="the loop over time is unrolled otherwise, which takes minutes to compile")
def recurrence(
    x: Tensor, lengths: Tensor | None, state: LayerState, weights: LayerWeights, cell_name: str, config: SABConfig
) -> LayerResult:
    """Run one layer in one direction over a sequence with the backend that the configuration asks for."""
    name = next(iter(BACKENDS)) if config.backend == "auto" else config.backend
    return BACKENDS[name].run(x, lengths, state, weights, cell_name, config)
