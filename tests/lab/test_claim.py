"""The claim of `make demo`, smaller: what SAB learns, truncated backpropagation of the same size does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sab.lab.experiments.demo import RECIPE
from sab.lab.training import train


@pytest.mark.parametrize("seed", [0, 1])
def test_sab_learns_what_truncated_backpropagation_cannot(tmp_path: Path, seed: int) -> None:
    """SAB needs 300 to 600 iterations; which of them it is depends on the order of additions, so it may take 1,200."""
    task = replace(RECIPE.task, length=20)
    training = replace(RECIPE.training, iterations=1200, eval_every=50, stop_at=0.99, seed=seed, threads=1)
    sab, tbptt = (
        train(task, replace(RECIPE.model, method=method), training, tmp_path / method) for method in ("sab", "tbptt")
    )
    assert sab.status == "solved"
    assert (sab.metrics["accuracy_last10"] or 0.0) >= 0.95, "on other data than that of the evaluation that stopped it"
    assert tbptt.metrics["accuracy_last10"] is not None
    assert tbptt.metrics["accuracy_last10"] < 0.3, "chance is 0.125"
