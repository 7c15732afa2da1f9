"""Around the loops: what comes before the forward and after the backward, in few launches.

For short sequences a call takes as long as its host needs to launch what it consists of. So inputs and weights are
converted in one launch; for the loops of `lanes` weights are packed in the same one, and all gradients of weights are
made in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from sab.ops.arguments import Given, Options, Parameters
from sab.ops.buffers import Buffers, Prepared, gate_bias
from sab.ops.gradients import Gradients
from sab.ops.plan import Plan
from sab.ops.precision import as_type, contiguous
from sab.ops.triton.copies import Copy, copy_all
from sab.ops.triton.lanes_gradients import lanes_gradients_kernel
from sab.ops.triton.lanes_prepare import lanes_prepare_kernel
from sab.ops.triton.launch import INTERPRETED, Constants, launch
from sab.parts.registry import CELLS

BLOCK = 1024
"""How many numbers a program converts."""
MOST_CONVERTED = 2**31 - 1
"""How many numbers the kernel can count."""
ROWS = 64
"""Of how many rows a program adds up the outer products at a time."""
PROGRAMS = 132
"""How many programs of eight warps sum up gradients, about: one for each multiprocessor of an H200."""
NAMES = tuple("w_ih w_hh b_ih b_hh w_memory w_query scorer_bias v w_incorporate b_incorporate".split())
"""The parameters whose gradients the kernel makes, in its order."""


def input_gates(given: Given, parameters: Parameters, options: Options) -> Tensor:
    """The input's part of the gates of all steps, in one product; with both biases where the cell adds them up."""
    x, compute = contiguous(given.x), options.compute
    copies: list[Copy] = []

    def of(tensor: Tensor) -> Tensor:
        if tensor.dtype == compute:
            return tensor
        copies.append((torch.empty_like(tensor, dtype=compute), tensor))
        return copies[-1][0]

    bias = gate_bias(parameters.b_ih, parameters.b_hh, options.cell)
    factors = of(x.view(-1, x.shape[2])), of(contiguous(parameters.w_ih))
    bias = None if bias is None else of(contiguous(bias).view(1, -1)).view(-1)
    copy_all(copies)
    return F.linear(*factors, bias).view(*x.shape[:2], -1)


def prepare(plan: Plan, given: Given, parameters: Parameters, options: Options, packed: Tensor) -> Prepared:
    """The input's part of the gates; fills `packed`, [2 M + 1, P, P]."""
    x, compute, b_ih, b_hh = contiguous(given.x), options.compute, parameters.b_ih, parameters.b_hh
    if x.numel() > MOST_CONVERTED:
        x = as_type(x, compute)
    w_ih, cell = contiguous(parameters.w_ih), CELLS[plan.cell]
    joins = b_ih is not None and b_hh is not None and not cell.splits_gates
    bias = b_ih
    if b_ih is not None and (joins or b_ih.dtype != compute):
        bias = torch.empty_like(contiguous(b_ih), dtype=compute)
    x_to = x if x.dtype == compute else torch.empty_like(x, dtype=compute)
    w_ih_to = w_ih if w_ih.dtype == compute else torch.empty_like(w_ih, dtype=compute)
    counts = (
        0 if w_ih_to is w_ih else w_ih.numel(),
        0 if bias is b_ih or bias is None else bias.numel(),
        0 if x_to is x else x.numel(),
    )
    used = (parameters.w_hh, parameters.w_query, parameters.w_memory, parameters.w_incorporate, w_ih, b_ih, b_hh)
    launch(
        lanes_prepare_kernel,
        packed.numel() // BLOCK + sum(-(-count // BLOCK) for count in counts),
        [
            *[parameters.w_hh if one is None else contiguous(one) for one in used],
            x,
            packed,
            w_ih_to,
            packed if bias is None else bias,
            x_to,
        ],
        counts,
        _prepare_constants(
            plan.n, plan.key_size, cell.gates, parameters.w_incorporate is not None, packed.shape[2], joins
        ),
    )
    return Prepared(F.linear(x_to, w_ih_to, bias), packed)


@cache
def _prepare_constants(n: int, d: int, gates: int, is_mapped: bool, padded: int, joins: bool) -> Constants:
    values = {"n": n, "d": d, "GATES": gates, "MAPPED": is_mapped, "P": padded}
    return Constants({**values, "JOINS_BIASES": joins, "BLOCK": BLOCK, "num_warps": 4})


def makes_gradients(plan: Plan, given: Given, parameters: Parameters, buffers: Buffers, names: Sequence[str]) -> bool:
    """Whether the kernel is to make the gradients of the parameters: where all are asked for, in rounded products."""
    packed = buffers.packed
    if packed is None or (packed.itemsize > 2 and not INTERPRETED) or given.x.numel() == 0:
        return False
    there = [name for name in NAMES if getattr(parameters, name) is not None]
    return set(there).issubset(names) and _tiles(plan, given, parameters, packed) <= packed.shape[2] ** 2 // 2


