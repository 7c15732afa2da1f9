"""What a user passes as series: tables, arrays, lists of series of differing lengths; and their standard form."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy
import torch
from torch import Tensor

from sab.errors import UserTypeError, UserValueError


class Series(NamedTuple):
    """Series of differing lengths, one for each row."""

    values: Tensor
    """[n, T, channels], float64; what lies behind a row's end means nothing."""
    lengths: Tensor
    """The number of steps of each row, [n], each at least 1."""

    @property
    def channels(self) -> int:
        return self.values.shape[2]

    def cut(self, rows: Tensor) -> Series:
        """Some of the rows, padded to the longest of them."""
        lengths = self.lengths[rows]
        return Series(self.values[rows, : int(lengths.max())], lengths)


class Scale(NamedTuple):
    """The mean and the spread of each channel, [channels], in the data that a model was trained on."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """That of values [steps, channels]; a channel that never changes is only moved, not stretched."""
        deviation, mean = torch.std_mean(values, dim=0, correction=0)
        return cls(mean, torch.where(deviation > 1e-12 * mean.abs(), deviation, 1.0))

    def standardise(self, values: Tensor) -> Tensor:
        """The values with mean 0 and deviation 1, which is what a network reads."""
        return (values - self.mean) / self.deviation

    def restore(self, values: Tensor) -> Tensor:
        """What `standardise` made of the values, undone."""
        return values * self.deviation + self.mean


def is_table(X: Any) -> bool:
    """Whether `X` has a row of numbers for each series, all equally long, as other estimators of scikit-learn take it.

    Not one are arrays of three dimensions, and lists of series: of arrays, or of lists of differing lengths.
    """
    if isinstance(X, list | tuple) or (isinstance(X, numpy.ndarray) and X.dtype == object and X.ndim == 1):
        X = list(X)
        if any(hasattr(one, "ndim") and one.ndim > 0 for one in X):
            return False
        is_nested = len(X) > 0 and all(isinstance(one, list | tuple) for one in X)
        return not is_nested or (len({len(one) for one in X}) == 1 and numpy.ndim(X[0][:1]) < 2)
    return getattr(X, "ndim", 2) != 3


def read_series(X: Any) -> Series:
    """The series of an array [n, T, channels], or of a list of arrays [T] or [T, channels]."""
    if len(X) == 0:
        raise UserValueError("X must have at least one series; got none.", "X")
    rows = [_read_one(one, f"X[{place}]") for place, one in enumerate(X)]
    channels = sorted({row.shape[1] for row in rows})
    if len(channels) > 1:
        raise UserValueError(f"X must have series of equally many channels; got {channels[0]} and {channels[-1]}.", "X")
    lengths = torch.tensor([len(row) for row in rows])
    return Series(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths)


def _read_one(given: Any, name: str) -> Tensor:
    """One series as [T, channels]."""
    values = read_numbers(given, name)
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if values.dim() != 2 or values.numel() == 0:
        raise UserValueError(
            f"{name} must be a series [T] or [T, channels] of at least one step; got shape {[*values.shape]}.", "X"
        )
    return values


def read_numbers(given: Any, name: str) -> Tensor:
    """An array of finite numbers as a tensor of float64."""
    try:
        array = numpy.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        if array.dtype.kind == "c":
            raise TypeError
        values = torch.from_numpy(array.astype(numpy.float64))
    except (TypeError, ValueError):
        raise UserTypeError(f"{name} must be an array of numbers; got {type(given).__name__}.", name) from None
    if not values.isfinite().all():
        raise UserValueError(f"{name} must be finite; it has NaN or infinity.", name)
    return values
