"""The forecaster, and its form for sktime."""

from __future__ import annotations

import pickle
from typing import Any

import numpy
import pytest

from sab.errors import UserError

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")

from sab.estimators import SABForecaster


def fast(**changes: Any) -> dict[str, Any]:
    """Options with which training takes moments."""
    return {"hidden_size": 8, "max_epochs": 2, "learning_rate": 1e-2, "random_state": 0, "device": "cpu", **changes}


def wave(steps: int) -> Any:
    return numpy.sin(numpy.arange(steps) / 3)


@pytest.fixture(scope="module")
def forecaster() -> SABForecaster:
    return SABForecaster(horizon=6, window=40, **fast(hidden_size=24, max_epochs=20)).fit(10 + wave(300))


def test_a_wave_goes_on(forecaster: SABForecaster) -> None:
    wanted = 10 + wave(306)[-6:]
    assert forecaster.predict().shape == (6,)
    error = numpy.abs(forecaster.predict() - wanted).mean()
    assert error < 0.25 * numpy.abs(10 + wave(300)[-1] - wanted).mean()


def test_a_forecast_starts_from_any_series(forecaster: SABForecaster) -> None:
    numpy.testing.assert_array_equal(forecaster.predict(10 + wave(300)), forecaster.predict())
    other = forecaster.predict(10 + wave(200))
    assert numpy.abs(other - forecaster.predict()).max() > 0.1
    # What it reads is told from its level, so that a series may drift.
    numpy.testing.assert_allclose(forecaster.predict(510 + wave(200)), 500 + other, atol=1e-6)
    assert forecaster.predict([1.0]).shape == (6,)
    numpy.testing.assert_array_equal(pickle.loads(pickle.dumps(forecaster)).predict(), forecaster.predict())


def test_explanation_of_a_forecast(forecaster: SABForecaster) -> None:
    for step in (1, 6):
        explanation = forecaster.explain(step=step)
        assert explanation.shares.shape == (40,)
        assert explanation.prediction == forecaster.predict()[step - 1]
        last = 10 + wave(300)[-1]
        difference = explanation.trace.value * forecaster.scale_.deviation.item()
        numpy.testing.assert_allclose(last + difference, explanation.prediction, atol=1e-6)


def test_channels_are_forecast_together() -> None:
    both = numpy.column_stack([wave(120), 100 + wave(121)[1:]])
    forecaster = SABForecaster(horizon=4, window=20, **fast()).fit(both)
    assert forecaster.predict().shape == (4, 2)
    assert numpy.abs(forecaster.predict().mean(0) - [0, 100]).max() < 3
    assert forecaster.explain(step=2, channel=1).prediction == forecaster.predict()[1, 1]
    with pytest.raises(ValueError, match="3 features, but SABForecaster is expecting 2"):
        forecaster.predict(numpy.zeros((30, 3)))


def test_what_validates_lies_behind_what_is_trained_on() -> None:
    forecaster = SABForecaster(horizon=5)
    forecaster.window_ = 20
    training, validation = forecaster._split(200, 0.1)
    assert training.max() + 20 + 5 <= validation.min() + 20
    assert validation.max() + 20 + 5 == 200
    assert len(forecaster._split(200, 0.0)[1]) == 0
    long = forecaster._split(20_000, 0.5)[1]
    assert len(long) <= 64


def test_short_series() -> None:
    forecaster = SABForecaster(horizon=3, window=400, **fast()).fit(wave(7))
    assert forecaster.window_ == 2
    assert numpy.isfinite(forecaster.predict()).all()
    with pytest.raises(UserError, match=r"X must have at least horizon \+ 4 = 7 steps; got n_samples = 6\."):
        SABForecaster(horizon=3, **fast()).fit(wave(6))
    with pytest.raises(UserError, match="horizon must be a whole number of at least 1"):
        SABForecaster(horizon=0, **fast()).fit(wave(30))
    with pytest.raises(UserError, match="X must be finite"):
        SABForecaster(horizon=2, **fast()).fit([1.0, numpy.nan] * 9)


@pytest.mark.filterwarnings("default")
def test_sktime_asks_for_some_of_the_steps() -> None:
    pytest.importorskip("sktime", reason="needs the extra `examples`")
    from sktime.datasets import load_airline

    from sab.estimators.for_sktime import SktimeForecaster

    y: Any = load_airline()
    found: Any = SktimeForecaster(SABForecaster(window=30, **fast())).fit(y, fh=[1, 4]).predict()
    wanted = SABForecaster(horizon=4, window=30, **fast()).fit(y.to_numpy()).predict()
    numpy.testing.assert_allclose(found.to_numpy(), wanted[[0, 3]])
    assert [str(one) for one in found.index] == ["1961-01", "1961-04"]
