# type: ignore
"""What the kernels share: functions of one number, stores, weightings forward and backward.

`MATH` says how functions are computed: "approximate" by the hardware's own tanh (half precision's accuracy, as the
operands of TF32 and bfloat16 products have), "accurate" by CUDA's library, "plain" by formulas that also run in
Triton's interpreter.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def tanh(x, MATH: tl.constexpr):
    if MATH == "approximate":
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    elif MATH == "accurate":
        return libdevice.tanh(x)
    else:
        small = tl.exp(-2.0 * tl.abs(x))  # never overflows
        bounded = (1.0 - small) / (1.0 + small)
        return tl.where(x < 0, -bounded, bounded)


@triton.jit
def tanh_of_scores(x, MATH: tl.constexpr):
    """As `tanh`; two at a time in half precision where "approximate" will do: there are very many of them."""
    if MATH == "approximate":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .b16 first, second;
            cvt.rn.f16x2.f32 both, $3, $2;
            tanh.approx.f16x2 both, both;
            mov.b32 {first, second}, both;
            cvt.f32.f16 $0, first;
            cvt.f32.f16 $1, second;
            }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return tanh(x, MATH)


@triton.jit
def sigmoid(x, MATH: tl.constexpr):
    if MATH == "approximate":
        return 0.5 * tanh(0.5 * x, MATH) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def put(pointer, value, mask, MATH: tl.constexpr):
    """Store without a change of layout.

    `tl.store` first spreads a small vector evenly over the threads, which takes two barriers; here each thread stores
    what it holds, several of them perhaps the same number.
    """
    if (MATH == "plain") or (pointer.dtype.element_ty.primitive_bitwidth == 64):
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
    if (MATH == "plain") or (TYPE.primitive_bitwidth == 64):
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
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global" + CACHE + ".b32 $0, [$1]; }",
            "=&r,l,r",
            [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        ).to(TYPE, bitcast=True)


@triton.jit
def sortable(score):
    """Float32 as whole numbers of the same order, which a warp compares in one instruction; float64 as it is."""
    if score.dtype == tl.float32:
        bits = score.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        return score


@triton.jit
def from_sortable(number):
    """The inverse of `sortable`."""
    if number.dtype == tl.int32:
        return (number ^ ((number >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return number


@triton.jit
def highest(x):
    """The largest number of each row of x."""
    return from_sortable(tl.max(sortable(x), 1))


@triton.jit
def lowest(x):
    """The smallest number of each row of x."""
    return from_sortable(tl.min(sortable(x), 1))


@triton.jit
def weigh(scores, valid, WEIGHTING: tl.constexpr):
    """The scores [R, K] of the selected, where valid, as weights [R, K] and the norm [R] that they were divided by."""
    if (WEIGHTING == "relu") or (WEIGHTING == "relu_norm"):
        threshold = lowest(tl.where(valid, scores, float("inf")))
        weights = tl.where(valid, tl.maximum(scores - threshold[:, None], 0.0), 0.0)
        norm = tl.sum(weights, 1) + 1e-7
        if WEIGHTING == "relu_norm":
            weights = weights / norm[:, None]
    else:
        shift = highest(tl.where(valid, scores, float("-inf")))
        if WEIGHTING == "softmax_sink":
            shift = tl.maximum(shift, 0.0)
        else:
            shift = tl.where(shift == float("-inf"), 0.0, shift)
        weights = tl.where(valid, tl.exp(scores - shift[:, None]), 0.0)
        norm = tl.sum(weights, 1)
        if WEIGHTING == "softmax_sink":
            norm += tl.exp(-shift)
        weights = weights / tl.where(norm == 0.0, 1.0, norm)[:, None]
    return weights, norm


@triton.jit
def sum_of_all(values):
    """The sum over the last dimension of all tensors of a tuple, kept as a dimension."""
    total = values[0]
    for g in tl.static_range(1, len(values)):
        total += values[g]
    return tl.sum(total, 2)[:, :, None]


@triton.jit
def weigh_backward(dweights, weights, norm, is_last, WEIGHTING: tl.constexpr):
    """Gradients of the weights as gradients of the scores; is_last marks the lowest score, the threshold of `relu`.

    All are tuples of tensors [R, 1, 8], one for eight of the selected.
    """
    dscores = dweights
    if WEIGHTING != "relu":
        parts = ()
        for g in tl.static_range(len(weights)):
            parts = parts + (weights[g] * dweights[g],)
        inner = sum_of_all(parts)
        dscores = ()
        for g in tl.static_range(len(weights)):
            if WEIGHTING == "relu_norm":
                dscores = dscores + ((dweights[g] - inner) / norm,)
            else:
                dscores = dscores + (weights[g] * (dweights[g] - inner),)
    if (WEIGHTING == "relu") or (WEIGHTING == "relu_norm"):
        above = ()
        for g in tl.static_range(len(weights)):
            above = above + (tl.where(weights[g] > 0, dscores[g], 0.0),)
        inner = sum_of_all(above)
        dscores = ()
        for g in tl.static_range(len(weights)):
            dscores = dscores + (tl.where(is_last[g], above[g] - inner, above[g]),)
    return dscores
