# type: ignore
"""What the kernels `lanes_forward` and `lanes_backward` are made of: a tensor [warps, 32] has a number for each thread.

So the compiler lays out nothing and changes no layout: what threads exchange goes by shuffles within a warp, and by
boxes in shared memory between warps. A warp has 16 units. As products leave them, lane 4 g + i has unit g + 8 (i % 2)
of its warp, so each unit is there twice (`unit_of`). As rows are read, lane 4 g + i has units 4 i to 4 i + 3 of the
g-th of eight rows (`first_of_four`); summed up over rows it has unit 4 i + g // 2 (`summed_unit_of`).

Where MATH is "plain", in Triton's interpreter, there are no such products and no shared memory: then these functions
compute the same in another way.
"""

import triton
import triton.language as tl

from sab.ops.triton.access import RADIANS, angles, get, put

BOX = tl.constexpr(1024)
"""Bytes of a box."""


@triton.jit
def lanes_of(NB: tl.constexpr):
    return tl.arange(0, 32)[None, :] + tl.zeros((NB, 1), tl.int32)


@triton.jit
def warps_of(NB: tl.constexpr):
    return tl.arange(0, NB)[:, None] + tl.zeros((1, 32), tl.int32)


@triton.jit
def unit_of(NB: tl.constexpr):
    lane = lanes_of(NB)
    return warps_of(NB) * 16 + lane // 4 + lane % 2 * 8


@triton.jit
def first_of_four(NB: tl.constexpr):
    return warps_of(NB) * 16 + lanes_of(NB) % 4 * 4


@triton.jit
def summed_unit_of(NB: tl.constexpr):
    lane = lanes_of(NB)
    return warps_of(NB) * 16 + lane % 4 * 4 + lane // 8


# Within a warp


@triton.jit
def shuffled(x, source, MATH: tl.constexpr):
    """The numbers of the lanes `source`."""
    if MATH == "plain":
        return tl.gather(x, source + tl.zeros(x.shape, tl.int32), 1)
    else:
        bits = x.to(tl.int32, bitcast=True)
        found = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [bits, source], tl.int32, is_pure=False, pack=1
        )
        return found.to(x.dtype, bitcast=True)


@triton.constexpr_function
def swap_of(distance):
    return f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"


@triton.jit
def swapped(x, DISTANCE: tl.constexpr, MATH: tl.constexpr):
    """The numbers of the lanes whose number differs in the bits of DISTANCE."""
    if MATH == "plain":
        return tl.gather(x, lanes_of(x.shape[0]) ^ DISTANCE, 1)
    else:
        bits = x.to(tl.int32, bitcast=True)
        found = tl.inline_asm_elementwise(swap_of(DISTANCE), "=r,r", [bits], tl.int32, is_pure=False, pack=1)
        return found.to(x.dtype, bitcast=True)


@triton.jit
def total_of_lanes(x, MATH: tl.constexpr):
    """The sum over the lanes of each warp. (That of `tl.sum` makes the compiler lay out what it sums up anew.)"""
    for i in tl.static_range(5):
        x += swapped(x, 1 << i, MATH)
    return x


