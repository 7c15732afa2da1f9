# type: ignore
"""What the kernels for large hidden sizes share: meetings of programs, products of tiles, selection."""

import triton
import triton.language as tl

from sab.ops.triton.functions import kept_row

NOWHERE = tl.constexpr(1 << 30)
"""The slot of an empty place among the best."""


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


# The memory


@triton.jit
def turned(x, cosine, sine):
    """x [..., C] with pairs of neighbouring columns turned, the first of them an even one; turned back where the sine
    is negated."""
    even, odd = tl.split(tl.reshape(x, (x.numel // 2, 2)))
    return x * cosine + tl.reshape(tl.join(odd, even), x.shape) * sine


@triton.jit
def microstate(slot, seen, first_slots, k_att):
    """Row of `store` with the microstate of a slot."""
    return tl.where(slot < first_slots, slot, kept_row(slot, seen, first_slots, k_att))


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
def linear(row, w, real: tl.constexpr, MATH: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, MARK: tl.constexpr):
    """w·h of one row, or w·mark(h)."""
    unit = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), real)
    for first in range(0, N, WIDTH):
        h = tl.load(row + first + unit, mask=first + unit < N, other=0.0)
        if MARK is not None:
            h = MARK(h, MATH)
        sums += h * tl.load(w + first + unit, mask=first + unit < N, other=0.0).to(real)
    return tl.sum(sums)
