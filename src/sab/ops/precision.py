"""The types that a pass computes in, the settings of its matrix products, and conversions that cost nothing extra.

The compute type is that of products. The state type is the same except for bfloat16, where sums over many steps are
kept in float32. On the CPU, whose loops compute in float32 and float64, a lower precision is one of storage alone: of
the parameters, inputs and results of a layer in bfloat16 or float16. Under autocast the products there may round their
factors (`Options.rounds`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sab import torch_private

if TYPE_CHECKING:
    from sab.ops.types import LayerWeights

TYPES = (torch.float32, torch.float64, torch.bfloat16)
"""The possible compute types; a backend may do without some."""
DEVICES = ("cuda", "cpu")
"""The types of devices that a backend runs on."""
_NO_CHANGE = contextlib.nullcontext()


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device; the device `meta` has none."""
    return (device in DEVICES or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)


def compute_type(x: Tensor, weights: LayerWeights) -> torch.dtype:
    """The type of the products: the layer's, or autocast's; on the CPU at least float32."""
    dtype, device = weights.w_hh.dtype, x.device.type
    if device == "cpu":
        return torch.float64 if dtype == torch.float64 else torch.float32
    if dtype != torch.float64 and is_autocast(device):
        return torch.get_autocast_dtype(device)
    return dtype


def may_round(x: Tensor) -> bool:
    """Whether autocast asks for products in bfloat16 on the CPU, where it is no compute type."""
    return x.device.type == "cpu" and is_autocast("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def state_type(compute: torch.dtype) -> torch.dtype:
    """The type of what is summed over many steps."""
    return torch.float32 if compute == torch.bfloat16 else compute


def allow_tf32() -> bool:
    """Whether CUDA may round the factors of float32 products to TF32: torch's setting for cuDNN's RNNs.

    The older `torch.backends.cudnn.allow_tf32` sets this as well, but raises when read after the newer setting.
    """
    return torch.backends.cudnn.rnn.fp32_precision == "tf32"  # pyright: ignore[reportAttributeAccessIssue]


def products(x: Tensor, compute: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """A context whose products have the type of their factors, without autocast, in TF32 where cuDNN's RNNs would."""
    if x.is_cuda and compute == torch.float32:
        return tf32(allow_tf32() and x.shape[1] > 1)  # PyTorch rounds nothing in products of a single row
    device = x.device.type
    return torch_private.without_autocast(device) if is_autocast(device) else _NO_CHANGE


def own_type(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which such tensors can be joined: autocast to one type of 16 bits refuses those of the other."""
    device = tensor.device.type
    if tensor.dtype.itemsize == 2 and is_autocast(device) and tensor.dtype != torch.get_autocast_dtype(device):
        return torch.autocast(device, enabled=False)
    return _NO_CHANGE


class tf32(contextlib.AbstractContextManager[None]):
    """A context with TF32 allowed or forbidden for matrix products; there is no setting for a single product."""

    def __init__(self, allowed: bool):
        self.allowed = allowed

    def __enter__(self) -> None:
        matmul: Any = torch.backends.cuda.matmul
        self.before = matmul.fp32_precision
        self.differs = (self.before == "tf32") != self.allowed
        if self.differs:
            matmul.fp32_precision = "tf32" if self.allowed else "ieee"

    def __exit__(self, *_: object) -> None:
        if self.differs:
            torch.backends.cuda.matmul.fp32_precision = self.before  # pyright: ignore[reportAttributeAccessIssue]


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, rounded to dtype once."""
    if left.dtype == dtype:
        return torch.mm(left, right)
    if left.is_cuda and dtype == torch.float32 and left.shape[1] > 0:
        return torch.mm(left, right, out_dtype=dtype)
    return (left.to(dtype) @ right.to(dtype)) if dtype == torch.float32 else (left @ right).to(dtype)


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)` without its cost where there is nothing to convert."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def contiguous(tensor: Tensor) -> Tensor:
    """`tensor.contiguous()` without its cost where it is."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()