@triton.jit
def angles_of(step, column, rate, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """`access.angles`, where MATH is "approximate" by the hardware's own functions."""
    if MATH == "approximate":
        angle = (rate.to(tl.int64) * step).to(tl.int32).to(DTYPE) * RADIANS
        sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
        cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
        return cosine, tl.where(column % 2 == 0, -sine, sine)
    else:
        return angles(step, column, rate, DTYPE)


@triton.jit
def turned(x, cosine, sine, MATH: tl.constexpr):
    """A vector whose pairs of units are turned; with -sine they are turned back."""
    return x * cosine + swapped(x, 4, MATH) * sine


@triton.jit
def summed(four, MATH: tl.constexpr):
    """The sums over eight rows of which each lane has four units, a unit a lane (`summed_unit_of`)."""
    lane = lanes_of(four[0].shape[0])
    upper = lane >= 16
    first = tl.where(upper, four[2], four[0]) + swapped(tl.where(upper, four[0], four[2]), 16, MATH)
    second = tl.where(upper, four[3], four[1]) + swapped(tl.where(upper, four[1], four[3]), 16, MATH)
    upper = lane & 8 != 0
    sums = tl.where(upper, second, first) + swapped(tl.where(upper, first, second), 8, MATH)
    return sums + swapped(sums, 4, MATH)


@triton.jit
def as_units(x, MATH: tl.constexpr):
    """A vector by `summed_unit_of` as one by `unit_of`."""
    unit = unit_of(x.shape[0]) % 16
    return shuffled(x, unit % 4 * 8 + unit // 4, MATH)


@triton.jit
def as_fours(x, MATH: tl.constexpr):
    """A vector by `unit_of` as four units a lane (`first_of_four`)."""
    first = first_of_four(x.shape[0]) % 16
    found = ()
    for i in tl.static_range(4):
        unit = first + i
        found = found + (shuffled(x, unit % 8 * 4 + unit // 8, MATH),)
    return found


# Global memory, four numbers at a time


@triton.jit
def get_four(pointer, first, mask, SIZE: tl.constexpr, DTYPE: tl.constexpr, MATH: tl.constexpr):
    """The numbers `first` to first + 3 of rows of SIZE numbers at `pointer`."""
    BITS: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    at = pointer + first
    if (MATH == "plain") or (SIZE % 4 != 0) or (BITS == 64):
        found = ()
        for i in tl.static_range(4):
            found = found + (get(at + i, mask & (first + i < SIZE), "", MATH).to(DTYPE),)
        return found
    elif BITS == 32:
        i0, i1, i2, i3 = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=&r,=&r,=&r,=&r,l,r",
            [at.to(tl.int64), (mask & (first < SIZE)).to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        f: tl.constexpr = tl.float32
        return i0.to(f, bitcast=True), i1.to(f, bitcast=True), i2.to(f, bitcast=True), i3.to(f, bitcast=True)
    else:
        tl.static_assert(pointer.dtype.element_ty == tl.bfloat16)
        i0, i1 = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }",
            "=&r,=&r,l,r",
            [at.to(tl.int64), (mask & (first < SIZE)).to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        f: tl.constexpr = tl.float32
        even = (i0 << 16).to(f, bitcast=True), (i1 << 16).to(f, bitcast=True)
        odd = (i0 & -65536).to(f, bitcast=True), (i1 & -65536).to(f, bitcast=True)
        return even[0], odd[0], even[1], odd[1]


@triton.jit
def put_four(pointer, first, four, mask, SIZE: tl.constexpr, MATH: tl.constexpr):
    """Store four numbers where `get_four` finds them; of float32 or, in the interpreter, float64."""
    at = pointer + first
    if (MATH == "plain") or (SIZE % 4 != 0):
        for i in tl.static_range(4):
            put(at + i, four[i], mask & (first + i < SIZE), MATH)
    else:
        tl.static_assert(pointer.dtype.element_ty == tl.float32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
            "=r,l,f,f,f,f,r",
            [at.to(tl.int64), four[0], four[1], four[2], four[3], (mask & (first < SIZE)).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# Shared memory


@triton.jit
def boxes(NB: tl.constexpr, MATH: tl.constexpr):
    """The address of eight boxes."""
    lane = lanes_of(NB)
    if MATH == "plain":
        return lane
    else:
        return tl.inline_asm_elementwise(
            "{ .shared .align 16 .b8 boxes[8192]; mov.u32 $0, boxes; }", "=r,r", [lane], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def put_shared(at, x):
    """Store 32 or 16 bits a thread. Several may store the same number in the same place, of which racecheck tells."""
    if x.dtype.primitive_bitwidth == 16:
        tl.inline_asm_elementwise(
            "{ st.shared.b16 [$1], $2; mov.u32 $0, 0; }",
            "=r,r,h",
            [at, x.to(tl.int16, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ st.shared.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,r,r",
            [at, x.to(tl.int32, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.constexpr_function
def loads_of(space, count, stride):
    """Instructions that load `count` times 16 bytes, `stride` bytes apart."""
    text = "{"
    for i in range(count):
        x = 4 * i
        text += f" ld.{space}.v4.b32 {{${x}, ${x + 1}, ${x + 2}, ${x + 3}}}, [${4 * count}+{stride * i}];"
    return text + " }"


@triton.constexpr_function
def outputs_of(count, *others):
    return ",".join(["=&r"] * count + list(others))


@triton.jit
def get_shared(at, COUNT: tl.constexpr, STRIDE: tl.constexpr):
    """COUNT times 16 bytes a thread, as whole numbers."""
    return tl.inline_asm_elementwise(
        loads_of("shared", COUNT, STRIDE),
        outputs_of(4 * COUNT, "r"),
        [at],
        dtype=(tl.int32,) * (4 * COUNT),
        is_pure=False,
        pack=1,
    )


@triton.jit
def get_shared_number(at):
    """A number of float32 a thread."""
    return tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=f,r", [at], tl.float32, is_pure=False, pack=1)


@triton.jit
def vector_of(x, at, P: tl.constexpr):
    """In the interpreter: the vector [P] of which lanes have the entries `at`, each entry twice."""
    is_at = at[:, :, None] == tl.arange(0, P)[None, None, :]
    return tl.sum(tl.sum(tl.where(is_at, x[:, :, None], 0.0), 1), 0) * 0.5


# Products
#
# The left operand has 16 rows a warp, in registers: a lane has those numbered lane // 4 and lane // 4 + 8. The right
# one is a vector, eight times beside itself. Which columns a lane has is free as long as both agree: lane 4 g + i takes
# eight neighbours from 8 i on of every 32, which it reads at once.


@triton.constexpr_function
def product_of(kind, count, by_rows):
    """Instructions for the product of 8 `count` registers with 4 `count` others: two sums, so that half wait.

    by_rows: the left operand's registers are four of one row and four of the other, not by instruction.
    """
    left, right = 1, 1 + 8 * count
    text = "{ .reg .f32 x<8>; .reg .pred p; " + " ".join(f"mov.f32 x{i}, 0f00000000;" for i in range(8))
    for j in range(2 * count):
        a, b = left + 4 * j, right + 2 * j
        four = (a, a + 1, a + 2, a + 3)
        if by_rows:
            a = left + j // 2 * 8 + j % 2 * 2
            four = (a, a + 4, a + 1, a + 5)
        sums = "{x0, x1, x2, x3}" if j % 2 == 0 else "{x4, x5, x6, x7}"
        text += (
            f" mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {sums}, "
            f"{{${four[0]}, ${four[1]}, ${four[2]}, ${four[3]}}}, {{${b}, ${b + 1}}}, {sums};"
        )
    parity = right + 4 * count
    return text + f" add.f32 x0, x0, x4; add.f32 x2, x2, x6; setp.ne.b32 p, ${parity}, 0; selp.f32 $0, x2, x0, p; }}"


@triton.constexpr_function
def product_operands(count):
    return ",".join(["=f"] + ["r"] * (12 * count + 1))


@triton.jit
def load_matrix(w, INDEX: tl.constexpr, P: tl.constexpr, MATH: tl.constexpr):
    """A packed matrix (`small.pack`) as a left operand."""
    NB: tl.constexpr = P // 16
    warp = warps_of(NB)
    if MATH == "plain":
        unit = unit_of(NB)[:, :, None]
        k = tl.arange(0, P)[None, None, :]
        at = (unit // 16 * (P // 16) + k // 32 * 2 + k % 8 // 4) * 256 + (unit % 8 * 4 + k % 32 // 8) * 8
        return tl.load(w + INDEX * P * P + at + k % 4 // 2 * 4 + unit % 16 // 8 * 2 + k % 2)
    else:
        pointer = (w + INDEX * P * P + warp * (16 * P) + lanes_of(NB) * 8).to(tl.int64)
        return tl.inline_asm_elementwise(
            loads_of("global", P // 16, 512),
            outputs_of(P // 4, "l"),
            [pointer],
            dtype=(tl.int32,) * (P // 4),
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_held(w, HELD: tl.constexpr, P: tl.constexpr, MATH: tl.constexpr):
    """The first HELD packed matrices, as left operands."""
    held = ()
    for i in tl.static_range(HELD):
        held = held + (load_matrix(w, i, P, MATH),)
    return held


SHELF = tl.constexpr(128 << 10)
"""Bytes of shared memory for weights, and for what the compiler itself may put there before."""


@triton.jit
def fill_shelf(w, HELD: tl.constexpr, SHELVED: tl.constexpr, P: tl.constexpr):
    """Put the SHELVED matrices after the first HELD into shared memory, and say where.

    Triton has no such memory to give. But it allocates as much as its largest operation needs, so here is one that
    needs it all; matrices take the end of it, and no operation of the loops needs any.
    """
    NB: tl.constexpr = P // 16
    lane = lanes_of(NB)
    some = tl.gather(tl.arange(0, SHELF // 4), tl.arange(0, 32 * NB) * 97 % (SHELF // 4), 0)
    some = tl.max(some, 0)
    start = tl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r,r", [lane + some], dtype=tl.int32, is_pure=False, pack=1
    )
    start += (SHELF - SHELVED * 2 * P * P) + (warps_of(NB) * (16 * P) + lane * 8) * 2
    tl.debug_barrier()
    for i in tl.static_range(SHELVED):
        x = load_matrix(w, HELD + i, P, "")
        for j in tl.static_range(P // 16):
            tl.inline_asm_elementwise(
                "{ st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
                "=r,r,r,r,r,r",
                [start + i * 2 * P * P + j * 512, x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    return start


@triton.jit
def matrix(held, shelf, INDEX: tl.constexpr, P: tl.constexpr):
    """One that is held in registers or lies on the shelf, where each thread reads what it has put there itself."""
    if INDEX < len(held):
        return held[INDEX]
    else:
        return get_shared(shelf + (INDEX - len(held)) * 2 * P * P, P // 16, 512)


@triton.jit
def product(
    left, right, TYPE: tl.constexpr, P: tl.constexpr, MATH: tl.constexpr, BY_ROWS: tl.constexpr = False
):  # fmt: skip
    """The product of a left operand with what `recall` gave, by `unit_of`."""
    NB: tl.constexpr = P // 16
    vector, scale = right
    if MATH == "plain":
        return tl.sum(left.to(vector.dtype) * vector[None, None, :], 2)
    else:
        KIND: tl.constexpr = "bf16" if TYPE == tl.bfloat16 else "f16"
        found = tl.inline_asm_elementwise(
            product_of(KIND, P // 32, BY_ROWS),
            product_operands(P // 32),
            left + vector + (lanes_of(NB) % 2,),
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
        return found if TYPE == tl.bfloat16 else found * scale


@triton.jit
def note(box, x, at, P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr):
    """Put a vector, of which lanes have the entries `at`, in a box; `recall` takes what this gives, after a barrier."""
    if MATH == "plain":
        return vector_of(x, at, P)
    elif TYPE == tl.bfloat16:
        put_shared(box + at * 2, x.to(tl.bfloat16))
        return 0
    else:
        put_shared(box + at * 4, x)
        return 0


@triton.jit
def recall(box, noted, P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr):
    """A vector from a box as the right operand of products.

    Half precision has the mantissa of TF32 but not its range, so the largest number is brought near 1.
    """
    NB: tl.constexpr = P // 16
    third = lanes_of(NB) % 4
    if MATH == "plain":
        return noted, 1.0
    elif TYPE == tl.bfloat16:
        return get_shared(box + third * 16, P // 32, 64), 1.0
    else:
        parts = get_shared(box + third * 32, P // 32, 128) + get_shared(box + third * 32 + 16, P // 32, 128)
        largest = parts[0] & 0x7FFFFFFF
        for i in tl.static_range(1, P // 4):
            largest = tl.maximum(largest, parts[i] & 0x7FFFFFFF)
        largest = tl.maximum(largest, swapped(largest, 1, MATH))
        largest = tl.maximum(largest, swapped(largest, 2, MATH))
        exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
        scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        halves = ()
        for c in tl.static_range(P // 32):
            for half in tl.static_range(2):
                for pair in tl.static_range(2):
                    x = parts[(P // 8) * half + 4 * c + 2 * pair].to(tl.float32, bitcast=True) * scale
                    y = parts[(P // 8) * half + 4 * c + 2 * pair + 1].to(tl.float32, bitcast=True) * scale
                    both = tl.inline_asm_elementwise(
                        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x, y], tl.int32, is_pure=True, pack=1
                    )
                    halves = halves + (both,)
        return halves, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def exchanged(box, x, at, P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr):
    """A vector as the right operand of products, by way of a box."""
    noted = note(box, x, at, P, TYPE, MATH)
    tl.debug_barrier()
    return recall(box, noted, P, TYPE, MATH)


@triton.jit
def sum_of_numbers(x):
    """The sum of a tuple of float32 numbers that came as whole numbers."""
    sums = x[0].to(tl.float32, bitcast=True)
    for i in tl.static_range(1, len(x)):
        sums += x[i].to(tl.float32, bitcast=True)
    return sums


@triton.jit
def total_of_units(box, x, MATH: tl.constexpr):
    """The sum over all units of a vector by `unit_of`; takes a barrier."""
    NB: tl.constexpr = x.shape[0]
    if MATH == "plain":
        return tl.sum(tl.sum(x, 1), 0) * 0.5
    else:
        lane = lanes_of(NB)
        x += swapped(x, 1, MATH)  # lanes that differ in the next bit have the same units
        x += swapped(x, 4, MATH)
        x += swapped(x, 8, MATH)
        x += swapped(x, 16, MATH)
        put_shared(box + warps_of(NB) * 4, x)
        tl.debug_barrier()
        found = get_shared(box + 0 * lane, (NB + 3) // 4, 16)
        return sum_of_numbers(found[:NB])


@triton.jit
def totals_of_items(box, parts, MATH: tl.constexpr):
    """The sums over all warps of numbers for eight items each, an item for each lane // 4, by item; takes a barrier."""
    NB: tl.constexpr = parts[0].shape[0]
    lane = lanes_of(NB)
    if MATH == "plain":
        sums = 0.0 * parts[0]
        for g in tl.static_range(len(parts)):
            total = tl.sum(parts[g], 0)[None, :] + 0.0 * parts[g]
            sums = tl.where(lane // 8 == g, shuffled(total, lane % 8 * 4, MATH), sums)
        return sums
    else:
        for g in tl.static_range(len(parts)):
            put_shared(box + ((lane // 4 + 8 * g) * NB + warps_of(NB)) * 4, parts[g])
        tl.debug_barrier()
        at = box + lane * (4 * NB)
        if NB == 8:  # in turns, so that lanes do not meet in a bank
            later = lane // 4 % 2 * 16
            found = get_shared(at + later, 1, 16) + get_shared(at + (16 - later), 1, 16)
        elif NB == 4:
            found = get_shared(at, 1, 16)
        else:
            found = get_shared(at - lane % 2 * 8, 1, 16)
            is_odd = lane % 2 == 1
            found = (tl.where(is_odd, found[2], found[0]), tl.where(is_odd, found[3], found[1]))
        return tl.where(lane < 8 * len(parts), sum_of_numbers(found), 0.0)
