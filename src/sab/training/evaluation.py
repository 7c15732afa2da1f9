"""What a model makes of a task's data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sab.errors import check_int
from sab.tasks import Split, Task
from sab.training.config import TrainConfig


def evaluate(
    model: nn.Module, task: Task, config: TrainConfig, split: Split = "test", batches: int | None = None
) -> dict[str, float]:
    """Means of the task's metrics over the first `batches` batches of a split, by default as many as `config` says."""
    count = config.eval_batches if batches is None else check_int("batches", batches, 1)
    device = next(model.parameters()).device
    found: list[dict[str, Tensor]] = []
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for index in range(count):
            inputs, targets = task.batch(config.seed, index, config.batch_size, split, device, config.dtype)
            found.append(task.metrics(predict(model, inputs, config), targets))
    model.train(was_training)
    # Only now, as looking at a number waits for the device.
    return {name: sum(metrics[name].item() for metrics in found) / count for name in found[0]}


def predict(model: nn.Module, inputs: Tensor, config: TrainConfig) -> Tensor:
    """The model's outputs, in full precision also where the model computes in less."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        outputs, _ = model(inputs)
    return outputs.to(config.dtype)
