# type: ignore
"""The forward loop over time for large hidden sizes."""

import triton
import triton.language as tl

from sab.ops.triton.access import angles
from sab.ops.triton.functions import keeps, slots_at
from sab.ops.triton.large_parts import (
    NOWHERE,
    also,
    apart,
    linear,
    meet,
    merge,
    microstate,
    product,
    small_product,
    store_factor,
    top,
    turned,
    wide,
)


@triton.jit
def _cell_phase(t, batch, pid, programs, reads, h_left, h_next, h_hat_left, h_in, h_out, c, gates, hidden_new, h_hat,
                lengths, w_hh, b_hh, real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, N: tl.constexpr,
                GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr, MIXED: tl.constexpr,
                ROWS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """The recurrent product and the cell, all gates of a few units in one tile; without a read also h_t."""
    # A power of two, so that a tile's columns, unit by unit, come apart by halving.
    WIDE: tl.constexpr = 4 if GATES > 1 else 1
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, UNITS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = tile // row_tiles * UNITS + tl.arange(0, UNITS)
        column = tl.arange(0, UNITS * WIDE)
        column_unit, column_gate = tile // row_tiles * UNITS + column // WIDE, column % WIDE
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        at = row[:, None] * N + unit[None, :]
        gate_at = gates + wide(t * batch) * (GATES * N) + row[:, None] * (GATES * N) + unit[None, :]
        # What does not wait for the product is fetched first, and not touched before the product is done.
        fetched = ()
        for g in tl.static_range(GATES):
            fetched = fetched + (tl.load(gate_at + g * N, mask=inside, other=0.0),)
        h_old = tl.zeros((ROWS, UNITS), real)
        c_old = h_old
        if HAS_C:
            c_old = tl.load(c + wide(t * batch) * N + at, mask=inside, other=0.0)
        if SPLITS:
            h_old = tl.load(h_in + at, mask=inside, other=0.0)
        alive = inside
        if lengths is not None:
            alive = inside & (t < tl.load(lengths + row, mask=row < batch, other=0))[:, None]
        weight_rows = w_hh + (column_gate * N + column_unit) * N
        sums = tl.zeros((ROWS, UNITS * WIDE), real)
        sums = product(sums, h_left + row * N, weight_rows, row < batch, (column_unit < N) & (column_gate < GATES), 0,
                       N, N, BLOCK, STAGES, PRECISION)  # fmt: skip
        p = (sums,)
        if GATES > 1:
            even, odd = tl.split(tl.reshape(sums, (ROWS, UNITS, 2, 2)))
            even_0, even_1 = tl.split(even)
            odd_0, odd_1 = tl.split(odd)
            p = (even_0, odd_0, even_1, odd_1)
        x = ()
        for g in tl.static_range(GATES):
            x = x + (fetched[g].to(real),)
        if SPLITS:
            if b_hh is not None:
                whole = ()
                for g in tl.static_range(GATES):
                    bias = tl.load(b_hh + g * N + unit[None, :], mask=(unit < N)[None, :], other=0.0)
                    whole = whole + (p[g] + bias.to(real),)
                p = whole
            tl.store(hidden_new + wide(t * batch) * N + at, tl.where(alive, p[GATES - 1], 0.0), mask=inside)
        new, c_new, activated = CELL(x, p, h_old, c_old, MATH)
        for g in tl.static_range(GATES):
            tl.store(gate_at + g * N, tl.where(alive, activated[g], 0.0), mask=inside)
        if HAS_C:
            tl.store(c + wide((t + 1) * batch) * N + at, tl.where(alive, c_new, 0.0), mask=inside)
        new = tl.where(alive, new, 0.0)
        tl.store(h_hat + wide(t * batch) * N + at, new, mask=inside)
        tl.store(h_out + at, new, mask=also(inside, reads == 0))
        if MIXED:
            store_factor(h_hat_left + at, new, inside)
            store_factor(h_next + at, new, also(inside, reads == 0))


@triton.jit
def _key_phase(slot, batch, pid, programs, slots, h_left, keys, key_squares, w_memory, real: tl.constexpr,
               MATH: tl.constexpr, NORMALISES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys of a slot, W_m h. Where they are to have length 1, `_unit_key` divides and turns them after a meeting: a
    tile has some columns only, and leaves the sum of their squares in key_squares [tile, row]."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        key = small_product(h_left + row * N, w_memory + column * N, row < batch, column < D, real, N, ROWS, COLUMNS,
                            BLOCK, STAGES, PRECISION)  # fmt: skip
        inside = (row < batch)[:, None] & (column < D)[None, :]
        tl.store(keys + (wide(row) * slots + slot)[:, None] * D + column[None, :], key, mask=inside)
        if NORMALISES:
            key = key.to(keys.dtype.element_ty).to(real)
            square_at = key_squares + tile // row_tiles * batch + row
            tl.store(square_at, tl.sum(tl.where(inside, key * key, 0.0), 1), mask=row < batch)


@triton.jit
def _inverse_length(squares, row, batch, real: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, SMALLEST_SQUARE: tl.constexpr):  # fmt: skip
    """1 / the lengths of the rows' vectors, from the sums of all tiles: squares [tile, row]."""
    block = tl.arange(0, 64)
    total = tl.zeros((ROWS,), real)
    for first in range(0, tl.cdiv(D, COLUMNS), 64):
        at = squares + (first + block)[:, None] * batch + row[None, :]
        there = (first + block < tl.cdiv(D, COLUMNS))[:, None] & (row < batch)[None, :]
        total += tl.sum(tl.load(at, mask=there, other=0.0), 0)
    return tl.rsqrt(total + SMALLEST_SQUARE * D)


@triton.jit
def _unit_key(slot, step, row, column, part, batch, slots, keys, key_scale, key_squares, rate,
              real: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              SMALLEST_SQUARE: tl.constexpr):  # fmt: skip
    """Brings a slot's keys to length 1 in one tile of `_key_phase`, turns them by the step that kept them, and returns
    them; part: the tile's number in a row.

    A meeting must be between the two, for the sums of the other tiles. The keys themselves no other tile reads or
    writes before the next meeting.
    """
    inside = (row < batch)[:, None] & (column < D)[None, :]
    key_at = keys + (wide(row) * slots + slot)[:, None] * D + column[None, :]
    key = tl.load(key_at, mask=inside, other=0.0)
    cosine, sine = angles(step, column, rate, real)
    scale = _inverse_length(key_squares, row, batch, real, D, ROWS, COLUMNS, SMALLEST_SQUARE)
    tl.debug_barrier()  # several threads may have the same entry: all load it before one writes over it
    key = turned(key.to(real) * scale[:, None], cosine[None, :], sine[None, :]).to(keys.dtype.element_ty)
    tl.store(key_at, key, mask=inside)
    tl.store(key_scale + wide(row) * slots + slot, scale, mask=also(row < batch, part == 0))
    return key


@triton.jit
def _unit_phase(slot, step, batch, pid, programs, slots, keys, key_scale, key_squares, turn_rates, real: tl.constexpr,
                D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                SMALLEST_SQUARE: tl.constexpr):  # fmt: skip
    """Brings the keys of a slot to length 1 and turns them, where no `_query_phase` follows that would."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        rate = tl.load(turn_rates + column, mask=column < D, other=0)
        _unit_key(slot, step, row, column, tile // row_tiles, batch, slots, keys, key_scale, key_squares, rate, real, D,
                  ROWS, COLUMNS, SMALLEST_SQUARE)  # fmt: skip


@triton.jit
def _affine_key(t, row, batch, seen, k_att, bias_size, h, keys_type: tl.constexpr, w_memory, scorer_bias,
                real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
                MARK: tl.constexpr):  # fmt: skip
    """The key of the state kept after step t, rounded as it is stored."""
    key = linear(h + row * N, w_memory, real, MATH, N, WIDTH, MARK)
    if scorer_bias is not None:
        number = (seen + t + 1) // k_att - 1
        key += tl.load(scorer_bias + number, mask=number < bias_size, other=0.0).to(real)
    return key.to(keys_type)


@triton.jit
def _query_phase(t, batch, pid, programs, used, keeping, seen, slots, h_hat_left, query, query_squares, keys,
                 key_scale, key_squares, partial, turn_rates, w_query, scorer_bias, v, real: tl.constexpr,
                 MATH: tl.constexpr, QUERY: tl.constexpr, TERMS: tl.constexpr, NORMALISES: tl.constexpr,
                 SMALLEST_SQUARE: tl.constexpr, SCALE: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The query, and at once the part of all scores that comes from each tile's columns: partial [tile, row, slot].

    Where the scorer normalises, a key that was just kept gets length 1 and is turned first. The query is stored as it
    is, and multiplied with v and turned for the scores. Of its length a tile knows only its part, query_squares [tile,
    row], so `_read_phase` divides the scores instead.
    """
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < batch)[:, None] & (column < D)[None, :]
        slot = tl.arange(0, SLOTS)
        key_at = keys + ((wide(row) * slots)[:, None] + slot[None, :])[:, :, None] * D + column[None, None, :]
        there = (row < batch)[:, None] & (slot < used)[None, :]
        key = tl.load(key_at, mask=there[:, :, None] & (column < D)[None, None, :], other=0.0)
        if NORMALISES:
            # Below, the newest key is taken from here, since `key` may have been loaded before it was scaled.
            newest = tl.where(keeping, used - 1, -1)
            rate = tl.load(turn_rates + column, mask=column < D, other=0)
            newest_key = tl.zeros((ROWS, COLUMNS), keys.dtype.element_ty)
            if keeping:
                newest_key = _unit_key(used - 1, seen + t - 1, row, column, tile // row_tiles, batch, slots, keys,
                                       key_scale, key_squares, rate, real, D, ROWS, COLUMNS,
                                       SMALLEST_SQUARE)  # fmt: skip
        own = small_product(h_hat_left + row * N, w_query + column * N, row < batch, column < D, real, N, ROWS, COLUMNS,
                            BLOCK, STAGES, PRECISION)  # fmt: skip
        bias = tl.zeros((COLUMNS,), real)
        factor = bias
        if scorer_bias is not None:
            bias = tl.load(scorer_bias + column, mask=column < D, other=0.0).to(real)
        if v is not None:
            factor = tl.load(v + column, mask=column < D, other=0.0).to(real)
        own = QUERY(own, bias[None, :], SCALE)
        tl.store(query + (wide(t * batch) + row)[:, None] * D + column[None, :], own, mask=inside)
        if NORMALISES:
            square_at = query_squares + tile // row_tiles * batch + row
            tl.store(square_at, tl.sum(tl.where(inside, own * own, 0.0), 1), mask=row < batch)
            cosine, sine = angles(seen + t, column, rate, real)
            own = turned(own * factor[None, :], cosine[None, :], sine[None, :])
        score_at = partial + (wide(tile // row_tiles * batch) + row)[:, None] * slots + slot[None, :]
        for first in range(0, used, SLOTS):
            if NORMALISES:
                key = tl.where((first + slot == newest)[None, :, None], newest_key[:, None, :], key)
            terms = TERMS(key.to(real), own[:, None, :], factor[None, None, :], MATH)
            if D % COLUMNS != 0:  # of zeros a scorer may make anything
                terms = tl.where((column < D)[None, None, :], terms, 0.0)
            there = (row < batch)[:, None] & (first + slot < used)[None, :]
            tl.store(score_at + first, tl.sum(terms, 2), mask=there)
            behind = first + SLOTS
            there = (row < batch)[:, None] & (behind + slot < used)[None, :]
            key = tl.load(key_at + behind * D, mask=there[:, :, None] & (column < D)[None, None, :], other=0.0)


@triton.jit
def _scores(row, slot, batch, used, slots, partial, query_squares, real: tl.constexpr, NORMALISES: tl.constexpr,
            SMALLEST_SQUARE: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
            CANDIDATES: tl.constexpr):  # fmt: skip
    """The sums of `partial`; where there is no slot, less than any score. Where the scorer normalises, the scores are
    scaled by 1 / the length of the query, which is returned as well (else 1)."""
    block = tl.arange(0, 64)
    score = tl.zeros((CANDIDATES,), real)
    square = tl.zeros((64,), real)
    for first in range(0, tl.cdiv(D, COLUMNS), 64):
        at = partial + (wide((first + block) * batch) + row)[:, None] * slots + slot[None, :]
        there = (first + block < tl.cdiv(D, COLUMNS))[:, None] & (slot < used)[None, :]
        if NORMALISES:  # next to the other load, so that one does not wait for the other
            square_at = query_squares + (first + block) * batch + row
            square += tl.load(square_at, mask=first + block < tl.cdiv(D, COLUMNS), other=0.0)
        score += tl.sum(tl.load(at, mask=there, other=0.0), 0)
    inverse = 1.0
    if NORMALISES:
        inverse = tl.rsqrt(tl.sum(square, 0) + SMALLEST_SQUARE * D)
        score = score * (inverse * (D * SCALE))
    return tl.where(slot < used, score, float("-inf")), inverse


@triton.jit
def _read_phase(t, batch, pid, programs, used, keeping, seen, first_slots, slots, k_att, bias_size, h_old, h_out,
                h_next, store, h_hat, keys, partial, query_squares, best_key, best_slot, weights, selected, norms,
                summary, query_scale, scores, summary_left, lengths, w_memory, w_query, scorer_bias,
                real: tl.constexpr, MATH: tl.constexpr, NUMBERS: tl.constexpr, MARK: tl.constexpr,
                NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr, SCALE: tl.constexpr, WEIGH: tl.constexpr,
                SAVES_NORM: tl.constexpr, SEES_LEVEL: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr,
                N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr, MIXED: tl.constexpr,
                SLICE: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
                CANDIDATES: tl.constexpr):  # fmt: skip
    """Selects, weighs and sums up, and makes h_t where that takes no map: a slice of a row's units in one tile."""
    place = tl.arange(0, PLACES)
    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
        row, part = tile % batch, tile // batch
        at_row = wide(t * batch + row)
        alive = True
        if lengths is not None:
            alive = t < tl.load(lengths + row)
        if NUMBERS:
            # Each slice has the row's best to itself, so that they need not wait for each other.
            held = tile * PLACES + place
            best, slot = tl.load(best_key + held), tl.load(best_slot + held)
            if keeping:
                key = _affine_key(t - 1, row, batch, seen, k_att, bias_size, h_old, keys.dtype.element_ty, w_memory,
                                  scorer_bias, real, MATH, N, 1024, MARK)  # fmt: skip
                tl.store(keys + wide(row) * slots + used - 1, key, mask=part == 0)
                candidate = tl.where(place == 0, key.to(real), float("-inf"))
                best, slot = merge(
                    best, slot, candidate, tl.where(place == 0, used - 1, place + (NOWHERE + PLACES)), PLACES
                )
                tl.store(best_key + held, best)
                tl.store(best_slot + held, slot)
            score = best
            if SEES_LEVEL:  # else the query's part, the same for all, makes no difference
                score = best + linear(h_hat + at_row * N, w_query, real, MATH, N, 1024, MARK)
        else:
            candidate = tl.arange(0, CANDIDATES)
            found, inverse = _scores(row, candidate, batch, used, slots, partial, query_squares, real, NORMALISES,
                                     SMALLEST_SQUARE, SCALE, D, COLUMNS, CANDIDATES)  # fmt: skip
            score, slot = top(found, candidate, PLACES)
            for first in range(CANDIDATES, used, CANDIDATES):
                found, _ = _scores(row, first + candidate, batch, used, slots, partial, query_squares, real, NORMALISES,
                                   SMALLEST_SQUARE, SCALE, D, COLUMNS, CANDIDATES)  # fmt: skip
                score, slot = merge(score, slot, found, first + candidate, PLACES)
        k = tl.minimum(K_TOP, used)
        weight, norm = WEIGH(score, place < k)
        valid = also(place < k, alive)
        weight, slot = tl.where(valid, weight, 0.0), tl.where(valid, slot, 0)
        if part == 0:
            tl.store(weights + at_row * K_TOP + place, weight, mask=valid)
            tl.store(selected + at_row * K_TOP + place, slot, mask=valid)
            if SAVES_NORM:
                tl.store(norms + at_row, tl.sum(norm, 0))
            if NORMALISES:
                tl.store(query_scale + at_row, inverse)
                tl.store(scores + at_row * K_TOP + place, score, mask=valid)
        memory = store + (wide(microstate(slot, seen, first_slots, k_att)) * batch + row) * N
        for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, N), PIECE):
            unit = first + tl.arange(0, PIECE)
            inside = unit < N
            states = tl.load(memory[:, None] + unit[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            provisional = tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0)
            s = tl.sum(weight[:, None] * states, 0)
            tl.store(summary + at_row * N + unit, s, mask=also(inside, alive))
            if MAPPED:
                if MIXED:
                    store_factor(summary_left + row * N + unit, s, inside)
            else:
                new = INCORPORATE(provisional, s, s, MATH)
                tl.store(h_out + row * N + unit, new, mask=inside)
                if MIXED:
                    store_factor(h_next + row * N + unit, new, inside)


@triton.jit
def _map_phase(t, batch, pid, programs, h_hat_left, summary_left, h_hat, summary, saved, h_out, h_next, lengths,
               w_incorporate, b_incorporate, real: tl.constexpr, MATH: tl.constexpr, INCORPORATE: tl.constexpr,
               SAVES_MAP: tl.constexpr, N: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """The map W [ĥ; s] + b, and h_t of it."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        alive = inside
        if lengths is not None:
            alive = inside & (t < tl.load(lengths + row, mask=row < batch, other=0))[:, None]
        bias = tl.load(b_incorporate + unit, mask=unit < N, other=0.0).to(real)
        right = w_incorporate + unit * (2 * N)
        mapped = small_product(h_hat_left + row * N, right, row < batch, unit < N, real, N, ROWS, COLUMNS, BLOCK,
                               STAGES, PRECISION)  # fmt: skip
        mapped += small_product(summary_left + row * N, right + N, row < batch, unit < N, real, N, ROWS, COLUMNS,
                                BLOCK, STAGES, PRECISION)  # fmt: skip
        mapped = apart(mapped) + bias[None, :]
        at = row[:, None] * N + unit[None, :]
        at_step = wide(t * batch) * N + at
        provisional = tl.load(h_hat + at_step, mask=inside, other=0.0)
        s = tl.load(summary + at_step, mask=inside, other=0.0)
        if SAVES_MAP:
            tl.store(saved + at_step, mapped, mask=inside)
        new = tl.where(alive, INCORPORATE(provisional, s, mapped, MATH), 0.0)
        tl.store(h_out + at, new, mask=inside)
        if MIXED:
            store_factor(h_next + at, new, inside)


@triton.jit(do_not_specialize=["steps", "batch", "seen", "first_slots", "slots", "k_att", "bias_size"])
def forward_kernel(store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
                   key_scale, query_scale, scores, lengths, turn_rates, w_hh, b_hh, w_memory, w_query, scorer_bias, v,
                   w_incorporate, b_incorporate, h_left, h_hat_left, summary_left, partial, key_squares, query_squares,
                   best_key, best_slot, counter, steps, batch, seen, first_slots, slots, k_att, bias_size,
                   CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
                   NUMBERS: tl.constexpr, MARK: tl.constexpr, NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr,
                   QUERY: tl.constexpr, TERMS: tl.constexpr, WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr,
                   SEES_LEVEL: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr,
                   N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr,
                   MIXED: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
                   QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, SLICE: tl.constexpr,
                   PIECE: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    real: tl.constexpr = store.dtype.element_ty
    pid, programs = tl.program_id(0), tl.num_programs(0)
    goal = programs
    if NUMBERS and K_TOP > 0:
        for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
            place = tl.arange(0, PLACES)
            best, slot = tl.full((PLACES,), float("-inf"), real), place + NOWHERE
            for first in range(0, first_slots, CANDIDATES):
                candidate = first + tl.arange(0, CANDIDATES)
                key = tl.load(keys + wide(tile % batch) * slots + candidate, mask=candidate < first_slots,
                              other=float("-inf"))  # fmt: skip
                best, slot = merge(best, slot, key.to(real), candidate, PLACES)
            tl.store(best_key + tile * PLACES + place, best)
            tl.store(best_slot + tile * PLACES + place, slot)
    for t in range(steps):
        used = 0 * seen
        if K_TOP > 0:
            used = slots_at(seen + t, seen, first_slots, k_att)
        keeping = keeps(seen + t - 1, k_att) & (t > 0)
        h_old = store + wide((first_slots + t) * batch) * N
        h_new = h_old + batch * N
        if MIXED:
            # Two copies in turn: without a read h_t is written while others still read h_{t-1}.
            left, next_left, hat_left = h_left + t % 2 * batch * N, h_left + (t + 1) % 2 * batch * N, h_hat_left
        else:
            left, next_left, hat_left = h_old, h_new, h_hat + wide(t * batch) * N
        _cell_phase(t, batch, pid, programs, used, left, next_left, hat_left, h_old, h_new, c, gates, hidden_new, h_hat,
                    lengths, w_hh, b_hh, real, MATH, CELL, N, GATES, HAS_C, SPLITS, MIXED, ROWS, UNITS, BLOCK, STAGES,
                    PRECISION)  # fmt: skip
        if not NUMBERS and K_TOP > 0:
            if keeping:
                # Where the scorer normalises, this writes over `key_squares`, which `_query_phase` reads, and that one
                # over `query_squares`, which `_read_phase` reads. Each read is followed by a meeting before the next
                # write.
                _key_phase(used - 1, batch, pid, programs, slots, left, keys, key_squares, w_memory, real, MATH,
                           NORMALISES, N, D, QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
        goal = meet(counter, goal, programs)
        if K_TOP > 0:
            if used > 0:
                if not NUMBERS:
                    _query_phase(t, batch, pid, programs, used, keeping, seen, slots, hat_left, query, query_squares,
                                 keys, key_scale, key_squares, partial, turn_rates, w_query, scorer_bias, v, real, MATH,
                                 QUERY, TERMS, NORMALISES, SMALLEST_SQUARE, SCALE, N, D, QUERY_ROWS, COLUMNS, SLOTS,
                                 BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = meet(counter, goal, programs)
                _read_phase(t, batch, pid, programs, used, keeping, seen, first_slots, slots, k_att, bias_size, h_old,
                            h_new, next_left, store, h_hat, keys, partial, query_squares, best_key, best_slot, weights,
                            selected, norms, summary, query_scale, scores, summary_left, lengths, w_memory, w_query,
                            scorer_bias, real, MATH, NUMBERS, MARK, NORMALISES, SMALLEST_SQUARE, SCALE, WEIGH,
                            SAVES_NORM, SEES_LEVEL, INCORPORATE, MAPPED, N, D, K_TOP, PLACES, MIXED, SLICE, PIECE,
                            COLUMNS, CANDIDATES)  # fmt: skip
                goal = meet(counter, goal, programs)
                if MAPPED:
                    if MIXED:
                        s_left = summary_left
                    else:
                        s_left = summary + wide(t * batch) * N
                    _map_phase(t, batch, pid, programs, hat_left, s_left, h_hat, summary, mapped, h_new, next_left,
                               lengths, w_incorporate, b_incorporate, real, MATH, INCORPORATE, SAVES_MAP, N, MIXED,
                               QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = meet(counter, goal, programs)
    if K_TOP > 0:
        if keeps(seen + steps - 1, k_att):
            h_end = store + wide((first_slots + steps) * batch) * N
            slot = slots_at(seen + steps - 1, seen, first_slots, k_att)
            if NUMBERS:
                for row in range(pid, batch, programs):
                    key = _affine_key(steps - 1, row, batch, seen, k_att, bias_size, h_end, keys.dtype.element_ty,
                                      w_memory, scorer_bias, real, MATH, N, 1024, MARK)  # fmt: skip
                    tl.store(keys + wide(row) * slots + slot, key)
            else:
                left = h_end
                if MIXED:
                    left = h_left + steps % 2 * batch * N
                _key_phase(slot, batch, pid, programs, slots, left, keys, key_squares, w_memory, real, MATH, NORMALISES,
                           N, D, QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
                if NORMALISES:
                    meet(counter, goal, programs)  # for the sums of the other tiles
                    _unit_phase(slot, seen + steps - 1, batch, pid, programs, slots, keys, key_scale, key_squares,
                                turn_rates, real, D, QUERY_ROWS, COLUMNS, SMALLEST_SQUARE)  # fmt: skip
