"""What a layer carries from one piece of a sequence to the next, and Attention, which it returns.

`SABState` is all of it: h, an LSTM's c, and the memory. `SABHidden` is the h in it: the tensor that `torch.nn.GRU`
returns, with the memory attached.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sab import torch_private
from sab.errors import UserTypeError, UserValueError, check_int

T = TypeVar("T")


class Memory(NamedTuple):
    """The fields of a `SABState` that `torch.nn`'s states do not have, and what is known of them."""

    microstates: Tensor
    keys: Tensor
    numbers: Tensor
    steps: Tensor
    seen: int | None = None
    """How many steps all rows have seen where every row uses every slot; None where that is unknown. It saves reading
    `numbers`, which on a GPU would wait for the device."""
    reads: Tensor | None = None

    def map(self, floats: Callable[[Tensor], Tensor]) -> Memory:
        """The same with a function applied to its tensors of floating-point numbers."""
        return self._replace(microstates=floats(self.microstates), keys=floats(self.keys))

    def map_whole(self, whole: Callable[[Tensor], Tensor]) -> Memory:
        """The same with a function applied to its tensors of whole numbers but `steps`."""
        return self._replace(numbers=whole(self.numbers), reads=None if self.reads is None else whole(self.reads))

    def of_rows(self, index: slice | Tensor) -> Memory:
        """That of these rows of the batch; the batch is counted from the end, since a cell's state has no layers."""
        here = index if isinstance(index, slice) else index.to(self.numbers.device)
        selected = self.map(lambda tensor: tensor[..., here, :, :]).map_whole(lambda tensor: tensor[..., here, :])
        return selected._replace(steps=self.steps[index if isinstance(index, slice) else index.to(self.steps.device)])

    def without_batch(self) -> Memory:
        """That of a batch of one as that of unbatched input."""
        squeezed = self.map(lambda tensor: tensor.squeeze(1)).map_whole(lambda tensor: tensor.squeeze(1))
        return squeezed._replace(steps=self.steps.squeeze(0))


class Pending(Generic[T]):
    """A value that is made when it is first asked for, by one thread, in the modes in which it was promised.

    Most states are never looked at, and on a GPU it may take longer to make one than to run the layer. A look under
    no_grad does not cut what it makes off from its gradient.
    """

    def __init__(self, make: Callable[[], T]):
        self._make: Callable[[], T] | None = make
        self._made: Any = None
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._lock = Lock()

    def get(self) -> T:
        """The value."""
        if self._make is None:
            return self._made
        if torch.compiler.is_compiling():
            return self._make()  # as a part of the graph; nobody else can look meanwhile
        with self._lock:
            if self._make is not None:
                grad, inference = self._modes
                with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch_private.outside_transforms():
                    self._made = self._make()
                self._make = None
        return self._made

    def detached(self) -> Pending[T] | None:
        """The same without its gradient where that needs nothing to be made; otherwise None."""
        return None

    def recent(self, count: int) -> Pending[T] | None:
        """The same with the latest `count` microstates alone where that needs nothing to be made; otherwise None."""
        return None


class _Carried(NamedTuple):
    """What a SABHidden has besides its entries."""

    plain: Tensor
    """The tensor of which it is an alias, of no class of ours."""
    memory: Memory | Pending[Memory]
    version: int | None
    """Torch's count of changes in place when the memory was attached; None where torch does not count."""


