"""The plan of a pass over a sequence: its sizes and its schedule, and which calls have one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sab import torch_private
from sab.config import SABConfig
from sab.ops import precision, schedule
from sab.ops.types import LayerState, LayerWeights
from sab.parts.registry import SCORERS
from sab.parts.scorers import Scorer, turn_rates


class Plan(NamedTuple):
    """The sizes and the schedule of a pass. All rows have seen the same number of steps."""

    cell: str
    config: SABConfig
    seen: int
    """How many steps come before the first one of this pass."""
    steps: int
    batch: int
    n: int
    key_size: int
    first_slots: int
    """How many microstates there are before the first step."""
    slots: int
    """How many there are after the last."""
    rounds: bool = False
    """Whether products round their factors to bfloat16 (`Options.rounds`)."""

    @property
    def is_affine(self) -> bool:
        """Whether keys are numbers that alone decide what is selected (`Scorer.query_cancels`)."""
        return self.config.k_top > 0 and SCORERS[str(self.config.scorer)].query_cancels

    @property
    def places(self) -> int:
        """How many microstates a row of a bounded macrostate holds at most; 0 where there is no bound."""
        most = self.config.max_memory if self.config.forgets else None
        return 0 if most is None else cast(int, torch.sym_min(self.slots, most))  # min() would fix an open size

    @property
    def first_kept(self) -> int:
        """The first step, from 0, whose hidden state is kept."""
        return schedule.first_kept(self.seen, self.config.k_att)

    @property
    def first_read(self) -> int:
        """The first step, from 0, that has something to read; it may lie past the last."""
        return 0 if self.first_slots > 0 or self.config.k_top == 0 else self.first_kept + 1

    def keeps(self, t: int) -> bool:
        """Whether the hidden state of step t is kept."""
        return self.config.k_top > 0 and schedule.keeps(self.seen + t, self.config.k_att)

    def cut_before(self, t: int) -> bool:
        """Whether no gradient flows from step t along the chain to the one before."""
        return self.config.k_trunc is not None and schedule.cuts(self.seen + t, self.config.k_trunc)

    def slots_at(self, t: int) -> int:
        """How many slots are in use when step t reads."""
        if self.config.k_top == 0:
            return 0
        return schedule.slots_at(self.seen + t, self.seen, self.first_slots, self.config.k_att)


def make_plan(
    x: Tensor,
    microstates: Tensor | None,
    w_hh: Tensor,
    w_memory: Tensor | None,
    cell: str,
    config: SABConfig,
    seen: int,
) -> Plan:
    """The plan of a pass over x [T, B, input_size] that begins with these microstates [B, S, n]."""
    steps, batch, _ = x.shape
    key_size = 0 if w_memory is None else w_memory.shape[0] if w_memory.dim() == 2 else 1
    slots = first_slots = 0 if microstates is None else microstates.shape[1]
    if config.k_top > 0:
        slots = schedule.slots_at(seen + steps, seen, first_slots, config.k_att)
    return Plan(cell, config, seen, steps, batch, w_hh.shape[1], key_size, first_slots, slots)


_turn_rates: dict[tuple[int, torch.device], Tensor] = {}
"""Those that were made, by key size and device."""


def turn_rates_of(plan: Plan, device: torch.device) -> Tensor | None:
    """By how much entries of keys and queries are turned a step, [d], int32; None where they are not."""
    if plan.config.k_top == 0 or not SCORERS[str(plan.config.scorer)].normalises:
        return None
    key = plan.key_size, device
    if key in _turn_rates:
        return _turn_rates[key]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph cannot copy from the host, and memory that it allocates is its own.
        rates = torch.zeros(plan.key_size, dtype=torch.int32, device=device)
        for entry, rate in enumerate(turn_rates(plan.key_size)):
            if rate > 0:
                rates[entry].fill_(rate)
        return rates
    _turn_rates[key] = torch.tensor(turn_rates(plan.key_size), dtype=torch.int32, device=device)
    return _turn_rates[key]


@lru_cache(maxsize=256)
def unfit(scorer: Scorer) -> str | None:
    """Why no loop can score as this scorer does, or None where one may: the loops multiply states with its weights."""
    n, d = 3, 5  # any two sizes that differ
    shapes = scorer.shapes(n, d, None)
    w_memory, dimensions = shapes.get("w_memory", ()), 1 if scorer.query_cancels else 2
    if len(w_memory) == dimensions and w_memory[-1] == n and shapes.get("w_query") == w_memory:
        return None
    return f"it takes scorers with w_memory and w_query of shape {'[n]' if scorer.query_cancels else '[d, n]'}"


def unsupported(x: Tensor, state: LayerState | None, weights: LayerWeights) -> str | None:
    """Why no engine can run a call, or None where one may."""
    compute = precision.compute_type(x, weights)
    if compute not in precision.TYPES:
        return f"it does not compute in {compute}"
    dtype, device = weights.w_hh.dtype, x.device
    for weight in (*weights[:4], *weights.scorer, *weights[5:]):
        if weight is not None and (weight.dtype != dtype or weight.device != device):
            return "the parameters differ from the input in type or device"
    if torch_private.are_transforms_active():
        transforms = torch_private.active_transforms()
        if "jvp" in transforms:
            return "it has no forward-mode derivatives (jvp, jacfwd, hessian), only those of grad, vjp and jacrev"
        if transforms.count("grad") > 1:
            return "it has no second derivatives"
        if not {"vmap", "grad"}.issuperset(transforms):
            return f"the function transforms {', '.join(transforms)} are active"
    if torch_private.computes_tangents():
        return "it has no forward-mode derivatives, which are computed now"
    if state is not None and state.seen is None:
        return (
            "the rows of the state have seen different numbers of steps, too many for a call of so few; rows that have "
            "seen as many are fast together"
        )
    return None
