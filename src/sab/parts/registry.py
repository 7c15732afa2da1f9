"""The parts by name: the only lists of names.

A line here makes a part known to the configuration, its checks, the layers and the tests. What a backend supports
follows from what a part provides for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
}
PARTS: dict[str, Mapping[str, Any]] = {
    "cell": CELLS,
    "scorer": SCORERS,
    "weighting": WEIGHTINGS,
    "incorporation": INCORPORATIONS,
}
"""All of them, by the kind of part."""


def first_missing(names: Mapping[str, object], provides: Callable[[str, str], bool]) -> str | None:
    """Why a backend cannot run the parts of a configuration, or None where it can.

    `names` holds a name for each kind of part, `provides` says of (kind, name) whether the backend has the part.
    """
    for kind, name in names.items():
        if not isinstance(name, str):
            return f"it does not have a {kind} that is a callable"
        if not provides(kind, name):
            return f"it does not have the {kind} {name!r}"
    return None
