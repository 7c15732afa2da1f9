# type: ignore
"""The backward loop over time for small hidden sizes: one program a row."""

import triton
import triton.language as tl

from sab.ops.triton.access import angles, get, put
from sab.ops.triton.functions import cuts, keeps, slots_at
from sab.ops.triton.small_forward import load_gates
from sab.ops.triton.small_parts import (
    gather,
    product,
    product_of_gates,
    resident,
    rows_of,
    streamed,
    turned,
)


@triton.jit
def sums_over_warps(parts):
    """The sums over the first dimension of a tuple of [P / 16, 8], as a tuple of [P / 16, 1, 8]."""
    NB: tl.constexpr = parts[0].shape[0]
    sums = ()
    for g in tl.static_range(len(parts)):
        sums = sums + (tl.broadcast_to(tl.sum(parts[g], 0)[None, None, :], (NB, 1, 8)),)
    return sums


@triton.jit
def selection(selected, at, count, eight, GROUPS: tl.constexpr, MATH: tl.constexpr):
    """The `count` slots that a step's list has from `at` on, as a tuple of [P / 16, 1, 8]; -1 past them."""
    chosen = ()
    for g in tl.static_range(GROUPS):
        place = g * 8 + eight
        chosen = chosen + (tl.where(place < count, get(selected + at + place, place < count, "", MATH), -1),)
    return chosen


