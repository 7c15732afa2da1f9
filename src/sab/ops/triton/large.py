"""Both time loops for large hidden sizes: one persistent kernel a direction.

A step's matrix products are too large for one multiprocessor, so all of them share each step: every phase is a loop
over tiles, and between phases the programs wait for each other (`meet`). What one program wrote others read only after
such a meeting. The kernels are right for any number of programs, also for one (where a meeting is nothing).

Every product has its right factor lying [outputs, inner], so that both factors are read along their rows, and the inner
size is filled up with zeros to whole blocks; `real` is the state's type, in which everything but the products' factors
is computed. What is named `.._left` is a left factor as it is multiplied: with such rows, and in half precision, or in
float32 rounded to TF32's mantissa where TF32 is allowed, since tensor cores do not round but cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from sab.ops import schedule
from sab.ops.buffers import Buffers, Weights, Work
from sab.ops.plan import Plan, turn_rates_of
from sab.ops.precision import allow_tf32, product
from sab.ops.triton.functions import (
    Bound,
    Parts,
    backward_constants,
    bound_of,
    bound_sizes,
    forward_constants,
    parts_of,
)
from sab.ops.triton.large_backward import backward_kernel
from sab.ops.triton.large_forward import forward_kernel
from sab.ops.triton.large_parts import round_kernel
from sab.ops.triton.launch import INTERPRETED, Constants, launch

MOST_FIRST = 16
"""How many microstates may come before the loop, for each of its steps, if they are to have values."""
WARPS = 8
"""Of a program. Most of a step's code runs once, and twice the threads have half of it."""
# All programs run at the same time or none does: otherwise they could wait for one that never starts.
LAUNCH = {"num_warps": WARPS, "launch_cooperative_grid": True}
PIECE = 128 * WARPS
"""How many numbers of a microstate are read at once: four by each thread, 16 bytes."""


