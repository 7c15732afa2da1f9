"""What people use instead of SAB, trained by the same loop on the same batches: the only list of their names.

A layer like `torch.nn`'s returns hidden states and its state; any other is a `Backbone`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from sab.lab.rivals.base import RivalState, Sizes
from sab.lab.rivals.online import CREDITS, OnlineLayer
from sab.lab.rivals.packages import XLSTM, XLSTM_HEADS, Mamba, MinGRU, SparseTransformer, Transformer
from sab.lab.rivals.recurrent import LRU, chrono
from sab.parts.registry import CELLS

__all__ = ["ONLINE", "RIVALS", "Rival", "RivalState", "Sizes"]


class Rival(NamedTuple):
    """A method, and what its options may be."""

    build: Callable[[Sizes], nn.Module]
    title: str
    """Its name in tables."""
    package: str | None = None
    """The optional package that it needs, by the name that it is imported by."""
    cells: tuple[str, ...] = ()
    """The cells that it can have; none where the option means nothing."""
    multiple: int = 1
    """Its hidden size is a multiple of this."""
    most_layers: int | None = None
    is_like_torch: bool = False
    """Whether it is called, and returns states, like `torch.nn`'s layers."""
    streams: bool = True
    """Whether it can read a stream piece by piece."""
    grows: bool = False
    """Whether its state grows with every step of a stream."""


def _online(method: str, sizes: Sizes) -> nn.Module:
    return OnlineLayer(method, sizes.cell, sizes.input_size, sizes.hidden_size, sizes.window)


def _online_rival(method: str, title: str) -> Rival:
    return Rival(partial(_online, method), title, cells=tuple(CELLS), most_layers=1, is_like_torch=True)


ONLINE = (*CREDITS, "dni")
"""The methods of online credit."""
_TITLES = {"rtrl": "RTRL", "uoro": "UORO", "nobacktrack": "NoBackTrack", "snap1": "SnAp-1", "dni": "DNI"}
RIVALS: dict[str, Rival] = {
    "chrono": Rival(chrono, "chrono initialisation", cells=("lstm", "gru"), is_like_torch=True),
    "lru": Rival(LRU, "LRU"),
    "min_gru": Rival(MinGRU, "minGRU", "minGRU_pytorch"),
    "mamba": Rival(Mamba, "Mamba", "mambapy"),
    "xlstm": Rival(XLSTM, "xLSTM", "xlstm", multiple=XLSTM_HEADS),
    "transformer": Rival(Transformer, "Transformer, rotary", "x_transformers", grows=True),
    "sparse_transformer": Rival(
        SparseTransformer, "Transformer, sparse", "native_sparse_attention_pytorch", streams=False
    ),
    **{method: _online_rival(method, _TITLES[method]) for method in ONLINE},
}
"""The methods besides SAB, its baselines and torch.nn's layers, by their names on the command line."""
