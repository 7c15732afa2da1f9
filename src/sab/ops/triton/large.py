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
import triton
from torch import Tensor

from sab.ops import schedule
from sab.ops.buffers import Buffers, Weights, Work
from sab.ops.plan import Plan, turn_rates_of
from sab.ops.precision import allow_tf32, product
from sab.ops.triton.copies import Copy, copy_all
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
from sab.ops.triton.launch import INTERPRETED, Constants, launch

MOST_FIRST = 16
"""How many microstates may come before the loop, for each of its steps, if they are to have values."""
WARPS = 4
"""Of a program; more wait longer for each other."""
MOST_NARROW = 512
"""The largest hidden size at which the backward's programs have so many, above it twice as many; and at which the
forward's tiles have 32 rows, above it 64."""


def forward(plan: Plan, weights: Weights, buffers: Buffers, *, tf32: bool | None = None) -> None:
    """Fill the buffers; tf32: whether factors of float32 products may be rounded to TF32 (None: as set in PyTorch)."""
    store, keys, first = buffers.store, cast(Tensor, buffers.keys), plan.first_slots
    shape = _shape(plan, keys.dtype, tf32, store.device)
    constants, programs = _forward_launch(shape)
    options = constants.values
    batch, n, inner = plan.batch, plan.n, options["INNER"]
    factors = Factors(keys.dtype, options["PRECISION"] == "tf32")
    weights = _forward_factors(weights, factors, n, inner, shape.has_values)
    # The states once more as factors, read by all programs in each step.
    lefts, counter = keys.new_empty(4, batch, inner), _counter(store.device)
    h_left, h_hat_left, summary_left = lefts.split((2, 1, 1))
    factors.copies += [(lefts[0], store[first]), (lefts[1:].flatten(0, 1), None), (counter, None)]
    factors.make()
    values = map_part = new_key = best_key = best_slot = lost = None
    if shape.has_values:
        values, map_part = keys.new_empty(plan.slots, batch, n), store.new_empty(batch, n)
        if first > 0:
            values[:first] = _values(store[:first], cast(Tensor, weights.w_memory)[:n, inner : inner + n].t())
    if plan.is_affine:
        slices = triton.cdiv(n, options["SLICE"])
        best_key = store.new_empty(slices, batch, options["PLACES"])
        best_slot = torch.empty(best_key.shape, dtype=torch.int32, device=store.device)
        lost = best_slot.new_empty(batch) if plan.config.forgets else None
    elif options["NORMALISES"]:
        new_key = store.new_empty(batch, plan.key_size)
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
            new_key,
            best_key,
            best_slot,
            buffers.live,
            buffers.reads,
            lost,
            counter,
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
    store, keys, first = buffers.store, cast(Tensor, buffers.keys), plan.first_slots
    shape = _shape(plan, keys.dtype, tf32, store.device)
    constants, programs = _backward_launch(shape)
    options = constants.values
    batch, n, inner, key_inner = plan.batch, plan.n, options["INNER"], options["KEY_INNER"]
    is_mapped = options["MAPPED"] and not shape.has_values
    factors = Factors(keys.dtype, options["PRECISION"] == "tf32")
    w_hh_t = factors.beside((weights.w_hh.t(), options["CHAIN"]))
    w_read_t = w_kept_t = w_incorporate_t = kept = values = dvalues = None
    if _has_keys(shape):
        w_query, w_memory = cast(Tensor, weights.w_query), cast(Tensor, weights.w_memory)
        sides: list[tuple[Tensor, int]] = []
        if shape.has_values:
            sides = [(side.t(), inner) for side in cast(Tensor, weights.w_incorporate).split(n, dim=1)]
        w_read_t = factors.beside((w_query.t(), key_inner), *sides[:1])
        w_kept_t = factors.beside((w_memory.t(), key_inner), *sides[1:])
    if is_mapped:
        w_incorporate_t = factors.beside((cast(Tensor, weights.w_incorporate).t(), inner))
    entries = 0 if w_read_t is None else w_read_t.shape[1]
    sizes = [batch * size for size in (entries, entries, options["CHAIN"], inner)]
    lefts, counter = keys.new_empty(sum(sizes)), _counter(store.device)
    factors.copies += [(lefts.view(-1, options["BLOCK"]), None), (counter, None)]
    if shape.has_values:
        kept = keys.new_empty(plan.slots, batch * n)
        own = store[schedule.kept_row(first, plan.seen, first, plan.config.k_att) :: plan.config.k_att]
        factors.copies += [(kept[first:], own.flatten(1)), (kept[:first], store[:first].flatten(1))]
    factors.make()
    dread_left, dkept_left, dhidden_left, dh_left = lefts.split(sizes)
    side_t = None if kept is None else cast(Tensor, w_kept_t)[:, key_inner : key_inner + n]
    if kept is not None and side_t is not None:
        values = _values(kept.view(plan.slots, batch, n), side_t)
        del kept
        dvalues = torch.zeros_like(values, dtype=store.dtype)
    launch(
        backward_kernel,
        programs,
        [
            *buffers.written,
            buffers.lengths,
            turn_rates_of(plan, store.device),
            w_hh_t,
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
            counter,
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        constants,
    )
    if dvalues is not None and side_t is not None and first > 0 and work.dstore is not None:
        of_first = dvalues[:first].view(-1, n).to(side_t.dtype)
        work.dstore[:first] += (of_first @ side_t.t()).view(first, batch, n)


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
    options = forward_constants(shape.parts) | _options(shape) | {"FORGET": shape.bound.forget} | tiles
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
    options |= backward_constants(shape.parts) | tiles
    return Constants(options), _programs(shape, tiles)


class Factors:
    """Factors of products that are copies: in another type, rounded, transposed or with longer rows."""

    def __init__(self, dtype: torch.dtype, rounds: bool):
        self.dtype, self.rounds = dtype, rounds
        self.copies: list[Copy] = []
        """What `make` is to copy."""

    def beside(self, *parts: tuple[Tensor, int]) -> Tensor:
        """The matrices next to each other, filled up with zeros: each to so many columns, all to the height of the
        tallest."""
        (matrix, wide), *others = parts
        is_done = matrix.shape[1] == wide and matrix.dtype == self.dtype and matrix.is_contiguous()
        if not others and is_done and not self.rounds:
            return matrix
        height = max(len(matrix) for matrix, _ in parts)
        joined = matrix.new_empty(height, sum(wide for _, wide in parts), dtype=self.dtype)
        self.copies += zip(joined.split([wide for _, wide in parts], 1), (matrix for matrix, _ in parts), strict=True)
        return joined

    def make(self) -> None:
        """Make all copies, and forget them, so that their memory is free as soon as nobody else needs it."""
        copy_all(self.copies, self.rounds)
        self.copies.clear()


def _forward_factors(weights: Weights, factors: Factors, n: int, inner: int, has_values: bool) -> Weights:
    """The matrices with rows of the products' inner size, so that each begins where a line of the cache does. With
    values the rows of the incorporation's sides come in turn with those of the scorer's matrices."""

    def of(weight: Tensor | None, *side: tuple[Tensor, int]) -> Tensor | None:
        return weight if weight is None or weight.dim() == 1 else factors.beside((weight, inner), *side)

    sides: list[tuple[Tensor, int]] = []
    if weights.w_incorporate is not None:
        sides = [(side, inner) for side in weights.w_incorporate.split(n, dim=1)]
    joined, alone = (sides, []) if has_values else ([], sides)
    w_hh = cast(Tensor, of(weights.w_hh))
    w_query, w_memory = of(weights.w_query, *joined[:1]), of(weights.w_memory, *joined[1:])
    w_incorporate = factors.beside(*alone) if alone else None
    return weights._replace(w_hh=w_hh, w_query=w_query, w_memory=w_memory, w_incorporate=w_incorporate)


def _counter(device: torch.device) -> Tensor:
    """The counter of `meet`, to be set to 0."""
    return torch.empty((1, 1), dtype=torch.int32, device=device)


def _values(states: Tensor, side_t: Tensor) -> Tensor:
    """The incorporation's products with microstates [S, B, n], from its side for them, transposed."""
    return product(states.reshape(-1, states.shape[-1]).to(side_t.dtype), side_t, side_t.dtype).view(states.shape)


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


def _with(warps: int) -> dict[str, int]:
    """Options of a launch: all programs run at the same time or none does, as they wait for each other."""
    return {"num_warps": warps, "launch_cooperative_grid": True}


def _piece(tiles: dict[str, int]) -> int:
    """How many numbers of a microstate are read at once: four by each thread, 16 bytes."""
    return 128 * tiles["num_warps"]


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
    tiles = _common_tiles(shape) | _with(WARPS)
    tiles["ROWS"] = _at_most(32 if shape.n <= MOST_NARROW else 64, shape.batch)
    row_tiles, programs = triton.cdiv(shape.batch, tiles["ROWS"]), shape.multiprocessors
    # Keys are made of as many columns as there are units, with values of twice as many: at least eight.
    sizes = (4, 8, 16, 32) if shape.parts.cell.gates > 1 else (16, 32, 64)
    sizes = sizes[1:] if _has_keys(shape) and not shape.has_values else sizes
    tiles["PIECE"] = _at_most(_piece(tiles), tiles["SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(shape.n, units), sizes, programs)
    tiles["CANDIDATES"], tiles["WIDTH"] = 64, max(triton.next_power_of_2(shape.key_size), 16)
    tiles["WARPS"] = 1 if INTERPRETED else WARPS
    tiles["KC"] = 32 * triton.cdiv(max(shape.k_top, 1), 32)
    return tiles


def _backward_tiles(shape: Shape) -> dict[str, int]:
    """As `_forward_tiles`, for the backward."""
    tiles = _common_tiles(shape) | _with(WARPS if shape.n <= MOST_NARROW else 2 * WARPS)
    row_tiles, programs = triton.cdiv(shape.batch, tiles["ROWS"]), shape.multiprocessors
    tiles["PIECE"] = _at_most(_piece(tiles), shape.n)
    slices = triton.cdiv(shape.n, tiles["SLICE"])
    tiles["KEY_SLICE"] = max(triton.next_power_of_2(triton.cdiv(shape.key_size, slices)), 16)
    tiles["KEY_PIECE"] = _at_most(_piece(tiles), tiles["KEY_SLICE"])
    is_small = shape.n <= 256
    sizes, most_pieces = ((16, 32, 64), 8) if is_small else ((32, 64), 4)
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(shape.n, units), sizes, programs)
    tiles["PIECES"] = max(1, min(programs // (row_tiles * triton.cdiv(shape.n, tiles["UNITS"])), most_pieces))
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
