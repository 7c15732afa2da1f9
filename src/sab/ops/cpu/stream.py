"""Single steps of a stream on the CPU, without gradients: one native call a step, and a memory that grows in place.

An ordinary call copies the whole memory, which after thousands of steps takes far longer than a step. Here the states
of a stream share a buffer: each is a range of its slots, and the newest state appends behind its own. What is in a
state's range is never written again, so older states stay valid; one that is continued for a second time gets a buffer
of its own.

Of a bounded macrostate a state is the latest slots of that range or, where others than the oldest are forgotten, those
of a list that it has for itself. What is forgotten stays in the buffer until it is full; then the rest moves to a new
one. So a buffer has room for at most twice the bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from operator import is_
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab import torch_private
from sab.config import MOST_STEPS, SABConfig
from sab.ops import schedule
from sab.ops.buffers import Weights
from sab.ops.cpu import engine
from sab.ops.cpu.arguments import pack_step
from sab.ops.plan import make_plan
from sab.ops.types import LayerWeights
from sab.parts.registry import CELLS
from sab.state import Memory, Pending, SABHidden

FEWEST_SLOTS = 16
"""Room in the buffer of a new stream."""
SKETCH_BLOCK = 64
"""A sketch has room for a multiple of so many keys: `KEYS` of sketch.h."""
FIND = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
"""The type of `find` of loop.cpp, which gets the address of a query."""
PLAIN = frozenset((Tensor, torch.nn.Parameter, SABHidden))
"""Types of tensors that are nothing but memory."""
_making = Lock()


class Shape(NamedTuple):
    """The shape of a state of one layer, or of a cell, which has no dimension for layers."""

    of_states: tuple[int, ...]
    """That of h and c."""
    batch: int | None
    """None for unbatched input."""

    @property
    def rows(self) -> int:
        return 1 if self.batch is None else self.batch

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor [B, ...] with the dimensions of such a state."""
        if self.batch is None:
            tensor = tensor.squeeze(0)
        return tensor.unsqueeze(0) if len(self.of_states) > (1 if self.batch is None else 2) else tensor


