from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sab.lab.tasks import Adding, Copying
from sab.lab.tasks.lengths import Lengths, grid


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40), index=st.integers(0, 1000))
def test_layout(length: int, index: int) -> None:
    inputs, targets = Copying(length=length).batch(0, index, 3)
    assert inputs.shape == targets.shape == (length + 20, 3)
    digits = inputs[:10]
    assert digits.min() >= 1
    assert digits.max() <= 8
    assert (inputs[10 : 10 + length - 1] == 0).all()
    assert (inputs[10 + length - 1] == 9).all()
    assert (inputs[-10:] == 0).all()
    assert (targets[:-10] == 0).all()
    assert torch.equal(targets[-10:], digits)


def test_every_digit_is_as_likely() -> None:
    inputs, _ = Copying(length=1).batch(0, 0, 4000)
    shares = torch.bincount(inputs[:10].flatten(), minlength=10)[1:9] / 40_000
    assert shares.sub(1 / 8).abs().max() < 0.01


def test_the_right_answer_is_perfect_and_a_guess_is_at_chance() -> None:
    task = Copying(length=5)
    _, targets = task.batch(0, 0, 500)
    right = task.metrics(F.one_hot(targets, task.output_size).double() * 100, targets)
    assert right["accuracy_last10"] == 1.0
    assert right["cross_entropy"] < 1e-6
    outputs = torch.zeros(task.steps, 500, task.output_size)
    outputs[..., 3] = 1e-3  # always the same digit
    guess = task.metrics(outputs, targets)
    assert guess["accuracy_last10"].item() == pytest.approx(task.headline.chance, abs=0.02)
    assert guess["cross_entropy_last10"].item() == pytest.approx(math.log(9), abs=0.01)


def test_the_memoryless_optimum() -> None:
    """Blank where it is certain and even odds on the digits: the baseline 10 ln 8 / (T + 20) of the literature."""
    task = Copying(length=30)
    _, targets = task.batch(0, 0, 8)
    outputs = torch.full((task.steps, 8, task.output_size), -1e4)
    outputs[:-10, :, 0] = 0.0
    outputs[-10:, :, 1:] = 0.0
    assert task.loss(outputs, targets).item() == pytest.approx(10 * math.log(8) / (task.length + 20), rel=1e-5)
    assert task.metrics(outputs, targets)["cross_entropy_last10"].item() == pytest.approx(math.log(8), rel=1e-5)


def test_the_last_ten_alone_make_the_headline() -> None:
    task = Copying(length=5)
    _, targets = task.batch(0, 0, 4)
    outputs = F.one_hot(targets, task.output_size).float()
    outputs[:-10] = torch.rand_like(outputs[:-10])
    assert task.metrics(outputs, targets)["accuracy_last10"] == 1.0
    outputs[-10] = -outputs[-10]
    assert task.metrics(outputs, targets)["accuracy_last10"].item() == pytest.approx(0.9)


def test_the_figure_shows_the_marker_and_the_ten_recalls() -> None:
    task = Copying(length=5)
    inputs, _ = task.batch(0, 0, 1)
    assert len(task.attending_steps) == 11
    assert inputs[task.attending_steps[0] - 1] == 9
    assert task.attending_steps[-1] == task.steps
    assert task.dependency == 15


@pytest.mark.parametrize("task", [Copying(length=40), Adding(length=40)], ids=lambda task: task.name)
@pytest.mark.parametrize("lengths", ["uniform", "grid"])
def test_other_lengths_are_for_training_alone(task: Copying | Adding, lengths: Lengths) -> None:
    shortest, more = (1, 20) if task.name == "copying" else (2, 0)
    task = replace(task, train_lengths=lengths)
    batches = [task.batch(0, index, 2) for index in range(400)]
    allowed = range(shortest, 41) if lengths == "uniform" else grid(shortest, 40)
    assert {len(inputs) for inputs, _ in batches} == {length + more for length in allowed}, "every length is met"
    for inputs, targets in batches:
        if task.name == "copying":
            assert (inputs[-11] == 9).all()
            assert torch.equal(targets[-10:], inputs[:10])
        else:
            torch.testing.assert_close(inputs.prod(-1).sum(0), targets)
    assert all(
        len(task.batch(0, index, 2, split)[0]) == task.steps for index in range(9) for split in ("valid", "test")
    )


@given(shortest=st.integers(1, 5), more=st.integers(0, 5000))
def test_the_grid_is_even_and_ends_at_the_length(shortest: int, more: int) -> None:
    lengths = grid(shortest, shortest + more)
    assert len(lengths) == len(set(lengths)) == min(16, more + 1)
    assert lengths[-1] == shortest + more
    assert len(lengths) == 1 or lengths[0] == shortest
    gaps = [after - before for before, after in itertools.pairwise(lengths)]
    assert not gaps or max(gaps) - min(gaps) <= 1
