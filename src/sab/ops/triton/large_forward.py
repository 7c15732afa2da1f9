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
    turned,
    turns,
    two_products,
    whole_product,
    wide,
)
from sab.ops.triton.small_select import load_keys, select, select_exactly


@triton.jit
def _cell_phase(t, batch, pid, programs, reads, keeping, slot, step, slots, h_left, h_next, h_hat_left, h_in, h_out, c,
                gates, hidden_new, h_hat, keys, new_key, turn_rates, values, lengths, w_hh, b_hh, w_memory,
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
                _store_key(key, step, row, unit, slot, batch, slots, keys, new_key, turn_rates, real, MATH, NORMALISES,
                           D)  # fmt: skip
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
def _store_key(key, step, row, column, slot, batch, slots, keys, new_key, turn_rates, real: tl.constexpr,
               MATH: tl.constexpr, NORMALISES: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Columns of a slot's keys. Where they are to have length 1, which is that of all columns, they are turned by the
    step that kept them and left in new_key [row, column], from which `_keep_phase` takes them after a meeting."""
    inside = (row < batch)[:, None] & (column < D)[None, :]
    if NORMALISES:
        cosine, sine = turns(step, column, tl.load(turn_rates + column, mask=column < D, other=0), real, MATH)
        key = turned(key, cosine[None, :], sine[None, :])
        tl.store(new_key + row[:, None] * D + column[None, :], key, mask=inside)
    else:
        tl.store(keys + (wide(row) * slots + slot)[:, None] * D + column[None, :], key, mask=inside)


@triton.jit
def _key_phase(slot, step, batch, pid, programs, slots, h_left, keys, new_key, turn_rates, w_memory,
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
        _store_key(key, step, row, column, slot, batch, slots, keys, new_key, turn_rates, real, MATH, NORMALISES,
                   D)  # fmt: skip


@triton.jit
def _inverse_length(x, SMALLEST_SQUARE: tl.constexpr, D: tl.constexpr):
    """1 / the length of a vector, which is 0 past its D entries."""
    return tl.rsqrt(tl.sum(x * x, 0) + SMALLEST_SQUARE * D)


@triton.jit
def _keep_phase(slot, batch, pid, programs, slots, keys, key_scale, new_key, SMALLEST_SQUARE: tl.constexpr,
                D: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Stores the newest keys with length 1: by the last programs, which other phases have less for."""
    column = tl.arange(0, WIDTH)
    for row in range(programs - 1 - pid, batch, programs):
        key = tl.load(new_key + row * D + column, mask=column < D, other=0.0)
        inverse = _inverse_length(key, SMALLEST_SQUARE, D)
        tl.store(keys + (wide(row) * slots + slot) * D + column, key * inverse, mask=column < D)
        tl.store(key_scale + wide(row) * slots + slot, inverse)


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
def _query_phase(t, batch, pid, programs, h_hat_left, query, map_part, w_query, scorer_bias, b_incorporate,
                 real: tl.constexpr, QUERY: tl.constexpr, SCALE: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr,
                 D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The query and, with values, the map's part that comes from ĥ and the bias, as many columns: the same factor."""
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
        if scorer_bias is not None:
            bias = tl.load(scorer_bias + column, mask=column < D, other=0.0).to(real)
        own = QUERY(own, bias[None, :], SCALE)
        tl.store(query + (wide(t * batch) + row)[:, None] * D + column[None, :], own, mask=inside)


@triton.jit
def _read_phase(t, step, batch, pid, programs, used, remembered, keeping, seen, first_slots, slots, width, k_att,
                bias_size, most, discount, h_old, h_out, h_next, store, h_hat, query, keys, values, map_part, best_key,
                best_slot, live, reads, lost, weights, selected, norms, summary, mapped, query_scale, scores,
                summary_left, lengths, turn_rates, w_memory, w_query, scorer_bias, v, real: tl.constexpr,
                MATH: tl.constexpr, NUMBERS: tl.constexpr, MARK: tl.constexpr, TERMS: tl.constexpr, MIXED: tl.constexpr,
                NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr, SCALE: tl.constexpr, WEIGH: tl.constexpr,
                SAVES_NORM: tl.constexpr, SEES_LEVEL: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr,
                SAVES_MAP: tl.constexpr, FORGET: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                K_TOP: tl.constexpr, PLACES: tl.constexpr, SLICE: tl.constexpr, PIECE: tl.constexpr,
                GROUP: tl.constexpr, CANDIDATES: tl.constexpr, WIDTH: tl.constexpr, KC: tl.constexpr,
                WARPS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """Selects, weighs and sums up, and makes h_t but where its map is a product of the summary: a slice of a row's
    units in one tile. With values the map's part of the summary is their sum, weighed alike."""
    column = tl.arange(0, WIDTH)
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
            place = tl.arange(0, PLACES)
            first_warp = place >= 0
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
            slot = tl.where(place < tl.minimum(K_TOP, remembered), slot, -1)
            score = best
            if SEES_LEVEL:  # else the query's part, the same for all, makes no difference
                score = best + linear(h_hat + at_row * N, w_query, real, MATH, N, 1024, MARK)
        else:
            # Every slice scores all keys, so that they need not wait for each other. Each warp has the best to itself.
            place = tl.arange(0, KC)[None, :] + tl.zeros((WARPS, KC), tl.int32)
            first_warp = tl.arange(0, WARPS)[:, None] == 0
            own_keys = keys + (wide(row) * slots + oldest) * D
            count = remembered
            if lengths is not None:
                count = tl.where(alive, remembered, 0)
            if MIXED:
                ahead = load_keys(own_keys, own_list, 0, count, D, WIDTH)
            asked = tl.load(query + at_row * D + column, mask=column < D, other=0.0)
            factor = asked
            if v is not None:
                factor = tl.load(v + column, mask=column < D, other=0.0).to(real)
            if NORMALISES:
                inverse = _inverse_length(asked, SMALLEST_SQUARE, D)
                cosine, sine = turns(step, column, tl.load(turn_rates + column, mask=column < D, other=0), real, MATH)
                asked = turned(asked * factor, cosine, sine)
            if MIXED:
                score, slot = select(own_keys, own_list, ahead, count, asked, factor, place, K_TOP, D, TERMS, MATH)
            else:
                score, slot = select_exactly(own_keys, own_list, count, asked, factor, place, K_TOP, D, TERMS,
                                             MATH, real)  # fmt: skip
            if NORMALISES:  # the query's length makes no difference to what is selected
                score = score * (inverse * (D * SCALE))
                tl.store(query_scale + at_row, inverse)
                tl.store(scores + at_row * K_TOP + place, score, mask=also(first_warp & (slot >= 0), alive))
        valid = also(slot >= 0, alive)
        weight, norm = WEIGH(score, valid)
        weight, slot = tl.where(valid, weight, 0.0), tl.where(valid, slot, -1)
        if FORGET == "most_read":
            if part == 0:
                was_read = slot
                if NUMBERS:
                    was_read = places_of(own_list, remembered, discount, slot, "plain")
                count_reads(reads + wide(row) * width, was_read, valid & first_warp, "plain")
        if (FORGET is not None) and (not NUMBERS):
            slot = as_slots(own_list, oldest, slot, "plain")
        # Each slice of a row stores the same numbers, and takes them from there: one at a time, for all threads.
        tl.store(weights + at_row * K_TOP + place, weight, mask=valid & first_warp)
        tl.store(selected + at_row * K_TOP + place, slot, mask=valid & first_warp)
        if SAVES_NORM:
            tl.store(norms + at_row + 0 * place, norm + 0.0 * weight, mask=first_warp & (place == 0))
        tl.debug_barrier()
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
                shares = ()
                for j in tl.static_range(group, min(group + GROUP, K_TOP)):
                    one = tl.load(selected + at_row * K_TOP + j)
                    shares = shares + (tl.load(weights + at_row * K_TOP + j, mask=one >= 0, other=0.0),)
                    there = also(inside, one >= 0)
                    at = (wide(microstate(one, seen, first_slots, k_att)) * batch + row) * N
                    states = states + (tl.load(store + at + unit, mask=there, other=0.0),)
                    if VALUES:
                        at = (wide(one) * batch + row) * N
                        own_values = own_values + (tl.load(values + at + unit, mask=there, other=0.0),)
                for j in tl.static_range(group, min(group + GROUP, K_TOP)):
                    s += shares[j - group] * states[j - group]
                    if VALUES:
                        linear_map += shares[j - group] * own_values[j - group].to(real)
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
                   w_incorporate, b_incorporate, h_left, h_hat_left, summary_left, values, map_part, new_key, best_key,
                   best_slot, live, reads, lost, counter, steps, batch, seen, first_slots, slots, k_att, bias_size,
                   most, discount, CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
                   NUMBERS: tl.constexpr, MARK: tl.constexpr, NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr,
                   QUERY: tl.constexpr, TERMS: tl.constexpr, WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr,
                   SEES_LEVEL: tl.constexpr, INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr,
                   FORGET: tl.constexpr, VALUES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr,
                   PLACES: tl.constexpr, SCALE: tl.constexpr, MIXED: tl.constexpr, MATH: tl.constexpr,
                   ROWS: tl.constexpr, UNITS: tl.constexpr, QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   SLICE: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
                   WIDTH: tl.constexpr, KC: tl.constexpr, WARPS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr,
                   STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
        # Where the scorer normalises, this writes over `new_key`, which `_keep_phase` reads: a meeting is between them.
        _cell_phase(t, batch, pid, programs, used, keeping, used - 1, seen + t - 1, slots, left, next_left, h_hat_left,
                    h_old, h_new, c, gates, hidden_new, h_hat, keys, new_key, turn_rates, values, lengths, w_hh,
                    b_hh, w_memory, real, MATH, CELL, N, D, GATES, HAS_C, SPLITS, KEYS, VALUES, NORMALISES, MIXED, ROWS,
                    UNITS, INNER, BLOCK, STAGES, PRECISION)  # fmt: skip
        remembered = used
        if FORGET is not None:
            remembered = tl.minimum(used, most)
        if LISTED:
            if keeping:  # all have read what the step before read, and counted it
                _forget_phase(t - 1, batch, pid, programs, used - 1, seen, k_att, most, discount, width, live, reads,
                              lost, lengths, FORGET)  # fmt: skip
        goal = meet(counter, goal, programs)
        if K_TOP > 0:
            if used > 0:
                if not NUMBERS:
                    _query_phase(t, batch, pid, programs, h_hat_left, query, map_part, w_query, scorer_bias,
                                 b_incorporate, real, QUERY, SCALE, VALUES, N, D, QUERY_ROWS, COLUMNS, INNER, BLOCK,
                                 STAGES, PRECISION)  # fmt: skip
                    if NORMALISES:
                        if keeping:
                            _keep_phase(used - 1, batch, pid, programs, slots, keys, key_scale, new_key,
                                        SMALLEST_SQUARE, D, WIDTH)  # fmt: skip
                    goal = meet(counter, goal, programs)
                _read_phase(t, seen + t, batch, pid, programs, used, remembered, keeping, seen, first_slots, slots,
                            width, k_att, bias_size, most, discount, h_old, h_new, next_left, store, h_hat, query, keys,
                            values, map_part, best_key, best_slot, lists, reads, lost, weights, selected, norms,
                            summary, mapped, query_scale, scores, summary_left, lengths, turn_rates, w_memory, w_query,
                            scorer_bias, v, real, MATH, NUMBERS, MARK, TERMS, MIXED, NORMALISES, SMALLEST_SQUARE,
                            SCALE, WEIGH, SAVES_NORM, SEES_LEVEL, INCORPORATE, MAPPED, SAVES_MAP, FORGET, VALUES, N, D,
                            K_TOP, PLACES, SLICE, PIECE, GROUP, CANDIDATES, WIDTH, KC, WARPS, INNER)  # fmt: skip
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
                _key_phase(slot, seen + steps - 1, batch, pid, programs, slots, left, keys, new_key, turn_rates,
                           w_memory, real, MATH, NORMALISES, VALUES, D, QUERY_ROWS, COLUMNS, INNER, BLOCK, STAGES,
                           PRECISION)  # fmt: skip
                if NORMALISES:
                    meet(counter, goal, programs)  # for the columns of the other tiles
                    _keep_phase(slot, batch, pid, programs, slots, keys, key_scale, new_key, SMALLEST_SQUARE, D,
                                WIDTH)  # fmt: skip
    if FORGET == "recent":
        for row in range(pid, batch, programs):
            length = steps
            if lengths is not None:
                length = tl.load(lengths + row).to(tl.int32)
            used = slots_at(seen + length, seen, first_slots, k_att)
            remembered = tl.minimum(used, most)
            own_list = live + wide(row) * width
            write_list(own_list, used - remembered, remembered, width, tl.arange(0, 256), "plain")
