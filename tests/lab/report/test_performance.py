from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sab.lab import cli
from sab.lab.experiments import bench, timing
from sab.lab.report import performance

ROOT = Path(__file__).parents[3]


def record(case: str = "A", **entries: Any) -> dict[str, Any]:
    """A record of a case in which ours takes as many milliseconds as `ours` says, torch.nn 2; half from a graph."""
    ours = entries.pop("ours", 3.0)
    of = bench.CASES[case]
    about = {"device": "cuda (GPU)", "versions": {"torch": "2.11"}, "commit": "abc", "threads": 2, "date": "2026-01-02"}
    made = {"schema": bench.SCHEMA, "kind": "required", **bench._described(of, torch.device(of.device)), **about}
    made |= {"backend": "triton", "memory_ratio": {"float32": 0.75, "bfloat16": 1.25}}
    times = {"ours float32": ours, "ours bfloat16": 2 * ours, "nn.LSTM float32": 4.0, "nn.LSTM autocast": 2.0}
    share = {"eager": 1.0, "graph": 0.5}
    made["milliseconds"] = {
        name: {
            way: {chosen: {"median": time * share[way], "min": time * share[way]} for chosen in passes}
            for way, passes in of.limits.items()
        }
        for name, time in times.items()
    }
    made |= bench.compared(made["milliseconds"], {}) | {"memory_ratio": made["memory_ratio"]}
    return {**made, **entries}


def sweep() -> list[dict[str, Any]]:
    """The cases along T and n, as if a step cost 10 microseconds of ours."""
    names = ("A", "B", "E-4000", "E-4000-affine", "n-32", "n-64")
    return [record(name, ours=bench.CASES[name].steps / 100) for name in names]


def first_version(**entries: Any) -> dict[str, Any]:
    """A record as the first version of the benchmark wrote them."""
    one = {chosen: {"median": 3.0, "min": 3.0, "repeats": 7} for chosen in (timing.BOTH, timing.FORWARD)}
    made = record()
    del made["targets"], made["precisions"]
    made |= {"schema": 1, "precision": "bfloat16", "scorer": "mlp", "beside": None, "target": 1.5, "memory_ratio": 1.25}
    made["milliseconds"] = {"ours": {"eager": one}, "nn.LSTM float32": {"eager": one}}
    made["ratio"] = {"eager": {timing.BOTH: 1.0, timing.FORWARD: 1.0}}
    return {**made, **entries}


def save(path: Path, records: list[dict[str, Any]]) -> Path:
    bench.save(records, path)
    return path


# Targets


@pytest.mark.parametrize(
    ("ours", "lines"),
    [
        (2.4, [["A", "1.20 ≤ 1.3", "0.60", "1.20 ≤ 1.5"], ["A, forward", "1.20 ≤ 1.2", "0.60", "–"]]),
        (2.8, [["A", "1.40 > 1.3", "0.70", "1.40 ≤ 1.5"], ["A, forward", "1.40 > 1.2", "0.70", "–"]]),
    ],
)
def test_a_line_for_each_pass(ours: float, lines: list[list[str]]) -> None:
    found = performance.lines(record(ours=ours))
    assert [[line[0], *line[6:9]] for line in found] == lines
    assert [line[1:6] for line in found] == [["128", "64", "320", f"{ours:.2f}", "2.00"]] * 2
    assert [line[-1] for line in found] == ["0.75, 1.25", "–"]
    assert all(len(line) == len(performance.HEADER) for line in found)
    assert performance.lines(record(error="it broke"))[0][:5] == ["A", "128", "64", "320", "failed"]


def test_each_target_is_judged_by_itself() -> None:
    records = [record(ours=2.8), record("C", ours=1.0), record("H-200", ours=3.0, device="cpu (x)"), first_version()]
    records[-1] = performance._upgraded(records[-1]) or {}
    found = performance.verdicts(records)
    assert [(one.case, one.ratio, one.target) for one in found] == [
        ("A", {"eager": 1.4, "graph": 1.4}, {"eager": 1.3, "graph": 1.5}),
        ("A, forward", {"eager": 1.4}, {"eager": 1.2}),
        ("C", {"eager": 0.5, "graph": 0.5}, {"eager": 0.9, "graph": 1.3}),
        ("C, forward", {"eager": 0.5}, {"eager": 1.2}),
        ("H-200", {"eager": 1.5}, {"eager": 1.1}),
    ]
    eager, graph, memory = performance.summary(records)
    assert eager == (
        "In eager mode 2 of 5 targets are met, 2 with a ratio of at most 1; not met: "
        "A 1.40 (at most 1.3), A, forward 1.40 (at most 1.2), H-200 1.50 (at most 1.1)."
    )
    assert graph == "From a CUDA graph 2 of 2 targets are met, 1 with a ratio of at most 1."
    assert memory == (
        "A training step takes at most 1.3 times torch.nn's memory in 6 of 6 measurements; "
        "the most is 1.25 (case A, bfloat16)."
    )


