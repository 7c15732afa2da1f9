"""The claim of `make demo`, smaller: what SAB learns, truncated backpropagation of the same size does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sab.lab.experiments.demo import RECIPE
from sab.lab.training import train


@pytest.mark.parametrize("seed", [0, 1])
def test_sab_learns_what_truncated_backpropagation_cannot(tmp_path: Path, seed: int) -> None:
    """SAB needs 400 to 500 iterations; which of them it is depends on the order of additions, so it may take 1,200."""
    task = replace(RECIPE.task, length=20)
    training = replace(RECIPE.training, iterations=1200, eval_every=50, stop_at=0.99, seed=seed, threads=1)
    accuracy = {}
    for method in ("sab", "tbptt"):
        result = train(task, replace(RECIPE.model, method=method), training, tmp_path / method)
        accuracy[method] = result.metrics["accuracy_last10"]
    assert accuracy["sab"] is not None
    assert accuracy["sab"] >= 0.99
    assert accuracy["tbptt"] is not None
    assert accuracy["tbptt"] < 0.3, "chance is 0.125"
