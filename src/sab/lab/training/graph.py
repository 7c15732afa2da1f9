"""A training step as a CUDA graph: hundreds of kernels for the price of one launch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger("sab")

WARM_UP = 2
"""How often a shape is met before it is captured: kernels are compiled and workspaces made outside a graph."""
LARGEST_CACHE = 256
"""How many graphs are kept; shapes beyond are run step by step."""

Update = Callable[..., None]
_Kind = tuple[tuple[torch.Size, torch.dtype], ...]
"""What a recording depends on."""
Capture = Callable[[Callable[[], None]], Callable[[], Any]]
"""Records what a function does on the device, without doing it; calling what it returns does it."""


class CudaCapture:
    """Records CUDA graphs that share one pool of memory, since they run on one stream and so never at the same time."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, that of the log say, may do to the device what they like meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


class Graphs:
    """An update that is recorded once for each shape of its batches and from then on replayed.

    The update must give the same whether it is replayed or called, must keep all that lasts in tensors that it
    changes in place, and may do nothing that waits for the device; where recording fails, it is called as before.
    """

    def __init__(self, update: Update, device: torch.device, capture: Capture):
        self._update = update
        self._device = device
        self._capture = capture
        self._met: Counter[_Kind] = Counter()
        self._recorded: dict[_Kind, _Recorded] = {}
        self._fails = False

    def __call__(self, *sent: Tensor) -> None:
        """The update with what was sent for a batch, which may lie on the host."""
        kind = tuple((tensor.shape, tensor.dtype) for tensor in sent)
        recorded = self._recorded.get(kind) or self._record(kind, sent)
        if recorded is None:
            self._update(*sent)
            return
        for place, tensor in zip(recorded.places, sent, strict=True):
            place.copy_(tensor, non_blocking=True)
        recorded.replay()

    def clear(self) -> None:
        """Gives back the recordings and their memory, which the device must not be using any more."""
        self._recorded.clear()

    def _record(self, kind: _Kind, sent: tuple[Tensor, ...]) -> _Recorded | None:
        """A recording for a shape, where its time has come."""
        self._met[kind] += 1
        if self._fails or self._met[kind] <= WARM_UP or len(self._recorded) >= LARGEST_CACHE:
            return None
        places = tuple(torch.empty_like(tensor, device=self._device) for tensor in sent)
        try:
            replay = self._capture(lambda: self._update(*places))
        except Exception as error:
            self._fails = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning(f"the training step cannot be made a CUDA graph and runs without: {reason}")
            return None
        self._recorded[kind] = _Recorded(places, replay)
        return self._recorded[kind]


class _Recorded(NamedTuple):
    """A recording and where it looks for what is sent for its batch."""

    places: tuple[Tensor, ...]
    replay: Callable[[], Any]