def test_what_something_else_disturbed_is_not_judged() -> None:
    one = record("B", ours=2.0)
    slower = one["milliseconds"]["ours bfloat16"]["eager"]
    slower["forward+backward"] = {"median": 4.0, "min": 1.0}
    assert performance.lines(one)[0][6] == "1.00 ≤ 1.3", "what is not the fastest does not count"
    one["milliseconds"]["nn.LSTM autocast"]["eager"]["forward+backward"] = {"median": 2.0, "min": 1.25}
    assert performance.lines(one)[0][6] == "1.00 disturbed"
    assert [verdict.ratio for verdict in performance.verdicts([one])] == [{"graph": 1.0}]
    assert performance.summary([one])[1].startswith("Something disturbed B: a median is above 1.5 times the fastest")
    assert performance.fair_ratio(one, timing.BOTH) is None
    assert performance.fair_ratio(one, timing.BOTH, "graph") == 1.0
    assert performance.fair_ratio(one, timing.FORWARD) is None, "not measured"


# The first version's records


def test_records_of_the_first_version(tmp_path: Path) -> None:
    speedup = {"forward+backward": 60.0, "forward": 1.0}
    context = first_version(kind="context", beside="reference", target=50.0, speedup=speedup)
    context["milliseconds"]["reference"] = {
        "eager": {"forward+backward": {"median": 180.0, "min": 170.0, "repeats": 3}}
    }
    swept = [first_version(case="T", kind="sweep", steps=steps, target=None) for steps in (100, 200)]
    default = {"scorer": "default", "precision": "float32", "device": "cpu (x)"}
    old = [first_version(), first_version(case="H", hidden_size=64, steps=200, **default), context, *swept]
    found = performance.load([save(tmp_path / "old.jsonl", old)])
    assert [(one["case"], one["kind"]) for one in found] == [
        *[("H-200", "required"), ("A", "earlier"), ("A", "context")],
        *[("T", "sweep")] * 2,
    ]
    assert performance.lines(found[1])[0] == [
        *["A, mlp bfloat16", "128", "64", "320", "3.00", "3.00", "1.00 ≤ 1.5", "–", "–", "1.25"]
    ]
    assert performance.speedup(found[2]) == (180.0, 3.0, 60.0)
    assert performance.swept_records(found, "T") == found[3:]
    new = record("H-200", ours=9.0, device="cpu (x)", date="2026-02-02")
    found = performance.load([save(tmp_path / "new.jsonl", [new]), tmp_path / "old.jsonl"])
    assert found[0] == new, "it replaces what was measured of the same case"
    assert len(found) == len(old)


def test_the_precisions_of_a_first_record_become_one(tmp_path: Path) -> None:
    made = {"scorer": "default", "k_top": 5, "target": 1.0}
    slow = first_version(precision="float32", memory_ratio=0.9, **made)
    fast = first_version(precision="bfloat16", memory_ratio=1.4, date="2026-01-01", **made)
    fast["ratio"] = {"eager": {"forward+backward": 0.8, "forward": 1.0}}
    for files in ([slow, fast], [fast, slow]):
        (found,) = performance.load([save(tmp_path / "old.jsonl", files)])
        assert found["ratio"] == fast["ratio"]
        assert found["memory_ratio"] == {"float32": 0.9, "bfloat16": 1.4}
        assert found["targets"]["eager"] == {"forward+backward": 1.3, "forward": 1.2}, "as the case has it now"
        assert performance.lines(found)[0][0] == "A (k = 5, 2, 10)"
    new = record(date="2026-03-03")
    assert performance.load([save(tmp_path / "new.jsonl", [slow, new, fast])]) == [new]


def test_the_cases_of_the_table_come_before_an_old_sweep() -> None:
    old = [performance._upgraded(first_version(case="T", kind="sweep", target=None, steps=100)) or {}]
    assert performance.swept_records([*old, record()], "T") == old, "one point is no sweep"
    found = performance.swept_records([*old, *sweep()], "T")
    assert [one["case"] for one in found] == ["A", "B", "E-4000", "E-4000-affine"]
    assert performance.common_way(found) == "eager"
    assert performance.microseconds_a_step(found[1], "eager", "forward+backward") == pytest.approx(10.0)


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


def test_the_table_of_a_terminal_leaves_out_float32_and_empty_columns() -> None:
    cpu = record("G", memory_ratio={})
    headers = [str(column.header) for column in performance.table([cpu]).columns]
    assert headers == ["case", "n", "B", "T", "ours, ms", "torch.nn, ms", "ratio"]
    assert len(performance.table([record(), cpu]).columns) == 9


def test_a_ratio_in_float32_compares_float32_on_both_sides() -> None:
    assert record(ours=3.0)["ratio"]["eager"][timing.BOTH] == 1.5
    assert performance.ratio_in_float32(record(ours=3.0), timing.BOTH) == 0.75
    assert performance.ratio_in_float32(record(ours=6.0), timing.FORWARD) == 1.5
    half_alone = record()
    del half_alone["milliseconds"]["nn.LSTM float32"]
    assert performance.ratio_in_float32(half_alone, timing.BOTH) is None


@pytest.mark.parametrize("side", ["ours float32", "nn.LSTM float32"])
def test_a_ratio_in_float32_is_of_sides_that_nothing_disturbed(side: str) -> None:
    one = record()
    one["milliseconds"][side]["eager"][timing.BOTH]["min"] /= 1.4
    assert performance.ratio_in_float32(one, timing.BOTH) == 0.75
    one["milliseconds"][side]["eager"][timing.BOTH]["min"] /= 1.4
    assert performance.ratio_in_float32(one, timing.BOTH) is None
    assert performance.ratio_in_float32(one, timing.FORWARD) == 0.75
    assert [line[7] for line in performance.lines(one)] == ["–", "0.75"]
