"""Recurrent layers that remember: Sparse Attentive Backtracking (arXiv 1711.02326) for PyTorch."""

from sab.config import SABConfig
from sab.layers import SABGRU, SABLSTM, SABRNN
from sab.state import Attention, SABState
from sab.tracing import Trace, trace

__all__ = ["SABGRU", "SABLSTM", "SABRNN", "Attention", "SABConfig", "SABState", "Trace", "__version__", "trace"]
__version__ = "0.1.0"
