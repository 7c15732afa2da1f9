"""What a user passes to a layer, checked and in one form: time-major, with lengths on the CPU and a whole state.

And back: an output or an attention in the form of the input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from sab import torch_private
from sab.config import MOST_STEPS
from sab.errors import UserTypeError, UserValueError
from sab.ops.forgetting import READ
from sab.ops.precision import is_autocast
from sab.state import Attention, Memory, SABState, is_changed, memory_of

Input = Tensor | PackedSequence
InitialState = SABState | Tensor | tuple[Tensor, ...]

_AUTOCAST_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Form(NamedTuple):
    """What a layer expects of its input and of its state."""

    input_size: int
    hidden_size: int
    layers: int
    """Layers times directions."""
    batch_first: bool
    has_c: bool
    has_memory: bool
    key_size: int
    dtype: torch.dtype
    device: torch.device
    k_att: int
    is_cell: bool = False
    """Whether inputs are single steps, and states have no dimension for layers."""
    max_memory: int | None = None
    """How many microstates a state may have."""
    counts_reads: bool = False


class Sequences(NamedTuple):
    """A layer's input in time-major form."""

    x: Tensor
    """[T, B, input_size], with zeros for padding."""
    lengths: Tensor | None
    """[B], on the CPU; None where all rows have T steps."""
    packed: PackedSequence | None
    """The input itself where it is packed. Its rows are run as it has them, the longest first."""
    is_unbatched: bool
    batch_first: bool
    places: Tensor | None = None
    """The places of a packed input's entries among all T * B, in its order, on its device."""

    def restore_states(self, states: Tensor) -> Tensor:
        """The states [layers, B, n] in the form of the input."""
        if self.packed is not None and self.packed.unsorted_indices is not None:
            return states.index_select(1, self.packed.unsorted_indices)
        return states.squeeze(1) if self.is_unbatched else states

    def restore_memory(self, memory: Memory) -> Memory:
        """The memory of all layers in the form of the input."""
        if self.packed is not None and self.packed.unsorted_indices is not None:
            return memory.of_rows(self.packed.unsorted_indices)
        return memory.without_batch() if self.is_unbatched else memory

    def restore(self, output: Tensor) -> Input:
        """An output [T, B, n] in the form of the input."""
        if self.packed is not None:
            assert self.places is not None
            data = output.flatten(0, 1).index_select(0, self.places)
            return PackedSequence(
                data, self.packed.batch_sizes, self.packed.sorted_indices, self.packed.unsorted_indices
            )
        if self.is_unbatched:
            return output.squeeze(1)
        return output.transpose(0, 1) if self.batch_first else output

    def restore_attention(self, attention: Attention, k_top: int) -> Attention:
        """An attention [..., T, B, k] in the form of the input, padded to k_top."""
        if self.packed is not None and (order := self.packed.unsorted_indices) is not None:
            attention = attention.map(lambda tensor: tensor.index_select(-2, order))
        if self.is_unbatched:
            attention = attention.map(lambda tensor: tensor.squeeze(-2))
        elif self.batch_first:
            attention = attention.map(lambda tensor: tensor.transpose(-3, -2))
        missing = k_top - attention.numbers.shape[-1]
        numbers, weights = F.pad(attention.numbers, (0, missing), value=-1), F.pad(attention.weights, (0, missing))
        return Attention(numbers, weights, attention.summary)


