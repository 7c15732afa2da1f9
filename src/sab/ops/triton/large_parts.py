# type: ignore
"""What the kernels for large hidden sizes share: meetings of programs, products of tiles, selection."""

import triton
import triton.language as tl

from sab.ops.triton.access import RADIANS, angles
from sab.ops.triton.functions import kept_row

NOWHERE = tl.constexpr(1 << 30)
"""The slot of an empty place among the best."""
WAIT = tl.constexpr("""{
    .reg .pred %is_other, %is_early; .reg .b32 %thread, %came;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %is_other, %thread, 0;
    @%is_other bra DONE;
    red.release.gpu.global.add.u32 [$1], 1;
    WAIT: ld.acquire.gpu.global.u32 %came, [$1];
    setp.lt.s32 %is_early, %came, $2;
    @%is_early bra WAIT;
    DONE: mov.u32 $0, 0;
}""")
"""The first thread of a program adds 1 to a counter, and reads it until it has reached a goal. (Reading it by an atomic
would keep other programs' additions waiting.)"""


@triton.jit
def rounded(x):
    """Float32 rounded to TF32's mantissa. Tensor cores cut off what is beyond it, which makes all products smaller."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)


@triton.jit
def store_factor(pointer, value, mask, MIXED: tl.constexpr = True):
    """Store a product's factor as what it is multiplied as; where products are not MIXED, as it is."""
    if MIXED and pointer.dtype.element_ty == tl.float32:
        value = rounded(value)
    tl.store(pointer, value, mask=mask)


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
        tl.inline_asm_elementwise(WAIT, "=r,l,r", [counter.to(tl.int64), goal], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return goal + programs


@triton.jit
def _factor(rows, mask, column, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """The given columns of a factor's rows, [R, BLOCK]."""
    mask = mask[:, None]
    if INNER % BLOCK != 0:
        mask = mask & (column < INNER)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _add(sums, a, b, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """sums + a bᵀ."""
    if (PRECISION == "ieee") & (b.dtype == sums.dtype):
        # Block by block, as rounding grows with the numbers added one after another. (The last argument is nothing to
        # these types, but keeps the compiler from adding to the sums themselves.)
        zero = tl.zeros(sums.shape, sums.dtype)
        return sums + tl.dot(a, tl.trans(b), zero, input_precision="ieee", max_num_imprecise_acc=BLOCK,
                             out_dtype=sums.dtype)  # fmt: skip
    else:
        return tl.dot(a.to(b.dtype), tl.trans(b), sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def _step(sums, left, right, left_mask, right_mask, column, INNER: tl.constexpr, BLOCK: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """A step of `product`, over the given columns."""
    a, b = _factor(left, left_mask, column, INNER, BLOCK), _factor(right, right_mask, column, INNER, BLOCK)
    return _add(sums, a, b, BLOCK, PRECISION)


@triton.jit
def product(sums, left, right, left_mask, right_mask, first, last, INNER: tl.constexpr, BLOCK: tl.constexpr,
            STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """sums [R, C] plus the product of rows `left` [R] and `right` [C] (where they begin), from column first to last."""
    for k in tl.range(first, last, BLOCK, num_stages=STAGES):
        sums = _step(sums, left, right, left_mask, right_mask, k + tl.arange(0, BLOCK), INNER, BLOCK, PRECISION)
    return sums


@triton.jit
def two_products(sums, others, left, right, other, left_mask, right_mask, other_mask, INNER: tl.constexpr,
                 BLOCK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """As `product` over all columns, of the same `left` with `right` and with `other`."""
    for k in tl.range(0, INNER, BLOCK, num_stages=STAGES):
        column = k + tl.arange(0, BLOCK)
        a = _factor(left, left_mask, column, INNER, BLOCK)
        b, c = _factor(right, right_mask, column, INNER, BLOCK), _factor(other, other_mask, column, INNER, BLOCK)
        sums, others = _add(sums, a, b, BLOCK, PRECISION), _add(others, a, c, BLOCK, PRECISION)
    return sums, others


@triton.jit
def whole_product(left, right, left_mask, right_mask, real: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
                  PRECISION: tl.constexpr):  # fmt: skip
    """`product` over all columns."""
    return product(tl.zeros((ROWS, COLUMNS), real), left, right, left_mask, right_mask, 0, INNER, INNER, BLOCK, STAGES,
                   PRECISION)  # fmt: skip


@triton.jit
def apart(sums):
    """A product's sums, no longer laid out as the product left them.

    Otherwise the compiler takes that layout for all that the sums meet, and changes each load and store around it.
    """
    return tl.sum(sums[:, :, None], 2)


@triton.jit
def _fetch_line(pointer, mask):
    """Asks for lines of 128 bytes to come into the second cache, and waits for none."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointer.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_ahead(rows, valid, first, last, SIZE: tl.constexpr):
    """Asks for numbers first.. to last, SIZE at most, of rows that begin at `rows` [R], where they are valid."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    at = first + tl.arange(0, max(SIZE // LINE, 1)) * LINE
    _fetch_line(rows[:, None] + at[None, :], valid[:, None] & (at < last)[None, :])


# The memory


@triton.jit
def turned(x, cosine, sine):
    """x [..., C] with pairs of neighbouring columns turned, the first of them an even one; turned back where the sine
    is negated."""
    even, odd = tl.split(tl.reshape(x, (x.numel // 2, 2)))
    return x * cosine + tl.reshape(tl.join(odd, even), x.shape) * sine


@triton.jit
def turns(step, column, rate, real: tl.constexpr, MATH: tl.constexpr):
    """`angles`; by the hardware's own functions, as exact as float32 between -π and π but near 0, where factors are
    rounded anyway."""
    if MATH == "approximate" or MATH == "formula":
        angle = (rate.to(tl.int64) * step).to(tl.int32).to(real) * RADIANS
        cosine, sine = tl.inline_asm_elementwise("cos.approx.f32 $0, $2; sin.approx.f32 $1, $2;", "=&f,=f,f", [angle],
                                                 dtype=(tl.float32, tl.float32), is_pure=True, pack=1)  # fmt: skip
        return cosine, tl.where(column % 2 == 0, -sine, sine)
    else:
        return angles(step, column, rate, real)


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
def taken(vector, j: tl.constexpr, PLACES: tl.constexpr):
    """The number at place j."""
    return tl.sum(tl.where(tl.arange(0, PLACES) == j, vector, 0), 0)


@triton.jit
def sums_of(vectors, COUNT: tl.constexpr, PLACES: tl.constexpr):
    """The sums of COUNT vectors, a power of two, as often one after another as there are places for."""
    LENGTH: tl.constexpr = vectors[0].shape[0]
    for level in tl.static_range(5):
        if COUNT >> level > 1:
            joined = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                joined = joined + (tl.join(vectors[i], vectors[i + (COUNT >> (level + 1))]),)
            vectors = joined
    sums = tl.sum(tl.reshape(vectors[0], (LENGTH, COUNT)), 0)
    return tl.reshape(tl.broadcast_to(sums[None, :], (PLACES // COUNT, COUNT)), (PLACES,))


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
