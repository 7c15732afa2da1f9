# type: ignore
"""The forward loop over time for large hidden sizes."""

import triton
import triton.language as tl

from sab.ops.triton.forgetting import (
    as_slots,
    count_reads,
    forgotten,
    lost_of,
    places_of,
    renew,
    write_list,
)
from sab.ops.triton.functions import keeps, next_number, slots_at
from sab.ops.triton.large_parts import (
    NOWHERE,
    also,
    apart,
    linear,
    meet,
    merge,
    microstate,
    product,
    store_factor,
    taken,
    top,
    turned,
    turns,
    two_products,
    whole_product,
    wide,
)


@triton.jit
def _cell_phase(t, batch, pid, programs, reads, keeping, slot, step, slots, h_left, h_next, h_hat_left, h_in, h_out, c,
                gates, hidden_new, h_hat, keys, key_squares, turn_rates, values, lengths, w_hh, b_hh, w_memory,
                real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr,
                VALUES: tl.constexpr, NORMALISES: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr,
                UNITS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """The recurrent product and the cell, all gates of a few units in one tile; without a read also h_t. Where h_{t-1}
    is kept, also its key and its value, as many columns of each: they are products of the same factor."""
    # A power of two, so that a tile's columns, unit by unit, come apart by halving.
    WIDE: tl.constexpr = 4 if GATES > 1 else 1
    OUTPUTS: tl.constexpr = D if KEYS and D > N else N
    KINDS: tl.constexpr = 2 if VALUES else 1
    THERE: tl.constexpr = 2 * OUTPUTS if VALUES else D
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(OUTPUTS, UNITS), programs):
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
        weight_rows = w_hh + (column_gate * N + column_unit) * INNER
        weight_mask = (column_unit < N) & (column_gate < GATES)
        sums = tl.zeros((ROWS, UNITS * WIDE), real)
        if KEYS:
            if keeping:
                other = tile // row_tiles * UNITS * KINDS + tl.arange(0, UNITS * KINDS)
                kept = tl.zeros((ROWS, UNITS * KINDS), real)
                sums, kept = two_products(sums, kept, h_left + row * INNER, weight_rows, w_memory + other * INNER,
                                          row < batch, weight_mask, other < THERE, INNER, BLOCK, STAGES,
                                          PRECISION)  # fmt: skip
                key = kept
                if VALUES:
                    key, value = tl.split(tl.reshape(kept, (ROWS, UNITS, 2)))
                    value_at = values + wide(slot * batch) * N + at
                    tl.store(value_at, value, mask=inside)
                _store_key(key, step, tile // row_tiles, row, unit, slot, batch, slots, keys, key_squares, turn_rates,
                           real, MATH, NORMALISES, D)  # fmt: skip
            else:
                sums = product(sums, h_left + row * INNER, weight_rows, row < batch, weight_mask, 0, INNER, INNER,
                               BLOCK, STAGES, PRECISION)  # fmt: skip
        else:
            sums = product(sums, h_left + row * INNER, weight_rows, row < batch, weight_mask, 0, INNER, INNER, BLOCK,
                           STAGES, PRECISION)  # fmt: skip
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
        left_at = row[:, None] * INNER + unit[None, :]
        store_factor(h_hat_left + left_at, new, inside, MIXED)
        store_factor(h_next + left_at, new, also(inside, reads == 0), MIXED)