class SABHidden(Tensor):
    """The hidden state after a layer's last step, [layers * directions, B, n], with the layer's memory.

    `SABGRU` and `SABRNN` return it where `torch.nn.GRU` and `RNN` return `h_n`, and it is that tensor: `h[-1]`,
    `h.view(...)`, `linear(h)` and every other operation give plain tensors. Passed back in, the layer continues
    exactly, with its memory. What gives the whole tensor anew (`detach`, `data`, `clone`, `contiguous`, `to`, `cpu`,
    `cuda`, `pin_memory`, `float`, `double`, `half`, `bfloat16`) does the same to the memory. Once changed in place,
    it is refused as a state.
    """

    __torch_function__ = torch_private.no_torch_function
    _carried: _Carried

    @property
    def state(self) -> SABState:
        """This hidden state and its memory as a `SABState`, without the c of an LSTM."""
        return SABState._of(self, None, self._carried.memory)

    def detach(self) -> SABHidden:
        return self.state.detach()._hidden

    def detach_(self) -> SABHidden:
        """Torch does not detach an alias of a tensor in place, which this is."""
        if self.requires_grad:
            raise UserTypeError("h must be detached with h = h.detach(), and a state with state = state.detach().", "h")
        return self

    @property
    def data(self) -> SABHidden:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    def clone(self, *args: Any, **kwargs: Any) -> SABHidden:
        return self.state.clone(*args, **kwargs)._hidden

    def contiguous(self, *args: Any, **kwargs: Any) -> SABHidden:
        return self.state._map(lambda tensor: Tensor.contiguous(tensor, *args, **kwargs))._hidden

    def to(self, *args: Any, **kwargs: Any) -> SABHidden:
        return self.state.to(*args, **kwargs)._hidden

    def cpu(self, *args: Any, **kwargs: Any) -> SABHidden:
        return self.state.cpu(*args, **kwargs)._hidden

    def cuda(self, *args: Any, **kwargs: Any) -> SABHidden:
        return self.state.cuda(*args, **kwargs)._hidden

    def pin_memory(self, *args: Any, **kwargs: Any) -> SABHidden:
        return self.state.pin_memory(*args, **kwargs)._hidden

    def double(self) -> SABHidden:
        return self.to(torch.float64)

    def float(self) -> SABHidden:
        return self.to(torch.float32)

    def half(self) -> SABHidden:
        return self.to(torch.float16)

    def bfloat16(self) -> SABHidden:
        return self.to(torch.bfloat16)

    def __deepcopy__(self, memo: dict[int, Any]) -> SABHidden:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # pyright: ignore[reportReturnType]  # it tells why not
        h = copy.deepcopy(Tensor.detach(self), memo)
        memory = Memory._make(copy.deepcopy(value, memo) for value in _got(self._carried.memory))
        memo[id(self)] = twin = _as_leaf(h, memory, self.requires_grad)
        return twin

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        memory = _got(self._carried.memory)
        counts = () if memory.reads is None else (memory.reads,)
        return _restored, (self.as_subclass(Tensor), *memory[:4], *counts)


