"""A forecaster: the next values of a series."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sab.config import SABConfig
from sab.errors import UserValueError, check_int
from sab.estimators.base import SABEstimator
from sab.estimators.explanation import Explanation
from sab.estimators.network import Predictor
from sab.estimators.series import Scale, read_numbers
from sab.tracing import trace

WINDOWS_IN_EPOCH = 128
"""Windows that an epoch draws at least, where the series has as many."""
WINDOWS_IN_VALIDATION = 64
"""Windows that are looked at most, to tell the best epoch."""
SHORTEST = 4
"""Steps that a series must have besides those of the horizon."""


class SABForecaster(SABEstimator):
    """A forecaster of a series: a SAB layer reads its last `window` values, and a linear readout gives the next
    `horizon` ones, all at once.

    The series is an array [T], or [T, channels], whose channels are forecast together.
    """

    scale_: Scale
    """Mean and deviation of each channel of the series that `fit` was called with."""
    window_: int
    """Values that a forecast reads: `window`, or less where the series is short."""

    def __init__(
        self,
        horizon: int = 24,
        window: int = 400,
        *,
        cell: Literal["lstm", "gru", "rnn"] = "lstm",
        hidden_size: int = 64,
        num_layers: int = 1,
        dropout: float = 0.0,
        memory: SABConfig | None = None,
        learning_rate: float = 3e-3,
        batch_size: int = 16,
        max_epochs: int = 200,
        patience: int = 50,
        validation_fraction: float = 0.1,
        random_state: Any = None,
        device: Any = "auto",
        verbose: bool = False,
    ):
        super().__init__(
            cell=cell,
            hidden_size=hidden_size,
            num_layers=num_layers,
            dropout=dropout,
            memory=memory,
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_epochs=max_epochs,
            patience=patience,
            validation_fraction=validation_fraction,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.horizon = horizon
        self.window = window

    def fit(self, X: Any, y: None = None) -> Self:
        """Train on a series; `y` is not used, and here because pipelines pass it."""
        horizon = check_int("horizon", self.horizon, 1)
        series = self._read(X, reset=True)
        steps, channels = series.shape
        if steps < horizon + SHORTEST:
            raise UserValueError(
                f"X must have at least horizon + {SHORTEST} = {horizon + SHORTEST} steps; got n_samples = {steps}.", "X"
            )
        self.window_ = min(check_int("window", self.window, 2), (steps - horizon) // 2)
        self.scale_ = Scale.of(series)
        self._last = series[-self.window_ :].clone()
        device = self._device()
        # A view, [windows, window + horizon, channels]: only batches of it are copied.
        values = self.scale_.standardise(series).float().to(device)
        windows = values.unfold(0, self.window_ + horizon, 1).transpose(1, 2)

        def loss_of(network: nn.Module, rows: Tensor) -> Tensor:
            part = windows[rows.to(device)]
            known = part[:, : self.window_]
            given = network(known - _level(known)).unflatten(-1, (channels, horizon))
            wanted = part.unfold(1, horizon, 1)[:, 1:] - known.unsqueeze(-1)
            # In training, the second half of the window learns to forecast: before that, little is known of the series.
            first = self.window_ // 2 if network.training else self.window_ - 1
            return mse_loss(given[:, first:], wanted[:, first:])

        self._train(
            channels,
            lambda layer, dropout: Predictor(layer, horizon, dropout),
            loss_of,
            lambda fraction: self._split(steps, fraction),
            max(8 * steps // self.window_, WINDOWS_IN_EPOCH),
        )
        return self

    def _split(self, steps: int, fraction: float) -> tuple[Tensor, Tensor]:
        """Windows to train on, and windows to validate on: what the latter forecast lies behind all of the former."""
        windows = torch.arange(steps - self.window_ - self.horizon + 1)
        held_out = 0 if fraction == 0 else max(self.horizon, round(fraction * steps))
        training = windows[: steps - held_out - self.window_ - self.horizon + 1]
        if held_out == 0 or len(training) == 0:
            return windows, windows[:0]
        validation = windows[-(held_out - self.horizon + 1) :]
        return training, validation[:: -(-len(validation) // WINDOWS_IN_VALIDATION)]

    def predict(self, X: Any = None) -> NDArray[Any]:
        """The `horizon` values after those of `X`, or of the series that `fit` was called with: [horizon], or
        [horizon, channels] where that had channels."""
        known, network = self._known(X)
        with torch.no_grad():
            differences = network(known - _level(known))[0, -1].unflatten(-1, (-1, self.horizon)).T
        found = self.scale_.restore((known[0, -1] + differences).double().cpu()).numpy()
        return found[:, 0] if self._is_single else found

    def explain(self, X: Any = None, step: int = 1, channel: int = 0) -> Explanation:
        """Which steps of the window that a forecast read the value of `step` steps later goes back to."""
        prediction = self.predict(X).reshape(self.horizon, -1)
        check_int("step", step, 1, maximum=self.horizon)
        check_int("channel", channel, 0, maximum=prediction.shape[1] - 1)
        known, network = self._known(X)
        traced = trace(network, known - _level(known), target_unit=channel * self.horizon + step - 1)
        return Explanation.of(float(prediction[step - 1, channel]), traced)

    def _known(self, X: Any) -> tuple[Tensor, nn.Module]:
        """What a forecast reads, standardised, [1, window, channels], and the network that reads it."""
        check_is_fitted(self)
        series = self._last if X is None else self._read(X, reset=False)
        network, like = self._network()
        return self.scale_.standardise(series[-self.window_ :]).unsqueeze(0).to(like), network

    def _read(self, X: Any, reset: bool) -> Tensor:
        """The series as [T, channels]."""
        is_single = numpy.ndim(X) == 1
        if is_single and (reset or self.n_features_in_ == 1):
            values = read_numbers(X, "X").unsqueeze(1)
            self._checked(values.numpy(), reset=reset)
        else:
            values = torch.tensor(self._checked(X, reset=reset))
        if reset:
            self._is_single = is_single
        return values


def _level(known: Tensor) -> Tensor:
    """The mean of the first half of each window: a network reads values without it, so that it may drift."""
    return known[:, : max(known.shape[1] // 2, 1)].mean(1, keepdim=True)
