# type: ignore

"""What the kernels for small hidden sizes share: products of a weight with a vector, rows gathered from memory.

A vector over units is laid out as [units / 16, 16], a warp a row. The selected microstates lie as [units / 16, 16, 8]
where products have their columns, eight of them at a time; lists that all warps need are equal in each first row.
"""

import triton
import triton.language as tl

from sab.ops.triton.access import get
from sab.ops.triton.functions import kept_row

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
def product_of_gates(weights, vectors, zero, TYPE: tl.constexpr):
    """The sum of two to four products, whose vectors share one right operand: gate g's are columns g and g + 4."""
    LAST: tl.constexpr = len(weights) - 1
    P: tl.constexpr = weights[0].shape[2]
    third = zero
    fourth = zero
    if LAST >= 2:
        third = vectors[2]
    if LAST >= 3:
        fourth = vectors[3]
    x, scale = into_range(tl.join(tl.join(vectors[0], third), tl.join(vectors[1], fourth)).reshape(P * 4), TYPE)
    right = tl.broadcast_to(x.reshape(P, 1, 4), (P, 2, 4)).reshape(1, P, 8)
    right = tl.broadcast_to(right, (weights[0].shape[0], P, 8))
    gate = (tl.arange(0, 8) % 4)[None, None, :]
    sums = tl.dot(weights[LAST], right)  # what has no gate is multiplied with 0
    for g in tl.static_range(LAST):
        sums = tl.where(gate == g, tl.dot(weights[g], right), sums)
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


@triton.jit
def inverse_length(x, size: tl.constexpr, SMALLEST_SQUARE: tl.constexpr):
    """1 / the length of a vector [P / 16, 16] of which `size` entries are in use, finite also for 0."""
    return 1.0 / tl.sqrt(inner(x, x) + SMALLEST_SQUARE * size)


@triton.jit
def turned(x, cosine, sine):
    """A vector [P / 16, 16] whose pairs of entries are turned; with -sine they are turned back."""
    even, odd = tl.split(x.reshape(x.shape[0], 8, 2))
    return x * cosine + tl.join(odd, even).reshape(x.shape[0], 16) * sine


# The memory


@triton.jit
def rows_of(slots, first_slots, seen, k_att, batch, row):
    """The rows of `store`, its first two dimensions taken as one, with the microstates of slots; -1 where slot is."""
    at = tl.where(slots < first_slots, slots, kept_row(slots, seen, first_slots, k_att))
    return tl.where(slots >= 0, at * batch + row.to(tl.int32), -1)


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
