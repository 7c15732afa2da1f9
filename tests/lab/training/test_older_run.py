"""A run of an older version, with an input scale and initial scores, computes what it did; it is not resumed.

`older_run` was trained by the last version that had these options; `expected.json` holds outputs of that version.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sab
from sab.errors import UserError
from sab.lab import cli
from sab.lab.training import Run
from sab.lab.training.checkpoint import load_kept, load_moment
from sab.lab.training.trainer import evaluate_fully

OLDER = Path(__file__).parent / "older_run"
EXPECTED = json.loads((OLDER / "expected.json").read_text(encoding="utf-8"))
CPU = torch.device("cpu")


@pytest.fixture
def inputs() -> Tensor:
    return torch.tensor(EXPECTED["inputs"])


def close(actual: Tensor, expected: list[Any]) -> bool:
    return torch.allclose(actual, torch.tensor(expected), rtol=0, atol=1e-5)


def test_its_configuration_is_that_of_its_time() -> None:
    config = Run.open(OLDER).config
    memory: dict[str, Any] = {
        "scorer": "mlp",
        "weighting": "softmax_sink",
        "incorporate": "concat",
        "input_start": "torch",
    }
    assert config.model.memory == sab.SABConfig(k_top=3, k_att=2, k_trunc=4, attention_size=4, **memory)
    assert (config.input_scale, config.model.readout) == (8.0, "hidden+summary")


def test_its_outputs_and_metrics_are_what_they_were(inputs: Tensor) -> None:
    run = Run.open(OLDER)
    model, best_at = load_kept(run, CPU)
    assert best_at == 15
    with torch.no_grad():
        outputs, _, attention = model(inputs, return_attention=True)
        assert close(outputs[-3:], EXPECTED["outputs"])
        assert close(attention.weights[:, -3:], EXPECTED["weights"])
        assert close(load_moment(run, CPU, 10)(inputs)[0][-3:], EXPECTED["at_10"])
    result = run.result()
    assert result is not None
    metrics = evaluate_fully(model, run.config.task, run.config.training)
    # Another processor adds in another order: an answer on the edge may change, and with it a share of 1 in 1,280.
    assert metrics == pytest.approx(result.metrics, abs=2e-3)
    assert sab.trace(model, inputs).weights.shape[0] > 0


def test_it_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    shutil.copytree(OLDER, out)
    config = Run.open(out).config
    wanted = r"must be a run without input_scale to be resumed; it was trained with input_scale 8, which is no option"
    with pytest.raises(UserError, match=wanted):
        Run.open(out).check_resumable(config)
    assert cli.main(["train", "copying", "--out", str(out), "--resume", "--iterations", "40"]) != 0
    assert "without input_scale to be resumed" in capsys.readouterr().err
    assert cli.main(["eval", str(out)]) == 0
