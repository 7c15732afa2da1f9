"""Kernels for small hidden sizes: one program takes one row of the batch through all the steps.

A program keeps the recurrent weights in its registers, as left operands of matrix products whose right operand is the
hidden state, eight times beside itself: tensor cores multiply by no less. The products are batched, 16 units a batch
and a batch a warp, so a vector over units is laid out as [units / 16, 16] and each warp owns its rows of it. What is
small and needed by all, like the list of the selected, each warp has for itself: `[units / 16, ...]` again, equal in
each row. Nothing is exchanged between programs, so a step costs neither a launch nor a wait for the rest of the chip.

Weights that do not fit (`RESIDENT` false) are read anew each step and multiplied without tensor cores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sab.ops.buffers import Buffers, Weights, Work, blank, blank_work
from sab.ops.plan import Plan, turn_rates_of
from sab.ops.precision import allow_tf32, contiguous
from sab.ops.triton.functions import Parts, backward_constants, forward_constants, parts_of
from sab.ops.triton.launch import INTERPRETED, launch
from sab.ops.triton.small_backward import backward_kernel
from sab.ops.triton.small_forward import forward_kernel

LARGEST_HELD = 128 << 10
"""Bytes of recurrent weights that the registers of a program hold."""
LARGEST_SHARED = 160 << 10
"""Bytes of other weights that its shared memory holds."""


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> Tensor | None:
    """The matrices one after another, in 16 bits where they are resident; None where W_hh alone will do as it is."""
    constants = _constants(plan, parts_of(plan.cell, plan.config), compute)
    matrices = [weights.w_hh]
    if plan.config.k_top > 0 and weights.w_memory is not None and weights.w_query is not None and not plan.is_affine:
        matrices += [weights.w_memory, weights.w_query]
    if plan.config.k_top > 0 and weights.w_incorporate is not None:
        matrices.append(weights.w_incorporate.reshape(-1, plan.n))
    dtype = compute
    if constants["RESIDENT"]:
        dtype = torch.bfloat16 if constants["TYPE"] == tl.bfloat16 else torch.float16
    flat = torch.cat(matrices) if len(matrices) > 1 else weights.w_hh
    if flat.dtype != dtype:
        flat = flat.to(dtype)
    return None if flat is weights.w_hh else flat


def forward(plan: Plan, weights: Weights, buffers: Buffers) -> None:
    """The forward loop over time."""
    if plan.config.k_top > 0 and buffers.lengths is not None:
        blank(plan, buffers)
    parts = parts_of(plan.cell, plan.config)
    constants, w_held, w_all = _held(plan, parts, weights, buffers)
    any_tensor = buffers.store
    w = weights
    rates = turn_rates_of(plan, any_tensor.device)
    vectors = (w.b_hh, w.w_memory, w.w_query, w.scorer_bias, w.v, w.b_incorporate, rates)
    few = plan.config.k_top <= 32
    is_packed = constants["RESIDENT"]
    fits = few and plan.key_size == 128 and buffers.gates.dtype == torch.bfloat16
    launch(
        forward_kernel,
        plan.batch,
        [
            w_held,
            w_all,
            *[any_tensor if vector is None else contiguous(vector) for vector in vectors],
            *[any_tensor if buffer is None else buffer for buffer in (buffers.lengths, *buffers.written)],
        ],
        [*_sizes(plan), 0 if w.scorer_bias is None else len(w.scorer_bias)],
        constants
        | forward_constants(parts)
        | {
            "KC": 32 if few else 64,
            "PACKED": is_packed,
            "BY_PRODUCTS": is_packed and fits and parts.is_product,
            "HAS_LENGTHS": buffers.lengths is not None,
            "HAS_BIAS": w.b_hh is not None,
            "HAS_SCORER_BIAS": w.scorer_bias is not None,
        },
    )


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
    """The backward loop over time."""
    if plan.config.k_top > 0 and buffers.lengths is not None:
        blank_work(work, sums=False)
    parts = parts_of(plan.cell, plan.config)
    constants, w_held, w_all = _held(plan, parts, weights, buffers)
    any_tensor = buffers.store
    vectors = (weights.w_memory, weights.w_query, weights.v, turn_rates_of(plan, any_tensor.device))
    launch(
        backward_kernel,
        plan.batch,
        [
            w_held,
            w_all,
            *[any_tensor if vector is None else contiguous(vector) for vector in vectors],
            *[any_tensor if buffer is None else buffer for buffer in (buffers.lengths, *buffers.written)],
            *[any_tensor if gradient is None else gradient for gradient in work.common],
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        constants
        | backward_constants(parts)
        | {
            "HAS_LENGTHS": buffers.lengths is not None,
            "HAS_DCELLS": work.dcells is not None,
            "HAS_DSUMMARY": work.dsummary is not None,
            "HAS_DWEIGHTS": work.dweights is not None,
            # Scaling half precision takes some registers itself.
            "HELD": 4 if constants["TYPE"] == tl.bfloat16 else 3,
        },
    )


def _held(plan: Plan, parts: Parts, weights: Weights, buffers: Buffers) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the kernels are compiled for, and the packed weights: as whole numbers where resident, and as they are."""
    flat = buffers.packed
    if flat is None:
        flat = contiguous(weights.w_hh)
    constants = _constants(plan, parts, buffers.gates.dtype)
    if constants["RESIDENT"] and flat.itemsize != 2:  # TF32 was forbidden when they were packed
        constants = _constants(plan, parts, buffers.gates.dtype, tf32=False)
    return constants, flat.view(torch.int16) if constants["RESIDENT"] else flat, flat


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.steps, plan.batch, plan.first_slots, plan.slots, plan.seen, plan.config.k_att


def _constants(plan: Plan, parts: Parts, compute: torch.dtype, tf32: bool | None = None) -> dict[str, Any]:
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    return constants_of(parts, plan.config.k_top, plan.n, plan.key_size, compute, tf32)


@lru_cache(maxsize=256)
def constants_of(parts: Parts, k_top: int, n: int, key_size: int, compute: torch.dtype, tf32: bool) -> dict[str, Any]:
    """What both kernels are compiled for besides the parts; neither the batch nor the length is among it."""
    d = max(key_size, 1)
    padded = max(16, triton.next_power_of_2(max(n, d)))
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
