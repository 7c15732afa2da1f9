"""What gets trained: an encoder, SAB layers, those of torch.nn or of other papers, and a readout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sab.config import LARGEST_DEFAULT_KEY, SABConfig
from sab.errors import UserTypeError, UserValueError, check_choice, check_int
from sab.inputs import InitialState
from sab.lab.rivals import ONLINE, RIVALS, RivalState, Sizes
from sab.layers import SABGRU, SABLSTM, SABRNN, scale_input_weights
from sab.parts.registry import SCORERS
from sab.state import Attention, SABHidden, SABState

ENCODINGS = ("onehot", "scalar", "vector")
LAYERS: dict[str, Any] = {
    "lstm": SABLSTM,
    "gru": SABGRU,
    "rnn_tanh": lambda *args, **kwargs: SABRNN(*args, nonlinearity="tanh", **kwargs),
    "rnn_relu": lambda *args, **kwargs: SABRNN(*args, nonlinearity="relu", **kwargs),
}
TORCH_LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="tanh", **kwargs),
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
"""torch.nn's layers with the same cells."""
MEMORY_OPTIONS = {one.name for one in fields(SABConfig)}
MOST_LAYERS = 1000
"""How many layers may be stacked; making more takes too long."""
OURS = ("sab", "bptt", "tbptt")
"""The methods whose layers are this library's."""
OF_TORCH = ("torch", "torch_start")
"""The methods whose layers are torch.nn's own."""
METHODS = (*OURS, *OF_TORCH, *RIVALS)
Readout = Literal["hidden", "hidden+weights", "hidden+summary"]
State = SABState | RivalState

if TYPE_CHECKING:
    CellName = Method = str
else:
    CellName = Literal[tuple(LAYERS)]  # the command line takes its choices from the type
    Method = Literal[METHODS]


@dataclass(frozen=True)
class ModelConfig:
    """The model: its cell, its memory and its readout."""

    method: Method = "sab"
    """sab; the paper's baselines without memory: full backpropagation through time (bptt, which ignores k_trunc) and
    truncated (tbptt); torch.nn's own layer with full backpropagation, as it ships (torch), with input weights that
    start as large as those of the SAB layers (torch_start) and with gates that start with long memories (chrono);
    models of other papers, which have no cell (lru to sparse_transformer; most need the extra `rivals`); or a layer
    like torch.nn's that learns by online credit (rtrl to dni, which takes k_trunc as its window)."""
    cell: CellName = "lstm"
    """The recurrent cell."""
    hidden_size: int = 128
    """Size n of the hidden state; the width of a model of another paper."""
    num_layers: int = 1
    """How many layers are stacked."""
    memory: SABConfig = field(default_factory=SABConfig)
    """How the layers remember, read and backtrack."""
    readout: Readout = "hidden"
    """What the output is made from: the hidden state alone, with the attention weights (the paper's equation 4), or
    with the summary."""

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_choice("cell", self.cell, LAYERS)
        checked = {
            "hidden_size": check_int("hidden_size", self.hidden_size, 1),
            "num_layers": check_int("num_layers", self.num_layers, 1, maximum=MOST_LAYERS),
        }
        for option, value in checked.items():
            object.__setattr__(self, option, value)  # a plain number also where a NumPy one was given
        check_choice("readout", self.readout, get_args(Readout))
        if not isinstance(self.memory, SABConfig):
            raise UserTypeError(f"memory must be a SABConfig; got {self.memory!r}.", "memory")
        if self.method == "tbptt" and self.memory.k_trunc is None:
            raise UserValueError(
                "k_trunc must be a whole number of at least 1 where method is 'tbptt'; got None.", "k_trunc"
            )
        if self.method not in OURS and self.memory.layer_norm:
            raise UserValueError(f"layer_norm must be False where method is {self.method!r}; got True.", "layer_norm")
        if self.method in RIVALS:
            self._check_rival()
        if self.readout == "hidden+weights" and self.memory.forward == "dense":
            raise UserValueError(
                "readout must be 'hidden' or 'hidden+summary' where forward is 'dense'; got 'hidden+weights'.",
                "readout",
            )

    def _check_rival(self) -> None:
        rival, where = RIVALS[self.method], f"where method is {self.method!r}"
        if rival.cells and self.cell not in rival.cells:
            raise UserValueError(f"cell must be one of {', '.join(rival.cells)} {where}; got {self.cell!r}.", "cell")
        if self.hidden_size % rival.multiple:
            wanted = f"hidden_size must be a multiple of {rival.multiple} {where}"
            raise UserValueError(f"{wanted}; got {self.hidden_size}.", "hidden_size")
        if rival.most_layers is not None and self.num_layers > rival.most_layers:
            wanted = f"num_layers must be at most {rival.most_layers} {where}"
            raise UserValueError(f"{wanted}; got {self.num_layers}.", "num_layers")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `options`; what is not given has its default."""
        memory = {name: value for name, value in options.items() if name in MEMORY_OPTIONS}
        others = {name: value for name, value in options.items() if name not in MEMORY_OPTIONS}
        return cls(memory=SABConfig(**memory), **others)

    def options(self) -> dict[str, Any]:
        """Every option by name, those of the memory included: the form of the command line and of stored runs."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "memory"}
        return {**own, **vars(self.memory)}

    def with_options(self, **changed: Any) -> ModelConfig:
        """A copy with some options changed, of the memory or of the rest."""
        return self.from_options({**self.options(), **changed})

    @property
    def has_cell(self) -> bool:
        """Whether the option `cell` means something."""
        return self.method not in RIVALS or bool(RIVALS[self.method].cells)

    def layer_config(self) -> SABConfig:
        """The options that the layers get: a baseline is the same layer without its memory."""
        if self.method == "sab":
            return self.memory
        return replace(self.memory, k_top=0, k_trunc=self.memory.k_trunc if self.method == "tbptt" else None)

    def with_key_size(self, size: int) -> ModelConfig:
        """A copy with this size of keys, where None does not stand for the same in every version."""
        scorer = SCORERS.get(self.memory.scorer) if isinstance(self.memory.scorer, str) else None
        is_clear = self.memory.attention_size is not None or self.hidden_size <= LARGEST_DEFAULT_KEY
        if is_clear or self.method != "sab" or scorer is None or scorer.query_cancels:
            return self
        return self.with_options(attention_size=size)

    def resolved(self) -> ModelConfig:
        """A copy that has the same size of keys in every version."""
        return self.with_key_size(LARGEST_DEFAULT_KEY)

    def effective(self) -> ModelConfig:
        """A copy in which the options that make no difference to the model have their defaults."""
        if self.method == "sab":
            return self.resolved()
        memory = SABConfig(k_trunc=self.memory.k_trunc, backend=self.memory.backend, layer_norm=self.memory.layer_norm)
        if self.method not in OURS:
            memory = SABConfig(k_trunc=self.memory.k_trunc) if self.method == "dni" else SABConfig()
        cell = self.cell if self.has_cell else ModelConfig.cell
        return replace(self, memory=memory, readout=ModelConfig.readout, cell=cell)


