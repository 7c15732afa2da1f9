"""IndexedStream: streams on the CPU with a memory of millions of microstates, read through an index.

A step of an ordinary stream scores every microstate. Here an index of the package faiss finds those with the highest
scores, or most of them. What it found is scored, weighted and summed up as in any other step. How much of what it
should have found it did find is measured while the stream runs.

Steps with gradients are run a second time, by the layer itself, from a state that has only what the index found. So
they cost what a small memory costs, forward and backward, and the gradients are those of the whole memory: no other
microstate can get any.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from sab.config import MOST_STEPS
from sab.errors import UserTypeError, UserValueError, check_int
from sab.extras import require
from sab.inputs import InitialState, initial_state, time_major
from sab.layers import SABLayer
from sab.ops.cpu.stream import FIND, Candidates, Shape, Stepper, Streamed
from sab.parts.registry import SCORERS
from sab.parts.scorers import VectorFunctions
from sab.state import SABState, attach


class Recall(NamedTuple):
    """How well an index has found what it should."""

    share: float
    """Of the microstates with the k_top highest scores, the share that was found; NaN before the first check."""
    steps: int
    """How many steps were checked."""


class Read(NamedTuple):
    """What steps with gradients could read of the memory before them."""

    numbers: Tensor
    """The microstates' numbers, oldest first, [U]."""
    microstates: Tensor
    """[U, hidden_size]. After a backward pass, `.grad` has their gradients; all other microstates' are 0."""


