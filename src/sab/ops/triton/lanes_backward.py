# type: ignore
"""The backward loop over time for small hidden sizes and rounded factors: one program a row, a number a thread."""

import triton
import triton.language as tl

from sab.ops.triton.access import get, put
from sab.ops.triton.functions import kept_row, slots_at
from sab.ops.triton.lanes import (
    BOX,
    angles_of,
    as_fours,
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
    put_four,
    recall,
    shuffled,
    summed,
    summed_unit_of,
    swapped,
    total_of_lanes,
    totals_of_items,
    turned,
    warps_of,
)
from sab.ops.triton.lanes_forward import converted, get_gates
from sab.ops.triton.small_parts import rows_of


@triton.jit
def asked_for(buffer, at, mask, IS_THERE: tl.constexpr, zero, MATH: tl.constexpr):
    """What a buffer has, 0 where there is none."""
    if IS_THERE:
        return get(buffer + at, mask, "", MATH)
    else:
        return zero


@triton.jit
def asked_for_a_step(
    buffers, at, unit, lane, has_step, zero,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
    READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr, SAVES_MAP: tl.constexpr, NORMALISES: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """What a step reads besides what it selected, if there is such a step; its selected slots last."""
    gates, c, store, hidden_new, h_hat, summary, mapped, query, query_scale, weights, selected_scores, selected = (
        buffers
    )
    gates_t, row_t, store_t, query_t, norms_t, list_t = at
    there = tl.where(has_step, 1, 0)
    here = unit < there * n
    in_list = lane < there * K
    row_t += unit
    list_t += lane
    return (
        get_gates(gates + gates_t, unit, here, n, GATES, MATH),
        asked_for(c, row_t, here, HAS_C, zero, MATH),
        asked_for(store, store_t + unit, here, SPLITS, zero, MATH),
        asked_for(hidden_new, row_t, here, SPLITS, zero, MATH),
        asked_for(h_hat, row_t, here, READS_STATE, zero, MATH),
        asked_for(summary, row_t, here, READS_SUMMARY, zero, MATH),
        asked_for(mapped, row_t, here, SAVES_MAP, zero, MATH),
        asked_for(query, query_t + unit, unit < there * d, True, zero, MATH),
        asked_for(query_scale, norms_t + 0 * lane, lane < there * 32, NORMALISES, zero, MATH),
        asked_for(weights, list_t, in_list, True, zero, MATH),
        asked_for(selected_scores, list_t, in_list, NORMALISES, zero, MATH),
        tl.where(in_list, get(selected + list_t, in_list, "", MATH), -1),
    )


@triton.jit(do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "k_trunc"])
def lanes_backward_kernel(
    w, threads, v, turn_rates, lengths,
    store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, mapped,
    key_scale, query_scale, selected_scores,
    dstore, dc, dcells, dgates, dhidden, dquery, dkeys, dsummary, dweights, dincorporated, dv, doutput,
    steps, batch, first_slots, slots, seen, k_att, k_trunc,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    CELL: tl.constexpr, GATES: tl.constexpr, HAS_C: tl.constexpr, SPLITS: tl.constexpr,
    NORMALISES: tl.constexpr, QUERY: tl.constexpr, SCORE: tl.constexpr,
    WEIGH: tl.constexpr, SAVES_NORM: tl.constexpr,
    INCORPORATE: tl.constexpr, MAPPED: tl.constexpr, SAVES_MAP: tl.constexpr,
    READS_STATE: tl.constexpr, READS_SUMMARY: tl.constexpr,
    P: tl.constexpr, HELD: tl.constexpr, SHELVED: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_V: tl.constexpr,
    HAS_DOUTPUT: tl.constexpr, HAS_DCELLS: tl.constexpr, HAS_DSUMMARY: tl.constexpr, HAS_DWEIGHTS: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = P // 16
    DTYPE: tl.constexpr = store.dtype.element_ty
    GROUPS: tl.constexpr = (K + 7) // 8  # of eight selected microstates
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
    stride = batch.to(tl.int64) * n
    length = steps
    if HAS_LENGTHS:
        length = tl.load(lengths + row).to(tl.int32)

    zero = tl.zeros((NB, 32), DTYPE)
    if HAS_DOUTPUT:  # gradients of what is read, and of the initial state, begin at 0
        for slot in range(slots):
            kept = tl.where(slot < first_slots, slot, kept_row(slot, seen, first_slots, k_att))
            put(dstore + kept * stride + row * n + unit, zero, here, MATH)
            put(dkeys + (row * slots + slot) * d + unit, zero, there, MATH)
        put(dstore + first_slots * stride + row * n + unit, zero, here, MATH)
        tl.debug_barrier()
    w += (GATES + 2 + 2 * MAPPED) * P * P  # the transposed matrices
    held = load_held(w, HELD, P, MATH)
    shelf = lane
    if SHELVED > 0:
        shelf = fill_shelf(w, HELD, SHELVED, P)
    v_vector = zero
    if HAS_V:
        v_vector = get(v + unit, there, "", MATH).to(DTYPE)
    v_four = (zero, zero, zero, zero)
    if HAS_V and not NORMALISES:
        v_four = as_fours(v_vector, MATH)
    dv_four = (zero, zero, zero, zero)
    dv_total = zero
    if NORMALISES:
        rates = get(turn_rates + unit, there, "", MATH)

    if HAS_LENGTHS:  # past its end a row has no gradient
        for t in range(length, steps):
            for gate in tl.static_range(GATES):
                after = (t * batch.to(tl.int64) + row) * GATES * n + gate * n + unit
                put(dgates + after, zero, here, MATH)
                if SPLITS:
                    put(dhidden + after, zero, here, MATH)
            row_after = t * batch.to(tl.int64) + row
            put(dquery + row_after * d + unit, zero, there, MATH)
            if MAPPED:
                put(dincorporated + row_after * n + unit, zero, here, MATH)

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
    from_output = zero
    arriving = zero
    if HAS_DOUTPUT:  # nobody reads the last state
        from_output = get(doutput + row_t + unit, unit < tl.where(length > 0, n, 0), "", MATH)
    else:
        arriving = get(dstore + store_t + stride + unit, here, "", MATH)
    c_after = zero
    if HAS_C:
        c_after = get(c + row_t + stride + unit, here, "", MATH)
    # What a step reads is asked for one step earlier: other loads wait for the selected slots, and the rest takes long.
    buffers = (
        gates, c, store, hidden_new, h_hat, summary, mapped, query, query_scale, weights, selected_scores, selected,
    )  # fmt: skip
    step = asked_for_a_step(
        buffers, (gates_t, row_t, store_t, query_t, norms_t, list_t), unit, lane, length > 0, zero,
        n, d, K, GATES, HAS_C, SPLITS, READS_STATE, READS_SUMMARY, SAVES_MAP, NORMALISES, MATH,
    )  # fmt: skip
    used = slots_at(seen + length - 1, seen, first_slots, k_att)
    since_kept = (seen + length) % k_att  # steps from the last kept one to this one
    since_cut = (seen + length - 1) % tl.maximum(k_trunc, 1)
    is_kept = (length > 0) & (since_kept == 0)
    of_key = get(dkeys + (row * slots + used) * d + unit, unit < tl.where(is_kept, d, 0), "", MATH)

    for back in range(length):
        t = length - 1 - back
        activated, c_before, h_before, last_gate, provisional, s, linear, q, inverse, shares, scores, chosen = step
        gates_before = gates_t - batch.to(tl.int64) * GATES * n
        query_before = query_t - batch * d
        list_before = list_t - batch * K
        at_before = (gates_before, row_t - stride, store_t - stride, query_before, norms_t - batch, list_before)
        if NORMALISES:
            cosine, sine = angles_of(seen + t, unit, rates, DTYPE, MATH)
        rows = rows_of(chosen, first_slots, seen, k_att, batch, row)
        is_read = chosen >= 0
        slot_rows = tl.where(is_read, chosen + row.to(tl.int32) * slots, -1)
        is_new = chosen >= first_slots

        # Keep.
        dh = arriving + chain
        if HAS_DOUTPUT:
            dh += from_output.to(DTYPE)
        if since_kept == 0:
            if NORMALISES:  # it is read again after the loop
                of_key = turned(of_key, cosine, -sine, MATH)
                put(dkeys + (row * slots + used) * d + unit, of_key, there, MATH)
            kept = exchanged(box + 7 * BOX, of_key, unit, P, TYPE, MATH)
            dh += product(matrix(held, shelf, W_MEMORY, P), kept, TYPE, P, MATH)

        # Incorporate and read.
        dh_hat = dh
        if used > 0:
            dh_hat, ds, dmapped = INCORPORATE(dh, provisional, s, linear.to(DTYPE), MATH)
            if MAPPED:
                dmapped = tl.where(here, dmapped, 0.0)
                noted = note(box + 4 * BOX, dmapped, unit, P, TYPE, MATH)
                put(dincorporated + row_t + unit, dmapped, here, MATH)
            factor = q
            if NORMALISES:
                factor = turned(q * v_vector * (inverse / SCALE), cosine, sine, MATH)
            factor_four = as_fours(factor, MATH)

            # What the selected have: microstates, keys, and the gradients that others have added to.
            key_inverse = asked_for(key_scale, slot_rows, is_new, NORMALISES, zero, MATH)
            item_rows = ()
            item_slots = ()
            item_shares = ()
            microstates = ()
            dmicrostates = ()
            own_keys = ()
            dkeys_before = ()
            for g in tl.static_range(GROUPS):
                item = lane // 4 + 8 * g
                item_rows = item_rows + (shuffled(rows, item, MATH),)
                item_slots = item_slots + (shuffled(slot_rows, item, MATH),)
                item_shares = item_shares + (shuffled(shares, item, MATH),)
                at = store + item_rows[g].to(tl.int64) * n
                microstates = microstates + (get_four(at, four, item_rows[g] >= 0, n, DTYPE, MATH),)
            if MAPPED:
                w_summary = matrix(held, shelf, W_SUMMARY, P)
                tl.debug_barrier()
                into = recall(box + 4 * BOX, noted, P, TYPE, MATH)
                ds += product(w_summary, into, TYPE, P, MATH)
                dh_hat += product(matrix(held, shelf, W_STATE, P), into, TYPE, P, MATH)
            step = asked_for_a_step(
                buffers, at_before, unit, lane, t > 0, zero,
                n, d, K, GATES, HAS_C, SPLITS, READS_STATE, READS_SUMMARY, SAVES_MAP, NORMALISES, MATH,
            )  # fmt: skip
            if HAS_DSUMMARY:
                ds += get(dsummary + row_t + unit, here, "", MATH)
            ds_four = as_fours(ds, MATH)

            for g in tl.static_range(GROUPS):
                is_there = item_rows[g] >= 0
                at = dstore + item_rows[g].to(tl.int64) * n
                dmicrostates = dmicrostates + (get_four(at, four, is_there, n, DTYPE, MATH),)
                key_at = item_slots[g].to(tl.int64) * d
                own_keys = own_keys + (get_four(keys + key_at, four, is_there, d, DTYPE, MATH),)
                dkeys_before = dkeys_before + (get_four(dkeys + key_at, four, is_there, d, DTYPE, MATH),)
            dshare_parts = ()
            for g in tl.static_range(GROUPS):
                dshare = zero
                for i in tl.static_range(4):
                    dshare += microstates[g][i] * ds_four[i]
                dshare += swapped(dshare, 1, MATH)
                dshare_parts = dshare_parts + (dshare + swapped(dshare, 2, MATH),)
            dshares = totals_of_items(box + 5 * BOX, dshare_parts, MATH)
            if HAS_DWEIGHTS:
                dshares += get(dweights + list_t + lane, lane < K, "", MATH)
            norm = 1.0
            if SAVES_NORM:
                norm = get(norms + norms_t + 0 * lane, lane >= 0, "", MATH)
            is_last = lane == tl.minimum(LONGEST, used) - 1
            (dscores,) = WEIGH((dshares,), (shares,), norm, (is_last,))
            dscores = tl.where(is_read, dscores, 0.0)
            along = dscores
            if NORMALISES:
                along = dscores * scores
            dq_four = (zero, zero, zero, zero)
            for g in tl.static_range(GROUPS):
                item = lane // 4 + 8 * g
                is_there = item_rows[g] >= 0
                dscore = shuffled(dscores, item, MATH)
                item_along = zero
                item_inverse = zero
                if NORMALISES:
                    item_along = shuffled(along, item, MATH)
                    item_inverse = shuffled(key_inverse, item, MATH)
                microstate_after = ()
                key_after = ()
                dq_after = ()
                dv_after = ()
                for i in tl.static_range(4):
                    microstate_after = microstate_after + (dmicrostates[g][i] + item_shares[g] * ds_four[i],)
                    key = own_keys[g][i]
                    dkey, dq_term, dv_term = SCORE(dscore, key, factor_four[i], v_four[i], MATH)
                    if (
                        NORMALISES
                    ):  # of the product that a key was made from, unless it came as it is, without an inverse
                        dkey = tl.where(item_inverse > 0, (dkey - item_along * key) * item_inverse, dkey)
                    key_after = key_after + (dkeys_before[g][i] + dkey,)
                    dq_after = dq_after + (dq_four[i] + dq_term,)
                    dv_after = dv_after + (dv_four[i] + dv_term,)
                put_four(dstore + item_rows[g].to(tl.int64) * n, four, microstate_after, is_there, n, MATH)
                put_four(dkeys + item_slots[g].to(tl.int64) * d, four, key_after, is_there, d, MATH)
                dq_four = dq_after
                if HAS_V and not NORMALISES:
                    dv_four = dv_after
            dq = QUERY(as_units(summed(dq_four, MATH), MATH), SCALE)
            if NORMALISES:
                dfactor = turned(dq * (inverse / SCALE), cosine, -sine, MATH)
                dv_total += q * dfactor
                dq = v_vector * dfactor - inverse * inverse * total_of_lanes(along, MATH) * q
            dq = tl.where(there, dq, 0.0)
            asked = note(box + 6 * BOX, dq, unit, P, TYPE, MATH)
            put(dquery + query_t + unit, dq, there, MATH)
            w_query = matrix(held, shelf, W_QUERY, P)
            tl.debug_barrier()  # gradients were added to rows that other threads read
            into = recall(box + 6 * BOX, asked, P, TYPE, MATH)
            dh_hat += product(w_query, into, TYPE, P, MATH)
        else:
            step = asked_for_a_step(
                buffers, at_before, unit, lane, t > 0, zero,
                n, d, K, GATES, HAS_C, SPLITS, READS_STATE, READS_SUMMARY, SAVES_MAP, NORMALISES, MATH,
            )  # fmt: skip
        since_kept = tl.where(since_kept == 0, k_att, since_kept) - 1
        used -= tl.where(since_kept == 0, 1, 0)
        is_kept = (t > 0) & (since_kept == 0)
        if HAS_DOUTPUT:  # only what is kept can have been read
            arriving = get(dstore + store_t + unit, unit < tl.where(is_kept, n, 0), "", MATH)
            from_output = get(doutput + row_t - stride + unit, unit < tl.where(t > 0, n, 0), "", MATH)
        else:
            arriving = get(dstore + store_t + unit, unit < tl.where(t > 0, n, 0), "", MATH)
        of_key = get(dkeys + (row * slots + used) * d + unit, unit < tl.where(is_kept, d, 0), "", MATH)

        # Cell.
        if HAS_C:
            if HAS_DCELLS:
                dc_now += get(dcells + row_t + unit, here, "", MATH)
        of_x, of_h, of_state, dc_now = CELL(
            dh_hat, dc_now, converted(activated, DTYPE), h_before, c_before, c_after, last_gate.to(DTYPE), MATH
        )  # fmt: skip
        c_after = c_before
        into_gates = ()
        gate_box = box + t % 2 * 2 * BOX
        for g in tl.static_range(GATES):
            of_gate = tl.where(here, of_h[g], 0.0)
            into_gates = into_gates + (note(gate_box + g * (BOX // 2), of_gate, unit, P, TYPE, MATH),)
            put(dgates + gates_t + g * n + unit, of_x[g], here, MATH)
            if SPLITS:
                put(dhidden + gates_t + g * n + unit, of_h[g], here, MATH)

        # The chain.
        chain = zero
        if (k_trunc > 0) & (since_cut == 0) & (seen + t > 0):
            dc_now = zero
        else:
            if SPLITS:
                chain = of_state
            tl.debug_barrier()
            for g in tl.static_range(GATES):
                into = recall(gate_box + g * (BOX // 2), into_gates[g], P, TYPE, MATH)
                chain += product(matrix(held, shelf, g, P), into, TYPE, P, MATH)

        since_cut = tl.where(since_cut == 0, tl.maximum(k_trunc, 1), since_cut) - 1
        gates_t = gates_before
        row_t -= stride
        store_t -= stride
        query_t = query_before
        list_t = list_before
        norms_t -= batch

    into = dstore + first_slots * stride + row * n + unit
    start = get(into, here, "", MATH)
    tl.debug_barrier()
    put(into, start + chain, here, MATH)
    if HAS_C:
        put(dc + row * n + unit, dc_now, here, MATH)
    if HAS_V:
        if NORMALISES:
            put(dv + row * d + unit, dv_total, there, MATH)
        else:
            put(dv + row * d + summed_unit_of(NB), summed(dv_four, MATH), summed_unit_of(NB) < d, MATH)
