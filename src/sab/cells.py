"""SABLSTMCell, SABGRUCell and SABRNNCell: `torch.nn`'s recurrent cells with a memory, for loops over single steps."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, Generic, Self

import torch
from torch import Tensor, nn

from sab.config import SABConfig
from sab.errors import UserTypeError, UserValueError, check_choice, check_int
from sab.inputs import InitialState, Input, Sequences, initial_state, time_major
from sab.layers import SABGRU, SABLSTM, SABRNN, SABLayer, StateT, neutral_start, with_weights_of
from sab.ops.cpu.stream import PLAIN, Shape
from sab.parts.registry import CELLS
from sab.state import SABHidden, SABState


class SABCell(SABLayer[StateT], Generic[StateT]):
    """What all cells share: a layer whose call is one step. A subclass sets `layer_class`, and `torch_class`.

    A cell computes what its layer computes over a sequence, step by step. On the CPU, where no gradient is needed, a
    step is one native call, and the memory grows in place: steps stay fast over a stream of any length, but for the
    time that scoring a growing memory takes: `max_memory` bounds it, and `memory="hierarchical"` makes it grow slower.
    """

    layer_class: Any
    """The layer with this cell."""
    torch_class: type[nn.RNNCellBase]
    """The cell of `torch.nn`."""
    _is_cell = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        known = [field.name for field in fields(SABConfig)]
        for name in options:
            check_choice("an option of a cell", name, known)  # a layer takes more, which belongs to whole sequences
        super().__init__(input_size, hidden_size, bias=bias, device=device, dtype=dtype, **options)

    def forward(self, input: Tensor, hx: InitialState | None = None) -> StateT:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the cell over one step.

        `input` is [B, input_size], or [input_size] without a batch. `hx` is what the step before returned, a state of
        the layer with these weights, or `torch.nn`'s own form, which starts with an empty memory.

        Returns the state: h of an LSTM's is [B, n], and it unpacks as `h, c = state`; for the others it is h itself, a
        `SABHidden`, [B, n].
        """
        if not torch.compiler.is_compiling():
            stepped = self._stream(input, hx)
            if stepped is not None:
                return stepped[1]
        sequences = self._sequences(input, None)
        output, state, _ = self._run_layers(sequences, initial_state(hx, sequences, self._form))
        if self.training and not self._has_warned:
            self._warn_of_growth(output)
        whole = state.state if isinstance(state, SABHidden) else state
        after: Any = whole._without_layers()
        return after.h if isinstance(state, SABHidden) else after

    def _shape_of_step(self, input: Any) -> Shape | None:
        if type(input) not in PLAIN or (self.training and not self._has_warned):
            return None
        sizes = input.shape
        if len(sizes) == 2 and sizes[1] == self.input_size and sizes[0] > 0:
            return Shape((sizes[0], self.hidden_size), sizes[0])
        return Shape((self.hidden_size,), None) if sizes == (self.input_size,) else None

    def _sequences(self, input: Input, lengths: Tensor | None) -> Sequences:
        if not isinstance(input, Tensor):
            raise UserTypeError(f"input must be a tensor; got {type(input).__name__}.", "input")
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            raise UserValueError(
                f"input must be of shape [B, input_size] or [input_size] with input_size {self.input_size}; "
                f"got {list(input.shape)}.",
                "input",
            )
        return time_major(input.unsqueeze(0), lengths, self._form)

    @classmethod
    def from_torch(cls, module: nn.RNNCellBase, **options: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A cell with the weights, the device and the mode of a `torch.nn` cell, and this memory.

        It starts as a layer's `from_torch` does: almost as `module` where `incorporate` is `gate`.
        """
        if not isinstance(module, cls.torch_class):
            raise UserTypeError(
                f"module must be a torch.nn.{cls.torch_class.__name__}; got {type(module).__name__}.", "module"
            )
        return with_weights_of(module, cls(**cls._arguments(module), **neutral_start(options)))

    def to_torch(self) -> nn.RNNCellBase:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A `torch.nn` cell with this cell's weights: what is left of it without its memory."""
        self._check_torch_has_it()
        return with_weights_of(self, self.torch_class(**self._arguments(self)))

    @classmethod
    def from_layer(cls, layer: SABLayer[Any], index: int = 0) -> Self:
        """A cell with the options and the weights of a layer, of its layer `index` where it is a stack.

        So a layer is trained on whole sequences, and used step by step. The cell takes the layer's state, too.
        """
        if not isinstance(layer, cls.layer_class):
            raise UserTypeError(f"layer must be a {cls.layer_class.__name__}; got {type(layer).__name__}.", "layer")
        if layer.bidirectional:
            raise UserValueError("layer must have one direction for a cell; got a bidirectional one.", "layer")
        index = check_int("index", index, 0, maximum=layer.num_layers - 1)
        input_size = layer.input_size if index == 0 else layer.hidden_size
        cell = cls(**cls._arguments(layer) | {"input_size": input_size}, **_options(layer))
        return cell._take_weights(layer, index)

    def to_layer(self) -> Any:
        """A layer with this cell's options and weights."""
        return self.layer_class(**self._arguments(self), **_options(self))._take_weights(self, 0)

    @classmethod
    def _arguments(cls, module: Any) -> dict[str, Any]:
        """The constructor arguments that cells and layers have in common, read off one of them."""
        weight = next(module.parameters())
        return {
            "input_size": module.input_size,
            "hidden_size": module.hidden_size,
            "bias": module.bias,
            "device": weight.device,
            "dtype": weight.dtype,
        }


class SABLSTMCell(SABCell[SABState]):
    """`torch.nn.LSTMCell` with a memory of its hidden states; `SABConfig` documents the other `options`."""

    cell = "lstm"
    layer_class = SABLSTM
    torch_class = nn.LSTMCell


class SABGRUCell(SABCell[SABHidden]):
    """`torch.nn.GRUCell` with a memory of its hidden states; `SABConfig` documents the other `options`."""

    cell = "gru"
    layer_class = SABGRU
    torch_class = nn.GRUCell


class SABRNNCell(SABCell[SABHidden]):
    """`torch.nn.RNNCell` with a memory of its hidden states; `SABConfig` documents the other `options`."""

    cell = "rnn_tanh"
    layer_class = SABRNN
    torch_class = nn.RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        choices = [cell.removeprefix("rnn_") for cell in CELLS if cell.startswith("rnn_")]
        self.cell = f"rnn_{check_choice('nonlinearity', nonlinearity, choices)}"
        super().__init__(input_size, hidden_size, bias, device, dtype, **options)
        self.nonlinearity = nonlinearity

    @classmethod
    def _arguments(cls, module: Any) -> dict[str, Any]:
        return super()._arguments(module) | {"nonlinearity": module.nonlinearity}


def _options(module: SABLayer[Any]) -> dict[str, Any]:
    """The options of a layer's or a cell's memory; of a scorer that is a module a copy."""
    options = {field.name: getattr(module.config, field.name) for field in fields(module.config)}
    return options | ({"scorer": copy.deepcopy(module.scorer)} if isinstance(options["scorer"], nn.Module) else {})
