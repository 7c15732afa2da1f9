"""SABConfig: the options of a layer's memory, and its layer norm, validated once, here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from sab.errors import UserValueError, check_bool, check_choice, check_float, check_int
from sab.parts.registry import INCORPORATIONS, SCORERS, WEIGHTINGS

BACKENDS = ("auto", "triton", "cpu", "reference")
FORWARDS = ("sparse", "dense")
INPUT_STARTS = ("fan_in", "torch")
FORGETS = ("recent", "most_read", "reservoir")
MEMORIES = ("flat", "hierarchical")
DEFAULT_SCORER = "cosine"
LARGEST_DEFAULT_KEY = 128
"""The largest size of keys that a layer takes by itself. With larger ones the query, the keys and their scores would
cost more than the rest of a step at large hidden sizes."""
NEUTRAL_GATE = 1e-4
"""A start of the gate at which a layer computes nearly what it would without a memory, yet learns to read."""
MOST_STEPS = 2**31 - 1
"""How many steps may lie between two microstates or two cuts, or before a call: what is counted from there, and the
angles of the scorer `cosine`, still are 64-bit numbers."""
LARGEST_BLOCK = 2**20
"""How many microstates the smallest blocks may hold: sixteen times its square is a 64-bit number."""

# At run time the types of the options hold their choices, from which a command line can be made.
if TYPE_CHECKING:
    ScorerName = WeightingName = ForwardName = IncorporationName = InputStartName = str
    BackendName = ForgetName = MemoryName = str
else:
    ScorerName = Literal[tuple(SCORERS)]
    WeightingName = Literal[tuple(WEIGHTINGS)]
    ForwardName = Literal[FORWARDS]
    IncorporationName = Literal[tuple(INCORPORATIONS)]
    InputStartName = Literal[INPUT_STARTS]
    BackendName = Literal[BACKENDS]
    ForgetName = Literal[FORGETS]
    MemoryName = Literal[MEMORIES]


@dataclass(frozen=True)
class SABConfig:
    """How a layer remembers, reads and backtracks."""

    k_top: int = 10
    """How many microstates a step may select; 0 makes the layer a plain RNN."""
    k_att: int = 2
    """Every k_att-th hidden state is kept as a microstate."""
    k_trunc: int | None = 10
    """How many steps back the gradient follows the recurrent chain; None cuts nowhere."""
    scorer: ScorerName | Callable[[Tensor, Tensor], Tensor] = DEFAULT_SCORER
    """How relevant a microstate is; in Python also a callable: (microstates [B, S, n], h [B, n]) to scores [B, S]."""
    weighting: WeightingName = "softmax"
    """How the selected scores become weights."""
    forward: ForwardName = "sparse"
    """Whether only the selected microstates enter the summary (sparse) or all of them do (dense)."""
    incorporate: IncorporationName = "gate"
    """How the summary enters the hidden state. With `gate` and a weighting whose weights add up to at most 1, hidden
    states of LSTM, GRU and tanh cells stay within [-1, 1]."""
    initial_gate: float | None = None
    """With incorporate `gate`, the share of the summary in the hidden state before training, between 0 and 1; None
    means 0.25. A very small one starts the layer as one without a memory, from which it learns to read."""
    input_start: InputStartName = "fan_in"
    """How the input weights of a layer with a memory are drawn: `fan_in` with a standard deviation of
    2 / sqrt(input_size), so that an input leaves a mark on the hidden state from the first iteration; `torch` as
    `torch.nn` does, within 1 / sqrt(hidden_size)."""
    attention_size: int | None = None
    """Size d of the keys of the scorers `cosine`, `mlp` and `dot`; None means hidden_size, but at most 128."""
    max_microstates: int | None = None
    """How many microstate numbers have a learned bias in the affine scorers; None means no bias."""
    backend: BackendName = "auto"
    """What computes the recurrence; `auto` takes the fastest that supports the configuration."""
    layer_norm: bool = False
    """Whether the products of the cell with the input and with the hidden state, and an LSTM's cell state where it is
    read, are normalised over their entries (layer norm)."""
    max_memory: int | None = None
    """How many microstates the macrostate holds at most, in training as in inference; None means all of them."""
    forget: ForgetName = "recent"
    """Which microstate is forgotten when there would be more than max_memory: the oldest (`recent`), the least read
    (`most_read`), or one by chance, so that a uniform sample of the past remains (`reservoir`)."""
    recompute: bool = False
    """Whether training keeps little for the backward pass and runs the steps again there, some hundred at a time: the
    same gradients with a small part of the memory, in more time."""
    offload: bool = False
    """With recompute on a GPU, whether keys, selections and the gradients of microstates and keys lie in pinned memory
    of the CPU from the end of the forward pass on."""
    memory: MemoryName = "flat"
    """Whether a step scores all microstates (flat), or blocks of them first and then those of the best blocks
    (hierarchical), in a time that grows with the square root of their number."""
    block_size: int = 16
    """With memory `hierarchical`, how many microstates the smallest blocks hold; it doubles as the memory grows."""
    blocks: int = 8
    """With memory `hierarchical`, how many blocks a step reads, besides the one with the newest microstate."""

    def __post_init__(self) -> None:
        whole = {
            "k_top": check_int("k_top", self.k_top, 0),
            "k_att": check_int("k_att", self.k_att, 1, maximum=MOST_STEPS),
            "k_trunc": check_int("k_trunc", self.k_trunc, 1, optional=True, maximum=MOST_STEPS),
            "attention_size": check_int("attention_size", self.attention_size, 1, optional=True),
            "max_microstates": check_int("max_microstates", self.max_microstates, 1, optional=True),
            "max_memory": check_int("max_memory", self.max_memory, 1, optional=True, maximum=MOST_STEPS),
            "block_size": check_int("block_size", self.block_size, 1, maximum=LARGEST_BLOCK),
            "blocks": check_int("blocks", self.blocks, 1, maximum=MOST_STEPS),
        }
        for option, value in whole.items():
            object.__setattr__(self, option, value)  # a plain int also where a NumPy one was given
        if not callable(self.scorer) or isinstance(self.scorer, type):  # a class is no scorer, but its instance may be
            check_choice("scorer", self.scorer, SCORERS, also=", or a callable")
        check_choice("weighting", self.weighting, WEIGHTINGS)
        check_choice("forward", self.forward, FORWARDS)
        check_choice("incorporate", self.incorporate, INCORPORATIONS)
        check_choice("input_start", self.input_start, INPUT_STARTS)
        check_choice("backend", self.backend, BACKENDS)
        check_bool("layer_norm", self.layer_norm)
        check_choice("forget", self.forget, FORGETS)
        check_bool("recompute", self.recompute)
        if check_bool("offload", self.offload) and not self.recompute:
            raise UserValueError("offload must be False where recompute is False; got True.", "offload")
        if self.recompute and self.backend == "reference":
            raise UserValueError("recompute must be False where backend is 'reference'; got True.", "recompute")
        if self.max_memory is None and self.forget != "recent":
            raise UserValueError(f"max_memory must be given where forget is {self.forget!r}; got None.", "max_memory")
        check_choice("memory", self.memory, MEMORIES)
        self._check_levels()
        if self.initial_gate is not None:
            share = check_float("initial_gate", self.initial_gate, above=0, below=1)
            object.__setattr__(self, "initial_gate", share)
            if INCORPORATIONS[self.incorporate].set_share is None:
                raise UserValueError(
                    f"initial_gate must be None where incorporate is {self.incorporate!r}; got {share}.", "initial_gate"
                )
        if self.forward == "dense" and not WEIGHTINGS[self.weighting].normalises_all:
            dense = ", ".join(name for name, weighting in WEIGHTINGS.items() if weighting.normalises_all)
            raise UserValueError(
                f"weighting must be one of {dense} where forward is 'dense'; got {self.weighting!r}.", "weighting"
            )

    def _check_levels(self) -> None:
        """Refuse what two levels of memory do not go with, and options of theirs without them."""
        if self.memory == "flat":
            for option in ("block_size", "blocks"):
                given, default = getattr(self, option), getattr(SABConfig, option)
                if given != default:
                    raise UserValueError(
                        f"{option} must be {default}, the default, where memory is 'flat'; got {given}.", option
                    )
            return
        linear = [name for name, scorer in SCORERS.items() if scorer.is_linear]
        if self.scorer not in linear:
            given = repr(self.scorer) if isinstance(self.scorer, str) else "a callable"
            raise UserValueError(
                f"scorer must be one of {', '.join(linear)} where memory is 'hierarchical'; got {given}.", "scorer"
            )
        if self.forward != "sparse":
            raise UserValueError(
                f"forward must be 'sparse' where memory is 'hierarchical'; got {self.forward!r}.", "forward"
            )
        if self.max_memory is not None:
            raise UserValueError(
                f"max_memory must be None where memory is 'hierarchical'; got {self.max_memory}.", "max_memory"
            )
        if self.recompute:
            raise UserValueError("recompute must be False where memory is 'hierarchical'; got True.", "recompute")
        if self.blocks * self.block_size < self.k_top:
            raise UserValueError(
                f"blocks times block_size must be at least k_top = {self.k_top}; got {self.blocks} times "
                f"{self.block_size}.",
                "blocks",
            )

    def key_size(self, hidden_size: int) -> int:
        """Size d of the keys of a layer with this hidden size, where its scorer has such keys."""
        return min(hidden_size, LARGEST_DEFAULT_KEY) if self.attention_size is None else self.attention_size

    @property
    def is_hierarchical(self) -> bool:
        """Whether steps read blocks of microstates."""
        return self.memory == "hierarchical" and self.k_top > 0

    def flat(self) -> SABConfig:
        """The same with one level of memory."""
        return replace(self, memory="flat", block_size=SABConfig.block_size, blocks=SABConfig.blocks)

    @property
    def forgets(self) -> bool:
        """Whether the macrostate is bounded."""
        return self.max_memory is not None and self.k_top > 0

    @property
    def counts_reads(self) -> bool:
        """Whether the memory carries how often each microstate was read."""
        return self.forgets and self.forget == "most_read"

    def unbounded(self) -> SABConfig:
        """The same without a bound of the macrostate."""
        return replace(self, max_memory=None, forget="recent")

    def part_names(self, cell: str) -> tuple[str, str | None, str | None, str | None]:
        """The names of a layer's parts, in the order of `sab.parts.registry.PARTS`.

        None stands for a part that is not used, which without a memory is all but the cell, and for a callable scorer.
        """
        if self.k_top == 0:
            return cell, None, None, None
        return cell, self.scorer if isinstance(self.scorer, str) else None, self.weighting, self.incorporate
