# type: ignore

"""The backward loop over time for large hidden sizes."""

import triton
import triton.language as tl

from sab.ops.triton.functions import cuts, keeps, slots_at
from sab.ops.triton.large_parts import (
    also,
    apart,
    fetch_ahead,
    meet,
    microstate,
    product,
    store_factor,
    sums_of,
    taken,
    turned,
    turns,
    whole_product,
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
def _cell_backward(t, row, unit, mask, batch, cut, dh_hat, saved, dc, dcells, dgates, dhidden, dhidden_left, carry,
                   real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, HAS_C: tl.constexpr,
                   SPLITS: tl.constexpr, MIXED: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr,
                   CHAIN: tl.constexpr):  # fmt: skip
    """The gradients of a cell's gates and states from that of its provisional hidden state."""
    fetched, h, c_old, c_new, last, dc_new, outside = saved
    at = row * N + unit
    left_at = dhidden_left + row * CHAIN + unit
    gate_at = wide(t * batch) * (GATES * N) + row * (GATES * N) + unit
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
        tl.store(dgates + gate_at + g * N, of_x[g], mask=mask)
        if SPLITS:
            tl.store(dhidden + gate_at + g * N, of_h[g], mask=mask)
            store_factor(left_at + g * N, of_h[g], mask, MIXED)
        else:
            store_factor(left_at + g * N, of_x[g], mask, MIXED)
    if SPLITS:
        tl.store(carry + at, of_state, mask=mask)
    if HAS_C:
        tl.store(dc + at, tl.where(cut, 0.0, dc_old), mask=mask)


@triton.jit
def _finish_phase(slot, step, batch, pid, programs, slots, dkeys, dvalues, dkept_left, turn_rates, real: tl.constexpr,
                  MATH: tl.constexpr, NORMALISES: tl.constexpr, VALUES: tl.constexpr, MIXED: tl.constexpr,
                  N: tl.constexpr, D: tl.constexpr, KEY_INNER: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """The gradients of a slot's keys and values, which nothing is added to any more, as the left factor of
    `_chain_phase`: the keys' turned back by the step that kept them where the scorer turns keys."""
    OUTPUTS: tl.constexpr = N if VALUES and N > D else D
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(OUTPUTS, COLUMNS), programs):
        row = (tile % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
        column = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < batch) & (column < D)
        left_at = dkept_left + row * ENTRIES + column
        dkey_at = dkeys + (wide(row) * slots + slot) * D + column
        dkey = tl.load(dkey_at, mask=inside, other=0.0)
        if VALUES:
            is_unit = (row < batch) & (column < N)
            dvalue = tl.load(dvalues + wide(slot * batch) * N + row * N + column, mask=is_unit, other=0.0)
            store_factor(left_at + KEY_INNER, dvalue, is_unit, MIXED)
        if NORMALISES:
            rate = tl.load(turn_rates + column, mask=column < D, other=0)
            cosine, sine = turns(step, column, rate, real, MATH)
            tl.debug_barrier()  # several threads may have the same entry: all load it before one writes over it
            dkey = turned(dkey, cosine, -sine)
            tl.store(dkey_at, dkey, mask=inside)
        store_factor(left_at, dkey, inside, MIXED)


@triton.jit
def _chain_phase(batch, pid, programs, chained, kept, partial, dhidden_left, dkept_left, w_hh_t, w_kept_t,
                 real: tl.constexpr, KEYS: tl.constexpr, CHAIN: tl.constexpr, ENTRIES: tl.constexpr, N: tl.constexpr,
                 PIECES: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Part of the gradient of h_{t-1}: along the chain, and through its key and its value where it was kept.

    The inner dimension of both products together is cut into PIECES even pieces, so that there are enough tiles; who
    reads `partial` adds them up.
    """
    row_tiles, unit_tiles = tl.cdiv(batch, ROWS), tl.cdiv(N, UNITS)
    chain_blocks = tl.where(chained, CHAIN // BLOCK, 0)
    blocks = chain_blocks
    if KEYS:
        blocks += tl.where(kept, ENTRIES // BLOCK, 0)
    for tile in range(pid, row_tiles * unit_tiles * PIECES, programs):
        piece, place = tile % PIECES, tile // PIECES
        row = place % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = place // row_tiles * UNITS + tl.arange(0, UNITS)
        first, last = piece * blocks // PIECES, (piece + 1) * blocks // PIECES
        sums = tl.zeros((ROWS, UNITS), real)
        sums = product(sums, dhidden_left + row * CHAIN, w_hh_t + unit * CHAIN, row < batch, unit < N, first * BLOCK,
                       tl.minimum(last, chain_blocks) * BLOCK, CHAIN, BLOCK, STAGES, PRECISION)  # fmt: skip
        if KEYS:
            if last > chain_blocks:
                sums = product(sums, dkept_left + row * ENTRIES, w_kept_t + unit * ENTRIES, row < batch, unit < N,
                               tl.maximum(first - chain_blocks, 0) * BLOCK, (last - chain_blocks) * BLOCK, ENTRIES,
                               BLOCK, STAGES, PRECISION)  # fmt: skip
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        tl.store(partial + piece * batch * N + row[:, None] * N + unit[None, :], sums, mask=inside)


@triton.jit
def _key_backward(step, row, column, mask, at_row, slots, first_slots, da, query, keys, key_scale, query_scale, scores,
                  selected, turn_rates, v, dquery, dread_left, dkeys, dv, real: tl.constexpr, MATH: tl.constexpr,
                  QUERY: tl.constexpr, SCORE: tl.constexpr, NORMALISES: tl.constexpr, SCALE: tl.constexpr,
                  ENTRIES: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr,
                  GROUP: tl.constexpr, MIXED: tl.constexpr):  # fmt: skip
    """The gradients of keys and query from those of the selected scores; where the scorer normalises, those of both
    before they were brought to length 1, and that of the query before it was turned (`_finish_phase` turns keys' back).
    """
    q = tl.load(query + at_row * D + column, mask=mask, other=0.0)
    factor = q
    dv_new = tl.zeros(q.shape, real)
    if v is not None:
        factor = tl.load(v + column, mask=mask, other=0.0).to(real)
        dv_new = tl.load(dv + row * D + column, mask=mask, other=0.0)
    partner = q
    query_inverse = 1.0
    if NORMALISES:
        # Nothing in this loop writes the scores and 1 / the lengths, so there is no meeting to wait for.
        query_inverse = tl.load(query_scale + at_row)
        cosine, sine = turns(step, column, tl.load(turn_rates + column, mask=mask, other=0), real, MATH)
        partner = turned(factor * q, cosine, sine)
    dq = tl.zeros(q.shape, real)
    total = 0.0
    PER: tl.constexpr = 5 if NORMALISES else 3
    for group in tl.static_range(0, K_TOP, GROUP):
        held = ()  # all loads first, so that they wait together
        for j in tl.static_range(group, min(group + GROUP, K_TOP)):
            slot = tl.load(selected + at_row * K_TOP + j)
            there = also(mask, slot >= 0)
            at = (wide(row) * slots + tl.maximum(slot, 0)) * D
            own = tl.load(keys + at + column, mask=there, other=0.0)
            held = held + (slot, own, tl.load(dkeys + at + column, mask=there, other=0.0))
            if NORMALISES:
                scale_at = key_scale + wide(row) * slots + tl.maximum(slot, 0)
                held = held + (tl.load(scale_at, mask=slot >= first_slots, other=1.0),)
                held = held + (tl.load(scores + at_row * K_TOP + j, mask=slot >= 0, other=0.0),)
        for j in tl.static_range(group, min(group + GROUP, K_TOP)):
            slot, own, dkey = held[(j - group) * PER], held[(j - group) * PER + 1].to(real), held[(j - group) * PER + 2]
            one = taken(da, j, PLACES)
            dscore = one
            if NORMALISES:
                dscore = one * (query_inverse * (D * SCALE))
            dkey_new, dq_term, dv_term = SCORE(dscore, own, partner, factor, MATH)
            if NORMALISES:
                # No score depends on a vector's length, so the gradient has no part along the vector. A key from before
                # the loop came with length 1: its gradient is that of the key as it came.
                along = one * held[(j - group) * PER + 4]
                total += along
                dkey_new = dkey_new - tl.where(slot >= first_slots, along, 0.0) * own
                dkey_new = dkey_new * held[(j - group) * PER + 3]
            elif dv is not None:
                dv_new += tl.where(slot >= 0, dv_term, 0.0)
            dq += tl.where(slot >= 0, dq_term, 0.0)
            at = (wide(row) * slots + tl.maximum(slot, 0)) * D
            tl.store(dkeys + at + column, dkey + dkey_new, mask=also(mask, slot >= 0))
    if NORMALISES:
        dq = turned(dq, cosine, -sine)
        dv_new += q * dq
        dq = factor * dq - total * query_inverse * query_inverse * q
    dq = QUERY(dq, SCALE)
    if dv is not None:
        tl.store(dv + row * D + column, dv_new, mask=mask)
    tl.store(dquery + at_row * D + column, dq, mask=mask)
    store_factor(dread_left + row * ENTRIES + column, dq, mask, MIXED)


@triton.jit
def _read_backward_phase(t, batch, pid, programs, used, chained, carried, kept, seen, first_slots, slots, k_att, cut,
                         store, c, gates, hidden_new, h_hat, query, keys, values, weights, selected, norms, summary,
                         mapped, key_scale, query_scale, scores, lengths, turn_rates, w_memory, w_query, v, dstore, dc,
                         dcells, dgates, dhidden, dhidden_left, dquery, dkeys, dvalues, dsummary, dweights,
                         dincorporated, dv, dh_hat, ds_joined, dread_left, partial, carry, new_carry,
                         real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr,
                         HAS_C: tl.constexpr, SPLITS: tl.constexpr, NUMBERS: tl.constexpr, SLOPE: tl.constexpr,
                         QUERY: tl.constexpr, SCORE: tl.constexpr, NORMALISES: tl.constexpr, WEIGH: tl.constexpr,
                         SAVES_NORM: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr,
                         SAVES_MAP: tl.constexpr, READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr,
                         VALUES: tl.constexpr, KEY_INNER: tl.constexpr, ENTRIES: tl.constexpr, CHAIN: tl.constexpr,
                         N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr,
                         SCALE: tl.constexpr, MIXED: tl.constexpr, PIECE: tl.constexpr, SLICE: tl.constexpr,
                         KEY_PIECE: tl.constexpr, KEY_SLICE: tl.constexpr, GROUP: tl.constexpr,
                         PIECES: tl.constexpr, LONGEST: tl.constexpr):  # fmt: skip
    """From the gradient of h_t to those of the selected microstates, their keys and the query: a slice of a row's units
    and of its query in one tile.

    The gradients of the weights need the whole row, so that the tiles of a row all compute them: none waits for
    another. What is summed up, each tile writes for its slice alone, and nothing that another reads. With values the
    weights' gradients through the map take no product either.
    Where keys are numbers, the query's part is no product, and the cell's backward is done here as well.
    """
    place = tl.arange(0, PLACES)
    piece = tl.arange(0, PIECE)
    PER: tl.constexpr = 6 if VALUES else 4
    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
        row, part = tile % batch, tile // batch
        at_row = wide(t * batch + row)
        valid = tl.load(selected + at_row * K_TOP + place, mask=place < K_TOP, other=-1) >= 0  # none past a row's end
        weight = tl.load(weights + at_row * K_TOP + place, mask=valid, other=0.0)
        if dweights is not None:
            da = tl.load(dweights + at_row * K_TOP + place, mask=valid, other=0.0)
        else:
            da = tl.zeros((PLACES,), real)
        for first in range(0, N, PIECE):
            unit = first + piece
            inside = unit < N
            mine = inside & (unit // SLICE == part)
            dmapped = tl.zeros((PIECE,), real)
            if MAPPED and not VALUES:
                ds = tl.load(ds_joined + row * N + unit, mask=inside, other=0.0)
            else:
                dh = _arriving(t, row, unit, inside, batch, chained, carried, kept, slots, used, store, dstore, partial,
                               carry, dkeys, lengths, w_memory, first_slots + 1 + t, real, MATH, SPLITS, NUMBERS, SLOPE,
                               N, PIECES)  # fmt: skip
                provisional = dh
                s = dh
                linear_map = dh
                if READS_STATE:
                    provisional = tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0)
                if READS_SUMMARY:
                    s = tl.load(summary + at_row * N + unit, mask=inside, other=0.0)
                if SAVES_MAP:
                    linear_map = tl.load(mapped + at_row * N + unit, mask=inside, other=0.0).to(real)
                dhat, ds, dmapped = INCORPORATE(dh, provisional, s, linear_map, MATH)
                if dsummary is not None:
                    ds += tl.load(dsummary + at_row * N + unit, mask=inside, other=0.0)
            for group in tl.static_range(0, K_TOP, GROUP):
                # Each microstate by itself, as in the forward. All loads of a group come before its first store.
                held = ()
                for j in tl.static_range(group, min(group + GROUP, K_TOP)):
                    slot = tl.load(selected + at_row * K_TOP + j)
                    one = tl.load(weights + at_row * K_TOP + j, mask=slot >= 0, other=0.0)
                    there, is_mine = also(inside, slot >= 0), also(mine, slot >= 0)
                    at = (wide(microstate(tl.maximum(slot, 0), seen, first_slots, k_att)) * batch + row) * N
                    own = tl.load(store + at + unit, mask=there, other=0.0)
                    held = held + (slot, one, own, tl.load(dstore + at + unit, mask=is_mine, other=0.0))
                    if VALUES:
                        at = (wide(tl.maximum(slot, 0)) * batch + row) * N
                        own = tl.load(values + at + unit, mask=there, other=0.0)
                        held = held + (own, tl.load(dvalues + at + unit, mask=is_mine, other=0.0))
                found = ()
                for j in tl.static_range(group, min(group + GROUP, K_TOP)):
                    slot, one = held[(j - group) * PER], held[(j - group) * PER + 1]
                    is_mine = also(mine, slot >= 0)
                    at = (wide(microstate(tl.maximum(slot, 0), seen, first_slots, k_att)) * batch + row) * N
                    tl.store(dstore + at + unit, held[(j - group) * PER + 3] + one * ds, mask=is_mine)
                    products = held[(j - group) * PER + 2] * ds
                    if VALUES:
                        at = (wide(tl.maximum(slot, 0)) * batch + row) * N
                        tl.store(dvalues + at + unit, held[(j - group) * PER + 5] + one * dmapped, mask=is_mine)
                        products += held[(j - group) * PER + 4].to(real) * dmapped
                    found = found + (products,)
                for _ in tl.static_range(min(group + GROUP, K_TOP), group + GROUP):
                    found = found + (tl.zeros((PIECE,), real),)
                da += tl.where(place // GROUP == group // GROUP, sums_of(found, GROUP, PLACES), 0.0)
            if VALUES or not MAPPED:
                tl.store(dh_hat + row * N + unit, dhat, mask=mine)
            if VALUES:
                tl.store(dincorporated + at_row * N + unit, dmapped, mask=mine)
                store_factor(dread_left + row * ENTRIES + KEY_INNER + unit, dmapped, mine, MIXED)
        norm = 1.0
        if SAVES_NORM:
            norm = tl.load(norms + at_row)
        is_last = place == tl.minimum(LONGEST, used) - 1
        (dscores,) = WEIGH((da,), (weight,), norm, (is_last,))
        da = tl.where(valid, dscores, 0.0)
        if NUMBERS:
            total = tl.sum(da)
            if part == 0:
                slot = tl.load(selected + at_row * K_TOP + place, mask=valid, other=0)
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
                tl.debug_barrier()  # several threads may have the same unit, and dgates may lie where gates do
                _cell_backward(t, row, unit, inside, batch, cut, dhat, saved, dc, dcells, dgates, dhidden, dhidden_left,
                               new_carry, real, MATH, CELL, HAS_C, SPLITS, MIXED, N, GATES, CHAIN)  # fmt: skip
        else:
            for first in range(part * KEY_SLICE, tl.minimum(part * KEY_SLICE + KEY_SLICE, D), KEY_PIECE):
                column = first + tl.arange(0, KEY_PIECE)
                _key_backward(seen + t, row, column, column < D, at_row, slots, first_slots, da, query, keys, key_scale,
                              query_scale, scores, selected, turn_rates, v, dquery, dread_left, dkeys, dv, real, MATH,
                              QUERY, SCORE, NORMALISES, SCALE, ENTRIES, D, K_TOP, PLACES, GROUP, MIXED)  # fmt: skip


@triton.jit
def _fetch_phase(t, slot, pid, batch, seen, first_slots, slots, k_att, store, h_hat, query, keys, values, weights,
                 summary, mapped, query_scale, scores, dstore, dkeys, dvalues, NORMALISES: tl.constexpr,
                 SAVES_MAP: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr,
                 SLICE: tl.constexpr, KEY_SLICE: tl.constexpr):  # fmt: skip
    """Asks for what `_read_backward_phase` will read of step t in this program's first tile: which microstates it
    selected is known, and most of them are no longer in the cache. slot [PLACES]: those."""
    row, part = pid % batch, pid // batch
    at_row = wide(t * batch + row) + tl.arange(0, 1)
    valid = also(slot >= 0, part * SLICE < N)
    there = also(tl.arange(0, 1) == 0, part * SLICE < N)
    slot = tl.maximum(slot, 0)
    first, last = part * SLICE, tl.minimum(part * SLICE + SLICE, N)
    memory = (wide(microstate(slot, seen, first_slots, k_att)) * batch + row) * N
    fetch_ahead(store + memory, valid, first, last, SLICE)
    fetch_ahead(dstore + memory, valid, first, last, SLICE)
    fetch_ahead(dstore + (wide((first_slots + 1) * batch) + at_row) * N, there, first, last, SLICE)
    fetch_ahead(h_hat + at_row * N, there, first, last, SLICE)
    fetch_ahead(summary + at_row * N, there, first, last, SLICE)
    if SAVES_MAP:
        fetch_ahead(mapped + at_row * N, there, first, last, SLICE)
    if VALUES:
        value_at = (wide(slot) * batch + row) * N
        fetch_ahead(values + value_at, valid, first, last, SLICE)
        fetch_ahead(dvalues + value_at, valid, first, last, SLICE)
    key_at = (wide(row) * slots + slot) * D
    first, last = part * KEY_SLICE, tl.minimum(part * KEY_SLICE + KEY_SLICE, D)
    fetch_ahead(query + at_row * D, there, first, last, KEY_SLICE)
    fetch_ahead(weights + at_row * K_TOP, there, 0, K_TOP, K_TOP)
    if NORMALISES:
        fetch_ahead(scores + at_row * K_TOP, there, 0, K_TOP, K_TOP)
        fetch_ahead(query_scale + at_row, there, 0, 1, 1)
    fetch_ahead(keys + key_at, valid, first, last, KEY_SLICE)
    fetch_ahead(dkeys + key_at, valid, first, last, KEY_SLICE)


@triton.jit
def _cell_backward_phase(t, batch, pid, programs, used, chained, carried, kept, slots, cut, first_slots, store, c,
                         gates, hidden_new, lengths, w_memory, w_read_t, dstore, dc, dcells, dgates, dhidden,
                         dhidden_left, dread_left, dkeys, dh_hat, partial, carry, new_carry, real: tl.constexpr,
                         MATH: tl.constexpr, CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr,
                         SPLITS: tl.constexpr, NUMBERS: tl.constexpr, SLOPE: tl.constexpr, KEYS: tl.constexpr,
                         CHAIN: tl.constexpr, ENTRIES: tl.constexpr, N: tl.constexpr, MIXED: tl.constexpr,
                         PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                         STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The cell's backward, after the products of what read with ĥ_t (the query, with values also the map)."""
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
            if KEYS:
                sums = whole_product(dread_left + row * ENTRIES, w_read_t + unit * ENTRIES, row < batch, unit < N, real,
                                     ENTRIES, ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
                dhat += apart(sums)
        else:
            dhat = _arriving(t, rows, units, inside, batch, chained, carried, kept, slots, used, store, dstore, partial,
                             carry, dkeys, lengths, w_memory, first_slots + 1 + t, real, MATH, SPLITS, NUMBERS, SLOPE,
                             N, PIECES)  # fmt: skip
        _cell_backward(t, rows, units, inside, batch, cut, dhat, saved, dc, dcells, dgates, dhidden, dhidden_left,
                       new_carry, real, MATH, CELL, HAS_C, SPLITS, MIXED, N, GATES, CHAIN)  # fmt: skip


@triton.jit
def _map_gradient_phase(t, batch, pid, programs, used, chained, carried, kept, slots, first_slots, store, dstore,
                        partial, carry, dkeys, lengths, w_memory, h_hat, summary, mapped, dincorporated, dh_left,
                        dh_hat, ds_joined, real: tl.constexpr, MATH: tl.constexpr, SPLITS: tl.constexpr,
                        NUMBERS: tl.constexpr, SLOPE: tl.constexpr, INCORPORATE: tl.constexpr, SAVES_MAP: tl.constexpr,
                        READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr,
                        PIECES: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr,
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
            linear = tl.load(mapped + at_step, mask=inside, other=0.0).to(real)
        dhat, ds, dmapped = INCORPORATE(dh, provisional, s, linear, MATH)
        tl.store(dh_hat + at, dhat, mask=inside)
        tl.store(ds_joined + at, ds, mask=inside)
        tl.store(dincorporated + at_step, dmapped, mask=inside)
        store_factor(dh_left + rows * INNER + units, dmapped, inside, MIXED)


@triton.jit
def _map_backward_phase(t, batch, pid, programs, dh_left, w_incorporate_t, dh_hat, dsummary, ds_joined,
                        real: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
                        COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
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
        sums = whole_product(dh_left + row * INNER, w_incorporate_t + (half * N + unit) * INNER, row < batch, unit < N,
                             real, INNER, ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
        sums = apart(sums) + direct
        tl.store(dh_hat + at, sums, mask=also(inside, half == 0))
        tl.store(ds_joined + at, sums, mask=also(inside, half == 1))


@triton.jit(do_not_specialize=["steps", "batch", "seen", "first_slots", "slots", "k_att", "k_trunc"])
def backward_kernel(store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
                    key_scale, query_scale, scores, lengths, turn_rates, w_hh_t, w_memory, w_query, w_read_t, w_kept_t,
                    v, w_incorporate_t, values, dstore, dc, dcells, dgates, dhidden, dquery, dkeys, dsummary, dweights,
                    dincorporated, dv, dvalues, dh_hat, dh_left, ds_joined, dread_left, dkept_left, dhidden_left,
                    partial, carry, counter, steps, batch, seen, first_slots, slots, k_att, k_trunc, CELL: tl.constexpr,
                    GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr, NUMBERS: tl.constexpr,
                    SLOPE: tl.constexpr, QUERY: tl.constexpr, SCORE: tl.constexpr, NORMALISES: tl.constexpr,
                    WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr,
                    SAVES_MAP: tl.constexpr, READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr,
                    VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr,
                    SCALE: tl.constexpr, MIXED: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr,
                    UNITS: tl.constexpr, PIECES: tl.constexpr, QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    PIECE: tl.constexpr, SLICE: tl.constexpr, KEY_PIECE: tl.constexpr, KEY_SLICE: tl.constexpr,
                    GROUP: tl.constexpr, FETCHES: tl.constexpr, INNER: tl.constexpr, KEY_INNER: tl.constexpr,
                    CHAIN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
                    LONGEST: tl.constexpr):  # fmt: skip
    real: tl.constexpr = store.dtype.element_ty
    pid, programs = tl.program_id(0), tl.num_programs(0)
    goal = programs
    KEYS: tl.constexpr = K_TOP > 0 and not NUMBERS
    ENTRIES: tl.constexpr = KEY_INNER + INNER if VALUES else KEY_INNER
    # Whether `partial` holds anything of the step's gradient, and whether the chain is part of that.
    carried = steps < 0
    chained = keeps(seen + steps - 1, k_att)
    if KEYS:
        if chained:
            _finish_phase(slots - 1, seen + steps - 1, batch, pid, programs, slots, dkeys, dvalues, dkept_left,
                          turn_rates, real, MATH, NORMALISES, VALUES, MIXED, N, D, KEY_INNER, ENTRIES, QUERY_ROWS,
                          COLUMNS)  # fmt: skip
            goal = meet(counter, goal, programs)
            _chain_phase(batch, pid, programs, carried, chained, partial, dhidden_left, dkept_left, w_hh_t, w_kept_t,
                         real, KEYS, CHAIN, ENTRIES, N, PIECES, ROWS, UNITS, BLOCK, STAGES, PRECISION)  # fmt: skip
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
                if MAPPED and not VALUES:
                    _map_gradient_phase(t, batch, pid, programs, used, there, carried, kept, slots, first_slots, store,
                                        dstore, partial, old_carry, dkeys, lengths, w_memory, h_hat, summary, mapped,
                                        dincorporated, dh_left, dh_hat, ds_joined, real, MATH, SPLITS, NUMBERS, SLOPE,
                                        INCORPORATE, SAVES_MAP, READS_STATE, READS_SUMMARY, N, INNER, PIECES, MIXED,
                                        QUERY_ROWS, COLUMNS)  # fmt: skip
                    goal = meet(counter, goal, programs)
                    _map_backward_phase(t, batch, pid, programs, dh_left, w_incorporate_t, dh_hat, dsummary, ds_joined,
                                        real, N, INNER, QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = meet(counter, goal, programs)
                _read_backward_phase(t, batch, pid, programs, used, there, carried, kept, seen, first_slots, slots,
                                     k_att, cut, store, c, gates, hidden_new, h_hat, query, keys, values, weights,
                                     selected, norms, summary, mapped, key_scale, query_scale, scores, lengths,
                                     turn_rates, w_memory, w_query, v, dstore, dc, dcells, dgates, dhidden,
                                     dhidden_left, dquery, dkeys, dvalues, dsummary, dweights, dincorporated, dv,
                                     dh_hat, ds_joined, dread_left, partial, old_carry, new_carry, real, MATH, CELL,
                                     GATES, HAS_C, SPLITS, NUMBERS, SLOPE, QUERY, SCORE, NORMALISES, WEIGH, SAVES_NORM,
                                     INCORPORATE, MAPPED, SAVES_MAP, READS_STATE, READS_SUMMARY, VALUES, KEY_INNER,
                                     ENTRIES, CHAIN, N, D, K_TOP, PLACES, SCALE, MIXED, PIECE, SLICE, KEY_PIECE,
                                     KEY_SLICE, GROUP, PIECES, LONGEST)  # fmt: skip
                goal = meet(counter, goal, programs)
        if NUMBERS:
            alone = used == 0
        else:
            alone = used >= 0
        kept_before = t < 0
        if KEYS:
            kept_before = keeps(seen + t - 1, k_att) & (t > 0)
        ahead = tl.full((PLACES,), -1, tl.int32)
        if FETCHES:
            place = tl.arange(0, PLACES)
            ahead_at = selected + wide((t - 1) * batch + pid % batch) * K_TOP + place
            ahead = tl.load(ahead_at, mask=also(place < K_TOP, t > 0), other=-1)
        if alone:
            if KEYS:
                if kept_before:
                    # No step before this one can have read the key, so nothing is added to its gradient any more.
                    _finish_phase(used - 1, seen + t - 1, batch, pid, programs, slots, dkeys, dvalues, dkept_left,
                                  turn_rates, real, MATH, NORMALISES, VALUES, MIXED, N, D, KEY_INNER, ENTRIES,
                                  QUERY_ROWS, COLUMNS)  # fmt: skip
            _cell_backward_phase(t, batch, pid, programs, used, there, carried, kept, slots, cut, first_slots, store, c,
                                 gates, hidden_new, lengths, w_memory, w_read_t, dstore, dc, dcells, dgates, dhidden,
                                 dhidden_left, dread_left, dkeys, dh_hat, partial, old_carry, new_carry, real, MATH,
                                 CELL, GATES, HAS_C, SPLITS, NUMBERS, SLOPE, KEYS, CHAIN, ENTRIES, N, MIXED, PIECES,
                                 QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
            if FETCHES:
                if t > 0:
                    _fetch_phase(t - 1, ahead, pid, batch, seen, first_slots, slots, k_att, store, h_hat, query, keys,
                                 values, weights, summary, mapped, query_scale, scores, dstore, dkeys, dvalues,
                                 NORMALISES, SAVES_MAP, VALUES, N, D, K_TOP, SLICE, KEY_SLICE)  # fmt: skip
            goal = meet(counter, goal, programs)
        carried = cut == 0
        if carried | kept_before:
            _chain_phase(batch, pid, programs, carried, kept_before, partial, dhidden_left, dkept_left, w_hh_t,
                         w_kept_t, real, KEYS, CHAIN, ENTRIES, N, PIECES, ROWS, UNITS, BLOCK, STAGES,
                         PRECISION)  # fmt: skip
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
