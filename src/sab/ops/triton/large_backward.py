# type: ignore

"""The backward loop over time for large hidden sizes."""

import triton
import triton.language as tl

from sab.ops.triton.access import angles
from sab.ops.triton.functions import cuts, keeps, slots_at
from sab.ops.triton.large_parts import (
    also,
    apart,
    meet,
    microstate,
    product,
    small_product,
    store_factor,
    turned,
    wide,
)


@triton.jit
def _arriving(t, row, unit, mask, batch, chained, carried, kept, slots, slot, store, dstore, partial, carry, dkeys,
              lengths, w_memory, h_row, real: tl.constexpr, MATH: tl.constexpr, SPLITS: tl.constexpr,
              NUMBERS: tl.constexpr, SLOPE: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """The gradient of h_t: from outside and from reads, along the chain, and through the key if it was kept."""
    at = row * N + unit
    dh = tl.load(dstore + wide(h_row * batch) * N + at, mask=mask, other=0.0)
    for piece in tl.static_range(PIECES):
        dh += tl.load(partial + piece * batch * N + at, mask=also(mask, chained), other=0.0)
    if SPLITS:
        dh += tl.load(carry + at, mask=also(mask, carried), other=0.0)
    if lengths is not None:
        dh = tl.where(t < tl.load(lengths + row, mask=row < batch, other=0), dh, 0.0)
    if NUMBERS:
        dkey = tl.load(dkeys + wide(row) * slots + slot, mask=also(row < batch, kept), other=0.0)
        slope = tl.load(w_memory + unit, mask=unit < N, other=0.0).to(real)
        if SLOPE is not None:
            h = tl.load(store + wide(h_row * batch) * N + at, mask=also(mask, kept), other=0.0)
            slope = slope * SLOPE(h, MATH)
        dh += dkey * slope
    return dh


@triton.jit
def _cell_saved(t, row, unit, mask, batch, h_old, c, gates, hidden_new, dc, dcells, HAS_C: tl.constexpr,
                SPLITS: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr):  # fmt: skip
    """What `_cell_backward` needs, fetched ahead: the gates; h, c, c after the step, the last gate's hidden part; the
    gradients of c from later and from outside. What the cell does not have is a gate once more."""
    at = row * N + unit
    gate_at = gates + wide(t * batch) * (GATES * N) + row * (GATES * N) + unit
    activated = ()
    for g in tl.static_range(GATES):
        activated = activated + (tl.load(gate_at + g * N, mask=mask, other=0.0),)
    h = activated[0]
    last = activated[0]
    c_old = activated[0]
    c_new = activated[0]
    later = activated[0]
    outside = activated[0]
    if HAS_C:
        c_old = tl.load(c + wide(t * batch) * N + at, mask=mask, other=0.0)
        c_new = tl.load(c + wide((t + 1) * batch) * N + at, mask=mask, other=0.0)
        later = tl.load(dc + at, mask=mask, other=0.0)
        if dcells is not None:
            outside = tl.load(dcells + wide(t * batch) * N + at, mask=mask, other=0.0)
    if SPLITS:
        h = tl.load(h_old + at, mask=mask, other=0.0)
        last = tl.load(hidden_new + wide(t * batch) * N + at, mask=mask, other=0.0)
    return activated, h, c_old, c_new, last, later, outside


@triton.jit
def _store_gate(gate, value, gate_at, left_at, mask, dgates, dhidden_left, N: tl.constexpr):
    """The gradient of a gate's sums."""
    tl.store(dgates + gate_at + gate * N, value, mask=mask)
    if dhidden_left is not None:
        store_factor(dhidden_left + left_at + gate * N, value, mask)


@triton.jit
def _cell_backward(t, row, unit, mask, batch, cut, dh_hat, saved, dc, dcells, dgates, dhidden, dhidden_left, carry,
                   real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, HAS_C: tl.constexpr,
                   SPLITS: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr):  # fmt: skip
    """The gradients of a cell's gates and states from that of its provisional hidden state."""
    fetched, h, c_old, c_new, last, dc_new, outside = saved
    at = row * N + unit
    left_at = row * (GATES * N) + unit
    gate_at = wide(t * batch) * (GATES * N) + left_at
    activated = ()
    for g in tl.static_range(GATES):
        activated = activated + (fetched[g].to(real),)
    if HAS_C:
        if dcells is not None:
            dc_new += outside
    of_x, of_h, of_state, dc_old = CELL(
        dh_hat, dc_new, activated, h.to(real), c_old.to(real), c_new.to(real), last.to(real), MATH
    )
    for g in tl.static_range(GATES):
        if SPLITS:
            tl.store(dgates + gate_at + g * N, of_x[g], mask=mask)
            _store_gate(g, of_h[g], gate_at, left_at, mask, dhidden, dhidden_left, N)
        else:
            _store_gate(g, of_x[g], gate_at, left_at, mask, dgates, dhidden_left, N)
    if SPLITS:
        tl.store(carry + at, of_state, mask=mask)
    if HAS_C:
        tl.store(dc + at, tl.where(cut, 0.0, dc_old), mask=mask)


@triton.jit
def _finish_phase(slot, step, batch, pid, programs, slots, dkeys, dkeys_left, turn_rates, real: tl.constexpr,
                  NORMALISES: tl.constexpr, MIXED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """The gradients of a slot's keys, which nothing is added to any more, as the left factor of `_chain_phase`: turned
    back by the step that kept them where the scorer turns keys, and in the products' type."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = (tile % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
        column = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < batch) & (column < D)
        dkey_at = dkeys + (wide(row) * slots + slot) * D + column
        dkey = tl.load(dkey_at, mask=inside, other=0.0)
        if NORMALISES:
            rate = tl.load(turn_rates + column, mask=column < D, other=0)
            cosine, sine = angles(step, column, rate, real)
            tl.debug_barrier()  # several threads may have the same entry: all load it before one writes over it
            dkey = turned(dkey, cosine, -sine)
            tl.store(dkey_at, dkey, mask=inside)
        if MIXED:
            store_factor(dkeys_left + row * D + column, dkey, inside)


@triton.jit
def _chain_phase(t, batch, pid, programs, chained, kept, slot, slots, partial, dhidden, dhidden_left, dkeys, dkeys_left,
                 w_hh_t, w_memory_t, real: tl.constexpr, MIXED: tl.constexpr, NUMBERS: tl.constexpr,
                 K_TOP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, GATES: tl.constexpr, PIECES: tl.constexpr,
                 ROWS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Part of the gradient of h_{t-1}: along the chain, and through its key where it was kept.

    The inner dimension of both products together is cut into PIECES even pieces, so that there are enough tiles; who
    reads `partial` adds them up.
    """
    row_tiles, unit_tiles = tl.cdiv(batch, ROWS), tl.cdiv(N, UNITS)
    chain_blocks = tl.where(chained, tl.cdiv(GATES * N, BLOCK), 0)
    blocks = chain_blocks
    if K_TOP > 0 and not NUMBERS:
        blocks += tl.where(kept, tl.cdiv(D, BLOCK), 0)
    for tile in range(pid, row_tiles * unit_tiles * PIECES, programs):
        piece, place = tile % PIECES, tile // PIECES
        row = place % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = place // row_tiles * UNITS + tl.arange(0, UNITS)
        first, last = piece * blocks // PIECES, (piece + 1) * blocks // PIECES
        sums = tl.zeros((ROWS, UNITS), real)
        if dhidden_left is not None:
            left = dhidden_left + row * (GATES * N)
        else:
            left = dhidden + (wide(t * batch) + row) * (GATES * N)
        sums = product(sums, left, w_hh_t + unit * (GATES * N), row < batch, unit < N, first * BLOCK,
                       tl.minimum(last, chain_blocks) * BLOCK, GATES * N, BLOCK, STAGES, PRECISION)  # fmt: skip
        if K_TOP > 0 and not NUMBERS:
            if last > chain_blocks:
                if MIXED:
                    left_key = dkeys_left + row * D
                else:
                    left_key = dkeys + (wide(row) * slots + slot) * D
                sums = product(sums, left_key, w_memory_t + unit * D, row < batch, unit < N,
                               tl.maximum(first - chain_blocks, 0) * BLOCK, (last - chain_blocks) * BLOCK, D, BLOCK,
                               STAGES, PRECISION)  # fmt: skip
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        tl.store(partial + piece * batch * N + row[:, None] * N + unit[None, :], sums, mask=inside)


@triton.jit
def _key_saved(row, slot, valid, column, at_row, slots, query, keys, dkeys, v, dv, turn_rates,
               NORMALISES: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """What `_key_backward` needs, fetched ahead."""
    inside = column < D
    both = valid[:, None] & inside[None, :]
    gathered = (wide(row) * slots + slot)[:, None] * D + column[None, :]
    own = tl.load(keys + gathered, mask=both, other=0.0)
    dkey = tl.load(dkeys + gathered, mask=both, other=0.0)
    q = tl.load(query + at_row * D + column, mask=inside, other=0.0)
    factor = q
    dv_old = q
    if v is not None:
        factor = tl.load(v + column, mask=inside, other=0.0)
        dv_old = tl.load(dv + row * D + column, mask=inside, other=0.0)
    rate = q
    if NORMALISES:
        rate = tl.load(turn_rates + column, mask=inside, other=0)
    return own, dkey, q, factor, dv_old, rate


@triton.jit
def _scales_saved(row, slot, valid, at_row, slots, first_slots, key_scale, query_scale, scores, K_TOP: tl.constexpr,
                  PLACES: tl.constexpr):  # fmt: skip
    """What `_key_backward` needs where the scorer normalises: the selected scores, and 1 / the lengths of keys and of
    the query. That of a key from before the loop is 1, as it came."""
    score = tl.load(scores + at_row * K_TOP + tl.arange(0, PLACES), mask=valid, other=0.0)
    key_at = key_scale + wide(row) * slots + slot
    key_inverse = tl.load(key_at, mask=valid & (slot >= first_slots), other=1.0)
    return score, key_inverse, tl.load(query_scale + at_row)


@triton.jit
def _key_backward(step, row, slot, valid, column, at_row, slots, first_slots, da, saved, scales, dquery, dquery_left,
                  dkeys, dv, real: tl.constexpr, MATH: tl.constexpr, QUERY: tl.constexpr, SCORE: tl.constexpr,
                  NORMALISES: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, MIXED: tl.constexpr):  # fmt: skip
    """The gradients of keys and query from those of the selected scores; where the scorer normalises, those of both
    before they were brought to length 1, and that of the query before it was turned (`_finish_phase` turns keys' back).
    """
    own, dkey, q, factor, dv_old, rate = saved
    inside = column < D
    dscore = da
    partner = q
    if NORMALISES:
        score, key_inverse, query_inverse = scales
        cosine, sine = angles(step, column, rate, real)
        dscore = da * (query_inverse * (D * SCALE))
        partner = turned(factor.to(real) * q, cosine, sine)
    dkey_new, dq_terms, dv_terms = SCORE(
        dscore[:, None], own.to(real), partner[None, :], factor.to(real)[None, :], MATH
    )
    dq = tl.sum(dq_terms, 0)
    if NORMALISES:
        dq = turned(dq, cosine, -sine)
        dv_new = q * dq
        dq = factor.to(real) * dq
        # No score depends on a vector's length, so the gradient has no part along the vector. A key from before the
        # loop came with length 1: its gradient is that of the key as it came.
        along = da * score
        dkey_new = (dkey_new - tl.where(slot >= first_slots, along, 0.0)[:, None] * own.to(real)) * key_inverse[:, None]
        dq -= tl.sum(along, 0) * query_inverse * query_inverse * q
    dq = QUERY(dq, SCALE)
    dkey += dkey_new
    if dv is not None:
        if not NORMALISES:
            dv_new = tl.sum(dv_terms, 0)
        tl.store(dv + row * D + column, dv_old + dv_new, mask=inside)
    gathered = (wide(row) * slots + slot)[:, None] * D + column[None, :]
    tl.store(dkeys + gathered, dkey, mask=valid[:, None] & inside[None, :])
    tl.store(dquery + at_row * D + column, dq, mask=inside)
    if MIXED:
        store_factor(dquery_left + row * D + column, dq, inside)


@triton.jit
def _read_backward_phase(t, batch, pid, programs, used, chained, carried, kept, seen, first_slots, slots, k_att, cut,
                         store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, key_scale,
                         query_scale, scores, lengths, turn_rates, w_memory, w_query, v, dstore, dc, dcells, dgates,
                         dhidden, dhidden_left, dquery, dkeys, dsummary, dweights, dv, dh_hat, ds_joined, dquery_left,
                         partial, carry, new_carry, real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr,
                         GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr, NUMBERS: tl.constexpr,
                         SLOPE: tl.constexpr, QUERY: tl.constexpr, SCORE: tl.constexpr, NORMALISES: tl.constexpr,
                         WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr,
                         READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                         K_TOP: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr, MIXED: tl.constexpr,
                         PIECE: tl.constexpr, SLICE: tl.constexpr, KEY_PIECE: tl.constexpr, KEY_SLICE: tl.constexpr,
                         PIECES: tl.constexpr):  # fmt: skip
    """From the gradient of h_t to those of the selected microstates, their keys and the query: a slice of a row's units
    and of its query in one tile.

    The gradients of the weights need the whole row, so that the tiles of a row all compute them: none waits for
    another. What is summed up, each tile writes for its slice alone, and nothing that another reads.
    Where keys are numbers, the query's part is no product, and the cell's backward is done here as well.
    """
    place = tl.arange(0, PLACES)
    piece = tl.arange(0, PIECE)
    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
        row, part = tile % batch, tile // batch
        at_row = wide(t * batch + row)
        slot = tl.load(selected + at_row * K_TOP + place, mask=place < K_TOP, other=-1)
        valid = slot >= 0  # none in a row that has ended
        slot = tl.maximum(slot, 0)
        weight = tl.load(weights + at_row * K_TOP + place, mask=valid, other=0.0)
        if dweights is not None:
            da = tl.load(dweights + at_row * K_TOP + place, mask=valid, other=0.0)
        else:
            da = tl.zeros((PLACES,), real)
        scales = ()
        if NORMALISES:
            # Nothing in this loop writes these, so there is no meeting to wait for.
            scales = _scales_saved(row, slot, valid, at_row, slots, first_slots, key_scale, query_scale, scores, K_TOP,
                                   PLACES)  # fmt: skip
        if not NUMBERS and KEY_PIECE >= KEY_SLICE:
            column = part * KEY_SLICE + tl.arange(0, KEY_PIECE)
            saved = _key_saved(row, slot, valid, column, at_row, slots, query, keys, dkeys, v, dv, turn_rates,
                               NORMALISES, D)  # fmt: skip
        memory = (wide(microstate(slot, seen, first_slots, k_att)) * batch + row) * N
        for first in range(0, N, PIECE):
            unit = first + piece
            inside = unit < N
            mine = inside & (unit // SLICE == part)
            gathered = memory[:, None] + unit[None, :]
            states = tl.load(store + gathered, mask=valid[:, None] & inside[None, :], other=0.0)
            dstates = tl.load(dstore + gathered, mask=valid[:, None] & mine[None, :], other=0.0)
            if MAPPED:
                ds = tl.load(ds_joined + row * N + unit, mask=inside, other=0.0)
            else:
                dh = _arriving(t, row, unit, inside, batch, chained, carried, kept, slots, used, store, dstore, partial,
                               carry, dkeys, lengths, w_memory, first_slots + 1 + t, real, MATH, SPLITS, NUMBERS,
                               SLOPE, N, PIECES)  # fmt: skip
                provisional = dh
                s = dh
                if READS_STATE:
                    provisional = tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0)
                if READS_SUMMARY:
                    s = tl.load(summary + at_row * N + unit, mask=inside, other=0.0)
                dhat, ds, _ = INCORPORATE(dh, provisional, s, dh, MATH)
                tl.store(dh_hat + row * N + unit, dhat, mask=mine)
                if dsummary is not None:
                    ds += tl.load(dsummary + at_row * N + unit, mask=inside, other=0.0)
            tl.store(dstore + gathered, dstates + weight[:, None] * ds[None, :], mask=valid[:, None] & mine[None, :])
            da += tl.sum(states * ds[None, :], 1)
        norm = 1.0
        if SAVES_NORM:
            norm = tl.load(norms + at_row)
        is_last = place == tl.minimum(K_TOP, used) - 1
        (dscores,) = WEIGH((da,), (weight,), norm, (is_last,))
        da = tl.where(valid, dscores, 0.0)
        if NUMBERS:
            total = tl.sum(da)
            if part == 0:
                key_at = dkeys + wide(row) * slots + slot
                tl.store(dquery + at_row, total)
                tl.store(key_at, tl.load(key_at, mask=valid, other=0.0) + da, mask=valid)
            tl.debug_barrier()  # dh_hat was written by other threads perhaps
            for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, N), PIECE):
                unit = first + piece
                inside = (unit < N) & (unit // SLICE == part)
                slope = tl.load(w_query + unit, mask=inside, other=0.0).to(real)
                if SLOPE is not None:
                    slope = slope * SLOPE(tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0), MATH)
                dhat = tl.load(dh_hat + row * N + unit, mask=inside, other=0.0) + total * slope
                saved = _cell_saved(t, row, unit, inside, batch, store + wide((first_slots + t) * batch) * N, c, gates,
                                    hidden_new, dc, dcells, HAS_C, SPLITS, N, GATES)  # fmt: skip
                if PIECE < 128:
                    tl.debug_barrier()  # several threads have the same unit, and dgates may lie where gates do
                _cell_backward(t, row, unit, inside, batch, cut, dhat, saved, dc, dcells, dgates, dhidden, dhidden_left,
                               new_carry, real, MATH, CELL, HAS_C, SPLITS, N, GATES)  # fmt: skip
        elif KEY_PIECE >= KEY_SLICE:
            _key_backward(seen + t, row, slot, valid, column, at_row, slots, first_slots, da, saved, scales, dquery,
                          dquery_left, dkeys, dv, real, MATH, QUERY, SCORE, NORMALISES, SCALE, D, MIXED)  # fmt: skip
        else:
            for first in range(part * KEY_SLICE, tl.minimum(part * KEY_SLICE + KEY_SLICE, D), KEY_PIECE):
                column = first + tl.arange(0, KEY_PIECE)
                saved = _key_saved(row, slot, valid, column, at_row, slots, query, keys, dkeys, v, dv, turn_rates,
                                   NORMALISES, D)  # fmt: skip
                _key_backward(seen + t, row, slot, valid, column, at_row, slots, first_slots, da, saved, scales, dquery,
                              dquery_left, dkeys, dv, real, MATH, QUERY, SCORE, NORMALISES, SCALE, D,
                              MIXED)  # fmt: skip


@triton.jit
def _cell_backward_phase(t, batch, pid, programs, used, chained, carried, kept, slots, cut, first_slots, store, c,
                         gates, hidden_new, lengths, w_memory, w_query_t, dstore, dc, dcells, dgates, dhidden,
                         dhidden_left, dquery_left, dkeys, dh_hat, partial, carry, new_carry, real: tl.constexpr,
                         MATH: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr,
                         SPLITS: tl.constexpr, NUMBERS: tl.constexpr, SLOPE: tl.constexpr, N: tl.constexpr,
                         D: tl.constexpr, K_TOP: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """The cell's backward, after the query's product where there was a read."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        rows, units = row[:, None], unit[None, :]
        inside = (rows < batch) & (units < N)
        saved = _cell_saved(t, rows, units, inside, batch, store + wide((first_slots + t) * batch) * N, c, gates,
                            hidden_new, dc, dcells, HAS_C, SPLITS, N, GATES)  # fmt: skip
        if used > 0:
            dhat = tl.load(dh_hat + rows * N + units, mask=inside, other=0.0)
            if K_TOP > 0 and not NUMBERS:
                sums = small_product(dquery_left + row * D, w_query_t + unit * D, row < batch, unit < N, real, D, ROWS,
                                     COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
                dhat += apart(sums)
        else:
            dhat = _arriving(t, rows, units, inside, batch, chained, carried, kept, slots, used, store, dstore, partial,
                             carry, dkeys, lengths, w_memory, first_slots + 1 + t, real, MATH, SPLITS, NUMBERS, SLOPE,
                             N, PIECES)  # fmt: skip
        _cell_backward(t, rows, units, inside, batch, cut, dhat, saved, dc, dcells, dgates, dhidden, dhidden_left,
                       new_carry, real, MATH, CELL, HAS_C, SPLITS, N, GATES)  # fmt: skip


@triton.jit
def _map_gradient_phase(t, batch, pid, programs, used, chained, carried, kept, slots, first_slots, store, dstore,
                        partial, carry, dkeys, lengths, w_memory, h_hat, summary, mapped, dincorporated, dh_left,
                        dh_hat, ds_joined, real: tl.constexpr, MATH: tl.constexpr, SPLITS: tl.constexpr,
                        NUMBERS: tl.constexpr, SLOPE: tl.constexpr, INCORPORATE: tl.constexpr,
                        SAVES_MAP: tl.constexpr, READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr,
                        N: tl.constexpr, PIECES: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of the map, as the left factor of `_map_backward_phase`, and of ĥ_t and the summary besides it."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        rows = (tile % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
        units = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (rows < batch) & (units < N)
        at = rows * N + units
        dh = _arriving(t, rows, units, inside, batch, chained, carried, kept, slots, used, store, dstore, partial,
                       carry, dkeys, lengths, w_memory, first_slots + 1 + t, real, MATH, SPLITS, NUMBERS, SLOPE, N,
                       PIECES)  # fmt: skip
        at_step = wide(t * batch) * N + at
        provisional = dh
        s = dh
        linear = dh
        if READS_STATE:
            provisional = tl.load(h_hat + at_step, mask=inside, other=0.0)
        if READS_SUMMARY:
            s = tl.load(summary + at_step, mask=inside, other=0.0)
        if SAVES_MAP:
            linear = tl.load(mapped + at_step, mask=inside, other=0.0)
        dhat, ds, dmapped = INCORPORATE(dh, provisional, s, linear, MATH)
        tl.store(dh_hat + at, dhat, mask=inside)
        tl.store(ds_joined + at, ds, mask=inside)
        tl.store(dincorporated + at_step, dmapped, mask=inside)
        if MIXED:
            store_factor(dh_left + at, dmapped, inside)


@triton.jit
def _map_backward_phase(t, batch, pid, programs, dh_left, w_incorporate_t, dh_hat, dsummary, ds_joined,
                        real: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                        BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Adds Wᵀ times the map's gradient to the gradients of ĥ_t and of the summary."""
    row_tiles, unit_tiles = tl.cdiv(batch, ROWS), tl.cdiv(N, COLUMNS)
    for tile in range(pid, row_tiles * unit_tiles * 2, programs):
        half, place = tile % 2, tile // 2
        row = place % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = place // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        at = row[:, None] * N + unit[None, :]
        direct = tl.load(dh_hat + at, mask=also(inside, half == 0), other=0.0)
        direct += tl.load(ds_joined + at, mask=also(inside, half == 1), other=0.0)
        if dsummary is not None:
            direct += tl.load(dsummary + wide(t * batch) * N + at, mask=also(inside, half == 1), other=0.0)
        sums = small_product(dh_left + row * N, w_incorporate_t + (half * N + unit) * N, row < batch, unit < N, real, N,
                             ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
        sums = apart(sums) + direct
        tl.store(dh_hat + at, sums, mask=also(inside, half == 0))
        tl.store(ds_joined + at, sums, mask=also(inside, half == 1))


@triton.jit(do_not_specialize=["steps", "batch", "seen", "first_slots", "slots", "k_att", "k_trunc"])
def backward_kernel(store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
                    key_scale, query_scale, scores, lengths, turn_rates, w_hh_t, w_memory, w_memory_t, w_query,
                    w_query_t, v, w_incorporate_t, dstore, dc, dcells, dgates, dhidden, dquery, dkeys, dsummary,
                    dweights, dincorporated, dv, dh_hat, dh_left, ds_joined, dquery_left, dkeys_left, dhidden_left,
                    partial, carry, counter, steps, batch, seen, first_slots, slots, k_att, k_trunc, CELL: tl.constexpr,
                    GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr, NUMBERS: tl.constexpr,
                    SLOPE: tl.constexpr, QUERY: tl.constexpr, SCORE: tl.constexpr, NORMALISES: tl.constexpr,
                    WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr,
                    SAVES_MAP: tl.constexpr, READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr, N: tl.constexpr,
                    D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr,
                    MIXED: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
                    PIECES: tl.constexpr, QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
                    SLICE: tl.constexpr, KEY_PIECE: tl.constexpr, KEY_SLICE: tl.constexpr, BLOCK: tl.constexpr,
                    STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    real: tl.constexpr = store.dtype.element_ty
    pid, programs = tl.program_id(0), tl.num_programs(0)
    goal = programs
    # Whether `partial` holds anything of the step's gradient, and whether the chain is part of that.
    carried = steps < 0
    chained = keeps(seen + steps - 1, k_att)
    if K_TOP > 0 and not NUMBERS:
        if chained:
            if MIXED or NORMALISES:
                _finish_phase(slots - 1, seen + steps - 1, batch, pid, programs, slots, dkeys, dkeys_left, turn_rates,
                              real, NORMALISES, MIXED, D, QUERY_ROWS, COLUMNS)  # fmt: skip
                goal = meet(counter, goal, programs)
            _chain_phase(steps, batch, pid, programs, carried, chained, slots - 1, slots, partial, dhidden,
                         dhidden_left, dkeys, dkeys_left, w_hh_t, w_memory_t, real, MIXED, NUMBERS, K_TOP, N, D, GATES,
                         PIECES, ROWS, UNITS, BLOCK, STAGES, PRECISION)  # fmt: skip
            goal = meet(counter, goal, programs)
    for back in range(steps):
        t = steps - 1 - back
        used = 0 * seen
        kept = t < 0
        if K_TOP > 0:
            used = slots_at(seen + t, seen, first_slots, k_att)
            kept = keeps(seen + t, k_att)
        cut = (k_trunc > 0) & cuts(seen + t, tl.maximum(k_trunc, 1))
        from_keys = kept
        if NUMBERS:
            from_keys = carried
        there = carried | from_keys
        old_carry, new_carry = carry, carry
        if SPLITS:
            # In turn, since slices of a row read all of it while others write.
            old_carry, new_carry = carry + (t + 1) % 2 * batch * N, carry + t % 2 * batch * N
        if K_TOP > 0:
            if used > 0:
                if MAPPED:
                    left = dincorporated + wide(t * batch) * N
                    if MIXED:
                        left = dh_left
                    _map_gradient_phase(t, batch, pid, programs, used, there, carried, kept, slots, first_slots,
                                        store, dstore, partial, old_carry, dkeys, lengths, w_memory, h_hat, summary,
                                        mapped, dincorporated, dh_left, dh_hat, ds_joined, real, MATH, SPLITS,
                                        NUMBERS, SLOPE, INCORPORATE, SAVES_MAP, READS_STATE, READS_SUMMARY, N, PIECES,
                                        MIXED, QUERY_ROWS, COLUMNS)  # fmt: skip
                    goal = meet(counter, goal, programs)
                    _map_backward_phase(t, batch, pid, programs, left, w_incorporate_t, dh_hat, dsummary, ds_joined,
                                        real, N, QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = meet(counter, goal, programs)
                _read_backward_phase(t, batch, pid, programs, used, there, carried, kept, seen, first_slots, slots,
                                     k_att, cut, store, c, gates, hidden_new, h_hat, query, keys, weights, selected,
                                     norms, summary, key_scale, query_scale, scores, lengths, turn_rates, w_memory,
                                     w_query, v, dstore, dc, dcells, dgates, dhidden, dhidden_left, dquery, dkeys,
                                     dsummary, dweights, dv, dh_hat, ds_joined, dquery_left, partial, old_carry,
                                     new_carry, real, MATH, CELL, GATES, HAS_C, SPLITS, NUMBERS, SLOPE, QUERY, SCORE,
                                     NORMALISES, WEIGH, SAVES_NORM, INCORPORATE, MAPPED, READS_STATE, READS_SUMMARY, N,
                                     D, K_TOP, PLACES, SCALE, MIXED, PIECE, SLICE, KEY_PIECE, KEY_SLICE,
                                     PIECES)  # fmt: skip
                goal = meet(counter, goal, programs)
        if MIXED or K_TOP == 0 or NUMBERS:
            dq_left = dquery_left
        else:
            dq_left = dquery + wide(t * batch) * D
        if NUMBERS:
            alone = used == 0
        else:
            alone = used >= 0
        kept_before = t < 0
        if K_TOP > 0 and not NUMBERS:
            kept_before = keeps(seen + t - 1, k_att) & (t > 0)
        if alone:
            if (MIXED or NORMALISES) and K_TOP > 0 and not NUMBERS:
                if kept_before:
                    # No step before this one can have read the key, so nothing is added to its gradient any more.
                    _finish_phase(used - 1, seen + t - 1, batch, pid, programs, slots, dkeys, dkeys_left, turn_rates,
                                  real, NORMALISES, MIXED, D, QUERY_ROWS, COLUMNS)  # fmt: skip
            _cell_backward_phase(t, batch, pid, programs, used, there, carried, kept, slots, cut, first_slots, store, c,
                                 gates, hidden_new, lengths, w_memory, w_query_t, dstore, dc, dcells, dgates, dhidden,
                                 dhidden_left, dq_left, dkeys, dh_hat, partial, old_carry, new_carry, real, MATH, CELL,
                                 GATES, HAS_C, SPLITS, NUMBERS, SLOPE, N, D, K_TOP, PIECES, QUERY_ROWS, COLUMNS, BLOCK,
                                 STAGES, PRECISION)  # fmt: skip
            goal = meet(counter, goal, programs)
        carried = cut == 0
        if carried | kept_before:
            _chain_phase(t, batch, pid, programs, carried, kept_before, used - 1, slots, partial, dhidden, dhidden_left,
                         dkeys, dkeys_left, w_hh_t, w_memory_t, real, MIXED, NUMBERS, K_TOP, N, D, GATES, PIECES,
                         ROWS, UNITS, BLOCK, STAGES, PRECISION)  # fmt: skip
            goal = meet(counter, goal, programs)
    # The gradient of the state that came in.
    row_tiles = tl.cdiv(batch, QUERY_ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        rows = (tile % row_tiles * QUERY_ROWS + tl.arange(0, QUERY_ROWS))[:, None]
        units = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (rows < batch) & (units < N)
        at = rows * N + units
        dh_at = dstore + wide(first_slots * batch) * N + at
        dh = tl.load(dh_at, mask=inside, other=0.0)
        for piece in tl.static_range(PIECES):
            dh += tl.load(partial + piece * batch * N + at, mask=also(inside, carried), other=0.0)
        if SPLITS:
            dh += tl.load(carry + at, mask=also(inside, carried), other=0.0)
        tl.store(dh_at, dh, mask=inside)
