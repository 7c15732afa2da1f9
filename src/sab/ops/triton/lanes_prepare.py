# type: ignore
"""What comes before the loops of `lanes_forward` and `lanes_backward`, in one kernel: packed and converted weights."""

import triton
import triton.language as tl


@triton.jit
def place_of(entry, P: tl.constexpr):
    """The row and the column of an entry of a packed matrix, as `lanes.load_matrix` takes it."""
    group = entry // 256
    quad = entry // 8 % 32
    last = entry % 8
    row = group // (P // 16) * 16 + last // 2 % 2 * 8 + quad // 4
    group = group % (P // 16)
    return row, group // 2 * 32 + quad % 4 * 8 + group % 2 * 4 + last // 4 * 2 + last % 2


@triton.jit
def convert(source, target, block, count, BLOCK: tl.constexpr):
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count, other=0).to(target.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["w_ih_count", "bias_count", "x_count"])
def lanes_prepare_kernel(
    w_hh, w_query, w_memory, w_incorporate, w_ih, b_ih, b_hh, x, packed, w_ih_to, bias_to, x_to,
    w_ih_count, bias_count, x_count,
    n: tl.constexpr, d: tl.constexpr, GATES: tl.constexpr, MAPPED: tl.constexpr, P: tl.constexpr,
    JOINS_BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills `packed` [2 M + 1, P, P]: M matrices of the forward loop, the most needed first, the same transposed for
    the backward loop, and zeros; and makes what the product with the input takes. A count is 0 where there is nothing
    to convert."""
    COUNT: tl.constexpr = GATES + 2 + 2 * MAPPED
    BLOCKS: tl.constexpr = P * P // BLOCK  # of a matrix
    block = tl.program_id(0)
    if block < 2 * COUNT * BLOCKS:
        which = block // BLOCKS % COUNT
        entry = block % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        unit, other = place_of(entry, P)
        is_transposed = block >= COUNT * BLOCKS
        row = tl.where(is_transposed, other, unit)
        column = tl.where(is_transposed, unit, other)
        here = (row < n) & (column < n)
        there = (row < d) & (column < n)
        if which < GATES:
            value = tl.load(w_hh + (which * n + row) * n + column, mask=here, other=0)
        elif which == GATES:
            value = tl.load(w_query + row * n + column, mask=there, other=0)
        elif which == COUNT - 1:
            value = tl.load(w_memory + row * n + column, mask=there, other=0)
        else:  # its part for the summary, then that for the state
            value = tl.load(w_incorporate + row * 2 * n + (GATES + 2 - which) * n + column, mask=here, other=0)
        tl.store(packed + block * BLOCK + tl.arange(0, BLOCK), value.to(packed.dtype.element_ty))
        return
    block -= 2 * COUNT * BLOCKS
    if block < BLOCKS:
        at = packed + 2 * COUNT * P * P + block * BLOCK + tl.arange(0, BLOCK)
        tl.store(at, tl.zeros((BLOCK,), packed.dtype.element_ty))
        return
    block -= BLOCKS
    w_ih_blocks = tl.cdiv(w_ih_count, BLOCK)
    if block < w_ih_blocks:
        convert(w_ih, w_ih_to, block, w_ih_count, BLOCK)
        return
    block -= w_ih_blocks
    bias_blocks = tl.cdiv(bias_count, BLOCK)
    if block < bias_blocks:
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(b_ih + at, mask=at < bias_count, other=0)
        if JOINS_BIASES:
            value += tl.load(b_hh + at, mask=at < bias_count, other=0)
        tl.store(bias_to + at, value.to(bias_to.dtype.element_ty), mask=at < bias_count)
        return
    convert(x, x_to, block - bias_blocks, x_count, BLOCK)
