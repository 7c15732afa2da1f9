"""Kernels for small hidden sizes: one program takes one row of the batch through all the steps.

Weights are left operands of matrix products whose right operand is a vector, eight times beside itself: tensor cores
multiply by no less. Each warp has 16 units. What is small and needed by all, like the list of the selected, each warp
has for itself. Nothing is exchanged between programs, so a step costs neither a launch nor a wait for the rest of the
chip.

There are two pairs of kernels. In `lanes_forward` and `lanes_backward` a tensor has a number for each thread; they take
keys that are vectors and rounded factors, as the default has them (`Held.in_lanes`). In `small_forward` and
`small_backward`, for all else, the compiler lays out vectors over units, as [units / 16, 16], and lists, as
[units / 16, ...]; weights that do not fit into registers (`RESIDENT` false) are read anew each step and multiplied
without tensor cores.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sab.ops.buffers import Buffers, Edges, Weights, Work, begin, blank, finish
from sab.ops.plan import Plan, turn_rates_of
from sab.ops.precision import allow_tf32, contiguous
from sab.ops.triton.functions import (
    Bound,
    Parts,
    backward_constants,
    bound_of,
    bound_sizes,
    forward_constants,
    parts_of,
)
from sab.ops.triton.lanes_backward import lanes_backward_kernel
from sab.ops.triton.lanes_forward import lanes_forward_kernel
from sab.ops.triton.launch import INTERPRETED, Constants, launch
from sab.ops.triton.small_backward import backward_kernel
from sab.ops.triton.small_forward import forward_kernel

LARGEST_HELD = 128 << 10
"""Bytes of recurrent weights that the registers of a program hold."""
LARGEST_SHARED = 160 << 10
"""Bytes of other weights that its shared memory holds."""
LARGEST_IN_LANES = 32
"""The largest k_top of the kernels in which a thread has a place of its list."""
MOST_REGISTERS = 128
"""Of a thread, for weights; the others lie in shared memory."""
LARGEST_ROOMY = 128
"""The size from which on those kernels have no registers to spare."""
DOUBLE_IN_LANES = INTERPRETED
"""Whether those kernels take float64, which they do in the interpreter alone."""


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> Tensor | None:
    """The matrices one after another, in 16 bits where they are resident; None where W_hh alone will do as it is."""
    held = _holds(plan, parts_of(plan.cell, plan.config), compute)
    constants = held.constants()
    if held.in_lanes:  # `around.prepare` fills it
        count = len(weights.w_hh) // plan.n + 2 + 2 * (weights.w_incorporate is not None)
        dtype = _half_of(constants) if constants["RESIDENT"] else compute
        return weights.w_hh.new_empty((2 * count + 1, constants["P"], constants["P"]), dtype=dtype)
    matrices = [weights.w_hh]
    if plan.config.k_top > 0 and weights.w_memory is not None and weights.w_query is not None and not plan.is_affine:
        matrices += [weights.w_memory, weights.w_query]
    if plan.config.k_top > 0 and weights.w_incorporate is not None:
        matrices.append(weights.w_incorporate.reshape(-1, plan.n))
    dtype = compute
    if constants["RESIDENT"]:
        dtype = _half_of(constants)
    flat = torch.cat(matrices) if len(matrices) > 1 else weights.w_hh
    if flat.dtype != dtype:
        flat = flat.to(dtype)
    return None if flat is weights.w_hh else flat


def _half_of(constants: dict[str, Any]) -> torch.dtype:
    """The type of resident weights."""
    return torch.bfloat16 if constants["TYPE"] == tl.bfloat16 else torch.float16


def is_in_lanes(packed: Tensor | None) -> bool:
    """Whether weights are packed for the kernels of `lanes`, where each matrix is apart."""
    return packed is not None and packed.dim() == 3


def has_room(packed: Tensor) -> bool:
    """Whether the loops of `lanes` have registers left for more than the recurrence: the output and its gradient."""
    return packed.shape[2] < LARGEST_ROOMY


def forward(plan: Plan, weights: Weights, buffers: Buffers, edges: Edges) -> None:
    """The forward loop over time."""
    if plan.config.k_top > 0 and buffers.lengths is not None:
        blank(plan, buffers)
    parts = parts_of(plan.cell, plan.config)
    any_tensor = buffers.store
    w = weights
    rates = turn_rates_of(plan, any_tensor.device)
    held, packed = _held(plan, parts, weights, buffers)
    if held.in_lanes:
        is_fresh = edges.h is None and edges.c is None
        if not is_fresh:
            begin(plan, buffers, edges)
        vectors = (w.b_hh, w.scorer_bias, w.v, w.b_incorporate, rates)
        given = [buffers.lengths is not None, w.b_hh is not None, w.scorer_bias is not None]
        launch(
            lanes_forward_kernel,
            plan.batch,
            [
                packed,
                _threads(any_tensor.device),
                *[any_tensor if vector is None else contiguous(vector) for vector in vectors],
                *[any_tensor if buffer is None else buffer for buffer in (buffers.lengths, *buffers.written)],
                buffers.live,
                buffers.reads,
                edges.output,
            ],
            [*_sizes(plan), *bound_sizes(plan.config)],
            _lanes_forward_launch(held, is_fresh, *given),
        )
        if not has_room(packed):
            finish(plan, buffers, edges)
        return
    begin(plan, buffers, edges)
    vectors = (w.b_hh, w.w_memory, w.w_query, w.scorer_bias, w.v, w.b_incorporate, rates)
    launch(
        forward_kernel,
        plan.batch,
        [
            _as_numbers(held, packed),
            packed,
            *[any_tensor if vector is None else contiguous(vector) for vector in vectors],
            *[any_tensor if buffer is None else buffer for buffer in (buffers.lengths, *buffers.written)],
            buffers.live,
            buffers.reads,
        ],
        [*_sizes(plan), 0 if w.scorer_bias is None else len(w.scorer_bias), *bound_sizes(plan.config)],
        _forward_launch(held, buffers.lengths is not None, w.b_hh is not None, w.scorer_bias is not None),
    )
    finish(plan, buffers, edges)


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
    """The backward loop over time."""
    parts = parts_of(plan.cell, plan.config)
    held, packed = _held(plan, parts, weights, buffers)
    any_tensor = buffers.store
    given = [gradient is not None for gradient in (work.dcells, work.dsummary, work.dweights)]
    if held.in_lanes:
        vectors = (weights.v, turn_rates_of(plan, any_tensor.device))
        launch(
            lanes_backward_kernel,
            plan.batch,
            [
                packed,
                _threads(any_tensor.device),
                *[any_tensor if vector is None else contiguous(vector) for vector in vectors],
                *[any_tensor if buffer is None else buffer for buffer in (buffers.lengths, *buffers.written)],
                *[any_tensor if gradient is None else gradient for gradient in (*work.common, work.doutput)],
            ],
            [*_sizes(plan), plan.config.k_trunc or 0],
            _lanes_backward_launch(held, work.doutput is not None, buffers.lengths is not None, *given),
        )
        return
    vectors = (weights.w_memory, weights.w_query, weights.v, turn_rates_of(plan, any_tensor.device))
    launch(
        backward_kernel,
        plan.batch,
        [
            _as_numbers(held, packed),
            packed,
            *[any_tensor if vector is None else contiguous(vector) for vector in vectors],
            *[any_tensor if buffer is None else buffer for buffer in (buffers.lengths, *buffers.written)],
            *[any_tensor if gradient is None else gradient for gradient in work.common],
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        _backward_launch(held, buffers.lengths is not None, *given),
    )


class Held(NamedTuple):
    """What both kernels are compiled for: of the configuration, its sizes and its precision."""

    parts: Parts
    k_top: int
    n: int
    key_size: int
    compute: torch.dtype
    tf32: bool
    bound: Bound

    def constants(self) -> dict[str, Any]:
        """As both kernels have it."""
        return constants_of(*self[:-1])

    @property
    def in_lanes(self) -> bool:
        """Whether the kernels in `lanes_forward` and `lanes_backward` take it."""
        scorer = self.parts.scorer
        if scorer is None or scorer.query_cancels or not 0 < self.k_top <= LARGEST_IN_LANES:
            return False
        return self.constants()["RESIDENT"] or (DOUBLE_IN_LANES and self.compute == torch.float64)


def _held(plan: Plan, parts: Parts, weights: Weights, buffers: Buffers) -> tuple[Held, Tensor]:
    """What the kernels are compiled for, and the packed weights."""
    compute = buffers.gates.dtype
    flat = buffers.packed
    if flat is None:
        flat = contiguous(weights.w_hh)
    is_half = flat.itemsize == 2  # in float32 with TF32 alone, and as it was when they were packed
    held = _holds(plan, parts, compute, tf32=True if is_half else None)
    if not is_half and held.constants()["RESIDENT"]:
        held = _holds(plan, parts, compute, tf32=False)
    return held, flat


def _as_numbers(held: Held, packed: Tensor) -> Tensor:
    """Packed weights as the kernels of `small_forward` and `small_backward` hold them: whole numbers where resident."""
    return packed.view(torch.int16) if held.constants()["RESIDENT"] else packed


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.steps, plan.batch, plan.first_slots, plan.slots, plan.seen, plan.config.k_att


def _holds(plan: Plan, parts: Parts, compute: torch.dtype, tf32: bool | None = None) -> Held:
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    return Held(parts, plan.config.k_top, plan.n, plan.key_size, compute, tf32, bound_of(plan.config))


@cache  # for as long as the compiled kernels, which are known by these constants
def _forward_launch(held: Held, has_lengths: bool, has_bias: bool, has_scorer_bias: bool) -> Constants:
    constants = held.constants()
    return Constants(
        constants
        | forward_constants(held.parts)
        | {
            "FORGET": held.bound.forget,
            "KC": 32 if held.k_top <= 32 else 64,
            "PACKED": constants["RESIDENT"],
            "HAS_LENGTHS": has_lengths,
            "HAS_BIAS": has_bias,
            "HAS_SCORER_BIAS": has_scorer_bias,
        }
    )


@cache
def _backward_launch(
    held: Held, has_lengths: bool, has_dcells: bool, has_dsummary: bool, has_dweights: bool
) -> Constants:
    constants = held.constants()
    return Constants(
        constants
        | backward_constants(held.parts)
        | {
            "HAS_LENGTHS": has_lengths,
            "HAS_DCELLS": has_dcells,
            "HAS_DSUMMARY": has_dsummary,
            "HAS_DWEIGHTS": has_dweights,
            # Scaling half precision takes some registers itself.
            "HELD": 4 if constants["TYPE"] == tl.bfloat16 else 3,
            "LONGEST": held.bound.longest,
        }
    )


@cache
def _lanes_forward_launch(
    held: Held, is_fresh: bool, has_lengths: bool, has_bias: bool, has_scorer_bias: bool
) -> Constants:
    constants = held.constants()
    fits = held.key_size == constants["P"] and held.compute == torch.bfloat16
    return _constants(
        lanes_forward_kernel,
        constants
        | forward_constants(held.parts)
        | {
            **_places(held),
            "FORGET": held.bound.forget,
            "BY_PRODUCTS": fits and held.parts.is_product,
            "IS_FRESH": is_fresh,
            "WRITES_OUTPUT": constants["P"] < LARGEST_ROOMY,
            "HAS_LENGTHS": has_lengths,
            "HAS_BIAS": has_bias,
            "HAS_SCORER_BIAS": has_scorer_bias,
        },
    )


@cache
def _lanes_backward_launch(
    held: Held, has_doutput: bool, has_lengths: bool, has_dcells: bool, has_dsummary: bool, has_dweights: bool
) -> Constants:
    return _constants(
        lanes_backward_kernel,
        held.constants()
        | backward_constants(held.parts)
        | {
            **_places(held),
            "HAS_DOUTPUT": has_doutput,
            "HAS_LENGTHS": has_lengths,
            "HAS_DCELLS": has_dcells,
            "HAS_DSUMMARY": has_dsummary,
            "HAS_DWEIGHTS": has_dweights,
            "LONGEST": held.bound.longest,
        },
    )


def _constants(kernel: Any, values: dict[str, Any]) -> Constants:
    """Those that a kernel has as parameters, and the number of warps."""
    return Constants({name: value for name, value in values.items() if name in (*kernel.arg_names, "num_warps")})


def _places(held: Held) -> dict[str, int]:
    """How many of the packed matrices a program keeps in registers, the first ones, and how many in shared memory."""
    cell, _, _, incorporation = held.parts
    count = cell.gates + 2 + 2 * (incorporation is not None and incorporation.has_weights)
    in_registers = count if INTERPRETED else min(count, MOST_REGISTERS * 4 // held.constants()["P"])
    return {"HELD": in_registers, "SHELVED": count - in_registers}


_thread_numbers: dict[torch.device, Tensor] = {}


def _threads(device: torch.device) -> Tensor:
    """The numbers of a program's threads, by device."""
    if device not in _thread_numbers:
        numbers = torch.arange(256, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return numbers  # memory of the graph that is captured
        _thread_numbers[device] = numbers
    return _thread_numbers[device]


@lru_cache(maxsize=256)
def constants_of(parts: Parts, k_top: int, n: int, key_size: int, compute: torch.dtype, tf32: bool) -> dict[str, Any]:
    """What both kernels are compiled for besides the parts; neither the batch nor the length is among it."""
    d = max(key_size, 1)
    padded = max(32, triton.next_power_of_2(max(n, d)))
    has_keys = parts.scorer is not None and not parts.scorer.query_cancels
    is_mapped = parts.incorporation is not None and parts.incorporation.has_weights
    others = 2 * has_keys + 2 * is_mapped
    is_small = 2 * parts.cell.gates * padded**2 <= LARGEST_HELD and 2 * others * padded**2 <= LARGEST_SHARED
    rounds = compute == torch.bfloat16 or tf32
    math = "approximate" if rounds else "accurate"
    return {
        "n": n,
        "d": d,
        "K": k_top,
        "SCALE": d**-0.5,
        "HAS_V": parts.scorer is not None and "v" in parts.scorer.shapes(n, d, None),
        "P": padded,
        "RESIDENT": rounds and is_small,
        # The interpreter has no products of bfloat16.
        "TYPE": tl.bfloat16 if compute == torch.bfloat16 and not INTERPRETED else tl.float16,
        "MATH": "plain" if INTERPRETED else math,
        "num_warps": min(8, padded // 16),
    }
