"""The CPU's engine: the loops over time, forward and hand-written backward, compiled.

Each thread takes its own rows of the batch through all the steps (see `loop.cpp`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sab import torch_private
from sab.config import FORGETS, SABConfig
from sab.ops.arguments import Given, Options, Parameters
from sab.ops.buffers import Buffers, Edges, Inputs, Prepared, Weights, Work, begin, cast, finish, gate_bias
from sab.ops.cpu import loader
from sab.ops.cpu.arguments import Arguments
from sab.ops.gradients import Gradients
from sab.ops.plan import Plan, turn_rates_of, unfit
from sab.ops.plan import unsupported as no_plan
from sab.ops.precision import as_type, contiguous
from sab.ops.preparation import input_gates, inputs_of
from sab.ops.types import LayerState, LayerWeights
from sab.parts import registry

SUMS_BIASES = True
LAST_GATE_ALONE = True
LARGEST_CACHED = 1 << 20
"""Bytes of weights that stay in the cache of a core."""
LARGEST_WITH_OWN_ROWS = 1 << 23
"""Bytes of recurrent weights above which threads always share each product."""
FEWEST_OWN_ROWS = 8
"""Fewest rows of a thread for which it pays to fetch weights again at every step."""


def unsupported(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> str | None:
    """Why this backend cannot run a configuration, or None where it can."""
    if x.device.type != "cpu":
        return f"the input is on {x.device.type}"
    if config.k_top > 0 and callable(config.scorer):
        return "it does not take a callable as the scorer"
    return no_plan(x, state, weights) or _missing(*config.part_names(cell_name))


@torch_private.constant_result
def _missing(cell: str, scorer: str | None, *others: str | None) -> str | None:
    """Why there is no library with these parts, or None where there is one."""
    names = cell, scorer, *others
    without_struct = registry.first_missing(names, lambda kind, name: registry.provided(kind, name, "cpp") is not None)
    if without_struct is None and scorer is not None:
        without_struct = unfit(registry.SCORERS[scorer])
    return without_struct or loader.unavailable() or registry.first_missing(names, lambda *part: _index(*part) >= 0)


def _index(kind: str, name: str | None) -> int:
    """The number by which the library knows a part; -1 where it does not have it, or none is used."""
    return -1 if name is None else loader.library().index(kind, registry.PARTS[kind][name].cpp)


def can_round() -> bool:
    """Where the library was compiled for a processor that multiplies bfloat16 faster."""
    return loader.has_bfloat16()


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> None:
    """Nothing: each loop has its own panels of the weights."""


def overwrites(plan: Plan) -> Collection[str]:
    """All that may be: an entry's gradient is written after the entry was read."""
    return "gates", "hidden_new", "mapped"


def prepare(plan: Plan, given: Given, parameters: Parameters, options: Options, saves: bool) -> Prepared:
    """The input's part of the gates, unless the loop makes it: step by step it stays in the cache.

    For larger weights one product over all steps is faster; torch's would not round its factors as others do then.
    """
    inputs = inputs_of(given, parameters, options)
    if not plan.rounds and (inputs.w_ih.numel() + parameters.w_hh.numel()) * inputs.w_ih.itemsize > LARGEST_CACHED:
        return Prepared(input_gates(given, parameters, options))
    shape = plan.steps if saves else 1, plan.batch, len(inputs.w_ih)
    return Prepared(inputs.x.new_empty(shape), inputs=inputs)


def forward(plan: Plan, weights: Weights, buffers: Buffers, edges: Edges, inputs: Inputs | None = None) -> None:
    """Run the steps in order; see `sab.ops.buffers` for what is in the buffers."""
    begin(plan, buffers, edges)
    run_forward(plan, weights, buffers, inputs)
    finish(plan, buffers, edges)


