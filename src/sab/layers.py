"""SABLSTM, SABGRU and SABRNN: `torch.nn`'s recurrent layers with a memory that gradients can skip through."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sab import torch_private
from sab.config import MOST_STEPS, NEUTRAL_GATE, SABConfig
from sab.errors import UserTypeError, UserValueError, check_bool, check_choice, check_float, check_int
from sab.inputs import Form, InitialState, Input, Sequences, initial_state, reverse, reversed_order, time_major
from sab.ops import dispatch
from sab.ops.cpu.stream import PLAIN, Shape, Stepper, Streamed, are_readable, can_stream, make_stepper
from sab.ops.precision import own_type
from sab.ops.types import LayerResult, LayerState, LayerWeights, key_size, stack_attentions, stack_ends, stack_memories
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS, WEIGHTINGS
from sab.parts.scorers import ScorerWeights
from sab.state import Attention, Memory, Pending, SABHidden, SABState, attach, is_changed, memory_of

StateT = TypeVar("StateT", SABState, SABHidden)
"""What a layer returns as its state."""
AnyState = TypeVar("AnyState", SABState, SABHidden)

_SCORER_PARAMETERS = {"w_memory": "attn_w_memory", "w_query": "attn_w_query", "bias": "attn_bias", "v": "attn_v"}
"""Names of a scorer's parameters: in `ScorerWeights` and in the layer."""
USUAL_STATES = 1e3
"""Hidden states that leave [-USUAL_STATES, USUAL_STATES] in training are warned about."""
_CELL_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_PARAMETERS = (
    *_CELL_PARAMETERS,
    *_SCORER_PARAMETERS.values(),
    *("incorporate_weight", "incorporate_bias"),
    *("norm_ih", "norm_hh", "norm_c_weight", "norm_c_bias"),
)
"""Names of a layer's parameters in the order of `LayerWeights`."""


