"""The parts of a configuration as the kernels take them: Triton functions and facts, all known when they are compiled.

A kernel has no list of parts: it calls the functions that it is given. So a part without them cannot be computed as
another one; `sab.ops.triton.engine` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from sab.config import SABConfig
from sab.ops import forgetting, schedule
from sab.parts import pointwise
from sab.parts.cells import Cell
from sab.parts.incorporations import Incorporation
from sab.parts.pointwise import compiled
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS, WEIGHTINGS
from sab.parts.scorers import SMALLEST_SQUARE, NumberFunctions, Scorer, VectorFunctions
from sab.parts.weightings import Weighting

keeps = compiled(schedule.keeps)
cuts = compiled(schedule.cuts)
slots_at = compiled(schedule.slots_at)
first_kept = compiled(schedule.first_kept)
kept_row = compiled(schedule.kept_row)
next_number = compiled(schedule.next_number)
sortable = compiled(pointwise.sortable)
from_sortable = compiled(pointwise.from_sortable)


class Parts(NamedTuple):
    """The parts of a configuration; None for those of a memory where there is none."""

    cell: Cell
    scorer: Scorer | None
    weighting: Weighting | None
    incorporation: Incorporation | None

    @property
    def is_product(self) -> bool:
        """Whether scores are inner products of keys and query."""
        functions = None if self.scorer is None else self.scorer.triton
        return isinstance(functions, VectorFunctions) and functions.is_product


def parts_of(cell_name: str, config: SABConfig) -> Parts:
    """The parts that a configuration names."""
    if config.k_top == 0:
        return Parts(CELLS[cell_name], None, None, None)
    return Parts(
        CELLS[cell_name],
        SCORERS[str(config.scorer)],
        WEIGHTINGS[config.weighting],
        INCORPORATIONS[config.incorporate],
    )


class Bound(NamedTuple):
    """What the kernels depend on where the macrostate is bounded."""

    forget: str | None
    """The rule of forgetting; None without a bound."""
    longest: int
    """How many microstates a step selects at most: k_top, or the bound."""


def bound_of(config: SABConfig) -> Bound:
    """That of a configuration."""
    if config.max_memory is None or not config.forgets:
        return Bound(None, config.k_top)
    return Bound(config.forget, min(config.k_top, config.max_memory))


def bound_sizes(config: SABConfig) -> tuple[int, int]:
    """How many microstates a row has at most, and by how many bits a count of reads is shifted to discount it."""
    if config.max_memory is None or not config.forgets:
        return 0, 0
    return config.max_memory, forgetting.shift(config.max_memory)


@lru_cache(maxsize=256)
def forward_constants(parts: Parts) -> dict[str, Any]:
    """What the forward kernels are compiled for, as far as the parts decide it."""
    cell, scorer, weighting, incorporation = parts
    numbers, vectors = _kinds(scorer)
    return _facts(parts) | {
        "CELL": _compiled(cell.triton, "forward"),
        "MARK": _compiled(numbers, "mark"),
        "QUERY": _compiled(vectors, "query"),
        "TERMS": _compiled(vectors, "terms"),
        "SMALLEST_SQUARE": SMALLEST_SQUARE,
        "WEIGH": _compiled(weighting and weighting.triton, "forward"),
        "SEES_LEVEL": weighting is not None and weighting.sees_level,
        "INCORPORATE": _compiled(incorporation and incorporation.triton, "forward"),
    }


@lru_cache(maxsize=256)
def backward_constants(parts: Parts) -> dict[str, Any]:
    """What the backward kernels are compiled for, as far as the parts decide it."""
    cell, scorer, weighting, incorporation = parts
    numbers, vectors = _kinds(scorer)
    functions = incorporation and incorporation.triton
    return _facts(parts) | {
        "CELL": _compiled(cell.triton, "backward"),
        "SLOPE": _compiled(numbers, "slope"),
        "QUERY": _compiled(vectors, "query_backward"),
        "SCORE": _compiled(vectors, "backward"),
        "WEIGH": _compiled(weighting and weighting.triton, "backward"),
        "INCORPORATE": _compiled(functions, "backward"),
        "READS_STATE": functions is not None and functions.reads_state,
        "READS_SUMMARY": functions is not None and functions.reads_summary,
    }


def _facts(parts: Parts) -> dict[str, Any]:
    cell, scorer, weighting, incorporation = parts
    return {
        "GATES": cell.gates,
        "HAS_C": cell.has_c,
        "SPLITS": cell.splits_gates,
        "NUMBERS": scorer is not None and scorer.query_cancels,
        "NORMALISES": scorer is not None and scorer.normalises,
        "SAVES_NORM": weighting is not None and weighting.saves_norm,
        "MAPPED": incorporation is not None and incorporation.has_weights,
        "SAVES_MAP": incorporation is not None and incorporation.saves_map,
    }


def _kinds(scorer: Scorer | None) -> tuple[NumberFunctions | None, VectorFunctions | None]:
    """The functions of a scorer by its kind."""
    functions = None if scorer is None else scorer.triton
    return (
        functions if isinstance(functions, NumberFunctions) else None,
        functions if isinstance(functions, VectorFunctions) else None,
    )


def _compiled(functions: Any, name: str) -> Any:
    """A function of a part as a Triton function, None where the part has none."""
    function: Callable[..., Any] | None = getattr(functions, name, None)
    return None if function is None else compiled(function)
