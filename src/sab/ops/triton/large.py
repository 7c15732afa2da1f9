"""Both time loops for large hidden sizes: one persistent kernel a direction.

A step's matrix products are too large for one multiprocessor, so all of them share each step: every phase is a loop
over tiles, and between phases the programs wait for each other (`meet`). What one program wrote others read only after
such a meeting. The kernels are right for any number of programs, also for one (where a meeting is nothing).

Every product has its right factor lying [outputs, inner], so that both factors are
read along their rows; `real` is the state's type, in which everything but the products' factors is computed. What is
named `.._left` is a left factor as it is multiplied, where that is not the state itself: in half precision, or in
float32 rounded to TF32's mantissa, since tensor cores do not round but cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import triton
from torch import Tensor

from sab.ops.buffers import Buffers, Weights, Work
from sab.ops.plan import Plan, turn_rates_of
from sab.ops.precision import allow_tf32
from sab.ops.triton.functions import backward_constants, forward_constants, parts_of
from sab.ops.triton.large_backward import backward_kernel
from sab.ops.triton.large_forward import forward_kernel
from sab.ops.triton.large_parts import round_kernel
from sab.ops.triton.launch import INTERPRETED
from sab.parts.registry import CELLS

# All programs run at the same time or none does: otherwise they could wait for one that never starts.
LAUNCH = {"num_warps": 4, "launch_cooperative_grid": True}


def forward(plan: Plan, weights: Weights, buffers: Buffers, *, tf32: bool | None = None) -> None:
    """Fill the buffers; tf32: whether factors of float32 products may be rounded to TF32 (None: as set in PyTorch)."""
    store, keys = buffers.store, cast(Tensor, buffers.keys)
    constants = forward_constants(parts_of(plan.cell, plan.config))
    options = _options(plan, keys.dtype, tf32, store.device)
    tiles = _forward_tiles(plan, _multiprocessors(store.device))
    batch, n, mixed = plan.batch, plan.n, options["MIXED"]
    h_left = h_hat_left = summary_left = partial = key_squares = query_squares = best_key = best_slot = None
    if mixed:
        # The states once more as factors, read by all programs in each step: in half precision half the bytes.
        h_left, h_hat_left = keys.new_empty(2, batch, n), keys.new_empty(batch, n)
        summary_left = keys.new_empty(batch, n) if constants["MAPPED"] else None
        _put_factor(store[plan.first_slots], h_left[0])
    if plan.is_affine:
        slices = triton.cdiv(n, tiles["SLICE"])
        best_key = store.new_empty(slices, batch, options["PLACES"])
        best_slot = torch.empty(best_key.shape, dtype=torch.int32, device=store.device)
    elif plan.config.k_top > 0:
        column_tiles = triton.cdiv(plan.key_size, tiles["COLUMNS"])
        partial = store.new_empty(column_tiles, batch, plan.slots)
        if constants["NORMALISES"]:
            key_squares, query_squares = store.new_empty(2, column_tiles, batch).unbind()
    cast(Any, forward_kernel)[_grid(plan, tiles, store.device)](
        *buffers.written,
        buffers.lengths,
        turn_rates_of(plan, store.device),
        *_factors(weights, options).common,
        h_left,
        h_hat_left,
        summary_left,
        partial,
        key_squares,
        query_squares,
        best_key,
        best_slot,
        torch.zeros(1, dtype=torch.int32, device=store.device),
        plan.steps,
        batch,
        plan.seen,
        plan.first_slots,
        plan.slots,
        plan.config.k_att,
        0 if weights.scorer_bias is None else len(weights.scorer_bias),
        **constants,
        **options,
        **tiles,
        **LAUNCH,
    )


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work, *, tf32: bool | None = None) -> None:
    """Fill what `work` is to hold after the loop; tf32 as in `forward`."""
    store, keys = buffers.store, cast(Tensor, buffers.keys)
    constants = backward_constants(parts_of(plan.cell, plan.config))
    options = _options(plan, keys.dtype, tf32, store.device)
    tiles = _backward_tiles(plan, _multiprocessors(store.device))
    batch, n, mixed = plan.batch, plan.n, options["MIXED"]
    affine, is_mapped = plan.is_affine, constants["MAPPED"]
    weights = _factors(weights, options)
    dquery_left = dkeys_left = dhidden_left = None
    if mixed and not affine and plan.config.k_top > 0:
        dquery_left, dkeys_left = keys.new_empty(2, batch, plan.key_size).unbind()
    if options["PRECISION"] == "tf32":
        dhidden_left = keys.new_empty(batch, weights.w_hh.shape[0])
    cast(Any, backward_kernel)[_grid(plan, tiles, store.device)](
        *buffers.written,
        buffers.lengths,
        turn_rates_of(plan, store.device),
        _transposed(weights.w_hh),
        weights.w_memory,
        None if affine else _transposed(weights.w_memory),
        weights.w_query,
        None if affine else _transposed(weights.w_query),
        weights.v,
        _transposed(weights.w_incorporate),
        *work.common,
        store.new_empty(batch, n),
        keys.new_empty(batch, n) if mixed and is_mapped else None,
        store.new_empty(batch, n) if is_mapped else None,
        dquery_left,
        dkeys_left,
        dhidden_left,
        store.new_empty(tiles["PIECES"], batch, n),
        store.new_empty(2, batch, n) if constants["SPLITS"] else None,
        torch.zeros(1, dtype=torch.int32, device=store.device),
        plan.steps,
        batch,
        plan.seen,
        plan.first_slots,
        plan.slots,
        plan.config.k_att,
        plan.config.k_trunc or 0,
        **constants,
        **options,
        **tiles,
        **LAUNCH,
    )


def _factors(weights: Weights, options: dict[str, Any]) -> Weights:
    """The weights as they are multiplied: rounded, where products are in TF32."""
    if options["PRECISION"] != "tf32":
        return weights
    rounded = {
        name: None if weight is None or weight.dim() == 1 else _put_factor(weight, torch.empty_like(weight))
        for name, weight in weights._asdict().items()
    }
    return weights._replace(**{name: weight for name, weight in rounded.items() if weight is not None})


def _put_factor(values: Tensor, factors: Tensor) -> Tensor:
    """The values as factors of products, in the factors' type; both are contiguous."""
    size = values.numel()
    cast(Any, round_kernel)[(triton.cdiv(size, 1024),)](values, factors, size, BLOCK=1024)
    return factors


