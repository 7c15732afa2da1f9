"""The choice of backend: `auto` takes the fastest that supports a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab import torch_private
from sab.config import SABConfig
from sab.errors import SlowBackendWarning, UserValueError
from sab.ops import ragged, recompute, reference
from sab.ops.cpu import engine as cpu
from sab.ops.cpu import loader
from sab.ops.engines import engine_named
from sab.ops.types import LayerResult, LayerState, LayerWeights


class Backend(NamedTuple):
    """One implementation of the operation."""

    run: Callable[[Tensor, Tensor | None, LayerState | None, LayerWeights, str, SABConfig], LayerResult]
    unsupported: Callable[[Tensor, LayerState | None, LayerWeights, str, SABConfig], str | None]
    """Why it cannot run a configuration, or None where it can."""


def _triton_unsupported(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> str | None:
    # Interpreted kernels are for tests: `auto` never takes them.
    is_interpreted = config.backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if x.device.type != "cuda" and not is_interpreted:
        return f"the input is on {x.device.type}"
    reason = triton_unavailable()
    if reason is not None:
        return reason
    return engine_named("triton").unsupported(x, state, weights, cell_name, config)


@torch_private.constant_result
def triton_unavailable() -> str | None:
    """Why there are no Triton kernels, or None where there are."""
    return _triton_unavailable()


@cache
def _triton_unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        engine_named("triton")
    except ImportError as error:
        return f"its kernels cannot be imported: {error}"
    return None


# torch's compiler would unroll the loop over time, which takes minutes.
_uncompiled_reference: Any = torch_private.uncompiled(reference.run)


def _run_reference(*arguments: Any) -> LayerResult:
    return (_uncompiled_reference if torch_private.is_compiler_loaded() else reference.run)(*arguments)


BACKENDS: dict[str, Backend] = {
    "triton": Backend(partial(recompute.run, "triton"), _triton_unsupported),
    "cpu": Backend(partial(recompute.run, "cpu"), cpu.unsupported),
    "reference": Backend(_run_reference, lambda *arguments: None),
}
"""By name, fastest first; the last one can do everything."""
SLOW = "reference"
_OF_DEVICE = {"cuda": "triton", "cpu": "cpu"}
"""The fast backend of a type of device."""
TWICE = (
    "the derivative that torch.func takes may be differentiated once more, since parameters or inputs require a "
    "gradient outside of it; under torch.no_grad(), or with detached parameters, the call is fast"
)
"""Why a call is slow that only might need the reference's second derivatives."""
_warned: set[str] = set()
"""Why calls were slow, as far as it has been said."""
_NOT_THE_CALLER = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
"""Where the files are that stand between a call of a layer and this file."""


def recurrence(
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """Run one layer in one direction over a sequence with the backend that the configuration asks for.

    None for a state is a fresh one: zeros and an empty memory.
    """
    groups = _groups(x, state, weights, cell_name, config)
    if groups is not None:

        def run_group(x: Tensor, lengths: Tensor | None, state: LayerState, weights: LayerWeights) -> LayerResult:
            return recurrence(x, lengths, state, weights, cell_name, config)

        return ragged.run(run_group, groups, x, lengths, weights)
    name, reason = _choose(x, state, weights, cell_name, config)
    if name == SLOW and torch.compiler.is_exporting():
        reasons = [f"{one}: {why}" for one, why in _refusals(x, state, weights, cell_name, config).items()]
        raise UserValueError(
            f"backend must be one that torch.export can record, which reference is not ({'; '.join(reasons)}).",
            "backend",
        )
    if reason is not None and not torch.compiler.is_compiling() and reason not in _warned:
        _warn(reason)
    if x.shape[1] == 0:
        return _without_rows(x, lengths, state, weights, cell_name, config)
    return BACKENDS[name].run(x, lengths, state, weights, cell_name, config)


def _without_rows(
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """The result for a batch of no rows, on every backend: empty, and with zeros as the gradients of all weights."""
    result = _run_reference(x, lengths, state, weights, cell_name, config)
    found = (weight for weight in (*weights[:4], *weights.scorer, *weights[5:]) if weight is not None)
    return result._replace(output=result.output + 0 * sum(weight.sum() for weight in found))


def choose(x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig) -> str:
    """The name of the backend that runs a call."""
    if _groups(x, state, weights, cell_name, config) is not None:
        state = _as_if_alike(state)
    return _choose(x, state, weights, cell_name, config)[0]


def _groups(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> list[ragged.Group] | None:
    """The rows of a state by the steps that they have seen, where a fast backend runs each group; otherwise None."""
    if state is None or state.seen is not None or x.shape[1] == 0 or torch_private.are_transforms_active():
        return None
    # What is recorded must not depend on the numbers of steps; neither may a CUDA graph wait for the device.
    is_recorded = torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch_private.is_jit_tracing()
    if is_recorded or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    name, _ = _choose(x, _as_if_alike(state), weights, cell_name, config)
    return None if name == SLOW else ragged.split(state, x.shape[0])


def _as_if_alike(state: LayerState | None) -> LayerState | None:
    """A state for the choice of a backend alone, as if its rows had seen equally many steps."""
    return None if state is None else state._replace(seen=0)


def _choose(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> tuple[str, str | None]:
    """The name of the backend that runs a call, and why it is the slow one where `auto` found no other."""
    if config.backend != "auto":
        reason = BACKENDS[config.backend].unsupported(x, state, weights, cell_name, config)
        if reason is not None:
            raise UserValueError(
                f"backend must be auto or one that supports this call; {config.backend!r} does not: {reason}.",
                "backend",
            )
        return config.backend, None
    reasons = {}
    for name, backend in BACKENDS.items():
        reasons[name] = backend.unsupported(x, state, weights, cell_name, config)
        if reasons[name] is None and name != SLOW:
            tensors = (x, *(state or ())[:4], *weights[:4], *weights.scorer, *weights[5:])
            return (SLOW, TWICE) if torch_private.records_outside_grad(tensors) else (name, None)
    device = x.device.type
    return SLOW, reasons.get(_OF_DEVICE.get(device, ""), f"no fast backend runs on the device {device}")


def _warn(reason: str) -> None:
    """Say why a call is slow, once for each reason, at the line of the caller."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"a SAB layer runs on the reference backend, many times slower than a compiled one: {reason}. "
        "backend='reference' asks for it without this warning.",
        SlowBackendWarning,
        stacklevel=level,
    )
    _warned.add(reason)  # not where the warning is an error


def _refusals(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> dict[str, str]:
    """Why backends cannot run a call, by their names."""
    found = {name: one.unsupported(x, state, weights, cell_name, config) for name, one in BACKENDS.items()}
    return {name: reason for name, reason in found.items() if reason is not None}


def here() -> dict[str, tuple[bool, str]]:
    """For each backend whether it can be used on this machine, and on what, or why not."""
    return {"triton": _triton_here(), "cpu": _cpu_here(), "reference": (True, "always, on every device")}


def _triton_here() -> tuple[bool, str]:
    reason = triton_unavailable()
    if reason is not None:
        return False, reason
    version = f"triton {importlib.import_module('triton').__version__}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, f"{version}, interpreted on the CPU, where it is asked for by name"
    if not torch.cuda.is_available():
        return False, f"{version}, but there is no CUDA device"
    return True, f"{version} on {torch.cuda.get_device_name()}"


def _cpu_here() -> tuple[bool, str]:
    reason = loader.unavailable()
    return (True, loader.library().origin) if reason is None else (False, reason)
