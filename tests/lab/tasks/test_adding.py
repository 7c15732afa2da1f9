from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sab.errors import UserError
from sab.lab.tasks import Adding
from sab.lab.tasks.lengths import Lengths, grid


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 41), index=st.integers(0, 1000))
def test_layout(length: int, index: int) -> None:
    inputs, targets = Adding(length=length).batch(0, index, 5)
    values, mask = inputs.unbind(-1)
    assert values.min() >= 0
    assert values.max() < 1
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    half = length // 2
    assert (mask[:half].sum(0) == 1).all()
    assert (mask[half:].sum(0) == 1).all()
    assert targets.shape == (5,)
    torch.testing.assert_close((values * mask).sum(0), targets)


def test_every_place_can_be_marked() -> None:
    inputs, _ = Adding(length=5).batch(0, 0, 500)
    assert (inputs[..., 1].sum(1) > 0).all()


def test_only_the_last_step_counts_and_the_mean_is_at_chance() -> None:
    task = Adding(length=6)
    _, targets = task.batch(0, 0, 5000)
    outputs = torch.rand(6, 5000, 1)
    outputs[-1] = 1.0
    assert task.metrics(outputs, targets)["mse"].item() == pytest.approx(task.headline.chance, rel=0.05)
    outputs[-1, :, 0] = targets
    assert task.loss(outputs, targets) == 0


@pytest.mark.parametrize(("lengths", "met"), [("uniform", set(range(2, 41))), ("grid", set(grid(2, 40)))])
def test_other_lengths_are_for_training_alone(lengths: Lengths, met: set[int]) -> None:
    task = Adding(length=40, train_lengths=lengths)
    batches = [task.batch(0, index, 5) for index in range(400)]
    assert {len(inputs) for inputs, _ in batches} == met
    for inputs, targets in batches:
        torch.testing.assert_close(inputs.prod(-1).sum(0), targets)
    assert all(len(task.batch(0, index, 2, split)[0]) == 40 for index in range(20) for split in ("valid", "test"))


def test_a_wrong_name_of_lengths_is_told() -> None:
    with pytest.raises(UserError, match=r"^train_lengths must be one of fixed, uniform, grid; got 'long'"):
        Adding(train_lengths="long")  # pyright: ignore[reportArgumentType]
