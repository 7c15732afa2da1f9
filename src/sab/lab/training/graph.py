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
"""How often a shape runs eagerly before it is captured: kernels compile and workspaces are made outside a graph."""
LARGEST_CACHE = 256
"""How many graphs are kept; further shapes run eagerly."""

Update = Callable[..., None]
_Kind = tuple[tuple[torch.Size, torch.dtype], ...]
"""The shapes and types of a batch's tensors: a recording is valid for one of them."""
Capture = Callable[[Callable[[], None]], Callable[[], Any]]
"""Records what a function does on the device, without doing it; calling what it returns does it."""


class CudaCapture:
    """Records CUDA graphs that share one pool of memory, since they run on one stream and so never at the same time."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


class Graphs:
    """An update that is recorded once for each shape of its batches and replayed from then on.

    The update must compute the same whether it is replayed or called, must keep its lasting state in tensors that it
    changes in place, and must not wait for the device. Where recording fails, it is called as before.
    """

    def __init__(self, update: Update, device: torch.device, capture: Capture):
        self._update = update
        self._device = device
        self._capture = capture
        self._seen: Counter[_Kind] = Counter()
        self._recorded: dict[_Kind, _Recorded] = {}
        self._failed = False

    def __call__(self, *sent: Tensor) -> None:
        """Runs the update on a batch's tensors, which may lie on the host."""
        kind = tuple((tensor.shape, tensor.dtype) for tensor in sent)
        recorded = self._recorded.get(kind) or self._record(kind, sent)
        if recorded is None:
            self._update(*sent)
            return
        for place, tensor in zip(recorded.inputs, sent, strict=True):
            place.copy_(tensor, non_blocking=True)
        recorded.replay()

    def clear(self) -> None:
        """Frees the recordings and their memory; the device must have finished with them."""
        self._recorded.clear()

    def _record(self, kind: _Kind, sent: tuple[Tensor, ...]) -> _Recorded | None:
        """The recording for a shape, once it is warm."""
        self._seen[kind] += 1
        if self._failed or self._seen[kind] <= WARM_UP or len(self._recorded) >= LARGEST_CACHE:
            return None
        inputs = tuple(torch.empty_like(tensor, device=self._device) for tensor in sent)
        try:
            replay = self._capture(lambda: self._update(*inputs))
        except Exception as error:
            self._failed = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning(f"the training step cannot be made a CUDA graph and runs without: {reason}")
            return None
        self._recorded[kind] = _Recorded(inputs, replay)
        return self._recorded[kind]


class _Recorded(NamedTuple):
    """A recording, and the tensors that it reads its batch from."""

    inputs: tuple[Tensor, ...]
    replay: Callable[[], Any]
