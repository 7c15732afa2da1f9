"""Kernels for small hidden sizes: one program takes one row of the batch through all the steps.

A program keeps the recurrent weights in its registers, as left operands of matrix products whose right operand is the
hidden state, eight times beside itself: tensor cores multiply by no less. The products are batched, 16 units a batch
and a batch a warp, so a vector over units is laid out as [units / 16, 16] and each warp owns its rows of it. What is
small and needed by all, like the list of the selected, each warp has for itself: `[units / 16, ...]` again, equal in
each row. Nothing is exchanged between programs, so a step costs neither a launch nor a wait for the rest of the chip.

Weights that do not fit (`RESIDENT` false) are read anew each step and multiplied without tensor cores.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sab.config import SABConfig
from sab.ops.operation import AFFINE, Plan, Weights, allow_tf32, blank, blank_work, contiguous
from sab.ops.triton.launch import launch
from sab.ops.triton.parts import (
    from_sortable,
    get,
    prefetch,
    put,
    sigmoid,
    sortable,
    tanh,
    tanh_of_scores,
    weigh,
    weigh_backward,
)

# Products of a weight with a vector


@triton.jit
def resident(w, inputs, input_stride, unit_stride, unit, units, TYPE: tl.constexpr):
    """A weight as the left operand of products, [P / 16, 16, P].

    One that comes as 16-bit whole numbers is held in registers: their change to TYPE, which the compiler makes once
    the operand's layout is there, keeps it from putting them into shared memory and fetching them each step.
    """
    k = tl.arange(0, unit.shape[0] * 16)
    pointer = w + unit[:, :, None] * unit_stride + k[None, None, :] * input_stride
    weight = tl.load(pointer, mask=(unit < units)[:, :, None] & (k < inputs)[None, None, :], other=0)
    return weight.to(TYPE, bitcast=True) if weight.dtype == tl.int16 else weight


@triton.jit
def into_range(x, TYPE: tl.constexpr):
    """A vector brought into TYPE's range and what undoes it.

    Half precision has the mantissa of TF32 but not its range, so the largest number is brought near 1.
    """
    if TYPE == tl.float16:
        exponent = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        return scaled.to(TYPE), (exponent << 23).to(tl.float32, bitcast=True)
    else:
        return x.to(TYPE), 1.0


@triton.jit
def product(weight, x, TYPE: tl.constexpr):
    """The product of a resident weight with a vector [P / 16, 16], as one."""
    x, scale = into_range(x.reshape(weight.shape[2]), TYPE)
    right = tl.broadcast_to(x[None, :, None], (weight.shape[0], weight.shape[2], 8))
    return tl.sum(tl.dot(weight, right), 2) * (scale * 0.125)


@triton.jit
def product_of_gates(w0, w1, w2, w3, x0, x1, x2, x3, TYPE: tl.constexpr):
    """The sum of four products, whose vectors share one right operand: gate g's are columns g and g + 4."""
    P: tl.constexpr = w0.shape[2]
    x, scale = into_range(tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(P * 4), TYPE)
    right = tl.broadcast_to(x.reshape(P, 1, 4), (P, 2, 4)).reshape(1, P, 8)
    right = tl.broadcast_to(right, (w0.shape[0], P, 8))
    gate = (tl.arange(0, 8) % 4)[None, None, :]
    sums = tl.where(gate == 0, tl.dot(w0, right), tl.where(gate == 1, tl.dot(w1, right), tl.dot(w2, right)))
    sums = tl.where(gate == 3, tl.dot(w3, right), sums)
    return tl.sum(sums, 2) * (scale * 0.5)


@triton.jit
def streamed(w, inputs, input_stride, unit_stride, unit, units, x, DTYPE: tl.constexpr):
    """The product of a weight in memory with a vector in memory, as [P / 16, 16]."""
    result = tl.zeros(unit.shape, DTYPE)
    for first in range(0, inputs, 16):
        k = first + tl.arange(0, 16)
        pointer = w + unit[:, :, None] * unit_stride + k[None, None, :] * input_stride
        weight = tl.load(pointer, mask=(unit < units)[:, :, None] & (k < inputs)[None, None, :], other=0)
        vector = tl.load(x + k, mask=k < inputs, other=0)
        result += tl.sum(weight.to(DTYPE) * vector.to(DTYPE)[None, None, :], 2)
    return result


@triton.jit
def inner(x, y):
    """The inner product of two vectors [P / 16, 16]."""
    return tl.sum(tl.sum(x * y, 1), 0)


