"""The estimators for sktime: each wraps one of `sab.estimators` and takes all of sktime's forms of data.

They need `pip install sktime`.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

if importlib.util.find_spec("sktime") is None:
    raise ModuleNotFoundError("sktime is missing; install it: pip install sktime", name="sktime")

import pandas
from numpy.typing import NDArray
from sklearn.base import clone
from sktime.classification.base import BaseClassifier
from sktime.forecasting.base import BaseForecaster
from sktime.regression.base import BaseRegressor

from sab.estimators.forecaster import SABForecaster
from sab.estimators.labelled import SABClassifier, SABRegressor

_TAGS = {"authors": "The sab developers", "maintainers": "The sab developers", "python_dependencies": ["torch"]}
_READS = {
    **_TAGS,
    "X_inner_mtype": "df-list",  # a table [T, channels] for each series
    "capability:multivariate": True,
    "capability:unequal_length": True,
}
_TINY: dict[str, Any] = {"hidden_size": 4, "max_epochs": 1, "batch_size": 8, "random_state": 0}
"""Options with which sktime's checks are quick."""


class SktimeClassifier(BaseClassifier):
    """A `SABClassifier` as a classifier of sktime; `estimator` is one with the options that are wanted.

    >>> from sab.estimators import SABClassifier
    >>> from sab.estimators.for_sktime import SktimeClassifier
    >>> from sktime.datasets import load_unit_test
    >>> X, y = load_unit_test(split="train")
    >>> classifier = SktimeClassifier(SABClassifier(max_epochs=2, random_state=0)).fit(X, y)
    >>> len(classifier.predict(X))
    20
    """

    _tags: ClassVar[dict[str, Any]] = {**_READS, "capability:predict_proba": True}

    def __init__(self, estimator: SABClassifier | None = None):
        self.estimator = estimator
        super().__init__()

    def _fit(self, X: list[pandas.DataFrame], y: NDArray[Any]) -> SktimeClassifier:
        estimator: Any = clone(self.estimator or SABClassifier())
        self.estimator_ = estimator.fit([one.to_numpy() for one in X], y)
        return self

    def _predict(self, X: list[pandas.DataFrame]) -> NDArray[Any]:
        return self.estimator_.predict([one.to_numpy() for one in X])

    def _predict_proba(self, X: list[pandas.DataFrame]) -> NDArray[Any]:
        return self.estimator_.predict_proba([one.to_numpy() for one in X])

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> Any:
        """What sktime's checks make estimators with."""
        return [{"estimator": SABClassifier(**_TINY)}, {"estimator": SABClassifier(cell="gru", **_TINY)}]


class SktimeRegressor(BaseRegressor):
    """A `SABRegressor` as a regressor of sktime; `estimator` is one with the options that are wanted.

    >>> from sab.estimators import SABRegressor
    >>> from sab.estimators.for_sktime import SktimeRegressor
    >>> from sktime.datasets import load_unit_test
    >>> X, y = load_unit_test(split="train")
    >>> regressor = SktimeRegressor(SABRegressor(max_epochs=2, random_state=0)).fit(X, y.astype(float))
    >>> len(regressor.predict(X))
    20
    """

    _tags: ClassVar[dict[str, Any]] = _READS

    def __init__(self, estimator: SABRegressor | None = None):
        self.estimator = estimator
        super().__init__()

    def _fit(self, X: list[pandas.DataFrame], y: NDArray[Any]) -> SktimeRegressor:
        estimator: Any = clone(self.estimator or SABRegressor())
        self.estimator_ = estimator.fit([one.to_numpy() for one in X], y)
        return self

    def _predict(self, X: list[pandas.DataFrame]) -> NDArray[Any]:
        return self.estimator_.predict([one.to_numpy() for one in X])

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> Any:
        """What sktime's checks make estimators with."""
        return [{"estimator": SABRegressor(**_TINY)}, {"estimator": SABRegressor(cell="gru", **_TINY)}]


class SktimeForecaster(BaseForecaster):
    """A `SABForecaster` as a forecaster of sktime; `estimator` is one with the options that are wanted.

    Its `horizon` is not one of them: it is as long as the `fh` that `fit` is called with asks for.

    >>> from sab.estimators import SABForecaster
    >>> from sab.estimators.for_sktime import SktimeForecaster
    >>> from sktime.datasets import load_airline
    >>> y = load_airline()
    >>> forecaster = SktimeForecaster(SABForecaster(max_epochs=2, random_state=0)).fit(y, fh=[1, 2, 12])
    >>> len(forecaster.predict())
    3
    """

    _tags: ClassVar[dict[str, Any]] = {
        **_TAGS,
        "y_inner_mtype": "pd.DataFrame",
        "capability:multivariate": True,
        "capability:exogenous": False,
        "capability:insample": False,
        "requires-fh-in-fit": True,
    }

    def __init__(self, estimator: SABForecaster | None = None):
        self.estimator = estimator
        super().__init__()

    def _fit(self, y: pandas.DataFrame, X: Any, fh: Any) -> SktimeForecaster:
        horizon = int(fh.to_relative(self.cutoff)[-1])
        estimator: Any = clone(self.estimator or SABForecaster())
        self.estimator_ = estimator.set_params(horizon=horizon).fit(y.to_numpy())
        return self

    def _predict(self, fh: Any, X: Any) -> pandas.DataFrame:
        rows = fh.to_relative(self.cutoff).to_numpy().astype(int) - 1
        columns, index = self._get_varnames(), fh.to_absolute_index(self.cutoff)
        return pandas.DataFrame(self.estimator_.predict()[rows], index=index, columns=columns)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> Any:
        """What sktime's checks make estimators with."""
        return [{"estimator": SABForecaster(window=5, **_TINY)}, {"estimator": SABForecaster(cell="gru", **_TINY)}]