def _transposed(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.t().contiguous()


def _multiprocessors(device: torch.device) -> int:
    return 8 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _options(plan: Plan, compute: torch.dtype, tf32: bool | None, device: torch.device) -> dict[str, Any]:
    """What the kernels are compiled for, besides the tiles."""
    config = plan.config
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    # PyTorch computes products of a single row without TF32, so there two more products make up for its rounding.
    precision = "ieee" if not tf32 else "tf32x3" if plan.batch == 1 else "tf32"
    is_half = compute.itemsize == 2
    return {
        "N": plan.n,
        "D": plan.key_size,
        "K_TOP": config.k_top,
        "PLACES": triton.next_power_of_2(max(config.k_top, 1)),
        "SCALE": 1 / math.sqrt(max(plan.key_size, 1)),
        "MIXED": is_half or precision == "tf32",
        "MATH": "plain" if INTERPRETED else "approximate" if is_half else "formula" if tf32 else "accurate",
        "PRECISION": precision,
        "STAGES": 4,
        "BLOCK": max(_at_most(256 // compute.itemsize, plan.n), 32),
    }


def _at_most(size: int, needed: int) -> int:
    """A power of two that covers what is needed, but not above size; at least 16."""
    return max(16, min(size, triton.next_power_of_2(needed)))


def _gathered(plan: Plan) -> int:
    """How many columns of all selected rows registers hold."""
    places = triton.next_power_of_2(max(plan.config.k_top, 1))
    return (8192 if places <= 16 else 4096) // places


def _fewest(tiles_of: Callable[[int], int], sizes: tuple[int, ...], programs: int) -> int:
    """The smallest size whose tiles the programs can take all at once, or the largest."""
    return next((size for size in sizes if tiles_of(size) <= programs), sizes[-1])


def _common_tiles(plan: Plan, programs: int) -> dict[str, int]:
    outputs = max(plan.n, plan.key_size)
    rows = _at_most(64, plan.batch)
    query_rows = _fewest(lambda r: triton.cdiv(plan.batch, r) * triton.cdiv(outputs, 16), (16, 32), programs)
    columns = _fewest(lambda c: triton.cdiv(plan.batch, query_rows) * triton.cdiv(outputs, c), (16, 32, 64), programs)
    slices = max(programs // plan.batch, 1)
    slice_ = max(triton.next_power_of_2(triton.cdiv(plan.n, slices)), 16 if INTERPRETED else 128)
    return {"ROWS": rows, "QUERY_ROWS": query_rows, "COLUMNS": columns, "SLICE": slice_}


def _forward_tiles(plan: Plan, programs: int) -> dict[str, int]:
    """Sizes of the forward's tiles, such that in each phase about as many programs work as there are."""
    tiles = _common_tiles(plan, programs)
    row_tiles = triton.cdiv(plan.batch, tiles["ROWS"])
    sizes = (4, 8, 16, 32) if CELLS[plan.cell].gates > 1 else (16, 32, 64)
    fits = _gathered(plan)
    tiles["PIECE"] = _at_most(fits, tiles["SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(plan.n, units), sizes, programs)
    tiles["SLOTS"] = 256 // tiles["COLUMNS"]
    tiles["CANDIDATES"] = 64
    return tiles


def _backward_tiles(plan: Plan, programs: int) -> dict[str, int]:
    """As `_forward_tiles`, for the backward."""
    tiles = _common_tiles(plan, programs)
    fits = _gathered(plan)
    row_tiles = triton.cdiv(plan.batch, tiles["ROWS"])
    tiles["PIECE"] = _at_most(min(fits, 1024), plan.n)
    key_slice = triton.cdiv(plan.key_size, triton.cdiv(plan.n, tiles["SLICE"]))
    tiles["KEY_SLICE"] = max(triton.next_power_of_2(key_slice), 16)
    tiles["KEY_PIECE"] = _at_most(fits, tiles["KEY_SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(plan.n, units), (32, 64), programs)
    tiles["PIECES"] = max(1, min(programs // (row_tiles * triton.cdiv(plan.n, tiles["UNITS"])), 4))
    return tiles


def _grid(plan: Plan, tiles: dict[str, int], device: torch.device) -> tuple[int]:
    """As many programs as any phase has tiles for, and run at the same time."""
    if INTERPRETED:
        return (1,)
    outputs = max(plan.n, plan.key_size)
    phases = [
        triton.cdiv(plan.batch, tiles["QUERY_ROWS"]) * triton.cdiv(outputs, tiles["COLUMNS"]),
        triton.cdiv(plan.batch, tiles["ROWS"]) * triton.cdiv(plan.n, tiles["UNITS"]) * tiles.get("PIECES", 1),
        plan.batch * triton.cdiv(plan.n, tiles["SLICE"]),
    ]
    return (min(max(phases), _multiprocessors(device)),)