# The memory


@triton.jit
def rows_of(slots, first_slots, first_kept, k_att, batch, row):
    """The rows of `store`, its first two dimensions taken as one, with the microstates of slots; -1 where slot is."""
    at = tl.where(slots < first_slots, slots, first_slots + 1 + first_kept + (slots - first_slots) * k_att)
    return tl.where(slots >= 0, at * batch + row.to(tl.int32), -1)


@triton.jit
def load_keys(keys, first, used, d: tl.constexpr, P: tl.constexpr):
    """Keys of 32 slots from `first` on, [32, P]; 0 past those in use."""
    slot = first + tl.arange(0, 32)
    column = tl.arange(0, P)
    mask = (slot < used)[:, None] & (column < d)[None, :]
    return tl.load(keys + slot[:, None] * d + column[None, :], mask=mask, other=0)


@triton.jit
def score_keys(key, query, v, SCORER: tl.constexpr, MATH: tl.constexpr):
    key = key.to(query.dtype)
    if SCORER == "mlp":
        return tl.sum(v[None, :] * tanh_of_scores(key + query[None, :], MATH), 1)
    else:
        return tl.sum(key * query[None, :], 1)


@triton.jit
def carried_line(values, part, LINES: tl.constexpr):
    """Columns 32 part to 32 part + 31 of values [P / 16, 32 LINES]."""
    if LINES == 1:
        return values
    else:
        is_part = (tl.arange(0, LINES) == part)[None, :, None]
        return tl.sum(tl.where(is_part, values.reshape(values.shape[0], LINES, 32), 0), 1)


@triton.jit
def sorted_pair(x, y):
    return tl.maximum(x, y), tl.minimum(x, y)


