"""What TensorBoard shows of a run: train/, valid/ and test/ values, its options, and what it reads in the end."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from sab.lab.files import writing
from sab.lab.training.run import LoggedEvaluation, Result, RunConfig

LOSSES = 20
"""How many losses are written between two evaluations, at most."""
LEAST_PIXELS = 400
"""How wide the picture of the attention is at least."""


class Events:
    """The events of a run; those after `step` are dropped from what is there."""

    def __init__(self, path: Path, config: RunConfig, step: int):
        self._path, self._config = path, config
        self._loss_at = step
        with writing(path):
            self._writer = SummaryWriter(str(path), purge_step=step + 1)

    def loss(self, step: int, loss: float) -> None:
        """The loss of an update; of many only some are written."""
        if step - self._loss_at >= max(self._config.training.eval_every // LOSSES, 1):
            self._loss_at = step
            self._write("train/loss", loss, step)

    def evaluation(self, line: LoggedEvaluation, lr: float) -> None:
        """An evaluation, and the learning rate at it."""
        names = {"loss": "mean_loss", "grad_norm": "grad_norm", "grad_norm_max": "grad_norm_max"}
        names["iterations_per_second"] = "iterations_per_second"
        values = {f"train/{tag}": line[name] for name, tag in names.items()} | {"train/learning_rate": lr}
        values |= {f"valid/{metric}": value for metric, value in line["metrics"].items()}
        for tag, value in values.items():
            self._write(tag, value, line["step"])
        self._flush()

    def end(self, result: Result, attention: Tensor | None) -> None:
        """The final values on test data with the options that they are of, and the mean weights of the last layer."""
        tested = {f"test/{metric}": math.nan if value is None else value for metric, value in result.metrics.items()}
        for tag, value in tested.items():
            self._write(tag, value, result.iterations)
        options = {name: _hparam(value) for name, value in self._config.options().items()}
        with writing(self._path):
            assert self._writer.file_writer is not None
            for summary in hparams(options, tested):
                self._writer.file_writer.add_summary(summary)
            if attention is not None:
                with suppress(ModuleNotFoundError):  # Pillow, which older versions of TensorBoard do without
                    self._writer.add_image("attention", picture(attention), result.iterations)
        self._flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, tag: str, value: float | None, step: int) -> None:
        with writing(self._path):
            self._writer.add_scalar(tag, math.nan if value is None else value, step)

    def _flush(self) -> None:
        with writing(self._path):
            self._writer.flush()


def _hparam(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def picture(weights: Tensor) -> Tensor:
    """Weights [steps, microstates] as an image [3, height, width]: white where nothing is read, dark blue where all is,
    grey where nothing was kept yet."""
    strength = weights.nan_to_num().clamp(0, 1)
    full = torch.tensor([8, 48, 107]).view(3, 1, 1)
    image = (255 - strength * (255 - full)).round()
    image = torch.where(weights.isnan(), torch.tensor(224.0), image).to(torch.uint8)
    scale = math.ceil(LEAST_PIXELS / max(weights.shape[1], 1))
    return image.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