@dataclass(frozen=True, eq=False)
class SABState:
    """The state of a layer after some steps: passed back in, the layer continues exactly.

    Unpacks like `torch.nn.LSTM`'s state, `h, c = state`; that of a cell without c is in the `SABHidden` which the layer
    returns, as `h.state`. The first dimension counts layers and directions as `torch.nn.LSTM` does; for unbatched input
    there is no B. Every microstate sits in a slot; a slot that a row does not use has number -1. Slots are in the order
    of age. A state is a pytree of torch, whose leaves are its tensors.
    """

    h: Tensor
    """Hidden state, [layers * directions, B, n]; a `SABHidden`, so that `(h, c)` has the memory, too."""
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
    reads: Tensor | None = field(default_factory=lambda: None)  # a default would hide `__getattr__`
    """With `forget="most_read"`, the discounted count of each microstate's reads, as `numbers`; else None."""

    def __post_init__(self) -> None:
        memory = Memory(self.microstates, self.keys, self.numbers, self.steps, reads=self.reads)
        object.__setattr__(self, "_memory", memory)
        if not torch.compiler.is_compiling():  # where this order of making things fails
            object.__setattr__(self, "h", attach(self.h, memory))

    @classmethod
    def _of(cls, h: Tensor, c: Tensor | None, memory: Memory | Pending[Memory]) -> SABState:
        """The state of these parts."""
        h = attach(h, memory)  # first: torch.compile makes objects in the order in which they were made
        state = object.__new__(cls)
        object.__setattr__(state, "_memory", memory)
        object.__setattr__(state, "h", h)
        object.__setattr__(state, "c", c)
        return state

    @classmethod
    def _on_demand(cls, make: Callable[[], tuple[Tensor, Tensor | None]], memory: Pending[Memory]) -> SABState:
        """The state whose h and c `make` returns, called at the first access to one of them."""
        state = object.__new__(cls)

        def made() -> tuple[Tensor, Tensor | None]:
            h, c = make()
            return attach(h, memory), c

        state.__dict__.update(_ends=Pending(made), _memory=memory)
        return state

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A field that is kept in one of the parts from which the state was made."""
            if name in _OF_MEMORY and "_memory" in self.__dict__:
                return getattr(_got(self._memory), name)
            if name in ("h", "c") and "_ends" in self.__dict__:
                return self._ends.get()[name == "c"]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _parts(self) -> Memory:
        """The memory, made."""
        return _got(self.__dict__["_memory"])

    @property
    def _pending(self) -> Pending[Memory] | None:
        """The memory where it has not been looked at."""
        memory = self.__dict__["_memory"]
        return memory if isinstance(memory, Pending) else None

    @property
    def _seen(self) -> int | None:
        return self._parts.seen

    @property
    def _hidden(self) -> Any:
        """h as what it is, a SABHidden."""
        return self.h

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone. What is known of them is not stored: a file may say anything."""
        return {name: getattr(self, name) for name in _FIELDS} | {"h": self.h.as_subclass(Tensor)}

    def __setstate__(self, stored: dict[str, Any]) -> None:
        h = stored["h"]
        self.__init__(**{name: stored[name] for name in _FIELDS if name != "reads" or name in stored})
        if isinstance(h, Tensor) and h.is_leaf:
            object.__setattr__(self, "h", _as_leaf(h, self._parts, h.requires_grad))

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
        memory = None if self._pending is None else self._pending.detached()
        if memory is None:
            return self._map(Tensor.detach)
        return SABState._of(Tensor.detach(self.h), None if self.c is None else self.c.detach(), memory)

    def clone(self, *args: Any, **kwargs: Any) -> SABState:
        """A copy, through which gradients flow; arguments as for `Tensor.clone`."""
        copied = self._map(lambda tensor: Tensor.clone(tensor, *args, **kwargs))
        return copied._with(copied._parts.map_whole(Tensor.clone)._replace(steps=self.steps.clone()))

    def to(self, *args: Any, **kwargs: Any) -> SABState:
        """The state on another device or in another floating-point type; arguments as for `Tensor.to`.

        A floating-point type is for floating-point numbers; `steps` stay on the CPU.
        """
        device = torch.empty(0, device=self.h.device).to(*args, **kwargs).device
        others = {name: value for name, value in kwargs.items() if name in ("copy", "non_blocking")}
        moved = self._map(lambda tensor: Tensor.to(tensor, *args, **kwargs))
        steps = self.steps.clone() if kwargs.get("copy") else self.steps
        return moved._with(moved._parts.map_whole(lambda tensor: tensor.to(device, **others))._replace(steps=steps))

    def cpu(self, *args: Any, **kwargs: Any) -> SABState:
        """The state on the CPU; arguments as for `Tensor.cpu`."""
        return self._move(lambda tensor: Tensor.cpu(tensor, *args, **kwargs))

    def cuda(self, *args: Any, **kwargs: Any) -> SABState:
        """The state on a GPU; arguments as for `Tensor.cuda`. `steps` stay on the CPU."""
        return self._move(lambda tensor: Tensor.cuda(tensor, *args, **kwargs))

    def pin_memory(self, *args: Any, **kwargs: Any) -> SABState:
        """The state in page-locked memory; arguments as for `Tensor.pin_memory`."""
        return self._move(lambda tensor: Tensor.pin_memory(tensor, *args, **kwargs))

    def select(self, rows: int | slice | Sequence[int] | Tensor) -> SABState:
        """The state of these rows of the batch, in this order; a row may be named more than once."""
        index = self._index(rows)
        here = index if isinstance(index, slice) else index.to(self.h.device)
        h, c = (None if part is None else part[..., here, :] for part in (self.h, self.c))
        assert h is not None
        return SABState._of(h, c, self._parts.of_rows(index))

    def _index(self, rows: int | slice | Sequence[int] | Tensor | None) -> slice | Tensor:
        """Rows as an index of `steps`."""
        if rows is None:
            raise UserTypeError("rows must be a number, a slice, or numbers or a mask of rows; got None.", "rows")
        if isinstance(rows, slice):
            return rows
        index = torch.atleast_1d(torch.as_tensor(rows, device="cpu"))
        return index.long() if index.numel() == 0 else index  # an empty list is one of floats to torch

    def reset(self, rows: int | slice | Sequence[int] | Tensor) -> SABState:
        """The state with these rows as before their first step: zeros and an empty memory. The others stay."""
        if self.steps.dim() == 0:
            raise UserValueError("rows must be those of a batch; this is the state of unbatched input.", "rows")
        fresh = torch.zeros_like(self.steps, dtype=torch.bool)
        fresh[self._index(rows)] = True
        parts = self._parts
        if fresh.all():  # no slot is in use any more
            parts = parts.map(lambda tensor: tensor[..., :0, :]).map_whole(lambda tensor: tensor[..., :0])
        of_rows = fresh.to(self.h.device)
        of_slots = of_rows[:, None, None]
        memory = Memory(
            microstates=parts.microstates.masked_fill(of_slots, 0.0),
            keys=parts.keys.masked_fill(of_slots, 0.0),
            numbers=parts.numbers.masked_fill(of_rows[:, None], -1),
            steps=parts.steps.masked_fill(fresh, 0),
            reads=None if parts.reads is None else parts.reads.masked_fill(of_rows[:, None], 0),
        )
        h, c = (None if part is None else part.masked_fill(of_rows[:, None], 0.0) for part in (self.h, self.c))
        assert h is not None
        return SABState._of(h, c, memory)

    def recent(self, count: int) -> SABState:
        """The state with the latest `count` microstates of each row alone: its older ones are forgotten."""
        count = check_int("count", count, 0)
        memory = None if self._pending is None else self._pending.recent(count)
        if memory is not None:
            return SABState._of(self.h, self.c, memory)
        slots = self.numbers.shape[-1]
        if slots <= count:
            return self
        kept = self.numbers.sort(dim=-1, stable=True).indices[..., slots - count :]  # an unused slot's number is -1
        return self.at(kept)

    def distinct(self, count: int) -> SABState:
        """The state with `count` microstates of each row alone that differ most from each other.

        Called now and then, it bounds the memory of a stream and keeps what stood out, however long ago. The newest
        microstate is kept first, then always the one that is farthest from all that are kept. The distance of what is
        forgotten from the nearest that is kept is at most twice the least that `count` microstates allow (Gonzalez,
        1985).
        """
        count = check_int("count", count, 0)
        slots = self.numbers.shape[-1]
        if slots <= count or count == 0:
            return self.recent(count)
        microstates = self.microstates.detach()
        newest = self.numbers.argmax(-1, keepdim=True)
        distance = torch.where(self.numbers >= 0, torch.inf, -1.0).to(microstates.dtype)  # unused slots are kept last
        kept = [newest]
        for _ in range(count - 1):
            one = microstates.gather(-2, kept[-1].unsqueeze(-1).expand(*kept[-1].shape, microstates.shape[-1]))
            distance = distance.fmin((microstates - one).square().sum(-1)).scatter(-1, kept[-1], -2.0)
            kept.append(distance.argmax(-1, keepdim=True))
        return self.at(torch.cat(kept, -1).sort(-1).values)

    def at(self, slots: Tensor) -> SABState:
        """The state with these slots of each row alone, [layers * directions, B, slots]."""
        rows = slots.unsqueeze(-1)
        shorter = self._parts.map(lambda tensor: tensor.gather(-2, rows.expand(*slots.shape, tensor.shape[-1])))
        return self._with(shorter.map_whole(lambda tensor: tensor.gather(-1, slots)))

    def _map(self, floats: Callable[[Tensor], Tensor]) -> SABState:
        """The same with a function applied to its tensors of floating-point numbers."""
        h, c = floats(plain(self.h)), None if self.c is None else floats(self.c)
        made = SABState._of(h, c, self._parts.map(floats))
        if is_changed(self.h):
            made._hidden._carried = made._hidden._carried._replace(version=_CHANGED)
        return made

    def _move(self, function: Callable[[Tensor], Tensor]) -> SABState:
        """The same with a function applied to all of its tensors but `steps`."""
        moved = self._map(function)
        return moved._with(moved._parts.map_whole(function))

    def _with(self, memory: Memory) -> SABState:
        """The same with another memory."""
        return SABState._of(self.h, self.c, memory)

    def _with_batch(self) -> SABState:
        """A state of unbatched input as that of a batch of one."""
        batched = self._move(lambda tensor: tensor.unsqueeze(1))
        return batched._with(batched._parts._replace(steps=self.steps.unsqueeze(0)))

    def _with_layers(self) -> SABState:
        """A cell's state as that of a layer."""
        return self._move(lambda tensor: tensor.unsqueeze(0))

    def _without_layers(self) -> SABState:
        """The state of one layer as that of a cell."""
        return self._move(lambda tensor: tensor.squeeze(0))

    def _seen_by_all(self) -> int | None:
        """How many steps all rows have seen, or None where rows differ or some slot of some row is not in use."""
        seen, steps, numbers = self._seen, self.steps, self.numbers
        if torch.compiler.is_compiling():  # reading the tensors would break the graph
            return self._seen_when_run() if seen is None and torch.compiler.is_exporting() else seen
        steps, numbers = map(torch_private.unwrapped, (steps, numbers))
        first, *others = steps.flatten().tolist() or [0]
        if others.count(first) < len(others):
            return None
        if seen is not None and numbers.device.type != "cpu":
            return first  # every slot is in use, and reading them would wait for the device
        return None if numbers.numel() > 0 and (numbers < 0).any() else first

    def _seen_when_run(self) -> int:
        """A symbol for how many steps all rows have seen: an exported program reads and checks its state."""
        steps, sentence = self.steps, "hx must be a state whose rows have seen the same number of steps."
        torch_private.assert_when_run((steps == steps[0]).all() & (self.numbers >= 0).all(), sentence)
        seen: Any = steps[0].item()
        torch_private.assume(seen >= 0)
        return seen


