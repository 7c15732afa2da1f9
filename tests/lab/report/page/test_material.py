from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sab.errors import UserValueError
from sab.lab.experiments.tables import ROWS
from sab.lab.report.page.material import gather, groups_of, row_of, rows_of
from sab.lab.training import Run
from sab.lab.training.run import Result

ROOT = Path(__file__).parents[4]


def test_runs_records_and_benchmarks_are_found(trained: Run, tmp_path: Path) -> None:
    found = gather([trained.path, ROOT / "results"])
    assert list(found.runs) == [str(trained.path)]
    assert len(found.by_row["copying-300-sab-5-5-ours"]) == 3
    assert found.benchmark  # beside the results
    assert gather([trained.path]).benchmark == []
    alone = gather([ROOT / "benchmarks/results/cpu-2-cores.jsonl"])
    assert (alone.runs, alone.by_row) == ({}, {})
    assert 0 < len(alone.benchmark) < len(found.benchmark)


def test_runs_below_a_folder(trained: Run, tmp_path: Path) -> None:
    for name in ("a/seed-1", "a/seed-0", "b"):
        shutil.copytree(trained.path, tmp_path / name)
    assert list(gather([tmp_path]).runs) == [str(tmp_path / name) for name in ("a/seed-0", "a/seed-1", "b")]


@pytest.mark.parametrize(
    ("path", "reason"), [("nothing", "there is no such folder"), (".", "it holds none"), ("file", "it is none")]
)
def test_what_is_none_of_these(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserValueError, match=f"must be the folder of a run, .*; {reason}"):
        gather([tmp_path / path])


def test_no_records(tmp_path: Path) -> None:
    (tmp_path / "copying.jsonl").touch()
    with pytest.raises(UserValueError, match="must hold records; its files have none"):
        gather([tmp_path])


def test_what_cannot_be_read_is_left_out(trained: Run, tmp_path: Path) -> None:
    """A run, records or a benchmark that are damaged or hostile do not deny the page for the others."""
    damage = {"a": "config.json", "b": "metrics.jsonl", "c": "result.json"}
    for name, file in damage.items():
        shutil.copytree(trained.path, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / file).write_text("[" * 100 + "\n")
    (tmp_path / "results").mkdir()
    for path in ("results/copying.jsonl", "bench.jsonl"):
        (tmp_path / path).write_text("{}\n")
    bad = [tmp_path / "runs", tmp_path / "results", tmp_path / "bench.jsonl"]
    found = gather([trained.path, *bad])
    assert list(found.runs) == [str(trained.path)]
    assert list(found.left_out) == [
        str(tmp_path / one) for one in ("runs/a", "runs/b", "runs/c", "results", "bench.jsonl")
    ]
    for file, mistake in zip(damage.values(), found.left_out.values(), strict=False):
        assert file in str(mistake)
    for path in bad:
        with pytest.raises(UserValueError):  # there is nothing else
            gather([path])


def test_none_at_all() -> None:
    with pytest.raises(UserValueError, match="run must be given at least once"):
        gather([])


def with_seed(run: Run, seed: int, path: str) -> Run:
    return Run(Path(path), replace(run.config, training=replace(run.config.training, seed=seed)))


def test_seeds_are_grouped(trained: Run, forgetful: Run) -> None:
    runs = {name: with_seed(trained, seed, name) for seed, name in enumerate(("x/seed-0", "x/seed-1"))}
    assert groups_of({**runs, "y": forgetful}) == {"x": list(runs.values()), "y": [forgetful]}
    apart = {"x/a": runs["x/seed-0"], "y/b": runs["x/seed-1"]}
    assert list(groups_of(apart)) == ["x/a and 1 more"]


def test_a_run_of_a_row_is_beside_the_paper(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["copying-100-sab-5-5-ours"]
    run = Run(Path("run"), row.config(1))
    assert row_of(run) is row
    assert row_of(trained) is None
    assert row_of(Run(Path("run"), row.config(1, iterations=7))) is None
    assert rows_of([run]) == {}  # not at its end
    result = Result("finished", "finished.", 3000, 400, {"accuracy_last10": 0.5}, 1.0, "cpu", {}, None)
    monkeypatch.setattr(Run, "result", lambda _: result)
    ((found, (record,)),) = rows_of([run, trained]).items()
    assert found == row.id
    assert record["metrics"] == {"accuracy_last10": 0.5}
