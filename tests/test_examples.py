"""The examples run as they are, from a folder of their own, with as little training as they can do with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(script: str, folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", EXAMPLES / script, "--quick", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_tested() -> None:
    code = Path(__file__).read_text(encoding="utf-8")
    assert all(f'output_of("{path.name}"' in code for path in EXAMPLES.glob("*.py"))


def test_time_series_compares_three_models(tmp_path: Path) -> None:
    pytest.importorskip("sktime", reason="needs the extra `examples`")
    told = output_of("time_series.py", tmp_path)
    assert "50 series to train on, 150 to test, 150 steps" in told
    table = told.splitlines()[3:]
    assert [line[:16].strip() for line in table] == ["LSTM", "LSTM, truncated", "SAB"]
    assert all("%" in line for line in table)


def test_time_series_reads_the_longer_problem_from_the_files_of_its_package(tmp_path: Path) -> None:
    """Files such as aeon's: whether that is installed or not, these come first."""
    folder = tmp_path / "aeon" / "datasets" / "data" / "PickupGestureWiimoteZ"
    folder.mkdir(parents=True)
    (tmp_path / "aeon" / "__init__.py").touch()
    for split, count in (("TRAIN", 40), ("TEST", 6)):
        lines = [f"{','.join(str(step % 7 / 7) for step in range(30))}:{1 + place % 10}" for place in range(count)]
        content = "\n".join(["# made up", "@seriesLength 30", "@data", *lines, ""])
        (folder / f"PickupGestureWiimoteZ_eq_{split}.ts").write_text(content)
    told = output_of("time_series.py", tmp_path, "--data", "pickup", PYTHONPATH=str(tmp_path))
    assert "40 series to train on, 6 to test, 30 steps" in told
    assert "4,810" in told  # one input, ten classes


def test_streaming_keeps_its_memory(tmp_path: Path) -> None:
    told = output_of("streaming.py", tmp_path)
    constant, growing = told.split("affine, ")[1].split("mlp, ")
    kept = [line.split()[1] for line in constant.splitlines()[2:] if line]
    assert len(kept) > 1
    assert set(kept) == {"5"}
    kept = [int(line.split()[1].replace(",", "")) for line in growing.splitlines()[2:] if line]
    assert kept == sorted(set(kept))


def test_online_learns_and_keeps_its_memory(tmp_path: Path) -> None:
    told = output_of("online.py", tmp_path, "--out", "online.jsonl")
    records = [json.loads(line) for line in (tmp_path / "online.jsonl").read_text(encoding="utf-8").splitlines()]
    of_sab = [record for record in records if record["method"].startswith("SAB")]
    assert [record["steps"] for record in of_sab] == list(range(300, 3001, 300))
    assert len({record["kept_bytes"] for record in of_sab[-4:]}) == 1
    assert told.count("the answer after step 3,000 is credited to") == 2
    assert "truncated backpropagation" in told


def test_why_tells_steps_and_draws_them(tmp_path: Path) -> None:
    told = output_of("why.py", tmp_path, "--out", "why.png")
    assert "it read\n  the microstate of step" in told
    assert "of the credit" in told
    assert "by these paths\n" in told
    assert (tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_lightning_trains_checkpoints_and_tests(tmp_path: Path, precision: str) -> None:
    for package in ("sktime", "lightning"):
        pytest.importorskip(package, reason="needs the extra `examples`")
    told = output_of("lightning_module.py", tmp_path, "--precision", precision)
    assert f"216 recordings to train on, 370 to test, of 7 to 29 steps; {precision}" in told
    (found,) = re.findall(r"test ([\d.]+)%", told)
    assert float(found) > 30  # chance is 11 %
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["no"])
def test_accelerate_carries_the_memory_and_resumes(tmp_path: Path, precision: str) -> None:
    for package in ("sktime", "accelerate"):
        pytest.importorskip(package, reason="needs the extra `examples`")
    told = output_of("accelerate_loop.py", tmp_path, "--precision", precision)
    naive, half, whole = (float(line.split()[-1]) for line in told.splitlines()[1:])
    assert whole < half < naive
    assert list(tmp_path.iterdir()) == []
