"""Launching kernels without asking anew, at each launch, which of the compiled ones its arguments take.

Triton looks at each argument for that, which for kernels with as many as ours takes longer than a short loop itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which takes tensors on the CPU."""

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, tensors: list[Tensor], sizes: list[int], constants: dict[str, Any]) -> None:
    """Launch a kernel whose parameters are tensors, then sizes that it is not specialised on, then constants."""
    index = tensors[0].device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):  # Triton launches on the current device, wherever the tensors are
            return launch(kernel, programs, tensors, sizes, constants)
    for tensor in tensors:
        if tensor.data_ptr() % 16 != 0:  # compiled otherwise; only a parameter that is part of another lies so
            kernel[(programs,)](*tensors, *sizes, **constants)
            return None
    key = (kernel, index, *constants.values(), *[tensor.dtype for tensor in tensors])
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*tensors, *sizes, **constants)
        return None
    compiled[(programs, 1, 1)](*tensors, *sizes, *[constants[name] for name in _names(kernel, tensors, sizes)])
    return None


def _names(kernel: Any, tensors: list[Tensor], sizes: list[int]) -> list[str]:
    return kernel.arg_names[len(tensors) + len(sizes) :]