class Buffer:
    """Room for the microstates of a stream: [B, capacity, n], with their keys and numbers."""

    __slots__ = (
        *("addresses", "block_keys", "block_size", "capacity", "form", "lock", "parts", "pointers", "sketch"),
        *("sketch_pointers", "used"),
    )

    def __init__(
        self, like: Tensor, batch: int, capacity: int, key_size: int, k_att: int, sketched: bool, block_size: int = 0
    ):
        self.block_keys: Tensor | None = None
        """Of the blocks of two levels of memory, see blocks.h."""
        self.block_size = block_size
        """Of the smallest blocks; 0 with one level."""
        self.sketch: tuple[Tensor, ...] = ()
        """Of the keys where the buffer is large, see sketch.h: codes, scales and facts."""
        with torch.inference_mode(False):
            new = partial(like.new_empty, device="cpu")
            if sketched:
                room = -(-capacity // SKETCH_BLOCK) * SKETCH_BLOCK
                self.sketch = (
                    new((batch, room, -(-key_size // 4) * 2), dtype=torch.int16),
                    new((batch, room), dtype=torch.float32),
                    torch.zeros((batch, 3), dtype=torch.float32, device="cpu"),
                )
            if block_size > 0:
                blocks = engine.function("block_room", like.dtype)(capacity, block_size)
                self.block_keys = new((batch, blocks, 2 * key_size))
            self.parts = (
                new((batch, capacity, like.shape[1])),
                new((batch, capacity, key_size)),
                new((batch, capacity), dtype=torch.int64),
            )
        self.capacity = capacity
        self.form = like.shape[1], key_size, like.dtype, k_att, block_size
        self.used = 0
        """How many slots have been given to states."""
        self.lock = Lock()
        self.pointers = [(part.data_ptr(), part.stride(1) * part.element_size()) for part in self.parts]
        self.addresses = [pointer for pointer, _ in self.pointers]
        self.sketch_pointers = [part.data_ptr() for part in self.sketch] or [0] * 3

    def fill(self, parts: Sequence[Tensor], sketch: Sequence[Tensor] = ()) -> None:
        """Copy these into the first slots, with their sketch where there is one, and make the keys of their blocks."""
        self.used = parts[2].shape[1]
        with torch.inference_mode(False), torch.no_grad():
            for own, part in zip(self.parts, parts, strict=True):
                own[:, : self.used] = part
            if self.block_keys is not None:
                keys, made = self.parts[1], self.block_keys
                sizes = len(keys), self.used, self.capacity, keys.shape[2], self.block_size
                engine.function("blocks", keys.dtype)(keys.data_ptr(), *sizes, made.data_ptr())
            if self.sketch and sketch:
                room = -(-self.used // SKETCH_BLOCK) * SKETCH_BLOCK
                for own, part in zip(self.sketch, sketch, strict=True):
                    own[:, :room] = part[:, :room]
                return
        if self.sketch:
            keys = self.parts[1]
            sizes = len(keys), self.used, self.capacity, keys.shape[2]
            engine.function("sketch", keys.dtype)(keys.data_ptr(), *sizes, *self.sketch_pointers)

    def take(self, slot: int) -> bool:
        """Take a slot, which must be the first free one; False where it is not free any more, or there is no room."""
        with self.lock:
            if self.used != slot or slot == self.capacity:
                return False
            self.used += 1
            return True


class Held(NamedTuple):
    """What a macrostate holds that does not forget the oldest; nobody writes to it once a state has it."""

    live: Tensor
    """The slots, oldest first, [B, N], int32, of which the first `used` count."""
    reads: Tensor | None
    """Counts of their reads, [B, N], int64; None where they are not counted."""
    used: int

    @property
    def slots(self) -> Tensor:
        return self.live[:, : self.used].long()

    def of(self, tensor: Tensor) -> Tensor:
        """What is held of a tensor [B, slots, ...]."""
        slots = self.slots
        return tensor[torch.arange(len(slots), device="cpu").unsqueeze(1), slots]

    def recent(self, count: int) -> Held:
        """The latest `count`."""
        older = max(self.used - count, 0)
        live, reads = (None if part is None else part.roll(-older, 1) for part in self[:2])
        assert live is not None
        return Held(live, reads, self.used - older)

    def copy(self, keeps: bool) -> Held:
        """The same for a step to write to; the slots where it keeps a microstate, the counts always."""
        live = self.live.clone() if keeps else self.live
        return Held(live, None if self.reads is None else self.reads.clone(), self.used)


class Streamed(Pending[Memory]):
    """The memory of a stream after a step: the slots of a buffer from `first` on, up to `last`, or those `held`.

    Whoever looks at it gets a copy, since a tensor can be changed in place; from then on the copy is the memory.
    """

    def __init__(
        self, buffer: Buffer, first: int, last: int, seen: int, shape: Shape, held: Held | None = None
    ):  # no call of Pending's
        self.buffer: Buffer | None = buffer
        self.first, self.last, self.seen, self.shape, self.held = first, last, seen, shape, held

    def get(self) -> Memory:
        """The memory as the tensors of a state."""
        with _making:
            buffer, held = self.buffer, self.held
            if buffer is not None:
                with torch.inference_mode(False), torch.no_grad(), torch_private.outside_transforms():
                    microstates, keys, numbers = map(self.shape.of, self.copied(buffer))
                    sizes = () if self.shape.batch is None else (self.shape.batch,)
                    steps = torch.full(sizes, self.seen, dtype=torch.int64, device="cpu")
                    counts = None if held is None or held.reads is None else held.reads[:, : held.used].clone()
                    counts = None if counts is None else self.shape.of(counts)
                    self._made = Memory(microstates, keys, numbers, steps, self.seen, counts)
                self.buffer = None
        return self._made

    def copied(self, buffer: Buffer) -> list[Tensor]:
        """Copies of the microstates, their keys and their numbers."""
        if self.held is not None:
            return [self.held.of(part) for part in buffer.parts]
        return [part[:, self.first : self.last].clone() for part in buffer.parts]

    def detached(self) -> Streamed | None:
        """This, which never has a gradient, or None where a copy has been made."""
        return None if self.buffer is None else self

    def recent(self, count: int) -> Streamed | None:
        """The same without its older microstates, or None where a copy has been made."""
        buffer, held = self.buffer, self.held
        if buffer is None:
            return None
        if held is not None:
            return Streamed(buffer, self.first, self.last, self.seen, self.shape, held.recent(count))
        if buffer.block_keys is not None:  # blocks are counted from the buffer's first slot
            return self if count >= self.last else None
        return Streamed(buffer, max(self.first, self.last - count), self.last, self.seen, self.shape)


class Candidates(NamedTuple):
    """How a step of one sequence is told which slots it may select, where not all of them."""

    find: Any
    """A `FIND`: writes them into `slots`, oldest first, and returns how many there are, one at least."""
    slots: Tensor
    """Room for them, [places], int32."""


class Stepper:
    """One layer's step: its weights as the compiled step reads them, in their own memory.

    No copy of a weight is kept, so there is none that could be out of date.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of a layer makes its own

    def __init__(self, parameters: Sequence[Tensor | None], weights: LayerWeights, cell: str, config: SABConfig):
        self.parameters, self.cell, self.config = parameters, cell, config
        self.tensors = [parameter for parameter in parameters if parameter is not None]
        self.places = _places(self.tensors)
        self.dtype, self.like = weights.w_hh.dtype, weights.w_hh
        self.n, self.has_c = weights.w_hh.shape[1], CELLS[cell].has_c
        self.k_att, self.has_memory = config.k_att, config.k_top > 0
        self.max_memory = config.max_memory if config.forgets else None
        self.counts_reads = config.counts_reads
        self.block_size = config.block_size if config.is_hierarchical else 0
        self.has_list = config.forgets and config.forget != "recent"
        if not self.has_list:
            config = config.unbounded()  # to forget the oldest is to begin the range of slots later
        scorer = weights.scorer
        of_loops = Weights(weights.w_hh, weights.b_hh, *scorer, weights.incorporate_weight, weights.incorporate_bias)
        sizes = self.like.new_empty(1, 1, 0)
        plan = make_plan(sizes, None, weights.w_hh, scorer.w_memory, cell, config, 0)
        self.key_size = plan.key_size
        nothing = self.like.new_zeros(len(weights.w_hh))
        arguments = engine.arguments_of(plan, of_loops)
        arguments.set(
            unpacked=1,
            input_size=weights.w_ih.shape[1],
            shared=weights.w_hh.nbytes > engine.LARGEST_CACHED,  # a stream has few rows
            w_x=weights.w_ih,
            b_x=nothing if weights.b_ih is None else weights.b_ih,
            w_hidden=weights.w_hh,
            b_hidden=nothing if weights.b_hh is None else weights.b_hh,
            w_query=scorer.w_query,
            w_memory=scorer.w_memory,
            w_incorporate=weights.incorporate_weight,
            w_summary=None if weights.incorporate_weight is None else weights.incorporate_weight[:, self.n :],
            b_incorporate=weights.incorporate_bias,
        )
        self._kept_alive = arguments, nothing
        self._run = engine.function("step", self.dtype)
        self._arguments = ctypes.addressof(arguments)
        self._fewest_sketched = engine.function("fewest_sketched", self.dtype)(self._arguments)

    def fits(self, parameters: Sequence[Tensor | None], cell: str, config: SABConfig) -> bool:
        """Whether a layer's parameters are still those that this was made from, in the same places, and its options."""
        return (
            all(map(is_, parameters, self.parameters))
            and self.config is config
            and self.cell == cell
            and self.places == _places(self.tensors)
            and self.like.dtype is self.dtype
        )

    def continues(self, h: Tensor, c: Tensor | None, memory: Streamed, shape: Shape) -> bool:
        """Whether these are the parts of a state that this step could have left."""
        buffer, sizes, dtype = memory.buffer, shape.of_states, self.dtype
        return (
            buffer is not None
            and memory.seen < MOST_STEPS
            and memory.shape == shape
            and buffer.form == (self.n, self.key_size, dtype, self.k_att, self.block_size)
            and (c is not None) is self.has_c
            and self._can_hold(memory)
            and h.shape == sizes
            and h.dtype is dtype
            and (c is None or (c.shape == sizes and c.dtype is dtype))
            and are_readable((h, c))
        )

    def _can_hold(self, memory: Streamed) -> bool:
        """Whether a stream's memory is within the bound, and has what this step needs to forget."""
        held, bound = memory.held, self.max_memory
        if not self.has_list:
            return held is None and (bound is None or memory.last - memory.first <= bound)
        return held is not None and held.live.shape[1] == bound and (held.reads is not None) is self.counts_reads

    def begin(self, memory: Memory | None, shape: Shape, seen: int) -> Streamed:
        """The memory of a layer's state [1, B, ...], or an empty one, as that of a stream."""
        slots = 0 if memory is None else memory.numbers.shape[2]
        buffer = self._new_buffer(shape, slots)
        if memory is not None and slots > 0:
            buffer.fill([part[0].detach() for part in memory[:3]])
        reads = None if memory is None or memory.reads is None else memory.reads[0]
        return Streamed(buffer, 0, slots, seen, shape, self._held(shape, slots, reads))

    def _held(self, shape: Shape, used: int, reads: Tensor | None) -> Held | None:
        """The first `used` slots of a buffer, with their counts [B, used or more], as what a macrostate holds."""
        if not self.has_list or self.max_memory is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            live = torch.arange(self.max_memory, dtype=torch.int32, device="cpu").expand(shape.rows, -1).contiguous()
            counts = torch.zeros(shape.rows, self.max_memory, dtype=torch.int64, device="cpu")
            if reads is not None:
                counts[:, :used] = reads[:, :used]
        return Held(live, counts if self.counts_reads else None, used)

    def _new_buffer(self, shape: Shape, slots: int) -> Buffer:
        """A buffer for a stream that uses so many slots."""
        capacity = _room(slots) if self.has_memory else 0
        is_sketched = capacity >= self._fewest_sketched
        return Buffer(self.like, shape.rows, capacity, self.key_size, self.k_att, is_sketched, self.block_size)

    def step(
        self,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        memory: Streamed,
        shape: Shape,
        candidates: Candidates | None = None,
    ) -> tuple[Tensor, Tensor | None, Streamed] | None:
        """h, c and the memory after one step with the input x; None where x has NaN in it.

        Candidates are for one row, an unbounded macrostate and a scorer whose scores are inner products.
        """
        buffer, first, last, seen, held = memory.buffer, memory.first, memory.last, memory.seen, memory.held
        if buffer is None:
            return None
        slots, keeps = last - first, self.has_memory and schedule.keeps(seen, self.k_att)
        if keeps and not buffer.take(last):
            slots = slots if held is None else held.used
            grown = self._new_buffer(shape, slots)
            grown.fill(memory.copied(buffer), buffer.sketch if first == 0 else ())
            buffer, first, last = grown, 0, slots
            held = None if held is None else self._held(shape, slots, held.reads)
            buffer.take(last)
        if held is not None:
            held = held.copy(keeps)
        live = None if held is None else held.live
        room, find = 0 if held is None else held.used, 0
        if candidates is not None:
            live, room = candidates.slots, len(candidates.slots)
            find = ctypes.c_void_p.from_buffer(candidates.find).value  # a cast would be a cycle
        if c is not None and c.shape == shape.of_states:
            h_new, c_new = torch.empty_like(c), torch.empty_like(c)  # takes less time; a cell's first state differs
        else:
            h_new, c_new = x.new_empty(shape.of_states), None if c is None else x.new_empty(shape.of_states)
        now = pack_step(
            shape.rows,
            slots,
            buffer.capacity,
            seen,
            torch.get_num_threads(),
            room,
            x.data_ptr(),
            h.data_ptr(),
            0 if c is None else c.data_ptr(),
            h_new.data_ptr(),
            0 if c_new is None else c_new.data_ptr(),
            *(buffer.addresses if first == 0 else [pointer + first * size for pointer, size in buffer.pointers]),
            0 if live is None else live.data_ptr(),
            0 if held is None or held.reads is None else held.reads.data_ptr(),
            *buffer.sketch_pointers,
            0 if buffer.block_keys is None else buffer.block_keys.data_ptr(),
            first,
            find,
        )
        if self._run(self._arguments, now) != 0:
            return None
        if keeps:
            last += 1
            if self.max_memory is not None:
                first = first if self.has_list else max(first, last - self.max_memory)
                held = None if held is None else held._replace(used=min(held.used + 1, self.max_memory))
        return h_new, c_new, Streamed(buffer, first, last, seen + 1, shape, held)


def can_stream(x: Tensor, stepper: Stepper) -> bool:
    """Whether a step may read the memory of an input and of a layer: nothing but their values counts."""
    if not torch_private.counts_values_alone():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in stepper.tensors):
        return False
    return are_readable((x,)) and not torch.is_autocast_enabled("cpu")


def are_readable(tensors: Sequence[Tensor | None]) -> bool:
    """Whether these are numbers in the memory of the CPU, without gaps, whose use need not be recorded."""
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in PLAIN
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or (grad and tensor.requires_grad)
        ):
            return False
    return True


def make_stepper(
    parameters: Sequence[Tensor | None], weights: LayerWeights, cell: str, config: SABConfig
) -> Stepper | None:
    """The step of a layer, or None where the compiled loops cannot run it."""
    x = weights.w_ih.new_empty(1, 1, 0)
    if (
        config.layer_norm
        or x.dtype not in (torch.float32, torch.float64)
        or config.backend not in ("auto", "cpu")
        or engine.unsupported(x, None, weights, cell, config) is not None
    ):
        return None
    with torch.no_grad():
        if not are_readable(parameters):
            return None
    return Stepper(parameters, weights, cell, config)


def _places(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.is_contiguous, tensors), *map(Tensor.size, tensors)]


def _room(slots: int) -> int:
    """How many slots a new buffer has where some are in use: so many that copying them again is far off."""
    return max(FEWEST_SLOTS, 2 * slots)
