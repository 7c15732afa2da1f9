"""The choice of backend: `auto` takes the fastest that supports a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.errors import ValueMistake
from sab.ops import cpu, reference
from sab.ops.types import LayerResult, LayerState, LayerWeights

logger = logging.getLogger("sab")


class Backend(NamedTuple):
    """One implementation of the operation."""

    run: Callable[[Tensor, Tensor | None, LayerState, LayerWeights, str, SABConfig], LayerResult]
    unsupported: Callable[[Tensor, LayerState, LayerWeights, str, SABConfig], str | None]
    """Why it cannot run a configuration, or None where it can."""


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(cpu.run, cpu.unsupported),
    "reference": Backend(reference.run, lambda *arguments: None),
}
"""By name, fastest first; the last one can do everything."""


@torch.compiler.disable(reason="the loop over time is unrolled otherwise, which takes minutes to compile")
def recurrence(
    x: Tensor, lengths: Tensor | None, state: LayerState, weights: LayerWeights, cell_name: str, config: SABConfig
) -> LayerResult:
    """Run one layer in one direction over a sequence with the backend that the configuration asks for."""
    return _choose(x, state, weights, cell_name, config).run(x, lengths, state, weights, cell_name, config)


def _choose(x: Tensor, state: LayerState, weights: LayerWeights, cell_name: str, config: SABConfig) -> Backend:
    if config.backend != "auto":
        reason = BACKENDS[config.backend].unsupported(x, state, weights, cell_name, config)
        if reason is not None:
            raise ValueMistake(
                f"backend must be auto or one that supports this call; {config.backend!r} does not: {reason}.",
                "backend",
            )
        return BACKENDS[config.backend]
    for name, backend in BACKENDS.items():
        reason = backend.unsupported(x, state, weights, cell_name, config)
        if reason is None:
            return backend
        _log_once(f"backend {name} is passed over: {reason}")
    raise AssertionError("the reference backend supports everything")


@cache
def _log_once(line: str) -> None:
    logger.info(line)
