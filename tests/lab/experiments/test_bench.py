from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.lab import cli
from sab.lab.experiments import bench, timing
from sab.lab.report import performance
from sab.lab.training.run import Provenance

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FEWEST", 2)
    monkeypatch.setattr(bench, "provenance", lambda device: Provenance("cpu (x)", {}, "another"))


def run(*arguments: Any) -> int:
    return cli.main(["bench", "--device", "cpu", *map(str, arguments)])


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What is measured


def test_what_has_a_target_comes_first_and_sweeps_last() -> None:
    rows = bench.rows(["T", "A", "n", "B"], CUDA, compiled_steps=16)
    kinds = [row.kind for row in rows]
    assert kinds == sorted(kinds, key=("required", "context", "sweep").index)
    context = [row for row in rows if row.kind == "context"]
    assert [(row.beside, row.steps, row.target) for row in context] == [
        *[("reference", 320, 50.0)] * 4,
        ("compiled reference", 16, None),
    ]
    swept = [row for row in rows if row.kind == "sweep"]
    assert {row.precision for row in swept} == {"float32"}
    assert [row.steps for row in swept if row.case == "T" and row.scorer == "affine"][::5] == [100, 20000]
    assert [row.hidden_size for row in swept if row.case == "n" and row.scorer == "mlp"] == [
        32,
        64,
        128,
        200,
        256,
        512,
        1000,
        1500,
    ]


def test_a_case_has_no_target_on_another_device_nor_at_another_size() -> None:
    on_cpu = [row for row in bench.rows(bench.default_cases(CPU), CPU) if row.kind == "required"]
    assert all(row.target and row.precision == "float32" for row in on_cpu)
    assert {row.target for row in bench.rows("A", CPU)} == {None}
    quick = bench.rows("ACT", CUDA, quick=True)
    assert {row.target for row in quick} == {None}
    assert all(row.quick and row.hidden_size <= 16 and row.steps <= 12 for row in quick)
    assert len(set(quick)) == len(quick)


# Measuring


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "records.jsonl"
    assert run("--quick", "--cases", "F,n", "--output", out, "--commit", "abc") == 0
    records = records_of(out)
    assert [(record["case"], record["scorer"], record["beside"]) for record in records] == [
        *[("F", scorer, None) for scorer in ("default", "mlp", "dot", "affine")],
        *[("F", scorer, "reference") for scorer in ("default", "mlp", "dot", "affine")],
        ("n", "default", None),
        ("n", "mlp", None),
    ]
    told = capsys.readouterr().out
    assert told.count("nn.LSTM") >= len(records)
    assert f"Records: {out}" in told
    for record in records:
        assert record.keys() >= {"schema", "backend", "compile_seconds", "wall_seconds", "date", "threads", "versions"}
        assert (record["schema"], record["commit"], record["quick"]) == (bench.SCHEMA, "abc", True)
        names = ["ours", "nn.LSTM float32", *([record["beside"]] if record["beside"] else [])]
        assert list(record["milliseconds"]) == names
        assert record["types"] == dict.fromkeys(names, "float32")
        assert record["memory"] == dict.fromkeys(names)
        for chosen in timing.PASSES:
            times = {name: record["milliseconds"][name]["eager"][chosen] for name in names}
            assert all(0 < one["min"] <= one["median"] and one["repeats"] >= 2 for one in times.values())
            expected = times["ours"]["median"] / times["nn.LSTM float32"]["median"]
            assert record["ratio"]["eager"][chosen] == pytest.approx(expected)
            if record["beside"]:
                expected = times["reference"]["median"] / times["ours"]["median"]
                assert record["speedup"][chosen] == pytest.approx(expected)
    assert not list(out.parent.glob(".*"))


def test_a_row_that_fails_is_told_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = bench.measure

    def fails_for_dot(row: bench.Row, *rest: Any) -> dict[str, Any]:
        if row.scorer == "dot":
            raise RuntimeError("the device fell off\nits shelf")
        return measure(row, *rest)

    monkeypatch.setattr(bench, "measure", fails_for_dot)
    assert run("--quick", "--cases", "G", "-o", tmp_path / "records.jsonl") == 0
    records = records_of(tmp_path / "records.jsonl")
    assert [record.get("error") for record in records] == [None, None, "RuntimeError: the device fell off", None]
    told = capsys.readouterr().out
    assert "dot float32: failed: RuntimeError: the device fell off" in told


def test_each_record_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "records.jsonl"
    lengths: list[int] = []

    def looks(row: bench.Row, *rest: Any) -> dict[str, Any]:
        lengths.append(len(records_of(out)) if out.exists() else 0)
        raise RuntimeError

    monkeypatch.setattr(bench, "measure", looks)
    assert run("--quick", "--cases", "G", "-o", out) == 0
    assert lengths == [0, 1, 2, 3]


def test_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick", "--cases", "F", "--minutes", "1e-9") == 0
    told = capsys.readouterr().out
    cut, over = told.splitlines()
    assert cut.startswith("--quick cut the sizes and the repeats")
    assert over == "The time was over before 8 of 8 rows were begun, the first of them case F, default, float32."


