"""What is kept of a stream: the microstates of the memory, and the chunks that made them, to be run again.

A chunk is the steps between two cuts of the chain. What forgetting means is decided in one place, `Horizon.oldest`;
everything else follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.errors import UserValueError
from sab.ops import schedule
from sab.state import SABState

Weights = Mapping[str, Tensor]
"""Parameters of a model by their names."""


class Horizon(NamedTuple):
    """When microstates are kept and the chain is cut, and how far the memory reaches back."""

    k_att: int
    k_trunc: int
    max_memory: int
    has_memory: bool
    layer_forgets: bool = False
    """Whether the layer itself forgets, at every step; else the memory is cut down when a chunk begins."""

    @classmethod
    def of(cls, config: SABConfig, max_memory: int | None) -> Horizon:
        """That of a layer, which may have a `max_memory` of its own; None is that, or 256."""
        if config.k_trunc is None:
            raise UserValueError("k_trunc must be a number for a stream to be learned from; got None.", "k_trunc")
        own = config.max_memory if config.forgets else None
        if own is None:
            return cls(config.k_att, config.k_trunc, 256 if max_memory is None else max_memory, config.k_top > 0)
        if config.forget != "recent":
            raise UserValueError(
                f"forget must be 'recent' in a stream to be learned from; got {config.forget!r}.", "forget"
            )
        if max_memory not in (None, own):
            raise UserValueError(
                f"max_memory must be the layer's own, {own}, or be left out; got {max_memory}.", "max_memory"
            )
        made = -(-config.k_trunc // config.k_att)
        if own < made:
            raise UserValueError(
                f"max_memory of the layer must be at least {made}, the microstates of k_trunc steps, for a stream to "
                f"be learned from; got {own}.",
                "max_memory",
            )
        return cls(config.k_att, config.k_trunc, own, True, layer_forgets=True)

    def next(self, seen: int) -> int:
        """The number of the next microstate after so many steps."""
        return schedule.next_number(seen, self.k_att) if self.has_memory else 0

    def begin(self, seen: int) -> int:
        """How many steps came before the chunk in which the next step lies."""
        return seen - seen % self.k_trunc

    def oldest(self, seen: int) -> int:
        """The number of the oldest microstate that the next step may read, or its chunk: older ones are forgotten, by
        the layer or when a chunk begins."""
        return max(0, self.next(seen if self.layer_forgets else self.begin(seen)) - self.max_memory)

    def held(self, seen: int, length: int) -> int:
        """How many microstates the layer's state has when it has gone on from `seen` by so many steps of a chunk."""
        after = seen + length
        return self.next(after) - self.oldest(after if self.layer_forgets else seen)

    def is_kept(self, chunk: Chunk, seen: int) -> bool:
        """Whether a chunk may still receive gradient after so many steps: it is not over, or made a microstate that is
        in the memory."""
        end = chunk.first + self.k_trunc
        made = self.next(end) > self.next(chunk.first)
        return seen < end or (made and self.next(end) > self.oldest(seen))


class Part(NamedTuple):
    """Inputs of a chunk that ran with the same weights."""

    x: Tensor
    weights: Weights | None
    """Those weights; None stands for today's."""


class Chunk(NamedTuple):
    """The steps between two cuts, with what it takes to run them again."""

    first: int
    """How many steps came before."""
    h: Tensor
    c: Tensor | None
    """The state that it began with; its memory is in the stream."""
    parts: tuple[Part, ...] = ()

    def grown(self, x: Tensor, weights: Weights | None, time: int) -> Chunk:
        """The chunk with these inputs at its end."""
        if self.parts and self.parts[-1].weights is weights:
            *parts, last = self.parts
            return self._replace(parts=(*parts, Part(torch.cat((last.x, x), time), weights)))
        return self._replace(parts=(*self.parts, Part(x.clone(), weights)))


