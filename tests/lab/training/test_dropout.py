"""Hidden units that the readout does without in training: other ones for every sequence, from the seed and the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sab.lab.models import ModelConfig
from sab.lab.tasks import Copying
from sab.lab.training import Result, RunConfig, TrainConfig
from sab.lab.training.batches import kept_units
from tests.lab.training.runs import contents

CONFIG = RunConfig(Copying(length=5), ModelConfig(hidden_size=40), TrainConfig(batch_size=50, dropout=0.25))


def changed(**training: float) -> RunConfig:
    return replace(CONFIG, training=replace(CONFIG.training, **training))


def kept(config: RunConfig, step: int) -> torch.Tensor:
    units = kept_units(config, step)
    assert units is not None
    return units


@given(
    dropout=st.floats(0.05, 0.95), seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**9), other=st.integers(0, 9)
)
@settings(max_examples=40, deadline=None)
def test_which_units_are_kept(dropout: float, seed: int, step: int, other: int) -> None:
    config = changed(dropout=dropout, seed=seed)
    units = kept(config, step)
    assert units.shape == (50, 40)
    assert torch.allclose(units[units > 0], torch.tensor(1 / (1 - dropout)))
    share = (units == 0).double().mean().item()
    assert abs(share - dropout) < 6 * (dropout * (1 - dropout) / units.numel()) ** 0.5 + 1e-3
    assert torch.equal(units, kept(config, step)), "they depend on the seed and the step alone"
    assert not torch.equal(units, kept(config, step + 1 + other))
    assert not torch.equal(units, kept(changed(dropout=dropout, seed=seed ^ (1 << other)), step))


def test_the_readout_does_without_them_and_nothing_else_does() -> None:
    model = CONFIG.build_model(torch.device("cpu"))
    inputs, _ = CONFIG.task.batch(0, 0, 50, "train", "cpu", torch.float32)
    units = kept(CONFIG, 0)
    units[:, 7] = 0
    outputs, state = model(inputs, kept=units)
    hidden, plain = model.layers(model._encode(inputs))
    torch.testing.assert_close(outputs, model.readout(hidden * units))
    assert torch.equal(state.h, plain.h), "the recurrence has all of its units"
    outputs.square().sum().backward()
    gradient = model.readout.weight.grad
    assert gradient is not None
    assert (gradient[:, 7] == 0).all()
    assert (gradient[:, 8] != 0).any()


# Whole runs


def test_it_changes_training_and_no_evaluation(tmp_path: Path, run_training: Callable[..., Result]) -> None:
    plain = run_training(tmp_path / "plain", lr=1e-30)
    dropped = run_training(tmp_path / "dropped", lr=1e-30, dropout=0.5)
    assert dropped.metrics == plain.metrics, "with weights that stay as they are"
    assert dropped.valid == plain.valid
    run_training(tmp_path / "learned", dropout=0.5)
    run_training(tmp_path / "without")
    assert contents(tmp_path / "learned")["model"] != contents(tmp_path / "without")["model"]