def _tiles(plan: Plan, given: Given, parameters: Parameters, packed: Tensor) -> int:
    """How many tiles the kernel's gradients have."""
    tile = packed.shape[2]
    sizes = CELLS[plan.cell].gates * plan.n, plan.n, plan.key_size, given.x.shape[2]
    gates, n, d, columns = (-(-size // tile) for size in sizes)
    is_mapped, has_v = parameters.w_incorporate is not None, parameters.v is not None
    return gates * (n + columns) + 2 * d * n + 2 * n * n * is_mapped + d * has_v


class ConvertedGradients(Gradients):
    """The gradients by torch's products, whose factors are brought to the compute type in two launches.

    What the first made is given up before the second: the copies of both would be most of what a step takes.
    """

    read: Tensor | None = None
    """What the query and the map are made from, once it is converted: the provisional hidden state and the summary."""

    def of(self, names: Sequence[str]) -> list[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        has_keys = self.plan.config.k_top > 0 and not self.plan.is_affine
        if self.compute == self.buffers.store.dtype:
            return super().of(names)
        factors = {"w_ih": "inputs", "w_hh": "before"} | ({"w_memory": "kept"} if has_keys else {})
        first = [factor for name, factor in factors.items() if name in names]
        last = [name for name in ("w_query", "w_incorporate") if has_keys and name in names]
        others = [name for name in names if name not in last]
        self._convert(first)
        found = dict(zip(others, super().of(others), strict=True))
        if last:
            for factor in first:
                delattr(self, factor)
            self._convert_read()
            found |= zip(last, super().of(last), strict=True)
        return [found[name] for name in names]

    def w_incorporate(self) -> Tensor:
        return super().w_incorporate() if self.read is None else self._outer(self._dincorporated().t(), self.read)

    def _convert(self, factors: Sequence[str]) -> None:
        copies: list[Copy] = []
        for name in factors:
            factor: Tensor = getattr(self, name)
            if factor.dtype != self.compute:
                converted = factor.new_empty(factor.shape, dtype=self.compute)
                copies.append((converted.flatten(1), factor.flatten(1)))
                setattr(self, name, converted)
        copy_all(copies)

    def _convert_read(self) -> None:
        """Those of the map beside each other; without a map the first alone."""
        n, parts = self.plan.n, [self.h_read]
        if self.parameters.w_incorporate is not None:
            parts.append(self.summary)
        self.read = self.h_read.new_empty(*self.h_read.shape[:2], len(parts) * n, dtype=self.compute)
        sides = self.read.flatten(0, 1).split(n, 1)
        copy_all([(side, part.flatten(0, 1)) for side, part in zip(sides, parts, strict=True)])
        self.h_read = self.read[..., :n]


class LanesGradients(Gradients):
    """The gradients, those of all parameters by one kernel."""

    def _begin(self) -> None:
        plan, given, parameters, buffers, work = self.plan, self.given, self.parameters, self.buffers, self.work
        x, store, packed = contiguous(given.x), buffers.store, buffers.packed
        assert packed is not None
        padded, inputs, cell = packed.shape[2], x.shape[2], CELLS[plan.cell]
        given_parameters = {name: getattr(parameters, name) for name in NAMES}
        self.found = {
            name: torch.empty_like(contiguous(parameter), dtype=self.dtype)
            for name, parameter in given_parameters.items()
            if parameter is not None
        }
        tiles = _tiles(plan, given, parameters, packed)
        parts = max(min(PROGRAMS * (2 if padded < 128 else 1) // tiles, plan.steps * plan.batch // (4 * ROWS)), 1)
        partial = store.new_empty((tiles, parts, padded * padded + padded))
        ours = (work.dgates, work.dhidden, work.dquery, work.dkeys, work.dincorporated, work.dv)
        launch(
            lanes_gradients_kernel,
            tiles * parts,
            [
                *[store if one is None else one for one in ours],
                x,
                store,
                buffers.h_hat,
                buffers.summary,
                partial,
                packed,
                *[self.found.get(name, store) for name in NAMES],
            ],
            (
                plan.steps,
                plan.batch,
                plan.first_slots,
                plan.slots,
                plan.seen,
                plan.config.k_att,
                self.first,
                inputs,
                parts,
            ),
            _gradient_constants(
                (plan.n, plan.key_size, padded, cell.gates, cell.splits_gates, min(inputs & -inputs, 16)),
                self.compute,
                parameters.w_incorporate is not None,
                parameters.b_ih is not None,
                parameters.scorer_bias is not None,
                parameters.v is not None,
            ),
        )

    def of(self, names: Sequence[str]) -> list[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self.found[name] if name in self.found else getattr(self, name)() for name in names]


@cache
def _gradient_constants(
    sizes: tuple[int, ...],
    compute: torch.dtype,
    is_mapped: bool,
    has_bias: bool,
    has_scorer_bias: bool,
    has_v: bool,
) -> Constants:
    values: dict[str, Any] = dict(zip(("n", "d", "P", "GATES", "SPLITS", "INPUTS"), sizes, strict=True))
    values |= {"MAPPED": is_mapped, "HAS_BIAS": has_bias, "HAS_SCORER_BIAS": has_scorer_bias, "HAS_V": has_v}
    values |= {
        "ROWS": 16 if INTERPRETED else ROWS,
        "TYPE": tl.bfloat16 if compute == torch.bfloat16 else tl.float32,
        "MATH": "plain" if INTERPRETED else "",
        "num_warps": 8 if values["P"] == 128 else 4,
    }
    return Constants(values)