def time_major(input: Input, lengths: Any, form: Form) -> Sequences:
    """The input, checked, in time-major form."""
    packed, places = input if isinstance(input, PackedSequence) else None, None
    if packed is not None:
        if lengths is not None:
            raise UserValueError(
                "lengths must be None where the input is a PackedSequence, which has its own.", "lengths"
            )
        x, lengths, places = _unpacked(packed)
    elif isinstance(input, Tensor):
        x = input
    else:
        raise UserTypeError(f"input must be a tensor or a PackedSequence; got {type(input).__name__}.", "input")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
        raise UserTypeError(f"input must be a dense tensor, or a PackedSequence; got {kind}.", "input")
    if x.device != form.device:
        raise UserValueError(f"input must be on the layer's device {form.device}; got one on {x.device}.", "input")
    if x.dim() not in ((2, 3) if packed is None else (3,)) or x.shape[-1] != form.input_size:
        order = "[B, T, input_size]" if form.batch_first else "[T, B, input_size]"
        raise UserValueError(
            f"input must be of shape {order} or [T, input_size] with input_size {form.input_size}; "
            f"got {list(x.shape)}.",
            "input",
        )
    if x.dtype != form.dtype and not (is_autocast(x.device.type) and x.dtype in _AUTOCAST_TYPES):
        raise UserTypeError(f"input must be of the layer's type {form.dtype}; got {x.dtype}.", "input")
    is_unbatched = x.dim() == 2
    if is_unbatched:
        x = x.unsqueeze(1)
    elif form.batch_first and packed is None:
        x = x.transpose(0, 1)
    if x.shape[0] == 0:
        raise UserValueError(
            f"input must have at least one step; got shape {list(x.shape)} as [T, B, input_size].", "input"
        )
    if lengths is not None:
        lengths = _check_lengths(lengths, x.shape[0], x.shape[1], is_unbatched)
        if packed is None:
            padding = torch.arange(x.shape[0], device="cpu").unsqueeze(1) >= lengths
            x = x.masked_fill(padding.to(x.device).unsqueeze(-1), 0.0)
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and torch.isnan(torch_private.unwrapped(x)).any():
        # On a GPU this would wait for the device, so there NaN goes through as in torch.nn.
        if torch_private.are_transforms_active():
            raise UserValueError("input must be free of NaN; got NaN inside of a function transform.", "input")
        step, row, _ = torch.isnan(x).nonzero()[0].tolist()
        raise UserValueError(f"input must be free of NaN; got NaN at step {step} of row {row}.", "input")
    return Sequences(x, lengths, packed, is_unbatched, form.batch_first, places)


def initial_state(hx: InitialState | None, sequences: Sequences, form: Form) -> SABState | None:
    """`hx` as a SABState of the layer, checked, with the rows of the sequences; None where there is none."""
    if hx is None:
        return None
    if isinstance(hx, SABState):
        state = _as_of_layers(hx)
        has_batch = state.h.dim() == 3
    else:
        given = _as_tensors(hx, "(h, c) or a SABState" if form.has_c else "h or a SABState", 2 if form.has_c else 1)
        memory = memory_of(given[0])
        if memory is None and memory_of(torch_private.unwrapped(given[0])) is not None:
            raise UserTypeError(
                "hx must be a SABState (h.state) inside of a function transform: h loses its memory there.",
                "hx",
            )
        if memory is None and form.is_cell:
            given = [tensor.unsqueeze(0) for tensor in given]
        state = SABState._of(given[0], given[1] if form.has_c else None, memory or _empty_memory(sequences, form))
        state = state if memory is None else _as_of_layers(state)
        has_batch = memory is not None and state.h.dim() == 3
    if is_changed(state.h):
        raise UserValueError(
            "hx must not be changed in place, since its memory belongs to what it was; pass h[:] in its place to begin "
            "with an empty memory, or use state.reset(rows).",
            "hx",
        )
    if sequences.is_unbatched and not has_batch:
        state = state._with_batch()
    if _has_nothing_to_read(state, form):
        steps, empty = state.steps, _empty_memory(sequences, form, has_batch=True)
        state = state._with(empty._replace(steps=steps, seen=state._seen))
    state = _with_reads(state, form)
    _check_state(state, sequences, form)
    if sequences.packed is not None and sequences.packed.sorted_indices is not None:
        return state.select(sequences.packed.sorted_indices)
    return state


def _with_reads(state: SABState, form: Form) -> SABState:
    """The state with counts of reads where the layer has them, else without; one from elsewhere begins as if new."""
    if (state.reads is not None) == form.counts_reads:
        return state
    reads = None
    if form.counts_reads and isinstance(state.numbers, Tensor):
        reads = torch.where(state.numbers < 0, 0, READ)
    return state._with(state._parts._replace(reads=reads))


