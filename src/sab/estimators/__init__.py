"""Estimators for scikit-learn: a classifier, a regressor and a forecaster of series, each a SAB layer with a readout.

They need the extra `sklearn`; `sab.estimators.for_sktime` has them as estimators of sktime.
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "sklearn":
        raise
    raise ModuleNotFoundError(
        "sab.estimators needs scikit-learn; install the extra `sklearn`: pip install 'sab[sklearn]'", name="sklearn"
    ) from None

from sab.estimators.explanation import Credited, Explanation
from sab.estimators.forecaster import SABForecaster
from sab.estimators.labelled import SABClassifier, SABRegressor

__all__ = ["Credited", "Explanation", "SABClassifier", "SABForecaster", "SABRegressor"]