def run_forward(plan: Plan, weights: Weights, buffers: Buffers, inputs: Inputs | None = None) -> None:
    """The loop alone, from the state in the buffers."""
    store = buffers.store
    weights = cast(weights, store.dtype)
    w_hh = weights.w_hh
    arguments = arguments_of(plan, weights)
    bias = store.new_zeros(len(w_hh)) if weights.b_hh is None else weights.b_hh
    packing = partial(_pack, rounds=plan.rounds, transposed=True)
    packed = {"w_hidden": packing(w_hh)}
    if weights.w_query is not None and weights.w_memory is not None and not plan.is_affine:
        packed["w_query"] = packing(weights.w_query)
        packed["w_memory"] = packing(weights.w_memory)
    scratch = {"hidden_gates": store.new_empty(plan.batch, len(w_hh)), **_masked(weights)}
    if weights.w_incorporate is not None:
        of_h_hat, of_summary = weights.w_incorporate.chunk(2, dim=1)
        packed["w_incorporate"] = packing(of_h_hat)
        packed["w_summary"] = packing(of_summary)
    if plan.config.layer_norm:
        joined = gate_bias(weights.b_ih, weights.b_hh, plan.cell)
        scratch["b_input"] = torch.zeros_like(bias) if joined is None else joined
    if inputs is not None:
        packed["w_x"] = packing(inputs.w_ih)
        arguments.set(x=inputs.x, b_x=inputs.b_ih, input_size=inputs.x.shape[2])
    arguments.set(saves=len(buffers.h_hat) == plan.steps)
    arguments.set(**buffers._asdict(), **packed, **scratch, b_hidden=bias, b_incorporate=weights.b_incorporate)
    _run("forward", store.dtype, arguments, w_hh.nbytes, plan.batch)


def begins_with_output(buffers: Buffers) -> bool:
    """No."""
    return False


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
    """Run the steps in reverse order; see `sab.ops.buffers` for what is in the buffers."""
    for sums in work.sums:
        if sums is not None:
            sums.zero_()
    store = buffers.store
    weights = cast(weights, store.dtype)
    w_hh = weights.w_hh
    arguments = arguments_of(plan, weights)
    packing = partial(_pack, rounds=plan.rounds, transposed=False)
    packed = {"w_hidden_back": packing(w_hh)}
    if weights.w_query is not None and weights.w_memory is not None and not plan.is_affine:
        packed["w_query_back"] = packing(weights.w_query)
        packed["w_memory_back"] = packing(weights.w_memory)
    scratch = {name: store.new_empty(plan.batch, plan.n) for name in ("dh", "chain", "dh_hat", "dsummary_now")}
    scratch |= _masked(weights)
    if buffers.hidden_new is not None:
        scratch["hidden_gates"] = store.new_empty(plan.batch, len(w_hh))
    if weights.w_incorporate is not None:
        of_h_hat, of_summary = weights.w_incorporate.chunk(2, dim=1)
        packed["w_incorporate_back"] = packing(of_h_hat)
        packed["w_summary_back"] = packing(of_summary)
    if buffers.weights is not None:  # the loop makes what comes from outside the whole gradient, in place
        scratch["dweights"] = torch.zeros_like(buffers.weights) if work.dweights is None else work.dweights.clone()
    arguments.set(saves=1, **buffers._asdict(), **work._asdict() | scratch, **packed)
    _run("backward", store.dtype, arguments, w_hh.nbytes, plan.batch)


def gradients(
    plan: Plan,
    given: Given,
    parameters: Parameters,
    buffers: Buffers,
    work: Work,
    names: Sequence[str],
    dtype: torch.dtype | None,
) -> Gradients:
    """By the compiled products."""
    return _Gradients(plan, given, parameters, buffers, work, dtype)


class _Gradients(Gradients):
    """The gradients with products that use all of the processor's vectors, which MKL does on Intel's alone."""

    def _outer(self, left_t: Tensor, right: Tensor) -> Tensor:
        rows = contiguous(self._rows(right))
        if rows.dtype not in (torch.float32, torch.float64):
            return super()._outer(left_t, right)
        left = left_t.t()
        assert left.stride(1) == 1 or left.shape[1] == 1
        (count, height), width = left.shape, rows.shape[1]
        found = rows.new_empty(height, width)
        sizes = height, width, count, torch.get_num_threads()
        run = function("outer", rows.dtype)
        rounds = self.plan.rounds and not (self.plan.is_affine and height == 1)  # nor are the scores of affine scorers
        run(left.data_ptr(), left.stride(0), rows.data_ptr(), found.data_ptr(), *sizes, rounds)
        return as_type(found, self.dtype)


