"""SABLSTM, SABGRU and SABRNN: `torch.nn`'s recurrent layers with a memory that gradients can skip through."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sab.config import SABConfig
from sab.errors import UserTypeError, UserValueError, check_bool, check_choice, check_float, check_int
from sab.ops import dispatch
from sab.ops.precision import is_autocast
from sab.ops.types import LayerResult, LayerState, LayerWeights
from sab.parts.cells import CELLS
from sab.parts.incorporations import INCORPORATIONS
from sab.parts.scorers import SCORERS, ScorerWeights
from sab.state import Attention, SABState

Input = Tensor | PackedSequence
InitialState = SABState | Tensor | tuple[Tensor, ...]

_AUTOCAST_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCORER_PARAMETERS = {"w_memory": "attn_w_memory", "w_query": "attn_w_query", "bias": "attn_bias", "v": "attn_v"}
"""Names of a scorer's parameters: in `ScorerWeights` and in the layer."""
_PARAMETERS = (
    *("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
    *_SCORER_PARAMETERS.values(),
    *("incorporate_weight", "incorporate_bias"),
)
"""Names of a layer's parameters in the order of `LayerWeights`."""


class _SABLayer(nn.Module):
    """What the three layers share; the cell makes the difference."""

    cell: str
    """Name of the cell, of those in `sab.parts.cells.CELLS`."""
    _torch_class: ClassVar[type[nn.RNNBase]]
    weight_hh_l0: nn.Parameter

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
        k_top: int = SABConfig.k_top,
        k_att: int = SABConfig.k_att,
        k_trunc: int | None = SABConfig.k_trunc,
        scorer: str | Callable[[Tensor, Tensor], Tensor] = SABConfig.scorer,
        weighting: str = SABConfig.weighting,
        forward: str = SABConfig.forward,
        incorporate: str = SABConfig.incorporate,
        attention_size: int | None = SABConfig.attention_size,
        max_microstates: int | None = SABConfig.max_microstates,
        backend: str = SABConfig.backend,
    ):
        super().__init__()
        self.input_size = check_int("input_size", input_size, 1)
        self.hidden_size = check_int("hidden_size", hidden_size, 1)
        self.num_layers = check_int("num_layers", num_layers, 1)
        self.bias = check_bool("bias", bias)
        self.batch_first = check_bool("batch_first", batch_first)
        self.dropout = check_float("dropout", dropout, minimum=0.0, maximum=1.0)
        self.bidirectional = check_bool("bidirectional", bidirectional)
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
            attention_size=attention_size,
            max_microstates=max_microstates,
            backend=backend,
        )
        if self.dropout > 0 and self.num_layers == 1:
            warnings.warn(
                f"dropout acts between layers, so dropout={dropout} does nothing with num_layers=1.",
                stacklevel=2 if type(self).__init__ is _SABLayer.__init__ else 3,  # at the caller's own line
            )
        if isinstance(self.config.scorer, nn.Module):
            self.scorer = self.config.scorer  # registers its parameters; one module serves all layers and directions
        self._suffixes = [
            f"_l{layer}{direction}"
            for layer in range(self.num_layers)
            for direction in (("", "_reverse") if self.bidirectional else ("",))
        ]
        self._names: list[list[str | None]] = []
        for index, suffix in enumerate(self._suffixes):
            shapes = self._shapes(index)
            for name, shape in shapes.items():
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            self._names.append([name + suffix if name in shapes else None for name in _PARAMETERS])
        self.reset_parameters()

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
        if config.k_top == 0:
            return shapes
        if isinstance(config.scorer, str):
            scorer_shapes = SCORERS[config.scorer].shapes(n, self._attention_size, config.max_microstates)
            shapes |= {_SCORER_PARAMETERS[name]: shape for name, shape in scorer_shapes.items()}
        if INCORPORATIONS[config.incorporate].has_weights:
            shapes |= {"incorporate_weight": (n, 2 * n), "incorporate_bias": (n,)}
        return shapes

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight_hh_l0.dtype

    @property
    def _attention_size(self) -> int:
        return self.hidden_size if self.config.attention_size is None else self.config.attention_size

    @property
    def _key_size(self) -> int:
        if self.config.k_top == 0 or not isinstance(self.config.scorer, str):
            return 0
        return 1 if self._is_affine else self._attention_size

    @property
    def _is_affine(self) -> bool:
        return isinstance(self.config.scorer, str) and SCORERS[self.config.scorer].query_cancels

    def reset_parameters(self) -> None:
        """Draw the parameters anew: those of the cell first and as `torch.nn` does, so that with the same random
        seed this layer and `torch.nn`'s start from the same cell; then those of the scorer, likewise uniform within
        1/sqrt(hidden_size). `incorporate='concat'` starts as `add`."""
        bound = 1 / math.sqrt(self.hidden_size)
        is_cells = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith(is_cells):
                nn.init.uniform_(parameter, -bound, bound)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("attn_"):
                nn.init.uniform_(parameter, -bound, bound)
            elif name.startswith("incorporate_weight"):
                identity = torch.eye(self.hidden_size, device=parameter.device, dtype=parameter.dtype)
                with torch.no_grad():
                    parameter.copy_(torch.cat([identity, identity], dim=1))
            elif name.startswith("incorporate_bias"):
                nn.init.zeros_(parameter)

    def flatten_parameters(self) -> None:
        """Does nothing; here so that code written for `torch.nn`'s layers runs unchanged."""

    @overload
    def forward(
        self,
        input: Tensor,
        hx: InitialState | None = None,
        *,
        lengths: Tensor | None = None,
        return_attention: Literal[False] = False,
    ) -> tuple[Tensor, SABState]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: InitialState | None = None,
        *,
        return_attention: Literal[False] = False,
    ) -> tuple[PackedSequence, SABState]: ...
    @overload
    def forward(
        self,
        input: Tensor,
        hx: InitialState | None = None,
        *,
        lengths: Tensor | None = None,
        return_attention: Literal[True],
    ) -> tuple[Tensor, SABState, Attention]: ...
    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: InitialState | None = None,
        *,
        return_attention: Literal[True],
    ) -> tuple[PackedSequence, SABState, Attention]: ...
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
        an LSTM and `h` for the others, which starts with an empty memory. `lengths` [B] tells how many steps of each
        row are real: padding is not read, not kept, and gives output 0.

        Returns `(output, state)`, and with `return_attention` a third value, an `Attention`, always padded.
        """
        x, lengths, packed = self._time_major(input, lengths)
        unbatched = isinstance(input, Tensor) and input.dim() == 2
        hx = self._initial_state(hx, x, unbatched)
        output, state, make_attention = self._run_layers(x, lengths, hx)
        result: Input = output
        if unbatched:
            result, state = output.squeeze(1), state._without_batch()
        elif self.batch_first:
            result = output.transpose(0, 1)
        if packed is not None:
            result = _pack_like(packed, output)
        if not return_attention:
            return result, state
        attention = make_attention()
        if unbatched:
            attention = attention.map(lambda tensor: tensor.squeeze(-2))
        elif self.batch_first:
            attention = attention.map(lambda tensor: tensor.transpose(-3, -2))
        missing = self.config.k_top - attention.numbers.shape[-1]
        padded = F.pad(attention.numbers, (0, missing), value=-1), F.pad(attention.weights, (0, missing))
        return result, state, Attention(*padded, attention.summary)

    def _time_major(self, input: Input, lengths: Tensor | None) -> tuple[Tensor, Tensor | None, PackedSequence | None]:
        """The input as [T, B, input_size] with zeros for padding, the lengths on the CPU, and the packing if any."""
        packed = input if isinstance(input, PackedSequence) else None
        if packed is not None:
            if lengths is not None:
                raise UserValueError(
                    "lengths must be None where the input is a PackedSequence, which has its own.", "lengths"
                )
            x, lengths = pad_packed_sequence(packed)
        elif isinstance(input, Tensor):
            x = input
        else:
            raise UserTypeError(f"input must be a tensor or a PackedSequence; got {type(input).__name__}.", "input")
        form = "[B, T, input_size]" if self.batch_first else "[T, B, input_size]"
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            raise UserValueError(
                f"input must be of shape {form} or [T, input_size] with input_size {self.input_size}; "
                f"got {list(x.shape)}.",
                "input",
            )
        if x.dtype != self._dtype and not (is_autocast(x.device.type) and x.dtype in _AUTOCAST_TYPES):
            raise UserTypeError(f"input must be of the layer's type {self._dtype}; got {x.dtype}.", "input")
        unbatched = x.dim() == 2
        if unbatched:
            x = x.unsqueeze(1)
        elif self.batch_first and packed is None:
            x = x.transpose(0, 1)
        if 0 in x.shape:
            raise UserValueError(
                f"input must have at least one step and one row; got shape {list(x.shape)} as [T, B, input_size].",
                "input",
            )
        if lengths is not None:
            lengths = _check_lengths(lengths, x.shape[0], x.shape[1], unbatched)
            padding = torch.arange(x.shape[0], device="cpu").unsqueeze(1) >= lengths
            x = x.masked_fill(padding.to(x.device).unsqueeze(-1), 0.0)
        if x.device.type == "cpu" and not torch.compiler.is_compiling() and torch.isnan(x).any():
            # On a GPU the look would wait for the device, so there NaN goes through as in torch.nn.
            step, row, _ = torch.isnan(x).nonzero()[0].tolist()
            raise UserValueError(f"input must be free of NaN; got NaN at step {step} of row {row}.", "input")
        return x, lengths, packed

    def _initial_state(self, hx: InitialState | None, x: Tensor, unbatched: bool) -> SABState | None:
        """`hx` as a SABState of this layer, checked; None where there is none."""
        if hx is None:
            return None
        if isinstance(hx, SABState):
            state = hx._with_batch() if unbatched and hx.h.dim() == 2 else hx
            self._check_state(state, x, unbatched)
            return state
        layers, batch, n, dtype = len(self._suffixes), x.shape[1], self.hidden_size, self._dtype
        has_c = CELLS[self.cell].has_c
        given = _as_tensors(hx, "(h, c) or a SABState" if has_c else "h or a SABState", 2 if has_c else 1)
        if unbatched:
            given = [tensor.unsqueeze(1) for tensor in given]
        state = SABState(
            h=given[0],
            c=given[1] if has_c else None,
            microstates=x.new_zeros(layers, batch, 0, n, dtype=dtype),
            keys=x.new_zeros(layers, batch, 0, self._key_size, dtype=dtype),
            numbers=x.new_zeros(layers, batch, 0, dtype=torch.int64),
            steps=torch.zeros(batch, dtype=torch.int64, device="cpu"),
        )._with_seen(0)
        self._check_state(state, x, unbatched)
        return state

    def _check_state(self, state: SABState, x: Tensor, unbatched: bool) -> None:
        layers, batch, n = len(self._suffixes), x.shape[1], self.hidden_size
        slots = state.microstates.shape[2] if state.microstates.dim() == 4 and self.config.k_top > 0 else 0
        expected = {
            "h": [layers, batch, n],
            "c": [layers, batch, n] if CELLS[self.cell].has_c else None,
            "microstates": [layers, batch, slots, n],
            "keys": [layers, batch, slots, self._key_size],
            "numbers": [layers, batch, slots],
            "steps": [batch],
        }
        for name, shape in expected.items():
            tensor = getattr(state, name)
            given = None if tensor is None else list(tensor.shape)
            if given != shape:
                if unbatched:  # told as the caller sees them, without a batch
                    shape, given = (told and told[:1] + told[2:] for told in (shape, given))
                raise UserValueError(f"hx must have {name} of shape {shape}; got {given}.", "hx")
            dtype = torch.int64 if name in ("numbers", "steps") else self._dtype
            if tensor is not None and tensor.dtype != dtype:
                raise UserTypeError(f"hx must have {name} of type {dtype}; got {tensor.dtype}.", "hx")
        if not torch.compiler.is_compiling() and state.steps.min() < 0:
            raise UserValueError(f"hx must have steps of at least 0; got {state.steps.tolist()}.", "hx")

    def _run_layers(
        self, x: Tensor, lengths: Tensor | None, state: SABState | None
    ) -> tuple[Tensor, SABState, Callable[[], Attention]]:
        config = self.config
        if isinstance(config.scorer, nn.Module):
            config = replace(config, scorer=self.scorer)  # it may have been replaced, by a wrapper of it say
        most = math.ceil(x.shape[0] / config.k_att) + (0 if state is None else state.microstates.shape[2])
        if config.k_top > most:  # so many there are not, and buffers of k_top would be all padding
            config = _with_k_top(config, most)
        results: list[LayerResult] = []
        seen = 0 if state is None else _seen(state)
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self._directions):
                index = layer * self._directions + direction
                x_directed = _reverse(x, lengths) if direction == 1 else x
                layer_state = None if state is None else _layer_state(state, index, seen)
                result = dispatch.recurrence(x_directed, lengths, layer_state, self._weights(index), self.cell, config)
                results.append(result)
                outputs.append(_reverse(result.output, lengths) if direction == 1 else result.output)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            if self.dropout > 0 and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)

        def end() -> SABState:
            return _stack_states([make() for make in states])

        def attention() -> Attention:
            attentions = [result.attention() for result in results]
            if self.bidirectional:
                attentions[1::2] = [
                    backward.map(lambda tensor: _reverse(tensor, lengths)) for backward in attentions[1::2]
                ]
            return _stack_attentions(attentions)

        states = [result.state for result in results]
        seen = None if seen is None else _seen_after(seen, x.shape[0], lengths)
        if _is_made_at_once(x):
            return x, end()._with_seen(seen), attention
        return x, SABState._made_when_asked_for(end, seen), attention

    def _weights(self, index: int) -> LayerWeights:
        # As attributes they may be ones that a parametrization computes.
        values = [None if name is None else getattr(self, name) for name in self._names[index]]
        return LayerWeights._make([*values[:4], ScorerWeights._make(values[4:8]), *values[8:]])

    def backend_for(self, input: Input, hx: InitialState | None = None) -> str:
        """Name of the backend that a call with these arguments takes."""
        x, _, _ = self._time_major(input, None)
        state = self._initial_state(hx, x, isinstance(input, Tensor) and input.dim() == 2)
        layer_state = None if state is None else _layer_state(state, 0, _seen(state))
        return dispatch.choose(x, layer_state, self._weights(0), self.cell, self.config)

    def compact(self, state: SABState) -> SABState:
        """The smallest state that continues exactly as `state` does.

        The affine scorers never select again what once fell out of the k_top best, so for them, with a sparse
        forward, k_top microstates are all that is kept; for everything else this is `state` itself.
        """
        if not isinstance(state, SABState):
            raise UserTypeError(f"state must be a SABState; got {type(state).__name__}.", "state")
        slots, k = state.microstates.shape[-2], self.config.k_top
        if not self._is_affine or self.config.forward == "dense" or slots <= k:
            return state
        scores = state.keys.squeeze(-1).masked_fill(state.numbers < 0, -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values
        rows = best.unsqueeze(-1)
        return replace(
            state,
            microstates=state.microstates.gather(-2, rows.expand(*best.shape, self.hidden_size)),
            keys=state.keys.gather(-2, rows),
            numbers=state.numbers.gather(-1, best),
        )._with_seen(state._seen)

    @classmethod
    def from_torch(cls, module: nn.RNNBase, **options: Any) -> Self:
        """A layer with the cell, the weights, the device and the mode of a `torch.nn` layer, and this memory.

        With `k_top=0, k_trunc=None` its outputs and gradients are those of `module`.
        """
        if not isinstance(module, cls._torch_class):
            raise UserTypeError(
                f"module must be a torch.nn.{cls._torch_class.__name__}; got {type(module).__name__}.", "module"
            )
        if module.proj_size > 0:
            raise UserValueError(f"module must have proj_size 0; got {module.proj_size}.", "module")
        layer = cls(**_constructor_arguments(module), **options)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                layer.get_parameter(name).copy_(parameter)
        return layer.train(module.training)

    def to_torch(self) -> nn.RNNBase:
        """A `torch.nn` layer with this layer's cell: what is left of it without its memory."""
        module = self._torch_class(**_constructor_arguments(self))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.get_parameter(name))
        return module.train(self.training)

    def extra_repr(self) -> str:
        """What differs from the defaults, sizes first."""
        parts = [f"{self.input_size}, {self.hidden_size}"]
        if isinstance(self, SABRNN):
            parts.append(f"nonlinearity={self.nonlinearity}")
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        parts += [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        parts += [f"{name}={getattr(self.config, name)}" for name in ("k_top", "k_att", "k_trunc")]
        if self.config.k_top > 0:
            scorer = self.config.scorer if isinstance(self.config.scorer, str) else type(self.config.scorer).__name__
            parts += [f"scorer={scorer}", f"weighting={self.config.weighting}"]
            parts += [f"forward={self.config.forward}", f"incorporate={self.config.incorporate}"]
            sizes = {name: getattr(self.config, name) for name in ("attention_size", "max_microstates")}
            parts += [f"{name}={size}" for name, size in sizes.items() if size is not None]
        return ", ".join(parts)


class SABLSTM(_SABLayer):
    """`torch.nn.LSTM` with a memory of its hidden states; `SABConfig` tells what the keyword-only options do."""

    cell = "lstm"
    _torch_class = nn.LSTM


class SABGRU(_SABLayer):
    """`torch.nn.GRU` with a memory of its hidden states; `SABConfig` tells what the keyword-only options do."""

    cell = "gru"
    _torch_class = nn.GRU


class SABRNN(_SABLayer):
    """`torch.nn.RNN` with a memory of its hidden states; `SABConfig` tells what the other `options` do."""

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
        check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype, **options
        )
        self.nonlinearity = nonlinearity
        self.cell = f"rnn_{nonlinearity}"


