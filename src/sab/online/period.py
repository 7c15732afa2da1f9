"""The pieces of a stream between two updates: one graph, that begins at the kept state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab.errors import UserTypeError, UserValueError
from sab.online.driver import Driver, last, leaf, state_of
from sab.online.stream import Chunk, Horizon, Stream, Weights
from sab.parts.registry import CELLS
from sab.state import Attention, SABHidden, SABState


class Leaves(NamedTuple):
    """The state that a period began with, as leaves of its graph."""

    h: Tensor
    c: Tensor | None
    microstates: Tensor
    keys: Tensor

    def given(self) -> list[Tensor]:
        """Those that there are."""
        return [one for one in self if one is not None]

    def named(self, found: Any) -> dict[str, Tensor | None]:
        """What was found for `given`, by name."""
        names = [name for name, one in self._asdict().items() if one is not None]
        return dict.fromkeys(self._fields) | dict(zip(names, found, strict=True))


class Begun(NamedTuple):
    """A period whose layer has been called."""

    stream: Stream
    """The stream before it."""
    leaves: Leaves
    state: SABState
    """The state after it, and how many steps that has seen."""
    seen: int
    chunks: tuple[Chunk, ...]
    """Those of the stream, and its own."""
    grown: tuple[tuple[Tensor, Tensor], ...] = ()
    """The microstates and keys that it has added."""

    def end(self, horizon: Horizon) -> Stream:
        """The stream after it."""
        grown = [(microstates.detach(), keys.detach()) for microstates, keys in self.grown]
        c = None if self.state.c is None else _plain(self.state.c)
        return self.stream.after(horizon, self.seen, _plain(self.state.h), c, self.chunks, grown)


class Period(NamedTuple):
    """The pieces since the last update."""

    weights: Weights
    """A copy of the weights of all of them."""
    stream: Stream | None
    """The stream before them; None for one that has not begun."""
    begun: Begun | None = None
    """None where there are no pieces yet."""
    pieces: tuple[tuple[Tensor, Any], ...] = ()
    total: Tensor | None = None
    """The sum of their losses."""

    def without_graph(self) -> Period:
        """What it takes to run it again."""
        return self._replace(begun=None, total=None)


class Runner:
    """Runs the pieces of a period. With `keeps_weights` the chunks keep the weights that they ran with."""

    def __init__(self, driver: Driver, horizon: Horizon, keeps_weights: bool):
        self.driver, self.horizon, self.keeps_weights = driver, horizon, keeps_weights

    def run(
        self, period: Period, x: Tensor, y: Any, weights: Weights | None = None, inputs: list[Tensor] | None = None
    ) -> tuple[Tensor, Period]:
        """The prediction for a piece, and the period with it.

        It runs with the model's weights, or with these. `inputs` collects what the layer is given, made leaves.
        """
        begun: list[Begun] = []

        def advance(given: Tensor, asks: bool) -> tuple[Any, ...]:
            if inputs is not None:
                given = leaf(given)
                inputs.append(given)
            before = self._begin(period.stream, given, x) if period.begun is None else period.begun
            after, output, end, attention = self._advance(before, period.weights, given, x, asks)
            begun.append(after)
            return (output, end, attention) if asks else (output, end)

        prediction = self.driver.call(x, weights, advance)
        prediction = prediction[0] if isinstance(prediction, tuple) else prediction
        if not isinstance(prediction, Tensor):
            kind = type(prediction).__name__
            raise UserTypeError(f"model must give a tensor, or a tuple that begins with one; got {kind}.", "model")
        if not all(bool(torch.isfinite(part).all()) for part in begun[0].state):
            raise UserValueError(
                f"model must have finite hidden states; they are not after {begun[0].seen} steps.", "model"
            )
        return prediction, period._replace(begun=begun[0], pieces=(*period.pieces, (x, y)))

    def _begin(self, stream: Stream | None, given: Tensor, x: Tensor) -> Begun:
        """A period without steps, and its leaves."""
        stream = self._fresh(given, x) if stream is None else stream
        memory = stream.memory(self.horizon, stream.seen)
        c = None if stream.c is None else leaf(stream.c)
        leaves = Leaves(leaf(stream.h), c, leaf(stream.microstates[memory]), leaf(stream.keys[memory]))
        return Begun(stream, leaves, stream.state(self.horizon, stream.seen, *leaves), stream.seen, stream.chunks)

    def _fresh(self, given: Tensor, x: Tensor) -> Stream:
        """A stream before its first step."""
        layer, time = self.driver.layer, self.driver.time(given)
        if x.dim() <= time or x.shape[time] != given.shape[time]:
            raise UserValueError(
                f"x must have its steps in dimension {time}, as many as the layer is given; got shape {list(x.shape)} "
                f"for {given.shape[time]} steps.",
                "x",
            )
        batch = [] if given.dim() == 2 else [given.shape[1 - time]]
        new = layer.weight_hh_l0.detach().new_zeros
        h, slots = new(layer.num_layers, *batch, layer.hidden_size), (layer.num_layers, *batch, 0)
        return Stream(
            seen=0,
            time=time,
            like=x.narrow(time, 0, 0).clone(),
            h=h,
            c=h if CELLS[layer.cell].has_c else None,
            microstates=new(*slots, layer.hidden_size),
            keys=new(*slots, layer._key_size),
            number=0,
        )

    def _advance(
        self, begun: Begun, weights: Weights, given: Tensor, x: Tensor, asks: bool
    ) -> tuple[Begun, Tensor, SABState | SABHidden, Attention | None]:
        """The layer over a piece, chunk by chunk: the period after it, and what the layer gives for it."""
        horizon, time = self.horizon, self.driver.time(given)
        stream, leaves, state, seen, *_ = begun
        chunks, grown = list(begun.chunks), list(begun.grown)
        outputs, attentions, end = [], [], None
        done, steps = 0, given.shape[time]
        while done < steps:
            length = min(steps - done, horizon.k_trunc - seen % horizon.k_trunc)
            if seen == horizon.begin(seen):
                state = state.recent(horizon.next(seen) - horizon.oldest(seen))
                chunks.append(Chunk(seen, _plain(state.h), None if state.c is None else _plain(state.c)))
            output, end, *attention = self.driver.forward(given.narrow(time, done, length), state, asks)
            state = state_of(end)
            own = weights if self.keeps_weights else None
            chunks[-1] = chunks[-1].grown(x.narrow(time, done, length), own, time)
            made = horizon.next(seen + length) - horizon.next(seen)
            slots = horizon.held(seen, length)
            if state.numbers.shape[-1] != slots:
                raise UserValueError(
                    f"model must have a layer that forgets by its max_memory alone; after {seen + length} steps it "
                    f"holds {state.numbers.shape[-1]} microstates, not {slots}.",
                    "model",
                )
            if made > 0:
                grown.append((last(state.microstates, made), last(state.keys, made)))
            outputs.append(output)
            attentions += attention
            seen, done = seen + length, done + length
        if end is None:
            raise UserValueError("x must have at least one step; got none.", "x")
        after = Begun(stream, leaves, state, seen, tuple(chunks), tuple(grown))
        steps_of_attention = -3 if given.dim() == 3 and time == 0 else -2
        return after, _joined(outputs, time), end, _joined_attention(attentions, steps_of_attention)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _joined_attention(parts: list[Attention], dim: int) -> Attention | None:
    if not parts:
        return None
    names = ("numbers", "weights", "summary")
    return Attention(*(_joined([getattr(one, name) for one in parts], dim) for name in names))


def _plain(tensor: Tensor) -> Tensor:
    """The numbers of a tensor alone, without gradient and memory."""
    return tensor.detach().as_subclass(Tensor)
