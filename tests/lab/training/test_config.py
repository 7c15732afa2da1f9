from __future__ import annotations

from typing import Any

import pytest
import torch

from sab.errors import UserError
from sab.lab.training.config import TrainConfig, resolve_device


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("iterations", 0),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", 1e31),
        ("lr", float("nan")),
        ("memory_lr", 0.0),
        ("memory_lr", 1001.0),
        ("memory_lr", None),
        ("lr_decay", 1.5),
        ("dropout", -0.1),
        ("dropout", 1.0),
        ("weight_decay", -0.1),
        ("weight_decay", 1.1),
        ("clip", 0.0),
        ("seed", -1),
        ("device", "tpu"),
        ("precision", "float8"),
        ("cuda_graph", 1),
        ("threads", 0),
        ("eval_every", 0),
        ("eval_batches", 0),
        ("checkpoint_every", 0),
        ("checkpoint_minutes", 0.0),
        ("checkpoint_minutes", float("inf")),
        ("stop_at", float("inf")),
        ("patience", 0),
        ("keep", "worst"),
        ("on_nan", "hope"),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{option} must be .*; got") as caught:
        TrainConfig(**{option: value})
    assert isinstance(caught.value, ValueError | TypeError)
    assert caught.value.option == option


def test_what_may_be_none_may_be_none() -> None:
    config = TrainConfig(clip=None, threads=None, stop_at=None)
    assert config.dtype == torch.float32
    assert TrainConfig(precision="float64").dtype == torch.float64
    assert TrainConfig(precision="bfloat16").dtype == torch.float32


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^device must be auto or cpu on a machine without a CUDA device; got 'cuda'"):
        resolve_device("cuda")
    with pytest.raises(ValueError, match=r"^device must be one of auto, cpu, cuda; got 'tpu'"):
        resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")


def test_the_learning_rate_falls_along_a_line_to_a_fiftieth() -> None:
    config = TrainConfig(iterations=100, lr=1.0, lr_decay=0.5)
    assert [config.lr_at(step) for step in (0, 25, 50)] == [1.0, 1.0, 1.0]
    assert config.lr_at(75) == pytest.approx(0.51)
    assert config.lr_at(100) == pytest.approx(0.02)
    assert TrainConfig(iterations=100, lr=1.0).lr_at(100) == 1.0
    assert TrainConfig(iterations=100, lr=1.0, lr_decay=1.0).lr_at(100) == 1.0


def test_no_test_sees_a_gpu_that_is_not_about_one() -> None:
    assert resolve_device("auto") == torch.device("cpu")