def _constructor_arguments(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments that a `torch.nn` layer and ours have in common, read off either."""
    names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    if isinstance(module, nn.RNN | SABRNN):
        names.append("nonlinearity")
    weight = module.get_parameter("weight_hh_l0")
    return {name: getattr(module, name) for name in names} | {"device": weight.device, "dtype": weight.dtype}


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
        raise UserValueError(f"hx must be {allowed}; got {len(given)} tensors.", "hx")
    return given


def _check_lengths(lengths: Any, steps: int, batch: int, unbatched: bool) -> Tensor:
    allowed = f"lengths must be {batch} whole numbers, one a row, from 1 to {steps}"
    try:
        lengths = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise UserTypeError(f"{allowed}; got {lengths!r}.", "lengths") from None
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise UserTypeError(f"{allowed}; got {lengths.dtype}.", "lengths")
    if unbatched and lengths.dim() == 0:
        lengths = lengths.unsqueeze(0)
    if lengths.shape != (batch,):
        raise UserValueError(f"{allowed}; got shape {list(lengths.shape)}.", "lengths")
    if not torch.compiler.is_compiling() and (lengths.min() < 1 or lengths.max() > steps):
        raise UserValueError(f"{allowed}; got {lengths.tolist()}.", "lengths")
    return lengths.to(torch.int64)


def _reverse(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    """Each row of [T, B, ...] backwards in time, its padding left where it is."""
    if lengths is None:
        return sequence.flip(0)
    step = torch.arange(sequence.shape[0], device="cpu").unsqueeze(1)
    source = torch.where(step < lengths, lengths - 1 - step, step).to(sequence.device)
    return sequence.gather(0, source.unsqueeze(-1).expand_as(sequence))


def _pack_like(packed: PackedSequence, padded: Tensor) -> PackedSequence:
    """[T, B, n] in the order of the batch, packed as `packed` is."""
    sizes = packed.batch_sizes
    if packed.sorted_indices is not None:
        padded = padded[:, packed.sorted_indices]
    data = torch.cat([padded[step, :size] for step, size in enumerate(sizes.tolist())])
    return PackedSequence(data, sizes, packed.sorted_indices, packed.unsorted_indices)


def _with_k_top(config: SABConfig, k_top: int) -> SABConfig:
    if torch.compiler.is_compiling() or not isinstance(config.scorer, str):  # a symbol, or what may have no hash
        return replace(config, k_top=k_top)
    return _replaced(config, k_top)


@lru_cache(maxsize=256)
def _replaced(config: SABConfig, k_top: int) -> SABConfig:
    return replace(config, k_top=k_top)  # its checks take a tenth of the time of a small call


def _is_made_at_once(x: Tensor) -> bool:
    """Whether the state belongs to what is being recorded, so that it cannot be made later."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _seen(state: SABState) -> int | None:
    """How many steps all rows have seen, or None where rows differ or some slot of some row is not in use."""
    if torch.compiler.is_compiling() or (
        state._seen is not None and (state.numbers.device.type != "cpu" or not state.numbers.numel())
    ):
        return state._seen  # to look would break the graph or wait for the device, or there is nothing to look at
    first = int(state.steps[0])
    return None if (state.steps != first).any() or (state.numbers < 0).any() else first


def _seen_after(seen: int, steps: int, lengths: Tensor | None) -> int | None:
    if lengths is None:
        return seen + steps
    return None if torch.compiler.is_compiling() or (lengths != steps).any() else seen + steps


def _layer_state(state: SABState, index: int, seen: int | None) -> LayerState:
    return LayerState(
        h=state.h[index],
        c=None if state.c is None else state.c[index],
        microstates=state.microstates[index],
        keys=state.keys[index],
        numbers=state.numbers[index],
        steps=state.steps,
        seen=seen,
    )


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)  # one: a view, no copy


def _stack_states(states: list[LayerState]) -> SABState:
    return SABState(
        h=_stack([state.h for state in states]),
        c=_stack([state.c for state in states if state.c is not None]) if states[0].c is not None else None,
        microstates=_stack([state.microstates for state in states]),
        keys=_stack([state.keys for state in states]),
        numbers=_stack([state.numbers for state in states]),
        steps=states[0].steps,
    )


def _stack_attentions(attentions: list[Attention]) -> Attention:
    if len(attentions) == 1:
        return attentions[0]
    return Attention(
        torch.stack([attention.numbers for attention in attentions]),
        torch.stack([attention.weights for attention in attentions]),
        torch.stack([attention.summary for attention in attentions]),
    )
