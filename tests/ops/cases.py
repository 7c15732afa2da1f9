"""What the tests of the layers share: making layers, comparing tensors, taking all gradients, drawing cases."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import sab
from sab.config import FORGETS
from sab.errors import SlowBackendWarning
from sab.ops import dispatch
from sab.parts import registry

CELLS, SCORERS, WEIGHTINGS, INCORPORATIONS = map(tuple, registry.PARTS.values())
WEIGHTINGS_AND_FORWARDS = [(name, "sparse") for name in WEIGHTINGS] + [
    (name, "dense") for name, weighting in registry.WEIGHTINGS.items() if weighting.normalises_all
]
BACKENDS = [name for name in dispatch.BACKENDS if name != "triton"]
"""Those that run on the CPU; interpreted, the Triton kernels are too slow for every test and have their own."""
DOUBLE = torch.float64
BOUNDS = st.none() | st.integers(1, 3)
"""For `max_memory`."""
PLAIN: dict[str, Any] = {"k_top": 0, "k_trunc": None}
"""The options that make a layer `torch.nn`'s."""


def make_layer(cell: str, *sizes: int, **options: Any) -> Any:
    """A float64 layer of this cell unless options say otherwise; its type is Any, as it may be any of the three."""
    options = {"dtype": DOUBLE} | options
    if cell.startswith("rnn_"):
        return sab.SABRNN(*sizes, nonlinearity=cell.removeprefix("rnn_"), **options)
    return {"lstm": sab.SABLSTM, "gru": sab.SABGRU}[cell](*sizes, **options)


def make_torch(cell: str, *sizes: int, **options: Any) -> Any:
    """The `torch.nn` layer of this cell, in float64."""
    options = {"dtype": DOUBLE} | options
    if cell.startswith("rnn_"):
        return nn.RNN(*sizes, nonlinearity=cell.removeprefix("rnn_"), **options)
    return {"lstm": nn.LSTM, "gru": nn.GRU}[cell](*sizes, **options)


def both(cell: str, *sizes: int, **options: Any) -> tuple[Any, Any]:
    """A `torch.nn` layer and ours without memory, with the same weights."""
    theirs = randomize(make_torch(cell, *sizes, **options))
    ours = make_layer(cell, *sizes, **options, **PLAIN)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def randomize(layer: nn.Module, seed: int = 0, scale: float = 0.6) -> Any:
    """Draw all parameters anew from a normal distribution: scores well apart, nothing zero or identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) * scale)
    return layer


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, what: str = "", tolerance: float | None = None) -> None:
    """Compare to within rounding of the type, or within `tolerance`; whole numbers must be equal."""
    if tolerance is None:
        tolerance = 1e-5 if actual.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda message: f"{what}: {message}"
    )


def run(layer: Any, *arguments: Any, **options: Any) -> Any:
    """`layer(...)` with the whole state as a SABState, whatever the cell."""
    output, state, *attention = layer(*arguments, **options)
    return output, state.state if isinstance(state, sab.SABHidden) else state, *attention


def weighted_sum(tensors: list[Tensor], seed: int = 7) -> Tensor:
    """A scalar that depends on every entry of every tensor, each in its own way."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=DOUBLE)
    for tensor in tensors:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        total = total + (tensor * drawn.to(tensor.device)).sum()
    return total


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of `weighted_sum(outputs)`; zeros where there is no way."""
    total = weighted_sum(outputs)
    if not total.requires_grad:
        return [torch.zeros_like(tensor) for tensor in inputs]
    return list(torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True))


@contextmanager
def warns_slow(reason: str) -> Iterator[pytest.WarningsRecorder]:
    """A call in this context warns that it is slow, for this reason, as if nothing had been said before."""
    dispatch._warned.clear()
    with pytest.warns(SlowBackendWarning, match=reason) as caught:
        yield caught


@contextmanager
def runs_fast() -> Iterator[None]:
    """No call in this context falls back to the reference."""
    dispatch._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowBackendWarning)
        yield


@contextmanager
def registries_restored() -> Iterator[None]:
    """Parts that are registered in this context are gone after it."""
    before = {kind: dict(parts) for kind, parts in registry.PARTS.items()}
    try:
        yield
    finally:
        for kind, parts in before.items():
            registry.PARTS[kind].clear()
            registry.PARTS[kind].update(parts)


@dataclass
class Case:
    """A layer's options and the shape of what it is run on."""

    cell: str
    sizes: tuple[int, int, int]
    steps: int
    batch: int
    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def layer(self) -> Any:
        return randomize(make_layer(self.cell, *self.sizes, **self.options), self.seed)

    def x(self) -> Tensor:
        return randn(self.steps, self.batch, self.sizes[0], seed=self.seed + 1)


@st.composite
def cases(draw: st.DrawFn, max_steps: int = 9, max_batch: int = 3, ragged: bool = True, **fixed: Any) -> Case:
    """A random case; `fixed` holds a value, or a strategy for one, for each option that is not free."""

    def take(name: str, strategy: st.SearchStrategy[Any]) -> Any:
        given = fixed.get(name, strategy)
        return draw(given) if isinstance(given, st.SearchStrategy) else given

    steps = draw(st.integers(1, max_steps))
    batch = draw(st.integers(1, max_batch))
    sizes = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), take("num_layers", st.integers(1, 2)))
    weighting, forward = take("weighting_and_forward", st.sampled_from(WEIGHTINGS_AND_FORWARDS))
    options = {
        "bias": take("bias", st.booleans()),
        "bidirectional": take("bidirectional", st.booleans()),
        "k_top": take("k_top", st.integers(0, 4)),
        "k_att": take("k_att", st.integers(1, 3)),
        "k_trunc": take("k_trunc", st.none() | st.integers(1, 5)),
        "scorer": take("scorer", st.sampled_from(SCORERS)),
        "weighting": weighting,
        "forward": forward,
        "incorporate": take("incorporate", st.sampled_from(INCORPORATIONS)),
        "attention_size": take("attention_size", st.none() | st.integers(1, 4)),
        "max_microstates": take("max_microstates", st.none() | st.integers(1, 5)),
        "backend": take("backend", st.sampled_from(["auto", "reference"])),
        # The layer norm of one or two entries is the same for nearly all.
        "layer_norm": take("layer_norm", st.booleans()) and sizes[1] > 2,
        "max_memory": take("max_memory", st.none()),
    }
    if options["max_memory"] is not None:
        options["forget"] = take("forget", st.sampled_from(FORGETS))
    return Case(
        cell=take("cell", st.sampled_from(CELLS)),
        sizes=sizes,
        steps=steps,
        batch=batch,
        lengths=draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch)) if ragged else [steps] * batch,
        options=options,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def pieces(draw: st.DrawFn, steps: int) -> list[slice]:
    """A random division of `steps` into pieces of at least one step."""
    cuts = sorted(draw(st.sets(st.integers(1, steps - 1), max_size=steps - 1))) if steps > 1 else []
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, steps], strict=True)]
