from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sab.lab.tasks import Adding


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
