# type: ignore
"""What the kernels of both loops share: loads and stores without a change of layout, and angles."""

import math

import triton
import triton.language as tl


@triton.jit
def put(pointer, value, mask, MATH: tl.constexpr):
    """Store without a change of layout.

    `tl.store` first spreads a small vector evenly over the threads, which takes two barriers; here each thread stores
    what it holds, several of them perhaps the same number.
    """
    if MATH == "plain":
        tl.store(pointer, value, mask=mask)
    else:
        value = value.to(pointer.dtype.element_ty)
        if value.dtype.primitive_bitwidth == 16:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,h,r",
                [pointer.to(tl.int64), value.to(tl.int16, bitcast=True), mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        elif value.dtype.primitive_bitwidth == 64:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,l,r",
                [pointer.to(tl.int64), value.to(tl.int64, bitcast=True), mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r,r",
                [pointer.to(tl.int64), value.to(tl.int32, bitcast=True), mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def get(pointer, mask, CACHE: tl.constexpr, MATH: tl.constexpr):
    """Load without a change of layout, as `put` stores; CACHE "" or ".cg", past the first cache."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    if MATH == "plain":
        return tl.load(pointer, mask=mask, other=0, cache_modifier=CACHE)
    elif TYPE.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b16 $0, 0; @p ld.global" + CACHE + ".b16 $0, [$1]; }",
            "=&h,l,r",
            [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int16,
            is_pure=False,
            pack=1,
        ).to(TYPE, bitcast=True)
    elif TYPE.primitive_bitwidth == 64:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; @p ld.global" + CACHE + ".b64 $0, [$1]; }",
            "=&l,l,r",
            [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        ).to(TYPE, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global" + CACHE + ".b32 $0, [$1]; }",
            "=&r,l,r",
            [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        ).to(TYPE, bitcast=True)


RADIANS = tl.constexpr(2 * math.pi / 2**32)
"""Of the unit in which `sab.parts.scorers.turn_rates` are."""


@triton.jit
def angles(step, column, rate, DTYPE: tl.constexpr):
    """Cosines and sines of the angles by which a step turns entries of these rates; a sine has the sign with which the
    other entry of a pair is multiplied."""
    # The product modulo a full turn is exact at any step. As a signed number it is between -π and π.
    angle = (rate.to(tl.int64) * step).to(tl.int32).to(DTYPE) * RADIANS
    sine = tl.sin(angle)
    return tl.cos(angle), tl.where(column % 2 == 0, -sine, sine)