class SABLayer(torch_private.Explaining, Generic[StateT]):
    """What all layers share; the cell makes the difference. A subclass for another cell sets `cell`, and as type
    argument the class of its state: `SABState` for a cell with c, `SABHidden` for the others."""

    cell: str
    """Name of the cell, of those in `sab.parts.registry.CELLS`."""
    _torch_class: ClassVar[type[nn.RNNBase] | None] = None
    """The layer of `torch.nn` with this cell, if there is one."""
    weight_hh_l0: nn.Parameter
    _is_cell: ClassVar[bool] = False
    """Whether this takes single steps: one layer, whose parameters are named as those of `torch.nn`'s cells."""
    _stepper: Stepper | None = None
    """The layer's native step, made when it is first needed."""
    recurrent_dropout: float = 0.0
    """The probability, in training, that a hidden unit is kept from the recurrent product: at all steps of a call
    alike, and drawn for each row, layer and direction."""
    _has_warned = True
    """Whether growing hidden states have been warned about, or cannot grow."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        proj_size: int = 0,
        k_top: int = SABConfig.k_top,
        k_att: int = SABConfig.k_att,
        k_trunc: int | None = SABConfig.k_trunc,
        scorer: str | Callable[[Tensor, Tensor], Tensor] = SABConfig.scorer,
        weighting: str = SABConfig.weighting,
        forward: str = SABConfig.forward,
        incorporate: str = SABConfig.incorporate,
        initial_gate: float | None = SABConfig.initial_gate,
        input_start: str = SABConfig.input_start,
        attention_size: int | None = SABConfig.attention_size,
        max_microstates: int | None = SABConfig.max_microstates,
        backend: str = SABConfig.backend,
        layer_norm: bool = SABConfig.layer_norm,
        max_memory: int | None = SABConfig.max_memory,
        forget: str = SABConfig.forget,
        memory: str = SABConfig.memory,
        block_size: int = SABConfig.block_size,
        blocks: int = SABConfig.blocks,
        recurrent_dropout: float = 0.0,
        recompute: bool = SABConfig.recompute,
        offload: bool = SABConfig.offload,
    ):
        """Make a layer; the arguments up to `dtype` are those of `torch.nn`.

        Args:
            input_size: Size of the inputs.
            hidden_size: Size n of the hidden state.
            num_layers: How many layers are stacked, each with a memory of its own.
            bias: Whether the cell has biases.
            batch_first: Whether inputs and outputs are [B, T, size] instead of [T, B, size].
            dropout: The probability, in training, that an entry between two layers is dropped.
            bidirectional: Whether a second set of weights and a second memory run backwards over the sequence.
            device: Where the parameters are made.
            dtype: Floating-point type of the parameters.
            proj_size: Must be 0: there is no projection.
            k_top: How many microstates a step may select; 0 makes the layer a plain RNN.
            k_att: Every k_att-th hidden state is kept as a microstate.
            k_trunc: How many steps back the gradient follows the recurrent chain; None cuts nowhere.
            scorer: `affine`, `affine_tanh`, `mlp`, `dot` or `cosine`. How relevant a microstate is; in Python also a
                callable: (microstates [B, S, n], h [B, n]) to scores [B, S].
            weighting: `relu`, `relu_norm`, `softmax` or `softmax_sink`. How the selected scores become weights.
            forward: `sparse` or `dense`. Whether only the selected microstates enter the summary (sparse) or all of
                them do (dense).
            incorporate: `add`, `concat`, `add_bounded` or `gate`. How the summary enters the hidden state. With `gate`
                and a weighting whose weights add up to at most 1, hidden states of LSTM, GRU and tanh cells stay within
                [-1, 1].
            initial_gate: With incorporate `gate`, the share of the summary in the hidden state before training, between
                0 and 1; None means 0.25. A very small one starts the layer as one without a memory, from which it
                learns to read.
            input_start: `fan_in` or `torch`. How the input weights of a layer with a memory are drawn: `fan_in` with a
                standard deviation of 2 / sqrt(input_size), so that an input leaves a mark on the hidden state from the
                first iteration; `torch` as `torch.nn` does, within 1 / sqrt(hidden_size).
            attention_size: Size d of the keys of the scorers `cosine`, `mlp` and `dot`; None means hidden_size,
                but at most 128.
            max_microstates: How many microstate numbers have a learned bias in the affine scorers; None means no bias.
            backend: `auto`, `triton`, `cpu` or `reference`. What computes the recurrence; `auto` takes the fastest that
                supports the configuration.
            layer_norm: Whether the products of the cell with the input and with the hidden state, and an LSTM's cell
                state where it is read, are normalised over their entries (layer norm).
            max_memory: How many microstates the macrostate holds at most, in training as in inference; None means all
                of them.
            forget: `recent`, `most_read` or `reservoir`. Which microstate is forgotten when there would be more than
                max_memory: the oldest (`recent`), the least read (`most_read`), or one by chance, so that a uniform
                sample of the past remains (`reservoir`).
            memory: `flat` or `hierarchical`. Whether a step scores all microstates (flat), or blocks of them first and
                then those of the best blocks (hierarchical), in a time that grows with the square root of their number.
            block_size: With memory `hierarchical`, how many microstates the smallest blocks hold; it doubles as the
                memory grows.
            blocks: With memory `hierarchical`, how many blocks a step reads, besides the one with the newest
                microstate.
            recurrent_dropout: The probability, in training, that a hidden unit is kept from the recurrent product: at
                all steps of a call alike, and drawn for each row, layer and direction.
            recompute: Whether training keeps little for the backward pass and runs the steps again there, some hundred
                at a time: the same gradients with a small part of the memory, in more time.
            offload: With recompute on a GPU, whether keys, selections and the gradients of microstates and keys lie in
                pinned memory of the CPU from the end of the forward pass on.
        """
        super().__init__()
        self.input_size = check_int("input_size", input_size, 1)
        self.hidden_size = check_int("hidden_size", hidden_size, 1)
        self.num_layers = check_int("num_layers", num_layers, 1)
        self.bias = check_bool("bias", bias)
        self.batch_first = check_bool("batch_first", batch_first)
        self.dropout = check_float("dropout", dropout, minimum=0.0, maximum=1.0)
        self.bidirectional = check_bool("bidirectional", bidirectional)
        if check_int("proj_size", proj_size, 0) != 0:
            raise UserValueError(
                f"proj_size must be 0: the layers with a memory have no projection; got {proj_size}.", "proj_size"
            )
        self.recurrent_dropout = check_float("recurrent_dropout", recurrent_dropout, minimum=0.0, below=1.0)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UserTypeError(f"dtype must be a floating-point type of torch; got {dtype!r}.", "dtype")
        self.config = SABConfig(
            k_top=k_top,
            k_att=k_att,
            k_trunc=k_trunc,
            scorer=scorer,
            weighting=weighting,
            forward=forward,
            incorporate=incorporate,
            initial_gate=initial_gate,
            input_start=input_start,
            attention_size=attention_size,
            max_microstates=max_microstates,
            backend=backend,
            layer_norm=layer_norm,
            max_memory=max_memory,
            forget=forget,
            recompute=recompute,
            offload=offload,
            memory=memory,
            block_size=block_size,
            blocks=blocks,
        )
        if self.dropout > 0 and self.num_layers == 1:
            warnings.warn(
                f"dropout acts between layers, so dropout={dropout} does nothing with num_layers=1.",
                stacklevel=2 if type(self).__init__ is SABLayer.__init__ else 3,  # at the caller's line
            )
        if isinstance(self.config.scorer, nn.Module):
            self.scorer = self.config.scorer  # registers its parameters; one module serves all layers and directions
        self._suffixes = [
            "" if self._is_cell else f"_l{layer}{direction}"
            for layer in range(self.num_layers)
            for direction in (("", "_reverse") if self.bidirectional else ("",))
        ]
        self._names: list[list[str | None]] = []
        for index, suffix in enumerate(self._suffixes):
            shapes = self._shapes(index)
            for name, shape in shapes.items():
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            self._names.append([name + suffix if name in shapes else None for name in _PARAMETERS])
        self._key_size = key_size(self._weights(0), self.config)
        self._has_warned = self._is_bounded()
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        config = self.config
        is_clear = config.attention_size is not None or config.k_top == 0 or not isinstance(config.scorer, str)
        if is_clear or SCORERS[str(config.scorer)].query_cancels:
            return
        if self._key_size != config.key_size(self.hidden_size):  # of an earlier version, which took others by itself
            self.config = replace(config, attention_size=self._key_size)

    def misfits(self, weights: Mapping[str, Any], prefix: str) -> list[str]:
        name = _SCORER_PARAMETERS["w_memory"] + self._suffixes[0]
        given, own = weights.get(prefix + name), getattr(self, name, None)
        if not isinstance(given, Tensor) or own is None or own.dim() < 2 or given.dim() < 2 or len(given) == len(own):
            return []
        found = f"the keys of these weights have {len(given)} entries, those of this layer {len(own)}"
        return [f"{found}: make the layer with attention_size={len(given)}."]

    def _is_bounded(self) -> bool:
        """Whether no hidden state can leave [-1, 1]; `docs/mathematics.md` has the proof."""
        cell, weighting = CELLS[self.cell], WEIGHTINGS[self.config.weighting]
        incorporation = INCORPORATIONS[self.config.incorporate]
        has_memory = self.config.k_top > 0
        return cell.is_bounded and (not has_memory or (weighting.is_bounded and incorporation.is_bounded))

    def _shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one layer in one direction, by name."""
        n, gates, config = self.hidden_size, CELLS[self.cell].gates * self.hidden_size, self.config
        first = index < self._directions
        shapes: dict[str, tuple[int, ...]] = {
            "weight_ih": (gates, self.input_size if first else n * self._directions),
            "weight_hh": (gates, n),
        }
        if self.bias:
            shapes |= {"bias_ih": (gates,), "bias_hh": (gates,)}
        if config.layer_norm:
            shapes |= {"norm_ih": (gates,), "norm_hh": (gates,)}
            if CELLS[self.cell].normalises_c:
                shapes |= {"norm_c_weight": (n,), "norm_c_bias": (n,)}
        if config.k_top == 0:
            return shapes
        if isinstance(config.scorer, str):
            scorer_shapes = SCORERS[config.scorer].shapes(n, config.key_size(n), config.max_microstates)
            for name, shape in scorer_shapes.items():
                check_choice(f"a parameter of the scorer {config.scorer!r}", name, _SCORER_PARAMETERS)
                shapes[_SCORER_PARAMETERS[name]] = shape
        if INCORPORATIONS[config.incorporate].has_weights:
            shapes |= {"incorporate_weight": (n, 2 * n), "incorporate_bias": (n,)}
        return shapes

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _dtype(self) -> torch.dtype:
        return self._own_weight.dtype

    @property
    def _own_weight(self) -> Tensor:
        """The recurrent weights of the first layer."""
        return getattr(self, "weight_hh" + self._suffixes[0])

    @property
    def _form(self) -> Form:
        return Form(
            self.input_size,
            self.hidden_size,
            len(self._suffixes),
            self.batch_first,
            CELLS[self.cell].has_c,
            self.config.k_top > 0,
            self._key_size,
            self._dtype,
            self._own_weight.device,
            self.config.k_att,
            self._is_cell,
            self.config.max_memory if self.config.forgets else None,
            self.config.counts_reads,
        )

    def reset_parameters(self) -> None:
        """Draw the parameters anew: those of the cell first and as `torch.nn` does, so that with the same random
        seed this layer and `torch.nn`'s start from the same cell, but for the scale of the input weights where
        `input_start` is `fan_in`; then those of the scorer, likewise uniform within 1/sqrt(hidden_size), or 0.3 in
        the scorer `cosine`'s v; those of the incorporation as it defines (`concat` starts as `add`); the gains of layer
        norm are 1, its bias 0."""
        bound, config = 1 / math.sqrt(self.hidden_size), self.config
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith(_CELL_PARAMETERS):
                nn.init.uniform_(parameter, -bound, bound)
            elif name.startswith("norm_"):
                nn.init.constant_(parameter, 0.0 if name.startswith("norm_c_bias") else 1.0)
            if name.startswith("weight_ih") and config.input_start == "fan_in" and config.k_top > 0:
                scale_input_weights(parameter, self.hidden_size)
        scorer = SCORERS.get(config.scorer) if isinstance(config.scorer, str) else None
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("attn_v") and scorer is not None and scorer.initial_v is not None:
                nn.init.constant_(parameter, scorer.initial_v)
            elif name.startswith("attn_"):
                nn.init.uniform_(parameter, -bound, bound)
        incorporation = INCORPORATIONS[config.incorporate]
        if incorporation.start is None or config.k_top == 0:
            return
        with torch.no_grad():
            for suffix in self._suffixes:
                weight, bias = (self.get_parameter(f"incorporate_{name}{suffix}") for name in ("weight", "bias"))
                incorporation.start(weight, bias)
                if incorporation.set_share is not None and config.initial_gate is not None:
                    incorporation.set_share(weight, bias, config.initial_gate)

    # What code that was written for `torch.nn`'s layers asks of them.

    proj_size = 0

    @property
    def mode(self) -> str:
        """The cell as `torch.nn` calls it: `LSTM`, `GRU`, `RNN_TANH` or `RNN_RELU`."""
        return self.cell.upper()

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The cell's parameters of each layer and direction, without those of the memory."""
        return [[getattr(self, name) for name in names] for names in self._all_weights]

    @property
    def _all_weights(self) -> list[list[str]]:
        """Their names: code that starts the forget gate's bias at 1 looks here."""
        return [[name for name in names[: len(_CELL_PARAMETERS)] if name is not None] for names in self._names]

    def flatten_parameters(self) -> None:
        """Does nothing: there is nothing to flatten."""

    @overload
    def forward(
        self,
        input: Tensor,
        hx: InitialState | None = None,
        *,
        lengths: Tensor | None = None,
        return_attention: Literal[False] = False,
    ) -> tuple[Tensor, StateT]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: InitialState | None = None,
        *,
        return_attention: Literal[False] = False,
    ) -> tuple[PackedSequence, StateT]: ...
    @overload
    def forward(
        self,
        input: Tensor,
        hx: InitialState | None = None,
        *,
        lengths: Tensor | None = None,
        return_attention: Literal[True],
    ) -> tuple[Tensor, StateT, Attention]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: InitialState | None = None,
        *,
        return_attention: Literal[True],
    ) -> tuple[PackedSequence, StateT, Attention]: ...
    def forward(
        self,
        input: Input,
        hx: InitialState | None = None,
        *,
        lengths: Tensor | None = None,
        return_attention: bool = False,
    ) -> tuple[Any, ...]:
        """Run the layer over a sequence.

        `input` is as for `torch.nn.LSTM`: [T, B, input_size], [B, T, input_size] with `batch_first`, [T, input_size]
        unbatched, or a PackedSequence. `hx` is what an earlier call returned, or `torch.nn`'s own form, `(h, c)` for
        an LSTM and `h` for the others, which starts with an empty memory. `lengths` [B] is the number of real steps of
        each row: padding is not read, not kept, and has output 0.

        Returns `(output, state)`, and with `return_attention` a third value, an `Attention`, always padded. The state
        of an LSTM is a `SABState`, which unpacks as `(h, c)`; that of the others is h, a `SABHidden`: the tensor with
        the layer's memory attached.
        """
        if lengths is None and not return_attention and not torch.compiler.is_compiling():
            stepped = self._stream(input, hx)
            if stepped is not None:
                h, state = stepped
                output = h.clone()  # may be changed in place without changing the state
                return output.transpose(0, 1) if self.batch_first and output.dim() == 3 else output, state
        form = self._form
        sequences = time_major(input, lengths, form)
        first = initial_state(hx, sequences, form)
        output, state, make_attention = self._run_layers(sequences, first, keeps_all=return_attention)
        if self.training and not self._has_warned:
            self._warn_of_growth(output)
        if not return_attention:
            return sequences.restore(output), state
        attention = sequences.restore_attention(make_attention(), self.config.k_top)
        return sequences.restore(output), state, attention

    def _stream(self, input: Any, hx: Any) -> tuple[Tensor, Any] | None:
        """The hidden state and the state after one step of a stream, with as little as possible around the native step.

        None where the call is no such step or must go the ordinary way: gradients, other devices, rows that differ.
        The first step of a stream comes with any state, each further one with what the step before it returned.
        """
        shape = self._shape_of_step(input)
        stepper = None if shape is None else self._stepper_for()
        if shape is None or stepper is None or input.dtype is not stepper.dtype or not can_stream(input, stepper):
            return None
        h, c, memory = _parts_of(hx)
        if not isinstance(memory, Streamed) or not stepper.continues(h, c, memory, shape):
            begun = self._begin_stream(input, hx, shape, stepper)
            if begun is None:
                return None
            h, c, memory = begun
        stepped = stepper.step(input, h, c, memory, shape)
        if stepped is None:  # the ordinary way says why
            return None
        h, c, memory = stepped
        return h, attach(h, memory) if c is None else SABState._of(h, c, memory)

    def _shape_of_step(self, input: Any) -> Shape | None:
        """The shape of the state of a call with a single step, or None for another call."""
        if type(input) not in PLAIN or input.is_nested or len(self._suffixes) != 1:
            return None
        if self.training and (self.recurrent_dropout > 0 or not self._has_warned):
            return None
        sizes = input.shape
        if len(sizes) == 3 and sizes[self.batch_first] == 1 and sizes[2] == self.input_size:
            batch = sizes[not self.batch_first]
            return None if batch == 0 else Shape((1, batch, self.hidden_size), batch)
        return Shape((1, self.hidden_size), None) if sizes == (1, self.input_size) else None

    def _stepper_for(self) -> Stepper | None:
        """The native step with the layer's present parameters, or None where there is none."""
        names, stepper = self._names[0], self._stepper
        parameters: list[Any] = [*map(self._parameters.get, names)]  # pyright: ignore[reportArgumentType]
        if stepper is None or not stepper.fits(parameters, self.cell, self.config):
            shapes = self._shapes(0)
            for base, name, one in zip(_PARAMETERS, names, parameters, strict=True):
                if (one is None) != (name is None) or (one is not None and tuple(one.shape) != shapes[base]):
                    return None  # a parametrization computes it, or the ordinary way says what does not fit
            stepper = self._stepper = make_stepper(parameters, self._weights(0), self.cell, self.config)
        return stepper

    def _begin_stream(
        self, input: Tensor, hx: Any, shape: Shape, stepper: Stepper
    ) -> tuple[Tensor, Tensor | None, Streamed] | None:
        """Any state, checked, as that of a stream; None where a stream cannot have it."""
        state = initial_state(hx, self._sequences(input, None), self._form)
        if state is None:
            nothing = input.new_zeros(shape.of_states)
            return nothing, nothing if stepper.has_c else None, stepper.begin(None, shape, 0)
        seen = state._seen_by_all()
        parts = [part.contiguous() for part in state._parts[:3]]
        if seen is None or seen >= MOST_STEPS or not are_readable((state.h, state.c, *parts)):
            return None
        return state.h, state.c, stepper.begin(state._parts, shape, seen)

    def _sequences(self, input: Input, lengths: Tensor | None) -> Sequences:
        """The input, checked, in time-major form."""
        return time_major(input, lengths, self._form)

    def _warn_of_growth(self, output: Tensor) -> None:
        """Warn once of hidden states that have left the usual range, where looking does not wait for a device."""
        if output.device.type != "cpu" or torch.compiler.is_compiling() or output.numel() == 0:
            return
        lowest, highest = (edge.item() for edge in torch.aminmax(torch_private.unwrapped(output).detach()))
        if not (lowest >= -USUAL_STATES and highest <= USUAL_STATES):  # true for what is not a number, too
            self._has_warned = True
            warnings.warn(
                f"hidden states of {type(self).__name__} have left [-{USUAL_STATES:g}, {USUAL_STATES:g}] and may "
                "overflow; incorporate='gate' with weighting='softmax', the default, keeps those of LSTM, GRU and "
                "tanh cells within [-1, 1].",
                stacklevel=5,  # at the caller's line
            )

    def _run_layers(
        self, sequences: Sequences, state: SABState | None, keeps_all: bool = False
    ) -> tuple[Tensor, SABState | SABHidden, Callable[[], Attention]]:
        """The output, the state and what makes the attention; with `recompute` there is none unless all is kept."""
        x, lengths, config = sequences.x, sequences.lengths, self.config
        if keeps_all and config.recompute:
            config = replace(config, recompute=False, offload=False)
        if isinstance(config.scorer, nn.Module):
            config = replace(config, scorer=self.scorer)  # it may have been replaced, for example by a wrapper
        most = math.ceil(x.shape[0] / config.k_att) + (0 if state is None else state.microstates.shape[2])
        is_bounded, has_levels = config.forgets, config.is_hierarchical
        # There are never more, and larger buffers would be padding. What torch.export leaves open stays open.
        if not isinstance(most, torch.SymInt):
            has_levels = has_levels and most > (config.blocks + 1) * config.block_size
            if config.max_memory is not None and is_bounded:
                is_bounded = most > config.max_memory or config.counts_reads
                most = config.max_memory if config.max_memory < most else most
            if config.k_top > most or is_bounded != config.forgets or has_levels != config.is_hierarchical:
                # Where nothing is forgotten and every block is read, every backend can run the call.
                config = _limited(config, most if config.k_top > most else config.k_top, is_bounded, has_levels)
        results: list[LayerResult] = []
        order = None
        if self.bidirectional and lengths is not None:
            order = reversed_order(lengths, x.shape[0], x.device)
        seen = 0 if state is None else state._seen_by_all()
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self._directions):
                index = layer * self._directions + direction
                x_directed = reverse(x, order) if direction == 1 else x
                layer_state = None if state is None else LayerState.of(state, index, seen)
                weights = self._weights(index)
                if self.recurrent_dropout > 0 and self.training:
                    weights = weights._replace(h_mask=self._draw_mask(weights, x.shape[1]))
                result = dispatch.recurrence(x_directed, lengths, layer_state, weights, self.cell, config)
                results.append(result)
                outputs.append(reverse(result.output, order) if direction == 1 else result.output)
            with own_type(outputs[0]):
                x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if self.dropout > 0 and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)

        def attention() -> Attention:
            attentions = [result.attention() for result in results]
            if self.bidirectional:
                attentions[1::2] = [
                    backward.map(lambda tensor: reverse(tensor, order)) for backward in attentions[1::2]
                ]
            return stack_attentions(attentions)

        seen = None if seen is None else _seen_after(seen, x.shape[0], lengths)
        steps = None if state is None else state.steps + (x.shape[0] if lengths is None else lengths)
        return x, self._state(sequences, results, steps, seen), attention

    def _state(
        self, sequences: Sequences, results: list[LayerResult], steps: Tensor | None, seen: int | None
    ) -> SABState | SABHidden:
        """The state after the last step, with the numbers of steps that it has seen; None where it began there."""
        make_ends, make_memories = [result.ends for result in results], [result.memory for result in results]

        def ends() -> tuple[Tensor, Tensor | None]:
            h, c = stack_ends([make() for make in make_ends])
            return sequences.restore_states(h), None if c is None else sequences.restore_states(c)

        def memory() -> Memory:
            after = _steps(sequences) if steps is None else steps
            return sequences.restore_memory(stack_memories([make() for make in make_memories], after, seen))

        at_once = _is_made_at_once(sequences.x)
        kept = memory() if at_once else Pending(memory)
        if not CELLS[self.cell].has_c:
            return attach(ends()[0], kept)
        return SABState._of(*ends(), kept) if isinstance(kept, Memory) else SABState._on_demand(ends, kept)

    def _weights(self, index: int) -> LayerWeights:
        values: list[Any]
        if torch.compiler.is_compiling():
            values = [None if name is None else getattr(self, name) for name in self._names[index]]
        else:
            # An attribute of a module takes ten times as long to find as an entry of a dictionary.
            values = [None if name is None else self._parameters.get(name) for name in self._names[index]]
            for place, name in enumerate(self._names[index]):
                if name is not None and values[place] is None:
                    values[place] = getattr(self, name)  # a parametrization computes it
        scorer = ScorerWeights._make(values[4:8])
        return LayerWeights(*values[:4], scorer, *values[8:])  # pyright: ignore[reportCallIssue]

    def _draw_mask(self, weights: LayerWeights, batch: int) -> Tensor:
        """One mask for all steps, [B, n]: 0 with probability `recurrent_dropout`, else what keeps the mean."""
        return F.dropout(weights.w_hh.new_ones(batch, self.hidden_size), self.recurrent_dropout)

    def _take_weights(self, other: SABLayer[Any], index: int) -> Self:
        """This layer or cell of one layer with the weights of layer `index` of another, and its mode."""
        with torch.no_grad():
            for own, name in zip(self._names[0], other._names[index], strict=True):
                if own is not None and name is not None:
                    self.get_parameter(own).copy_(getattr(other, name))
        return self.train(other.training)

    def backend_for(self, input: Input, hx: InitialState | None = None) -> str:
        """Name of the backend that a call with these arguments takes."""
        sequences = self._sequences(input, None)
        state = initial_state(hx, sequences, self._form)
        layer_state = None if state is None else LayerState.of(state, 0, state._seen_by_all())
        weights = self._weights(0)
        if self.recurrent_dropout > 0 and self.training:  # any mask: drawing one would change torch's random state
            weights = weights._replace(h_mask=weights.w_hh.new_ones(sequences.x.shape[1], self.hidden_size))
        return dispatch.choose(sequences.x, layer_state, weights, self.cell, self.config)

    def compact(self, state: AnyState) -> AnyState:
        """The smallest state that continues exactly as `state` does, which is a `SABState` or a `SABHidden`.

        Where the query cancels, as in the affine scorers, what once fell out of the k_top best is never selected
        again: with a sparse forward k_top microstates remain. For everything else, and with `max_memory`, which may
        forget the best, this is `state` itself.
        """
        if isinstance(state, SABHidden):
            return self.compact(state.state)._hidden
        if not isinstance(state, SABState):
            raise UserTypeError(f"state must be a SABState or a SABHidden; got {type(state).__name__}.", "state")
        slots, k, scorer = state.microstates.shape[-2], self.config.k_top, self.config.scorer
        query_cancels = isinstance(scorer, str) and SCORERS[scorer].query_cancels
        if not query_cancels or self.config.forward == "dense" or slots <= k or self.config.forgets:
            return state
        scores = state.keys.squeeze(-1).masked_fill(state.numbers < 0, -torch.inf)
        return state.at(scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values)

    @classmethod
    def from_torch(cls, module: nn.RNNBase, **options: Any) -> Self:
        """A layer with the cell, the weights, the device and the mode of a `torch.nn` layer, and this memory.

        With `incorporate="gate"` it starts almost as `module` (`initial_gate` is 1e-4 where it is not given) and learns
        to read from there. With `k_top=0, k_trunc=None` its outputs and gradients are those of `module`.
        """
        torch_class = cls._of_torch()
        if not isinstance(module, torch_class):
            raise UserTypeError(
                f"module must be a torch.nn.{torch_class.__name__}; got {type(module).__name__}.", "module"
            )
        if module.proj_size > 0:
            raise UserValueError(f"module must have proj_size 0; got {module.proj_size}.", "module")
        return with_weights_of(module, cls(**_constructor_arguments(module), **neutral_start(options)))

    @classmethod
    def _of_torch(cls) -> type[nn.RNNBase]:
        if cls._torch_class is None:
            raise UserTypeError(f"torch.nn must have a layer with the cell {cls.cell!r} for this; it has none.")
        return cls._torch_class

    def to_torch(self) -> nn.RNNBase:
        """A `torch.nn` layer with this layer's cell: what is left of it without its memory."""
        self._check_torch_has_it()
        return with_weights_of(self, self._of_torch()(**_constructor_arguments(self)))

    def _check_torch_has_it(self) -> None:
        if self.config.layer_norm:
            raise UserValueError("layer_norm must be False for to_torch: torch.nn's layers have none.", "layer_norm")

    def __prepare_scriptable__(self) -> Self:
        """What `torch.jit.script` calls first."""
        raise UserTypeError(
            "torch.jit.script cannot compile SAB layers; use torch.export, torch.jit.trace or sab.export."
        )

    def extra_repr(self) -> str:
        """Sizes, what differs from `torch.nn`'s defaults, and the options of the memory."""
        parts = [f"{self.input_size}, {self.hidden_size}"]
        if isinstance(self, SABRNN):
            parts.append(f"nonlinearity={self.nonlinearity}")
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        defaults["recurrent_dropout"] = 0.0
        parts += [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        parts += ["layer_norm=True"] if self.config.layer_norm else []
        parts += [f"max_memory={self.config.max_memory}, forget={self.config.forget}"] if self.config.forgets else []
        parts += [f"{name}=True" for name in ("recompute", "offload") if getattr(self.config, name)]
        if self.config.is_hierarchical:
            parts += [f"memory=hierarchical, block_size={self.config.block_size}, blocks={self.config.blocks}"]
        parts += [f"{name}={getattr(self.config, name)}" for name in ("k_top", "k_att", "k_trunc")]
        if self.config.k_top > 0:
            scorer = self.config.scorer if isinstance(self.config.scorer, str) else type(self.config.scorer).__name__
            parts += [f"scorer={scorer}", f"weighting={self.config.weighting}"]
            parts += [f"forward={self.config.forward}", f"incorporate={self.config.incorporate}"]
            others = ("initial_gate", "input_start", "attention_size", "max_microstates")
            given = {name: getattr(self.config, name) for name in others}
            parts += [f"{name}={value}" for name, value in given.items() if value != getattr(SABConfig, name)]
        return ", ".join(parts)


class SABLSTM(SABLayer[SABState]):
    """`torch.nn.LSTM` with a memory of its hidden states."""

    cell = "lstm"
    _torch_class = nn.LSTM


class SABGRU(SABLayer[SABHidden]):
    """`torch.nn.GRU` with a memory of its hidden states; its arguments are those of `SABLSTM`."""

    cell = "gru"
    _torch_class = nn.GRU


class SABRNN(SABLayer[SABHidden]):
    """`torch.nn.RNN` with a memory of its hidden states; its `options` are the keyword-only arguments of `SABLSTM`."""

    cell = "rnn_tanh"
    _torch_class = nn.RNN

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        choices = [cell.removeprefix("rnn_") for cell in CELLS if cell.startswith("rnn_")]
        self.cell = f"rnn_{check_choice('nonlinearity', nonlinearity, choices)}"
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype, **options
        )
        self.nonlinearity = nonlinearity

    __init__.__doc__ = (SABLayer.__init__.__doc__ or "").replace(
        "            bias: ", "            nonlinearity: `tanh` or `relu`, of the cell.\n            bias: ", 1
    )


