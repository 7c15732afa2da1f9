from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from sab.lab.models import ModelConfig
from sab.lab.report.figures import attention_map, learning_curves, mean_attention, save
from sab.lab.tasks import Adding, Copying, Task
from sab.lab.training import Run, TrainConfig, train
from sab.lab.training.checkpoint import load_model

TRAINING = TrainConfig(iterations=4, batch_size=3, eval_every=2, eval_batches=1)


def trained(out: Path, task: Task, **options: Any) -> Run:
    model = ModelConfig.from_options({"hidden_size": 6, "k_top": 3, "k_trunc": 4, **options})
    train(task, model, TRAINING, out)
    return Run.open(out)


def test_mean_attention_against_a_plain_loop(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", Copying(length=3), weighting="softmax_sink")
    inputs, _ = run.config.task.batch(0, 0, 3, "test")
    _, _, attention = load_model(run, torch.device("cpu"))(inputs, return_attention=True)
    weights = mean_attention(run)
    assert weights.shape == (1, 11, 11)
    for row, step in enumerate(range(13, 24)):
        for column in range(11):
            kept_at = (column + 1) * 2
            if kept_at >= step:
                assert weights[0, row, column].isnan()
                continue
            expected = sum(
                attention.weights[step - 1, b, slot].item()
                for b in range(3)
                for slot in range(3)
                if attention.numbers[step - 1, b, slot] == column
            )
            assert weights[0, row, column].item() == pytest.approx(expected / 3, abs=1e-6)


def test_weights_of_a_softmax_add_up(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", Adding(length=9), num_layers=2, k_att=3)
    weights = mean_attention(run)
    assert weights.shape == (2, 9, 2)
    sums = weights.nan_to_num().sum(-1)
    torch.testing.assert_close(sums[:, 3:], torch.ones(2, 6))
    assert (sums[:, :3] == 0).all()


@pytest.mark.parametrize("task", [Copying(length=3), Adding(length=7)])
@pytest.mark.parametrize("layers", [1, 2])
def test_pictures(tmp_path: Path, task: Task, layers: int) -> None:
    run = trained(tmp_path / "run", task, num_layers=layers)
    attention = attention_map(run)
    panels = [axes for axes in attention.axes if axes.images]
    assert len(panels) == layers
    assert panels[-1].get_xlabel().startswith("time step of the attended microstate")
    # The centre of the first column is the first microstate's time step, that of the first row the first step shown.
    left, _, _, top = panels[0].images[0].get_extent()
    assert (left + run.config.model.memory.k_att / 2, top + 0.5) == (
        run.config.model.memory.k_att,
        task.attending_steps[0],
    )
    curves = learning_curves({"one": run, "other": run})
    assert [axes.get_xlabel() for axes in curves.axes] == ["iteration", "iteration"]
    assert [text.get_text() for text in curves.legends[0].get_texts()] == ["one", "other", "chance"]
    for name, figure in (("attention.png", attention), ("curves.png", curves)):
        save(figure, tmp_path / name)
        assert imread(tmp_path / name).std() > 0.01
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    run = trained(tmp_path / "plain", Adding(length=4), method="tbptt")
    with pytest.raises(ValueError, match="must be a run of a model with a memory; it has none"):
        attention_map(run)
    run = trained(tmp_path / "short", Adding(length=4), k_att=4)
    with pytest.raises(ValueError, match="must have sequences longer than k_att; they have 4 steps"):
        attention_map(run)
    (run.path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"must hold evaluations to be plotted; its metrics\.jsonl has none yet"):
        learning_curves({"short": run})


def test_a_metric_that_was_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", Adding(length=4))
    line = run.evaluations()[-1]
    run.log({**line, "step": 6, "metrics": {"mse": None}})
    save(learning_curves({"run": Run(run.path, replace(run.config))}), tmp_path / "curves.png")
