"""scikit-learn's and sktime's own checks of an estimator, with settings that train for moments."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from sab import SABConfig

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")

from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

from sab.estimators import SABClassifier, SABForecaster, SABRegressor

TINY: dict[str, Any] = {"max_epochs": 15, "batch_size": 32, "learning_rate": 2e-2, "memory": SABConfig(k_top=2)}
ESTIMATORS = [
    SABClassifier(hidden_size=16, **TINY),
    # What is checked is how well it fits what it was trained on: 200 rows, none of which it can do without.
    SABRegressor(hidden_size=32, validation_fraction=0.0, **TINY),
    SABForecaster(horizon=2, window=8, hidden_size=4, **{**TINY, "max_epochs": 2}),
]
ROWS_ARE_STEPS = "the rows of X are steps of one series, so a prediction is not made for each of them"
EXPECTED_FAILURES = {
    "check_methods_sample_order_invariance": ROWS_ARE_STEPS,
    "check_methods_subset_invariance": ROWS_ARE_STEPS,
    "check_fit1d": "an array of one dimension is a series of one channel, and what most people have",
}


def expected_failures(estimator: Any) -> dict[str, str]:
    """None but for the forecaster."""
    return EXPECTED_FAILURES if isinstance(estimator, SABForecaster) else {}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures, xfail_strict=True)
@pytest.mark.filterwarnings("default")
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check(estimator)


@pytest.mark.parametrize("name", ["SktimeClassifier", "SktimeRegressor", "SktimeForecaster"])
@pytest.mark.filterwarnings("default")
def test_checks_of_sktime(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sktime", reason="needs the extra `examples`")
    from sktime.utils.estimator_checks import check_estimator

    from sab.estimators import for_sktime

    adapter = getattr(for_sktime, name)
    first, *others = adapter.get_test_params()
    assert others, "test_get_test_params_coverage asks for two"
    # All checks for one of them: the second, another cell, makes no difference to the adapter, and takes as long.
    monkeypatch.setattr(adapter, "get_test_params", classmethod(lambda cls, parameter_set="default": [first]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sktime's own
        found = check_estimator(adapter, verbose=False, tests_to_exclude=["test_get_test_params_coverage"])
    assert {check: told for check, told in found.items() if told != "PASSED"} == {}
    assert len(found) > 50
