# type: ignore
"""The forward loop over time for small hidden sizes and rounded factors: one program a row, a number a thread."""

import triton
import triton.language as tl

from sab.ops.triton.access import get, put
from sab.ops.triton.forgetting import as_slots, count_reads, forgotten, renew, write_list
from sab.ops.triton.functions import first_kept, next_number, slots_at
from sab.ops.triton.lanes import (
    BOX,
    angles_of,
    as_units,
    boxes,
    exchanged,
    fill_shelf,
    get_four,
    lanes_of,
    load_held,
    matrix,
    note,
    product,
    put_shared,
    recall,
    shuffled,
    summed,
    summed_unit_of,
    total_of_units,
    turned,
    warps_of,
)
from sab.ops.triton.lanes_select import load_tile, select_lanes
from sab.ops.triton.small_parts import rows_of
from sab.ops.triton.small_select import select_exactly


@triton.jit
def get_gates(gates, unit, mask, n: tl.constexpr, GATES: tl.constexpr, MATH: tl.constexpr):
    """The gates of a step, a vector each, as they lie."""
    found = ()
    for g in tl.static_range(GATES):
        found = found + (get(gates + g * n + unit, mask, "", MATH),)
    return found


@triton.jit
def converted(vectors, DTYPE: tl.constexpr):
    """Vectors in another type. What was asked for early is converted late: a conversion waits for it."""
    found = ()
    for g in tl.static_range(len(vectors)):
        found = found + (vectors[g].to(DTYPE),)
    return found


@triton.jit
def hidden_products(held, shelf, h, GATES: tl.constexpr, TYPE: tl.constexpr, P: tl.constexpr, MATH: tl.constexpr):
    """The products of the recurrent weights with a hidden state."""
    found = ()
    for g in tl.static_range(GATES):
        found = found + (product(matrix(held, shelf, g, P), h, TYPE, P, MATH),)
    return found


