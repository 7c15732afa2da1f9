"""The parts by name: the only lists of names.

A line here makes a part known to the configuration, its checks, the layers and the tests. What a backend supports
follows from what a part provides for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sab.parts import cells, incorporations, scorers, weightings

CELLS: dict[str, cells.Cell] = {
    "lstm": cells.LSTM,
    "gru": cells.GRU,
    "rnn_tanh": cells.TANH,
    "rnn_relu": cells.RELU,
}
SCORERS: dict[str, scorers.Scorer] = {
    "affine": scorers.AFFINE,
    "affine_tanh": scorers.AFFINE_TANH,
    "mlp": scorers.MLP,
    "dot": scorers.DOT,
    "cosine": scorers.COSINE,
}
WEIGHTINGS: dict[str, weightings.Weighting] = {
    "relu": weightings.RELU,
    "relu_norm": weightings.RELU_NORM,
    "softmax": weightings.SOFTMAX,
    "softmax_sink": weightings.SOFTMAX_SINK,
}
INCORPORATIONS: dict[str, incorporations.Incorporation] = {
    "add": incorporations.ADD,
    "concat": incorporations.CONCAT,
    "add_bounded": incorporations.ADD_BOUNDED,
    "gate": incorporations.GATE,
}
PARTS: dict[str, dict[str, Any]] = {
    "cell": CELLS,
    "scorer": SCORERS,
    "weighting": WEIGHTINGS,
    "incorporation": INCORPORATIONS,
}
"""All of them, by the kind of part."""


def provided(kind: str, name: str, field: str) -> Any:
    """What a part provides for a backend in a field (`triton`, `cpp`); None: nothing of its own.

    What one part took over from another, as `_replace` does, computes the other: it belongs to the one that was
    registered first.
    """
    part = PARTS[kind][name]
    value = getattr(part, field)
    first = next(one for one in PARTS[kind].values() if getattr(one, field) is value)
    return value if first is part else None


def first_missing(names: Iterable[str | None], provides: Callable[[str, str], bool]) -> str | None:
    """Why a backend cannot run the parts of a configuration, or None where it can.

    `names` are in the order of `PARTS`, None for a part that is not used; `provides` says of (kind, name) whether the
    backend has the part.
    """
    for kind, name in zip(PARTS, names, strict=True):
        if name is not None and not provides(kind, name):
            return f"it does not have the {kind} {name!r}"
    return None
