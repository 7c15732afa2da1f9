"""Recurrent layers that remember: Sparse Attentive Backtracking (arXiv 1711.02326) for PyTorch."""

from typing import TYPE_CHECKING, Any

from sab.cells import SABGRUCell, SABLSTMCell, SABRNNCell
from sab.config import SABConfig
from sab.layers import SABGRU, SABLSTM, SABRNN
from sab.state import Attention, SABHidden, SABState
from sab.tracing import Trace, trace

if TYPE_CHECKING:
    from sab import export as export
    from sab import online as online
    from sab import plot as plot
    from sab import search as search

__all__ = [
    "SABGRU",
    "SABLSTM",
    "SABRNN",
    "Attention",
    "SABConfig",
    "SABGRUCell",
    "SABHidden",
    "SABLSTMCell",
    "SABRNNCell",
    "SABState",
    "Trace",
    "__version__",
    "trace",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`sab.export`, `sab.online`, `sab.plot` and `sab.search` are imported when they are first asked for: layers need
    none of them."""
    if name in ("export", "online", "plot", "search"):
        import importlib

        return importlib.import_module(f"sab.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