_FIELDS = tuple(entry.name for entry in fields(SABState))
_OF_MEMORY = frozenset(_FIELDS) - {"h", "c"}


def _got(memory: Memory | Pending[Memory]) -> Memory:
    return memory.get() if isinstance(memory, Pending) else memory


def attach(h: Any, memory: Memory | Pending[Memory]) -> Any:
    """h as a SABHidden with this memory; what cannot be one, as in a pytree of something else, stays as it is."""
    if not isinstance(h, Tensor) or h.layout != torch.strided:
        return h
    if type(h) is Tensor:  # first: so is that of each step of a stream
        return _hidden(h, _Carried(h, memory, _version(h)))
    if memory_of(h) is memory:
        return h
    if type(h) in _PLAIN:
        alias_of = h._carried.plain if isinstance(h, SABHidden) else h
        return _hidden(h, _Carried(alias_of, memory, _CHANGED if is_changed(h) else _version(h)))
    # A tensor that torch.export traces with can be of no other class, but it can have attributes.
    hidden: Any = h.view_as(h)
    hidden._carried = _Carried(h, memory, None)
    hidden.state = SABState._of(hidden, None, memory)
    return hidden


_PLAIN = frozenset((Tensor, torch.nn.Parameter, SABHidden))
_CHANGED = -1
"""A version that no tensor has."""


