"""The operation under `torch.vmap`: what is mapped over becomes rows of the batch, so that one pass runs all samples.

Rows never meet in the loops. They do in the weights' gradients, which are sums over rows: so the backward is told how
many samples its rows belong to, and makes the weights' gradients of each (`gradients.SampleGradients`). Only where the
weights themselves differ from sample to sample, as in an ensemble, each sample is a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sab.ops.arguments import INPUTS, Given, Initial, Options, Parameters, result_names
from sab.ops.buffers import Outside

Tensors = Sequence[Any]
"""Tensors, and None where there is none."""
Dims = Sequence[int | None]
"""For each tensor the dimension that is mapped over; None where all samples share it."""
Mapped = tuple[tuple[Tensor, ...], tuple[int | None, ...]]
"""Results and their dimensions that are mapped over."""

_ROWS_OF_INPUTS = {"x": 1} | dict.fromkeys(("lengths", "h_mask", *Initial._fields), 0)
"""The dimension of the rows, by name; the others, the weights, have none."""
_ROWS_OF_RESULTS: dict[str, int | None] = {"keys": 0, "key_scale": 0, "live": 0, "reads": 0, "packed": None}
"""The same for those results whose rows are not dimension 1, after time."""
LARGEST_COPY = 1 << 26
"""Bytes of what one forward left that are copied at most, so that several backwards of it run as one."""


def forward(again: Callable[..., Tensors], samples: int, dims: Dims, options: Options, tensors: Tensors) -> Mapped:
    """`again(options, *tensors)` of each sample."""
    if _have_own_weights(INPUTS, dims):
        return _one_by_one(lambda *one: again(options, *one), samples, dims, tensors)
    axes = [_ROWS_OF_INPUTS.get(name) for name in INPUTS]
    results = again(options, *_fold(samples, axes, dims, tensors))
    return _unfold(samples, [_axis_of_result(name) for name in result_names(options)], results)


def backward(
    again: Callable[..., Tensors],
    samples: int,
    dims: Dims,
    options: Options,
    needs: Sequence[bool],
    inner: int,
    tensors: Tensors,
) -> Mapped:
    """`again(options, needs, inner, *tensors)` of each sample; `inner`: into how many samples its rows fall already."""
    inputs = (*Given._fields, *Parameters._fields)
    start, end = len(Outside._fields), len(Outside._fields) + len(inputs)
    if _have_own_weights(inputs, dims[start:end]):
        return _one_by_one(lambda *one: again(options, needs, inner, *one), samples, dims, tensors)
    axes = [_axis_of_result(name) for name in Outside._fields]
    axes += [_ROWS_OF_INPUTS.get(name) for name in inputs]
    axes += [_axis_of_result(name) for name in result_names(options)[1:]]
    needed = [name for name, is_needed in zip(INPUTS, needs, strict=True) if is_needed]
    out_axes = [_ROWS_OF_INPUTS.get(name, 0) for name in needed]

    def run(count: int, piece: Tensors) -> Mapped:
        results = again(options, needs, count * max(inner, 1), *_fold(count, axes, dims, piece))
        # The rows of an input's gradient are those of all samples; a parameter has one for each.
        shapes = [
            (count, -1) if name in _ROWS_OF_INPUTS else (count, inner) if inner > 0 else (count,) for name in needed
        ]
        found = [result.unflatten(axis, shape) for result, axis, shape in zip(results, out_axes, shapes, strict=True)]
        return tuple(found), tuple(out_axes)

    shared = [tensor for tensor, dim in zip(tensors[end:], dims[end:], strict=True) if dim is None]
    most = max(LARGEST_COPY // max(sum(tensor.nbytes for tensor in shared), 1), 1)
    if samples <= most:
        return run(samples, tensors)
    pieces = []
    for first in range(0, samples, most):
        count = min(most, samples - first)
        piece = [
            tensor if dim is None else tensor.narrow(dim, first, count)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        pieces.append(run(count, piece)[0])
    joined = [torch.cat(parts, axis) for parts, axis in zip(zip(*pieces, strict=True), out_axes, strict=True)]
    return tuple(joined), tuple(out_axes)


def _have_own_weights(names: Sequence[str], dims: Dims) -> bool:
    """Whether samples differ in their weights."""
    return any(dim is not None and name not in _ROWS_OF_INPUTS for name, dim in zip(names, dims, strict=True))


def _axis_of_result(name: str) -> int | None:
    return _ROWS_OF_RESULTS.get(name, 1)


def _fold(samples: int, axes: Dims, dims: Dims, tensors: Tensors) -> list[Any]:
    """The tensors with the rows of all samples, one sample after another."""
    return [_rows_of_all(samples, *one) for one in zip(tensors, dims, axes, strict=False)]


def _rows_of_all(samples: int, tensor: Tensor | None, dim: int | None, axis: int | None) -> Tensor | None:
    if tensor is None or axis is None:
        return tensor
    if dim is None:
        tensor = tensor.unsqueeze(axis)
        tensor = tensor.expand(*tensor.shape[:axis], samples, *tensor.shape[axis + 1 :])
    else:
        tensor = tensor.movedim(dim, axis)
    return tensor.flatten(axis, axis + 1)


def _unfold(samples: int, axes: Dims, results: Tensors) -> Mapped:
    """The results of all rows, apart by samples."""
    pairs = list(zip(results, axes, strict=False))
    found = [result if axis is None else result.unflatten(axis, (samples, -1)) for result, axis in pairs]
    return tuple(found), tuple(axis for _, axis in pairs)


def _one_by_one(run: Callable[..., Tensors], samples: int, dims: Dims, tensors: Tensors) -> Mapped:
    """A pass for each sample."""
    runs = [
        run(*[tensor if dim is None else tensor.select(dim, i) for tensor, dim in zip(tensors, dims, strict=True)])
        for i in range(samples)
    ]
    found = tuple(torch.stack(parts) for parts in zip(*runs, strict=True))
    return found, (0,) * len(found)
