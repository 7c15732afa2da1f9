"""The way of gradients into earlier chunks, each of which is run again from the state that it began with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab.online.driver import Driver, last, leaf
from sab.online.stream import Chunk, Horizon, Stream, Weights


class Arrived(NamedTuple):
    """The gradients that have arrived at what is kept of a stream."""

    h: Tensor | None
    c: Tensor | None
    """Those of the state after its last step."""
    microstates: Tensor
    keys: Tensor
    """Those of all microstates and keys, as the stream keeps them; more may be added."""

    @classmethod
    def at(cls, stream: Stream, horizon: Horizon, h: Any, c: Any, microstates: Any, keys: Any) -> Arrived:
        """The gradients of the state after the stream's last step, and of its memory; None where there is none."""
        arrived = cls(h, c, torch.zeros_like(stream.microstates), torch.zeros_like(stream.keys))
        arrived.add(stream.memory(horizon, stream.seen), microstates, keys)
        return arrived

    def add(self, slots: tuple[Any, ...], microstates: Tensor | None, keys: Tensor | None) -> None:
        for sums, gradient in ((self.microstates, microstates), (self.keys, keys)):
            if gradient is not None:
                sums[slots] += gradient

    def masses(self, slots: list[slice]) -> list[tuple[bool, float]]:
        """Whether there is any gradient at these microstates and their keys, and the sum of its squares."""
        both = torch.cat([part.movedim(-2, 0).flatten(1) for part in (self.microstates, self.keys)], 1)
        has_gradient, squares = both.any(1).tolist(), both.square().sum(1).tolist()
        return [(any(has_gradient[one]), sum(squares[one])) for one in slots]


def due(stream: Stream, horizon: Horizon, arrived: Arrived, limit: int | None) -> Iterator[tuple[Chunk, bool]]:
    """The chunks that gradient has arrived at, newest first, and whether each is to be run again.

    Whoever runs one adds what it passes on to `arrived` before the next is asked for. Of those that are over, `limit`
    are run at most: one is left out where as many as may still be run wait behind it with more gradient.
    """
    waiting, left = list(stream.chunks), math.inf if limit is None else limit
    if waiting and _is_open(stream, horizon, waiting[-1]):
        chunk = waiting.pop()
        slots = own_slots(stream, horizon, chunk)
        found = (arrived.h, arrived.c, arrived.microstates[slots], arrived.keys[slots])
        if any(gradient is not None and bool(gradient.any()) for gradient in found):
            yield chunk, True
    slots = [own_slots(stream, horizon, chunk)[1] for chunk in waiting]
    masses = arrived.masses(slots)
    while waiting:
        chunk, (has_gradient, mass) = waiting.pop(), masses.pop()
        if not has_gradient:
            continue
        runs = left > len(waiting) or sum(other > mass for _, other in masses) < left
        yield chunk, runs
        if runs:
            left -= 1
            masses = arrived.masses(slots[: len(waiting)])


def own_slots(stream: Stream, horizon: Horizon, chunk: Chunk) -> tuple[Any, ...]:
    """The index of the microstates that a chunk made."""
    end = min(stream.seen, chunk.first + horizon.k_trunc)
    return stream.slots(horizon.next(chunk.first), horizon.next(end))


def _is_open(stream: Stream, horizon: Horizon, chunk: Chunk) -> bool:
    """Whether the chain goes on from a chunk: the stream stands in the midst of it."""
    return stream.seen < chunk.first + horizon.k_trunc


def run_again(
    driver: Driver,
    stream: Stream,
    horizon: Horizon,
    chunk: Chunk,
    arrived: Arrived,
    today: Weights | None = None,
    *,
    of_inputs: bool = False,
) -> list[list[Tensor | None]]:
    """Run a chunk again and send back what has arrived at it; what its microstates' memory gets is added to `arrived`.

    Returns for each of its parts the gradients of the parameters that learn, or of the layer's input alone. `today` are
    the weights of parts that kept none; None: the model's own.
    """
    memory = stream.memory(horizon, chunk.first)
    leaves = leaf(stream.microstates[memory]), leaf(stream.keys[memory])
    state = stream.state(horizon, chunk.first, chunk.h, chunk.c, *leaves)
    names = driver.parameters()
    wanted: list[list[Tensor]] = []
    for x, weights in chunk.parts:
        weights = today if weights is None else weights
        if weights is not None and not of_inputs:
            weights = {name: leaf(weights[name]) for name in names}
        given, state = driver.rerun(x, weights, state, of_inputs)
        wanted.append([given] if of_inputs else [*(names if weights is None else weights).values()])
    slots, is_open = own_slots(stream, horizon, chunk), _is_open(stream, horizon, chunk)
    gradients = [arrived.microstates[slots], arrived.keys[slots]]
    outputs = [last(part, gradients[0].shape[-2]) for part in (state.microstates, state.keys)]
    if is_open:
        outputs, gradients = [*outputs, state.h, state.c], [*gradients, arrived.h, arrived.c]
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and gradient is not None and output.requires_grad
    ]
    flat = [tensor for part in wanted for tensor in part]
    if not pairs:  # nothing that learns, or could be read, comes before
        return [[None for _ in part] for part in wanted]
    found = torch.autograd.grad(
        [output for output, _ in pairs], [*flat, *leaves], [gradient for _, gradient in pairs], allow_unused=True
    )
    arrived.add(memory, *found[len(flat) :])
    found = iter(found)
    return [[next(found) for _ in part] for part in wanted]
