# type: ignore
"""Many copies in one launch: a launch takes the host as long as the device needs to copy a whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from sab.ops.triton.large_parts import store_factor
from sab.ops.triton.launch import Constants, launch

MOST = 8
"""How many copies a launch makes at most."""
TILE = 64
"""Rows and columns that a program copies."""
Copy = tuple[Tensor, Tensor | None]
"""The target, and the source that is copied into its upper left corner; the rest becomes 0. None: only zeros."""


def copy_all(copies: Sequence[Copy], rounds: bool = False) -> None:
    """Make the copies, each in its target's type; where it `rounds`, float32 to TF32's mantissa."""
    if not any(target.numel() > 0 for target, _ in copies):  # else those without numbers stay: a kernel is compiled
        return  # for the copies that there are
    for first in range(0, len(copies), MOST):
        _launch(copies[first : first + MOST], rounds)


def _launch(copies: Sequence[Copy], rounds: bool) -> None:
    targets: list[Tensor | None] = []
    sources: list[Tensor | None] = []
    sizes: list[int] = []
    turned, programs = 0, 0
    for place, (target, source) in enumerate(copies):
        tall, wide = target.shape
        rows = columns = stride = 0
        if source is not None:
            rows, columns = source.shape
            stride, step = source.stride()
            if step != 1 and columns > 1:
                assert stride == 1 or rows == 1
                turned, stride = turned | 1 << place, step
        programs += -(-tall // TILE) * -(-wide // TILE)
        targets.append(target)
        sources.append(source)
        sizes += [programs, rows, columns, stride, tall, wide, target.stride(0)]
    missing = MOST - len(copies)
    launch(
        copies_kernel,
        programs,
        [*targets, *[None] * missing, *sources, *[None] * missing],
        [*sizes, *[0] * (7 * missing)],
        _constants(turned, rounds),
        is_aligned=False,
    )


@cache
def _constants(turned: int, rounds: bool) -> Constants:
    return Constants({"TURNED": turned, "ROUNDS": rounds, "TILE": TILE, "num_warps": 4})


@triton.jit
def _copy(tile, target, source, rows, columns, stride, tall, wide, target_stride, IS_TURNED: tl.constexpr,
          ROUNDS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """A tile of a copy; of a source that IS_TURNED a column lies as a row."""
    across = tl.cdiv(wide, TILE)
    row = (tile // across * TILE + tl.arange(0, TILE))[:, None]
    column = (tile % across * TILE + tl.arange(0, TILE))[None, :]
    x = tl.zeros((TILE, TILE), target.dtype.element_ty)
    if source is not None:
        at = column.to(tl.int64) * stride + row if IS_TURNED else row.to(tl.int64) * stride + column
        x = tl.load(source + at, mask=(row < rows) & (column < columns), other=0.0)
    target_at = target + row.to(tl.int64) * target_stride + column
    store_factor(target_at, x.to(target.dtype.element_ty), (row < tall) & (column < wide), ROUNDS)


@triton.jit
def _job(program, first, last, target, source, rows, columns, stride, tall, wide, target_stride,
         IS_TURNED: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """A copy, by the programs from the first to before the last."""
    if target is not None:
        if (program >= first) & (program < last):
            _copy(program - first, target, source, rows, columns, stride, tall, wide, target_stride, IS_TURNED, ROUNDS,
                  TILE)  # fmt: skip


TENSORS = [f"{name}{i}" for name in ("target", "source") for i in range(MOST)]
SIZES = [f"{name}{i}" for i in range(MOST) for name in ("last", "rows", "columns", "stride", "tall", "wide", "step")]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def copies_kernel(target0, target1, target2, target3, target4, target5, target6, target7,
                  source0, source1, source2, source3, source4, source5, source6, source7,
                  last0, rows0, columns0, stride0, tall0, wide0, step0,
                  last1, rows1, columns1, stride1, tall1, wide1, step1,
                  last2, rows2, columns2, stride2, tall2, wide2, step2,
                  last3, rows3, columns3, stride3, tall3, wide3, step3,
                  last4, rows4, columns4, stride4, tall4, wide4, step4,
                  last5, rows5, columns5, stride5, tall5, wide5, step5,
                  last6, rows6, columns6, stride6, tall6, wide6, step6,
                  last7, rows7, columns7, stride7, tall7, wide7, step7,
                  TURNED: tl.constexpr, ROUNDS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    _job(program, 0, last0, target0, source0, rows0, columns0, stride0, tall0, wide0, step0, TURNED & 1 != 0, ROUNDS,
         TILE)  # fmt: skip
    _job(program, last0, last1, target1, source1, rows1, columns1, stride1, tall1, wide1, step1, TURNED & 2 != 0,
         ROUNDS, TILE)  # fmt: skip
    _job(program, last1, last2, target2, source2, rows2, columns2, stride2, tall2, wide2, step2, TURNED & 4 != 0,
         ROUNDS, TILE)  # fmt: skip
    _job(program, last2, last3, target3, source3, rows3, columns3, stride3, tall3, wide3, step3, TURNED & 8 != 0,
         ROUNDS, TILE)  # fmt: skip
    _job(program, last3, last4, target4, source4, rows4, columns4, stride4, tall4, wide4, step4, TURNED & 16 != 0,
         ROUNDS, TILE)  # fmt: skip
    _job(program, last4, last5, target5, source5, rows5, columns5, stride5, tall5, wide5, step5, TURNED & 32 != 0,
         ROUNDS, TILE)  # fmt: skip
    _job(program, last5, last6, target6, source6, rows6, columns6, stride6, tall6, wide6, step6, TURNED & 64 != 0,
         ROUNDS, TILE)  # fmt: skip
    _job(program, last6, last7, target7, source7, rows7, columns7, stride7, tall7, wide7, step7, TURNED & 128 != 0,
         ROUNDS, TILE)  # fmt: skip
