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
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from sab.ops.buffers import Buffers, Weights, Work
from sab.ops.plan import Plan, turn_rates_of
from sab.ops.precision import allow_tf32
from sab.ops.triton.functions import Parts, backward_constants, forward_constants, parts_of
from sab.ops.triton.large_backward import backward_kernel
from sab.ops.triton.large_forward import forward_kernel
from sab.ops.triton.large_parts import round_kernel
from sab.ops.triton.launch import INTERPRETED, Constants, launch

# All programs run at the same time or none does: otherwise they could wait for one that never starts.
LAUNCH = {"num_warps": 4, "launch_cooperative_grid": True}


def forward(plan: Plan, weights: Weights, buffers: Buffers, *, tf32: bool | None = None) -> None:
    """Fill the buffers; tf32: whether factors of float32 products may be rounded to TF32 (None: as set in PyTorch)."""
    store, keys = buffers.store, cast(Tensor, buffers.keys)
    shape = _shape(plan, keys.dtype, tf32, store.device)
    constants, programs = _forward_launch(shape)
    options = constants.values
    batch, n, mixed = plan.batch, plan.n, options["MIXED"]
    h_left = h_hat_left = summary_left = partial = key_squares = query_squares = best_key = best_slot = None
    if mixed:
        # The states once more as factors, read by all programs in each step: in half precision half the bytes.
        h_left, h_hat_left = keys.new_empty(2, batch, n), keys.new_empty(batch, n)
        summary_left = keys.new_empty(batch, n) if options["MAPPED"] else None
        _put_factor(store[plan.first_slots], h_left[0])
    if plan.is_affine:
        slices = triton.cdiv(n, options["SLICE"])
        best_key = store.new_empty(slices, batch, options["PLACES"])
        best_slot = torch.empty(best_key.shape, dtype=torch.int32, device=store.device)
    elif plan.config.k_top > 0:
        column_tiles = triton.cdiv(plan.key_size, options["COLUMNS"])
        partial = store.new_empty(column_tiles, batch, plan.slots)
        if options["NORMALISES"]:
            key_squares, query_squares = (store.new_empty(column_tiles, batch) for _ in range(2))
    launch(
        forward_kernel,
        programs,
        [
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
        ],
        [*_sizes(plan), 0 if weights.scorer_bias is None else len(weights.scorer_bias)],
        constants,
    )


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work, *, tf32: bool | None = None) -> None:
    """Fill what `work` is to hold after the loop; tf32 as in `forward`."""
    store, keys = buffers.store, cast(Tensor, buffers.keys)
    shape = _shape(plan, keys.dtype, tf32, store.device)
    constants, programs = _backward_launch(shape)
    options = constants.values
    batch, n, mixed = plan.batch, plan.n, options["MIXED"]
    affine, is_mapped = plan.is_affine, options["MAPPED"]
    weights = _factors(weights, options)
    dquery_left = dkeys_left = dhidden_left = None
    if mixed and not affine and plan.config.k_top > 0:
        dquery_left, dkeys_left = (keys.new_empty(batch, plan.key_size) for _ in range(2))
    if options["PRECISION"] == "tf32":
        dhidden_left = keys.new_empty(batch, weights.w_hh.shape[0])
    launch(
        backward_kernel,
        programs,
        [
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
            store.new_empty(options["PIECES"], batch, n),
            store.new_empty(2, batch, n) if options["SPLITS"] else None,
            torch.zeros(1, dtype=torch.int32, device=store.device),
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        constants,
    )


class Shape(NamedTuple):
    """What the kernels and their grid depend on: the configuration, its sizes, its precision and the device."""

    parts: Parts
    k_top: int
    batch: int
    n: int
    key_size: int
    compute: torch.dtype
    tf32: bool
    multiprocessors: int


def _shape(plan: Plan, compute: torch.dtype, tf32: bool | None, device: torch.device) -> Shape:
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    parts, sizes = parts_of(plan.cell, plan.config), (plan.config.k_top, plan.batch, plan.n, plan.key_size)
    return Shape(parts, *sizes, compute, tf32, _multiprocessors(device))


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.steps, plan.batch, plan.seen, plan.first_slots, plan.slots, plan.config.k_att


@cache  # for as long as the compiled kernels, which are known by these constants
def _forward_launch(shape: Shape) -> tuple[Constants, int]:
    """What the forward kernel is compiled for, and how many programs run it."""
    tiles = _forward_tiles(shape)
    return Constants(forward_constants(shape.parts) | _options(shape) | tiles | LAUNCH), _programs(shape, tiles)


@cache
def _backward_launch(shape: Shape) -> tuple[Constants, int]:
    """The same of the backward kernel."""
    tiles = _backward_tiles(shape)
    return Constants(backward_constants(shape.parts) | _options(shape) | tiles | LAUNCH), _programs(shape, tiles)


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
    launch(round_kernel, triton.cdiv(size, 1024), [values, factors], [size], _ROUNDING)
    return factors


_ROUNDING = Constants({"BLOCK": 1024})


def _transposed(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.t().contiguous()


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return 8 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _options(shape: Shape) -> dict[str, Any]:
    """What the kernels are compiled for, besides the parts and the tiles."""
    # PyTorch computes products of a single row without TF32, so there two more products make up for its rounding.
    precision = "ieee" if not shape.tf32 else "tf32x3" if shape.batch == 1 else "tf32"
    is_half = shape.compute.itemsize == 2
    return {
        "N": shape.n,
        "D": shape.key_size,
        "K_TOP": shape.k_top,
        "PLACES": triton.next_power_of_2(max(shape.k_top, 1)),
        "SCALE": 1 / math.sqrt(max(shape.key_size, 1)),
        "MIXED": is_half or precision == "tf32",
        "MATH": "plain" if INTERPRETED else "approximate" if is_half else "formula" if shape.tf32 else "accurate",
        "PRECISION": precision,
        "STAGES": 4,
        "BLOCK": max(_at_most(256 // shape.compute.itemsize, shape.n), 32),
    }


def _at_most(size: int, needed: int) -> int:
    """A power of two that covers what is needed, but not above size; at least 16."""
    return max(16, min(size, triton.next_power_of_2(needed)))


def _gathered(shape: Shape) -> int:
    """How many columns of all selected rows registers hold."""
    places = triton.next_power_of_2(max(shape.k_top, 1))
    return (8192 if places <= 16 else 4096) // places


def _fewest(tiles_of: Callable[[int], int], sizes: tuple[int, ...], programs: int) -> int:
    """The smallest size whose tiles the programs can take all at once, or the largest."""
    return next((size for size in sizes if tiles_of(size) <= programs), sizes[-1])


def _common_tiles(shape: Shape) -> dict[str, int]:
    outputs, programs = max(shape.n, shape.key_size), shape.multiprocessors
    rows = _at_most(64, shape.batch)
    query_rows = _fewest(lambda r: triton.cdiv(shape.batch, r) * triton.cdiv(outputs, 16), (16, 32), programs)
    columns = _fewest(lambda c: triton.cdiv(shape.batch, query_rows) * triton.cdiv(outputs, c), (16, 32, 64), programs)
    slices = max(programs // shape.batch, 1)
    slice_ = max(triton.next_power_of_2(triton.cdiv(shape.n, slices)), 16 if INTERPRETED else 128)
    return {"ROWS": rows, "QUERY_ROWS": query_rows, "COLUMNS": columns, "SLICE": slice_}


def _forward_tiles(shape: Shape) -> dict[str, int]:
    """Sizes of the forward's tiles, such that in each phase about as many programs work as there are."""
    tiles = _common_tiles(shape)
    row_tiles, programs = triton.cdiv(shape.batch, tiles["ROWS"]), shape.multiprocessors
    sizes = (4, 8, 16, 32) if shape.parts.cell.gates > 1 else (16, 32, 64)
    fits = _gathered(shape)
    tiles["PIECE"] = _at_most(fits, tiles["SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(shape.n, units), sizes, programs)
    tiles["SLOTS"] = 256 // tiles["COLUMNS"]
    tiles["CANDIDATES"] = 64
    return tiles


def _backward_tiles(shape: Shape) -> dict[str, int]:
    """As `_forward_tiles`, for the backward."""
    tiles = _common_tiles(shape)
    fits = _gathered(shape)
    row_tiles, programs = triton.cdiv(shape.batch, tiles["ROWS"]), shape.multiprocessors
    tiles["PIECE"] = _at_most(min(fits, 1024), shape.n)
    key_slice = triton.cdiv(shape.key_size, triton.cdiv(shape.n, tiles["SLICE"]))
    tiles["KEY_SLICE"] = max(triton.next_power_of_2(key_slice), 16)
    tiles["KEY_PIECE"] = _at_most(fits, tiles["KEY_SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(shape.n, units), (32, 64), programs)
    tiles["PIECES"] = max(1, min(programs // (row_tiles * triton.cdiv(shape.n, tiles["UNITS"])), 4))
    return tiles


def _programs(shape: Shape, tiles: dict[str, int]) -> int:
    """As many programs as any phase has tiles for, and run at the same time."""
    if INTERPRETED:
        return 1
    outputs = max(shape.n, shape.key_size)
    phases = [
        triton.cdiv(shape.batch, tiles["QUERY_ROWS"]) * triton.cdiv(outputs, tiles["COLUMNS"]),
        triton.cdiv(shape.batch, tiles["ROWS"]) * triton.cdiv(shape.n, tiles["UNITS"]) * tiles.get("PIECES", 1),
        shape.batch * triton.cdiv(shape.n, tiles["SLICE"]),
    ]
    return min(max(phases), shape.multiprocessors)
