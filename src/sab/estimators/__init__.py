"""Estimators for scikit-learn: a classifier, a regressor and a forecaster of series, each a SAB layer with a readout.

They need the extra `sklearn`; `sab.estimators.for_sktime` has them as estimators of sktime.
"""

from sab.extras import require

require("sklearn")

from sab.estimators.explanation import Credited, Explanation
from sab.estimators.forecaster import SABForecaster
from sab.estimators.labelled import SABClassifier, SABRegressor

__all__ = ["Credited", "Explanation", "SABClassifier", "SABForecaster", "SABRegressor"]
