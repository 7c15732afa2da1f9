from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from sab.errors import UserError
from sab.lab.tasks import Recall
from sab.lab.tasks.lengths import Lengths, grid


def check(task: Recall, inputs: Tensor, targets: Tensor) -> None:
    """Whether every row is a sequence of the task, read step by step."""
    steps, rows = inputs.shape
    assert targets.shape == (task.pairs, rows)
    for row in range(rows):
        symbols = inputs[:, row].tolist()
        shown: dict[int, int] = {}
        step = 0
        while step < steps - task.pairs:
            if symbols[step] == 0:
                step += 1
                continue
            key, value = symbols[step] - 1, symbols[step + 1] - task.first_value
            assert 0 <= key < task.keys, "a pair begins with its key"
            assert 0 <= value < task.keys, "the value follows at once"
            assert key not in shown, "no key is shown twice"
            assert step + 1 < steps - task.pairs, "a pair ends before the questions begin"
            shown[key] = value
            step += 2
        assert len(shown) == task.pairs
        asked = [symbol - task.first_question for symbol in symbols[-task.pairs :]]
        assert sorted(asked) == sorted(shown), "all keys are asked for, each once"
        assert [shown[key] for key in asked] == targets[:, row].tolist()


@st.composite
def tasks(draw: st.DrawFn) -> Recall:
    keys = draw(st.integers(1, 9))
    pairs = draw(st.integers(1, keys))
    return Recall(length=draw(st.integers(3 * pairs, 3 * pairs + 20)), pairs=pairs, keys=keys)


@settings(max_examples=50, deadline=None)
@given(task=tasks(), seed=st.integers(0, 1000), index=st.integers(0, 1000), split=st.sampled_from(["train", "test"]))
def test_every_question_is_about_a_pair_that_was_shown(task: Recall, seed: int, index: int, split: str) -> None:
    inputs, targets = task.batch(seed, index, 4, split)  # pyright: ignore[reportArgumentType]
    assert inputs.shape == (task.length, 4)
    assert inputs.max() < task.input_size
    check(task, inputs, targets)
    again = task.batch(seed, index, 4, split)  # pyright: ignore[reportArgumentType]
    assert torch.equal(again[0], inputs)
    assert torch.equal(again[1], targets)


def test_the_default_is_the_table_s() -> None:
    task = Recall()
    assert (task.steps, task.pairs, task.keys, task.input_size, task.output_size) == (200, 8, 16, 49, 16)
    check(task, *task.batch(0, 0, 64))
    assert task.headline.chance == 1 / 16
    assert Recall(keys=10).headline.chance == 1 / 10


def test_places_orders_and_values_are_all_as_likely() -> None:
    """With 2 pairs of 3 keys in 7 steps there are 3 ways to place two pairs among 5 steps."""
    task = Recall(length=7, pairs=2, keys=3)
    inputs, targets = task.batch(0, 0, 18_000)
    is_blank = (inputs[:5] == 0).t().tolist()
    places = Counter(tuple(row).index(True) for row in is_blank)
    assert set(places) == {0, 2, 4}
    assert all(abs(count / 18_000 - 1 / 3) < 0.02 for count in places.values())
    first_key = inputs[:5].masked_fill(inputs[:5] >= task.first_value, 0)
    order = Counter(tuple(symbol for symbol in row if symbol) for row in first_key.t().tolist())
    assert len(order) == 6
    assert all(abs(count / 18_000 - 1 / 6) < 0.02 for count in order.values())
    shares = torch.bincount(targets.flatten(), minlength=3) / targets.numel()
    assert shares.sub(1 / 3).abs().max() < 0.02
    asked_as_shown = (inputs[-2:] - task.first_question + 1 == torch.stack([_keys(inputs)[0], _keys(inputs)[1]])).all(0)
    assert asked_as_shown.double().mean().item() == pytest.approx(0.5, abs=0.02)


def _keys(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The two keys of each row of a task with 3 keys, in the order in which they are shown."""
    places = ((inputs > 0) & (inputs <= 3)).float()
    first = places.argmax(0)
    last = len(inputs) - 1 - places.flip(0).argmax(0)
    return inputs.gather(0, first.unsqueeze(0))[0], inputs.gather(0, last.unsqueeze(0))[0]


def test_the_questions_alone_count() -> None:
    task = Recall(length=30, pairs=4, keys=5)
    _, targets = task.batch(0, 0, 2000)
    outputs = torch.randn(30, 2000, 5)
    outputs[-4:] = F.one_hot(targets, 5).float() * 100
    assert task.metrics(outputs, targets)["accuracy"] == 1.0
    assert task.loss(outputs, targets) < 1e-6
    outputs[-4] = -outputs[-4]
    assert task.metrics(outputs, targets)["accuracy"].item() == pytest.approx(0.75)
    outputs[-4:] = torch.tensor([1.0, 0, 0, 0, 0])
    assert task.metrics(outputs, targets)["accuracy"].item() == pytest.approx(task.headline.chance, abs=0.02)


@pytest.mark.parametrize("lengths", ["uniform", "grid"])
def test_other_lengths_are_for_training_alone(lengths: Lengths) -> None:
    task = Recall(length=60, pairs=2, keys=4, train_lengths=lengths)
    batches = [task.batch(0, index, 2) for index in range(500)]
    allowed = range(6, 61) if lengths == "uniform" else grid(6, 60)
    assert {len(inputs) for inputs, _ in batches} == set(allowed), "every length is met"
    for inputs, targets in batches:
        check(task, inputs, targets)
    assert all(len(task.batch(0, index, 2, split)[0]) == 60 for index in range(9) for split in ("valid", "test"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: Recall(length=23), "length must be a whole number of at least 24; got 23"),
        (lambda: Recall(pairs=17), "pairs must be a whole number of at least 1, and at most 16; got 17"),
        (lambda: Recall(pairs=0), "pairs must be"),
        (lambda: Recall(keys=0), "keys must be"),
        (lambda: Recall(keys=2.5), "keys must be"),  # pyright: ignore[reportArgumentType]
        (lambda: Recall(train_lengths="long"), "train_lengths must be"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_options_are_named(wrong: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}"):
        wrong()
