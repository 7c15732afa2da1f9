from __future__ import annotations

import json
from pathlib import Path

import pytest

from sab import cli
from sab.experiments import bench
from sab.ops.dispatch import BACKENDS


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CASES", {"S": bench.Case(4, 3, 6, k_top=2), "M": bench.Case(5, 2, 4, k_top=1)})


def test_every_case_scorer_and_backend_beside_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records.jsonl"
    assert cli.main(["bench", "--seconds", "0.001", "-o", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    measured = {(record["case"], record["scorer"], record["backend"]) for record in records}
    assert measured == {(c, s, b) for c in ("S", "M") for s in bench.SCORERS for b in BACKENDS}
    for record in records:
        assert record["versions"]["torch"]
        if "unsupported" in record:
            assert record["backend"] != "reference"
            continue
        for key in ("forward", "forward+backward"):
            assert record["ratio"][key] == pytest.approx(record["ours"][key] / record["nn.LSTM"][key])
    told = capsys.readouterr().out
    assert all(words in told for words in ("affine", "dot", "mlp", "reference", str(out)))


def test_a_choice_of_cases_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--cases", "M", "--backends", "reference", "--seconds", "0.001"]) == 0
    told = capsys.readouterr().out
    assert "cpu" not in told
    assert "│ S" not in told


def test_a_backend_that_cannot_is_shown_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sab.ops.native.unavailable", lambda: "there is no compiler")
    assert cli.main(["bench", "--cases", "M", "--backends", "cpu", "--seconds", "0.001"]) == 0
    assert "not supported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cases", "Z"], "--cases must be one of S, M; got 'Z'."),
        (["--backends", "tpu"], "--backends must be one of triton, cpu, reference; got 'tpu'."),
        (["--seconds", "0"], "--seconds must be a finite number above 0; got 0.0."),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"sab: {sentence}\n"