@triton.jit
def select(
    keys, ahead, used, query, v, place,
    K: tl.constexpr, d: tl.constexpr, SCORER: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The K best of the first `used` keys, highest first: scores and slots [P / 16, KC]; `ahead` has the first keys.

    Each warp looks at eight lines of 32 candidates at a time, the first KC / 32 of which are the best of those before.
    A score's lowest eight bits, which approximate scores can spare, give way to the candidate's position: so one
    comparison decides who is first and, among equals, who is older, and candidates are found again. Each thread sorts
    its eight; then the best of all is K times the best of the 32 threads' first ones.
    """
    NB: tl.constexpr = place.shape[0]
    KC: tl.constexpr = place.shape[1]
    P: tl.constexpr = query.shape[0]
    CARRIED: tl.constexpr = KC // 32
    LOWEST: tl.constexpr = -2147483648
    best = tl.full((NB, KC), LOWEST, tl.int32)
    slots = tl.full((NB, KC), -1, tl.int32)
    for start in range(0, used, (8 - CARRIED) * 32):
        c0 = tl.full((NB, 32), LOWEST, tl.int32)
        c1 = c0
        c2 = c0
        c3 = c0
        c4 = c0
        c5 = c0
        c6 = c0
        c7 = c0
        if start > 0:
            numbered = tl.where(slots >= 0, best | (255 - place), LOWEST)
            c0 = carried_line(numbered, 0, CARRIED)
            if CARRIED == 2:
                c1 = carried_line(numbered, 1, CARRIED)
        end = tl.minimum(used, start + (8 - CARRIED) * 32)
        for first in range(start, end, 32):
            score = score_keys(ahead, query, v, SCORER, MATH)
            ahead = load_keys(keys, first + 32, used, d, P)
            line = (first - start) // 32 + CARRIED
            lane = tl.arange(0, 32)
            number = (sortable(score) & ~255) | (255 - line * 32 - lane)
            number = tl.where(first + lane < end, number, LOWEST)[None, :]
            c1 = tl.where(line == 1, number, c1)
            c2 = tl.where(line == 2, number, c2)
            c3 = tl.where(line == 3, number, c3)
            c4 = tl.where(line == 4, number, c4)
            c5 = tl.where(line == 5, number, c5)
            c6 = tl.where(line == 6, number, c6)
            c7 = tl.where(line == 7, number, c7)
        # Batcher's network for eight.
        c0, c1 = sorted_pair(c0, c1)
        c2, c3 = sorted_pair(c2, c3)
        c4, c5 = sorted_pair(c4, c5)
        c6, c7 = sorted_pair(c6, c7)
        c0, c2 = sorted_pair(c0, c2)
        c1, c3 = sorted_pair(c1, c3)
        c4, c6 = sorted_pair(c4, c6)
        c5, c7 = sorted_pair(c5, c7)
        c1, c2 = sorted_pair(c1, c2)
        c5, c6 = sorted_pair(c5, c6)
        c0, c4 = sorted_pair(c0, c4)
        c1, c5 = sorted_pair(c1, c5)
        c2, c6 = sorted_pair(c2, c6)
        c3, c7 = sorted_pair(c3, c7)
        c2, c4 = sorted_pair(c2, c4)
        c3, c5 = sorted_pair(c3, c5)
        c1, c2 = sorted_pair(c1, c2)
        c3, c4 = sorted_pair(c3, c4)
        c5, c6 = sorted_pair(c5, c6)
        found = tl.full((NB, KC), LOWEST, tl.int32)
        for i in range(tl.minimum(K, end)):
            highest = tl.max(c0, 1)[:, None]
            found = tl.where(place == i, highest, found)
            taken = c0 == highest
            c0 = tl.where(taken, c1, c0)
            c1 = tl.where(taken, c2, c1)
            c2 = tl.where(taken, c3, c2)
            c3 = tl.where(taken, c4, c3)
            c4 = tl.where(taken, c5, c4)
            c5 = tl.where(taken, c6, c5)
            c6 = tl.where(taken, c7, c6)
            c7 = tl.where(taken, LOWEST, c7)
        position = 255 - (found & 255)
        before = tl.gather(slots, tl.minimum(position, KC - 1), 1)
        slots = tl.where(position < KC, before, start + position - KC)
        slots = tl.where(found != LOWEST, slots, -1)
        best = tl.where(found != LOWEST, found & ~255, LOWEST)
    return from_sortable(best), slots


@triton.jit
def select_exactly(
    keys, used, query, v, place,
    K: tl.constexpr, d: tl.constexpr, SCORER: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As `select`, by two comparisons instead of packed numbers: the score first, the slot among equals then."""
    NB: tl.constexpr = place.shape[0]
    KC: tl.constexpr = place.shape[1]
    P: tl.constexpr = query.shape[0]
    CARRIED: tl.constexpr = KC // 32
    LOWEST: tl.constexpr = float("-inf") if DTYPE == tl.float64 else -2147483648
    NUMBER: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.int32
    line = tl.arange(0, 8)[:, None, None]
    best = tl.full((NB, KC), LOWEST, NUMBER)
    slots = tl.full((NB, KC), -1, tl.int32)
    for start in range(0, used, (8 - CARRIED) * 32):
        candidates = tl.full((8, NB, 32), LOWEST, NUMBER)
        numbers = start + (line - CARRIED) * 32 + tl.arange(0, 32)[None, None, :] + tl.zeros((8, NB, 32), tl.int32)
        for part in tl.static_range(CARRIED):
            candidates = tl.where(line == part, carried_line(best, part, CARRIED)[None], candidates)
            numbers = tl.where(line == part, carried_line(slots, part, CARRIED)[None], numbers)
        end = tl.minimum(used, start + (8 - CARRIED) * 32)
        for first in range(start, end, 32):
            score = score_keys(load_keys(keys, first, used, d, P), query, v, SCORER, MATH)
            number = tl.where(first + tl.arange(0, 32) < end, sortable(score), LOWEST)
            candidates = tl.where(line == (first - start) // 32 + CARRIED, number[None, None, :], candidates)
        for i in range(tl.minimum(K, end)):
            highest = tl.max(tl.max(candidates, 0), 1)
            equal = tl.where(candidates == highest[None, :, None], numbers, 2147483647)
            chosen = tl.min(tl.min(equal, 0), 1)
            candidates = tl.where(numbers == chosen[None, :, None], LOWEST, candidates)
            best = tl.where(place == i, highest[:, None], best)
            slots = tl.where(place == i, chosen[:, None], slots)
    return from_sortable(best), slots


@triton.jit
def insert(best, slots, score, slot, place, K: tl.constexpr):
    """The K best, highest first, with a newer candidate put in where it belongs: after those that it equals."""
    ahead = tl.sum(((slots >= 0) & (best >= score)).to(tl.int32), 1)[:, None]
    before = tl.maximum(place - 1, 0)
    new_best = tl.where(place == ahead, score, tl.gather(best, before, 1))
    new_slots = tl.where(place == ahead, slot, tl.gather(slots, before, 1))
    best = tl.where(place < ahead, best, new_best)
    slots = tl.where(place < ahead, slots, new_slots)
    return best, tl.where(place < K, slots, -1)


@triton.jit
def eight_of(values, g, KC: tl.constexpr):
    """Columns 8 g to 8 g + 7 of values [P / 16, KC] as [P / 16, 1, 8]."""
    grouped = values.reshape(values.shape[0], KC // 8, 8)
    return tl.sum(tl.where((tl.arange(0, KC // 8) == g)[None, :, None], grouped, 0), 1)[:, None, :]


@triton.jit
def gather(base, rows, unit, size: tl.constexpr, CACHE: tl.constexpr, MATH: tl.constexpr):
    """The rows of a matrix whose numbers are in `rows`, a tuple of [P / 16, 1, 8], as a tuple of [P / 16, 16, 8].

    All of them are asked for before any is used, so that the memory's latency is waited for once. The layout is that
    of products: eight rows lie side by side where a product has its eight equal columns.
    """
    found = ()
    for g in tl.static_range(len(rows)):
        pointer = base + rows[g].to(tl.int64) * size + unit[:, :, None]
        found = found + (get(pointer, (unit < size)[:, :, None] & (rows[g] >= 0), CACHE, MATH),)
    return found



# Forward


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
            if PACKED:
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
                if PACKED:
                    scores, chosen = select(
                        own_keys, ahead, used, q_column, v_column, place, K, d, SCORER, MATH, DTYPE
                    )
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


# Backward


@triton.jit
def sums_over_warps(parts):
    """The sums over the first dimension of a tuple of [P / 16, 8], as a tuple of [P / 16, 1, 8]."""
    NB: tl.constexpr = parts[0].shape[0]
    sums = ()
    for g in tl.static_range(len(parts)):
        sums = sums + (tl.broadcast_to(tl.sum(parts[g], 0)[None, None, :], (NB, 1, 8)),)
    return sums


@triton.jit(do_not_specialize=["steps", "batch", "first_slots", "slots", "seen", "k_att", "k_trunc"])
def backward_kernel(
    w_held, w_all, w_memory, w_query, v, lengths,
    store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary,
    dstore, dc, dcells, dgates, dhidden, dquery, dkeys, dsummary, dweights, dincorporated, dv,
    steps, batch, first_slots, slots, seen, k_att, k_trunc,
    n: tl.constexpr, d: tl.constexpr, K: tl.constexpr,
    CELL: tl.constexpr, SCORER: tl.constexpr, WEIGHTING: tl.constexpr, INCORPORATE: tl.constexpr,
    P: tl.constexpr,
    RESIDENT: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DCELLS: tl.constexpr, HAS_DSUMMARY: tl.constexpr, HAS_DWEIGHTS: tl.constexpr, HELD: tl.constexpr,
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

    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    here = unit < n
    there = unit < d
    eight = tl.arange(0, 8)[None, None, :] + tl.zeros((NB, 1, 8), tl.int32)
    is_first = (tl.arange(0, NB) == 0)[:, None, None]
    first_kept = k_att - 1 - seen % k_att
    stride = batch.to(tl.int64) * n
    length = steps
    if HAS_LENGTHS:
        length = tl.load(lengths + row).to(tl.int32)

    zero = tl.zeros((NB, 16), DTYPE)
    if RESIDENT:
        w0 = resident(w_held, n, n, 1, unit, n, TYPE)
        if GATES > 1:
            w1 = resident(w_held + n * n, n, n, 1, unit, n, TYPE)
            if HELD > 2:
                w2 = resident(w_held + 2 * n * n, n, n, 1, unit, n, TYPE)
            else:
                w2 = resident(w_all + 2 * n * n, n, n, 1, unit, n, TYPE)
            w3 = w2
            if GATES == 4:
                if HELD > 3:
                    w3 = resident(w_held + 3 * n * n, n, n, 1, unit, n, TYPE)
                else:
                    w3 = resident(w_all + 3 * n * n, n, n, 1, unit, n, TYPE)
        if (K > 0) and (not AFFINE):
            wm = resident(w_all + W_MEMORY, d, n, 1, unit, n, TYPE)
            wq = resident(w_all + W_QUERY, d, n, 1, unit, n, TYPE)
        if (K > 0) and (INCORPORATE == "concat"):
            wc = resident(w_all + W_INCORPORATE, n, 2 * n, 1, unit, n, TYPE)
            ws = resident(w_all + W_INCORPORATE + n, n, 2 * n, 1, unit, n, TYPE)
    v_vector = zero
    dv_sums = tl.zeros((NB, 16, 8), DTYPE)
    if K > 0:
        if AFFINE:
            wm_vector = tl.load(w_memory + unit, mask=here, other=0).to(DTYPE)
            wq_vector = tl.load(w_query + unit, mask=here, other=0).to(DTYPE)
        if SCORER == "mlp":
            v_vector = tl.load(v + unit, mask=there, other=0).to(DTYPE)

    if HAS_LENGTHS:  # past its end a row has no gradient
        for t in range(length, steps):
            for gate in tl.static_range(GATES):
                after = (t * batch.to(tl.int64) + row) * GATES * n + gate * n + unit
                tl.store(dgates + after, zero, mask=here)
                if CELL == "gru":
                    tl.store(dhidden + after, zero, mask=here)

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
    if CELL == "lstm":
        c_after = tl.load(c + row_t + stride + unit, mask=here, other=0)
    if RESIDENT:  # as in the forward: what is also made outside the loop stays in registers
        if GATES == 1:
            chain = product(w0, chain, TYPE)
        else:
            if HELD == 4:
                chain = product_of_gates(w0, w1, w2, w3, chain, chain, chain, chain, TYPE)
            elif HELD == 3:
                chain = product_of_gates(w0, w1, w2, w2, chain, chain, chain, chain, TYPE)
            else:
                chain = product_of_gates(w0, w1, w1, w1, chain, chain, chain, chain, TYPE)
        chain = tl.where(here, chain * 0.0, 0.0)

    for back in range(length):
        t = length - 1 - back
        # Loads that depend on nothing computed here.
        g0 = tl.load(gates + gates_t + unit, mask=here, other=0).to(DTYPE)
        if GATES >= 3:
            g1 = tl.load(gates + gates_t + n + unit, mask=here, other=0).to(DTYPE)
            g2 = tl.load(gates + gates_t + 2 * n + unit, mask=here, other=0).to(DTYPE)
        if GATES == 4:
            g3 = tl.load(gates + gates_t + 3 * n + unit, mask=here, other=0).to(DTYPE)
        if CELL == "lstm":
            c_before = tl.load(c + row_t + unit, mask=here, other=0)
        if CELL == "gru":
            h_before = tl.load(store + store_t + unit, mask=here, other=0)
            h_fresh = tl.load(hidden_new + row_t + unit, mask=here, other=0).to(DTYPE)
        if K > 0:
            used = first_slots + (seen + t) // k_att - seen // k_att
            rows = ()
            key_rows = ()
            shares = ()
            for g in tl.static_range(GROUPS):
                place = g * 8 + eight
                chosen = tl.where(place < K, get(selected + list_t + place, place < K, "", MATH), -1)
                shares = shares + (get(weights + list_t + place, place < K, "", MATH),)
                rows = rows + (rows_of(chosen, first_slots, first_kept, k_att, batch, row),)
                key_rows = key_rows + (tl.where(chosen >= 0, chosen + row.to(tl.int32) * slots, -1),)
            read = gather(store, rows, unit, n, "", MATH)
            q = zero
            if not AFFINE:
                q = tl.load(query + query_t + unit, mask=there, other=0)

        # Keep.
        dh = arriving + chain
        if K > 0:
            if (seen + t + 1) % k_att == 0:
                slot = first_slots + (seen + t + 1) // k_att - 1 - seen // k_att
                if AFFINE:
                    dkey = tl.load(dkeys + row * slots + slot, cache_modifier=".cg")
                    if SCORER == "affine":
                        dh += dkey * wm_vector
                    else:
                        bounded = tanh(tl.load(store + store_t + stride + unit, mask=here, other=0), SCORE_MATH)
                        dh += dkey * wm_vector * (1 - bounded * bounded)
                elif RESIDENT:
                    dkey_at = dkeys + (row * slots + slot) * d + unit
                    dh += product(wm, tl.load(dkey_at, mask=there, other=0, cache_modifier=".cg"), TYPE)
                else:
                    dh += streamed(w_all + W_MEMORY, d, n, 1, unit, n, dkeys + (row * slots + slot) * d, DTYPE)

        # Incorporate and read.
        dh_hat = dh
        if K > 0:
            if used > 0:
                if INCORPORATE == "add":
                    ds = dh
                elif INCORPORATE == "add_bounded":
                    bounded = tanh(tl.load(summary + row_t + unit, mask=here, other=0), MATH)
                    ds = dh * (1 - bounded * bounded)
                else:
                    put(dincorporated + row_t + unit, dh, here, MATH)
                    if RESIDENT:
                        dh_hat = product(wc, dh, TYPE)
                        ds = product(ws, dh, TYPE)
                    else:
                        tl.debug_barrier()
                        into = dincorporated + row_t
                        dh_hat = streamed(w_all + W_INCORPORATE, n, 2 * n, 1, unit, n, into, DTYPE)
                        ds = streamed(w_all + W_INCORPORATE + n, n, 2 * n, 1, unit, n, into, DTYPE)
                if HAS_DSUMMARY:
                    ds += tl.load(dsummary + row_t + unit, mask=here, other=0)
                dmicrostates = gather(dstore, rows, unit, n, ".cg", MATH)
                if not AFFINE:
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
                if WEIGHTING == "relu_norm":
                    norm = tl.load(norms + norms_t)
                dshares = ()
                is_last = ()
                for g in tl.static_range(GROUPS):
                    dshares = dshares + (tl.sum(read[g] * ds[:, :, None], 1),)
                    is_last = is_last + (g * 8 + eight == tl.minimum(K, used) - 1,)
                dshares = sums_over_warps(dshares)
                if HAS_DWEIGHTS:
                    inside = dshares
                    dshares = ()
                    for g in tl.static_range(GROUPS):
                        place = g * 8 + eight
                        dshares = dshares + (inside[g] + get(dweights + list_t + place, place < K, "", MATH),)
                dscores = weigh_backward(dshares, shares, norm, is_last, WEIGHTING)
                dq_sums = tl.zeros((NB, 16, 8), DTYPE)
                dq_number = tl.zeros((NB, 1, 8), DTYPE)
                for g in tl.static_range(GROUPS):
                    is_there = rows[g] >= 0
                    dscore = tl.where(is_there, dscores[g], 0.0)
                    pointer = dstore + rows[g].to(tl.int64) * n + unit[:, :, None]
                    dmicrostate = dmicrostates[g] + shares[g] * ds[:, :, None]
                    put(pointer, dmicrostate, here[:, :, None] & is_there, MATH)
                    if AFFINE:
                        put(dkeys + key_rows[g], dkeys_before[g] + dscore, is_first & is_there, MATH)
                        dq_number += dscore
                    else:
                        key = own_keys[g].to(DTYPE)
                        if SCORER == "mlp":
                            bounded = tanh(key + q[:, :, None], MATH)
                            dkey = dscore * v_vector[:, :, None] * (1 - bounded * bounded)
                            dq_sums += dkey
                            dv_sums += dscore * bounded
                        else:
                            dkey = dscore * q[:, :, None]
                            dq_sums += dscore * key
                        pointer = dkeys + key_rows[g].to(tl.int64) * d + unit[:, :, None]
                        put(pointer, dkeys_before[g] + dkey, there[:, :, None] & is_there, MATH)
                if AFFINE:
                    total = tl.sum(dq_number, 2)
                    put(dquery + norms_t + 0 * eight, dq_number * 0.0 + total[:, :, None], is_first & (eight == 0), MATH)
                    if SCORER == "affine":
                        dh_hat += total * wq_vector
                    else:
                        bounded = tanh(tl.load(h_hat + row_t + unit, mask=here, other=0), SCORE_MATH)
                        dh_hat += total * wq_vector * (1 - bounded * bounded)
                else:
                    dq = tl.sum(dq_sums, 2)
                    if SCORER == "dot":
                        dq *= d**-0.5
                    put(dquery + query_t + unit, dq, there, MATH)
                    if RESIDENT:
                        dh_hat += product(wq, dq, TYPE)
                    else:
                        tl.debug_barrier()
                        dh_hat += streamed(w_all + W_QUERY, d, n, 1, unit, n, dquery + query_t, DTYPE)
            tl.debug_barrier()  # gradients were added to rows that other threads read
        arriving = tl.load(dstore + store_t + unit, mask=unit < tl.where(t > 0, n, 0), other=0, cache_modifier=".cg")

        # Cell.
        if CELL == "lstm":
            if HAS_DCELLS:
                dc_now += tl.load(dcells + row_t + unit, mask=here, other=0)
            bounded = tanh(c_after, MATH)
            dc_now += dh_hat * g3 * (1 - bounded * bounded)
            d0 = dc_now * g2 * g0 * (1 - g0)
            d1 = dc_now * c_before * g1 * (1 - g1)
            d2 = dc_now * g0 * (1 - g2 * g2)
            d3 = dh_hat * bounded * g3 * (1 - g3)
            dc_now *= g1
            c_after = c_before
            put(dgates + gates_t + unit, d0, here, MATH)
            put(dgates + gates_t + n + unit, d1, here, MATH)
            put(dgates + gates_t + 2 * n + unit, d2, here, MATH)
            put(dgates + gates_t + 3 * n + unit, d3, here, MATH)
        elif CELL == "gru":
            dfresh = dh_hat * (1 - g1) * (1 - g2 * g2)
            d0 = dfresh * h_fresh * g0 * (1 - g0)
            d1 = dh_hat * (h_before - g2) * g1 * (1 - g1)
            d2 = dfresh * g0
            d3 = zero
            put(dgates + gates_t + unit, d0, here, MATH)
            put(dgates + gates_t + n + unit, d1, here, MATH)
            put(dgates + gates_t + 2 * n + unit, dfresh, here, MATH)
            put(dhidden + gates_t + unit, d0, here, MATH)
            put(dhidden + gates_t + n + unit, d1, here, MATH)
            put(dhidden + gates_t + 2 * n + unit, d2, here, MATH)
        else:
            if CELL == "rnn_tanh":
                d0 = dh_hat * (1 - g0 * g0)
            else:
                d0 = tl.where(g0 > 0, dh_hat, 0.0)
            put(dgates + gates_t + unit, d0, here, MATH)

        # The chain.
        chain = zero
        if (k_trunc > 0) & (seen + t > 0) & ((seen + t) % tl.maximum(k_trunc, 1) == 0):
            dc_now = zero
        else:
            if CELL == "gru":
                chain = dh_hat * g1
            if RESIDENT:
                if GATES == 1:
                    chain += product(w0, d0, TYPE)
                else:
                    chain += product_of_gates(w0, w1, w2, w3, d0, d1, d2, d3, TYPE)
            else:
                tl.debug_barrier()
                for gate in tl.static_range(GATES):
                    into = dhidden + gates_t + gate * n
                    chain += streamed(w_all + gate * n * n, n, n, 1, unit, n, into, DTYPE)

        if K > 0:
            prefetch(selected + list_t - tl.where(t > 0, batch * K, 0) + tl.arange(0, 8), MATH)
            prefetch(weights + list_t - tl.where(t > 0, batch * K, 0) + tl.arange(0, 8), MATH)
        gates_t -= batch * GATES * n
        row_t -= stride
        store_t -= stride
        query_t -= batch * d
        list_t -= batch * K
        norms_t -= batch

    into = dstore + first_slots * stride + row * n + unit
    tl.store(into, tl.load(into, mask=here, other=0) + chain, mask=here)
    if CELL == "lstm":
        tl.store(dc + row * n + unit, dc_now, mask=here)
    if (K > 0) and (SCORER == "mlp"):
        tl.store(dv + row * d + unit, tl.sum(dv_sums, 2), mask=there)


# Launch

LARGEST_HELD = 128 << 10
"""Bytes of recurrent weights that the registers of a program hold."""
LARGEST_SHARED = 160 << 10
"""Bytes of other weights that its shared memory holds."""


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> Tensor | None:
    """The matrices one after another, in 16 bits where they are resident; None where W_hh alone will do as it is."""
    constants = _constants(plan, compute)
    matrices = [weights.w_hh]
    if plan.config.k_top > 0 and weights.w_memory is not None and weights.w_query is not None and not plan.is_affine:
        matrices += [weights.w_memory, weights.w_query]
    if plan.config.k_top > 0 and weights.w_incorporate is not None:
        matrices.append(weights.w_incorporate.reshape(-1, plan.n))
    dtype = compute
    if constants["RESIDENT"]:
        dtype = torch.bfloat16 if constants["TYPE"] == tl.bfloat16 else torch.float16
    flat = torch.cat(matrices) if len(matrices) > 1 else weights.w_hh
    if flat.dtype != dtype:
        flat = flat.to(dtype)
    return None if flat is weights.w_hh else flat


def forward(plan: Plan, weights: Weights, buffers: dict[str, Any]) -> None:
    """The forward loop over time."""
    if plan.config.k_top > 0 and "lengths" in buffers:
        blank(plan, buffers)
    constants, w_held, w_all = _held(plan, weights, buffers)
    any_tensor = buffers["store"]
    w = weights
    vectors = (w.b_hh, w.w_memory, w.w_query, w.scorer_bias, w.v, w.b_incorporate)
    launch(
        forward_kernel,
        plan.batch,
        [
            w_held,
            w_all,
            *(any_tensor if vector is None else contiguous(vector) for vector in vectors),
            *(buffers.get(name, any_tensor) for name in ("lengths", *BUFFERS)),
        ],
        [*_sizes(plan), 0 if w.scorer_bias is None else len(w.scorer_bias)],
        constants
        | {
            "KC": 32 if plan.config.k_top <= 32 else 64,
            "PACKED": constants["RESIDENT"],
            "HAS_LENGTHS": "lengths" in buffers,
            "HAS_BIAS": w.b_hh is not None,
        },
    )


def backward(plan: Plan, weights: Weights, buffers: dict[str, Any], work: dict[str, Any]) -> None:
    """The backward loop over time."""
    if plan.config.k_top > 0 and "lengths" in buffers:
        blank_work(work, ("dquery", "dincorporated"))
    constants, w_held, w_all = _held(plan, weights, buffers)
    any_tensor = buffers["store"]
    vectors = (weights.w_memory, weights.w_query, weights.v)
    launch(
        backward_kernel,
        plan.batch,
        [
            w_held,
            w_all,
            *(any_tensor if vector is None else contiguous(vector) for vector in vectors),
            *(buffers.get(name, any_tensor) for name in ("lengths", *BUFFERS)),
            *(any_tensor if work[name] is None else work[name] for name in WORK),
        ],
        [*_sizes(plan), plan.config.k_trunc or 0],
        constants
        | {
            "HAS_LENGTHS": "lengths" in buffers,
            "HAS_DCELLS": work["dcells"] is not None,
            "HAS_DSUMMARY": work["dsummary"] is not None,
            "HAS_DWEIGHTS": work["dweights"] is not None,
            # Scaling half precision takes some registers itself.
            "HELD": 4 if constants["TYPE"] == tl.bfloat16 else 3,
        },
    )


BUFFERS = "store c gates hidden_new h_hat query keys weights selected norms summary".split()
WORK = "dstore dc dcells dgates dhidden dquery dkeys dsummary dweights dincorporated dv".split()


def _held(plan: Plan, weights: Weights, buffers: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the kernels are compiled for, and the packed weights: as whole numbers where resident, and as they are."""
    flat = buffers.get("packed")
    if flat is None:
        flat = contiguous(weights.w_hh)
    constants = _constants(plan, buffers["gates"].dtype)
    if constants["RESIDENT"] and flat.itemsize != 2:  # TF32 was forbidden when they were packed
        constants = _constants(plan, buffers["gates"].dtype, tf32=False)
    return constants, flat.view(torch.int16) if constants["RESIDENT"] else flat, flat


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.steps, plan.batch, plan.first_slots, plan.slots, plan.seen, plan.config.k_att


def _constants(plan: Plan, compute: torch.dtype, tf32: bool | None = None) -> dict[str, Any]:
    tf32 = compute == torch.float32 and (allow_tf32() if tf32 is None else tf32)
    return _constants_of(plan.config, plan.cell, plan.n, plan.key_size, compute, tf32)


@lru_cache(maxsize=256)
def _constants_of(
    config: SABConfig, cell: str, n: int, key_size: int, compute: torch.dtype, tf32: bool
) -> dict[str, Any]:
    """What the kernels are compiled for; neither the batch nor the length is among it."""
    d = max(key_size, 1)
    padded = max(16, triton.next_power_of_2(max(n, d)))
    gates = {"lstm": 4, "gru": 3}.get(cell, 1)
    beside = 2 * (config.scorer not in AFFINE) + 2 * (config.incorporate == "concat") if config.k_top > 0 else 0
    is_small = 2 * gates * padded**2 <= LARGEST_HELD and 2 * beside * padded**2 <= LARGEST_SHARED
    rounds = compute == torch.bfloat16 or tf32
    math = "approximate" if rounds else "accurate"
    interpreted = bool(triton.knobs.runtime.interpret)  # where products of bfloat16 are wrong
    return {
        "n": n,
        "d": d,
        "K": config.k_top,
        "CELL": cell,
        "SCORER": config.scorer,
        "WEIGHTING": config.weighting,
        "INCORPORATE": config.incorporate,
        "P": padded,
        "RESIDENT": rounds and is_small,
        "TYPE": tl.bfloat16 if compute == torch.bfloat16 and not interpreted else tl.float16,
        "MATH": "plain" if interpreted else math,
        "num_warps": min(8, padded // 16),
    }