class Stream(NamedTuple):
    """A stream after some steps. Nothing in it is ever changed in place."""

    seen: int
    time: int
    """The dimension of an input that counts its steps."""
    like: Tensor
    """An input of no steps."""
    h: Tensor
    c: Tensor | None
    microstates: Tensor
    """Those that the memory holds, and those that a kept chunk may read when it is run again, [layers, B, S, n]."""
    keys: Tensor
    number: int
    """The number of the first of them."""
    chunks: tuple[Chunk, ...] = ()
    """Those that may receive gradient, oldest first; the last may not be over."""

    def slots(self, first: int, last: int) -> tuple[Any, ...]:
        """The index of the microstates with numbers from `first` up to but not including `last`."""
        return ..., slice(first - self.number, last - self.number), slice(None)

    def memory(self, horizon: Horizon, seen: int) -> tuple[Any, ...]:
        """The index of the microstates that the next step after so many can read."""
        return self.slots(horizon.oldest(seen), horizon.next(seen))

    def state(
        self, horizon: Horizon, seen: int, h: Tensor, c: Tensor | None, microstates: Tensor, keys: Tensor
    ) -> SABState:
        """The layer's state after so many steps, whose memory these are."""
        first, last = horizon.oldest(seen), horizon.next(seen)
        numbers = torch.arange(first, last, device=h.device).expand(microstates.shape[:-1])
        steps = torch.full(microstates.shape[1:-2], seen, dtype=torch.int64, device="cpu")
        return SABState(h, c, microstates, keys, numbers, steps)

    def after(
        self,
        horizon: Horizon,
        seen: int,
        h: Tensor,
        c: Tensor | None,
        chunks: tuple[Chunk, ...],
        grown: list[tuple[Tensor, Tensor]],
    ) -> Stream:
        """The stream some steps later, which added these microstates and keys; what is forgotten is left out."""
        forgotten = takewhile(lambda chunk: not horizon.is_kept(chunk, seen), chunks)  # the oldest ones come first
        chunks = chunks[sum(1 for _ in forgotten) :]
        chunks = tuple(one for one in chunks if one.first + horizon.k_trunc <= self.seen or horizon.is_kept(one, seen))
        number = horizon.oldest(chunks[0].first if chunks else seen)
        microstates, keys = (
            torch.cat([old, *new], -2)[..., number - self.number :, :].clone()
            for old, new in ((self.microstates, [m for m, _ in grown]), (self.keys, [k for _, k in grown]))
        )
        return self._replace(seen=seen, h=h, c=c, microstates=microstates, keys=keys, number=number, chunks=chunks)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are kept, each once."""
        versions: dict[int, Weights] = {}
        yield from (part for part in (self.h, self.c, self.microstates, self.keys) if part is not None)
        for chunk in self.chunks:
            yield from (part for part in (chunk.h, chunk.c) if part is not None)
            for x, weights in chunk.parts:
                yield x
                if weights is not None:
                    versions[id(weights)] = weights
        for weights in versions.values():
            yield from weights.values()

    def state_dict(self) -> dict[str, Any]:
        """The stream as numbers, lists and copies of its tensors."""
        versions: dict[int, Weights] = {}
        for chunk in self.chunks:
            versions |= {id(part.weights): part.weights for part in chunk.parts if part.weights is not None}
        places = {one: place for place, one in enumerate(versions)}
        stored = self._asdict()
        stored["chunks"] = [
            {
                "first": chunk.first,
                "h": chunk.h,
                "c": chunk.c,
                "parts": [(x, None if weights is None else places[id(weights)]) for x, weights in chunk.parts],
            }
            for chunk in self.chunks
        ]
        return stored | {"weights": [dict(weights) for weights in versions.values()]}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Stream:
        """The stream of a `state_dict`."""
        fields = {name: stored[name] for name in cls._fields}
        versions = stored["weights"]
        fields["chunks"] = tuple(
            Chunk(
                one["first"],
                one["h"],
                one["c"],
                tuple(Part(x, None if place is None else versions[place]) for x, place in one["parts"]),
            )
            for one in stored["chunks"]
        )
        return cls(**fields)
