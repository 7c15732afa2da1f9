# type: ignore

"""The forward loop over time for small hidden sizes: one program a row."""

import triton
import triton.language as tl

from sab.ops.triton.access import angles, put
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
from sab.ops.triton.small_parts import (
    eight_of,
    gather,
    inner,
    inverse_length,
    product,
    resident,
    rows_of,
    streamed,
    turned,
)
from sab.ops.triton.small_select import insert, load_keys, replaced, select, select_exactly


@triton.jit
def load_gates(gates, unit, mask, n: tl.constexpr, GATES: tl.constexpr, DTYPE: tl.constexpr):
    """The gates of a step, a vector each."""
    found = ()
    for g in tl.static_range(GATES):
        found = found + (tl.load(gates + g * n + unit, mask=mask, other=0).to(DTYPE),)
    return found


@triton.jit
def hidden_products(w, w_all, h, h_at, unit, n: tl.constexpr, GATES: tl.constexpr, RESIDENT: tl.constexpr,
                    TYPE: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The products of the recurrent weights with a hidden state, which also lies at `h_at`."""
    found = ()
    for g in tl.static_range(GATES):
        if RESIDENT:
            found = found + (product(w[g], h, TYPE),)
        else:
            found = found + (streamed(w_all + g * n * n, n, 1, n, unit, n, h_at, DTYPE),)
    return found


@triton.jit(
    do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "bias_size", "most", "discount"]
)
def forward_kernel(
    w_held, w_all, b_hh, w_memory, w_query, scorer_bias, v, b_incorporate, turn_rates, lengths,
    store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
    key_scale, query_scale, selected_scores, live, reads,
    steps, batch, first_slots, slots, seen, k_att, bias_size, most, discount,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
    NUMBERS: tl.constexpr, NORMALISES: tl.constexpr, SMALLEST_SQUARE: tl.constexpr,
    MARK: tl.constexpr, QUERY: tl.constexpr, TERMS: tl.constexpr,
    WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr, SEES_LEVEL: tl.constexpr,
    INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr,
    FORGET: tl.constexpr, P: tl.constexpr, KC: tl.constexpr, PACKED: tl.constexpr,
    RESIDENT: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCORER_BIAS: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = P // 16
    SCORE_MATH: tl.constexpr = "accurate" if MATH == "approximate" else MATH
    DTYPE: tl.constexpr = store.dtype.element_ty
    W_MEMORY: tl.constexpr = GATES * n * n
    W_QUERY: tl.constexpr = W_MEMORY + d * n
    W_INCORPORATE: tl.constexpr = W_MEMORY if NUMBERS else W_MEMORY + 2 * d * n
    GROUPS: tl.constexpr = (K + 7) // 8  # of eight selected microstates
    LISTED: tl.constexpr = FORGET is not None and FORGET != "recent"

    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    here = unit < n
    there = unit < d
    column = tl.arange(0, P)
    place = tl.arange(0, KC)[None, :] + tl.zeros((NB, 1), tl.int32)
    is_first = (place < K) & (tl.arange(0, NB) == 0)[:, None]
    length = steps
    if HAS_LENGTHS:
        length = tl.load(lengths + row).to(tl.int32)

    w = ()
    if RESIDENT:
        for g in tl.static_range(GATES):
            w = w + (resident(w_held + g * n * n, n, 1, n, unit, n, TYPE),)
        if (K > 0) and (not NUMBERS):
            wm = resident(w_all + W_MEMORY, n, 1, n, unit, d, TYPE)
            wq = resident(w_all + W_QUERY, n, 1, n, unit, d, TYPE)
        if MAPPED:
            wc = resident(w_all + W_INCORPORATE, n, 1, 2 * n, unit, n, TYPE)
            ws = resident(w_all + W_INCORPORATE + n, n, 1, 2 * n, unit, n, TYPE)
    biases = ()
    if SPLITS and HAS_BIAS:
        biases = load_gates(b_hh, unit, here, n, GATES, DTYPE)
    best = tl.full((NB, KC), float("-inf"), DTYPE)
    chosen = tl.full((NB, KC), -1, tl.int32)
    thread = tl.arange(0, 32 * NB)
    own_list, own_reads = None, None
    if LISTED:
        own_list = live + row * tl.minimum(slots, most)
        write_list(own_list, 0, first_slots, tl.minimum(slots, most), thread, "plain")
        tl.debug_barrier()
    if FORGET == "most_read":
        own_reads = reads + row * tl.minimum(slots, most)
    if K > 0:
        if NUMBERS:
            wm_vector = tl.load(w_memory + unit, mask=here, other=0).to(DTYPE)
            wq_vector = tl.load(w_query + unit, mask=here, other=0).to(DTYPE)
            for slot in range(first_slots):
                key = tl.load(keys + row * slots + slot).to(DTYPE)
                best, chosen = insert(best, chosen, key, slot, place, K)
        v_column = tl.zeros((P,), DTYPE)
        q_bias = tl.zeros((NB, 16), DTYPE)
        if HAS_V:
            v_column = tl.load(v + column, mask=column < d, other=0).to(DTYPE)
        if NORMALISES:
            v_vector = tl.load(v + unit, mask=there, other=0).to(DTYPE)
            rates = tl.load(turn_rates + unit, mask=there, other=0)
        if HAS_SCORER_BIAS and not NUMBERS:
            q_bias = tl.load(scorer_bias + unit, mask=there, other=0).to(DTYPE)
        if MAPPED:
            c_bias = tl.load(b_incorporate + unit, mask=here, other=0).to(DTYPE)

    # Where step t's numbers lie.
    gates_t = gates + row * GATES * n
    store_t = store + (first_slots * batch + row) * n  # the hidden state that enters step t
    c_t = c + row * n
    row_t = row * n  # in h_hat, summary, mapped, hidden_new
    query_t = query + row * d
    list_t = row * K
    norms_t = row
    h = tl.load(store_t + unit, mask=here, other=0)
    c_now = h
    if HAS_C:
        c_now = tl.load(c_t + unit, mask=here, other=0)
    x = load_gates(gates_t, unit, here, n, GATES, DTYPE)

    # The products with the hidden state are made at the end of the step before. That the first ones are made here,
    # outside the loop, is what makes the compiler keep resident weights in registers.
    p = hidden_products(w, w_all, h, store_t, unit, n, GATES, RESIDENT, TYPE, DTYPE)

    for t in range(length):
        # The input's part of the next step comes while this one is computed.
        more = unit < tl.where(t + 1 < length, n, 0)
        next_gates = gates_t + batch.to(tl.int64) * GATES * n
        next_x = load_gates(next_gates, unit, more, n, GATES, DTYPE)

        if NORMALISES:
            cosine, sine = angles(seen + t, unit, rates, DTYPE)
        if (K > 0) and (not NUMBERS):
            used = slots_at(seen + t, seen, first_slots, k_att)
            own_keys = keys + row * slots * d
            remembered = used
            if FORGET is not None:
                remembered = tl.minimum(used, most)
            if FORGET == "recent":
                own_keys += (used - remembered) * d
            if PACKED:
                ahead = load_keys(own_keys, own_list, 0, remembered, d, P)

        # Cell.
        if SPLITS:
            if HAS_BIAS:
                whole = ()
                for g in tl.static_range(GATES):
                    whole = whole + (p[g] + biases[g],)
                p = whole
            put(hidden_new + row_t + unit, p[GATES - 1], here, MATH)
        h_new, c_now, activated = CELL(x, p, h, c_now, MATH)
        for g in tl.static_range(GATES):
            put(gates_t + g * n + unit, activated[g], here, MATH)
        if HAS_C:
            put(c_t + batch * n + unit, c_now, here, MATH)
        put(h_hat + row_t + unit, h_new, here, MATH)

        # Read.
        h = h_new
        if K > 0:
            used = slots_at(seen + t, seen, first_slots, k_att)
            if NUMBERS:
                scores = best
                if SEES_LEVEL:  # else the query's part, the same for all, makes no difference
                    if MARK is None:
                        scores = best + inner(wq_vector, h_new)
                    else:
                        scores = best + inner(wq_vector, MARK(h_new, SCORE_MATH))
            else:
                if RESIDENT:
                    q = product(wq, h_new, TYPE)
                else:
                    tl.debug_barrier()
                    q = streamed(w_all + W_QUERY, n, 1, n, unit, d, h_hat + row_t, DTYPE)
                q = QUERY(q, q_bias, SCALE)
                put(query_t + unit, q, there, MATH)
                if NORMALISES:
                    inverse = inverse_length(q, d, SMALLEST_SQUARE)
                    tl.store(query_scale + norms_t, inverse)
                    q = turned(q * v_vector * (inverse / SCALE), cosine, sine)
                q_column = q.reshape(P)
                if PACKED:
                    scores, chosen = select(
                        own_keys, own_list, ahead, remembered, q_column, v_column, place, K, d, TERMS, MATH
                    )  # fmt: skip
                else:
                    scores, chosen = select_exactly(
                        own_keys, own_list, remembered, q_column, v_column, place, K, d, TERMS, MATH, DTYPE
                    )  # fmt: skip
            if FORGET == "most_read":
                places = chosen
                if NUMBERS:
                    places = places_of(own_list, tl.minimum(used, most), discount, chosen, MATH)
                count_reads(own_reads, places, is_first, "plain")
            if (FORGET is not None) and (not NUMBERS):
                chosen = as_slots(own_list, used - remembered if FORGET == "recent" else 0, chosen, MATH)
            if NORMALISES:
                put(selected_scores + list_t + place, tl.where(chosen >= 0, scores, 0.0), is_first, MATH)
            shares, norm = WEIGH(scores, chosen >= 0)
            put(selected + list_t + place, chosen, is_first, MATH)
            put(weights + list_t + place, shares, is_first, MATH)
            if SAVES_NORM:
                put(norms + norms_t + 0 * place, norm + 0.0 * shares, is_first & (place == 0), MATH)
            rows = rows_of(chosen, first_slots, seen, k_att, batch, row)
            own_rows = ()
            own_shares = ()
            for g in tl.static_range(GROUPS):
                own_rows = own_rows + (eight_of(rows, g, KC),)
                own_shares = own_shares + (eight_of(shares, g, KC),)
            read = gather(store, own_rows, unit, n, "", MATH)
            sums = read[0] * own_shares[0]
            for g in tl.static_range(1, GROUPS):
                sums += read[g] * own_shares[g]
            s = tl.sum(sums, 2)
            put(summary + row_t + unit, s, here, MATH)
            if MAPPED:
                if RESIDENT:
                    both = product(wc, h_new, TYPE) + product(ws, s, TYPE)
                else:
                    tl.debug_barrier()
                    both = streamed(w_all + W_INCORPORATE, n, 1, 2 * n, unit, n, h_hat + row_t, DTYPE)
                    both += streamed(w_all + W_INCORPORATE + n, n, 1, 2 * n, unit, n, summary + row_t, DTYPE)
                both += c_bias
                if SAVES_MAP:
                    put(mapped + row_t + unit, both, here, MATH)
                h = INCORPORATE(h_new, s, both, MATH)
            else:
                h = INCORPORATE(h_new, s, h_new, MATH)
            h = tl.where(used > 0, h, h_new)
        put(store_t + batch * n + unit, h, here, MATH)
        if not RESIDENT:
            tl.debug_barrier()

        # Keep.
        if K > 0:
            if keeps(seen + t, k_att):
                number = (seen + t + 1) // k_att - 1
                slot = slots_at(seen + t, seen, first_slots, k_att)
                if NUMBERS:
                    if MARK is None:
                        key = inner(wm_vector, h)
                    else:
                        key = inner(wm_vector, MARK(h, SCORE_MATH))
                    key += tl.load(scorer_bias + number, mask=number < bias_size, other=0).to(DTYPE)
                    tl.store(keys + row * slots + slot, key)
                    if FORGET is None:
                        best, chosen = insert(best, chosen, key, slot, place, K)
                    else:
                        key = key.to(keys.dtype.element_ty).to(DTYPE)  # it is compared with those in memory
                else:
                    if RESIDENT:
                        new_key = product(wm, h, TYPE)
                    else:
                        new_key = streamed(w_all + W_MEMORY, n, 1, n, unit, d, store_t + batch * n, DTYPE)
                    if NORMALISES:
                        inverse = inverse_length(new_key, d, SMALLEST_SQUARE)
                        tl.store(key_scale + row * slots + slot, inverse)
                        new_key = turned(new_key * inverse, cosine, sine)
                    put(keys + (row * slots + slot) * d + unit, new_key, there, MATH)
                if FORGET is not None:
                    remembered = tl.minimum(slot, most)
                    lost = tl.where(slot < most, -1, slot - most)
                    if LISTED:
                        number = next_number(seen + t, k_att)
                        gone = forgotten(
                            own_reads, remembered, most, discount, number, thread, None, FORGET, "plain"
                        )  # fmt: skip
                        lost = lost_of(own_list, gone, remembered, most, slot)
                        renew(own_list, own_reads, gone, remembered, most, slot, thread, FORGET, "plain")
                    if NUMBERS:
                        if tl.max(((chosen == lost) & (chosen >= 0)).to(tl.int32)) > 0:
                            tl.debug_barrier()  # the list is whole
                            oldest = slot + 1 - most if FORGET == "recent" else 0
                            best, chosen = replaced(
                                best, chosen, lost, keys + row * slots, own_list, oldest, most - 1, thread, place, K
                            )  # fmt: skip
                        if lost != slot:
                            best, chosen = insert(best, chosen, key, slot, place, K)
            tl.debug_barrier()  # what was stored will be read by other threads

        gates_t = next_gates
        store_t += batch * n
        c_t += batch * n
        row_t += batch * n
        query_t += batch * d
        list_t += batch * K
        norms_t += batch
        x = next_x
        p = hidden_products(w, w_all, h, store_t, unit, n, GATES, RESIDENT, TYPE, DTYPE)

    if FORGET == "recent":
        used = slots_at(seen + length, seen, first_slots, k_att)
        remembered = tl.minimum(used, most)
        places = tl.minimum(slots, most)
        write_list(live + row * places, used - remembered, remembered, places, thread, "plain")
    if HAS_LENGTHS:  # past its end a row is all zeros
        zero = tl.zeros((NB, 16), DTYPE)
        for _ in range(length, steps):
            for gate in tl.static_range(GATES):
                tl.store(gates_t + gate * n + unit, zero, mask=here)
            tl.store(store_t + batch * n + unit, zero, mask=here)
            tl.store(h_hat + row_t + unit, zero, mask=here)
            if HAS_C:
                tl.store(c_t + batch * n + unit, zero, mask=here)
            if SPLITS:
                tl.store(hidden_new + row_t + unit, zero, mask=here)
            gates_t += batch * GATES * n
            store_t += batch * n
            c_t += batch * n
            row_t += batch * n
