"""What every task in the registry promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sab.errors import UserError
from sab.lab.models import ModelConfig
from sab.lab.tasks import TASKS, Adding, Copying, Task
from sab.lab.training.config import TrainConfig
from sab.lab.training.run import RunConfig

pytestmark = pytest.mark.usefixtures("tiny_data")
every_task = pytest.mark.parametrize("task", [task() for task in TASKS.values()], ids=list(TASKS))


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_task
def test_a_batch_depends_on_seed_split_and_index_alone(task: Task) -> None:
    batch = task.batch(3, 7, 4, "valid")
    torch.rand(5)
    task.batch(3, 8, 4, "valid")
    assert same(batch, task.batch(3, 7, 4, "valid"))
    assert not same(batch, task.batch(4, 7, 4, "valid"))
    assert not same(batch, task.batch(3, 8, 4, "valid"))
    assert not same(batch, task.batch(3, 7, 4, "test"))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**62), index=st.integers(0, 2**40))
def test_seed_and_index_do_not_merge(seed: int, index: int) -> None:
    task = Adding(length=4)
    assert not same(task.batch(seed, index, 2), task.batch(seed + 1, index, 2))
    assert not same(task.batch(seed, index, 2), task.batch(seed, index + 1, 2))
    assert not same(task.batch(seed, index + 1, 2), task.batch(seed + 1, index, 2))


@every_task
def test_shapes_follow_what_the_task_declares(task: Task) -> None:
    inputs, targets = task.batch(0, 0, 3, dtype=torch.float64)
    size = (task.input_size,) if task.encoding == "vector" else ()
    assert inputs.shape == (task.steps, 3, *size)
    assert inputs.dtype == (torch.float64 if task.encoding == "vector" else torch.int64)
    outputs = torch.zeros(task.steps, 3, task.output_size, dtype=torch.float64)
    assert task.loss(outputs, targets).shape == ()
    metrics = task.metrics(outputs, targets)
    assert task.headline.metric in metrics
    assert all(value.shape == () for value in metrics.values())
    assert 1 <= task.attending_steps[0] <= task.attending_steps[-1] <= task.steps


@every_task
def test_a_task_is_its_options_and_its_recipe_names_real_ones(task: Task) -> None:
    assert is_dataclass(task)
    assert TASKS[task.name](**task.options()) == task
    known = {*ModelConfig().options(), *asdict(TrainConfig())}
    assert task.recipe.keys() <= known
    assert RunConfig.default(task).options().items() >= task.recipe.items()
    assert not task.options().keys() & known, "an option of the task would hide one of training"
    assert task.name in task.label


@every_task
def test_reaching_a_threshold_follows_the_direction(task: Task) -> None:
    better, worse = (0.9, 0.1) if task.headline.higher_is_better else (0.1, 0.9)
    assert task.headline.reaches(better, 0.5)
    assert task.headline.reaches(0.5, 0.5)
    assert not task.headline.reaches(worse, 0.5)
    assert not task.headline.reaches(float("nan"), 0.5)
    assert not task.headline.reaches(task.headline.chance, task.headline.solved)


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        (lambda task: task.batch(-1, 0, 2), "seed"),
        (lambda task: task.batch(0, -1, 2), "index"),
        (lambda task: task.batch(0, 0, 0), "batch_size"),
        (lambda task: task.batch(0, 0, 2, "training"), "split"),
        (lambda task: task.batch("0", 0, 2), "seed"),
        (lambda task: replace(task, length=1), "length"),
        (lambda task: replace(task, length=2.5), "length"),
        (lambda task: replace(task, train_lengths="long"), "train_lengths"),
        (lambda _: Copying(length=0), "length"),
        (lambda _: Copying(length=True), "length"),
        (lambda _: Copying(encoding="binary"), "encoding"),  # pyright: ignore[reportArgumentType]
        (lambda _: Copying(train_lengths=3), "train_lengths"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_arguments_are_named(wrong: Callable[[Task], object], option: str) -> None:
    with pytest.raises(UserError, match=f"^{option} must be") as caught:
        wrong(Adding())
    assert caught.value.option == option
