"""The operation's arguments and results: flat for `torch.library`, by name for everything else.

A schema of `torch.library` has neither structures nor lists with None in them. So arguments are the fields of some
NamedTuples one after another, and the schema is made from these; results are a list without what a configuration does
not have, whose names follow from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops.buffers import Buffers, Outside, Weights
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS, WEIGHTINGS

SymbolicInt = Annotated[int, "symbolic"]
"""A number that the compiler may leave open."""


class Given(NamedTuple):
    """The sequence."""

    x: Tensor
    """[T, B, input_size]."""
    lengths: Tensor | None
    """[B], on the device of x; None where all rows have T steps."""


class Initial(NamedTuple):
    """The tensors of a `LayerState`; None for zeros and an empty memory."""

    h: Tensor | None = None
    c: Tensor | None = None
    microstates: Tensor | None = None
    keys: Tensor | None = None
    reads: Tensor | None = None


class Parameters(NamedTuple):
    """`LayerWeights`, flat."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_memory: Tensor | None
    w_query: Tensor | None
    scorer_bias: Tensor | None
    v: Tensor | None
    w_incorporate: Tensor | None
    b_incorporate: Tensor | None
    norm_ih: Tensor | None
    norm_hh: Tensor | None
    norm_c_weight: Tensor | None
    norm_c_bias: Tensor | None
    h_mask: Tensor | None

    def of_loops(self) -> Weights:
        """Those that the loops over time read."""
        return Weights(self.w_hh, self.b_hh, *self[4:], b_ih=None if self.norm_ih is None else self.b_ih)


class Options(NamedTuple):
    """What a call does, apart from its tensors."""

    engine: str
    cell: str
    scorer: str
    weighting: str
    forward: str
    incorporate: str
    k_top: int
    k_att: int
    k_trunc: int
    """0 for None."""
    layer_norm: bool
    max_memory: int
    """0 for None, and where there is no memory."""
    forget: str
    block_size: int
    """0 for one level of memory, and where there is none."""
    blocks: int
    seen: SymbolicInt
    """How many steps all rows have seen before."""
    compute: torch.dtype
    """The compute type."""
    rounds: bool
    """Whether products may round their factors to bfloat16, if the engine can."""

    def config(self) -> SABConfig:
        """The memory's options; `attention_size` and `max_microstates` are in the shapes of the parameters."""
        return _config(*self[2:14])


class Purpose(NamedTuple):
    """What the forward is for."""

    saves: bool
    """Whether a backward may follow; otherwise nothing is kept for one."""


class Saved(NamedTuple):
    """What the forward leaves for the backward."""

    buffers: list[Tensor]


class Needs(NamedTuple):
    """What the backward is for."""

    needs: list[bool]
    """For each of `INPUTS` whether its gradient is needed."""


FORWARD = (Given, Initial, Parameters, Options, Purpose)
"""The arguments of `sab::recurrence`."""
BACKWARD = (Outside, Given, Parameters, Saved, Options, Needs)
"""The arguments of `sab::recurrence_backward`."""
INPUTS = (*Given._fields, *Initial._fields, *Parameters._fields)
"""The names of the tensors among the forward's arguments."""
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    str: "str",
    int: "int",
    SymbolicInt: "SymInt",
    bool: "bool",
    list[bool]: "bool[]",
    torch.dtype: "ScalarType",
}


def schema(kinds: Iterable[Any]) -> str:
    """The fields of these NamedTuples as the arguments of a schema."""
    fields = [field for kind in kinds for field in get_type_hints(kind, include_extras=True).items()]
    return ", ".join(f"{_SCHEMA_TYPES[of_type]} {name}" for name, of_type in fields)