def test_another_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = bench.rows("F", CPU, quick=True)[0]
    assert bench._in_another_process("compile", row, CPU, 0.0, 60.0)["compile_seconds"] > 0
    late = bench._in_another_process("measure", row, CPU, 0.0, 0.01)
    assert late == {"error": "skipped: compilation of 12 steps was not through after 0 s"}
    monkeypatch.setattr(bench.sys, "executable", "false")
    assert bench._in_another_process("measure", row, CPU, 0.0, 60.0) == {"error": "the process ended without a word"}
    bench.main(json.dumps({"what": "measure", "row": asdict(row), "device": "cpu", "seconds": 0.0}))
    assert json.loads(capsys.readouterr().out)["backend"] in ("cpu", "reference")


def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bench.Row] = []

    def answer(what: str, row: bench.Row, *rest: Any) -> dict[str, Any]:
        asked.append(row)
        return {} if row.scorer == "dot" else {"compile_seconds": 2.0}

    monkeypatch.setattr(bench, "_in_another_process", answer)
    rows = bench.rows("ABT", CUDA)
    seconds = bench._compile_ahead(rows, CUDA, 4, time.monotonic() + 60)
    assert len(asked) == len({row.kernels for row in rows}) == 8
    assert set(seconds) == {row.kernels for row in rows if row.scorer != "dot"}
    assert all(row.case == "A" for row in asked)


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = timing.time_in_turn(calls, CPU, 0.0)
    assert order == ["a", "b"] * 4, "two rounds to warm up, two that count"
    assert times["a"]["repeats"] == times["b"]["repeats"] == 2


class StandIns:
    """What `torch.cuda` has for time, graphs and memory, without a GPU: a call costs 2 ms, a replay 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        outer = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = outer.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Stream:
            def wait_stream(self, stream: Stream) -> None: ...

        class CUDAGraph:
            calls = 0

            def replay(self) -> None:
                assert self.calls == 1
                outer.now += 1.0

        @contextlib.contextmanager
        def graph(graph: CUDAGraph, stream: Stream) -> Iterator[None]:
            graph.calls += 1
            yield

        for name, stand_in in {"Event": Event, "Stream": Stream, "CUDAGraph": CUDAGraph, "graph": graph}.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def call(self) -> None:
        self.now += 2.0


def test_times_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StandIns(monkeypatch)
    measured: dict[str, Any] = {}
    calls = bench._captured({"ours": cuda.call}, measured)
    assert (cuda.now, measured) == (6.0, {}), "two calls to warm up, one that is captured"
    times = timing.time_in_turn({"eager": cuda.call, "graph": calls["ours"]}, CUDA, 0.0)
    assert {name: one["median"] for name, one in times.items()} == {"eager": 2.0, "graph": 1.0}


def test_what_cannot_be_captured_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StandIns(monkeypatch)
    measured: dict[str, Any] = {}

    def refuses() -> None:
        raise RuntimeError("not while a stream is captured\nor so")

    assert list(bench._captured({"ours": cuda.call, "other": refuses}, measured)) == ["ours"]
    assert measured == {"graph_errors": {"other": "RuntimeError: not while a stream is captured"}}


def test_ratios_are_to_the_best_of_torch() -> None:
    def times(both: float) -> dict[str, Any]:
        one = {"median": both, "min": both, "repeats": 7}
        return {way: dict.fromkeys(timing.PASSES, one) for way in ("eager", "graph")}

    row = bench.rows("A", CUDA)[1]
    assert row.precision == "bfloat16"
    milliseconds = {"ours": times(3.0), bench.TORCH: times(4.0), bench.TORCH_AUTOCAST: times(2.0)}
    del milliseconds[bench.TORCH_AUTOCAST]["graph"]  # as where it could not be captured
    memory = {"ours": 30, bench.TORCH: 10, bench.TORCH_AUTOCAST: 20}
    compared = bench._compared(row, {"milliseconds": milliseconds, "memory": memory})
    assert compared["ratio"]["eager"] == dict.fromkeys(timing.PASSES, 1.5)
    assert compared["ratio"]["graph"] == dict.fromkeys(timing.PASSES, 0.75)
    assert compared["memory_ratio"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cases", "X"], "--cases must be one of A, B, C, D, E, F, G, H, T, n; got 'X'."),
        (["--cases", "F,"], "--cases must be one of A, B, C, D, E, F, G, H, T, n; got ''."),
        (["--minutes", "0"], "--minutes must be a finite number above 0; got 0.0."),
        (["--seconds", "0"], "--seconds must be a finite number above 0; got 0.0."),
        (["--jobs", "-1"], "--jobs must be a whole number of at least 0; got -1."),
        (["--compiled-steps", "0"], "--compiled-steps must be a whole number of at least 1; got 0."),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick", *arguments) == 2
    assert capsys.readouterr().err == f"sab: {sentence}\n"


def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    assert run("--quick", "-o", tmp_path / "file" / "records.jsonl") == 2
    told = capsys.readouterr()
    assert "must be a place that can be written to" in told.err
    assert told.out == ""


def test_the_table_of_what_was_measured_is_that_of_the_report() -> None:
    assert performance.SWEPT.keys() == {name for name, case in bench.CASES.items() if not any(case.targets.values())}