def forward(plan: Plan, weights: Weights, buffers: Buffers, *, tf32: bool | None = None) -> None:
    """Fill the buffers; tf32: whether factors of float32 products may be rounded to TF32 (None: as set in PyTorch)."""
    store, keys = buffers.store, cast(Tensor, buffers.keys)
    shape = _shape(plan, keys.dtype, tf32, store.device)
    constants, programs = _forward_launch(shape)
    options = constants.values
    batch, n, inner = plan.batch, plan.n, options["INNER"]
    given, weights = weights, _factors(weights, options, shape.has_values)
    # The states once more as factors, read by all programs in each step.
    h_left, h_hat_left, summary_left = keys.new_zeros(4, batch, inner).split((2, 1, 1))
    _put_factor(store[plan.first_slots], h_left[0], options)
    values = map_part = partial = key_squares = query_squares = best_key = best_slot = lost = None
    if shape.has_values:
        values, map_part = keys.new_empty(plan.slots, batch, n), store.new_empty(batch, n)
        if plan.first_slots > 0:
            values[: plan.first_slots] = _values(given, store[: plan.first_slots], keys.dtype)
    if plan.is_affine:
        slices = triton.cdiv(n, options["SLICE"])
        best_key = store.new_empty(slices, batch, options["PLACES"])
        best_slot = torch.empty(best_key.shape, dtype=torch.int32, device=store.device)
        lost = best_slot.new_empty(batch) if plan.config.forgets else None
    elif plan.config.k_top > 0:
        column_tiles = triton.cdiv(plan.key_size, options["COLUMNS"])
        partial = store.new_empty(column_tiles, batch, plan.places if plan.config.forgets else plan.slots)
        if options["NORMALISES"]:
            query_squares = store.new_empty(column_tiles, batch)
            unit_tiles = triton.cdiv(max(n, plan.key_size), options["UNITS"])
            key_squares = store.new_empty(max(unit_tiles, column_tiles), batch)
    launch(
        forward_kernel,
        programs,
        [
            *buffers.written,
            buffers.lengths,
            turn_rates_of(plan, store.device),
            *weights.common,
            h_left,
            h_hat_left,
            summary_left,
            values,
            map_part,
            partial,
            key_squares,
            query_squares,
            best_key,
            best_slot,
            buffers.live,
            buffers.reads,
            lost,
            torch.zeros(1, dtype=torch.int32, device=store.device),
        ],
        [
            *_sizes(plan),
            0 if weights.scorer_bias is None else len(weights.scorer_bias),
            *bound_sizes(plan.config),
        ],
        constants,
    )


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work, *, tf32: bool | None = None) -> None:
    """Fill what `work` is to hold after the loop; tf32 as in `forward`."""
    store, keys = buffers.store, cast(Tensor, buffers.keys)
    shape = _shape(plan, keys.dtype, tf32, store.device)
    constants, programs = _backward_launch(shape)
    options = constants.values
    batch, n, first = plan.batch, plan.n, plan.first_slots
    inner, key_inner, chain = options["INNER"], options["KEY_INNER"], options["CHAIN"]
    has_keys, has_values = plan.config.k_top > 0 and not plan.is_affine, shape.has_values
    is_mapped = options["MAPPED"] and not has_values
    given, weights = weights, _rounded(weights, options)
    w_read_t = w_kept_t = w_incorporate_t = values = dvalues = None
    if has_keys:
        sides = (None, None)
        if has_values:
            sides = cast(Tensor, weights.w_incorporate).split(n, dim=1)
        w_read_t = _beside(n, (weights.w_query, key_inner), (sides[0], inner))
        w_kept_t = _beside(n, (weights.w_memory, key_inner), (sides[1], inner))
    if is_mapped:
        w_incorporate_t = _beside(2 * n, (weights.w_incorporate, inner))
    entries = 0 if w_read_t is None else w_read_t.shape[1]
    sizes = [batch * size for size in (entries, entries, chain, inner)]
    dread_left, dkept_left, dhidden_left, dh_left = keys.new_zeros(sum(sizes)).split(sizes)
    if has_values:
        kept = store[schedule.kept_row(first, plan.seen, first, plan.config.k_att) :: plan.config.k_att]
        values = _values(given, kept if first == 0 else torch.cat([store[:first], kept]), keys.dtype)
        dvalues = store.new_zeros(plan.slots, batch, n)
    launch(
        backward_kernel,
        programs,
        [
            *buffers.written,
            buffers.lengths,
            turn_rates_of(plan, store.device),
            _beside(n, (weights.w_hh, chain)),
            weights.w_memory,
            weights.w_query,
            w_read_t,
            w_kept_t,
            weights.v,
            w_incorporate_t,
            values,
            *work.common,
            dvalues,
            store.new_empty(batch, n),
            dh_left,
            store.new_empty(batch, n) if is_mapped else None,
            dread_left,
            dkept_left,
            dhidden_left,
            store.new_empty(options["PIECES"], batch, n),
            store.new_empty(2, batch, n) if options["SPLITS"] else None,
            torch.zeros(1, dtype=torch.int32, device=store.device),
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        constants,
    )
    if dvalues is not None and first > 0 and work.dstore is not None:
        side = cast(Tensor, given.w_incorporate)[:, n:]
        of_first = dvalues[:first].view(-1, n).to(side.dtype)
        work.dstore[:first] += (of_first @ side).view(first, batch, n)


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
    has_values: bool
    """Whether the map's part of a summary is a sum of the microstates' parts, each computed once, when it is kept."""
    bound: Bound


def _shape(plan: Plan, compute: torch.dtype, tf32: bool | None, device: torch.device) -> Shape:
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    parts, sizes = parts_of(plan.cell, plan.config), (plan.config.k_top, plan.batch, plan.n, plan.key_size)
    # Those from before the loop are computed anew at each call: many, for a few steps, cost more than they save.
    is_mapped = parts.incorporation is not None and parts.incorporation.has_weights
    has_values = is_mapped and not plan.is_affine and plan.first_slots <= MOST_FIRST * plan.steps
    return Shape(parts, *sizes, compute, tf32, _multiprocessors(device), has_values, bound_of(plan.config))


def _has_keys(shape: Shape) -> bool:
    """Whether keys are vectors."""
    return shape.parts.scorer is not None and not shape.parts.scorer.query_cancels


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.steps, plan.batch, plan.seen, plan.first_slots, plan.slots, plan.config.k_att


@cache  # for as long as the compiled kernels, which are known by these constants
def _forward_launch(shape: Shape) -> tuple[Constants, int]:
    """What the forward kernel is compiled for, and how many programs run it."""
    tiles = _forward_tiles(shape)
    options = forward_constants(shape.parts) | _options(shape) | {"FORGET": shape.bound.forget} | tiles | LAUNCH
    return Constants(options), _programs(shape, tiles)


@cache
def _backward_launch(shape: Shape) -> tuple[Constants, int]:
    """The same of the backward kernel."""
    tiles, options = _backward_tiles(shape), _options(shape)
    block, gates = options["BLOCK"], shape.parts.cell.gates
    options["CHAIN"] = triton.cdiv(gates * shape.n, block) * block
    options["KEY_INNER"] = triton.cdiv(shape.key_size, block) * block
    options["FETCHES"] = _has_keys(shape) and not INTERPRETED
    options["LONGEST"] = shape.bound.longest
    options |= backward_constants(shape.parts) | tiles | LAUNCH
    return Constants(options), _programs(shape, tiles)


def _rounded(weights: Weights, options: dict[str, Any]) -> Weights:
    """The weights as they are multiplied: rounded, where products are in TF32."""
    if options["PRECISION"] != "tf32":
        return weights
    rounded = {
        name: None if weight is None or weight.dim() == 1 else _put_factor(weight, torch.empty_like(weight), options)
        for name, weight in weights._asdict().items()
    }
    return weights._replace(**{name: weight for name, weight in rounded.items() if weight is not None})


def _factors(weights: Weights, options: dict[str, Any], has_values: bool) -> Weights:
    """The same with rows of the products' inner size, so that each begins where a line of the cache does. With values
    the rows of the incorporation's sides come in turn with those of the scorer's matrices."""
    weights, n, inner = _rounded(weights, options), options["N"], options["INNER"]
    if has_values:
        query, memory = cast(Tensor, weights.w_query), cast(Tensor, weights.w_memory)
        sides, outputs = cast(Tensor, weights.w_incorporate).split(n, dim=1), max(n, len(query))
        joined = query.new_zeros(2, outputs, 2, inner)
        for both, one, side in zip(joined, (query, memory), sides, strict=True):
            both[: len(one), 0, :n], both[:n, 1, :n] = one, side
        weights = weights._replace(w_query=joined[0], w_memory=joined[1], w_incorporate=None)
    if n == inner:
        return weights
    padded = {
        name: F.pad(weight.view(len(weight), -1, n), (0, inner - n)).view(len(weight), -1)
        for name, weight in weights._asdict().items()
        if weight is not None and weight.dim() == 2
    }
    return weights._replace(**padded)


def _put_factor(values: Tensor, factors: Tensor, options: dict[str, Any]) -> Tensor:
    """The values as factors of products, in the factors' type; factors may have longer rows."""
    if options["PRECISION"] != "tf32":
        factors[:, : values.shape[1]] = values
        return factors
    sizes = [*values.shape, factors.shape[1]]
    launch(round_kernel, triton.cdiv(values.numel(), 1024), [values, factors], sizes, _ROUNDING)
    return factors


_ROUNDING = Constants({"BLOCK": 1024})


def _beside(outputs: int, *parts: tuple[Tensor | None, int]) -> Tensor:
    """Matrices transposed and beside each other, each with as many columns as stated."""
    present = [(weight, width) for weight, width in parts if weight is not None]
    joined = present[0][0].new_zeros(outputs, sum(width for _, width in present))
    first = 0
    for weight, width in present:
        joined[:, first : first + len(weight)] = weight.t()
        first += width
    return joined


def _values(weights: Weights, states: Tensor, compute: torch.dtype) -> Tensor:
    """The incorporation's products with microstates [S, B, n]."""
    side = cast(Tensor, weights.w_incorporate)[:, states.shape[-1] :]
    return product(states.reshape(-1, states.shape[-1]).to(compute), side.t(), compute).view(states.shape)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return 8 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _options(shape: Shape) -> dict[str, Any]:
    """What the kernels are compiled for, besides the parts and the tiles."""
    # PyTorch computes products of a single row without TF32, so there two more products make up for its rounding.
    precision = "ieee" if not shape.tf32 else "tf32x3" if shape.batch == 1 else "tf32"
    is_half = shape.compute.itemsize == 2
    block = max(_at_most(256 // shape.compute.itemsize, shape.n), 32)
    return {
        "VALUES": shape.has_values,
        "N": shape.n,
        "D": shape.key_size,
        "K_TOP": shape.k_top,
        "PLACES": triton.next_power_of_2(max(shape.k_top, 1)),
        "SCALE": 1 / math.sqrt(max(shape.key_size, 1)),
        "MIXED": is_half or precision == "tf32",
        "MATH": "plain" if INTERPRETED else "approximate" if is_half else "formula" if shape.tf32 else "accurate",
        "PRECISION": precision,
        "STAGES": 4,
        "BLOCK": block,
        # Inner sizes are whole blocks, filled up with zeros: no load is masked, and each begins where a line of the
        # cache does, which makes products of rows of 1000 numbers almost twice as fast.
        "INNER": triton.cdiv(shape.n, block) * block,
        "GROUP": min(triton.next_power_of_2(max(shape.k_top, 1)), 16),
    }


def _at_most(size: int, needed: int) -> int:
    """A power of two that covers what is needed, but not above size; at least 16."""
    return max(16, min(size, triton.next_power_of_2(needed)))


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
    key_slice = max(triton.next_power_of_2(triton.cdiv(shape.key_size, triton.cdiv(shape.n, slice_))), 16)
    return {"ROWS": rows, "QUERY_ROWS": query_rows, "COLUMNS": columns, "SLICE": slice_, "KEY_SLICE": key_slice}


def _forward_tiles(shape: Shape) -> dict[str, int]:
    """Sizes of the forward's tiles, such that in each phase about as many programs work as there are."""
    tiles = _common_tiles(shape)
    row_tiles, programs = triton.cdiv(shape.batch, tiles["ROWS"]), shape.multiprocessors
    # Keys are made of as many columns as there are units, with values of twice as many: at least eight.
    sizes = (4, 8, 16, 32) if shape.parts.cell.gates > 1 else (16, 32, 64)
    sizes = sizes[1:] if _has_keys(shape) and not shape.has_values else sizes
    tiles["PIECE"] = _at_most(PIECE, tiles["SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(shape.n, units), sizes, programs)
    tiles["SLOTS"] = 256 // tiles["COLUMNS"]
    tiles["CANDIDATES"] = 64
    return tiles


def _backward_tiles(shape: Shape) -> dict[str, int]:
    """As `_forward_tiles`, for the backward."""
    tiles = _common_tiles(shape)
    row_tiles, programs = triton.cdiv(shape.batch, tiles["ROWS"]), shape.multiprocessors
    tiles["PIECE"] = _at_most(PIECE, shape.n)
    tiles["KEY_PIECE"] = _at_most(PIECE, tiles["KEY_SLICE"])
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
