from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.lab import cli
from sab.lab.experiments import bench
from sab.lab.experiments.timing import PASSES
from sab.lab.report import performance

ROOT = Path(__file__).parents[3]


def record(**entries: Any) -> dict[str, Any]:
    """A record in which ours takes as many milliseconds as `ours` says, nn.LSTM 2 and 4."""
    ours = entries.pop("ours", 3.0)
    row = next(row for row in bench.rows("A", torch.device("cuda")) if row.scorer == "mlp")
    about = {"device": "cuda (GPU)", "versions": {"torch": "2.11"}, "commit": "abc", "threads": 2, "date": "2026-01-02"}
    made = {"schema": bench.SCHEMA, **asdict(row), "backend": "triton", "memory_ratio": 1.25, **about}
    times = {"ours": (ours, ours / 2), bench.TORCH: (4.0, 3.0), bench.TORCH_AUTOCAST: (2.0, 1.5)}
    made["milliseconds"] = {
        name: {
            "eager": {chosen: {"median": eager, "min": eager} for chosen in PASSES},
            "graph": {chosen: {"median": graph, "min": graph} for chosen in PASSES},
        }
        for name, (eager, graph) in times.items()
    }
    ratio = {"eager": ours / 2.0, "graph": ours / 2 / 1.5}
    made["ratio"] = {way: dict.fromkeys(PASSES, one) for way, one in ratio.items()}
    return {**made, **entries}


def sweep() -> list[dict[str, Any]]:
    sizes = {"kind": "sweep", "target": None}
    by_steps = [
        record(case="T", steps=steps, scorer=scorer, ours=steps / 100, **sizes)
        for steps in (100, 1000)
        for scorer in ("affine", "dot")
    ]
    return [*by_steps, *(record(case="n", hidden_size=n, steps=100, **sizes) for n in (32, 64))]


def save(path: Path, records: list[dict[str, Any]]) -> Path:
    bench.save(records, path)
    return path


# Targets


@pytest.mark.parametrize(
    ("entries", "met", "words"),
    [
        ({"ours": 3.0}, {"eager": True, "graph": True}, "yes"),
        ({"ours": 3.3}, {"eager": False, "graph": True}, "graph only"),
        ({"ours": 9.0}, {"eager": False, "graph": False}, "no"),
        ({"target": None}, {}, "–"),
        ({"error": "it broke"}, {}, "–"),
    ],
)
def test_targets(entries: dict[str, Any], met: dict[str, bool], words: str) -> None:
    one = record(**entries)
    assert performance.met(one) == met
    assert performance.cells(one)[-1] == words
    assert len(performance.cells(one)) == len(performance.HEADER)


def test_the_best_of_ours_decides() -> None:
    records = [record(ours=3.6), record(ours=2.8, precision="bfloat16"), record(ours=3.6, scorer="dot")]
    verdicts = performance.verdicts(records)
    assert [(one.scorer, one.ratio["eager"]) for one in verdicts] == [("mlp", 1.4), ("dot", 1.8)]
    eager, graph, memory = performance.summary(records)
    assert eager.startswith("1 of 2 targets are met called as a user does, 0 with a ratio of at most 1")
    assert eager.endswith("; not met: A dot 1.80 (at most 1.5).")
    assert graph == "2 of 2 targets are met replayed from a CUDA graph, 1 with a ratio of at most 1."
    assert memory.startswith(
        "A training step takes at most 1.5 times nn.LSTM's memory in 3 of 3 rows; the most is 1.25"
    )


def test_each_length_of_a_case_is_judged() -> None:
    records = [record(case="H", steps=steps, ours=ours) for steps, ours in ((200, 2.0), (3000, 9.0))]
    assert [one.case for one in performance.verdicts(records)] == ["H, T=200", "H, T=3000"]
    assert [performance.cells(one)[0] for one in records] == ["H, T=200", "H, T=3000"]


def test_a_row_that_something_else_disturbed_is_not_judged() -> None:
    one = record(ours=2.0)
    one["milliseconds"][bench.TORCH]["eager"]["forward+backward"] = {"median": 4.0, "min": 2.5}
    assert performance.cells(one)[-1] == "disturbed"
    assert performance.verdicts([one]) == []
    assert performance.summary([one])[0].startswith("1 of 1 rows were disturbed, with medians above 1.5 times")
    one["target"] = None
    assert performance.cells(one)[-1] == "–"


def test_context_is_met_by_speed() -> None:
    context = {"kind": "context", "beside": "reference", "target": 50.0}
    fast = record(speedup={"forward+backward": 60.0, "forward": 1.0}, **context)
    slow = record(speedup={"forward+backward": 40.0, "forward": 99.0}, **context)
    assert [performance.met(one)["eager"] for one in (fast, slow)] == [True, False]
    assert performance.verdicts([fast, slow]) == []


# Reading


def test_the_newest_of_several_counts(tmp_path: Path) -> None:
    old, new = record(ours=9.0, date="2026-01-01"), record(ours=1.0, date="2026-01-03")
    files = [save(tmp_path / "new.jsonl", [new]), save(tmp_path / "old.jsonl", [old, record(quick=True, date="2027")])]
    assert performance.load(files) == [new]


@pytest.mark.parametrize("text", ["", "no JSON\n", "[1]\n", '{"schema": 0}\n', '{"case": "F", "ours": 1}\n'])
def test_what_is_no_record_is_told(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    assert cli.main(["plot", "scaling", str(path), "-o", str(tmp_path / "scaling.png")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"sab: records {str(path)!r} must be a file of JSON lines that `sab bench --output` wrote;")
    assert told.count("\n") == 1


def test_no_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", "scaling"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# Showing


def test_the_table_of_a_terminal_leaves_out_empty_columns() -> None:
    cpu = record(backend="cpu")
    del cpu["ratio"]["graph"], cpu["memory_ratio"]
    headers = [str(column.header) for column in performance.table([cpu]).columns]
    assert headers == ["case", "scorer", "precision", "ours / nn.LSTM, ms", "forward", "target", "met"]
    assert len(performance.table([record(), *sweep()]).columns) == 9
