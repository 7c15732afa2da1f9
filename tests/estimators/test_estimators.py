"""The classifier and the regressor: forms of input, training, options, explanations, mistakes."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from typing import Any

import numpy
import pytest
import torch

import sab
from sab.errors import UserError
from sab.extras import missing

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")

import joblib
from matplotlib.figure import Figure
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV

from sab.estimators import SABClassifier, SABRegressor
from sab.estimators.series import Scale, is_table, read_series


def fast(**changes: Any) -> dict[str, Any]:
    """Options with which training takes moments."""
    return {"hidden_size": 8, "max_epochs": 3, "learning_rate": 1e-2, "random_state": 0, "device": "cpu", **changes}


def bumps(count: int, seed: int, channels: int = 1) -> tuple[list[Any], Any, Any]:
    """Series of 8 to 16 steps with a bump at the third; whether it goes up, and how high it is."""
    random = numpy.random.default_rng(seed)
    series = [0.2 * random.normal(size=(random.integers(8, 17), channels)) for _ in range(count)]
    heights = random.choice([-1.0, 1.0], count) * random.uniform(1, 3, count)
    for one, height in zip(series, heights, strict=True):
        one[2] += height
    return series, numpy.where(heights > 0, "up", "down"), heights


def table(count: int, seed: int) -> tuple[Any, Any]:
    series, y, _ = bumps(count, seed)
    return numpy.stack([one[:8, 0] for one in series]), y


@pytest.fixture(scope="module")
def classifier() -> SABClassifier:
    series, y, _ = bumps(100, 0)
    return SABClassifier(hidden_size=16, max_epochs=15, learning_rate=1e-2, random_state=0).fit(series, y)


def test_four_lines() -> None:
    (X, y), (X_new, y_new) = table(100, 0), table(50, 1)
    clf = SABClassifier(hidden_size=16, max_epochs=10, learning_rate=1e-2, random_state=0).fit(X, y)
    assert numpy.mean(clf.predict(X_new) == y_new) > 0.9
    assert clf.predict_proba(X_new).shape == (50, 2)
    assert clf.explain(X_new[0]).shares.shape == (8,)


def test_series_of_differing_lengths_are_learned(classifier: SABClassifier) -> None:
    series, y, _ = bumps(60, 1)
    assert classifier.score(series, y) > 0.9
    numpy.testing.assert_allclose(classifier.predict_proba(series).sum(1), 1.0)
    assert classifier.classes_.tolist() == ["down", "up"]
    assert classifier.n_features_in_ == 1


def test_a_prediction_does_not_depend_on_the_others(classifier: SABClassifier) -> None:
    series, _, _ = bumps(12, 2)
    together = classifier.predict_proba(series)
    alone = numpy.concatenate([classifier.predict_proba([one]) for one in series])
    numpy.testing.assert_allclose(together, alone, atol=1e-9)


def test_forms_of_the_same_series_are_the_same() -> None:
    X, y = table(20, 3)
    wanted = SABClassifier(**fast()).fit(X, y).predict_proba(X)
    for form in (X[:, :, None], list(X), list(X[:, :, None]), torch.tensor(X)[:, :, None]):
        fitted = SABClassifier(**fast()).fit(form, y)
        assert fitted.n_features_in_ == 1
        numpy.testing.assert_allclose(fitted.predict_proba(form), wanted, atol=1e-5)
        numpy.testing.assert_allclose(fitted.predict_proba(X), fitted.predict_proba(form), atol=1e-9)


@pytest.mark.parametrize(
    ("X", "wanted"),
    [
        ([[1, 2], [3, 4]], True),
        ([[1, 2], [3]], False),
        ([[[1, 2]], [[3, 4]]], False),
        ([numpy.zeros(2), numpy.zeros(2)], False),
        (numpy.zeros((2, 2)), True),
        (numpy.zeros((2, 2, 1)), False),
        (numpy.array([numpy.zeros(2), numpy.zeros(3)], dtype=object), False),
        (torch.zeros(2, 2), True),
    ],
)
def test_what_is_a_table(X: Any, wanted: bool) -> None:
    assert is_table(X) is wanted


def test_several_channels() -> None:
    series, y, heights = bumps(40, 4, channels=3)
    clf = SABClassifier(**fast(cell="gru", num_layers=2, dropout=0.1)).fit(series, y)
    assert clf.n_features_in_ == 3
    assert clf.predict(series).shape == (40,)
    both = numpy.column_stack([heights, 1000 - heights])
    reg = SABRegressor(**fast(cell="rnn", max_epochs=15)).fit(series, both)
    assert reg.predict(series).shape == (40, 2)
    assert reg.score(series, both) > 0.5
    assert abs(reg.explain(series[0], target=1).prediction - reg.predict(series)[0, 1]) < 1e-6


def test_same_seed_same_result_and_no_other_random_number_is_used() -> None:
    series, y, _ = bumps(20, 5)
    before = torch.get_rng_state()
    first, second = (SABClassifier(**fast()).fit(series, y).predict_proba(series) for _ in range(2))
    numpy.testing.assert_array_equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    other = SABClassifier(**fast(random_state=1)).fit(series, y).predict_proba(series)
    assert not numpy.allclose(first, other)


def test_input_is_standardised_by_what_was_trained_on() -> None:
    series, y, _ = bumps(20, 6)
    larger = [1024 * one for one in series]  # a power of two: no rounding
    numpy.testing.assert_array_equal(
        SABClassifier(**fast()).fit(series, y).predict_proba(series),
        SABClassifier(**fast()).fit(larger, y).predict_proba(larger),
    )
    padded = read_series([numpy.array([1.0, 3.0]), numpy.array([5.0])])
    assert padded.lengths.tolist() == [2, 1]
    flat = Scale.of(torch.tensor([[1.0, 7.0], [3.0, 7.0]]).double())
    assert flat.standardise(torch.tensor([[3.0, 8.0]])).tolist() == [[1.0, 1.0]]


def test_options_travel() -> None:
    series, y, _ = bumps(12, 7)
    memory = sab.SABConfig(k_top=3, k_att=1)
    clf = SABClassifier(memory=memory, **fast())
    cloned: Any = clone(clf)
    assert cloned.get_params()["memory"] == memory
    layer: Any = clf.set_params(cell="gru").fit(series, y).network_.layer  # type: ignore[union-attr]
    assert isinstance(layer, sab.SABGRU)
    assert (layer.config, layer.hidden_size) == (memory, 8)
    layer = SABClassifier(**fast()).fit(series, y).network_.layer
    assert layer.config == sab.SABConfig()


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, microstates: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.scale * (microstates * h.unsqueeze(1)).sum(-1)


def test_a_scorer_that_was_passed_stays_as_it_is() -> None:
    series, y, _ = bumps(12, 8)
    scorer = Scorer()
    memory = sab.SABConfig(scorer=scorer, k_top=2, backend="reference")
    fitted = SABClassifier(memory=memory, **fast(max_epochs=1)).fit(series, y)
    assert scorer.scale.item() == 1.0
    layer: Any = fitted.network_.layer
    assert layer.scorer.scale.item() != 1.0


def test_class_weights() -> None:
    random = numpy.random.default_rng(0)
    X, y = random.normal(size=(60, 5)), numpy.arange(60) % 10 == 0
    options = fast(max_epochs=10)
    plain = SABClassifier(**options).fit(X, y).predict_proba(X)[:, 1].mean()
    balanced = SABClassifier(class_weight="balanced", **options).fit(X, y).predict_proba(X)[:, 1].mean()
    assert plain < 0.25 < balanced


def test_pickled_and_searched(classifier: SABClassifier, tmp_path: Any) -> None:
    series, y, _ = bumps(24, 9)
    wanted = classifier.predict_proba(series)
    joblib.dump(classifier, tmp_path / "model")
    for loaded in (pickle.loads(pickle.dumps(classifier)), joblib.load(tmp_path / "model")):
        numpy.testing.assert_array_equal(loaded.predict_proba(series), wanted)
    search = GridSearchCV(SABClassifier(**fast()), {"memory": [None, sab.SABConfig(k_top=0)]}, cv=2).fit(series, y)
    assert search.predict(series).shape == (24,)


def test_explanation_is_of_the_class_that_was_asked_for(classifier: SABClassifier) -> None:
    series, _, _ = bumps(1, 10)
    (x,) = series
    predicted = classifier.explain(x)
    assert predicted.prediction == classifier.predict([x])[0]
    probabilities = classifier.predict_proba([x])[0]
    explained = [classifier.explain(x, label) for label in classifier.classes_]
    difference = explained[1].trace.value - explained[0].trace.value
    numpy.testing.assert_allclose(difference, numpy.log(probabilities[1] / probabilities[0]), rtol=1e-6)
    for one in explained:
        assert one.shares.shape == one.skip_shares.shape == (len(x),)
        numpy.testing.assert_allclose([one.shares.sum(), one.skip_shares.sum()], 1.0)
        (first, *_), order = one.top(3), numpy.argsort(one.shares)
        assert (first.step, first.share) == (order[-1] + 1, one.shares[order[-1]])
        assert len(one.top(3)) == 3
    figure = predicted.plot()
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 2


def test_explanation_without_a_memory_has_no_skips() -> None:
    series, y, _ = bumps(12, 11)
    clf = SABClassifier(memory=sab.SABConfig(k_top=0), **fast()).fit(series, y)
    assert clf.explain(series[0]).skip_shares.sum() == 0


def test_regressor_keeps_the_scale_of_its_targets() -> None:
    (series, _, heights), (new, _, wanted) = bumps(150, 12), bumps(50, 13)
    reg = SABRegressor(hidden_size=16, max_epochs=25, learning_rate=1e-2, random_state=0)
    reg.fit(series, 1000 + 100 * heights)
    assert reg.score(new, 1000 + 100 * wanted) > 0.8
    assert reg.predict(new).shape == (50,)
    numpy.testing.assert_allclose(reg.explain(new[0]).prediction, reg.predict(new[:1])[0])


def test_training_ends_early_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    X = numpy.random.default_rng(0).normal(size=(40, 3))
    y = numpy.random.default_rng(1).integers(0, 2, 40)  # nothing that could be learned for others
    clf = SABClassifier(**fast(max_epochs=100, patience=3, verbose=True)).fit(X, y)
    assert len(clf.history_) < 100
    best = min(range(len(clf.history_)), key=lambda epoch: clf.history_[epoch].validation or 0.0)
    assert best == len(clf.history_) - 1 - 3
    assert f"epoch {len(clf.history_)}: loss " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cell": "lstmm"}, "cell must be one of lstm, gru, rnn; got 'lstmm'."),
        ({"memory": {"k_top": 1}}, "memory must be a SABConfig, or None; got {'k_top': 1}."),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1; got 0."),
        ({"learning_rate": -1}, "learning_rate must be a finite number above 0; got -1."),
        ({"patience": 0}, "patience must be a whole number of at least 1; got 0."),
        ({"validation_fraction": 1}, "validation_fraction must be a finite number of at least 0 and below 1; got 1."),
        ({"dropout": 1.0}, "dropout must be a finite number of at least 0 and below 1; got 1.0."),
        ({"device": "gpu"}, "device must be auto, or a device of torch; got 'gpu'."),
        ({"device": "cuda"}, "device must be auto or cpu on a machine without a CUDA device; got 'cuda'."),
        ({"verbose": 1}, "verbose must be True or False; got 1."),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], told: str) -> None:
    X, y = table(10, 14)
    with pytest.raises(UserError, match="must be") as error:
        SABClassifier(**fast(**options)).fit(X, y)
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("X", "y", "told"),
    [
        ([numpy.zeros(3), numpy.array([1, numpy.nan])], [0, 1], "X[1] must be finite; it has NaN or infinity."),
        ([numpy.zeros(3), numpy.zeros((3, 2))], [0, 1], "X must have series of equally many channels; got 1 and 2."),
        ([numpy.zeros(3), numpy.zeros(0)], [0, 1], "X[1] must be a series [T] or [T, channels] of at least one step"),
        ([numpy.zeros(3), numpy.array(["a"])], [0, 1], "X[1] must be an array of numbers; got ndarray."),
        (numpy.zeros((0, 3, 1)), [], "X must have at least one series; got none."),
        (numpy.zeros((2, 3, 1)), [0, 1, 1], "y must have an entry for each of 2 series; got shape [3]."),
        (numpy.zeros((2, 3, 1)), ["a", "a"], "y must have at least two classes; got one class, 'a'."),
    ],
)
def test_wrong_series_are_told(X: Any, y: Any, told: str) -> None:
    with pytest.raises(UserError) as error:
        SABClassifier(**fast()).fit(X, y)
    assert str(error.value).startswith(told)


def test_wrong_calls_are_told(classifier: SABClassifier) -> None:
    with pytest.raises(UserError, match=r"X must have the 1 channels of fit; got 2\."):
        classifier.predict(numpy.zeros((1, 5, 2)))
    with pytest.raises(UserError, match=r"label must be one of down, up; got 'left'\."):
        classifier.explain(numpy.zeros(5), "left")
    for call in ("predict", "predict_proba", "explain"):
        with pytest.raises(NotFittedError):
            getattr(SABClassifier(), call)(numpy.zeros((1, 5)))
    X, _ = table(10, 15)
    with pytest.raises(UserError, match="learning_rate must be smaller for these data"):
        SABRegressor(**fast(learning_rate=1e30, cell="rnn", max_epochs=50)).fit(X, numpy.arange(10.0))


@pytest.mark.parametrize(
    ("package", "module", "told"),
    [
        ("sklearn", "sab.estimators", missing("sklearn")),
        ("sktime", "sab.estimators.for_sktime", "sktime is missing; install it: pip install sktime"),
    ],
)
def test_without_a_package_one_sentence(package: str, module: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("sab.estimators")]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(module)
    assert str(error.value) == told
