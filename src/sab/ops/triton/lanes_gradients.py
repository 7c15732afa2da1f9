# type: ignore
"""The weights' gradients after the loop of `lanes_backward`, in one kernel.

Each gradient is a sum over steps and rows of outer products. It is made in square tiles, and the sum of a tile in
parts: each program sums up one part, and the one that comes last adds up all parts, in their order, so that the same
inputs give the same gradients to the last bit. Who comes last tells a counter for each tile, at the end of the packed
weights; it is 0 before and after.
"""

import triton
import triton.language as tl

from sab.ops.triton.functions import kept_row
from sab.ops.triton.large_parts import rounded


@triton.jit
def factor(x, TYPE: tl.constexpr):
    """A tile as what it is multiplied as."""
    x = x.to(TYPE)
    return rounded(x) if TYPE == tl.float32 else x


@triton.jit
def sums_of(
    left, left_size, i, right, right_size, j, first, last, batch, slots, first_slots, seen, k_att,
    OF_KEYS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr, REAL: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of the sum over rows first to last of left[row]ᵀ right[row] and, in the first column of tiles, that
    of left[row]. (It is made where nobody asks for it too: else the compiler loads `left` number by number.)

    OF_KEYS: rows count the new slots of all rows of the batch, of whose keys `left` has the gradients and of whose
    states `right` has the store.
    """
    sums = tl.zeros((P, P), REAL)
    lefts = tl.zeros((ROWS, P), REAL)  # summed up after the loop: threads need not meet for it before
    i_at = i * P + tl.arange(0, P)
    j_at = j * P + tl.arange(0, P)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None]
        left_row = row.to(tl.int64)
        right_row = left_row
        if OF_KEYS:
            slot = first_slots + row // batch
            left_row = (row % batch).to(tl.int64) * slots + slot
            right_row = kept_row(slot, seen, first_slots, k_att).to(tl.int64) * batch + row % batch
        a = tl.load(left + left_row[:, None] * left_size + i_at[None, :], mask=inside & (i_at < left_size)[None, :],
                    other=0)  # fmt: skip
        b = tl.load(right + right_row[:, None] * right_size + j_at[None, :],
                    mask=inside & (j_at < right_size)[None, :], other=0)  # fmt: skip
        if MATH == "plain":
            sums += tl.sum(a.to(REAL)[:, :, None] * b.to(REAL)[:, None, :], 0)
        else:
            sums = tl.dot(tl.trans(factor(a, TYPE)), factor(b, TYPE), sums, input_precision="tf32")
        if j == 0:
            lefts += a.to(REAL)
    return sums, tl.sum(lefts, 0)


@triton.jit
def part_of(rows, first, part, parts, ROWS: tl.constexpr):
    """Where a part of the rows from `first` on begins and ends; the first and the last of all parts are theirs."""
    length = tl.cdiv(tl.cdiv(tl.maximum(rows - first, 0), parts), ROWS) * ROWS
    begin = first + part * length
    return begin, tl.minimum(begin + length, rows)


@triton.jit
def finish(
    sums, totals, tile, part, parts, partial, counters, gradient, stride, column, i, left_size, j, right_size,
    bias, other_bias, HAS_BIAS: tl.constexpr, HAS_OTHER: tl.constexpr, P: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Store a part of a tile; whoever comes last stores the whole as the gradient's columns from `column` on."""
    SIZE: tl.constexpr = P * P + P
    i_at = tl.arange(0, P)
    at = i_at[:, None] * P + i_at[None, :]
    own = partial + (tile * parts + part).to(tl.int64) * SIZE
    tl.store(own + at, sums)
    tl.store(own + P * P + i_at, totals)
    tl.debug_barrier()
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == parts - 1:
        tl.debug_barrier()
        tl.store(counters + tile, 0)
        sums = tl.zeros((P, P), REAL)
        totals = tl.zeros((P,), REAL)
        for other in range(parts):
            its = partial + (tile * parts + other).to(tl.int64) * SIZE
            sums += tl.load(its + at, cache_modifier=".cg")
            totals += tl.load(its + P * P + i_at, cache_modifier=".cg")
        rows = i * P + i_at
        columns = j * P + i_at
        mask = (rows < left_size)[:, None] & (columns < right_size)[None, :]
        tl.store(gradient + rows[:, None] * stride + column + columns[None, :], sums, mask=mask)
        if HAS_BIAS:
            if j == 0:
                tl.store(bias + rows, totals, mask=rows < left_size)
                if HAS_OTHER:
                    tl.store(other_bias + rows, totals, mask=rows < left_size)


@triton.jit(
    do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "first_read", "inputs", "parts"]
)
def lanes_gradients_kernel(
    dgates, dhidden, dquery, dkeys, dincorporated, dv, x, store, h_hat, summary, partial, packed,
    dw_ih, dw_hh, db_ih, db_hh, dw_memory, dw_query, dscorer_bias, dv_total, dw_incorporate, db_incorporate,
    steps, batch, first_slots, slots, seen, k_att, first_read, inputs, parts,
    n: tl.constexpr, d: tl.constexpr, GATES: tl.constexpr, SPLITS: tl.constexpr, MAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCORER_BIAS: tl.constexpr, HAS_V: tl.constexpr, INPUTS: tl.constexpr,
    P: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """INPUTS: a number that divides the size of the input."""
    REAL: tl.constexpr = store.dtype.element_ty
    G: tl.constexpr = GATES * n
    G_TILES: tl.constexpr = (G + P - 1) // P
    N_TILES: tl.constexpr = (n + P - 1) // P
    D_TILES: tl.constexpr = (d + P - 1) // P
    inputs = inputs // INPUTS * INPUTS  # which tells the compiler
    MATRICES: tl.constexpr = 2 * (GATES + 2 + 2 * MAPPED)
    counters = (packed + MATRICES * P * P).to(tl.pointer_type(tl.int32), bitcast=True)
    part = tl.program_id(0) % parts
    tile = tl.program_id(0) // parts
    own = tile  # its number among the tiles of its gradient
    rows = steps * batch
    stride = batch.to(tl.int64) * n

    begin, end = part_of(rows, 0, part, parts, ROWS)
    if own < G_TILES * N_TILES:  # of the recurrent weights
        i, j = own // N_TILES, own % N_TILES
        sums, totals = sums_of(
            dhidden, G, i, store + first_slots * stride, n, j, begin, end, batch, slots, first_slots, seen, k_att,
            False, P, ROWS, TYPE, REAL, MATH,
        )  # fmt: skip
        finish(sums, totals, tile, part, parts, partial, counters, dw_hh, n, 0, i, G, j, n, db_hh, db_ih,
               HAS_BIAS, not SPLITS, P, REAL)  # fmt: skip
        return
    own -= G_TILES * N_TILES
    begin_read, end_read = part_of(rows, first_read * batch, part, parts, ROWS)
    if own < D_TILES * N_TILES:
        i, j = own // N_TILES, own % N_TILES
        sums, totals = sums_of(
            dquery, d, i, h_hat, n, j, begin_read, end_read, batch, slots, first_slots, seen, k_att,
            False, P, ROWS, TYPE, REAL, MATH,
        )  # fmt: skip
        finish(sums, totals, tile, part, parts, partial, counters, dw_query, n, 0, i, d, j, n, dscorer_bias,
               dscorer_bias, HAS_SCORER_BIAS, False, P, REAL)  # fmt: skip
        return
    own -= D_TILES * N_TILES
    if own < D_TILES * N_TILES:
        i, j = own // N_TILES, own % N_TILES
        begin, end = part_of((slots - first_slots) * batch, 0, part, parts, ROWS)
        sums, totals = sums_of(
            dkeys, d, i, store, n, j, begin, end, batch, slots, first_slots, seen, k_att,
            True, P, ROWS, TYPE, REAL, MATH,
        )  # fmt: skip
        finish(sums, totals, tile, part, parts, partial, counters, dw_memory, n, 0, i, d, j, n, dw_memory, dw_memory,
               False, False, P, REAL)  # fmt: skip
        return
    own -= D_TILES * N_TILES
    if MAPPED:
        if own < N_TILES * N_TILES:
            i, j = own // N_TILES, own % N_TILES
            sums, totals = sums_of(
                dincorporated, n, i, h_hat, n, j, begin_read, end_read, batch, slots, first_slots, seen, k_att,
                False, P, ROWS, TYPE, REAL, MATH,
            )  # fmt: skip
            finish(sums, totals, tile, part, parts, partial, counters, dw_incorporate, 2 * n, 0, i, n, j, n,
                   db_incorporate, db_incorporate, True, False, P, REAL)  # fmt: skip
            return
        own -= N_TILES * N_TILES
        if own < N_TILES * N_TILES:
            i, j = own // N_TILES, own % N_TILES
            sums, totals = sums_of(
                dincorporated, n, i, summary, n, j, begin_read, end_read, batch, slots, first_slots, seen, k_att,
                False, P, ROWS, TYPE, REAL, MATH,
            )  # fmt: skip
            finish(sums, totals, tile, part, parts, partial, counters, dw_incorporate, 2 * n, n, i, n, j, n,
                   db_incorporate, db_incorporate, False, False, P, REAL)  # fmt: skip
            return
        own -= N_TILES * N_TILES
    if HAS_V:
        if own < D_TILES:
            if part == 0:
                at = own * P + tl.arange(0, P)
                totals = tl.zeros((P,), REAL)
                for start in range(0, batch, ROWS):
                    row = start + tl.arange(0, ROWS)
                    mask = (row < batch)[:, None] & (at < d)[None, :]
                    totals += tl.sum(tl.load(dv + row[:, None] * d + at[None, :], mask=mask, other=0), 0)
                tl.store(dv_total + at, totals, mask=at < d)
            return
        own -= D_TILES
    j_tiles = tl.cdiv(inputs, P)  # of the input weights
    i, j = own // j_tiles, own % j_tiles
    sums, totals = sums_of(
        dgates, G, i, x, inputs, j, begin, end, batch, slots, first_slots, seen, k_att,
        False, P, ROWS, TYPE, REAL, MATH,
    )  # fmt: skip
    finish(sums, totals, tile, part, parts, partial, counters, dw_ih, inputs, 0, i, G, j, inputs, db_ih, db_ih,
           HAS_BIAS and SPLITS, False, P, REAL)  # fmt: skip
