"""SABState, which a layer carries from one piece of a sequence to the next, and Attention, which it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sab import torch_private
from sab.errors import UserTypeError, check_int


def _map(tensor: Tensor | None, function: Any) -> Any:
    return None if tensor is None else function(tensor)


@dataclass(frozen=True, eq=False)
class SABState:
    """The state of a layer after some steps: passed back in, the layer continues exactly.

    Unpacks like `torch.nn`'s state: `h, c = state` for an LSTM, `(h,) = state` for the other cells. The first
    dimension counts layers and directions as `torch.nn.LSTM` does; for unbatched input there is no B.
    Every microstate sits in a slot; a slot that a row does not use has number -1. Slots are in the order of age.
    """

    h: Tensor
    """Hidden state, [layers * directions, B, n]."""
    c: Tensor | None
    """Cell state of an LSTM, as h; None for the other cells."""
    microstates: Tensor
    """The macrostate, [layers * directions, B, S, n]."""
    keys: Tensor
    """Each microstate's own part of its scores, [layers * directions, B, S, d]."""
    numbers: Tensor
    """Each microstate's number, from 0, [layers * directions, B, S]."""
    steps: Tensor
    """How many steps each row has seen, [B], int64, always on the CPU (like the lengths of a PackedSequence)."""
    _seen: int | None = field(default=None, init=False, repr=False)
    """How many steps all rows have seen where every row uses every slot; None where that is unknown. It saves reading
    `numbers`, which on a GPU would wait for the device. `dataclasses.replace` drops it."""

    @classmethod
    def _on_demand(cls, make: Callable[[], SABState], seen: int | None) -> SABState:
        """The state that `make` returns, called at the first access to one of its tensors.

        Most states are never accessed, and on a GPU it may take longer to make one than to run the layer.
        """
        state = object.__new__(cls)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        state.__dict__.update(_seen=seen, _make=(make, modes))
        return state

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A field of a state that has not been made yet."""
            if name not in _FIELDS or "_make" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._complete()
            return self.__dict__[name]

    def _complete(self) -> SABState:
        """This state with all of its tensors made."""
        pending = self.__dict__.get("_make")
        if pending is not None:
            make, (grad, inference) = pending
            # In the modes of the layer's call: an access under no_grad does not cut the state off from its gradient.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                made = make()
            for name in _FIELDS:
                self.__dict__[name] = getattr(made, name)
            del self.__dict__["_make"]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self._complete().__dict__.copy()

    def __iter__(self) -> Iterator[Tensor]:
        yield self.h
        if self.c is not None:
            yield self.c

    def __getitem__(self, index: int) -> Tensor:
        return tuple(self)[index]

    def __len__(self) -> int:
        return 1 if self.c is None else 2

    def detach(self) -> SABState:
        """The same state, through which no gradient flows."""
        return self._replace_floats(lambda tensor: tensor.detach())

    def to(self, *args: Any, **kwargs: Any) -> SABState:
        """The state on another device or in another floating-point type; arguments as for `Tensor.to`."""
        device = torch.empty(0, device=self.h.device).to(*args, **kwargs).device
        moved = self._replace_floats(lambda tensor: tensor.to(*args, **kwargs))
        return replace(moved, numbers=self.numbers.to(device))._with_seen(self._seen)

    def select(self, rows: int | slice | Sequence[int] | Tensor) -> SABState:
        """The state of these rows of the batch, in this order; a row may be named more than once."""
        if rows is None:
            raise UserTypeError("rows must be a number, a slice, or numbers or a mask of rows; got None.", "rows")
        index = steps_index = rows
        if not isinstance(rows, slice):
            steps_index = torch.atleast_1d(torch.as_tensor(rows, device="cpu"))
            index = steps_index.to(self.h.device)
        selected = self._replace_floats(lambda tensor: tensor[:, index])
        selected = replace(selected, numbers=self.numbers[:, index], steps=self.steps[steps_index])
        return selected._with_seen(self._seen)

    def recent(self, count: int) -> SABState:
        """The state with the latest `count` microstates of each row alone: its older ones are forgotten."""
        count = check_int("count", count, 0)
        slots = self.numbers.shape[-1]
        if slots <= count:
            return self
        kept = self.numbers.sort(dim=-1, stable=True).indices[..., slots - count :]  # an unused slot's number is -1
        rows = kept.unsqueeze(-1)
        shorter = replace(
            self,
            microstates=self.microstates.gather(-2, rows.expand(*kept.shape, self.microstates.shape[-1])),
            keys=self.keys.gather(-2, rows.expand(*kept.shape, self.keys.shape[-1])),
            numbers=self.numbers.gather(-1, kept),
        )
        return shorter._with_seen(self._seen)

    def _replace_floats(self, function: Any) -> SABState:
        replaced = replace(
            self,
            h=function(self.h),
            c=_map(self.c, function),
            microstates=function(self.microstates),
            keys=function(self.keys),
        )
        return replaced._with_seen(self._seen)

    def _seen_by_all(self) -> int | None:
        """How many steps all rows have seen, or None where rows differ or some slot of some row is not in use."""
        if torch.compiler.is_compiling() or (
            self._seen is not None and (self.numbers.device.type != "cpu" or not self.numbers.numel())
        ):
            return self._seen  # reading the tensors would break the graph or wait for the device, or they are empty
        steps, numbers = map(torch_private.unwrapped, (self.steps, self.numbers))
        first = int(steps.flatten()[0])
        return None if (steps != first).any() or (numbers < 0).any() else first

    def _with_seen(self, seen: int | None) -> SABState:
        """This state, with the number of steps that all rows have seen."""
        object.__setattr__(self, "_seen", seen)
        return self

    def _with_batch(self) -> SABState:
        """A state of unbatched input as that of a batch of one."""
        batched = self._replace_floats(lambda tensor: tensor.unsqueeze(1))
        batched = replace(batched, numbers=self.numbers.unsqueeze(1), steps=self.steps.unsqueeze(0))
        return batched._with_seen(self._seen)

    def _without_batch(self) -> SABState:
        unbatched = self._replace_floats(lambda tensor: tensor.squeeze(1))
        unbatched = replace(unbatched, numbers=self.numbers.squeeze(1), steps=self.steps.squeeze(0))
        return unbatched._with_seen(self._seen)


_FIELDS = frozenset(entry.name for entry in fields(SABState) if entry.init)


@dataclass(frozen=True, eq=False)
class Attention:
    """What each step selected; unpacks as `numbers, weights = attention`.

    Shapes are those of the output with the last dimension replaced; where a layer has more than one layer or
    direction, one more dimension, counted as in `SABState.h`, comes first.
    """

    numbers: Tensor
    """Numbers of the selected microstates, highest score first, [T, B, k_top]; -1 where fewer were selected.
    Microstate i is the hidden state of step (i + 1) * k_att, steps counted from 1."""
    weights: Tensor
    """Their weights, [T, B, k_top]; 0 where fewer were selected."""
    summary: Tensor
    """The weighted sum that was read, [T, B, n]; 0 where nothing was."""

    def __iter__(self) -> Iterator[Tensor]:
        yield self.numbers
        yield self.weights

    def map(self, function: Any) -> Attention:
        """The same with `function` applied to each of its tensors."""
        return Attention(function(self.numbers), function(self.weights), function(self.summary))


# They hold only tensors, so torch.load may make them from a file that is not trusted.
torch.serialization.add_safe_globals([SABState, Attention])