@triton.jit
def _store_key(key, step, part, row, column, slot, batch, slots, keys, key_squares, turn_rates, real: tl.constexpr,
               MATH: tl.constexpr, NORMALISES: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns of a slot's keys. Where they are to have length 1, they are turned by the step that kept them, and
    divided after a meeting (`_shorten`): a tile, the row's `part`, has some columns only, and leaves the sum of their
    squares in key_squares [part, row]."""
    inside = (row < batch)[:, None] & (column < D)[None, :]
    if NORMALISES:
        cosine, sine = turns(step, column, tl.load(turn_rates + column, mask=column < D, other=0), real, MATH)
        key = turned(key, cosine[None, :], sine[None, :]).to(keys.dtype.element_ty)
        squares = tl.where(inside, key.to(real) * key.to(real), 0.0)
        tl.store(key_squares + part * batch + row, tl.sum(squares, 1), mask=row < batch)
    tl.store(keys + (wide(row) * slots + slot)[:, None] * D + column[None, :], key, mask=inside)


@triton.jit
def _key_phase(slot, step, batch, pid, programs, slots, h_left, keys, key_squares, turn_rates, w_memory,
               real: tl.constexpr, MATH: tl.constexpr, NORMALISES: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
               STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys of a slot, W_m h, where no `_cell_phase` follows that would make them."""
    STRIDE: tl.constexpr = 2 * INNER if VALUES else INNER
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        key = whole_product(h_left + row * INNER, w_memory + column * STRIDE, row < batch, column < D, real, INNER,
                            ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
        _store_key(key, step, tile // row_tiles, row, column, slot, batch, slots, keys, key_squares, turn_rates, real,
                   MATH, NORMALISES, D)  # fmt: skip


@triton.jit
def _squares(squares, row, batch, there, real: tl.constexpr, TILES: tl.constexpr):
    """Numbers whose sum is that of a row's squares [tile, row]; 0 where they are not there."""
    block = tl.arange(0, 128)
    total = tl.zeros((128,), real)
    for first in tl.static_range(0, TILES, 128):
        total += tl.load(squares + (first + block) * batch + row, mask=also(first + block < TILES, there), other=0.0)
    return total


@triton.jit
def _shorten(slot, row, part, scale, slots, keys, key_scale, D: tl.constexpr, KEY_SLICE: tl.constexpr,
             PIECE: tl.constexpr):  # fmt: skip
    """Brings a row's part of a slot's keys to length 1. Before the next meeting nobody else reads or writes it."""
    for first in range(part * KEY_SLICE, tl.minimum(part * KEY_SLICE + KEY_SLICE, D), PIECE):
        column = first + tl.arange(0, PIECE)
        inside = (column < D) & (column < part * KEY_SLICE + KEY_SLICE)
        key_at = keys + (wide(row) * slots + slot) * D + column
        key = tl.load(key_at, mask=inside, other=0.0)
        tl.debug_barrier()  # several threads may have the same entry: all load it before one writes over it
        tl.store(key_at, key * scale, mask=inside)
    tl.store(key_scale + wide(row) * slots + slot, scale, mask=part == 0)


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
def _best_keys(row, live, oldest, count, slots, keys, real: tl.constexpr, PLACES: tl.constexpr,
               CANDIDATES: tl.constexpr):  # fmt: skip
    """The best of a row's first `count` slots from the oldest on, or of those in its list, where keys are numbers."""
    place = tl.arange(0, PLACES)
    best, slot = tl.full((PLACES,), float("-inf"), real), place + NOWHERE
    for first in range(0, count, CANDIDATES):
        candidate = first + tl.arange(0, CANDIDATES)
        own = oldest + candidate
        there = candidate < count
        if live is not None:
            own = tl.load(live + candidate, mask=there, other=-1)
            there = own >= 0  # a row that has ended may have fewer
            own = tl.where(there, own, candidate + (NOWHERE + PLACES))
        key = tl.load(keys + wide(row) * slots + own, mask=there, other=float("-inf"))
        best, slot = merge(best, slot, key.to(real), own, PLACES)
    return best, slot


@triton.jit
def _forget_phase(t, batch, pid, programs, slot, seen, k_att, most, discount, width, live, reads, lost, lengths,
                  FORGET: tl.constexpr):  # fmt: skip
    """Adds the slot that step t keeps to the rows' lists, and takes out what it makes forgotten."""
    thread = tl.arange(0, 256)
    remembered = tl.minimum(slot, most)
    for row in range(pid, batch, programs):
        alive = True
        if lengths is not None:
            alive = t < tl.load(lengths + row)
        if alive:
            own_list, own_reads = live + wide(row) * width, reads
            if FORGET == "most_read":
                own_reads = reads + wide(row) * width
            number = next_number(seen + t, k_att)
            gone = forgotten(own_reads, remembered, most, discount, number, thread, None, FORGET, "plain")
            if lost is not None:
                tl.store(lost + row, lost_of(own_list, gone, remembered, most, slot))
            renew(own_list, own_reads, gone, remembered, most, slot, thread, FORGET, "plain")


@triton.jit
def _query_phase(t, batch, pid, programs, used, seen, slots, width, h_hat_left, query, query_squares, keys, live,
                 partial, map_part, turn_rates, w_query, scorer_bias, v, b_incorporate, real: tl.constexpr,
                 MATH: tl.constexpr, QUERY: tl.constexpr, TERMS: tl.constexpr, NORMALISES: tl.constexpr,
                 SCALE: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, SLOTS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The query, and at once the part of all scores that comes from each tile's columns: partial [tile, row, place].
    A place is a slot, or one of the row's list `live`. With values also the map's part that comes from ĥ and the bias,
    as many columns: the same factor.

    Where the scorer normalises, the query is stored as it is, and multiplied with v and turned for the scores. Of its
    length a tile knows only its part, query_squares [tile, row], so `_read_phase` divides the scores instead, and those
    of a key that was just kept by its length.
    """
    OUTPUTS: tl.constexpr = N if VALUES and N > D else D
    KINDS: tl.constexpr = 2 if VALUES else 1
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(OUTPUTS, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < batch)[:, None] & (column < D)[None, :]
        other = tile // row_tiles * COLUMNS * KINDS + tl.arange(0, COLUMNS * KINDS)
        own = whole_product(h_hat_left + row * INNER, w_query + other * INNER, row < batch, other < OUTPUTS * KINDS,
                            real, INNER, ROWS, COLUMNS * KINDS, BLOCK, STAGES, PRECISION)  # fmt: skip
        if VALUES:
            own, mapped = tl.split(tl.reshape(own, (ROWS, COLUMNS, 2)))
            mapped += tl.load(b_incorporate + column, mask=column < N, other=0.0).to(real)[None, :]
            mapped_at = map_part + row[:, None] * N + column[None, :]
            tl.store(mapped_at, mapped, mask=(row < batch)[:, None] & (column < N)[None, :])
        bias = tl.zeros((COLUMNS,), real)
        factor = bias
        if scorer_bias is not None:
            bias = tl.load(scorer_bias + column, mask=column < D, other=0.0).to(real)
        if v is not None:
            factor = tl.load(v + column, mask=column < D, other=0.0).to(real)
        own = QUERY(own, bias[None, :], SCALE)
        tl.store(query + (wide(t * batch) + row)[:, None] * D + column[None, :], own, mask=inside)
        has_columns = tile // row_tiles < tl.cdiv(D, COLUMNS)
        if NORMALISES:
            square_at = query_squares + tile // row_tiles * batch + row
            tl.store(square_at, tl.sum(tl.where(inside, own * own, 0.0), 1), mask=also(row < batch, has_columns))
            rate = tl.load(turn_rates + column, mask=column < D, other=0)
            cosine, sine = turns(seen + t, column, rate, real, MATH)
            own = turned(own * factor[None, :], cosine[None, :], sine[None, :])
        place = tl.arange(0, SLOTS)
        key_at = keys + ((wide(row) * slots)[:, None] + place[None, :])[:, :, None] * D + column[None, None, :]
        score_at = partial + (wide(tile // row_tiles * batch) + row)[:, None] * width + place[None, :]
        for first in tl.range(0, tl.where(has_columns, used, 0), SLOTS, num_stages=STAGES):
            there = (row < batch)[:, None] & (first + place < used)[None, :]
            own_at = key_at + first * D
            if live is not None:
                slot = tl.load(live + (wide(row) * width)[:, None] + (first + place)[None, :], mask=there, other=0)
                slot = tl.maximum(slot, 0)  # a row that has ended may have fewer
                own_at = keys + ((wide(row) * slots)[:, None] + slot)[:, :, None] * D + column[None, None, :]
            key = tl.load(own_at, mask=there[:, :, None] & (column < D)[None, None, :], other=0.0)
            terms = TERMS(key.to(real), own[:, None, :], factor[None, None, :], MATH)
            if D % COLUMNS != 0:  # of zeros a scorer may make anything
                terms = tl.where((column < D)[None, None, :], terms, 0.0)
            tl.store(score_at + first, tl.sum(terms, 2), mask=there)


@triton.jit
def _scores(row, place, batch, used, width, partial, real: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
            CANDIDATES: tl.constexpr):  # fmt: skip
    """The sums of `partial`."""
    block = tl.arange(0, 64)
    score = tl.zeros((CANDIDATES,), real)
    for first in range(0, tl.cdiv(D, COLUMNS), 64):
        at = partial + (wide((first + block) * batch) + row)[:, None] * width + place[None, :]
        there = (first + block < tl.cdiv(D, COLUMNS))[:, None] & (place < used)[None, :]
        score += tl.sum(tl.load(at, mask=there, other=0.0), 0)
    return score


@triton.jit
def _is_newest(place, used, remembered, live):
    """Whether places are of the newest slot, which is the last in use."""
    if live is None:
        return place == remembered - 1
    else:
        return tl.load(live + place, mask=place < remembered, other=-1) == used - 1


@triton.jit
def _scaled(score, is_newest, scale, key_scale):
    """Scores times the scale, and where a key is the newest one also by that of keys."""
    return score * tl.where(is_newest, scale * key_scale, scale)


@triton.jit
def _read_phase(t, batch, pid, programs, used, remembered, keeping, seen, first_slots, slots, width, k_att, bias_size,
                most, discount, h_old, h_out, h_next, store, h_hat, keys, key_scale, key_squares, values, partial,
                map_part, query_squares, best_key, best_slot, live, reads, lost, weights, selected, norms, summary,
                mapped, query_scale, scores, summary_left, lengths, w_memory, w_query, scorer_bias, real: tl.constexpr,
                MATH: tl.constexpr, NUMBERS: tl.constexpr, MARK: tl.constexpr, NORMALISES: tl.constexpr,
                SMALLEST_SQUARE: tl.constexpr, SCALE: tl.constexpr, WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr,
                SEES_LEVEL: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr,
                FORGET: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr,
                PLACES: tl.constexpr, MIXED: tl.constexpr, SLICE: tl.constexpr, PIECE: tl.constexpr,
                KEY_SLICE: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
                CANDIDATES: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """Selects, weighs and sums up, and makes h_t but where its map is a product of the summary: a slice of a row's
    units in one tile. With values the map's part of the summary is their sum, weighed alike."""
    place = tl.arange(0, PLACES)
    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
        row, part = tile % batch, tile // batch
        at_row = wide(t * batch + row)
        alive = True
        if lengths is not None:
            alive = t < tl.load(lengths + row)
        own_list, oldest = live, 0
        if live is not None:
            own_list = live + wide(row) * width
        if FORGET == "recent":
            oldest = used - remembered
        if NUMBERS:
            # Each slice has the row's best to itself, so that they need not wait for each other.
            held = tile * PLACES + place
            best, slot = tl.load(best_key + held), tl.load(best_slot + held)
            if keeping:
                key = _affine_key(t - 1, row, batch, seen, k_att, bias_size, h_old, keys.dtype.element_ty, w_memory,
                                  scorer_bias, real, MATH, N, 1024, MARK)  # fmt: skip
                tl.store(keys + wide(row) * slots + used - 1, key, mask=part == 0)
                is_new = place == 0
                if FORGET is not None:
                    if FORGET == "recent":
                        gone = tl.where(oldest > 0, oldest - 1, -1)
                    else:
                        gone = tl.load(lost + row)
                    is_kept = gone != used - 1
                    if is_kept & (tl.max((slot == gone).to(tl.int32)) > 0):  # one that fell out takes its place
                        best, slot = _best_keys(row, own_list, oldest, remembered - 1, slots, keys, real, PLACES,
                                                CANDIDATES)  # fmt: skip
                    is_new = place == tl.where(is_kept, 0, -1)
                candidate = tl.where(is_new, key.to(real), float("-inf"))
                best, slot = merge(
                    best, slot, candidate, tl.where(is_new, used - 1, place + (NOWHERE + PLACES)), PLACES
                )
                tl.store(best_key + held, best)
                tl.store(best_slot + held, slot)
            score = best
            if SEES_LEVEL:  # else the query's part, the same for all, makes no difference
                score = best + linear(h_hat + at_row * N, w_query, real, MATH, N, 1024, MARK)
        else:
            candidate = tl.arange(0, CANDIDATES)
            inverse = 1.0
            if NORMALISES:
                of_query = _squares(query_squares, row, batch, True, real, (D + COLUMNS - 1) // COLUMNS)
                of_key = _squares(key_squares, row, batch, keeping, real, (D + UNITS - 1) // UNITS)
            found = _scores(row, candidate, batch, remembered, width, partial, real, D, COLUMNS, CANDIDATES)
            if NORMALISES:
                inverse = tl.rsqrt(tl.sum(of_query, 0) + SMALLEST_SQUARE * D)
                key_inverse = tl.where(keeping, tl.rsqrt(tl.sum(of_key, 0) + SMALLEST_SQUARE * D), 1.0)
                is_newest = _is_newest(candidate, used, remembered, own_list)
                found = _scaled(found, is_newest, inverse * (D * SCALE), key_inverse)
            score, slot = top(tl.where(candidate < remembered, found, float("-inf")), candidate, PLACES)
            for first in range(CANDIDATES, remembered, CANDIDATES):
                found = _scores(row, first + candidate, batch, remembered, width, partial, real, D, COLUMNS,
                                CANDIDATES)  # fmt: skip
                if NORMALISES:
                    is_newest = _is_newest(first + candidate, used, remembered, own_list)
                    found = _scaled(found, is_newest, inverse * (D * SCALE), key_inverse)
                found = tl.where(first + candidate < remembered, found, float("-inf"))
                score, slot = merge(score, slot, found, first + candidate, PLACES)
            if NORMALISES:
                if keeping:
                    _shorten(used - 1, row, part, key_inverse, slots, keys, key_scale, D, KEY_SLICE, PIECE)
        k = tl.minimum(K_TOP, remembered)
        weight, norm = WEIGH(score, place < k)
        valid = also(place < k, alive)
        weight, slot = tl.where(valid, weight, 0.0), tl.where(valid, slot, -1)
        if FORGET == "most_read":
            if part == 0:
                was_read = slot
                if NUMBERS:
                    was_read = places_of(own_list, remembered, discount, slot, "plain")
                count_reads(reads + wide(row) * width, was_read, valid, "plain")
        if (FORGET is not None) and (not NUMBERS):
            slot = as_slots(own_list, oldest, slot, "plain")
        if part == 0:
            tl.store(weights + at_row * K_TOP + place, weight, mask=valid)
            tl.store(selected + at_row * K_TOP + place, slot, mask=valid)
            if SAVES_NORM:
                tl.store(norms + at_row, tl.sum(norm, 0))
            if NORMALISES:
                tl.store(query_scale + at_row, inverse)
                tl.store(scores + at_row * K_TOP + place, score, mask=valid)
        for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, N), PIECE):
            unit = first + tl.arange(0, PIECE)
            inside = unit < N
            provisional = tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0)
            s = tl.zeros((PIECE,), real)
            linear_map = s
            if VALUES:
                linear_map = tl.load(map_part + row * N + unit, mask=inside, other=0.0)
            for group in tl.static_range(0, K_TOP, GROUP):
                # Each microstate by itself: the numbers that all threads need then are single ones, and what a thread
                # loads is what it adds up. All loads of a group come first, so that they wait together.
                states = ()
                own_values = ()
                for j in tl.static_range(group, min(group + GROUP, K_TOP)):
                    one = taken(slot, j, PLACES)
                    there = also(inside, one >= 0)
                    at = (wide(microstate(one, seen, first_slots, k_att)) * batch + row) * N
                    states = states + (tl.load(store + at + unit, mask=there, other=0.0),)
                    if VALUES:
                        at = (wide(one) * batch + row) * N
                        own_values = own_values + (tl.load(values + at + unit, mask=there, other=0.0),)
                for j in tl.static_range(group, min(group + GROUP, K_TOP)):
                    one = taken(weight, j, PLACES)
                    s += one * states[j - group]
                    if VALUES:
                        linear_map += one * own_values[j - group].to(real)
            tl.store(summary + at_row * N + unit, s, mask=also(inside, alive))
            if MAPPED and not VALUES:
                store_factor(summary_left + row * INNER + unit, s, inside, MIXED)
            else:
                if SAVES_MAP and VALUES:
                    tl.store(mapped + at_row * N + unit, linear_map, mask=inside)
                new = INCORPORATE(provisional, s, linear_map, MATH)
                if lengths is not None:
                    new = tl.where(alive, new, 0.0)
                tl.store(h_out + row * N + unit, new, mask=inside)
                store_factor(h_next + row * INNER + unit, new, inside, MIXED)


@triton.jit
def _map_phase(t, batch, pid, programs, h_hat_left, summary_left, h_hat, summary, saved, h_out, h_next, lengths,
               w_incorporate, b_incorporate, real: tl.constexpr, MATH: tl.constexpr, INCORPORATE: tl.constexpr,
               SAVES_MAP: tl.constexpr, N: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               INNER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
        right = w_incorporate + unit * (2 * INNER)
        mapped = whole_product(h_hat_left + row * INNER, right, row < batch, unit < N, real, INNER, ROWS, COLUMNS,
                               BLOCK, STAGES, PRECISION)  # fmt: skip
        mapped += whole_product(summary_left + row * INNER, right + INNER, row < batch, unit < N, real, INNER, ROWS,
                                COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
        mapped = apart(mapped) + bias[None, :]
        at = row[:, None] * N + unit[None, :]
        at_step = wide(t * batch) * N + at
        provisional = tl.load(h_hat + at_step, mask=inside, other=0.0)
        s = tl.load(summary + at_step, mask=inside, other=0.0)
        if SAVES_MAP:
            tl.store(saved + at_step, mapped, mask=inside)
        new = tl.where(alive, INCORPORATE(provisional, s, mapped, MATH), 0.0)
        tl.store(h_out + at, new, mask=inside)
        store_factor(h_next + row[:, None] * INNER + unit[None, :], new, inside, MIXED)


@triton.jit(
    do_not_specialize=["steps", "batch", "seen", "first_slots", "slots", "k_att", "bias_size", "most", "discount"]
)
def forward_kernel(store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
                   key_scale, query_scale, scores, lengths, turn_rates, w_hh, b_hh, w_memory, w_query, scorer_bias, v,
                   w_incorporate, b_incorporate, h_left, h_hat_left, summary_left, values, map_part, partial,
                   key_squares, query_squares, best_key, best_slot, live, reads, lost, counter, steps, batch, seen,
                   first_slots, slots, k_att, bias_size, most, discount, CELL: tl.constexpr, GATES: tl.constexpr,
                   HAS_C: tl.constexpr, SPLITS: tl.constexpr, NUMBERS: tl.constexpr, MARK: tl.constexpr,
                   NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr, QUERY: tl.constexpr, TERMS: tl.constexpr,
                   WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr, SEES_LEVEL: tl.constexpr, INCORPORATE: tl.constexpr,
                   MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr, FORGET: tl.constexpr, VALUES: tl.constexpr,
                   N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr,
                   MIXED: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
                   QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, SLICE: tl.constexpr,
                   PIECE: tl.constexpr, KEY_SLICE: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
                   INNER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    real: tl.constexpr = store.dtype.element_ty
    pid, programs = tl.program_id(0), tl.num_programs(0)
    goal = programs
    KEYS: tl.constexpr = K_TOP > 0 and not NUMBERS
    LISTED: tl.constexpr = FORGET is not None and FORGET != "recent"
    lists = live if LISTED else None
    width = slots  # of a row's list, and of its scores
    if FORGET is not None:
        width = tl.minimum(slots, most)
    if LISTED:
        for row in range(pid, batch, programs):
            write_list(live + wide(row) * width, 0, first_slots, width, tl.arange(0, 256), "plain")
    if NUMBERS and K_TOP > 0:
        for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
            place = tl.arange(0, PLACES)
            best, slot = _best_keys(tile % batch, None, 0, first_slots, slots, keys, real, PLACES, CANDIDATES)
            tl.store(best_key + tile * PLACES + place, best)
            tl.store(best_slot + tile * PLACES + place, slot)
    for t in range(steps):
        used = 0 * seen
        if K_TOP > 0:
            used = slots_at(seen + t, seen, first_slots, k_att)
        keeping = keeps(seen + t - 1, k_att) & (t > 0)
        h_old = store + wide((first_slots + t) * batch) * N
        h_new = h_old + batch * N
        # Two copies in turn: without a read h_t is written while others still read h_{t-1}.
        left, next_left = h_left + t % 2 * batch * INNER, h_left + (t + 1) % 2 * batch * INNER
        # Where the scorer normalises, this writes over `key_squares`, and `_query_phase` over `query_squares`, which
        # `_read_phase` reads. Each read is followed by a meeting before the next write.
        _cell_phase(t, batch, pid, programs, used, keeping, used - 1, seen + t - 1, slots, left, next_left, h_hat_left,
                    h_old, h_new, c, gates, hidden_new, h_hat, keys, key_squares, turn_rates, values, lengths, w_hh,
                    b_hh, w_memory, real, MATH, CELL, N, D, GATES, HAS_C, SPLITS, KEYS, VALUES, NORMALISES, MIXED, ROWS,
                    UNITS, INNER, BLOCK, STAGES, PRECISION)  # fmt: skip
        remembered = used
        read_keys = keys
        if FORGET is not None:
            remembered = tl.minimum(used, most)
        if FORGET == "recent":
            read_keys = keys + wide(used - remembered) * D
        if LISTED:
            if keeping:  # all have read what the step before read, and counted it
                _forget_phase(t - 1, batch, pid, programs, used - 1, seen, k_att, most, discount, width, live, reads,
                              lost, lengths, FORGET)  # fmt: skip
        goal = meet(counter, goal, programs)
        if K_TOP > 0:
            if used > 0:
                if not NUMBERS:
                    _query_phase(t, batch, pid, programs, remembered, seen, slots, width, h_hat_left, query,
                                 query_squares, read_keys, lists, partial, map_part, turn_rates, w_query, scorer_bias,
                                 v, b_incorporate, real, MATH, QUERY, TERMS, NORMALISES, SCALE, VALUES, N, D,
                                 QUERY_ROWS, COLUMNS, SLOTS, INNER, BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = meet(counter, goal, programs)
                _read_phase(t, batch, pid, programs, used, remembered, keeping, seen, first_slots, slots, width, k_att,
                            bias_size, most, discount, h_old, h_new, next_left, store, h_hat, keys, key_scale,
                            key_squares, values, partial, map_part, query_squares, best_key, best_slot, lists, reads,
                            lost, weights, selected, norms, summary, mapped, query_scale, scores, summary_left, lengths,
                            w_memory, w_query, scorer_bias, real, MATH, NUMBERS, MARK, NORMALISES, SMALLEST_SQUARE,
                            SCALE, WEIGH, SAVES_NORM, SEES_LEVEL, INCORPORATE, MAPPED, SAVES_MAP, FORGET, VALUES, N, D,
                            K_TOP, PLACES, MIXED, SLICE, PIECE, KEY_SLICE, GROUP, COLUMNS, UNITS, CANDIDATES,
                            INNER)  # fmt: skip
                goal = meet(counter, goal, programs)
                if MAPPED and not VALUES:
                    _map_phase(t, batch, pid, programs, h_hat_left, summary_left, h_hat, summary, mapped, h_new,
                               next_left, lengths, w_incorporate, b_incorporate, real, MATH, INCORPORATE, SAVES_MAP, N,
                               MIXED, QUERY_ROWS, COLUMNS, INNER, BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = meet(counter, goal, programs)
    if K_TOP > 0:
        if keeps(seen + steps - 1, k_att):
            h_end = store + wide((first_slots + steps) * batch) * N
            slot = slots_at(seen + steps - 1, seen, first_slots, k_att)
            if LISTED:
                _forget_phase(steps - 1, batch, pid, programs, slot, seen, k_att, most, discount, width, live, reads,
                              lost, lengths, FORGET)  # fmt: skip
            if NUMBERS:
                for row in range(pid, batch, programs):
                    key = _affine_key(steps - 1, row, batch, seen, k_att, bias_size, h_end, keys.dtype.element_ty,
                                      w_memory, scorer_bias, real, MATH, N, 1024, MARK)  # fmt: skip
                    tl.store(keys + wide(row) * slots + slot, key)
            else:
                left = h_left + steps % 2 * batch * INNER
                _key_phase(slot, seen + steps - 1, batch, pid, programs, slots, left, keys, key_squares, turn_rates,
                           w_memory, real, MATH, NORMALISES, VALUES, D, QUERY_ROWS, COLUMNS, INNER, BLOCK, STAGES,
                           PRECISION)  # fmt: skip
                if NORMALISES:
                    meet(counter, goal, programs)  # for the sums of the other tiles
                    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
                        squares = _squares(key_squares, tile % batch, batch, True, real, (D + COLUMNS - 1) // COLUMNS)
                        scale = tl.rsqrt(tl.sum(squares, 0) + SMALLEST_SQUARE * D)
                        _shorten(slot, tile % batch, tile // batch, scale, slots, keys, key_scale, D, KEY_SLICE,
                                 PIECE)  # fmt: skip
    if FORGET == "recent":
        for row in range(pid, batch, programs):
            length = steps
            if lengths is not None:
                length = tl.load(lengths + row).to(tl.int32)
            used = slots_at(seen + length, seen, first_slots, k_att)
            remembered = tl.minimum(used, most)
            own_list = live + wide(row) * width
            write_list(own_list, used - remembered, remembered, width, tl.arange(0, 256), "plain")
