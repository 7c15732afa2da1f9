"""The engine of the Triton backend: which kernels run a configuration, and why none can."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sab import torch_private
from sab.config import SABConfig
from sab.ops import precision
from sab.ops.arguments import Given, Options, Parameters
from sab.ops.buffers import (
    Buffers,
    Edges,
    Inputs,
    Prepared,
    Weights,
    Work,
    begin,
    blank,
    blank_work,
    finish,
)
from sab.ops.gradients import Gradients
from sab.ops.plan import Plan, unfit
from sab.ops.plan import unsupported as no_plan
from sab.ops.precision import contiguous
from sab.ops.triton import around, small
from sab.ops.triton.launch import INTERPRETED
from sab.ops.types import LayerState, LayerWeights
from sab.parts import registry
from sab.parts.scorers import NumberFunctions, Scorer, VectorFunctions

SUMS_BIASES = False
LAST_GATE_ALONE = False
LARGEST_SMALL = 128
"""The largest hidden and attention size at which one program takes a row through all the steps."""
LARGEST_K_TOP = 64
MOST_GATES = 4
"""How many gates of a cell the kernels take: they compute the products of four at a time."""
TYPES = (torch.float32, torch.bfloat16)


def unsupported(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> str | None:
    """Why this backend cannot run a configuration, or None where it can."""
    if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
        return f"the input is on {x.device.type}"
    compute = precision.compute_type(x, weights)
    if compute not in TYPES and not INTERPRETED:
        return f"it computes in float32 and bfloat16, not in {str(compute).removeprefix('torch.')}"
    if config.k_top > 0 and callable(config.scorer):
        return "it does not take a callable as the scorer"
    missing = _missing(*config.part_names(cell_name))
    if missing is not None:
        return missing
    if config.k_top > 0 and config.forward != "sparse":
        return "it has the sparse forward only"
    if config.k_top > LARGEST_K_TOP:
        return f"k_top is larger than {LARGEST_K_TOP}"
    if config.layer_norm:
        return "it has no layer_norm"
    if config.is_hierarchical:
        return "it has no hierarchical memory"
    if weights.h_mask is not None:
        return "it has no recurrent_dropout"
    return no_plan(x, state, weights)


@torch_private.constant_result
def _missing(*names: str | None) -> str | None:
    """Why there are no kernels with these parts, or None where there are."""
    kinds = zip(registry.PARTS.values(), names, strict=True)
    return _missing_of(names, tuple(None if name is None else parts[name] for parts, name in kinds))


@lru_cache(maxsize=256)
def _missing_of(names: tuple[str | None, ...], parts: tuple[Any, ...]) -> str | None:
    """The same; it is asked at each call, and a part may be registered anew under its name."""
    missing = registry.first_missing(names, _provides)
    if missing is not None:
        return missing
    cell, scorer, *_ = names
    gates = parts[0].gates
    if gates > MOST_GATES:
        return f"it takes cells of at most {MOST_GATES} gates, and {cell!r} has {gates}"
    return None if scorer is None else unfit(parts[1])


def _provides(kind: str, name: str) -> bool:
    part, functions = registry.PARTS[kind][name], registry.provided(kind, name, "triton")
    if isinstance(part, Scorer):
        return isinstance(functions, NumberFunctions if part.query_cancels else VectorFunctions)
    return functions is not None


def can_round() -> bool:
    """No: bfloat16 is a compute type here."""
    return False


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> Tensor | None:
    """A tensor for the weights as both loops read them, or None where they take them as they are."""
    return small.pack(plan, weights, compute) if _is_small(plan) else None


def prepare(plan: Plan, given: Given, parameters: Parameters, options: Options, saves: bool) -> Prepared:
    """The packed weights, and the input's part of the gates in one product for all steps."""
    packed = pack(plan, parameters.of_loops(), options.compute)
    if packed is not None and small.is_in_lanes(packed):
        return around.prepare(plan, given, parameters, options, packed)
    return Prepared(around.input_gates(given, parameters, options), packed)


def overwrites(plan: Plan) -> Collection[str]:
    """The map; with large hidden sizes the gates too."""
    return ("mapped",) if _is_small(plan) else ("gates", "mapped")


def forward(plan: Plan, weights: Weights, buffers: Buffers, edges: Edges, inputs: Inputs | None = None) -> None:
    """The forward loop over time."""
    if _is_small(plan):
        return small.forward(plan, weights, buffers, edges)
    from sab.ops.triton import large

    begin(plan, buffers, edges)
    blank(plan, buffers)
    large.forward(plan, _contiguous(weights), _complete(buffers))
    return finish(plan, buffers, edges)


def begins_with_output(buffers: Buffers) -> bool:
    """Whether the backward loop can begin with the output's gradient alone."""
    packed = buffers.packed
    return packed is not None and small.is_in_lanes(packed) and small.has_room(packed)


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
    """The backward loop over time."""
    if _is_small(plan):
        return small.backward(plan, weights, buffers, work)
    from sab.ops.triton import large

    blank_work(work)
    return large.backward(plan, _contiguous(weights), _complete(buffers), work)


def gradients(
    plan: Plan,
    given: Given,
    parameters: Parameters,
    buffers: Buffers,
    work: Work,
    names: Sequence[str],
    dtype: torch.dtype | None,
) -> Gradients:
    """By one kernel where the loops were those of `lanes`, else by torch's products."""
    is_fused = small.is_in_lanes(buffers.packed) and around.makes_gradients(plan, given, parameters, buffers, names)
    made_by = around.LanesGradients if is_fused else around.ConvertedGradients
    return made_by(plan, given, parameters, buffers, work, dtype)


def _is_small(plan: Plan) -> bool:
    return max(plan.n, plan.key_size) <= LARGEST_SMALL


def _contiguous(weights: Weights) -> Weights:
    return Weights._make(None if weight is None else contiguous(weight) for weight in weights)


def _complete(buffers: Buffers) -> Buffers:
    """The buffers with empty ones in the place of those that are not there."""
    empty = buffers.gates.new_empty(0)
    written = [empty if buffer is None else buffer for buffer in buffers.written]
    others = {"lengths": buffers.lengths, "packed": buffers.packed, "live": buffers.live, "reads": buffers.reads}
    return Buffers(*written, **others)
