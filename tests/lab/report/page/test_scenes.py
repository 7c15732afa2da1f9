from __future__ import annotations

import pytest
import torch

from sab.lab.report.page.scenes import predictions_of, scene_of, ticks, unknown_scene
from sab.lab.tasks import CIFAR10, MNIST, PTB, Adding, Copying, Recall
from sab.lab.tasks.cifar10 import NAMES
from sab.lab.tasks.mnist import permutation


def test_copying() -> None:
    task = Copying(length=200)
    inputs, targets = task.batch(0, 0, 3, "valid")
    scene = scene_of(task, inputs, targets, row=1)
    digits = [str(symbol) for symbol in inputs[:10, 1].tolist()]
    assert scene.seen[:10] == digits
    assert scene.seen[209] == "?"
    assert scene.right == dict(zip(range(211, 221), digits, strict=True))
    assert scene.quiet == frozenset(range(11, 210))
    outputs = torch.nn.functional.one_hot(targets, 9).float()
    assert predictions_of(task, outputs[:, 1]) == scene.right


def test_quiet_steps_have_little_room() -> None:
    task = Copying(length=2000)
    scene = scene_of(task, *task.batch(0, 0, 1, "valid"))
    widths, positions = scene.widths, scene.positions
    assert sum(width for step, width in enumerate(widths, 1) if step in scene.quiet) < 100
    assert all(width == 1.0 for step, width in enumerate(widths, 1) if step not in scene.quiet)
    assert positions == sorted(positions)
    named = ticks(scene)
    assert {"1", "2,020"} <= set(named["ticktext"])
    gaps = [after - before for before, after in zip(named["tickvals"], named["tickvals"][1:], strict=False)]
    assert min(gaps) >= sum(widths) / 11


def test_adding() -> None:
    task = Adding(length=10)
    inputs, targets = task.batch(0, 0, 2, "valid")
    scene = scene_of(task, inputs, targets)
    values = inputs[:, 0, 0].tolist()
    assert scene.values == values
    assert sum(values[step - 1] for step in scene.marked) == pytest.approx(targets[0].item())
    assert scene.right == {10: f"{targets[0]:.2f}"}
    assert predictions_of(task, torch.full((10, 1), 1.234)) == {10: "1.23"}


def test_recall() -> None:
    task = Recall(length=20, pairs=2, keys=3)
    inputs, targets = task.batch(0, 0, 2, "valid")
    scene = scene_of(task, inputs, targets, row=1)
    shown = [sign for sign in scene.seen[:-2] if sign != "·"]
    assert len(shown) == 4
    values = {shown[0]: shown[1], shown[2]: shown[3]}
    assert scene.right == {step: values[f"k{scene.seen[step - 1][:-1]}"] for step in (19, 20)}
    assert len(scene.quiet) == 14
    outputs = torch.zeros(20, 3)
    outputs[-2:] = torch.nn.functional.one_hot(targets[:, 1], 3).float()
    assert predictions_of(task, outputs) == scene.right


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.usefixtures("tiny_data")
def test_mnist(permuted: bool) -> None:
    task = MNIST(permuted=permuted)
    inputs, targets = task.batch(0, 0, 2, "valid")
    scene = scene_of(task, inputs, targets)
    assert scene.places == (permutation().tolist() if permuted else list(range(784)))
    assert scene.values == inputs[:, 0, 0].tolist()
    assert scene.right == {784: str(targets[0].item())}
    assert predictions_of(task, torch.eye(10)[[3] * 784]) == {784: "3"}


@pytest.mark.usefixtures("tiny_data")
def test_cifar10() -> None:
    task = CIFAR10()
    inputs, targets = task.batch(0, 0, 2, "valid")
    scene = scene_of(task, inputs, targets)
    assert scene.places == list(range(1024))
    assert scene.values == inputs[:, 0].mean(-1).tolist()
    assert scene.right == {1024: NAMES[int(targets[0])]}
    assert predictions_of(task, torch.eye(10)[[3] * 1024]) == {1024: "cat"}


@pytest.mark.usefixtures("tiny_data")
def test_text() -> None:
    task = PTB(length=30)
    inputs, targets = task.batch(0, 0, 2, "valid")
    scene = scene_of(task, inputs, targets)
    shown = task.decode(inputs[:, 0].tolist()).replace(" ", "·").replace("\n", "↵")
    assert "".join(scene.seen) == shown
    assert [scene.right[step] for step in range(1, 30)] == list(shown[1:])
    outputs = torch.nn.functional.one_hot(targets[:, 0], task.output_size).float()
    assert predictions_of(task, outputs) == scene.right
    assert not scene.quiet


def test_a_sequence_whose_data_are_not_here() -> None:
    assert unknown_scene(Adding(length=7)).steps == 7