def split(arguments: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """Flat arguments as these NamedTuples; there may be more than they take."""
    found, start = [], 0
    for kind in kinds:
        end = start + len(kind._fields)
        found.append(kind._make(arguments[start:end]))
        start = end
    return found


@lru_cache(maxsize=256)
def _config(
    scorer: str,
    weighting: str,
    forward: str,
    incorporate: str,
    k_top: int,
    k_att: int,
    k_trunc: int,
    layer_norm: bool,
    max_memory: int,
    forget: str,
    block_size: int,
    blocks: int,
) -> SABConfig:
    parts = scorer, weighting, forward, incorporate
    others: dict[str, Any] = {"max_memory": max_memory, "forget": forget} if max_memory > 0 else {}
    if block_size > 0:
        others = {"memory": "hierarchical", "block_size": block_size, "blocks": blocks}
    return SABConfig(k_top, k_att, k_trunc or None, *parts, layer_norm=layer_norm, **others)


class Results(NamedTuple):
    """The results that the layers read; the others are for the backward."""

    hidden: Tensor
    """The output: a copy of the hidden states in the layer's type, [T, B, n]."""
    store: Tensor
    c: Tensor | None = None
    keys: Tensor | None = None
    weights: Tensor | None = None
    selected: Tensor | None = None
    summary: Tensor | None = None
    live: Tensor | None = None
    reads: Tensor | None = None

    @classmethod
    def of(cls, outputs: Sequence[Tensor], cell: str, config: SABConfig) -> Results:
        """The first ones of all that the operation returns."""
        hidden, store, *others = outputs
        c = others.pop(0) if CELLS[cell].has_c else None
        return cls(hidden, store, c, *others[: 4 * (config.k_top > 0) + config.forgets + config.counts_reads])


@lru_cache(maxsize=256)
def _names(
    has_memory: bool,
    has_c: bool,
    splits_gates: bool,
    query_cancels: bool,
    normalises: bool,
    saves_norm: bool,
    saves_map: bool,
    layer_norm: bool,
    forgets: bool,
    counts_reads: bool,
    saves: bool,
) -> tuple[str, ...]:
    visible = {"hidden": True, "store": True, "c": has_c}
    visible |= dict.fromkeys(("keys", "weights", "selected", "summary"), has_memory)
    visible |= {"live": forgets, "reads": counts_reads}
    saved = {
        "gates": True,
        "hidden_new": splits_gates,
        "h_hat": True,
        "query": has_memory and not query_cancels,
        "norms": has_memory and saves_norm,
        "mapped": has_memory and saves_map,
        "key_scale": has_memory and normalises,
        "query_scale": has_memory and normalises,
        "scores": has_memory and normalises,
        **dict.fromkeys(("x_normed", "x_scale", "h_normed", "h_scale"), layer_norm),
        "packed": True,
    }
    return tuple(name for name, is_there in (visible | (saved if saves else {})).items() if is_there)


def result_names(options: Options, saves: bool = True) -> tuple[str, ...]:
    """The names of all results, those of `Results` first.

    The last one is `packed` where a backward may follow; engines that do not pack have none.
    """
    cell = CELLS[options.cell]
    scorer = SCORERS[options.scorer]
    saves_norm = WEIGHTINGS[options.weighting].saves_norm
    saves_map = INCORPORATIONS[options.incorporate].saves_map
    facts = scorer.query_cancels, scorer.normalises, saves_norm, saves_map
    config = options.config()
    facts += options.layer_norm, config.forgets, config.counts_reads
    return _names(options.k_top > 0, cell.has_c, cell.splits_gates, *facts, saves)


def pack_results(hidden: Tensor, buffers: Buffers, options: Options, saves: bool) -> list[Tensor]:
    """The results as the operation returns them."""
    found = [getattr(buffers, name) for name in result_names(options, saves)[1:]]
    if found[-1] is None:
        found.pop()
    return [hidden, *found]


def unpack_buffers(saved: Sequence[Tensor], lengths: Tensor | None, options: Options) -> Buffers:
    """The buffers from all results but the first."""
    found: Any = dict(zip(result_names(options)[1:], saved, strict=False))
    found["lengths"] = lengths
    return Buffers._make(map(found.get, Buffers._fields))
