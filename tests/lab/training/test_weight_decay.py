"""Weight decay: what every update takes off the weights, apart from what Adam does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sab.lab.training import Result, RunConfig
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.updates import Updates
from tests.lab.training.runs import PressCtrlC, contents, newest
from tests.lab.training.test_memory_lr import CPU, as_on_a_gpu, copies, on_host, with_memory


@pytest.mark.parametrize("updates_of", [on_host, as_on_a_gpu])
def test_a_weight_loses_its_share_times_the_rate(
    monkeypatch: pytest.MonkeyPatch, updates_of: Callable[..., Updates]
) -> None:
    """Where every gradient is 0 Adam moves nothing, and what is left is the decay."""

    def descend(self: Updates, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return torch.tensor(1.0), torch.tensor(1.0)

    monkeypatch.setattr(Updates, "_descend", descend)
    config = with_memory(memory_lr=0.25, lr=0.5, lr_decay=0.0, weight_decay=0.1, precision="float64")
    model = config.build_model(CPU)
    updates = updates_of(config, model, TrainingState())
    for step in (0, 5):
        before = copies(model)
        updates.make(step)
        for name, parameter in model.named_parameters():
            share = 0.25 if name.startswith(("layers.attn_", "layers.incorporate_")) else 1.0
            left = 1 - 0.1 * share * 0.5 * (1 - 0.98 * step / 10)
            torch.testing.assert_close(parameter, left * before[name], rtol=1e-6, atol=0, msg=name)
    updates.close()


def test_training_is_that_of_adamw(tmp_path: Path, config: RunConfig, run_training: Any) -> None:
    run_training(tmp_path / "run", weight_decay=0.2, lr=0.05)
    with torch.random.fork_rng([]):
        torch.manual_seed(config.training.seed)
        model = config.build_model(CPU)
    adam = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    for step in range(config.training.iterations):
        inputs, targets = config.task.batch(config.training.seed, step, config.training.batch_size)
        adam.zero_grad()
        config.task.loss(model(inputs)[0], targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    stored = load_file(newest(tmp_path / "run") / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())


def test_interrupted_and_resumed(tmp_path: Path, run_training: Callable[..., Result]) -> None:
    options = {"weight_decay": 0.3, "lr_decay": 0.5, "lr": 0.05}
    run_training(tmp_path / "whole", **options)
    assert run_training(tmp_path / "pieces", progress=PressCtrlC(5), **options).status == "interrupted"
    assert run_training(tmp_path / "pieces", resume=True, **options).status == "finished"
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    run_training(tmp_path / "without", **options | {"weight_decay": 0.0})
    assert contents(tmp_path / "without")["model"] != contents(tmp_path / "whole")["model"]