def _hidden(h: Tensor, carried: _Carried) -> SABHidden:
    hidden = h.as_subclass(SABHidden)
    hidden._carried = carried
    return hidden


def _version(h: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or h.is_inference() else h._version


def is_changed(h: Any) -> bool:
    """Whether a hidden state was changed in place after its memory was attached, so that the two differ."""
    if not isinstance(h, SABHidden) or torch.compiler.is_compiling() or h._carried.version is None:
        return False
    return h._carried.version != h._version


def _alias_of(h: Any) -> Any:
    """The tensor of which a SABHidden is an alias, unless it has become a leaf of its own."""
    if not isinstance(h, SABHidden):
        return h
    alias_of = h._carried.plain
    return alias_of if alias_of.requires_grad == h.requires_grad else h


def plain(h: Tensor) -> Tensor:
    """h as a graph can take it: what torch.compile makes of some operations refuses other classes than torch's own."""
    return _alias_of(h) if torch.compiler.is_compiling() else h


def memory_of(h: Tensor) -> Memory | Pending[Memory] | None:
    """The memory that came with a hidden state, or None for a tensor that is nothing else."""
    carried = getattr(h, "_carried", None)
    return None if carried is None else carried.memory


def _as_leaf(h: Tensor, memory: Memory, requires_grad: bool) -> Any:
    """A leaf of autograd's graph as a SABHidden that is one, too."""
    return attach(Tensor.detach(h), memory).requires_grad_(requires_grad)


def _restored(
    h: Tensor, microstates: Tensor, keys: Tensor, numbers: Tensor, steps: Tensor, reads: Tensor | None = None
) -> Any:
    """A SABHidden from its stored parts."""
    return _as_leaf(h, Memory(microstates, keys, numbers, steps, reads=reads), h.requires_grad)


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


def _collate(batch: Sequence[Any], **_: Any) -> Any:
    """The states of unbatched sequences as that of a batch, as `DataLoader` calls it; unused slots make them equal."""
    states: list[SABState] = [one.state if isinstance(one, SABHidden) else one for one in batch]
    if any(state.h.dim() != 2 for state in states):
        raise UserTypeError(
            "states must be those of unbatched sequences to be made a batch by a DataLoader; got one of a batch."
        )
    slots = max(state.numbers.shape[-1] for state in states)
    padded = [F.pad(state.numbers, (0, slots - state.numbers.shape[-1]), value=-1) for state in states]
    counts = [F.pad(state.reads, (0, slots - state.reads.shape[-1])) for state in states if state.reads is not None]
    microstates, keys = (
        [F.pad(tensor, (0, 0, 0, slots - tensor.shape[-2])) for tensor in tensors]
        for tensors in ([state.microstates for state in states], [state.keys for state in states])
    )
    joined = SABState(
        h=torch.stack([state.h for state in states], 1),
        c=None if states[0].c is None else torch.stack([state.c for state in states if state.c is not None], 1),
        microstates=torch.stack(microstates, 1),
        keys=torch.stack(keys, 1),
        numbers=torch.stack(padded, 1),
        steps=torch.stack([state.steps for state in states]),
        reads=torch.stack(counts, 1) if len(counts) == len(states) else None,
    )
    return joined.h if isinstance(batch[0], SABHidden) else joined


def _leaves(state: SABState) -> tuple[list[Any], str]:
    """The tensors of a state for torch's pytrees, and their names."""
    h, parts = _alias_of(state.h), state._parts  # not a new h: torch.func counts the operations on its arguments
    found = dict(zip(_FIELDS, (h, state.c, *parts[:4], parts.reads), strict=True))
    found = {name: value for name, value in found.items() if value is not None}
    return list(found.values()), " ".join(found)


def _of_leaves(leaves: Iterable[Any], names: str) -> SABState:
    parts: dict[str, Any] = dict(zip(names.split(), leaves, strict=True))
    return SABState(**{"c": None, **parts})


torch_private.register_pytree(SABState, _leaves, _of_leaves, str.split)
torch_private.collate_functions.update({SABState: _collate, SABHidden: _collate})

# They hold only tensors, so torch.load may make them from a file that is not trusted.
torch.serialization.add_safe_globals([SABState, Attention, _restored])
