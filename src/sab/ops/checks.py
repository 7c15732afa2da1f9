"""What the loops over time are given, checked: compiled code would read past the end of a tensor that is too short.

A layer's own tensors pass. Others can come from a parametrization, from `torch.func.functional_call`, or from whoever
calls the operation by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from sab.config import MOST_STEPS
from sab.errors import UserValueError
from sab.ops import schedule
from sab.ops.arguments import INPUTS, Given, Initial, Options, Parameters, unpack_buffers
from sab.ops.buffers import Buffers, Outside, allocate
from sab.ops.plan import Plan
from sab.parts.registry import CELLS, SCORERS

Group = TypeVar("Group", Given, Parameters, Outside)


def as_they_lie(group: Group) -> Group:
    """The tensors of a NamedTuple as numbers in memory: torch may have put off to negate one (`Tensor.is_neg`)."""
    if any(tensor is not None and tensor.is_neg() for tensor in group):
        group = group._make(None if tensor is None else tensor.resolve_neg() for tensor in group)
    return group


def check_inputs(given: Given, initial: Initial, parameters: Parameters, options: Options) -> None:
    """Refuse tensors whose sizes do not fit together, and a number of steps that cannot be counted on from."""
    if not 0 <= options.seen <= MOST_STEPS:
        raise UserValueError(f"seen must be from 0 to {MOST_STEPS}; got {options.seen}.", "seen")
    if options.rounds and options.compute != torch.float32:
        raise UserValueError(f"rounds must be False for products in {options.compute}; got True.", "rounds")
    sizes = *given.x.shape[1:], parameters.w_hh.shape[-1]
    first_slots = 0 if initial.microstates is None else initial.microstates.shape[1]
    w_memory, bias = parameters.w_memory, parameters.scorer_bias
    key_size = 0 if w_memory is None else w_memory.shape[0] if w_memory.dim() == 2 else 1
    expected = _shapes(options.cell, options.scorer, *sizes, first_slots, key_size, 0 if bias is None else len(bias))
    for name, shape, tensor in zip(INPUTS, expected, (*given, *initial, *parameters), strict=True):
        if tensor is not None and tensor.shape != shape and name != "x":
            wanted = "absent" if shape is None else f"of shape {list(shape)}"
            raise UserValueError(f"{name} must be {wanted}; got {list(tensor.shape)}.", name)
        if tensor is None and shape is not None and options.layer_norm and name.startswith("norm_"):
            raise UserValueError(f"{name} must be of shape {list(shape)}; got None.", name)
    config = options.config()
    if config.max_memory is not None and config.forgets and first_slots > config.max_memory:
        most = config.max_memory
        raise UserValueError(f"microstates must be at most {most}; got {first_slots}.", "microstates")
    if config.counts_reads and first_slots > 0 and (initial.reads is None or initial.reads.dtype != torch.int64):
        raise UserValueError(f"reads must be of shape {[sizes[0], first_slots]} and of type torch.int64.", "reads")
    lengths = given.lengths
    if lengths is not None and (lengths.dtype != torch.int64 or not lengths.is_contiguous()):
        raise UserValueError(f"lengths must be contiguous and of type torch.int64; got {lengths.dtype}.", "lengths")


@lru_cache(maxsize=256)
def _shapes(
    cell: str, scorer: str, batch: int, inputs: int, n: int, first_slots: int, key_size: int, bias_size: int
) -> tuple[torch.Size | None, ...]:
    """The shapes of `INPUTS`, in their order; None for what there cannot be."""
    gates = CELLS[cell].gates * n
    found: dict[str, tuple[int, ...]] = {
        "lengths": (batch,),
        "h": (batch, n),
        "microstates": (batch, first_slots, n),
        "keys": (batch, first_slots, key_size),
        "reads": (batch, first_slots),
        "w_ih": (gates, inputs),
        "w_hh": (gates, n),
        "b_ih": (gates,),
        "b_hh": (gates,),
        "w_incorporate": (n, 2 * n),
        "b_incorporate": (n,),
        "norm_ih": (gates,),
        "norm_hh": (gates,),
        "h_mask": (batch, n),
    }
    if CELLS[cell].has_c:
        found["c"] = (batch, n)
    if CELLS[cell].normalises_c:
        found |= {"norm_c_weight": (n,), "norm_c_bias": (n,)}
    of_scorer = SCORERS[scorer].shapes(n, key_size, bias_size or None) if key_size > 0 else {}
    found |= {"scorer_bias" if name == "bias" else name: shape for name, shape in of_scorer.items()}
    return tuple(torch.Size(found[name]) if name in found else None for name in INPUTS)


def check_saved(saved: Sequence[Tensor], plan: Plan, options: Options) -> None:
    """Refuse buffers that no forward pass left; `plan` is the one that is read off them."""
    buffers = unpack_buffers(saved, None, options)
    slots = schedule.slots_at(plan.seen + plan.steps, plan.seen, plan.first_slots, plan.config.k_att)
    expected = allocate(plan, buffers.gates.new_empty(buffers.gates.shape, device="meta"), None, None)
    for name, like, tensor in zip(Buffers._fields, expected, buffers, strict=True):
        if like is None or tensor is None:
            continue
        if tensor.shape != like.shape or tensor.dtype != like.dtype or not tensor.is_contiguous():
            raise UserValueError(f"{name} must be what the forward pass left; got {list(tensor.shape)}.", name)
    if plan.config.k_top > 0 and plan.slots != slots:
        raise UserValueError(f"keys must be of {slots} slots; got {plan.slots}.", "keys")
