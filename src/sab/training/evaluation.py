"""What a model makes of a task's data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sab.errors import check_int
from sab.models import SequenceModel
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


def mean_attention(model: SequenceModel, task: Task, config: TrainConfig, split: Split = "test") -> Tensor:
    """Attention weights averaged over a batch, [layers, attending steps, microstates]; NaN before a microstate exists.

    The model must have a memory, and the task more steps than k_att.
    """
    k_att, device = model.config.k_att, next(model.parameters()).device
    inputs, _ = task.batch(config.seed, 0, config.batch_size, split, device, config.dtype)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        _, _, attention = model(inputs, return_attention=True)
    model.train(was_training)
    columns = (task.attending_steps[-1] - 1) // k_att
    numbers, selected = attention.numbers.cpu(), attention.weights.cpu()
    none = columns  # a column of its own for slots that selected nothing
    full = selected.new_zeros(*selected.shape[:-1], columns + 1)
    full.scatter_add_(-1, torch.where(numbers < 0, none, numbers), selected)
    mean = full[..., :none].mean(-2).reshape(model.config.num_layers, task.steps, columns)
    attending = torch.tensor(task.attending_steps)
    kept_at = (torch.arange(columns) + 1) * k_att
    return mean[:, attending - 1].masked_fill(kept_at >= attending[:, None], float("nan"))