def _has_nothing_to_read(state: SABState, form: Form) -> bool:
    """Whether the memory is that of another kind of layer, and yet will do: it is empty, or this layer reads none."""
    if not isinstance(state.keys, Tensor) or state.keys.dim() != 4:
        return False  # the checks to come say so
    slots, key_size = state.keys.shape[2:]
    return (slots > 0 and not form.has_memory) or (slots == 0 and key_size != form.key_size)


def _as_of_layers(state: SABState) -> SABState:
    """A layer's state as it is, a cell's as that of a layer."""
    return state._with_layers() if state.h.dim() == state.steps.dim() + 1 else state


def _empty_memory(sequences: Sequences, form: Form, has_batch: bool = False) -> Memory:
    """That of a state in `torch.nn`'s form."""
    x, layers, n = sequences.x, form.layers, form.hidden_size
    batch = x.shape[1]
    memory = Memory(
        microstates=x.new_zeros(layers, batch, 0, n, dtype=form.dtype),
        keys=x.new_zeros(layers, batch, 0, form.key_size, dtype=form.dtype),
        numbers=x.new_zeros(layers, batch, 0, dtype=torch.int64),
        steps=torch.zeros(batch, dtype=torch.int64, device="cpu"),
        seen=0,
        reads=x.new_zeros(layers, batch, 0, dtype=torch.int64) if form.counts_reads else None,
    )
    return memory.without_batch() if sequences.is_unbatched and not has_batch else memory


def reversed_order(lengths: Tensor, steps: int, device: torch.device) -> Tensor:
    """The places among all T * B from which each place takes its entry where every row goes backwards in time.

    It is made once for a call, before the device has work: a copy to it would wait for that.
    """
    step = torch.arange(steps, device="cpu").unsqueeze(1)
    source = torch.where(step < lengths, lengths - 1 - step, step)
    batch = lengths.shape[0]
    return (source * batch + torch.arange(batch, device="cpu")).flatten().to(device)


def reverse(sequence: Tensor, order: Tensor | None) -> Tensor:
    """Each row of [T, B, ...] backwards in time; its padding stays where it is. Without an order there is none."""
    if order is None:
        return sequence.flip(0)
    return sequence.flatten(0, 1).index_select(0, order).view(sequence.shape)


def _check_state(state: SABState, sequences: Sequences, form: Form) -> None:
    layers, batch, n = form.layers, sequences.x.shape[1], form.hidden_size
    slots = state.microstates.shape[2] if state.microstates.dim() == 4 and form.has_memory else 0
    expected = {
        "h": [layers, batch, n],
        "c": [layers, batch, n] if form.has_c else None,
        "microstates": [layers, batch, slots, n],
        "keys": [layers, batch, slots, form.key_size],
        "numbers": [layers, batch, slots],
        "steps": [batch],
        "reads": [layers, batch, slots] if form.counts_reads else None,
    }
    if form.max_memory is not None and slots > form.max_memory:
        raise UserValueError(
            f"hx must have at most max_memory = {form.max_memory} microstates; got {slots}: "
            f"state.recent({form.max_memory}) has as many.",
            "hx",
        )
    for name, shape in expected.items():
        tensor = getattr(state, name)
        if tensor is not None and not (isinstance(tensor, Tensor) and tensor.layout == torch.strided):
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserTypeError(f"hx must have {name} that is a tensor of layout torch.strided; got {kind}.", "hx")
        given = None if tensor is None else list(tensor.shape)
        if given != shape:
            if sequences.is_unbatched and state.steps.shape == (1,):  # shown as the caller sees them, without a batch
                shape, given = (shown and shown[:1] + shown[2:] for shown in (shape, given))
            if form.is_cell and name != "steps":
                shape, given = (shown and shown[1:] for shown in (shape, given))
            remedy = "; the state of another layer begins with an empty memory as h[:], or (h[:], c) for an LSTM"
            remedy = remedy if name in ("microstates", "keys") else ""
            raise UserValueError(f"hx must have {name} of shape {shape}; got {given}{remedy}.", "hx")
        dtype = torch.int64 if name in ("numbers", "steps", "reads") else form.dtype
        if tensor is not None and tensor.dtype != dtype:
            raise UserTypeError(f"hx must have {name} of type {dtype}; got {tensor.dtype}.", "hx")
    if state.steps.device.type != "cpu":
        raise UserValueError(f"hx must have steps on the CPU; got {state.steps.device}.", "hx")
    if not torch.compiler.is_compiling():
        steps = torch_private.unwrapped(state.steps).flatten().tolist()
        if steps and not (min(steps) >= 0 and max(steps) <= MOST_STEPS):
            raise UserValueError(f"hx must have steps from 0 to {MOST_STEPS}; got {steps}.", "hx")
        if slots > 0 and steps and state.numbers.device.type == "cpu":
            newest = int(torch_private.unwrapped(state.numbers)[..., -1].max())  # slots are in the order of age
            if newest >= max(steps) // form.k_att:
                raise UserValueError(
                    f"hx must be the state of a layer with k_att {form.k_att}, which after {max(steps)} steps has no "
                    f"microstate number {newest}; got one that has.",
                    "hx",
                )