class IndexedStream:
    """A stream of one sequence on the CPU whose steps find what they read through an index.

    The index finds about the `k_top` microstates with the highest scores, and may miss some. What it finds is scored
    again exactly, so the weights are right for what was found. The newest microstates, fewer than `batch`, are not in
    the index yet; all of them are scored.

    Example:
        stream = sab.search.IndexedStream(layer)
        output = stream.step(x)  # [T, input_size], one step or more; as layer(x)[0]
        stream.recall  # Recall(share=0.98, steps=1200)
        stream.step(x, gradients=True).sum().backward()  # gradients of the layer's weights, and of what was read
        output, state = layer(x, stream.state)  # the ordinary layer goes on from here
    """

    def __init__(
        self,
        layer: SABLayer[Any],
        state: InitialState | None = None,
        *,
        index: str = "IVF1024,Flat",
        parameters: str = "nprobe=64",
        batch: int = 256,
        train_after: int = 50_000,
        check_every: int = 1000,
    ):
        """Begin a stream.

        Args:
            layer: One layer of one direction on the CPU, with the scorer `cosine` or `dot`. Later changes of its
                weights count from the next call of `step` on, for new keys and queries.
            state: Where to begin: what the layer returned for one sequence, or None for an empty memory.
            index: The kind of index, as `faiss.index_factory` takes it, as in `IVF4096,Flat` or `HNSW32`.
            parameters: How thoroughly it is searched, as `faiss.ParameterSpace` takes it, as in `nprobe=128` or
                `efSearch=256`; an empty string leaves that to faiss.
            batch: How many microstates are added to the index at once.
            train_after: How many microstates an index that learns from data, as `IVF` does, is trained on; before
                that, steps are exact. faiss asks for 39 for each list of an `IVF`.
            check_every: Every so many steps, one is also selected exactly, to measure `recall`.
        """
        require("faiss")
        import faiss

        self._layer = _checked(layer)
        self._faiss: Any = faiss
        self._batch = check_int("batch", batch, 1)
        self._train_after = check_int("train_after", train_after, 1)
        self._check_every = check_int("check_every", check_every, 1)
        self._index = self._new_index(index, parameters)
        self._found = self._wanted = self._checks = 0
        self._error: BaseException | None = None
        self._slots = torch.empty(0, dtype=torch.int32, device="cpu")
        self._asked: list[Tensor] | None = None  # the slots that steps may select, where that is to be known
        self._read: Read | None = None
        self._form = layer._form
        x = layer._own_weight.new_zeros(1, layer.input_size)
        with torch.inference_mode(False), torch.no_grad():
            whole = initial_state(state, time_major(x, None, self._form), self._form)
            self._h, self._c, self._memory = self._begin(whole)
            self._add_to_index()

    def _new_index(self, index: str, parameters: str) -> Any:
        """An empty index of inner products."""
        for option, value in (("index", index), ("parameters", parameters)):
            if not isinstance(value, str):
                raise UserTypeError(f"{option} must be a string for faiss; got {type(value).__name__}.", option)
        size = self._layer._key_size
        try:
            made = self._faiss.index_factory(size, index, self._faiss.METRIC_INNER_PRODUCT)
        except RuntimeError:
            raise UserValueError(
                f"index must be what faiss.index_factory can make for keys of size {size}, as "
                f"'IVF1024,Flat' or 'HNSW32'; got {index!r}.",
                "index",
            ) from None
        try:
            self._faiss.ParameterSpace().set_index_parameters(made, parameters)
        except RuntimeError:
            raise UserValueError(
                f"parameters must be those of an index {index!r}, as 'nprobe=64' are of 'IVF1024,Flat' and "
                f"'efSearch=256' of 'HNSW32'; got {parameters!r}.",
                "parameters",
            ) from None
        self._check_index(made, index, parameters)
        return made

    def _check_index(self, made: Any, index: str, parameters: str) -> None:
        """Refuse at once what faiss would only refuse when it is trained, added to or searched."""
        lists = self._faiss.try_extract_index_ivf(made)
        if lists is not None and lists.nprobe < 1:
            raise UserValueError(f"parameters must set nprobe to at least 1; got {parameters!r}.", "parameters")
        if lists is not None and self._train_after < lists.nlist:
            raise UserValueError(
                f"train_after must be at least {lists.nlist}, the number of lists of {index!r}; got "
                f"{self._train_after}.",
                "train_after",
            )
        if "IDMap" in type(made).__name__:
            raise UserValueError(f"index must be one that numbers its entries itself; got {index!r}.", "index")

    def _stepper(self) -> Stepper:
        """The layer's native step."""
        stepper = self._layer._stepper_for()
        if stepper is None:
            raise UserValueError(
                "layer must be one that the compiled CPU loops can run: float32 or float64, without layer norm, with "
                "backend 'auto' or 'cpu'; it is not, or the loops are missing.",
                "layer",
            )
        return stepper

    def _begin(self, state: SABState | None) -> tuple[Tensor, Tensor | None, Streamed]:
        """The parts of a state [1, 1, ...], or of an empty one, as a stream has them."""
        stepper, shape = self._stepper(), Shape((1, self._layer.hidden_size), None)
        if state is None:
            h = self._layer._own_weight.new_zeros(shape.of_states)
            return h, h.clone() if stepper.has_c else None, stepper.begin(None, shape, 0)
        seen = state._seen_by_all()
        if seen is None:
            raise UserValueError("state must be one whose slots are all in use; got one with unused slots.", "state")
        h, c = (None if part is None else part[0].detach().clone().as_subclass(Tensor) for part in (state.h, state.c))
        assert h is not None
        return h, c, stepper.begin(state._parts, shape, seen)

    def step(self, input: Tensor, gradients: bool = False) -> Tensor:
        """Run one step or more, and return their hidden states as the layer does.

        Args:
            input: [T, input_size], or with a batch of one [T, 1, input_size], [1, T, input_size] with `batch_first`.
            gradients: Whether the output gets gradients: of the layer's weights, of the input, and of what is `read`.
                They end at the beginning of the call. Where the index misses something, a step of the call may find
                it among what was found for another one, and differ from that without gradients.
        """
        if self._layer._form != self._form:
            raise UserValueError(
                f"layer must stay as it was when the stream began, {self._form.dtype} on the CPU; it has changed.",
                "layer",
            )
        begin = self._h, self._c, self._memory
        self._asked = [] if gradients else None
        with torch.inference_mode(False), torch.no_grad():
            sequences = time_major(input, None, self._form)
            steps, rows, _ = sequences.x.shape
            if sequences.packed is not None or rows != 1:
                given = f"a batch of {rows}" if sequences.packed is None else "a PackedSequence"
                raise UserValueError(f"input must be one sequence, since an index serves one; got {given}.", "input")
            if self._memory.seen + steps > MOST_STEPS:
                raise UserValueError(f"input must end within {MOST_STEPS} steps of a stream; it does not.", "input")
            stepper, find = self._stepper(), FIND(self._found_for)  # kept, it would keep this stream alive
            outputs = [self._step(stepper, find, x) for x in sequences.x.detach().contiguous().unbind(0)]
            output: Any = sequences.restore(torch.stack(outputs))
        return self._with_gradients(input, *begin) if gradients else output

    def _with_gradients(self, input: Tensor, h: Tensor, c: Tensor | None, memory: Streamed) -> Tensor:
        """The outputs of the steps that have just been run from there, by the layer, from what they could read."""
        assert self._asked is not None
        assert self._memory.buffer is not None
        sequences = time_major(input, None, self._form)
        with torch.inference_mode(False), torch.no_grad():
            slots = torch.cat(self._asked).unique() if self._asked else torch.empty(0, dtype=torch.int64)
            slots = slots[slots < memory.last]
            microstates, keys, numbers = (part[0, slots] for part in self._memory.buffer.parts)
        self._read = Read(numbers, microstates.requires_grad_())
        c = None if c is None else c.clone()
        state = SABState(h.clone(), c, microstates[None], keys[None], numbers[None], torch.tensor(memory.seen))
        output, _ = self._layer(sequences.x.squeeze(1), state)
        restored: Any = sequences.restore(output.unsqueeze(1))
        return restored

    @property
    def read(self) -> Read | None:
        """What the latest steps with gradients could read of the memory before them; None before the first."""
        return self._read

    def _step(self, stepper: Stepper, find: Any, x: Tensor) -> Tensor:
        candidates = None  # every microstate is scored
        if self._index.ntotal > 0:
            room = self._layer.config.k_top + self._memory.last - self._index.ntotal
            if len(self._slots) < room:
                self._slots = torch.empty(2 * room, dtype=torch.int32, device="cpu")
            candidates = Candidates(find, self._slots)
        elif self._asked is not None:
            self._asked.append(torch.arange(self._memory.last))
        stepped = stepper.step(x, self._h, self._c, self._memory, self._memory.shape, candidates)
        assert stepped is not None  # the input has been checked
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._h, self._c, self._memory = stepped
        if self._memory.last - self._index.ntotal >= self._batch:
            self._add_to_index()
        return self._h

    @property
    def _keys(self) -> Tensor:
        """The keys of all microstates, [S, d]."""
        assert self._memory.buffer is not None
        return self._memory.buffer.parts[1][0, : self._memory.last]

    def _found_for(self, address: int) -> int:
        """Write the slots that may have the highest scores for the query there, and return how many there are.

        The compiled step calls it, through which no error can pass.
        """
        try:
            return self._search(address)
        except BaseException as error:
            self._error = error
            self._slots[0] = 0
            return 1

    def _search(self, address: int) -> int:
        keys, k, indexed = self._keys, self._layer.config.k_top, self._index.ntotal
        number = ctypes.c_float if keys.dtype == torch.float32 else ctypes.c_double
        entries: Any = (number * keys.shape[1]).from_address(address)
        query = numpy.frombuffer(entries, number)
        _, found = self._index.search(query.astype(numpy.float32)[None], min(k, indexed))
        older = numpy.sort(found[found >= 0])  # faiss fills up with -1
        slots = self._slots.numpy()
        count, last = len(older), len(older) + len(keys) - indexed
        slots[:count] = older
        slots[count:last] = numpy.arange(indexed, len(keys))
        if last == 0:  # the lists that were searched are empty
            slots[0], last = len(keys) - 1, 1
        if self._asked is not None:
            self._asked.append(torch.from_numpy(slots[:last]).long())
        if (self._memory.seen + 1) % self._check_every == 0:
            self._check(keys @ torch.from_numpy(query.copy()), torch.from_numpy(slots[:last]).long())
        return last

    def _check(self, scores: Tensor, slots: Tensor) -> None:
        """Count how many of the highest scores are among those of the slots; of equal ones, any will do."""
        k = min(self._layer.config.k_top, len(scores))
        lowest = scores.topk(k).values[-1]
        self._found += min(int((scores[slots] >= lowest).sum()), k)
        self._wanted += k
        self._checks += 1

    def _add_to_index(self) -> None:
        """Add what is not in the index yet, unless it is too little to train it on."""
        keys = self._keys[self._index.ntotal :].float().numpy()
        if len(keys) == 0 or not (self._index.is_trained or len(keys) >= self._train_after):
            return
        if not self._index.is_trained:
            self._index.train(keys[:: len(keys) // self._train_after])
        self._index.add(keys)

    @property
    def recall(self) -> Recall:
        """How much of what exact steps would select has been found, over the steps that were checked."""
        return Recall(self._found / self._wanted if self._wanted else float("nan"), self._checks)

    @property
    def state(self) -> Any:
        """The state, as the layer returns it for unbatched input; the layer continues from it, exactly."""
        h, c, now = self._h.clone(), None if self._c is None else self._c.clone(), self._memory
        assert now.buffer is not None
        memory = Streamed(now.buffer, now.first, now.last, now.seen, now.shape)  # theirs to look at, ours to go on
        return attach(h, memory) if c is None else SABState._of(h, c, memory)


def _checked(layer: Any) -> SABLayer[Any]:
    """The layer, which must be one that an index can serve."""
    if not isinstance(layer, SABLayer) or layer._is_cell:
        remedy = "; cell.to_layer() makes one of a cell" if isinstance(layer, SABLayer) else ""
        raise UserTypeError(f"layer must be a SAB layer; got {type(layer).__name__}{remedy}.", "layer")
    if len(layer._suffixes) > 1:
        raise UserValueError(
            f"layer must have one layer of one direction for an index; got {len(layer._suffixes)}.", "layer"
        )
    if layer._own_weight.device.type != "cpu":
        raise UserValueError(f"layer must be on the CPU for an index; got {layer._own_weight.device}.", "layer")
    if layer.recurrent_dropout > 0 and layer.training:
        raise UserValueError("layer must be in evaluation mode, since it has recurrent dropout: layer.eval().", "layer")
    config = layer.config
    if config.k_top == 0:
        raise UserValueError("k_top must be at least 1 for an index; got 0.", "k_top")
    if config.forward == "dense":
        raise UserValueError("forward must be 'sparse' for an index: 'dense' reads every microstate.", "forward")
    if config.is_hierarchical:
        raise UserValueError("memory must be 'flat' for an index; got 'hierarchical'.", "memory")
    if config.forgets:
        raise UserValueError(
            f"max_memory must be None for an index; got {config.max_memory}, which an ordinary stream searches.",
            "max_memory",
        )
    scorer = SCORERS.get(config.scorer) if isinstance(config.scorer, str) else None
    if scorer is not None and scorer.query_cancels:
        raise UserValueError(
            f"scorer must be one whose selection depends on the query, as 'cosine' or 'dot'; {config.scorer!r} needs "
            "no index: layer.compact(state) keeps k_top microstates.",
            "scorer",
        )
    if scorer is None or not (isinstance(scorer.triton, VectorFunctions) and scorer.triton.is_product):
        name = config.scorer if isinstance(config.scorer, str) else type(config.scorer).__name__
        raise UserValueError(
            f"scorer must be 'cosine' or 'dot' for an index, whose scores are inner products; got {name!r}.", "scorer"
        )
    return layer