class SequenceModel(nn.Module):
    """Encoder, SAB layers, those of torch.nn or of another paper, readout; time first."""

    def __init__(self, config: ModelConfig, *, encoding: str, input_size: int, output_size: int, steps: int):
        """`encoding`: `onehot` and `scalar` take symbols [T, B] below `input_size`, `vector` takes [T, B, input_size].
        `steps` is the length of the training sequences: the readout of weights has a column for each microstate up to
        there, and ignores later ones."""
        super().__init__()
        self.config = config
        self.encoding = check_choice("encoding", encoding, ENCODINGS)
        self.input_size = check_int("input_size", input_size, 1)
        check_int("output_size", output_size, 1)
        check_int("steps", steps, 1)
        memory = config.layer_config()
        layer_input = 1 if encoding == "scalar" else input_size
        sizes = layer_input, config.hidden_size, config.num_layers
        self.layers: Any
        if config.method in RIVALS:
            window = config.memory.k_trunc if config.method in ONLINE else None
            self.layers = RIVALS[config.method].build(Sizes(config.cell, *sizes, steps, window))
        elif config.method in OF_TORCH:
            self.layers = TORCH_LAYERS[config.cell](*sizes)
            if config.method == "torch_start":
                for name, weight in self.layers.named_parameters():
                    if name.startswith("weight_ih"):
                        scale_input_weights(weight, config.hidden_size)
        else:
            self.layers = LAYERS[config.cell](*sizes, **vars(memory))
        self.readout = nn.Linear(config.hidden_size, output_size)
        self.is_rival = config.method in RIVALS and not RIVALS[config.method].is_like_torch
        """Whether its state is a `RivalState`."""
        self.readout_attention: nn.Linear | None = None
        if memory.k_top > 0 and config.readout != "hidden":
            self._columns = steps // memory.k_att
            size = self._columns if config.readout == "hidden+weights" else config.hidden_size
            self.readout_attention = nn.Linear(max(size, 1), output_size, bias=False)

    def forward(
        self,
        inputs: Tensor,
        hx: InitialState | RivalState | None = None,
        *,
        kept: Tensor | None = None,
        return_attention: bool = False,
    ) -> Any:
        """(outputs [T, B, output_size], state), and the layers' `Attention` with `return_attention`.

        The state is a `SABState`; that of torch.nn's layers has an empty memory, and no attention. A model of another
        paper takes and returns a `RivalState`, and without one returns None: `first_state` begins a stream.
        `kept` [B, hidden_size] is for dropout: the readout sees the last layer's hidden states times this.
        """
        method, attention = self.config.method, None
        if method not in OURS:
            if return_attention:
                raise UserValueError(
                    f"return_attention must be False where method is {method!r}; got True.", "return_attention"
                )
            run: Any = self.layers if self.is_rival else self._run_torch
            hidden, state = run(self._encode(inputs), hx)
        else:
            wanted = return_attention or self.readout_attention is not None  # without it, a step of a stream is fast
            hidden, state, *found = self.layers(self._encode(inputs), hx, return_attention=wanted)
            attention = found[0] if wanted else None
            if isinstance(state, SABHidden):
                state = state.state
        if kept is not None:
            hidden = hidden * kept.to(hidden.dtype)
        outputs = self.readout(hidden)
        if self.readout_attention is not None:
            assert attention is not None
            outputs = outputs + self.readout_attention(self._read(attention))
        return (outputs, state, attention) if return_attention else (outputs, state)

    @property
    def can_stream(self) -> bool:
        """Whether it can read a stream piece by piece."""
        return self.config.method not in RIVALS or RIVALS[self.config.method].streams

    def first_state(self) -> RivalState | None:
        """What begins a stream; None for a model that returns its state in any case."""
        if not self.can_stream:
            raise UserValueError(
                f"method must be one that can read a stream step by step; {self.config.method!r} cannot.", "method"
            )
        return RivalState(grows=RIVALS[self.config.method].grows) if self.is_rival else None

    def _run_torch(self, x: Tensor, hx: InitialState | None) -> tuple[Tensor, SABState]:
        """The hidden states of torch.nn's layers, and their state as one with an empty memory."""
        seen = hx.steps if isinstance(hx, SABState) else 0
        if hx is not None and not isinstance(hx, Tensor):
            hx = tuple(hx) if self.config.cell == "lstm" else hx[0]
        hidden, end = self.layers(x, hx)
        h, c = end if self.config.cell == "lstm" else (end, None)
        layers, batch, n = h.shape
        state = SABState(
            h,
            c,
            microstates=h.new_zeros(layers, batch, 0, n),
            keys=h.new_zeros(layers, batch, 0, 0),
            numbers=torch.zeros(layers, batch, 0, dtype=torch.int64, device=h.device),
            steps=torch.full((batch,), len(x)) + seen,
        )
        return hidden, state

    def _encode(self, inputs: Tensor) -> Tensor:
        if self.encoding == "onehot":
            self._check_symbols(inputs)
            inputs = F.one_hot(inputs, self.input_size)
        elif self.encoding == "scalar":
            inputs = inputs.unsqueeze(-1)
        return inputs.to(self.readout.weight.dtype)

    def _check_symbols(self, inputs: Tensor) -> None:
        allowed = f"inputs must be symbols, whole numbers from 0 to {self.input_size - 1}"
        if inputs.dtype != torch.int64:
            raise UserTypeError(f"{allowed}; got {inputs.dtype}.", "inputs")
        if inputs.device.type == "cpu" and not torch.compiler.is_compiling() and inputs.numel() > 0:
            lowest, highest = (int(edge) for edge in torch.aminmax(inputs))
            if lowest < 0 or highest >= self.input_size:
                raise UserValueError(f"{allowed}; got {lowest if lowest < 0 else highest}.", "inputs")

    def _read(self, attention: Attention) -> Tensor:
        """The readout's input from the last layer's attention."""
        last = attention if self.config.num_layers == 1 else attention.map(lambda tensor: tensor[-1])
        if self.config.readout == "hidden+summary":
            return last.summary
        in_range = (last.numbers >= 0) & (last.numbers < self._columns)
        columns = torch.where(in_range, last.numbers, 0)
        weights = torch.where(in_range, last.weights, 0.0)
        empty = weights.new_zeros(*weights.shape[:-1], max(self._columns, 1))
        return empty.scatter_add(-1, columns, weights)
