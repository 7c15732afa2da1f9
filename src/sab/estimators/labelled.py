"""A classifier and a regressor of series: one answer for each."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from sab.config import SABConfig
from sab.errors import UserValueError, check_int
from sab.estimators.base import SABEstimator
from sab.estimators.explanation import Explanation
from sab.estimators.network import Reader
from sab.estimators.series import Scale, Series, is_table, read_numbers, read_series
from sab.estimators.training import split
from sab.tracing import trace

PREDICTED_AT_ONCE = 256
"""Rows of a batch in which nothing is trained."""


class _LabelledEstimator(SABEstimator):
    """What reads series to their ends and then gives one answer for each."""

    scale_: Scale
    """Mean and deviation of each channel in the series that `fit` was called with."""
    fitted_on_table_: bool

    def _read_training(self, X: Any, y: Any, **options: Any) -> tuple[Series, NDArray[Any]]:
        """The series and the answers that `fit` was called with."""
        self.fitted_on_table_ = is_table(X)
        if self.fitted_on_table_:
            table, y = self._checked(X, y, **options)
            series = _of_table(table)
        else:
            series = read_series(X)
            self.n_features_in_ = series.channels
            y = numpy.asarray(y)
            if y.ndim == 0 or len(y) != len(series.lengths):
                given = f"shape {[*y.shape]}"
                raise UserValueError(
                    f"y must have an entry for each of {len(series.lengths)} series; got {given}.", "y"
                )
        is_real = torch.arange(series.values.shape[1]) < series.lengths.unsqueeze(1)
        self.scale_ = Scale.of(series.values[is_real])
        return series, y

    def _read(self, X: Any) -> Series:
        """The series that a prediction is asked for, which must be of the kind that `fit` was called with."""
        check_is_fitted(self)
        if is_table(X) and self.fitted_on_table_:
            return _of_table(self._checked(X, reset=False))
        series = read_series(numpy.asarray(X) if is_table(X) else X)
        channels = len(self.scale_.mean)
        if series.channels != channels:
            raise UserValueError(f"X must have the {channels} channels of fit; got {series.channels}.", "X")
        return series

    def _fit_reader(self, series: Series, outputs: int, answers: Tensor, groups: Tensor, loss: Any) -> None:
        device = self._device()
        values, lengths = self.scale_.standardise(series.values).float().to(device), series.lengths
        answers, is_equal = answers.to(device), len(lengths.unique()) == 1

        def loss_of(network: torch.nn.Module, rows: Tensor) -> Tensor:
            some = Series(values, lengths).cut(rows)
            given = network(some.values, None if is_equal else some.lengths.to(device))
            return loss(given, answers[rows])

        self._train(
            series.channels,
            lambda layer, dropout: Reader(layer, outputs, dropout),
            loss_of,
            lambda fraction: split(groups, fraction),
        )

    @torch.no_grad()
    def _outputs(self, X: Any) -> Tensor:
        """The network's outputs for each series, [n, outputs], in float64."""
        series, (network, like) = self._read(X), self._network()
        values = self.scale_.standardise(series.values)
        found = []
        for rows in torch.arange(len(series.lengths)).split(PREDICTED_AT_ONCE):
            some = Series(values, series.lengths).cut(rows)
            found.append(network(some.values.to(like), some.lengths.to(like.device)).double().cpu())
        return torch.cat(found)

    def _explain(self, x: Any, unit: int, prediction: Any) -> Explanation:
        series = self._read([numpy.asarray(x)])
        network, like = self._network()
        values = self.scale_.standardise(series.values).to(like)
        return Explanation.of(prediction, trace(network, values, target_unit=unit))


def _of_table(table: NDArray[Any]) -> Series:
    return Series(torch.tensor(table).unsqueeze(2), torch.full((len(table),), table.shape[1]))


class SABClassifier(ClassifierMixin, _LabelledEstimator):
    """A classifier of series: a SAB layer reads each to its end, and a linear readout gives its class.

    `X` may be a table [n, T], a row for each series of one channel; an array [n, T, channels]; or a list of arrays
    [T] or [T, channels] of differing lengths. Inputs are standardised with what `fit` was called with.
    """

    classes_: NDArray[Any]
    """The classes, in the order of the columns of `predict_proba`."""

    def __init__(
        self,
        *,
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        cell: Literal["lstm", "gru", "rnn"] = "lstm",
        hidden_size: int = 64,
        num_layers: int = 1,
        dropout: float = 0.0,
        memory: SABConfig | None = None,
        learning_rate: float = 3e-3,
        batch_size: int = 16,
        max_epochs: int = 200,
        patience: int = 50,
        validation_fraction: float = 0.2,
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
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any) -> Self:
        """Train on series and the class of each, [n]."""
        series, y = self._read_training(X, y)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, found = numpy.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise UserValueError(
                f"y must have at least two classes; got one class, {self.classes_.tolist()[0]!r}.", "y"
            )
        labels = torch.from_numpy(found)
        weight = None
        if self.class_weight is not None:
            balance = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            weight = torch.from_numpy(balance).float().to(self._device())
        self._fit_reader(
            series, len(self.classes_), labels, labels, lambda given, wanted: cross_entropy(given, wanted, weight)
        )
        return self

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """The probability of each class for each series, [n, classes]."""
        return self._outputs(X).softmax(-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each series, [n]."""
        found = self._outputs(X).argmax(-1).numpy()
        return self.classes_[found]

    def explain(self, x: Any, label: Any = None) -> Explanation:
        """Which steps of one series, [T] or [T, channels], the prediction goes back to.

        What is explained is the output of the class `label`, or of the predicted one where that is None.
        """
        check_is_fitted(self)
        if label is None:
            (label,) = self.predict([numpy.asarray(x)])
        (units,) = numpy.nonzero(self.classes_ == label)
        if len(units) == 0:
            raise UserValueError(f"label must be one of {', '.join(map(str, self.classes_))}; got {label!r}.", "label")
        return self._explain(x, int(units[0]), label)


class SABRegressor(RegressorMixin, _LabelledEstimator):
    """A regressor of series: a SAB layer reads each to its end, and a linear readout gives a number, or several.

    `X` may be a table [n, T], a row for each series of one channel; an array [n, T, channels]; or a list of arrays
    [T] or [T, channels] of differing lengths. Inputs and targets are standardised with what `fit` was called with.
    """

    target_scale_: Scale
    """Mean and deviation of each target."""

    def fit(self, X: Any, y: Any) -> Self:
        """Train on series and the target of each, [n] or [n, targets]."""
        series, y = self._read_training(X, y, multi_output=True, y_numeric=True)
        targets = read_numbers(y, "y")
        self._is_single = targets.dim() == 1
        targets = targets.reshape(len(targets), -1)
        self.target_scale_ = Scale.of(targets)
        one_group = torch.zeros(len(targets))
        answers = self.target_scale_.standardise(targets).float()
        self._fit_reader(series, targets.shape[1], answers, one_group, mse_loss)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The targets of each series, [n] or [n, targets]."""
        outputs = self._outputs(X)
        found = self.target_scale_.restore(outputs).numpy()
        return found[:, 0] if self._is_single else found

    def explain(self, x: Any, target: int = 0) -> Explanation:
        """Which steps of one series, [T] or [T, channels], the prediction goes back to; `target` is its column."""
        prediction = numpy.atleast_2d(self.predict([numpy.asarray(x)]))[0]
        check_int("target", target, 0, maximum=len(prediction) - 1)
        return self._explain(x, target, float(prediction[target]))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