def arguments_of(plan: Plan, weights: Weights) -> Arguments:
    """The sizes, the parts and the weights that are not packed."""
    config, bias = plan.config, weights.scorer_bias
    arguments = Arguments()
    cell, scorer, weighting, incorporation = map(_index, registry.PARTS, config.part_names(plan.cell))
    arguments.set(
        steps=plan.steps,
        batch=plan.batch,
        n=plan.n,
        key_size=plan.key_size,
        first_slots=plan.first_slots,
        slots=plan.slots,
        rounds=plan.rounds,
        k_top=config.k_top,
        k_att=config.k_att,
        k_trunc=config.k_trunc or 0,
        seen=plan.seen,
        bias_size=0 if bias is None else len(bias),
        cell=cell,
        scorer=scorer,
        weighting=weighting,
        dense=config.forward == "dense",
        incorporation=incorporation,
        scorer_bias=bias,
        v=weights.v,
        h_mask=weights.h_mask,
    )
    if plan.config.layer_norm:
        arguments.set(**{name: value for name, value in weights._asdict().items() if name.startswith("norm_")})
    if plan.is_affine:
        arguments.set(w_query=weights.w_query, w_memory=weights.w_memory)
    if config.forgets:
        bound = {"max_memory": config.max_memory, "forget": FORGETS.index(config.forget), "places": plan.places}
        arguments.set(**bound, remembered=plan.first_slots)
    if config.is_hierarchical:
        arguments.set(block_size=config.block_size, blocks=config.blocks)
    arguments.set(turn_rates=turn_rates_of(plan, weights.w_hh.device))
    return arguments


def _masked(weights: Weights) -> dict[str, Tensor]:
    """Scratch for the masked hidden states of a step, or their gradients, where there is a mask."""
    return {} if weights.h_mask is None else {"masked": torch.empty_like(weights.h_mask)}


def shares_products(weights_bytes: int, rows: int) -> bool:
    """Whether threads share each product, and wait for each other around it, or have rows of their own.

    Two threads with 16 rows each took 10 per cent less time with rows of their own at n = 512, and as long at 700; at
    1,000 they took 10 per cent more. Other programs on the same cores lengthen every wait.
    """
    rows_each = rows // torch.get_num_threads()
    return weights_bytes > LARGEST_WITH_OWN_ROWS or (weights_bytes > LARGEST_CACHED and rows_each < FEWEST_OWN_ROWS)


def _run(direction: str, dtype: torch.dtype, arguments: Arguments, weights_bytes: int, rows: int) -> None:
    """Run a pass on torch's number of threads."""
    arguments.set(threads=torch.get_num_threads(), shared=shares_products(weights_bytes, rows))
    if function(direction, dtype)(ctypes.byref(arguments)) != 0:
        raise RuntimeError(
            f"the compiled {direction} pass refused its arguments: a part or a precision is not in the library."
        )


_TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16"}
"""The ends of the names of the compiled functions."""


@cache
def function(name: str, dtype: torch.dtype) -> Any:
    """A compiled function by its name, for numbers of this type."""
    found = getattr(loader.library().functions, f"sab_{name}_{_TYPES[dtype]}")
    found.restype = None if name in ("pack", "outer", "sketch", "blocks") else ctypes.c_int64
    if name in ("forward", "backward", "fewest_sketched"):
        found.argtypes = [ctypes.c_void_p]
    elif name == "outer":
        found.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, ctypes.c_bool]
    elif name == "step":
        found.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    elif name == "sketch":
        found.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 3]
    elif name == "blocks":
        found.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5, ctypes.c_void_p]
    elif name == "block_room":
        found.argtypes = [ctypes.c_int64] * 2
    elif name == "pack":
        found.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_bool, ctypes.c_void_p]
    return found


def _pack(weight: Tensor, transposed: bool, rounds: bool) -> Tensor:
    """A weight [rows, columns] as the right factor of a product, or its transpose, in the compiled loops' panels.

    Its rows may have gaps between them. rounds: in pairs of bfloat16, each as large as a float32 number.
    """
    inner, outer = weight.shape[::-1] if transposed else weight.shape
    columns = function("columns", weight.dtype)()
    panels = -(-outer // columns)
    packed = weight.new_empty(panels * (-(-inner // 2) if rounds else inner) * columns)
    run = function("pack", torch.bfloat16 if rounds else weight.dtype)
    run(weight.data_ptr(), weight.stride(0), inner, outer, transposed, packed.data_ptr())
    return packed
