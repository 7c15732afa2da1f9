"""The CPU's engine: the loops over time, forward and hand-written backward, compiled.

Each thread takes its own rows of the batch through all the steps (see `loop.cpp`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops import precision
from sab.ops.buffers import Buffers, Weights, Work, blank, blank_work, cast
from sab.ops.cpu import loader
from sab.ops.plan import Plan
from sab.ops.plan import unsupported as no_plan
from sab.ops.types import LayerState, LayerWeights

# The order of the enumerations in loop.cpp.
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
SCORERS = ("affine", "affine_tanh", "mlp", "dot")
WEIGHTINGS = ("relu", "relu_norm", "softmax", "softmax_sink")
INCORPORATIONS = ("add", "concat", "add_bounded")

LARGEST_OWN_WEIGHTS = 1 << 20
"""Bytes of recurrent weights above which threads share each product: larger ones leave the cache of a core."""


def unsupported(
    x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
) -> str | None:
    """Why this backend cannot run a configuration, or None where it can."""
    if x.device.type != "cpu":
        return f"the input is on {x.device.type}"
    if precision.compute_type(x, weights) not in (torch.float32, torch.float64):
        return "it computes in float32 and float64 alone"
    if cell_name not in CELLS or config.weighting not in WEIGHTINGS or config.incorporate not in INCORPORATIONS:
        return "it does not have this cell, weighting or incorporation"
    if config.k_top > 0 and config.scorer not in SCORERS:
        return "it does not have this scorer"
    return no_plan(x, state, weights) or loader.unavailable()


# The members of `Arguments` in loop.cpp, in their order.
SIZES = """
    steps batch n key_size first_slots slots k_top k_att k_trunc seen bias_size
    cell scorer weighting dense incorporation threads shared
""".split()
POINTERS = """
    w_hidden w_hidden_back b_hidden w_query w_query_back w_memory w_memory_back
    scorer_bias v w_incorporate w_incorporate_back b_incorporate
    store c gates hidden_new h_hat query keys weights norms summary selected lengths
    hidden_gates joined dh chain dh_hat
    dstore dc dcells dgates dhidden dquery dkeys dsummary dweights dincorporated dv
""".split()


class _Arguments(ctypes.Structure):
    """`Arguments` of loop.cpp."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in SIZES] + [(name, ctypes.c_void_p) for name in POINTERS]

    def set(self, **values: Tensor | int | None) -> None:
        for name, value in values.items():
            if value is not None:
                setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


def pack(plan: Plan, weights: Weights, compute: torch.dtype) -> None:
    """Nothing: each loop has its own panels of the weights."""


def overwrites_gates(plan: Plan) -> bool:
    """No: `gates` are only read."""
    return False


def forward(plan: Plan, weights: Weights, buffers: Buffers) -> None:
    """Run the steps in order; see `sab.ops.buffers` for what is in the buffers."""
    blank(plan, buffers)
    weights = cast(weights, weights.w_hh.dtype)
    store, w_hh = buffers.store, weights.w_hh
    arguments = _arguments(plan, weights)
    bias = store.new_zeros(len(w_hh)) if weights.b_hh is None else weights.b_hh
    packed = {"w_hidden": _pack(w_hh, transposed=True)}
    if weights.w_query is not None and weights.w_memory is not None and not plan.is_affine:
        packed["w_query"] = _pack(weights.w_query, transposed=True)
        packed["w_memory"] = _pack(weights.w_memory, transposed=True)
    scratch = {"hidden_gates": store.new_empty(plan.batch, len(w_hh))}
    if weights.w_incorporate is not None:
        packed["w_incorporate"] = _pack(weights.w_incorporate, transposed=True)
        scratch["joined"] = store.new_empty(plan.batch, 2 * plan.n)
    arguments.set(**buffers._asdict(), **packed, **scratch, b_hidden=bias, b_incorporate=weights.b_incorporate)
    _run("forward", store.dtype, arguments, w_hh.nbytes)


def backward(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
    """Run the steps in reverse order; see `sab.ops.buffers` for what is in the buffers."""
    blank_work(work)
    weights = cast(weights, weights.w_hh.dtype)
    store, w_hh = buffers.store, weights.w_hh
    arguments = _arguments(plan, weights)
    packed = {"w_hidden_back": _pack(w_hh, transposed=False)}
    if weights.w_query is not None and weights.w_memory is not None and not plan.is_affine:
        packed["w_query_back"] = _pack(weights.w_query, transposed=False)
        packed["w_memory_back"] = _pack(weights.w_memory, transposed=False)
    scratch = {name: store.new_empty(plan.batch, plan.n) for name in ("dh", "chain", "dh_hat")}
    if weights.w_incorporate is not None:
        packed["w_incorporate_back"] = _pack(weights.w_incorporate, transposed=False)
        scratch["joined"] = store.new_empty(plan.batch, 2 * plan.n)
    if plan.config.k_top > 0:  # the loop makes what comes from outside the whole gradient, in place
        for name, like in (("dsummary", "summary"), ("dweights", "weights")):
            given = getattr(work, name)
            scratch[name] = torch.zeros_like(getattr(buffers, like)) if given is None else given.clone()
    arguments.set(**buffers._asdict(), **work._asdict() | scratch, **packed)
    _run("backward", store.dtype, arguments, w_hh.nbytes)


def _arguments(plan: Plan, weights: Weights) -> _Arguments:
    config, bias = plan.config, weights.scorer_bias
    arguments = _Arguments()
    arguments.set(
        steps=plan.steps,
        batch=plan.batch,
        n=plan.n,
        key_size=plan.key_size,
        first_slots=plan.first_slots,
        slots=plan.slots,
        k_top=config.k_top,
        k_att=config.k_att,
        k_trunc=config.k_trunc or 0,
        seen=plan.seen,
        bias_size=0 if bias is None else len(bias),
        cell=CELLS.index(plan.cell),
        scorer=SCORERS.index(str(config.scorer)),
        weighting=WEIGHTINGS.index(config.weighting),
        dense=config.forward == "dense",
        incorporation=INCORPORATIONS.index(config.incorporate),
        scorer_bias=bias,
        v=weights.v,
    )
    if plan.is_affine:
        arguments.set(w_query=weights.w_query, w_memory=weights.w_memory)
    return arguments


def _run(direction: str, dtype: torch.dtype, arguments: _Arguments, weights_bytes: int) -> None:
    """Run a pass on torch's number of threads."""
    arguments.set(threads=torch.get_num_threads(), shared=weights_bytes > LARGEST_OWN_WEIGHTS)
    _function(direction, dtype)(ctypes.byref(arguments))


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(loader.library(), f"sab_{name}_{'float' if dtype == torch.float32 else 'double'}")
    function.restype = ctypes.c_int64 if name == "columns" else None
    if name in ("forward", "backward"):
        function.argtypes = [ctypes.c_void_p]
    elif name == "pack":
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p]
    return function


def _pack(weight: Tensor, transposed: bool) -> Tensor:
    """A weight [rows, columns] as the right factor of a product, or its transpose, in the compiled loops' panels."""
    inner, outer = weight.shape[::-1] if transposed else weight.shape
    columns = _function("columns", weight.dtype)()
    panels = -(-outer // columns)
    packed = weight.new_empty(panels * inner * columns)
    _function("pack", weight.dtype)(weight.data_ptr(), inner, outer, transposed, packed.data_ptr())
    return packed
