"""The engines: the modules that run the two loops over time, one for each fast backend."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops.arguments import Given, Options, Parameters
from sab.ops.buffers import Buffers, Edges, Inputs, Prepared, Weights, Work
from sab.ops.gradients import Gradients
from sab.ops.plan import Plan
from sab.ops.types import LayerState, LayerWeights

ENGINES = {"cpu": "sab.ops.cpu.engine", "triton": "sab.ops.triton.engine"}
"""Their modules, by name."""
_imported: dict[str, Any] = {}


class Engine(Protocol):
    """What an engine provides. `sab.ops.buffers` defines what the loops find and leave."""

    SUMS_BIASES: bool
    """Whether the backward loop sums up the gradients of the gates' biases."""
    LAST_GATE_ALONE: bool
    """Whether it leaves of `dhidden` the last gate's part alone where the others are those of `dgates`."""

    def unsupported(
        self, x: Tensor, state: LayerState | None, weights: LayerWeights, cell_name: str, config: SABConfig
    ) -> str | None:
        """Why it cannot run a configuration, or None where it can."""
        ...

    def can_round(self) -> bool:
        """Whether products can round factors in float32 to bfloat16 (`Options.rounds`)."""
        ...

    def pack(self, plan: Plan, weights: Weights, compute: torch.dtype) -> Tensor | None:
        """A tensor for the weights as both loops read them, or None where they read them as they are.

        It holds them already, or `prepare` fills it.
        """
        ...

    def prepare(self, plan: Plan, given: Given, parameters: Parameters, options: Options, saves: bool) -> Prepared:
        """What comes before the forward loop; saves: whether a backward may follow."""
        ...

    def overwrites(self, plan: Plan) -> Collection[str]:
        """The buffers in whose memory the backward loop may find their gradients: `gates`, `hidden_new` and, for its
        gradient one step on, `mapped`."""
        ...

    def forward(
        self, plan: Plan, weights: Weights, buffers: Buffers, edges: Edges, inputs: Inputs | None = None
    ) -> None:
        """Run the steps in order; with `inputs` where the loop makes the input's part of the gates."""
        ...

    def begins_with_output(self, buffers: Buffers) -> bool:
        """Whether the backward loop can begin with the output's gradient alone (`Work.doutput`)."""
        ...

    def backward(self, plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
        """Run the steps in reverse order."""
        ...

    def gradients(
        self,
        plan: Plan,
        given: Given,
        parameters: Parameters,
        buffers: Buffers,
        work: Work,
        names: Sequence[str],
        dtype: torch.dtype | None,
    ) -> Gradients:
        """What makes the gradients of the inputs of these names, after the backward loop."""
        ...


def engine_named(name: str) -> Engine:
    """The module of an engine, imported at the first call."""
    if name not in _imported:
        _imported[name] = importlib.import_module(ENGINES[name])
    return _imported[name]
