"""Moments of training whose weights stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sab.errors import UserValueError
from sab.lab.training import Result, Run
from sab.lab.training.checkpoint import load_model, load_moment, moments
from sab.lab.training.progress import Progress

CPU = torch.device("cpu")
Train = Callable[..., Result]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_moment(Run.open(out), CPU, step).state_dict()


def test_a_run_keeps_what_it_was_at_each_moment(tmp_path: Path, run_training: Train) -> None:
    out = tmp_path / "run"
    run_training(out, moments_every=3)
    assert moments(out / "moments") == [3, 6]
    for step in (3, 6):
        shorter = tmp_path / f"to {step}"
        run_training(shorter, iterations=step)
        ended = load_model(Run.open(shorter), CPU).state_dict()
        assert all(torch.equal(tensor, ended[name]) for name, tensor in weights(out, step).items())
    assert not (shorter / "moments").exists()


def test_those_after_the_checkpoint_that_a_run_goes_on_from_are_made_anew(tmp_path: Path, run_training: Train) -> None:
    class Dies(Progress):
        def iteration(self, step: int, loss: float) -> None:
            if step == 7:
                raise MemoryError

    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    run_training(whole, moments_every=2)
    with pytest.raises(MemoryError):
        run_training(pieces, moments_every=2, progress=Dies())
    assert moments(pieces / "moments") == [2, 4, 6]
    (pieces / "moments" / "step-00000006" / "model.safetensors").write_bytes(b"cut short")
    run_training(pieces, moments_every=2, resume=True)
    assert moments(pieces / "moments") == [2, 4, 6, 8]
    for step in (4, 6, 8):
        expected = weights(whole, step)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(pieces, step).items())


def test_a_damaged_moment_is_told_of(tmp_path: Path, run_training: Train) -> None:
    out = tmp_path / "run"
    run_training(out, moments_every=4)
    (out / "moments" / "step-00000004" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserValueError, match=r"step-00000004"):
        load_moment(Run.open(out), CPU, 4)
