"""What an update does to each parameter: Adam's step at its own learning rate, and weight decay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sab.config import SABConfig
from sab.lab.models import ModelConfig
from sab.lab.tasks import Copying
from sab.lab.training import RunConfig, TrainConfig
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.updates import (
    DeviceUpdates,
    HostUpdates,
    Updates,
    build_capturable_optimizer,
    build_optimizer,
)
from sab.parts.registry import SCORERS
from tests.lab.training.runs import newest

CPU = torch.device("cpu")


def with_memory(scorer: str = "mlp", **training: Any) -> RunConfig:
    memory = SABConfig(k_top=2, k_trunc=4, scorer=scorer, incorporate="concat", max_microstates=5)
    model = ModelConfig(hidden_size=6, num_layers=2, readout="hidden+weights", memory=memory)
    return RunConfig(Copying(length=2), model, TrainConfig(iterations=10, batch_size=3, **training))


@pytest.mark.parametrize("scorer", list(SCORERS))
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("gradient", "decay", "factor"), [(1.0, 0.0, 1.0), (1.0, 0.0, 0.5), (0.0, 0.1, 1.0)])
def test_an_update_moves_each_parameter_by_its_rate_and_decay(
    monkeypatch: pytest.MonkeyPatch, scorer: str, on_device: bool, gradient: float, decay: float, factor: float
) -> None:
    """Where every gradient is 1 so are Adam's corrected moments, and it moves all by its rate; where it is 0, none."""

    def descend(self: Updates, inputs: Tensor, targets: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        return torch.tensor(1.0), torch.tensor(1.0)

    monkeypatch.setattr(Updates, "_descend", descend)
    config = with_memory(scorer, memory_lr=0.25, lr=0.01, lr_decay=0.0, weight_decay=decay, precision="float64")
    model, state = config.build_model(CPU), TrainingState(lr_factor=factor)
    baseline = dict(replace(config, model=replace(config.model, method="bptt")).build_model(CPU).named_parameters())
    if on_device:
        adam = build_capturable_optimizer(config.training, model, CPU)
        updates = DeviceUpdates(config, model, adam, state, None, None)
    else:
        updates = HostUpdates(config, model, build_optimizer(config.training, model, CPU), state)
    for step in (0, 5):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        updates.make(step)
        for name, parameter in model.named_parameters():
            share = 1.0 if name in baseline or name.startswith("readout") else 0.25
            rate = share * 0.01 * factor * (1 - 0.98 * step / 10)
            expected = before[name] * (1 - decay * rate) - gradient * rate
            torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-9, msg=name)
    updates.close()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.Adam, {"lr_decay": 0.5}), (torch.optim.AdamW, {"weight_decay": 0.2, "lr": 0.05})],
)
def test_training_is_that_of_plain_adam_or_adamw(
    tmp_path: Path, config: RunConfig, run_training: Any, optimizer: Any, options: dict[str, float]
) -> None:
    run_training(tmp_path / "run", **options)
    task, training = config.task, replace(config.training, **options)
    with torch.random.fork_rng([]):
        torch.manual_seed(training.seed)
        model = config.build_model(CPU)
    adam = optimizer(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    for step in range(training.iterations):
        inputs, targets = task.batch(training.seed, step, training.batch_size)
        adam.param_groups[0]["lr"] = training.lr_at(step)
        adam.zero_grad()
        task.loss(model(inputs)[0], targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    stored = load_file(newest(tmp_path / "run") / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