def scale_input_weights(weight: Tensor, hidden_size: int) -> None:
    """Scale the input weights [gates * n, input_size] of a layer, which were drawn as `torch.nn` does, by their fan-in:
    their standard deviation becomes 2 / sqrt(input_size).

    Then an input whose entries are about 1 in size changes the gates by about 2, whatever the hidden size is.
    """
    with torch.no_grad():
        weight.mul_(2 * math.sqrt(3 * hidden_size / weight.shape[1]))


def _constructor_arguments(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments that a `torch.nn` layer and ours have in common, read off either."""
    names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    if isinstance(module, nn.RNN | SABRNN):
        names.append("nonlinearity")
    weight = module.get_parameter("weight_hh_l0")
    return {name: getattr(module, name) for name in names} | {"device": weight.device, "dtype": weight.dtype}


def neutral_start(options: dict[str, Any]) -> dict[str, Any]:
    """The options of what starts as a module of torch: a gate that is nearly closed where none is given."""
    if options.get("layer_norm", False):
        raise UserValueError("layer_norm must be False in from_torch: torch.nn's layers have none.", "layer_norm")
    gated = [name for name, part in INCORPORATIONS.items() if part.set_share is not None]
    if options.get("incorporate", SABConfig.incorporate) not in gated:
        return options
    return {"initial_gate": NEUTRAL_GATE, **options}


def with_weights_of(module: Any, other: Any) -> Any:
    """The other module with those parameters of the first that it has, too, and its mode."""
    shared = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in shared:
                parameter.copy_(shared[name])
    return other.train(module.training)


def _limited(config: SABConfig, k_top: int, is_bounded: bool, has_levels: bool) -> SABConfig:
    if torch.compiler.is_compiling() or not isinstance(config.scorer, str):  # a symbol, or what may have no hash
        return _replaced(config, k_top, is_bounded, has_levels)
    return _replaced_before(config, k_top, is_bounded, has_levels)


def _replaced(config: SABConfig, k_top: int, is_bounded: bool, has_levels: bool) -> SABConfig:
    config = config if is_bounded else config.unbounded()
    return replace(config if has_levels else config.flat(), k_top=k_top)


_replaced_before = lru_cache(maxsize=256)(_replaced)
"""The same, remembered: the checks of a config take a tenth of the time of a small call."""


def _parts_of(hx: Any) -> tuple[Any, Any, Any]:
    """h, c and the memory of what a layer returned; None where `hx` is nothing like that."""
    h, c, memory = None, None, None
    if type(hx) is SABState:
        h, c, memory = hx.h, hx.c, hx.__dict__["_memory"]
    elif type(hx) is SABHidden:
        h, memory = hx, memory_of(hx)
    elif type(hx) is tuple and len(hx) == 2 and type(hx[0]) is SABHidden:
        h, c, memory = *hx, memory_of(hx[0])
    return (None, None, None) if is_changed(h) else (h, c, memory)


def _is_made_at_once(x: Tensor) -> bool:
    """Whether the state belongs to what is being recorded or transformed, so that it cannot be made later."""
    if torch.compiler.is_compiling() or torch_private.are_transforms_active():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _steps(sequences: Sequences) -> Tensor:
    """How many steps each row has, [B]."""
    if sequences.lengths is not None:
        return sequences.lengths.clone()
    steps, batch, _ = sequences.x.shape
    return torch.full((batch,), steps, dtype=torch.int64, device="cpu")


def _seen_after(seen: int, steps: int, lengths: Tensor | None) -> int | None:
    if lengths is None:
        return seen + steps
    if torch.compiler.is_compiling() or (torch_private.unwrapped(lengths) != steps).any():
        return None
    return seen + steps
