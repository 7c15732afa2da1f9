"""Both time loops for large hidden sizes: one persistent kernel a direction.

A step's matrix products are too large for one multiprocessor, so all of them share each step: every phase is a loop over
tiles, and between phases the programs wait for each other (`_meet`). What one program wrote others read only after such
a meeting. The kernels are right for any number of programs, also for one (where a meeting is nothing).

Names are those of `recurrence.cpp`. Every product has its right factor lying [outputs, inner], so that both factors are
read along their rows; `real` is the state's type, in which everything but the products' factors is computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sab.ops.operation import Plan, Weights, allow_tf32
from sab.ops.triton.parts import sigmoid, tanh

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
INTERPRETED = triton.knobs.runtime.interpret
NOWHERE = tl.constexpr(1 << 30)
"""The slot of an empty place among the best."""

# Small parts


@triton.jit
def _wide(x):
    return tl.cast(x, tl.int64)


@triton.jit
def _also(mask, flag):
    """mask & flag, where flag is one truth value for all (a plain & of these two fails in Triton's interpreter)."""
    return (mask.to(tl.int32) * tl.cast(flag, tl.int32)) != 0


@triton.jit
def _meet(counter, goal, programs):
    """Waits until all programs have come here; what they wrote before can be read after. Returns the next goal."""
    tl.debug_barrier()
    if programs > 1:
        tl.atomic_add(counter, 1, sem="release")
        while tl.atomic_add(counter, 0, sem="acquire") < goal:
            pass
    tl.debug_barrier()
    return goal + programs


@triton.jit
def _step(sums, left, right, left_mask, right_mask, column, INNER: tl.constexpr, BLOCK: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """A step of `_product`, over the given columns."""
    left_mask, right_mask = left_mask[:, None], right_mask[:, None]
    if INNER % BLOCK != 0:
        left_mask, right_mask = left_mask & (column < INNER)[None, :], right_mask & (column < INNER)[None, :]
    a = tl.load(left[:, None] + column[None, :], mask=left_mask, other=0.0)
    b = tl.load(right[:, None] + column[None, :], mask=right_mask, other=0.0)
    return tl.dot(a.to(b.dtype), tl.trans(b), sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def _product(sums, left, right, left_mask, right_mask, first, last, INNER: tl.constexpr, BLOCK: tl.constexpr,
             STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sums [R, C] plus the product of rows `left` [R] and `right` [C] (where they begin), from column first to last."""
    for k in tl.range(first, last, BLOCK, num_stages=STAGES):
        sums = _step(sums, left, right, left_mask, right_mask, k + tl.arange(0, BLOCK), INNER, BLOCK, PRECISION)
    return sums


@triton.jit
def _small_product(left, right, left_mask, right_mask, real: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """As `_product` over all columns, for tiles so small that a step waits for the one before: four sums in turn."""
    QUARTER: tl.constexpr = BLOCK // 2
    sums, second = tl.zeros((ROWS, COLUMNS), real), tl.zeros((ROWS, COLUMNS), real)
    third, fourth = tl.zeros((ROWS, COLUMNS), real), tl.zeros((ROWS, COLUMNS), real)
    WHOLE: tl.constexpr = QUARTER * 4
    for k in tl.range(0, INNER, WHOLE, num_stages=STAGES):
        column = k + tl.arange(0, QUARTER)
        sums = _step(sums, left, right, left_mask, right_mask, column, INNER, WHOLE, PRECISION)
        second = _step(second, left, right, left_mask, right_mask, column + QUARTER, INNER, WHOLE, PRECISION)
        third = _step(third, left, right, left_mask, right_mask, column + 2 * QUARTER, INNER, WHOLE, PRECISION)
        fourth = _step(fourth, left, right, left_mask, right_mask, column + 3 * QUARTER, INNER, WHOLE, PRECISION)
    return (sums + second) + (third + fourth)


@triton.jit
def _apart(sums):
    """A product's sums, no longer laid out as the product left them.

    Otherwise the compiler takes that layout for all that the sums meet, and changes each load and store around it.
    """
    return tl.sum(sums[:, :, None], 2)


# The memory's bookkeeping


@triton.jit
def _slots_at(t, seen, first_slots, k_att, K_TOP: tl.constexpr):
    """How many slots are in use when step t reads."""
    return first_slots + (seen + t) // k_att - seen // k_att if K_TOP > 0 else 0 * seen


@triton.jit
def _keeps(t, seen, k_att, K_TOP: tl.constexpr):
    return (K_TOP > 0) & ((seen + t + 1) % k_att == 0)


@triton.jit
def _cut_before(t, seen, k_trunc):
    return (k_trunc > 0) & (seen + t > 0) & ((seen + t) % tl.maximum(k_trunc, 1) == 0)


@triton.jit
def _microstate(slot, seen, first_slots, k_att):
    """Row of `store` with the microstate of a slot."""
    kept = first_slots + 1 + k_att - 1 - seen % k_att + (slot - first_slots) * k_att
    return tl.where(slot < first_slots, slot, kept)


@triton.jit
def _ahead(score, slot, other, other_slot):
    return (score > other) | ((score == other) & (slot < other_slot))


@triton.jit
def _merge(best, best_slot, score, slot, PLACES: tl.constexpr):
    """The best [PLACES], highest first, of those held and of new candidates [C] of higher slots.

    Each one's place is the number of those ahead of it: a few sums, and no loop over the places.
    """
    score = tl.where(score == score, score, float("-inf"))  # not a number: in order, too, so that places stay distinct
    place = tl.arange(0, PLACES)
    # Sums over the first axis, which threads have mostly to themselves.
    ahead = _ahead(score[:, None], slot[:, None], score[None, :], slot[None, :])
    held_ahead = _ahead(best[:, None], best_slot[:, None], score[None, :], slot[None, :])
    rank = tl.sum(ahead.to(tl.int32), 0) + tl.sum(held_ahead.to(tl.int32), 0)
    held_rank = place + tl.sum(_ahead(score[:, None], slot[:, None], best[None, :], best_slot[None, :]).to(tl.int32), 0)
    new, held = rank[:, None] == place[None, :], held_rank[:, None] == place[None, :]
    merged = tl.sum(tl.where(new, score[:, None], 0.0), 0) + tl.sum(tl.where(held, best[:, None], 0.0), 0)
    merged_slot = tl.sum(tl.where(new, slot[:, None], 0), 0) + tl.sum(tl.where(held, best_slot[:, None], 0), 0)
    return merged, merged_slot


@triton.jit
def _top(score, slot, PLACES: tl.constexpr):
    """`_merge` where none are held yet and there are at least PLACES candidates."""
    score = tl.where(score == score, score, float("-inf"))
    rank = tl.sum(_ahead(score[:, None], slot[:, None], score[None, :], slot[None, :]).to(tl.int32), 0)
    new = rank[:, None] == tl.arange(0, PLACES)[None, :]
    return tl.sum(tl.where(new, score[:, None], 0.0), 0), tl.sum(tl.where(new, slot[:, None], 0), 0)


@triton.jit
def _weigh(score, k, WEIGHTING: tl.constexpr, PLACES: tl.constexpr):
    """Weights of the k selected scores, highest first, and relu_norm's divisor."""
    place = tl.arange(0, PLACES)
    norm = tl.sum(tl.where(place == 0, score, 0.0)) * 0
    if WEIGHTING == "relu" or WEIGHTING == "relu_norm":
        lowest = tl.sum(tl.where(place == k - 1, score, 0.0))
        weight = tl.where(place < k, tl.maximum(score - lowest, 0.0), 0.0)
        if WEIGHTING == "relu_norm":
            norm = tl.sum(weight) + 1e-7
            weight = weight / norm
    else:
        shift = tl.sum(tl.where(place == 0, score, 0.0))
        if WEIGHTING == "softmax_sink":
            shift = tl.maximum(shift, 0.0)
        weight = tl.where(place < k, tl.exp(score - shift), 0.0)
        total = tl.sum(weight)
        if WEIGHTING == "softmax_sink":
            total += tl.exp(-shift)
        weight = weight / total
    return weight, norm


@triton.jit
def _weigh_backward(da, weight, k, norm, WEIGHTING: tl.constexpr, PLACES: tl.constexpr):
    """Gradients of the weights become gradients of the selected scores."""
    place = tl.arange(0, PLACES)
    inner = tl.sum(weight * da)
    if WEIGHTING == "softmax" or WEIGHTING == "softmax_sink":
        return weight * (da - inner)
    if WEIGHTING == "relu_norm":
        da = (da - inner) / norm
    da = tl.where(weight > 0, da, 0.0)
    return tl.where(place == k - 1, da - tl.sum(da), da)  # the threshold


@triton.jit
def _linear(row, w, real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr):
    """w·h, or w·tanh(h), of one row."""
    unit = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), real)
    for first in range(0, N, WIDTH):
        h = tl.load(row + first + unit, mask=first + unit < N, other=0.0)
        if BOUNDED:
            h = tanh(h, MATH)
        sums += h * tl.load(w + first + unit, mask=first + unit < N, other=0.0).to(real)
    return tl.sum(sums)


# Forward


@triton.jit
def _cell_phase(t, batch, pid, programs, reads, h_left, h_next, h_hat_left, h_in, h_out, c, gates, hidden_new, h_hat, lengths, w_hh, b_hh,
                real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr, MIXED: tl.constexpr,
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
        gate_at = gates + _wide(t * batch) * (GATES * N) + row[:, None] * (GATES * N) + unit[None, :]
        # What does not wait for the product is fetched first, and not touched before the product is done.
        first = tl.load(gate_at, mask=inside, other=0.0)
        if GATES > 1:
            second = tl.load(gate_at + N, mask=inside, other=0.0)
            third = tl.load(gate_at + 2 * N, mask=inside, other=0.0)
        if CELL == "lstm":
            fourth = tl.load(gate_at + 3 * N, mask=inside, other=0.0)
            c_old = tl.load(c + _wide(t * batch) * N + at, mask=inside, other=0.0)
        if CELL == "gru":
            h_old = tl.load(h_in + at, mask=inside, other=0.0)
        alive = inside
        if lengths is not None:
            alive = inside & (t < tl.load(lengths + row, mask=row < batch, other=0))[:, None]
        weight_rows = w_hh + (column_gate * N + column_unit) * N
        sums = tl.zeros((ROWS, UNITS * WIDE), real)
        sums = _product(sums, h_left + row * N, weight_rows, row < batch, (column_unit < N) & (column_gate < GATES),
                        0, N, N, BLOCK, STAGES, PRECISION)  # fmt: skip
        if GATES > 1:
            even, odd = tl.split(tl.reshape(sums, (ROWS, UNITS, 2, 2)))
            even_0, even_1 = tl.split(even)
            odd_0, odd_1 = tl.split(odd)
            first = first.to(real) + even_0
            second = second.to(real) + odd_0
        if CELL == "lstm":
            i, f = sigmoid(first, MATH), sigmoid(second, MATH)
            g, o = tanh(third.to(real) + even_1, MATH), sigmoid(fourth.to(real) + odd_1, MATH)
            c_new = tl.where(alive, f * c_old + i * g, 0.0)
            new = o * tanh(c_new, MATH)
            tl.store(gate_at, tl.where(alive, i, 0.0), mask=inside)
            tl.store(gate_at + N, tl.where(alive, f, 0.0), mask=inside)
            tl.store(gate_at + 2 * N, tl.where(alive, g, 0.0), mask=inside)
            tl.store(gate_at + 3 * N, tl.where(alive, o, 0.0), mask=inside)
            tl.store(c + _wide((t + 1) * batch) * N + at, c_new, mask=inside)
        elif CELL == "gru":
            inner = even_1
            if b_hh is not None:
                bias = b_hh + unit[None, :]
                first += tl.load(bias, mask=(unit < N)[None, :], other=0.0).to(real)
                second += tl.load(bias + N, mask=(unit < N)[None, :], other=0.0).to(real)
                inner += tl.load(bias + 2 * N, mask=(unit < N)[None, :], other=0.0).to(real)
            r, z = sigmoid(first, MATH), sigmoid(second, MATH)
            fresh = tanh(third.to(real) + r * inner, MATH)
            new = fresh + z * (h_old - fresh)
            tl.store(gate_at, tl.where(alive, r, 0.0), mask=inside)
            tl.store(gate_at + N, tl.where(alive, z, 0.0), mask=inside)
            tl.store(gate_at + 2 * N, tl.where(alive, fresh, 0.0), mask=inside)
            tl.store(hidden_new + _wide(t * batch) * N + at, tl.where(alive, inner, 0.0), mask=inside)
        else:
            new = first.to(real) + sums
            if CELL == "rnn_tanh":
                new = tanh(new, MATH)
            else:
                new = tl.maximum(new, 0.0)
            tl.store(gate_at, tl.where(alive, new, 0.0), mask=inside)
        new = tl.where(alive, new, 0.0)
        tl.store(h_hat + _wide(t * batch) * N + at, new, mask=inside)
        tl.store(h_out + at, new, mask=_also(inside, reads == 0))
        if MIXED:
            tl.store(h_hat_left + at, new, mask=inside)
            tl.store(h_next + at, new, mask=_also(inside, reads == 0))


@triton.jit
def _key_phase(slot, batch, pid, programs, slots, h_left, keys, w_memory, real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """Keys of a slot, W_m h."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        key = _small_product(h_left + row * N, w_memory + column * N, row < batch, column < D, real, N, ROWS, COLUMNS, BLOCK,
                             STAGES, PRECISION)  # fmt: skip
        inside = (row < batch)[:, None] & (column < D)[None, :]
        tl.store(keys + (_wide(row) * slots + slot)[:, None] * D + column[None, :], key, mask=inside)


@triton.jit
def _affine_key(t, row, batch, seen, k_att, bias_size, h, keys_type: tl.constexpr, w_memory, scorer_bias, real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr,
                WIDTH: tl.constexpr, BOUNDED: tl.constexpr):  # fmt: skip
    """The key of the state kept after step t, rounded as it is stored."""
    key = _linear(h + row * N, w_memory, real, MATH, N, WIDTH, BOUNDED)
    if scorer_bias is not None:
        number = (seen + t + 1) // k_att - 1
        key += tl.load(scorer_bias + number, mask=number < bias_size, other=0.0).to(real)
    return key.to(keys_type)


@triton.jit
def _query_phase(t, batch, pid, programs, used, slots, h_hat_left, query, keys, partial, w_query, scorer_bias, v, real: tl.constexpr, MATH: tl.constexpr,
                 SCORER: tl.constexpr, SCALE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """The query, and at once the part of all scores that comes from each tile's columns: partial [tile, row, slot]."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < batch)[:, None] & (column < D)[None, :]
        slot = tl.arange(0, SLOTS)
        key_at = keys + ((_wide(row) * slots)[:, None] + slot[None, :])[:, :, None] * D + column[None, None, :]
        there = (row < batch)[:, None] & (slot < used)[None, :]
        key = tl.load(key_at, mask=there[:, :, None] & (column < D)[None, None, :], other=0.0)
        own = _small_product(h_hat_left + row * N, w_query + column * N, row < batch, column < D, real, N, ROWS, COLUMNS, BLOCK,
                             STAGES, PRECISION)  # fmt: skip
        if SCORER == "mlp":
            own += tl.load(scorer_bias + column, mask=column < D, other=0.0).to(real)[None, :]
            factor = tl.load(v + column, mask=column < D, other=0.0).to(real)
        else:
            own *= SCALE
        tl.store(query + (_wide(t * batch) + row)[:, None] * D + column[None, :], own, mask=inside)
        score_at = partial + (_wide(tile // row_tiles * batch) + row)[:, None] * slots + slot[None, :]
        for first in range(0, used, SLOTS):
            if SCORER == "mlp":
                terms = tanh(key.to(real) + own[:, None, :], MATH) * factor[None, None, :]
            else:
                terms = key.to(real) * own[:, None, :]
            there = (row < batch)[:, None] & (first + slot < used)[None, :]
            tl.store(score_at + first, tl.sum(terms, 2), mask=there)
            behind = first + SLOTS
            there = (row < batch)[:, None] & (behind + slot < used)[None, :]
            key = tl.load(key_at + behind * D, mask=there[:, :, None] & (column < D)[None, None, :], other=0.0)


@triton.jit
def _scores(row, slot, batch, used, slots, partial, real: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
            CANDIDATES: tl.constexpr):  # fmt: skip
    """The sums of `partial`; where there is no slot, less than any score."""
    block = tl.arange(0, 64)
    score = tl.zeros((CANDIDATES,), real)
    for first in range(0, tl.cdiv(D, COLUMNS), 64):
        at = partial + (_wide((first + block) * batch) + row)[:, None] * slots + slot[None, :]
        there = (first + block < tl.cdiv(D, COLUMNS))[:, None] & (slot < used)[None, :]
        score += tl.sum(tl.load(at, mask=there, other=0.0), 0)
    return tl.where(slot < used, score, float("-inf"))


@triton.jit
def _read_phase(t, batch, pid, programs, used, keeping, seen, first_slots, slots, k_att, bias_size, h_old, h_out, h_next, store, h_hat, keys, partial,
                best_key, best_slot, weights, selected, norms, summary, summary_left, lengths, w_memory, w_query,
                scorer_bias, real: tl.constexpr, MATH: tl.constexpr, SCORER: tl.constexpr, WEIGHTING: tl.constexpr,
                INCORPORATE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, K_TOP: tl.constexpr,
                PLACES: tl.constexpr, MIXED: tl.constexpr, SLICE: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
                CANDIDATES: tl.constexpr):  # fmt: skip
    """Selects, weighs and sums up, and but for `concat` makes h_t: a slice of a row's units in one tile."""
    AFFINE: tl.constexpr = SCORER == "affine" or SCORER == "affine_tanh"
    place = tl.arange(0, PLACES)
    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
        row, part = tile % batch, tile // batch
        at_row = _wide(t * batch + row)
        alive = True
        if lengths is not None:
            alive = t < tl.load(lengths + row)
        if AFFINE:
            # Each slice has the row's best to itself, so that they need not wait for each other.
            held = tile * PLACES + place
            best, slot = tl.load(best_key + held), tl.load(best_slot + held)
            if keeping:
                key = _affine_key(t - 1, row, batch, seen, k_att, bias_size, h_old, keys.dtype.element_ty, w_memory,
                                  scorer_bias, real, MATH, N, 1024, SCORER == "affine_tanh")  # fmt: skip
                tl.store(keys + _wide(row) * slots + used - 1, key, mask=part == 0)
                candidate = tl.where(place == 0, key.to(real), float("-inf"))
                best, slot = _merge(best, slot, candidate, tl.where(place == 0, used - 1, place + (NOWHERE + PLACES)), PLACES)
                tl.store(best_key + held, best)
                tl.store(best_slot + held, slot)
            score = best + _linear(h_hat + at_row * N, w_query, real, MATH, N, 1024, SCORER == "affine_tanh")
        else:
            candidate = tl.arange(0, CANDIDATES)
            found = _scores(row, candidate, batch, used, slots, partial, real, D, COLUMNS, CANDIDATES)
            score, slot = _top(found, candidate, PLACES)
            for first in range(CANDIDATES, used, CANDIDATES):
                found = _scores(row, first + candidate, batch, used, slots, partial, real, D, COLUMNS, CANDIDATES)
                score, slot = _merge(score, slot, found, first + candidate, PLACES)
        k = tl.minimum(K_TOP, used)
        weight, norm = _weigh(score, k, WEIGHTING, PLACES)
        valid = _also(place < k, alive)
        weight, slot = tl.where(valid, weight, 0.0), tl.where(valid, slot, 0)
        if part == 0:
            tl.store(weights + at_row * K_TOP + place, weight, mask=valid)
            tl.store(selected + at_row * K_TOP + place, slot, mask=valid)
            if WEIGHTING == "relu_norm":
                tl.store(norms + at_row, norm)
        memory = store + (_wide(_microstate(slot, seen, first_slots, k_att)) * batch + row) * N
        for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, N), PIECE):
            unit = first + tl.arange(0, PIECE)
            inside = unit < N
            states = tl.load(memory[:, None] + unit[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            provisional = tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0)
            s = tl.sum(weight[:, None] * states, 0)
            tl.store(summary + at_row * N + unit, s, mask=_also(inside, alive))
            if INCORPORATE == "concat":
                if MIXED:
                    tl.store(summary_left + row * N + unit, s, mask=inside)
            else:
                new = provisional + (tanh(s, MATH) if INCORPORATE == "add_bounded" else s)
                tl.store(h_out + row * N + unit, new, mask=inside)
                if MIXED:
                    tl.store(h_next + row * N + unit, new, mask=inside)


@triton.jit
def _concat_phase(t, batch, pid, programs, h_hat_left, summary_left, h_out, h_next, lengths, w_incorporate, b_incorporate,
                  real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """h_t = W_c [ĥ; s] + b_c."""
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
        new = _small_product(h_hat_left + row * N, right, row < batch, unit < N, real, N, ROWS, COLUMNS, BLOCK, STAGES,
                             PRECISION)  # fmt: skip
        new += _small_product(summary_left + row * N, right + N, row < batch, unit < N, real, N, ROWS, COLUMNS, BLOCK, STAGES,
                              PRECISION)  # fmt: skip
        new = tl.where(alive, _apart(new) + bias[None, :], 0.0)
        at = row[:, None] * N + unit[None, :]
        tl.store(h_out + at, new, mask=inside)
        if MIXED:
            tl.store(h_next + at, new, mask=inside)


@triton.jit(do_not_specialize=["steps", "batch", "seen", "first_slots", "slots", "k_att", "bias_size"])
def forward_kernel(store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, lengths,
                   w_hh, b_hh, w_memory, w_query, scorer_bias, v, w_incorporate, b_incorporate,
                   h_left, h_hat_left, summary_left, partial, best_key, best_slot, counter,
                   steps, batch, seen, first_slots, slots, k_att, bias_size,
                   CELL: tl.constexpr, SCORER: tl.constexpr, WEIGHTING: tl.constexpr, INCORPORATE: tl.constexpr,
                   N: tl.constexpr, D: tl.constexpr, GATES: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr,
                   SCALE: tl.constexpr, MIXED: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
                   QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, SLICE: tl.constexpr,
                   PIECE: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    real: tl.constexpr = store.dtype.element_ty
    AFFINE: tl.constexpr = SCORER == "affine" or SCORER == "affine_tanh"
    pid, programs = tl.program_id(0), tl.num_programs(0)
    goal = programs
    if AFFINE and K_TOP > 0:
        for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
            place = tl.arange(0, PLACES)
            best, slot = tl.full((PLACES,), float("-inf"), real), place + NOWHERE
            for first in range(0, first_slots, CANDIDATES):
                candidate = first + tl.arange(0, CANDIDATES)
                key = tl.load(keys + _wide(tile % batch) * slots + candidate, mask=candidate < first_slots,
                              other=float("-inf"))  # fmt: skip
                best, slot = _merge(best, slot, key.to(real), candidate, PLACES)
            tl.store(best_key + tile * PLACES + place, best)
            tl.store(best_slot + tile * PLACES + place, slot)
    for t in range(steps):
        used = _slots_at(t, seen, first_slots, k_att, K_TOP)
        keeping = _keeps(t - 1, seen, k_att, K_TOP) & (t > 0)
        h_old = store + _wide((first_slots + t) * batch) * N
        h_new = h_old + batch * N
        if MIXED:
            # Two copies in turn: without a read h_t is written while others still read h_{t-1}.
            left, next_left, hat_left = h_left + t % 2 * batch * N, h_left + (t + 1) % 2 * batch * N, h_hat_left
        else:
            left, next_left, hat_left = h_old, h_new, h_hat + _wide(t * batch) * N
        _cell_phase(t, batch, pid, programs, used, left, next_left, hat_left, h_old, h_new, c, gates, hidden_new, h_hat, lengths,
                    w_hh, b_hh, real, MATH, CELL, N, GATES, MIXED, ROWS, UNITS, BLOCK, STAGES, PRECISION)  # fmt: skip
        if not AFFINE and K_TOP > 0:
            if keeping:
                _key_phase(used - 1, batch, pid, programs, slots, left, keys, w_memory, real, MATH, N, D, QUERY_ROWS, COLUMNS,
                           BLOCK, STAGES, PRECISION)  # fmt: skip
        goal = _meet(counter, goal, programs)
        if K_TOP > 0:
            if used > 0:
                if not AFFINE:
                    _query_phase(t, batch, pid, programs, used, slots, hat_left, query, keys, partial, w_query, scorer_bias, v,
                                 real, MATH, SCORER, SCALE, N, D, QUERY_ROWS, COLUMNS, SLOTS, BLOCK, STAGES,
                                 PRECISION)  # fmt: skip
                    goal = _meet(counter, goal, programs)
                _read_phase(t, batch, pid, programs, used, keeping, seen, first_slots, slots, k_att, bias_size, h_old, h_new, next_left,
                            store, h_hat, keys, partial, best_key, best_slot, weights, selected, norms, summary,
                            summary_left, lengths, w_memory, w_query, scorer_bias, real, MATH, SCORER, WEIGHTING, INCORPORATE,
                            N, D, K_TOP, PLACES, MIXED, SLICE, PIECE, COLUMNS, CANDIDATES)  # fmt: skip
                goal = _meet(counter, goal, programs)
                if INCORPORATE == "concat":
                    if MIXED:
                        s_left = summary_left
                    else:
                        s_left = summary + _wide(t * batch) * N
                    _concat_phase(t, batch, pid, programs, hat_left, s_left, h_new, next_left, lengths, w_incorporate,
                                  b_incorporate, real, MATH, N, MIXED, QUERY_ROWS, COLUMNS, BLOCK, STAGES,
                                  PRECISION)  # fmt: skip
                    goal = _meet(counter, goal, programs)
    if K_TOP > 0:
        if _keeps(steps - 1, seen, k_att, K_TOP):
            h_end = store + _wide((first_slots + steps) * batch) * N
            slot = _slots_at(steps - 1, seen, first_slots, k_att, K_TOP)
            if AFFINE:
                for row in range(pid, batch, programs):
                    key = _affine_key(steps - 1, row, batch, seen, k_att, bias_size, h_end, keys.dtype.element_ty,
                                      w_memory, scorer_bias, real, MATH, N, 1024, SCORER == "affine_tanh")  # fmt: skip
                    tl.store(keys + _wide(row) * slots + slot, key)
            else:
                left = h_end
                if MIXED:
                    left = h_left + steps % 2 * batch * N
                _key_phase(slot, batch, pid, programs, slots, left, keys, w_memory, real, MATH, N, D, QUERY_ROWS, COLUMNS,
                           BLOCK, STAGES, PRECISION)  # fmt: skip


# Backward


@triton.jit
def _arriving(t, row, unit, mask, batch, chained, carried, kept, slots, slot, store, dstore, partial, carry, dkeys, lengths, w_memory, h_row,
              real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, SCORER: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
              K_TOP: tl.constexpr):  # fmt: skip
    """The gradient of h_t: from outside and from reads, along the chain, and through the key if it was kept."""
    at = row * N + unit
    dh = tl.load(dstore + _wide(h_row * batch) * N + at, mask=mask, other=0.0)
    for split in tl.static_range(SPLITS):
        dh += tl.load(partial + split * batch * N + at, mask=_also(mask, chained), other=0.0)
    if CELL == "gru":
        dh += tl.load(carry + at, mask=_also(mask, carried), other=0.0)
    if lengths is not None:
        dh = tl.where(t < tl.load(lengths + row, mask=row < batch, other=0), dh, 0.0)
    if K_TOP > 0 and (SCORER == "affine" or SCORER == "affine_tanh"):
        dkey = tl.load(dkeys + _wide(row) * slots + slot, mask=_also(row < batch, kept), other=0.0)
        slope = tl.load(w_memory + unit, mask=unit < N, other=0.0).to(real)
        if SCORER == "affine_tanh":
            bounded = tanh(tl.load(store + _wide(h_row * batch) * N + at, mask=_also(mask, kept), other=0.0), MATH)
            slope = slope * (1 - bounded * bounded)
        dh += dkey * slope
    return dh


@triton.jit
def _cell_saved(t, row, unit, mask, batch, h_old, c, gates, hidden_new, dc, dcells, CELL: tl.constexpr, N: tl.constexpr,
                GATES: tl.constexpr):  # fmt: skip
    """What `_cell_backward` needs, fetched ahead: gates, then what else the cell has (or a gate once more)."""
    at = row * N + unit
    gate_at = gates + _wide(t * batch) * (GATES * N) + row * (GATES * N) + unit
    first = tl.load(gate_at, mask=mask, other=0.0)
    if CELL == "lstm":
        second, third = tl.load(gate_at + N, mask=mask, other=0.0), tl.load(gate_at + 2 * N, mask=mask, other=0.0)
        fourth = tl.load(gate_at + 3 * N, mask=mask, other=0.0)
        c_old = tl.load(c + _wide(t * batch) * N + at, mask=mask, other=0.0)
        c_new = tl.load(c + _wide((t + 1) * batch) * N + at, mask=mask, other=0.0)
        later = tl.load(dc + at, mask=mask, other=0.0)
        outside = later
        if dcells is not None:
            outside = tl.load(dcells + _wide(t * batch) * N + at, mask=mask, other=0.0)
        return first, second, third, fourth, c_old, c_new, later, outside
    elif CELL == "gru":
        second, third = tl.load(gate_at + N, mask=mask, other=0.0), tl.load(gate_at + 2 * N, mask=mask, other=0.0)
        h = tl.load(h_old + at, mask=mask, other=0.0)
        inner = tl.load(hidden_new + _wide(t * batch) * N + at, mask=mask, other=0.0)
        return first, second, third, inner, h, h, h, h
    else:
        return first, first, first, first, first, first, first, first


@triton.jit
def _cell_backward(t, row, unit, mask, batch, cut, dh_hat, first, second, third, fourth, fifth, sixth, seventh, eighth,
                   dc, dcells, dgates, dhidden, carry, real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr,
                   N: tl.constexpr, GATES: tl.constexpr):  # fmt: skip
    at = row * N + unit
    gate_at = _wide(t * batch) * (GATES * N) + row * (GATES * N) + unit
    if CELL == "lstm":
        i, f, g, o = first.to(real), second.to(real), third.to(real), fourth.to(real)
        bounded = tanh(sixth, MATH)
        dc_new = seventh + dh_hat * o * (1 - bounded * bounded)
        if dcells is not None:
            dc_new += eighth
        tl.store(dgates + gate_at, dc_new * g * i * (1 - i), mask=mask)
        tl.store(dgates + gate_at + N, dc_new * fifth * f * (1 - f), mask=mask)
        tl.store(dgates + gate_at + 2 * N, dc_new * i * (1 - g * g), mask=mask)
        tl.store(dgates + gate_at + 3 * N, dh_hat * bounded * o * (1 - o), mask=mask)
        tl.store(dc + at, tl.where(cut, 0.0, dc_new * f), mask=mask)
    elif CELL == "gru":
        r, z, fresh, inner = first.to(real), second.to(real), third.to(real), fourth.to(real)
        dfresh = dh_hat * (1 - z) * (1 - fresh * fresh)
        dr, dz = dfresh * inner * r * (1 - r), dh_hat * (fifth - fresh) * z * (1 - z)
        tl.store(dgates + gate_at, dr, mask=mask)
        tl.store(dhidden + gate_at, dr, mask=mask)
        tl.store(dgates + gate_at + N, dz, mask=mask)
        tl.store(dhidden + gate_at + N, dz, mask=mask)
        tl.store(dgates + gate_at + 2 * N, dfresh, mask=mask)
        tl.store(dhidden + gate_at + 2 * N, dfresh * r, mask=mask)
        tl.store(carry + at, dh_hat * z, mask=mask)
    elif CELL == "rnn_tanh":
        h = first.to(real)
        tl.store(dgates + gate_at, dh_hat * (1 - h * h), mask=mask)
    else:
        tl.store(dgates + gate_at, tl.where(first.to(real) > 0, dh_hat, 0.0), mask=mask)


@triton.jit
def _round_phase(slot, batch, pid, programs, slots, dkeys, dkeys_left, D: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """The gradients of a slot's keys in the products' type, as the left factor of `_chain_phase`."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(D, COLUMNS), programs):
        row = (tile % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
        column = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < batch) & (column < D)
        dkey = tl.load(dkeys + (_wide(row) * slots + slot) * D + column, mask=inside, other=0.0)
        tl.store(dkeys_left + row * D + column, dkey, mask=inside)


@triton.jit
def _chain_phase(t, batch, pid, programs, chained, kept, slot, slots, partial, dhidden, dkeys, dkeys_left, w_hh_t, w_memory_t, real: tl.constexpr, MATH: tl.constexpr,
                 MIXED: tl.constexpr, SCORER: tl.constexpr, K_TOP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, GATES: tl.constexpr, SPLITS: tl.constexpr,
                 ROWS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Part of the gradient of h_{t-1}: along the chain, and through its key where it was kept.

    The inner dimension of both products together is cut into SPLITS even pieces, so that there are enough tiles; who
    reads `partial` adds them up.
    """
    row_tiles, unit_tiles = tl.cdiv(batch, ROWS), tl.cdiv(N, UNITS)
    chain_blocks = tl.where(chained, tl.cdiv(GATES * N, BLOCK), 0)
    blocks = chain_blocks
    if K_TOP > 0 and (SCORER == "mlp" or SCORER == "dot"):
        blocks += tl.where(kept, tl.cdiv(D, BLOCK), 0)
    for tile in range(pid, row_tiles * unit_tiles * SPLITS, programs):
        split, place = tile % SPLITS, tile // SPLITS
        row = place % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = place // row_tiles * UNITS + tl.arange(0, UNITS)
        first, last = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
        sums = tl.zeros((ROWS, UNITS), real)
        left = dhidden + (_wide(t * batch) + row) * (GATES * N)
        sums = _product(sums, left, w_hh_t + unit * (GATES * N), row < batch, unit < N, first * BLOCK,
                        tl.minimum(last, chain_blocks) * BLOCK, GATES * N, BLOCK, STAGES, PRECISION)  # fmt: skip
        if K_TOP > 0 and (SCORER == "mlp" or SCORER == "dot"):
            if last > chain_blocks:
                if MIXED:
                    left_key = dkeys_left + row * D
                else:
                    left_key = dkeys + (_wide(row) * slots + slot) * D
                sums = _product(sums, left_key, w_memory_t + unit * D, row < batch, unit < N,
                                tl.maximum(first - chain_blocks, 0) * BLOCK, (last - chain_blocks) * BLOCK, D, BLOCK,
                                STAGES, PRECISION)  # fmt: skip
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        tl.store(partial + split * batch * N + row[:, None] * N + unit[None, :], sums, mask=inside)


@triton.jit
def _key_saved(row, slot, valid, column, at_row, slots, query, keys, dkeys, v, dv, SCORER: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """What `_key_backward` needs, fetched ahead."""
    inside = column < D
    both = valid[:, None] & inside[None, :]
    gathered = (_wide(row) * slots + slot)[:, None] * D + column[None, :]
    own = tl.load(keys + gathered, mask=both, other=0.0)
    dkey = tl.load(dkeys + gathered, mask=both, other=0.0)
    q = tl.load(query + at_row * D + column, mask=inside, other=0.0)
    if SCORER == "mlp":
        factor = tl.load(v + column, mask=inside, other=0.0)
        dv_old = tl.load(dv + row * D + column, mask=inside, other=0.0)
        return own, dkey, q, factor, dv_old
    else:
        return own, dkey, q, q, q


@triton.jit
def _key_backward(row, slot, valid, column, at_row, slots, da, own, dkey, q, factor, dv_old, dquery, dquery_left, dkeys, dv,
                  real: tl.constexpr, MATH: tl.constexpr, SCORER: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
                  MIXED: tl.constexpr):  # fmt: skip
    """The gradients of keys and query from those of the selected scores."""
    inside = column < D
    own = own.to(real)
    if SCORER == "dot":
        dq = SCALE * tl.sum(da[:, None] * own, 0)
        dkey += da[:, None] * q[None, :]
    else:
        bounded = tanh(own + q[None, :], MATH)
        slope = da[:, None] * factor.to(real)[None, :] * (1 - bounded * bounded)
        dq = tl.sum(slope, 0)
        dkey += slope
        tl.store(dv + row * D + column, dv_old + tl.sum(da[:, None] * bounded, 0), mask=inside)
    gathered = (_wide(row) * slots + slot)[:, None] * D + column[None, :]
    tl.store(dkeys + gathered, dkey, mask=valid[:, None] & inside[None, :])
    tl.store(dquery + at_row * D + column, dq, mask=inside)
    if MIXED:
        tl.store(dquery_left + row * D + column, dq, mask=inside)


@triton.jit
def _read_backward_phase(t, batch, pid, programs, used, chained, carried, kept, seen, first_slots, slots, k_att, cut, store, c, gates, hidden_new, h_hat,
                         query, keys, weights, selected, norms, summary, lengths, w_memory, w_query, v, dstore, dc,
                         dcells, dgates, dhidden, dquery, dkeys, dsummary, dweights, dv, dh_hat, ds_joined, dquery_left,
                         partial, carry, new_carry, real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, SCORER: tl.constexpr,
                         WEIGHTING: tl.constexpr, INCORPORATE: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                         GATES: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr,
                         MIXED: tl.constexpr, PIECE: tl.constexpr, SLICE: tl.constexpr, KEY_PIECE: tl.constexpr,
                         KEY_SLICE: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """From the gradient of h_t to those of the selected microstates, their keys and the query: a slice of a row's units
    and of its query in one tile.

    The gradients of the weights need the whole row, so that the tiles of a row all compute them: none waits for
    another. What is summed up, each tile writes for its slice alone, and nothing that another reads.
    For the affine scorers, whose query's part is no product, the cell's backward is done here as well.
    """
    AFFINE: tl.constexpr = SCORER == "affine" or SCORER == "affine_tanh"
    place = tl.arange(0, PLACES)
    piece = tl.arange(0, PIECE)
    for tile in range(pid, batch * tl.cdiv(N, SLICE), programs):
        row, part = tile % batch, tile // batch
        at_row = _wide(t * batch + row)
        slot = tl.load(selected + at_row * K_TOP + place, mask=place < K_TOP, other=-1)
        valid = slot >= 0  # none in a row that has ended
        slot = tl.maximum(slot, 0)
        weight = tl.load(weights + at_row * K_TOP + place, mask=valid, other=0.0)
        if dweights is not None:
            da = tl.load(dweights + at_row * K_TOP + place, mask=valid, other=0.0)
        else:
            da = tl.zeros((PLACES,), real)
        if not AFFINE and KEY_PIECE >= KEY_SLICE:
            column = part * KEY_SLICE + tl.arange(0, KEY_PIECE)
            own, dkey, q, factor, dv_old = _key_saved(row, slot, valid, column, at_row, slots, query, keys, dkeys, v, dv, SCORER,
                                                      D)  # fmt: skip
        memory = (_wide(_microstate(slot, seen, first_slots, k_att)) * batch + row) * N
        for first in range(0, N, PIECE):
            unit = first + piece
            inside = unit < N
            mine = inside & (unit // SLICE == part)
            gathered = memory[:, None] + unit[None, :]
            states = tl.load(store + gathered, mask=valid[:, None] & inside[None, :], other=0.0)
            dstates = tl.load(dstore + gathered, mask=valid[:, None] & mine[None, :], other=0.0)
            if INCORPORATE == "concat":
                ds = tl.load(ds_joined + row * N + unit, mask=inside, other=0.0)
            else:
                dh = _arriving(t, row, unit, inside, batch, chained, carried, kept, slots, used, store, dstore, partial, carry, dkeys,
                               lengths, w_memory, first_slots + 1 + t, real, MATH, CELL, SCORER, N, SPLITS, K_TOP)  # fmt: skip
                tl.store(dh_hat + row * N + unit, dh, mask=mine)
                ds = dh
                if INCORPORATE == "add_bounded":
                    bounded = tanh(tl.load(summary + at_row * N + unit, mask=inside, other=0.0), MATH)
                    ds = dh * (1 - bounded * bounded)
                if dsummary is not None:
                    ds += tl.load(dsummary + at_row * N + unit, mask=inside, other=0.0)
            tl.store(dstore + gathered, dstates + weight[:, None] * ds[None, :], mask=valid[:, None] & mine[None, :])
            da += tl.sum(states * ds[None, :], 1)
        norm = 1.0
        if WEIGHTING == "relu_norm":
            norm = tl.load(norms + at_row)
        da = tl.where(valid, _weigh_backward(da, weight, tl.minimum(K_TOP, used), norm, WEIGHTING, PLACES), 0.0)
        if AFFINE:
            total = tl.sum(da)
            if part == 0:
                key_at = dkeys + _wide(row) * slots + slot
                tl.store(dquery + at_row, total)
                tl.store(key_at, tl.load(key_at, mask=valid, other=0.0) + da, mask=valid)
            tl.debug_barrier()  # dh_hat was written by other threads perhaps
            for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, N), PIECE):
                unit = first + piece
                inside = (unit < N) & (unit // SLICE == part)
                slope = tl.load(w_query + unit, mask=inside, other=0.0).to(real)
                if SCORER == "affine_tanh":
                    bounded = tanh(tl.load(h_hat + at_row * N + unit, mask=inside, other=0.0), MATH)
                    slope = slope * (1 - bounded * bounded)
                dhat = tl.load(dh_hat + row * N + unit, mask=inside, other=0.0) + total * slope
                s1, s2, s3, s4, s5, s6, s7, s8 = _cell_saved(t, row, unit, inside, batch, store + _wide((first_slots + t) * batch) * N,
                                                             c, gates, hidden_new, dc, dcells, CELL, N, GATES)  # fmt: skip
                _cell_backward(t, row, unit, inside, batch, cut, dhat, s1, s2, s3, s4, s5, s6, s7, s8, dc, dcells, dgates,
                               dhidden, new_carry, real, MATH, CELL, N, GATES)  # fmt: skip
        elif KEY_PIECE >= KEY_SLICE:
            _key_backward(row, slot, valid, column, at_row, slots, da, own, dkey, q, factor, dv_old, dquery, dquery_left, dkeys, dv,
                          real, MATH, SCORER, SCALE, D, MIXED)  # fmt: skip
        else:
            for first in range(part * KEY_SLICE, tl.minimum(part * KEY_SLICE + KEY_SLICE, D), KEY_PIECE):
                column = first + tl.arange(0, KEY_PIECE)
                own, dkey, q, factor, dv_old = _key_saved(row, slot, valid, column, at_row, slots, query, keys, dkeys, v, dv,
                                                          SCORER, D)  # fmt: skip
                _key_backward(row, slot, valid, column, at_row, slots, da, own, dkey, q, factor, dv_old, dquery, dquery_left,
                              dkeys, dv, real, MATH, SCORER, SCALE, D, MIXED)  # fmt: skip


@triton.jit
def _cell_backward_phase(t, batch, pid, programs, used, chained, carried, kept, slots, cut, first_slots, store, c, gates, hidden_new, lengths, w_memory,
                         w_query_t, dstore, dc, dcells, dgates, dhidden, dquery_left, dkeys, dh_hat, partial, carry, new_carry,
                         real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr, SCORER: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                         GATES: tl.constexpr, K_TOP: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """The cell's backward, after the query's product where there was a read."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        row = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        rows, units = row[:, None], unit[None, :]
        inside = (rows < batch) & (units < N)
        s1, s2, s3, s4, s5, s6, s7, s8 = _cell_saved(t, rows, units, inside, batch, store + _wide((first_slots + t) * batch) * N, c,
                                                     gates, hidden_new, dc, dcells, CELL, N, GATES)  # fmt: skip
        if used > 0:
            dhat = tl.load(dh_hat + rows * N + units, mask=inside, other=0.0)
            if K_TOP > 0 and (SCORER == "mlp" or SCORER == "dot"):
                dhat += _apart(_small_product(dquery_left + row * D, w_query_t + unit * D, row < batch, unit < N, real, D, ROWS, COLUMNS,
                                              BLOCK, STAGES, PRECISION))  # fmt: skip
        else:
            dhat = _arriving(t, rows, units, inside, batch, chained, carried, kept, slots, used, store, dstore, partial, carry, dkeys,
                             lengths, w_memory, first_slots + 1 + t, real, MATH, CELL, SCORER, N, SPLITS, K_TOP)  # fmt: skip
        _cell_backward(t, rows, units, inside, batch, cut, dhat, s1, s2, s3, s4, s5, s6, s7, s8, dc, dcells, dgates, dhidden,
                       new_carry, real, MATH, CELL, N, GATES)  # fmt: skip


@triton.jit
def _concat_gradient_phase(t, batch, pid, programs, used, chained, carried, kept, slots, first_slots, store, dstore, partial, carry, dkeys, lengths,
                           w_memory, dincorporated, dh_left, real: tl.constexpr, MATH: tl.constexpr, CELL: tl.constexpr,
                           SCORER: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, K_TOP: tl.constexpr,
                           MIXED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The gradient of h_t, as the left factor of `_concat_backward_phase`."""
    row_tiles = tl.cdiv(batch, ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        rows = (tile % row_tiles * ROWS + tl.arange(0, ROWS))[:, None]
        units = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (rows < batch) & (units < N)
        dh = _arriving(t, rows, units, inside, batch, chained, carried, kept, slots, used, store, dstore, partial, carry, dkeys, lengths,
                       w_memory, first_slots + 1 + t, real, MATH, CELL, SCORER, N, SPLITS, K_TOP)  # fmt: skip
        tl.store(dincorporated + _wide(t * batch) * N + rows * N + units, dh, mask=inside)
        if MIXED:
            tl.store(dh_left + rows * N + units, dh, mask=inside)


@triton.jit
def _concat_backward_phase(t, batch, pid, programs, dh_left, w_incorporate_t, dh_hat, dsummary, ds_joined, real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr,
                           ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                           PRECISION: tl.constexpr):  # fmt: skip
    """W_c^T dh: the gradients of ĥ_t and of the summary."""
    row_tiles, unit_tiles = tl.cdiv(batch, ROWS), tl.cdiv(N, COLUMNS)
    for tile in range(pid, row_tiles * unit_tiles * 2, programs):
        half, place = tile % 2, tile // 2
        row = place % row_tiles * ROWS + tl.arange(0, ROWS)
        unit = place // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < batch)[:, None] & (unit < N)[None, :]
        at = row[:, None] * N + unit[None, :]
        sums = _small_product(dh_left + row * N, w_incorporate_t + (half * N + unit) * N, row < batch, unit < N, real, N, ROWS,
                              COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
        sums = _apart(sums)
        if dsummary is not None:
            sums += tl.load(dsummary + _wide(t * batch) * N + at, mask=_also(inside, half == 1), other=0.0)
        tl.store(dh_hat + at, sums, mask=_also(inside, half == 0))
        tl.store(ds_joined + at, sums, mask=_also(inside, half == 1))


@triton.jit(do_not_specialize=["steps", "batch", "seen", "first_slots", "slots", "k_att", "k_trunc"])
def backward_kernel(store, c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary, lengths,
                    w_hh_t, w_memory, w_memory_t, w_query, w_query_t, v, w_incorporate_t,
                    dstore, dc, dcells, dgates, dhidden, dquery, dkeys, dsummary, dweights, dincorporated, dv,
                    dh_hat, dh_left, ds_joined, dquery_left, dkeys_left, partial, carry, counter,
                    steps, batch, seen, first_slots, slots, k_att, k_trunc,
                    CELL: tl.constexpr, SCORER: tl.constexpr, WEIGHTING: tl.constexpr, INCORPORATE: tl.constexpr,
                    N: tl.constexpr, D: tl.constexpr, GATES: tl.constexpr, K_TOP: tl.constexpr, PLACES: tl.constexpr,
                    SCALE: tl.constexpr, MIXED: tl.constexpr, MATH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
                    SPLITS: tl.constexpr, QUERY_ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
                    SLICE: tl.constexpr, KEY_PIECE: tl.constexpr, KEY_SLICE: tl.constexpr,
                    BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    real: tl.constexpr = store.dtype.element_ty
    AFFINE: tl.constexpr = SCORER == "affine" or SCORER == "affine_tanh"
    pid, programs = tl.program_id(0), tl.num_programs(0)
    goal = programs
    # Whether `partial` holds anything of the step's gradient, and whether the chain is part of that.
    carried = steps < 0
    chained = _keeps(steps - 1, seen, k_att, K_TOP)
    if K_TOP > 0 and not AFFINE:
        if chained:
            if MIXED:
                _round_phase(slots - 1, batch, pid, programs, slots, dkeys, dkeys_left, D, QUERY_ROWS, COLUMNS)
                goal = _meet(counter, goal, programs)
            _chain_phase(steps, batch, pid, programs, carried, chained, slots - 1, slots, partial, dhidden, dkeys, dkeys_left, w_hh_t, w_memory_t,
                         real, MATH, MIXED, SCORER, K_TOP, N, D, GATES, SPLITS, ROWS, UNITS, BLOCK, STAGES, PRECISION)  # fmt: skip
            goal = _meet(counter, goal, programs)
    for back in range(steps):
        t = steps - 1 - back
        used = _slots_at(t, seen, first_slots, k_att, K_TOP)
        kept = _keeps(t, seen, k_att, K_TOP)
        cut = _cut_before(t, seen, k_trunc)
        from_keys = kept
        if AFFINE:
            from_keys = carried
        there = carried | from_keys
        old_carry, new_carry = carry, carry
        if CELL == "gru":
            # In turn, since slices of a row read all of it while others write.
            old_carry, new_carry = carry + (t + 1) % 2 * batch * N, carry + t % 2 * batch * N
        if K_TOP > 0:
            if used > 0:
                if INCORPORATE == "concat":
                    dh = dincorporated + _wide(t * batch) * N
                    if MIXED:
                        dh = dh_left
                    _concat_gradient_phase(t, batch, pid, programs, used, there, carried, kept, slots, first_slots, store, dstore,
                                           partial, old_carry, dkeys, lengths, w_memory, dincorporated, dh_left, real, MATH, CELL,
                                           SCORER, N, SPLITS, K_TOP, MIXED, QUERY_ROWS, COLUMNS)  # fmt: skip
                    goal = _meet(counter, goal, programs)
                    _concat_backward_phase(t, batch, pid, programs, dh, w_incorporate_t, dh_hat, dsummary, ds_joined, real, MATH, N, QUERY_ROWS, COLUMNS,
                                           BLOCK, STAGES, PRECISION)  # fmt: skip
                    goal = _meet(counter, goal, programs)
                _read_backward_phase(t, batch, pid, programs, used, there, carried, kept, seen, first_slots, slots, k_att, cut, store,
                                     c, gates, hidden_new, h_hat, query, keys, weights, selected, norms, summary,
                                     lengths, w_memory, w_query, v, dstore, dc, dcells, dgates, dhidden, dquery, dkeys,
                                     dsummary, dweights, dv, dh_hat, ds_joined, dquery_left, partial, old_carry, new_carry, real, MATH, CELL, SCORER,
                                     WEIGHTING, INCORPORATE, N, D, GATES, K_TOP, PLACES, SCALE, MIXED, PIECE, SLICE,
                                     KEY_PIECE, KEY_SLICE, SPLITS)  # fmt: skip
                goal = _meet(counter, goal, programs)
        if MIXED or K_TOP == 0 or AFFINE:
            dq_left = dquery_left
        else:
            dq_left = dquery + _wide(t * batch) * D
        if AFFINE:
            alone = used == 0
        else:
            alone = used >= 0
        kept_before = _keeps(t - 1, seen, k_att, K_TOP) & (t > 0)
        if AFFINE:
            kept_before = t < 0
        if alone:
            if MIXED and K_TOP > 0 and not AFFINE:
                if kept_before:
                    _round_phase(used - 1, batch, pid, programs, slots, dkeys, dkeys_left, D, QUERY_ROWS, COLUMNS)
            _cell_backward_phase(t, batch, pid, programs, used, there, carried, kept, slots, cut, first_slots, store, c, gates,
                                 hidden_new, lengths, w_memory, w_query_t, dstore, dc, dcells, dgates, dhidden, dq_left,
                                 dkeys, dh_hat, partial, old_carry, new_carry, real, MATH, CELL, SCORER, N, D, GATES, K_TOP, SPLITS,
                                 QUERY_ROWS, COLUMNS, BLOCK, STAGES, PRECISION)  # fmt: skip
            goal = _meet(counter, goal, programs)
        carried = cut == 0
        if carried | kept_before:
            _chain_phase(t, batch, pid, programs, carried, kept_before, used - 1, slots, partial, dhidden, dkeys, dkeys_left, w_hh_t,
                         w_memory_t, real, MATH, MIXED, SCORER, K_TOP, N, D, GATES, SPLITS, ROWS, UNITS, BLOCK, STAGES, PRECISION)  # fmt: skip
            goal = _meet(counter, goal, programs)
    # The gradient of the state that came in.
    row_tiles = tl.cdiv(batch, QUERY_ROWS)
    for tile in range(pid, row_tiles * tl.cdiv(N, COLUMNS), programs):
        rows = (tile % row_tiles * QUERY_ROWS + tl.arange(0, QUERY_ROWS))[:, None]
        units = (tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (rows < batch) & (units < N)
        at = rows * N + units
        dh_at = dstore + _wide(first_slots * batch) * N + at
        dh = tl.load(dh_at, mask=inside, other=0.0)
        for split in tl.static_range(SPLITS):
            dh += tl.load(partial + split * batch * N + at, mask=_also(inside, carried), other=0.0)
        if CELL == "gru":
            dh += tl.load(carry + at, mask=_also(inside, carried), other=0.0)
        tl.store(dh_at, dh, mask=inside)


# Launch


def forward(plan: Plan, weights: Weights, buffers: dict[str, Any], *, tf32: bool | None = None) -> None:
    """Fill the buffers; tf32 says whether factors of float32 products may be rounded to TF32 (None: as set in PyTorch)."""
    store, keys = buffers["store"], buffers["keys"]
    options = _options(plan, keys.dtype, tf32, store.device)
    tiles = _forward_tiles(plan, _multiprocessors(store.device))
    batch, n, mixed = plan.batch, plan.n, options["MIXED"]
    h_left = h_hat_left = summary_left = partial = best_key = best_slot = None
    if mixed:
        # The states once more in the products' type, read by all programs in each step: half the bytes.
        h_left, h_hat_left = keys.new_empty(2, batch, n), keys.new_empty(batch, n)
        summary_left = keys.new_empty(batch, n) if plan.config.incorporate == "concat" else None
        h_left[0] = store[plan.first_slots]
    if plan.is_affine:
        slices = triton.cdiv(n, tiles["SLICE"])
        best_key = store.new_empty(slices, batch, options["PLACES"])
        best_slot = torch.empty(best_key.shape, dtype=torch.int32, device=store.device)
    elif plan.config.k_top > 0:
        partial = store.new_empty(triton.cdiv(plan.key_size, tiles["COLUMNS"]), batch, plan.slots)
    forward_kernel[_grid(plan, tiles, store.device)](
        *(buffers[name] for name in FORWARD),
        buffers["lengths"],
        *weights,
        h_left,
        h_hat_left,
        summary_left,
        partial,
        best_key,
        best_slot,
        torch.zeros(1, dtype=torch.int32, device=store.device),
        plan.steps,
        batch,
        plan.seen,
        plan.first_slots,
        plan.slots,
        plan.config.k_att,
        0 if weights.scorer_bias is None else len(weights.scorer_bias),
        **options,
        **tiles,
        **LAUNCH,
    )


def backward(
    plan: Plan, weights: Weights, buffers: dict[str, Any], work: dict[str, Any], *, tf32: bool | None = None
) -> None:
    """Fill what `work` is to hold after the loop; tf32 as in `forward`."""
    store, keys = buffers["store"], buffers["keys"]
    options = _options(plan, keys.dtype, tf32, store.device)
    tiles = _backward_tiles(plan, _multiprocessors(store.device))
    batch, n, mixed = plan.batch, plan.n, options["MIXED"]
    affine, is_concat = plan.is_affine, plan.config.incorporate == "concat"
    dquery_left = dkeys_left = None
    if mixed and not affine and plan.config.k_top > 0:
        dquery_left, dkeys_left = keys.new_empty(2, batch, plan.key_size).unbind()
    backward_kernel[_grid(plan, tiles, store.device)](
        *(buffers[name] for name in FORWARD),
        buffers["lengths"],
        _transposed(weights.w_hh),
        weights.w_memory,
        None if affine else _transposed(weights.w_memory),
        weights.w_query,
        None if affine else _transposed(weights.w_query),
        weights.v,
        _transposed(weights.w_incorporate),
        *(work[name] for name in BACKWARD),
        store.new_empty(batch, n),
        keys.new_empty(batch, n) if mixed and is_concat else None,
        store.new_empty(batch, n) if is_concat else None,
        dquery_left,
        dkeys_left,
        store.new_empty(tiles["SPLITS"], batch, n),
        store.new_empty(2, batch, n) if plan.cell == "gru" else None,
        torch.zeros(1, dtype=torch.int32, device=store.device),
        plan.steps,
        batch,
        plan.seen,
        plan.first_slots,
        plan.slots,
        plan.config.k_att,
        plan.config.k_trunc or 0,
        **options,
        **tiles,
        **LAUNCH,
    )


FORWARD = "store c gates hidden_new h_hat query keys weights selected norms summary".split()
BACKWARD = "dstore dc dcells dgates dhidden dquery dkeys dsummary dweights dincorporated dv".split()
# All programs run at the same time or none does: otherwise they could wait for one that never starts.
LAUNCH = {"num_warps": 4, "launch_cooperative_grid": True}


def _transposed(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.t().contiguous()


def _multiprocessors(device: torch.device) -> int:
    return 8 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _options(plan: Plan, compute: torch.dtype, tf32: bool | None, device: torch.device) -> dict[str, Any]:
    """What the kernels are compiled for, besides the tiles."""
    config = plan.config
    tf32 = allow_tf32() if tf32 is None else tf32
    is_exact = compute == torch.float64 or (compute == torch.float32 and not tf32)
    return {
        "CELL": plan.cell,
        "SCORER": config.scorer if config.k_top > 0 else "none",
        "WEIGHTING": config.weighting,
        "INCORPORATE": config.incorporate,
        "N": plan.n,
        "D": plan.key_size,
        "GATES": GATES[plan.cell],
        "K_TOP": config.k_top,
        "PLACES": triton.next_power_of_2(max(config.k_top, 1)),
        "SCALE": 1 / math.sqrt(max(plan.key_size, 1)),
        "MIXED": compute.itemsize == 2,
        "MATH": "plain" if INTERPRETED else "accurate" if is_exact else "approximate",
        "PRECISION": "ieee" if is_exact else "tf32",
        "STAGES": 4,
        "BLOCK": max(_at_most(256 // compute.itemsize, plan.n), 32),
    }


def _at_most(size: int, needed: int) -> int:
    """A power of two that covers what is needed, but not above size; at least 16."""
    return max(16, min(size, triton.next_power_of_2(needed)))


def _fewest(tiles_of: Any, sizes: tuple[int, ...], programs: int) -> int:
    """The smallest size whose tiles the programs can take all at once, or the largest."""
    return next((size for size in sizes if tiles_of(size) <= programs), sizes[-1])


def _common_tiles(plan: Plan, programs: int) -> dict[str, int]:
    outputs = max(plan.n, plan.key_size)
    rows = _at_most(64, plan.batch)
    query_rows = _fewest(lambda r: triton.cdiv(plan.batch, r) * triton.cdiv(outputs, 16), (16, 32), programs)
    columns = _fewest(lambda c: triton.cdiv(plan.batch, query_rows) * triton.cdiv(outputs, c), (16, 32, 64), programs)
    slices = max(programs // plan.batch, 1)
    slice_ = max(triton.next_power_of_2(triton.cdiv(plan.n, slices)), 16 if INTERPRETED else 128)
    return {"ROWS": rows, "QUERY_ROWS": query_rows, "COLUMNS": columns, "SLICE": slice_}


def _forward_tiles(plan: Plan, programs: int) -> dict[str, int]:
    """Sizes of the forward's tiles, such that in each phase about as many programs work as there are."""
    tiles = _common_tiles(plan, programs)
    row_tiles = triton.cdiv(plan.batch, tiles["ROWS"])
    sizes = (4, 8, 16, 32) if GATES[plan.cell] > 1 else (16, 32, 64)
    places = triton.next_power_of_2(max(plan.config.k_top, 1))
    tiles["PIECE"] = _at_most(8192 // places, tiles["SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(plan.n, units), sizes, programs)
    tiles["SLOTS"] = 16
    tiles["CANDIDATES"] = 64
    return tiles


def _backward_tiles(plan: Plan, programs: int) -> dict[str, int]:
    """As `_forward_tiles`, for the backward."""
    tiles = _common_tiles(plan, programs)
    places = triton.next_power_of_2(max(plan.config.k_top, 1))
    row_tiles = triton.cdiv(plan.batch, tiles["ROWS"])
    tiles["PIECE"] = _at_most(min(8192 // places, 1024), plan.n)
    key_slice = triton.cdiv(plan.key_size, triton.cdiv(plan.n, tiles["SLICE"]))
    tiles["KEY_SLICE"] = max(triton.next_power_of_2(key_slice), 16)
    tiles["KEY_PIECE"] = _at_most(8192 // places, tiles["KEY_SLICE"])
    tiles["UNITS"] = _fewest(lambda units: row_tiles * triton.cdiv(plan.n, units), (32, 64), programs)
    tiles["SPLITS"] = max(1, min(programs // (row_tiles * triton.cdiv(plan.n, tiles["UNITS"])), 4))
    return tiles


def _grid(plan: Plan, tiles: dict[str, int], device: torch.device) -> tuple[int]:
    """As many programs as any phase has tiles for, and run at the same time."""
    if INTERPRETED:
        return (1,)
    outputs = max(plan.n, plan.key_size)
    phases = [
        triton.cdiv(plan.batch, tiles["QUERY_ROWS"]) * triton.cdiv(outputs, tiles["COLUMNS"]),
        triton.cdiv(plan.batch, tiles["ROWS"]) * triton.cdiv(plan.n, tiles["UNITS"]) * tiles.get("SPLITS", 1),
        plan.batch * triton.cdiv(plan.n, tiles["SLICE"]),
    ]
    return (min(max(phases), _multiprocessors(device)),)
