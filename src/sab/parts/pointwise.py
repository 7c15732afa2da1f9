"""Triton functions that stand next to the mathematics they belong to, without importing Triton.

A part's file holds its Triton functions as plain Python functions marked `@pointwise`; `tl` and `libdevice` in them are
Triton's. `compiled` makes Triton functions of them when a kernel first needs them, so `import sab` does not wait for
Triton, and a machine without it can use every other backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

tl: Any = None
"""Triton's language, as a name for the functions below and in the parts; `compiled` puts the real one in its place."""
libdevice: Any = None
"""CUDA's library of functions in Triton, likewise."""
_marked: set[Callable[..., Any]] = set()


def pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that is written in Triton's language."""
    _marked.add(function)
    return function


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """A plain function as a Triton function; the marked functions that it calls become Triton functions too."""
    import triton
    import triton.language
    from triton.language.extra import libdevice as cuda_library

    assert isinstance(function, FunctionType)
    names = {"tl": triton.language, "libdevice": cuda_library}
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if isinstance(used, FunctionType) and used in _marked and used is not function:  # `libdevice.tanh` in `tanh`
            names[name] = compiled(used)
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return triton.jit(copy)


@pointwise
def tanh(x, MATH):
    """tanh of float32 or float64 numbers.

    MATH is how exactly: "approximate" is the hardware's own (half precision's accuracy, as the factors of TF32 and
    bfloat16 products have), "halves" two at a time in half precision, "formula" nearly as accurate as CUDA's library
    and without branches, "accurate" CUDA's library, "plain" a formula that also runs in Triton's interpreter.
    """
    if MATH == "approximate":
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    elif MATH == "halves":
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
    elif MATH == "accurate":
        return libdevice.tanh(x)
    elif MATH == "formula":
        square = x * x
        series = 62 / 2835 * square - 17 / 315
        series = (series * square + 2 / 15) * square - 1 / 3
        small = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2|x|), which never overflows
        bounded = (1.0 - small) / (1.0 + small)
        bounded = tl.where(x < 0, -bounded, bounded)
        return tl.where(square < 0.0625, x + x * square * series, bounded)  # where 1 - small loses digits
    else:
        tl.static_assert(MATH == "plain", "MATH must be approximate, halves, formula, accurate or plain")
        small = tl.exp(-2.0 * tl.abs(x))  # never overflows
        bounded = (1.0 - small) / (1.0 + small)
        return tl.where(x < 0, -bounded, bounded)


@pointwise
def sigmoid(x, MATH):
    """The logistic function; MATH as in `tanh`."""
    if MATH == "approximate":
        return 0.5 * tanh(0.5 * x, MATH) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@pointwise
def sortable(score):
    """Float32 as whole numbers of the same order, which a warp compares in one instruction; float64 as it is."""
    if score.dtype == tl.float32:
        bits = score.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        return score


@pointwise
def from_sortable(number):
    """The inverse of `sortable`."""
    if number.dtype == tl.int32:
        return (number ^ ((number >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return number