@triton.jit(do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "most", "discount"])
def lanes_forward_kernel(
    w, threads, b_hh, scorer_bias, v, b_incorporate, turn_rates, lengths,
    store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
    key_scale, query_scale, selected_scores, live, reads, output,
    steps, batch, first_slots, slots, seen, k_att, most, discount,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
    NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr, QUERY: tl.constexpr, TERMS: tl.constexpr,
    WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr,
    INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr, FORGET: tl.constexpr,
    P: tl.constexpr, HELD: tl.constexpr, SHELVED: tl.constexpr, BY_PRODUCTS: tl.constexpr,
    TYPE: tl.constexpr, MATH: tl.constexpr, IS_FRESH: tl.constexpr, WRITES_OUTPUT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCORER_BIAS: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = P // 16
    DTYPE: tl.constexpr = store.dtype.element_ty
    GROUPS: tl.constexpr = (K + 7) // 8  # of eight selected microstates
    LISTED: tl.constexpr = FORGET is not None and FORGET != "recent"
    W_QUERY: tl.constexpr = GATES
    W_SUMMARY: tl.constexpr = GATES + 1
    W_STATE: tl.constexpr = GATES + 2
    W_MEMORY: tl.constexpr = GATES + 3 if MAPPED else GATES + 1

    row = tl.program_id(0).to(tl.int64)
    # A load, which alone makes sure that a thread has one number of each tensor: layouts follow from those of loads.
    thread = tl.load(threads + warps_of(NB) * 32 + lanes_of(NB)) & (32 * NB - 1)
    lane = thread & 31
    warp = thread >> 5
    unit = warp * 16 + (lane >> 2) + ((lane & 1) << 3)
    here = unit < n
    there = unit < d
    four = warp * 16 + ((lane & 3) << 2)
    box = boxes(NB, MATH)
    length = steps
    if HAS_LENGTHS:
        length = tl.load(lengths + row).to(tl.int32)

    held = load_held(w, HELD, P, MATH)
    shelf = lane
    if SHELVED > 0:
        shelf = fill_shelf(w, HELD, SHELVED, P)
    biases = ()
    if SPLITS and HAS_BIAS:
        biases = converted(get_gates(b_hh, unit, here, n, GATES, MATH), DTYPE)
    zero = tl.zeros((NB, 32), DTYPE)
    q_bias = zero
    if HAS_SCORER_BIAS:
        q_bias = get(scorer_bias + unit, there, "", MATH).to(DTYPE)
    if NORMALISES:
        v_vector = get(v + unit, there, "", MATH).to(DTYPE)
        rates = get(turn_rates + unit, there, "", MATH)
    if MAPPED:
        c_bias = get(b_incorporate + unit, here, "", MATH).to(DTYPE)

    # Where step t's numbers lie.
    gates_t = gates + row * GATES * n
    store_t = store + (first_slots * batch + row) * n  # the hidden state that enters step t
    c_t = c + row * n
    row_t = row * n  # in h_hat, summary, mapped, hidden_new, output
    query_t = query + row * d
    list_t = row * K
    norms_t = row
    own_keys = keys + row * slots * d
    own_list, own_reads = None, None
    if LISTED:
        own_list = live + row * tl.minimum(slots, most)
        write_list(own_list, 0, first_slots, tl.minimum(slots, most), thread, MATH)
    if FORGET == "most_read":
        own_reads = reads + row * tl.minimum(slots, most)
    h = zero
    c_now = zero
    if IS_FRESH:
        put(store_t + unit, zero, here, MATH)
        if HAS_C:
            put(c_t + unit, zero, here, MATH)
    else:
        h = get(store_t + unit, here, "", MATH)
        if HAS_C:
            c_now = get(c_t + unit, here, "", MATH)
    x = get_gates(gates_t, unit, unit < tl.where(length > 0, n, 0), n, GATES, MATH)

    # The products with the hidden state are made at the end of the step before.
    p = hidden_products(held, shelf, exchanged(box, h, unit, P, TYPE, MATH), GATES, TYPE, P, MATH)

    used = slots_at(seen, seen, first_slots, k_att)
    until_kept = first_kept(seen, k_att)
    for t in range(length):
        # The input's part of the next step comes while this one is computed.
        next_gates = gates_t + batch.to(tl.int64) * GATES * n
        next_x = get_gates(next_gates, unit, unit < tl.where(t + 1 < length, n, 0), n, GATES, MATH)
        if NORMALISES:
            cosine, sine = angles_of(seen + t, unit, rates, DTYPE, MATH)

        # Cell.
        if SPLITS:
            if HAS_BIAS:
                whole = ()
                for g in tl.static_range(GATES):
                    whole = whole + (p[g] + biases[g],)
                p = whole
            put(hidden_new + row_t + unit, p[GATES - 1], here, MATH)
        h_new, c_now, activated = CELL(converted(x, DTYPE), p, h, c_now, MATH)
        noted = note(box + BOX, h_new, unit, P, TYPE, MATH)
        for g in tl.static_range(GATES):
            put(gates_t + g * n + unit, activated[g], here, MATH)
        if HAS_C:
            put(c_t + batch * n + unit, c_now, here, MATH)
        put(h_hat + row_t + unit, h_new, here, MATH)
        w_query = matrix(held, shelf, W_QUERY, P)
        tl.debug_barrier()  # the newest key is stored as well

        # Read.
        remembered = used
        read_keys = own_keys
        if FORGET is not None:
            remembered = tl.minimum(used, most)
        if FORGET == "recent":
            read_keys = own_keys + (used - remembered) * d
        ahead = ()
        if BY_PRODUCTS:
            ahead = load_tile(read_keys, own_list, 0, remembered, P, MATH)
        state = recall(box + BOX, noted, P, TYPE, MATH)
        q = QUERY(product(w_query, state, TYPE, P, MATH), q_bias, SCALE)
        put(query_t + unit, q, there, MATH)
        asked = tl.where(there, q, 0.0)
        if NORMALISES:  # its length makes no difference to the selection
            if MATH != "plain":
                put_shared(box + 3 * BOX + unit * 4, q)
            asked = turned(q * v_vector, cosine, sine, MATH)
        if BY_PRODUCTS:
            asked = exchanged(box + 2 * BOX, asked, unit, P, TYPE, MATH)
        else:
            asked = note(box + 2 * BOX, asked, unit, P, DTYPE, MATH)
            tl.debug_barrier()
        if DTYPE == tl.float64:  # in the interpreter
            v_row = tl.load(v + tl.arange(0, P), mask=tl.arange(0, P) < d, other=0)
            scores, chosen = select_exactly(
                read_keys, own_list, remembered, asked, v_row, lane, K, d, TERMS, MATH, DTYPE
            )  # fmt: skip
        else:
            scores, chosen, square = select_lanes(
                read_keys, own_list, ahead, remembered, asked, v, box + 2 * BOX, box + 3 * BOX, box + 6 * BOX,
                K, d, TERMS, HAS_V and not NORMALISES, BY_PRODUCTS, NORMALISES, P, TYPE, MATH, DTYPE,
            )  # fmt: skip
        if FORGET == "most_read":
            count_reads(own_reads, chosen, (warp == 0) & (lane < K), MATH)
        if FORGET is not None:
            chosen = as_slots(own_list, used - remembered if FORGET == "recent" else 0, chosen, MATH)

        # What was selected comes while its weights are computed.
        rows = rows_of(chosen, first_slots, seen, k_att, batch, row)
        read = ()
        for g in tl.static_range(GROUPS):
            own_row = shuffled(rows, lane // 4 + 8 * g, MATH)
            read = read + (get_four(store + own_row.to(tl.int64) * n, four, own_row >= 0, n, DTYPE, MATH),)
        put(selected + list_t + lane, chosen, (warp == 2 % NB) & (lane < K), MATH)
        if NORMALISES:
            if MATH == "plain":
                square = tl.sum(tl.sum(q * q, 1), 0) * 0.5
            inverse = 1.0 / tl.sqrt(square + SMALLEST_SQUARE * d)
            put(query_scale + norms_t + 0 * lane, inverse + zero, (warp == 0) & (lane == 0), MATH)
            scores = scores * (inverse / SCALE)
            is_stored = (warp == 1 % NB) & (lane < K)
            put(selected_scores + list_t + lane, tl.where(chosen >= 0, scores, 0.0), is_stored, MATH)
        shares, norm = WEIGH(scores, chosen >= 0)
        put(weights + list_t + lane, shares, (warp == 3 % NB) & (lane < K), MATH)
        if SAVES_NORM:
            put(norms + norms_t + 0 * lane, norm + zero, (warp == 0) & (lane == 0), MATH)
        if MAPPED:
            state = recall(box + BOX, noted, P, TYPE, MATH)  # anew: it takes many registers
            linear = product(matrix(held, shelf, W_STATE, P), state, TYPE, P, MATH) + c_bias
        sums = (zero, zero, zero, zero)
        for g in tl.static_range(GROUPS):
            share = shuffled(shares, lane // 4 + 8 * g, MATH)
            added = ()
            for i in tl.static_range(4):
                added = added + (sums[i] + read[g][i] * share,)
            sums = added
        s = summed(sums, MATH)
        if MAPPED:
            w_summary = matrix(held, shelf, W_SUMMARY, P)
            noted = note(box + 4 * BOX, s, summed_unit_of(NB), P, TYPE, MATH)
        s = as_units(s, MATH)
        put(summary + row_t + unit, s, here, MATH)
        if MAPPED:
            tl.debug_barrier()
            linear += product(w_summary, recall(box + 4 * BOX, noted, P, TYPE, MATH), TYPE, P, MATH)
            if SAVES_MAP:
                put(mapped + row_t + unit, linear, here, MATH)
            h = INCORPORATE(h_new, s, linear, MATH)
        else:
            h = INCORPORATE(h_new, s, h_new, MATH)
        h = tl.where(used > 0, h, h_new)
        put(store_t + batch * n + unit, h, here, MATH)
        if WRITES_OUTPUT:
            put(output + row_t + unit, h, here, MATH)

        # The next step's products, and keep.
        state = exchanged(box, h, unit, P, TYPE, MATH)
        p = hidden_products(held, shelf, state, GATES, TYPE, P, MATH)
        if until_kept == 0:
            new_key = product(matrix(held, shelf, W_MEMORY, P), state, TYPE, P, MATH)
            if NORMALISES:
                key_square = total_of_units(box + 5 * BOX, new_key * new_key, MATH)
                key_inverse = 1.0 / tl.sqrt(key_square + SMALLEST_SQUARE * d)
                put(key_scale + row * slots + used + 0 * lane, key_inverse + zero, (warp == 0) & (lane == 0), MATH)
                new_key = turned(new_key * key_inverse, cosine, sine, MATH)
            put(own_keys + used * d + unit, new_key, there, MATH)
            if LISTED:
                number = next_number(seen + t, k_att)
                gone = forgotten(own_reads, remembered, most, discount, number, thread, box + 5 * BOX, FORGET, MATH)
                renew(own_list, own_reads, gone, remembered, most, used, thread, FORGET, MATH)

        used += tl.where(until_kept == 0, 1, 0)
        until_kept = tl.where(until_kept == 0, k_att, until_kept) - 1
        gates_t = next_gates
        store_t += batch * n
        c_t += batch * n
        row_t += batch * n
        query_t += batch * d
        list_t += batch * K
        norms_t += batch
        x = next_x

    if FORGET == "recent":
        remembered = tl.minimum(used, most)
        places = tl.minimum(slots, most)
        write_list(live + row * places, used - remembered, remembered, places, thread, MATH)
    if HAS_LENGTHS:  # past its end a row is all zeros
        for _ in range(length, steps):
            for gate in tl.static_range(GATES):
                put(gates_t + gate * n + unit, zero, here, MATH)
            put(store_t + batch * n + unit, zero, here, MATH)
            if WRITES_OUTPUT:
                put(output + row_t + unit, zero, here, MATH)
            put(h_hat + row_t + unit, zero, here, MATH)
            if HAS_C:
                put(c_t + batch * n + unit, zero, here, MATH)
            if SPLITS:
                put(hidden_new + row_t + unit, zero, here, MATH)
            gates_t += batch * GATES * n
            store_t += batch * n
            c_t += batch * n
            row_t += batch * n