@triton.jit(do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "k_trunc"])
def backward_kernel(
    w_held, w_all, w_memory, w_query, v, turn_rates, lengths,
    store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
    key_scale, query_scale, selected_scores,
    dstore, dc, dcells, dgates, dhidden, dquery, dkeys, dsummary, dweights, dincorporated, dv,
    steps, batch, first_slots, slots, seen, k_att, k_trunc,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
    NUMBERS: tl.constexpr, NORMALISES: tl.constexpr, SLOPE: tl.constexpr, QUERY: tl.constexpr, SCORE: tl.constexpr,
    WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr,
    INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr,
    READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr,
    P: tl.constexpr,
    RESIDENT: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_V: tl.constexpr,
    HAS_DCELLS: tl.constexpr, HAS_DSUMMARY: tl.constexpr, HAS_DWEIGHTS: tl.constexpr, HELD: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = P // 16
    SCORE_MATH: tl.constexpr = "accurate" if MATH == "approximate" else MATH
    DTYPE: tl.constexpr = store.dtype.element_ty
    W_MEMORY: tl.constexpr = GATES * n * n
    W_QUERY: tl.constexpr = W_MEMORY + d * n
    W_INCORPORATE: tl.constexpr = W_MEMORY if NUMBERS else W_MEMORY + 2 * d * n
    GROUPS: tl.constexpr = (K + 7) // 8  # of eight selected microstates

    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    here = unit < n
    there = unit < d
    eight = tl.arange(0, 8)[None, None, :] + tl.zeros((NB, 1, 8), tl.int32)
    is_first = (tl.arange(0, NB) == 0)[:, None, None]
    stride = batch.to(tl.int64) * n
    length = steps
    if HAS_LENGTHS:
        length = tl.load(lengths + row).to(tl.int32)

    zero = tl.zeros((NB, 16), DTYPE)
    w = ()
    if RESIDENT:
        for g in tl.static_range(GATES):
            if g < HELD:
                w = w + (resident(w_held + g * n * n, n, n, 1, unit, n, TYPE),)
            else:
                w = w + (resident(w_all + g * n * n, n, n, 1, unit, n, TYPE),)
        if (K > 0) and (not NUMBERS):
            wm = resident(w_all + W_MEMORY, d, n, 1, unit, n, TYPE)
            wq = resident(w_all + W_QUERY, d, n, 1, unit, n, TYPE)
        if MAPPED:
            wc = resident(w_all + W_INCORPORATE, n, 2 * n, 1, unit, n, TYPE)
            ws = resident(w_all + W_INCORPORATE + n, n, 2 * n, 1, unit, n, TYPE)
    v_vector = zero
    dv_sums = tl.zeros((NB, 16, 8), DTYPE)
    dv_total = zero
    if K > 0:
        if NUMBERS:
            wm_vector = tl.load(w_memory + unit, mask=here, other=0).to(DTYPE)
            wq_vector = tl.load(w_query + unit, mask=here, other=0).to(DTYPE)
        if HAS_V:
            v_vector = tl.load(v + unit, mask=there, other=0).to(DTYPE)
        if NORMALISES:
            rates = tl.load(turn_rates + unit, mask=there, other=0)

    if HAS_LENGTHS:  # past its end a row has no gradient
        for t in range(length, steps):
            for gate in tl.static_range(GATES):
                after = (t * batch.to(tl.int64) + row) * GATES * n + gate * n + unit
                tl.store(dgates + after, zero, mask=here)
                if SPLITS:
                    tl.store(dhidden + after, zero, mask=here)
            row_after = t * batch.to(tl.int64) + row
            if K > 0:
                tl.store(dquery + row_after * d + unit, zero, mask=there)
            if MAPPED:
                tl.store(dincorporated + row_after * n + unit, zero, mask=here)

    # Where step t's numbers lie; the step before has its own one stride earlier.
    last = (length - 1) * batch.to(tl.int64) + row
    gates_t = last * GATES * n
    row_t = last * n
    store_t = row_t + first_slots * stride  # the hidden state that entered step t
    query_t = last * d
    list_t = last * K
    norms_t = last
    chain = zero
    dc_now = zero
    arriving = tl.load(dstore + store_t + stride + unit, mask=here, other=0)
    c_after = zero
    if HAS_C:
        c_after = tl.load(c + row_t + stride + unit, mask=here, other=0)
    if RESIDENT:  # as in the forward: what is also made outside the loop stays in registers
        if GATES == 1:
            chain = product(w[0], chain, TYPE)
        else:
            chain = product_of_gates(w[:HELD], (chain, chain, chain, chain), chain, TYPE)
        chain = tl.where(here, chain * 0.0, 0.0)

    # Prefetch the next step's selected slots: later loads depend on them.
    chosen = ()
    if K > 0:
        chosen = selection(selected, list_t, tl.where(length > 0, K, 0), eight, GROUPS, MATH)

    for back in range(length):
        t = length - 1 - back
        # Loads that depend on nothing computed here.
        activated = load_gates(gates + gates_t, unit, here, n, GATES, DTYPE)
        c_before = zero
        if HAS_C:
            c_before = tl.load(c + row_t + unit, mask=here, other=0)
        h_before = zero
        last_gate = zero
        if SPLITS:
            h_before = tl.load(store + store_t + unit, mask=here, other=0)
            last_gate = tl.load(hidden_new + row_t + unit, mask=here, other=0).to(DTYPE)
        if K > 0:
            used = slots_at(seen + t, seen, first_slots, k_att)
            rows = ()
            key_rows = ()
            is_new = ()
            for g in tl.static_range(GROUPS):
                rows = rows + (rows_of(chosen[g], first_slots, seen, k_att, batch, row),)
                key_rows = key_rows + (tl.where(chosen[g] >= 0, chosen[g] + row.to(tl.int32) * slots, -1),)
                is_new = is_new + (chosen[g] >= first_slots,)
            read = gather(store, rows, unit, n, "", MATH)
            shares = ()
            for g in tl.static_range(GROUPS):
                place = g * 8 + eight
                shares = shares + (get(weights + list_t + place, place < K, "", MATH),)
            chosen = selection(selected, list_t - batch * K, tl.where(t > 0, K, 0), eight, GROUPS, MATH)
            q = zero
            if not NUMBERS:
                q = tl.load(query + query_t + unit, mask=there, other=0)

        if NORMALISES:
            cosine, sine = angles(seen + t, unit, rates, DTYPE)

        # Keep.
        dh = arriving + chain
        if K > 0:
            if keeps(seen + t, k_att):
                slot = used
                if NUMBERS:
                    dkey = tl.load(dkeys + row * slots + slot, cache_modifier=".cg")
                    if SLOPE is None:
                        dh += dkey * wm_vector
                    else:
                        kept = tl.load(store + store_t + stride + unit, mask=here, other=0)
                        dh += dkey * wm_vector * SLOPE(kept, SCORE_MATH)
                elif RESIDENT or NORMALISES:
                    dkey_at = dkeys + (row * slots + slot) * d + unit
                    dkey = tl.load(dkey_at, mask=there, other=0, cache_modifier=".cg")
                    if NORMALISES:  # it is read again after the loop
                        tl.debug_barrier()
                        dkey = turned(dkey, cosine, -sine)
                        put(dkey_at, dkey, there, MATH)
                        tl.debug_barrier()
                    if RESIDENT:
                        dh += product(wm, dkey, TYPE)
                    else:
                        dh += streamed(w_all + W_MEMORY, d, n, 1, unit, n, dkeys + (row * slots + slot) * d, DTYPE)
                else:
                    dh += streamed(w_all + W_MEMORY, d, n, 1, unit, n, dkeys + (row * slots + slot) * d, DTYPE)

        # Incorporate and read.
        dh_hat = dh
        if K > 0:
            if used > 0:
                provisional = zero
                s = zero
                linear = zero
                if READS_STATE:
                    provisional = tl.load(h_hat + row_t + unit, mask=here, other=0)
                if READS_SUMMARY:
                    s = tl.load(summary + row_t + unit, mask=here, other=0)
                if SAVES_MAP:
                    linear = tl.load(mapped + row_t + unit, mask=here, other=0).to(DTYPE)
                dh_hat, ds, dmapped = INCORPORATE(dh, provisional, s, linear, MATH)
                if MAPPED:
                    put(dincorporated + row_t + unit, dmapped, here, MATH)
                    if RESIDENT:
                        dh_hat += product(wc, dmapped, TYPE)
                        ds += product(ws, dmapped, TYPE)
                    else:
                        tl.debug_barrier()
                        into = dincorporated + row_t
                        dh_hat += streamed(w_all + W_INCORPORATE, n, 2 * n, 1, unit, n, into, DTYPE)
                        ds += streamed(w_all + W_INCORPORATE + n, n, 2 * n, 1, unit, n, into, DTYPE)
                if HAS_DSUMMARY:
                    ds += tl.load(dsummary + row_t + unit, mask=here, other=0)
                dmicrostates = gather(dstore, rows, unit, n, ".cg", MATH)
                if not NUMBERS:
                    own_keys = gather(keys, key_rows, unit, d, "", MATH)
                    dkeys_before = gather(dkeys, key_rows, unit, d, ".cg", MATH)
                else:
                    dkeys_before = ()
                    for g in tl.static_range(GROUPS):
                        taken = is_first & (rows[g] >= 0)
                        dkeys_before = dkeys_before + (get(dkeys + key_rows[g], taken, ".cg", MATH),)
                if not RESIDENT:
                    tl.debug_barrier()  # threads that hold the same number have all read it before one changes it
                norm = 1.0
                if SAVES_NORM:
                    norm = tl.load(norms + norms_t)
                dshares = ()
                is_last = ()
                for g in tl.static_range(GROUPS):
                    dshares = dshares + (tl.sum(read[g] * ds[:, :, None], 1),)
                    is_last = is_last + (g * 8 + eight == tl.minimum(LONGEST, used) - 1,)
                dshares = sums_over_warps(dshares)
                if HAS_DWEIGHTS:
                    inside = dshares
                    dshares = ()
                    for g in tl.static_range(GROUPS):
                        place = g * 8 + eight
                        dshares = dshares + (inside[g] + get(dweights + list_t + place, place < K, "", MATH),)
                dscores = WEIGH(dshares, shares, norm, is_last)
                dq_sums = tl.zeros((NB, 16, 8), DTYPE)
                dq_number = tl.zeros((NB, 1, 8), DTYPE)
                factor = q
                inverse = 1.0
                if NORMALISES:
                    inverse = tl.load(query_scale + norms_t)
                    factor = turned(q * v_vector * (inverse / SCALE), cosine, sine)
                for g in tl.static_range(GROUPS):
                    is_there = rows[g] >= 0
                    dscore = tl.where(is_there, dscores[g], 0.0)
                    pointer = dstore + rows[g].to(tl.int64) * n + unit[:, :, None]
                    dmicrostate = dmicrostates[g] + shares[g] * ds[:, :, None]
                    put(pointer, dmicrostate, here[:, :, None] & is_there, MATH)
                    if NUMBERS:
                        put(dkeys + key_rows[g], dkeys_before[g] + dscore, is_first & is_there, MATH)
                        dq_number += dscore
                    else:
                        key = own_keys[g].to(DTYPE)
                        if NORMALISES:  # of the products that keys and query were made from, unless a key came as it is
                            place = g * 8 + eight
                            along = dscore * get(selected_scores + list_t + place, place < K, "", MATH)
                            key_inverse = get(key_scale + key_rows[g], is_new[g], "", MATH)
                            dq_number += along
                        dkey, dq_term, dv_term = SCORE(dscore, key, factor[:, :, None], v_vector[:, :, None], MATH)
                        if NORMALISES:
                            dkey = tl.where(is_new[g], (dkey - along * key) * key_inverse, dkey)
                        dq_sums += dq_term
                        if HAS_V and not NORMALISES:
                            dv_sums += dv_term
                        pointer = dkeys + key_rows[g].to(tl.int64) * d + unit[:, :, None]
                        put(pointer, dkeys_before[g] + dkey, there[:, :, None] & is_there, MATH)
                if NUMBERS:
                    total = tl.sum(dq_number, 2)
                    put(
                        dquery + norms_t + 0 * eight, dq_number * 0.0 + total[:, :, None], is_first & (eight == 0), MATH
                    )
                    if SLOPE is None:
                        dh_hat += total * wq_vector
                    else:
                        provisional = tl.load(h_hat + row_t + unit, mask=here, other=0)
                        dh_hat += total * wq_vector * SLOPE(provisional, SCORE_MATH)
                else:
                    dq = QUERY(tl.sum(dq_sums, 2), SCALE)
                    if NORMALISES:
                        dfactor = turned(dq * (inverse / SCALE), cosine, -sine)
                        dv_total += q * dfactor
                        dq = v_vector * dfactor - inverse * inverse * tl.sum(dq_number, 2) * q
                    put(dquery + query_t + unit, dq, there, MATH)
                    if RESIDENT:
                        dh_hat += product(wq, dq, TYPE)
                    else:
                        tl.debug_barrier()
                        dh_hat += streamed(w_all + W_QUERY, d, n, 1, unit, n, dquery + query_t, DTYPE)
            tl.debug_barrier()  # gradients were added to rows that other threads read
        arriving = tl.load(dstore + store_t + unit, mask=unit < tl.where(t > 0, n, 0), other=0, cache_modifier=".cg")

        # Cell.
        if HAS_C:
            if HAS_DCELLS:
                dc_now += tl.load(dcells + row_t + unit, mask=here, other=0)
        of_x, of_h, of_state, dc_now = CELL(dh_hat, dc_now, activated, h_before, c_before, c_after, last_gate, MATH)
        c_after = c_before
        for g in tl.static_range(GATES):
            put(dgates + gates_t + g * n + unit, of_x[g], here, MATH)
            if SPLITS:
                put(dhidden + gates_t + g * n + unit, of_h[g], here, MATH)

        # The chain.
        chain = zero
        if (k_trunc > 0) & cuts(seen + t, tl.maximum(k_trunc, 1)):
            dc_now = zero
        else:
            if SPLITS:
                chain = of_state
            if RESIDENT:
                if GATES == 1:
                    chain += product(w[0], of_h[0], TYPE)
                else:
                    chain += product_of_gates(w, of_h, zero, TYPE)
            else:
                tl.debug_barrier()
                for gate in tl.static_range(GATES):
                    into = dhidden + gates_t + gate * n
                    chain += streamed(w_all + gate * n * n, n, n, 1, unit, n, into, DTYPE)

        gates_t -= batch * GATES * n
        row_t -= stride
        store_t -= stride
        query_t -= batch * d
        list_t -= batch * K
        norms_t -= batch

    into = dstore + first_slots * stride + row * n + unit
    tl.store(into, tl.load(into, mask=here, other=0) + chain, mask=here)
    if HAS_C:
        tl.store(dc + row * n + unit, dc_now, mask=here)
    if (K > 0) and HAS_V:
        tl.store(dv + row * d + unit, dv_total if NORMALISES else tl.sum(dv_sums, 2), mask=there)
