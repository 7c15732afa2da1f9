# type: ignore

"""The forward loop over time for small hidden sizes: one program a row."""

import triton
import triton.language as tl

from sab.ops.triton.parts import put, sigmoid, tanh, weigh
from sab.ops.triton.small_parts import eight_of, gather, inner, product, resident, rows_of, streamed
from sab.ops.triton.small_select import (
    fragments,
    insert,
    load_fragments,
    load_keys,
    select,
    select_by_products,
    select_exactly,
)


@triton.jit(do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "bias_size"])
def forward_kernel(
    w_held, w_all, b_hh, w_memory, w_query, scorer_bias, v, b_incorporate, lengths,
    store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary,
    steps, batch, first_slots, slots, seen, k_att, bias_size,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr,
    CELL: tl.constexpr, SCORER: tl.constexpr, WEIGHTING: tl.constexpr, INCORPORATE: tl.constexpr,
    P: tl.constexpr, KC: tl.constexpr, PACKED: tl.constexpr,
    RESIDENT: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = P // 16
    GATES: tl.constexpr = 4 if CELL == "lstm" else (3 if CELL == "gru" else 1)
    AFFINE: tl.constexpr = (SCORER == "affine") or (SCORER == "affine_tanh")
    SCORE_MATH: tl.constexpr = "accurate" if MATH == "approximate" else MATH
    DTYPE: tl.constexpr = store.dtype.element_ty
    W_MEMORY: tl.constexpr = GATES * n * n
    W_QUERY: tl.constexpr = W_MEMORY + d * n
    W_INCORPORATE: tl.constexpr = W_MEMORY if AFFINE else W_MEMORY + 2 * d * n
    GROUPS: tl.constexpr = (K + 7) // 8  # of eight selected microstates
    BFLOAT: tl.constexpr = keys.dtype.element_ty == tl.bfloat16
    BY_PRODUCTS: tl.constexpr = (SCORER == "dot") and PACKED and BFLOAT and (d == 128) and (KC == 32)

    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    here = unit < n
    there = unit < d
    column = tl.arange(0, P)
    place = tl.arange(0, KC)[None, :] + tl.zeros((NB, 1), tl.int32)
    is_first = (place < K) & (tl.arange(0, NB) == 0)[:, None]
    first_kept = k_att - 1 - seen % k_att
    length = steps
    if HAS_LENGTHS:
        length = tl.load(lengths + row).to(tl.int32)

    if RESIDENT:
        w0 = resident(w_held, n, 1, n, unit, n, TYPE)
        w1 = w0
        w2 = w0
        w3 = w0
        if GATES >= 3:
            w1 = resident(w_held + n * n, n, 1, n, unit, n, TYPE)
            w2 = resident(w_held + 2 * n * n, n, 1, n, unit, n, TYPE)
        if GATES == 4:
            w3 = resident(w_held + 3 * n * n, n, 1, n, unit, n, TYPE)
        if (K > 0) and (not AFFINE):
            wm = resident(w_all + W_MEMORY, n, 1, n, unit, d, TYPE)
            wq = resident(w_all + W_QUERY, n, 1, n, unit, d, TYPE)
        if (K > 0) and (INCORPORATE == "concat"):
            wc = resident(w_all + W_INCORPORATE, n, 1, 2 * n, unit, n, TYPE)
            ws = resident(w_all + W_INCORPORATE + n, n, 1, 2 * n, unit, n, TYPE)
    if (CELL == "gru") and HAS_BIAS:
        b0 = tl.load(b_hh + unit, mask=here, other=0).to(DTYPE)
        b1 = tl.load(b_hh + n + unit, mask=here, other=0).to(DTYPE)
        b2 = tl.load(b_hh + 2 * n + unit, mask=here, other=0).to(DTYPE)
    best = tl.full((NB, KC), float("-inf"), DTYPE)
    chosen = tl.full((NB, KC), -1, tl.int32)
    if K > 0:
        if AFFINE:
            wm_vector = tl.load(w_memory + unit, mask=here, other=0).to(DTYPE)
            wq_vector = tl.load(w_query + unit, mask=here, other=0).to(DTYPE)
            for slot in range(first_slots):
                key = tl.load(keys + row * slots + slot).to(DTYPE)
                best, chosen = insert(best, chosen, key, slot, place, K)
        v_column = tl.zeros((P,), DTYPE)
        if SCORER == "mlp":
            q_bias = tl.load(scorer_bias + unit, mask=there, other=0).to(DTYPE)
            v_column = tl.load(v + column, mask=column < d, other=0).to(DTYPE)
        if INCORPORATE == "concat":
            c_bias = tl.load(b_incorporate + unit, mask=here, other=0).to(DTYPE)

    # Where step t's numbers lie.
    gates_t = gates + row * GATES * n
    store_t = store + (first_slots * batch + row) * n  # the hidden state that enters step t
    c_t = c + row * n
    row_t = row * n  # in h_hat, summary, hidden_new
    query_t = query + row * d
    list_t = row * K
    norms_t = norms + row
    h = tl.load(store_t + unit, mask=here, other=0)
    c_now = h
    if CELL == "lstm":
        c_now = tl.load(c_t + unit, mask=here, other=0)
    x0 = tl.load(gates_t + unit, mask=here, other=0).to(DTYPE)
    x1 = x0
    x2 = x0
    x3 = x0
    if GATES >= 3:
        x1 = tl.load(gates_t + n + unit, mask=here, other=0).to(DTYPE)
        x2 = tl.load(gates_t + 2 * n + unit, mask=here, other=0).to(DTYPE)
    if GATES == 4:
        x3 = tl.load(gates_t + 3 * n + unit, mask=here, other=0).to(DTYPE)

    # The products with the hidden state are made at the end of the step before. That the first ones are made here,
    # outside the loop, is what makes the compiler keep resident weights in registers.
    if RESIDENT:
        p0 = product(w0, h, TYPE)
        p1 = p0
        p2 = p0
        p3 = p0
        if GATES >= 3:
            p1 = product(w1, h, TYPE)
            p2 = product(w2, h, TYPE)
        if GATES == 4:
            p3 = product(w3, h, TYPE)
    else:
        p0 = streamed(w_all, n, 1, n, unit, n, store_t, DTYPE)
        p1 = p0
        p2 = p0
        p3 = p0
        if GATES >= 3:
            p1 = streamed(w_all + n * n, n, 1, n, unit, n, store_t, DTYPE)
            p2 = streamed(w_all + 2 * n * n, n, 1, n, unit, n, store_t, DTYPE)
        if GATES == 4:
            p3 = streamed(w_all + 3 * n * n, n, 1, n, unit, n, store_t, DTYPE)

    for t in range(length):
        # The input's part of the next step comes while this one is computed.
        more = unit < tl.where(t + 1 < length, n, 0)
        next_gates = gates_t + batch.to(tl.int64) * GATES * n
        next0 = tl.load(next_gates + unit, mask=more, other=0).to(DTYPE)
        next1 = next0
        next2 = next0
        next3 = next0
        if GATES >= 3:
            next1 = tl.load(next_gates + n + unit, mask=more, other=0).to(DTYPE)
            next2 = tl.load(next_gates + 2 * n + unit, mask=more, other=0).to(DTYPE)
        if GATES == 4:
            next3 = tl.load(next_gates + 3 * n + unit, mask=more, other=0).to(DTYPE)

        if (K > 0) and (not AFFINE):
            used = first_slots + (seen + t) // k_att - seen // k_att
            own_keys = keys + row * slots * d
            if BY_PRODUCTS:
                ahead = load_fragments(own_keys, 0, used, NB, MATH)
            elif PACKED:
                ahead = load_keys(own_keys, 0, used, d, P)

        # Cell.
        if CELL == "lstm":
            i = sigmoid(x0 + p0, MATH)
            f = sigmoid(x1 + p1, MATH)
            g = tanh(x2 + p2, MATH)
            o = sigmoid(x3 + p3, MATH)
            c_now = f * c_now + i * g
            h_new = o * tanh(c_now, MATH)
            put(gates_t + unit, i, here, MATH)
            put(gates_t + n + unit, f, here, MATH)
            put(gates_t + 2 * n + unit, g, here, MATH)
            put(gates_t + 3 * n + unit, o, here, MATH)
            put(c_t + batch * n + unit, c_now, here, MATH)
        elif CELL == "gru":
            if HAS_BIAS:
                p0 += b0
                p1 += b1
                p2 += b2
            reset = sigmoid(x0 + p0, MATH)
            z = sigmoid(x1 + p1, MATH)
            fresh = tanh(x2 + reset * p2, MATH)
            h_new = fresh + z * (h - fresh)
            put(gates_t + unit, reset, here, MATH)
            put(gates_t + n + unit, z, here, MATH)
            put(gates_t + 2 * n + unit, fresh, here, MATH)
            put(hidden_new + row_t + unit, p2, here, MATH)
        else:
            if CELL == "rnn_tanh":
                h_new = tanh(x0 + p0, MATH)
            else:
                h_new = tl.maximum(x0 + p0, 0.0)
            put(gates_t + unit, h_new, here, MATH)
        put(h_hat + row_t + unit, h_new, here, MATH)

        # Read.
        h = h_new
        if K > 0:
            used = first_slots + (seen + t) // k_att - seen // k_att
            if AFFINE:
                scores = best
                if WEIGHTING == "softmax_sink":  # else the query's part, the same for all, makes no difference
                    if SCORER == "affine":
                        scores = best + inner(wq_vector, h_new)
                    else:
                        scores = best + inner(wq_vector, tanh(h_new, SCORE_MATH))
            else:
                if RESIDENT:
                    q = product(wq, h_new, TYPE)
                else:
                    tl.debug_barrier()
                    q = streamed(w_all + W_QUERY, n, 1, n, unit, d, h_hat + row_t, DTYPE)
                if SCORER == "mlp":
                    q += q_bias
                else:
                    q *= d**-0.5
                put(query_t + unit, q, there, MATH)
                q_column = q.reshape(P)
                if BY_PRODUCTS:
                    factor = fragments(q_column, NB, MATH)
                    scores, chosen = select_by_products(own_keys, ahead, used, factor, place, K, MATH)
                elif PACKED:
                    scores, chosen = select(own_keys, ahead, used, q_column, v_column, place, K, d, SCORER, MATH)
                else:
                    scores, chosen = select_exactly(
                        own_keys, used, q_column, v_column, place, K, d, SCORER, MATH, DTYPE
                    )
            shares, norm = weigh(scores, chosen >= 0, WEIGHTING)
            put(selected + list_t + place, chosen, is_first, MATH)
            put(weights + list_t + place, shares, is_first, MATH)
            if WEIGHTING == "relu_norm":
                put(norms_t + 0 * place, norm[:, None] + 0.0 * shares, is_first & (place == 0), MATH)
            rows = rows_of(chosen, first_slots, first_kept, k_att, batch, row)
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
            if INCORPORATE == "add":
                h = h_new + s
            elif INCORPORATE == "add_bounded":
                h = h_new + tanh(s, MATH)
            else:
                if RESIDENT:
                    both = product(wc, h_new, TYPE) + product(ws, s, TYPE)
                else:
                    tl.debug_barrier()
                    both = streamed(w_all + W_INCORPORATE, n, 1, 2 * n, unit, n, h_hat + row_t, DTYPE)
                    both += streamed(w_all + W_INCORPORATE + n, n, 1, 2 * n, unit, n, summary + row_t, DTYPE)
                h = tl.where(used > 0, both + c_bias, h_new)
        put(store_t + batch * n + unit, h, here, MATH)
        if not RESIDENT:
            tl.debug_barrier()

        # Keep.
        if K > 0:
            if (seen + t + 1) % k_att == 0:
                number = (seen + t + 1) // k_att - 1
                slot = first_slots + number - seen // k_att
                if AFFINE:
                    if SCORER == "affine":
                        key = inner(wm_vector, h)
                    else:
                        key = inner(wm_vector, tanh(h, SCORE_MATH))
                    key += tl.load(scorer_bias + number, mask=number < bias_size, other=0).to(DTYPE)
                    tl.store(keys + row * slots + slot, key)
                    best, chosen = insert(best, chosen, key, slot, place, K)
                else:
                    if RESIDENT:
                        new_key = product(wm, h, TYPE)
                    else:
                        new_key = streamed(w_all + W_MEMORY, n, 1, n, unit, d, store_t + batch * n, DTYPE)
                    put(keys + (row * slots + slot) * d + unit, new_key, there, MATH)
            tl.debug_barrier()  # what was stored will be read by other threads

        gates_t = next_gates
        store_t += batch * n
        c_t += batch * n
        row_t += batch * n
        query_t += batch * d
        list_t += batch * K
        norms_t += batch
        x0 = next0
        x1 = next1
        x2 = next2
        x3 = next3
        if RESIDENT:
            p0 = product(w0, h, TYPE)
            if GATES >= 3:
                p1 = product(w1, h, TYPE)
                p2 = product(w2, h, TYPE)
            if GATES == 4:
                p3 = product(w3, h, TYPE)
        else:
            p0 = streamed(w_all, n, 1, n, unit, n, store_t, DTYPE)
            if GATES >= 3:
                p1 = streamed(w_all + n * n, n, 1, n, unit, n, store_t, DTYPE)
                p2 = streamed(w_all + 2 * n * n, n, 1, n, unit, n, store_t, DTYPE)
            if GATES == 4:
                p3 = streamed(w_all + 3 * n * n, n, 1, n, unit, n, store_t, DTYPE)

    if HAS_LENGTHS:  # past its end a row is all zeros
        zero = tl.zeros((NB, 16), DTYPE)
        for _ in range(length, steps):
            for gate in tl.static_range(GATES):
                tl.store(gates_t + gate * n + unit, zero, mask=here)
            tl.store(store_t + batch * n + unit, zero, mask=here)
            tl.store(h_hat + row_t + unit, zero, mask=here)
            if CELL == "lstm":
                tl.store(c_t + batch * n + unit, zero, mask=here)
            if CELL == "gru":
                tl.store(hidden_new + row_t + unit, zero, mask=here)
            gates_t += batch * GATES * n
            store_t += batch * n
            c_t += batch * n
            row_t += batch * n