def _as_tensors(hx: Any, allowed: str, count: int) -> list[Tensor]:
    """`torch.nn`'s form of a state as a list of its tensors."""
    if not isinstance(hx, Tensor | tuple | list):
        raise UserTypeError(f"hx must be {allowed}; got {type(hx).__name__}.", "hx")
    given = [hx] if isinstance(hx, Tensor) else list(hx)
    for tensor in given:
        if not isinstance(tensor, Tensor):
            kind = "None" if tensor is None else type(tensor).__name__
            raise UserTypeError(f"hx must be {allowed}; got {kind} in it.", "hx")
    if len(given) != count:
        raise UserValueError(f"hx must be {allowed}; got {len(given)} tensor{'s' * (len(given) != 1)}.", "hx")
    return given


def _check_lengths(lengths: Any, steps: int, batch: int, is_unbatched: bool) -> Tensor:
    allowed = f"lengths must be {batch} whole numbers, one a row, from 1 to {steps}"
    try:
        lengths = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise UserTypeError(f"{allowed}; got {lengths!r}.", "lengths") from None
    if batch == 0 and lengths.numel() == 0:
        lengths = lengths.long()  # an empty list is one of floats to torch
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise UserTypeError(f"{allowed}; got {lengths.dtype}.", "lengths")
    if is_unbatched and lengths.dim() == 0:
        lengths = lengths.unsqueeze(0)
    if lengths.shape != (batch,):
        raise UserValueError(f"{allowed}; got shape {list(lengths.shape)}.", "lengths")
    if not torch.compiler.is_compiling():
        values = torch_private.unwrapped(lengths)
        if ((values < 1) | (values > steps)).any():
            raise UserValueError(f"{allowed}; got {values.tolist()}.", "lengths")
    # A copy: the caller may change theirs, and the loops read it as it lies in memory.
    return lengths.to(torch.int64, copy=True, memory_format=torch.contiguous_format)


def _unpacked(packed: PackedSequence) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences padded with zeros, [T, B, input_size], the longest first, their lengths, and the places of their
    entries among T * B.

    `pad_packed_sequence` takes an operation for each length, and its gradient one for each step.
    """
    data, sizes = packed.data, packed.batch_sizes
    steps, batch = sizes.shape[0], int(sizes[0])
    is_there = torch.arange(batch, device="cpu") < sizes.unsqueeze(1)
    places, lengths = is_there.flatten().nonzero().squeeze(1).to(data.device), is_there.sum(0)
    x = data.new_zeros(steps * batch, *data.shape[1:]).index_copy(0, places, data)
    return x.unflatten(0, (steps, batch)), lengths, places
