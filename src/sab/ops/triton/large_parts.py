# type: ignore
"""What the kernels for large hidden sizes share: meetings of programs, products of tiles, selection."""

import triton
import triton.language as tl

from sab.ops.triton import parts

NOWHERE = tl.constexpr(1 << 30)
"""The slot of an empty place among the best."""


@triton.jit
def tanh(x, MATH: tl.constexpr):
    """As `parts.tanh`; with MATH "formula" by one that is nearly as accurate as CUDA's library and has no branches."""
    if MATH == "formula":
        square = x * x
        series = 62 / 2835 * square - 17 / 315
        series = (series * square + 2 / 15) * square - 1 / 3
        small = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2|x|), which never overflows
        bounded = (1.0 - small) / (1.0 + small)
        bounded = tl.where(x < 0, -bounded, bounded)
        return tl.where(square < 0.0625, x + x * square * series, bounded)  # where 1 - small loses digits
    else:
        return parts.tanh(x, MATH)


@triton.jit
def sigmoid(x, MATH: tl.constexpr):
    return parts.sigmoid(x, MATH)


@triton.jit
def rounded(x):
    """Float32 rounded to TF32's mantissa. Tensor cores cut off what is beyond it, which makes all products smaller."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)


@triton.jit
def store_factor(pointer, value, mask):
    """Store a product's left factor as what it is multiplied as."""
    if pointer.dtype.element_ty == tl.float32:
        value = rounded(value)
    tl.store(pointer, value, mask=mask)


@triton.jit(do_not_specialize=["size"])
def round_kernel(values, factors, size, BLOCK: tl.constexpr):
    """The values as factors of products in TF32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    store_factor(factors + at, tl.load(values + at, mask=at < size, other=0.0), at < size)


@triton.jit
def wide(x):
    return tl.cast(x, tl.int64)


@triton.jit
def also(mask, flag):
    """mask & flag, where flag is one truth value for all (a plain & of these two fails in Triton's interpreter)."""
    return (mask.to(tl.int32) * tl.cast(flag, tl.int32)) != 0


@triton.jit
def meet(counter, goal, programs):
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
    """A step of `product`, over the given columns."""
    left_mask, right_mask = left_mask[:, None], right_mask[:, None]
    if INNER % BLOCK != 0:
        left_mask, right_mask = left_mask & (column < INNER)[None, :], right_mask & (column < INNER)[None, :]
    a = tl.load(left[:, None] + column[None, :], mask=left_mask, other=0.0)
    b = tl.load(right[:, None] + column[None, :], mask=right_mask, other=0.0)
    if (PRECISION == "ieee") & (b.dtype == sums.dtype):
        # Block by block, as rounding grows with the numbers added one after another. (The last argument is nothing to
        # these types, but keeps the compiler from adding to the sums themselves.)
        zero = tl.zeros(sums.shape, sums.dtype)
        return sums + tl.dot(a, tl.trans(b), zero, input_precision="ieee", max_num_imprecise_acc=BLOCK,
                             out_dtype=sums.dtype)  # fmt: skip
    else:
        return tl.dot(a.to(b.dtype), tl.trans(b), sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def product(sums, left, right, left_mask, right_mask, first, last, INNER: tl.constexpr, BLOCK: tl.constexpr,
            STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sums [R, C] plus the product of rows `left` [R] and `right` [C] (where they begin), from column first to last."""
    for k in tl.range(first, last, BLOCK, num_stages=STAGES):
        sums = _step(sums, left, right, left_mask, right_mask, k + tl.arange(0, BLOCK), INNER, BLOCK, PRECISION)
    return sums


@triton.jit
def small_product(left, right, left_mask, right_mask, real: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """As `product` over all columns, for tiles so small that a step waits for the one before: four sums in turn."""
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
def apart(sums):
    """A product's sums, no longer laid out as the product left them.

    Otherwise the compiler takes that layout for all that the sums meet, and changes each load and store around it.
    """
    return tl.sum(sums[:, :, None], 2)


# The memory's bookkeeping


@triton.jit
def slots_at(t, seen, first_slots, k_att, K_TOP: tl.constexpr):
    """How many slots are in use when step t reads."""
    return first_slots + (seen + t) // k_att - seen // k_att if K_TOP > 0 else 0 * seen


@triton.jit
def keeps(t, seen, k_att, K_TOP: tl.constexpr):
    return (K_TOP > 0) & ((seen + t + 1) % k_att == 0)


@triton.jit
def cut_before(t, seen, k_trunc):
    return (k_trunc > 0) & (seen + t > 0) & ((seen + t) % tl.maximum(k_trunc, 1) == 0)


@triton.jit
def microstate(slot, seen, first_slots, k_att):
    """Row of `store` with the microstate of a slot."""
    kept = first_slots + 1 + k_att - 1 - seen % k_att + (slot - first_slots) * k_att
    return tl.where(slot < first_slots, slot, kept)


@triton.jit
def _ahead(score, slot, other, other_slot):
    return (score > other) | ((score == other) & (slot < other_slot))


@triton.jit
def merge(best, best_slot, score, slot, PLACES: tl.constexpr):
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
def top(score, slot, PLACES: tl.constexpr):
    """`merge` where none are held yet and there are at least PLACES candidates."""
    score = tl.where(score == score, score, float("-inf"))
    rank = tl.sum(_ahead(score[:, None], slot[:, None], score[None, :], slot[None, :]).to(tl.int32), 0)
    new = rank[:, None] == tl.arange(0, PLACES)[None, :]
    return tl.sum(tl.where(new, score[:, None], 0.0), 0), tl.sum(tl.where(new, slot[:, None], 0), 0)


@triton.jit
def weigh(score, k, WEIGHTING: tl.constexpr, PLACES: tl.constexpr):
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
def weigh_backward(da, weight, k, norm, WEIGHTING: tl.constexpr, PLACES: tl.constexpr):
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
def linear(row, w, real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr):
    """w·h, or w·tanh(h), of one row."""
    unit = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), real)
    for first in range(0, N, WIDTH):
        h = tl.load(row + first + unit, mask=first + unit < N, other=0.0)
        if BOUNDED:
            h = tanh(h, MATH)
        sums += h * tl.load(w + first + unit, mask=first + unit < N, other=0.0).to(real)
    return tl.sum(sums)
