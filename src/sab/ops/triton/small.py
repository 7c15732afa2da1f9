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

from sab.config import SABConfig
from sab.ops.buffers import Buffers, Weights, Work, blank, blank_work
from sab.ops.plan import Plan
from sab.ops.precision import allow_tf32, contiguous
from sab.ops.triton.launch import INTERPRETED, launch
from sab.ops.triton.small_backward import backward_kernel
from sab.ops.triton.small_forward import forward_kernel
from sab.parts.scorers import SCORERS

LARGEST_HELD = 128 << 10
"""Bytes of recurrent weights that the registers of a program hold."""
LARGEST_SHARED = 160 << 10
"""Bytes of other weights that its shared memory holds."""


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> Tensor | None:
    """The matrices one after another, in 16 bits where they are resident; None where W_hh alone will do as it is."""
    constants = _constants(plan, compute)
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
    constants, w_held, w_all = _held(plan, weights, buffers)
    any_tensor = buffers.store
    w = weights
    vectors = (w.b_hh, w.w_memory, w.w_query, w.scorer_bias, w.v, w.b_incorporate)
    launch(
        forward_kernel,
        plan.batch,
        [
            w_held,
            w_all,
            *(any_tensor if vector is None else contiguous(vector) for vector in vectors),
            *(_or(getattr(buffers, name), any_tensor) for name in ("lengths", *BUFFERS)),
        ],
        [*_sizes(plan), 0 if w.scorer_bias is None else len(w.scorer_bias)],
        constants
        | {
            "KC": 32 if plan.config.k_top <= 32 else 64,
            "PACKED": constants["RESIDENT"],
            "HAS_LENGTHS": buffers.lengths is not None,
            "HAS_BIAS": w.b_hh is not None,
        },
    )


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
    """The backward loop over time."""
    if plan.config.k_top > 0 and buffers.lengths is not None:
        blank_work(work, sums=False)
    constants, w_held, w_all = _held(plan, weights, buffers)
    any_tensor = buffers.store
    vectors = (weights.w_memory, weights.w_query, weights.v)
    launch(
        backward_kernel,
        plan.batch,
        [
            w_held,
            w_all,
            *(any_tensor if vector is None else contiguous(vector) for vector in vectors),
            *(_or(getattr(buffers, name), any_tensor) for name in ("lengths", *BUFFERS)),
            *(_or(getattr(work, name), any_tensor) for name in WORK),
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        constants
        | {
            "HAS_LENGTHS": buffers.lengths is not None,
            "HAS_DCELLS": work.dcells is not None,
            "HAS_DSUMMARY": work.dsummary is not None,
            "HAS_DWEIGHTS": work.dweights is not None,
            # Scaling half precision takes some registers itself.
            "HELD": 4 if constants["TYPE"] == tl.bfloat16 else 3,
        },
    )


BUFFERS = "store c gates hidden_new h_hat query keys weights selected norms summary".split()
WORK = "dstore dc dcells dgates dhidden dquery dkeys dsummary dweights dincorporated dv".split()


def _or(tensor: Tensor | None, any_tensor: Tensor) -> Tensor:
    return any_tensor if tensor is None else tensor


def _held(plan: Plan, weights: Weights, buffers: Buffers) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the kernels are compiled for, and the packed weights: as whole numbers where resident, and as they are."""
    flat = buffers.packed
    if flat is None:
        flat = contiguous(weights.w_hh)
    constants = _constants(plan, buffers.gates.dtype)
    if constants["RESIDENT"] and flat.itemsize != 2:  # TF32 was forbidden when they were packed
        constants = _constants(plan, buffers.gates.dtype, tf32=False)
    return constants, flat.view(torch.int16) if constants["RESIDENT"] else flat, flat


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.steps, plan.batch, plan.first_slots, plan.slots, plan.seen, plan.config.k_att


def _constants(plan: Plan, compute: torch.dtype, tf32: bool | None = None) -> dict[str, Any]:
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    return _constants_of(plan.config, plan.cell, plan.n, plan.key_size, compute, tf32)


@lru_cache(maxsize=256)
def _constants_of(
    config: SABConfig, cell: str, n: int, key_size: int, compute: torch.dtype, tf32: bool
) -> dict[str, Any]:
    """What the kernels are compiled for; neither the batch nor the length is among it."""
    d = max(key_size, 1)
    padded = max(16, triton.next_power_of_2(max(n, d)))
    gates = {"lstm": 4, "gru": 3}.get(cell, 1)
    beside = (
        2 * (not SCORERS[str(config.scorer)].query_cancels) + 2 * (config.incorporate == "concat")
        if config.k_top > 0
        else 0
    )
    is_small = 2 * gates * padded**2 <= LARGEST_HELD and 2 * beside * padded**2 <= LARGEST_SHARED
    rounds = compute == torch.bfloat16 or tf32
    math = "approximate" if rounds else "accurate"
    return {
        "n": n,
        "d": d,
        "K": config.k_top,
        "CELL": cell,
        "SCORER": config.scorer,
        "WEIGHTING": config.weighting,
        "INCORPORATE": config.incorporate,
        "P": padded,
        "RESIDENT": rounds and is_small,
        # The interpreter has no products of bfloat16.
        "TYPE": tl.bfloat16 if compute == torch.bfloat16 and not INTERPRETED else tl.float16,
        "MATH": "plain" if INTERPRETED else math,
        "num_warps": min(8, padded // 16),
    }
