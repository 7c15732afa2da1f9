from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

import sab
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


def quick(name: str) -> bench.Case:
    (case,) = bench.cases(name, CPU, quick=True)
    return case


# What is measured

GPU_ROWS = {
    # name: hidden size, batch size, steps, limits of forward and backward in eager mode and from a graph
    "A": (128, 64, 320, 1.3, 1.5),
    "B": (128, 64, 784, 1.3, 1.5),
    "C": (1000, 64, 180, 0.9, 1.3),
    "D": (1000, 32, 100, 0.9, 1.3),
    **{f"n-{n}": (n, 64, 320, 1.3, 1.6) for n in (32, 64, 200, 256, 512, 1500)},
    "n-650": (650, 20, 35, 1.3, 1.6),
    "GRU": (128, 64, 320, 1.5, None),
    "tanh": (128, 64, 320, 2.0, None),
    **{f"B-{batch}": (128, batch, 320, 1.5, None) for batch in (1, 8, 512)},
    "packed": (128, 64, 320, 1.3, None),
    "E-4000": (128, 64, 4000, 1.5, None),
    "E-20000": (128, 64, 20000, 2.0, None),
    "E-4000-affine": (128, 64, 4000, 1.5, None),
    "E-20000-affine": (128, 64, 20000, 2.0, None),
}
CPU_ROWS = {
    "F": (128, 64, 120, 1.1, None),
    "F-GRU": (128, 64, 120, 1.1, None),
    "G": (1000, 32, 100, 1.1, None),
    **{f"H-{steps}": (64, 32, steps, 1.1, None) for steps in (200, 1000, 3000)},
}


@pytest.mark.parametrize(("device", "expected"), [(CUDA, GPU_ROWS), (CPU, CPU_ROWS)], ids=str)
def test_the_rows_of_the_table(device: torch.device, expected: dict[str, tuple[Any, ...]]) -> None:
    chosen = {case.case: case for case in bench.cases(None, device) if case.stream is None}
    assert {
        name: (
            *(case.hidden_size, case.batch_size, case.steps),
            *(case.limits.get(way, {}).get(timing.BOTH) for way in ("eager", "graph")),
        )
        for name, case in chosen.items()
    } == expected
    forward = {name: limits["forward"] for name in chosen if "forward" in (limits := chosen[name].limits["eager"])}
    assert forward == ({"A": 1.2, "C": 1.2} if device == CUDA else {"F": 1.3, **dict.fromkeys(list(expected)[3:])})
    for name, case in chosen.items():
        assert case.cell == ("tanh" if name == "tanh" else "gru" if name.endswith("GRU") else "lstm")
        assert case.scorer == ("affine" if name.endswith("affine") else "default")
        assert (case.num_layers, case.bidirectional, case.shortest) == (
            (2, True, 50) if name == "packed" else (1, False, None)
        )


def test_a_stream_is_compared_with_a_cell() -> None:
    streams = bench.cases("stream-*", CPU)
    assert [(case.stream, case.batch_size, case.hidden_size) for case in streams] == [
        ("layer", 1, 128),
        ("cell", 1, 128),
    ]
    assert all(case.limits == {"eager": {"stream": 1.5}} for case in streams)
    for case in streams:
        layer = bench.ours(case, CPU)["ours float32"].layer
        assert isinstance(layer, sab.SABLSTMCell if case.stream == "cell" else sab.SABLSTM)
        assert isinstance(bench.theirs(case, CPU)["nn.LSTMCell float32"].layer, torch.nn.LSTMCell)


def test_options_are_the_defaults_and_both_sides_have_the_same_sizes() -> None:
    for case in (quick(name) for name in ("GRU", "tanh", "packed", "E-4000", "E-4000-affine")):
        mine, its = (side(case, CPU) for side in (bench.ours, bench.theirs))
        assert list(mine) == ["ours float32", "ours bfloat16"]
        names = {"gru": "nn.GRU", "tanh": "nn.RNN", "lstm": "nn.LSTM"}
        assert list(its) == [f"{names[case.cell]} float32", f"{names[case.cell]} autocast"]
        for our, their in zip(mine.values(), its.values(), strict=True):
            layer: Any = our.layer
            affine = sab.SABConfig(scorer="affine", incorporate="add")
            assert layer.config == (affine if case.case.endswith("affine") else sab.SABConfig())
            sizes = ("input_size", "hidden_size", "num_layers", "bidirectional")
            assert [getattr(layer, name) for name in sizes] == [getattr(their.layer, name) for name in sizes]
            x, y = our.example(), their.example()
            assert type(x) is type(y)
            assert torch.equal(x.data, y.data)
    packed = bench.ours(bench.CASES["packed"], CPU, ["float32"])["ours float32"].example()
    assert isinstance(packed, PackedSequence)
    lengths = pad_packed_sequence(packed)[1].tolist()
    assert (lengths[0], lengths[-1], len(set(lengths))) == (320, 50, 64)


# Measuring


def test_quick_runs_every_row_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "records.jsonl"
    assert run("--quick", "--output", out, "--commit", "abc") == 0
    records = records_of(out)
    assert [record["case"] for record in records] == list(bench.CASES)
    told = capsys.readouterr().out
    assert f"Records: {out}" in told
    for record in records:
        assert "error" not in record, record
        case = bench.CASES[record["case"]]
        assert record.keys() >= {"schema", "backend", "wall_seconds", "date", "threads", "versions", "k_top", "cell"}
        assert (record["schema"], record["commit"], record["quick"]) == (bench.SCHEMA, "abc", True)
        assert record["targets"] == {}, "sizes that no target was set for"
        assert record["hidden_size"] <= 16
        assert record["steps"] <= 12
        assert record["memory"].keys() == record["milliseconds"].keys()
        has_memory = case.device == "cpu" and case.stream is None
        assert all((taken is not None and taken > 0) == has_memory for taken in record["memory"].values())
        assert list(record["memory_ratio"]) == (list(case.precisions) if has_memory else [])
        assert record["ratio"].keys() == {"eager"}
        assert list(record["ratio"]["eager"]) == list(case.limits["eager"]), "what has no target is not measured"
        for chosen, ratio in record["ratio"]["eager"].items():
            times = {name: ways["eager"][chosen] for name, ways in record["milliseconds"].items()}
            assert all(0 < one["min"] <= one["median"] and one["repeats"] >= 2 for one in times.values())
            mine, its = (
                min(one["median"] for name, one in times.items() if name.startswith("ours") == is_ours)
                for is_ours in (True, False)
            )
            assert ratio == pytest.approx(mine / its)
    assert performance.load([out]) == [], "they mean nothing"
    assert not list(out.parent.glob(".*"))


def test_a_case_has_a_target_on_its_device_at_its_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda *arguments: {})

    def targets(name: str, device: torch.device, quick: bool = False) -> dict[str, Any]:
        (record,) = bench.bench(bench.cases(name, device, quick), device, 0.0)
        return record["targets"]

    assert targets("C", CUDA) == {
        "eager": {"forward+backward": 0.9, "forward": 1.2},
        "graph": {"forward+backward": 1.3},
    }
    assert targets("H-200", CPU) == {"eager": {"forward+backward": 1.1}}
    assert targets("C", CPU) == targets("H-200", CUDA) == targets("C", CUDA, quick=True) == {}


def test_a_row_that_fails_is_told_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = bench.measure

    def fails_for_g(case: bench.Case, *rest: Any) -> dict[str, Any]:
        if case.case == "G":
            raise RuntimeError("the device fell off\nits shelf")
        return measure(case, *rest)

    monkeypatch.setattr(bench, "measure", fails_for_g)
    assert run("--quick", "--cases", "F,G,H-200", "-o", tmp_path / "records.jsonl") == 0
    records = records_of(tmp_path / "records.jsonl")
    assert [record.get("error") for record in records] == [None, "RuntimeError: the device fell off", None]
    assert "G  n=16 B=4 T=12: failed: RuntimeError: the device fell off" in capsys.readouterr().out


def test_each_record_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "records.jsonl"
    lengths: list[int] = []

    def looks(case: bench.Case, *rest: Any) -> dict[str, Any]:
        lengths.append(len(records_of(out)) if out.exists() else 0)
        raise RuntimeError

    monkeypatch.setattr(bench, "measure", looks)
    assert run("--quick", "--cases", "H-*", "-o", out) == 0
    assert lengths == [0, 1, 2]


def test_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--quick", "--cases", "F*", "--minutes", "1e-9") == 0
    told = capsys.readouterr().out
    cut, over = told.splitlines()
    assert cut.startswith("--quick cut the sizes and the repeats")
    assert over == "The time was over before 2 of 2 cases were begun, the first of them F."


def test_compiling_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(timing.OverSequence, "first_call", lambda self: called.append(type(self.layer).__name__))
    bench.main(json.dumps({"case": asdict(quick("GRU")), "precision": "bfloat16", "device": "cpu"}))
    assert called == ["SABGRU"]


def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answers(command: list[str], timeout: float, **options: Any) -> None:
        request = json.loads(command[-1])
        asked.append((request["case"]["case"], request["precision"]))
        assert 0 < timeout <= 30
        if len(asked) == 3:
            raise bench.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(bench.subprocess, "run", answers)
    chosen = bench.cases("A,B,C,D,E-*,GRU,packed,B-1", CUDA)
    bench.compile_ahead(chosen, CUDA, 4, time.monotonic() + 60)
    names = ("A", "C", "D", "GRU", "packed", "E-4000-affine")
    assert sorted(asked) == sorted((name, one) for name in names for one in ("float32", "bfloat16"))


def test_what_the_kernels_depend_on_is_the_engines() -> None:
    engine = pytest.importorskip("sab.ops.triton.engine")
    assert bench.LARGEST_SMALL == engine.LARGEST_SMALL


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = timing.time_in_turn(calls, CPU, 0.0)
    assert order == ["a", "b"] * 3, "a round to warm up, two that count"
    assert times["a"]["repeats"] == times["b"]["repeats"] == 2


def test_memory_on_a_cpu_is_what_torch_gives_out(capfd: pytest.CaptureFixture[str]) -> None:
    def call() -> None:
        x = torch.zeros(1000)
        del x
        y = torch.zeros(500)
        (y + 1).sum()

    assert 4000 <= timing.peak_on_cpu(call) < 5000
    assert capfd.readouterr().err == ""


def test_a_stream_goes_on_from_the_state_before() -> None:
    (contender,) = bench.ours(replace(quick("stream-layer"), steps=5), CPU).values()
    seen: list[Any] = []
    contender.layer.register_forward_hook(lambda module, given, result: seen.append((given[1], result[1])))
    contender.first_call()
    assert [given is before for (given, _), (_, before) in zip(seen[1:], seen[:-1], strict=True)] == [True] * 4
    assert seen[-1][1].steps.tolist() == [5]


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


def test_ratios_are_of_the_best_of_each_side() -> None:
    def times(both: float, *ways: str) -> dict[str, Any]:
        return {way: {"forward": {"median": both, "min": both, "repeats": 7}} for way in ways}

    milliseconds = {
        "ours float32": times(3.0, "eager", "graph"),
        "ours bfloat16": times(2.5, "eager"),
        "nn.GRU float32": times(4.0, "eager", "graph"),
        "nn.GRU autocast": times(2.0, "eager"),  # could not be captured
    }
    memory: dict[str, int | None] = {
        "ours float32": 30,
        "ours bfloat16": 30,
        "nn.GRU float32": 20,
        "nn.GRU autocast": 10,
    }
    compared = bench.compared(milliseconds, memory)
    assert compared["ratio"] == {"eager": {"forward": 1.25}, "graph": {"forward": 0.75}}
    assert compared["memory_ratio"] == {"float32": 1.5, "bfloat16": 3.0}
    assert bench.compared(milliseconds, dict.fromkeys(memory))["memory_ratio"] == {}


NAMES = ", ".join(bench.CASES)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cases", "X"], f"--cases must match at least one of {NAMES}; got 'X'."),
        (["--cases", "F,"], f"--cases must match at least one of {NAMES}; got ''."),
        (["--minutes", "0"], "--minutes must be a finite number above 0; got 0.0."),
        (["--seconds", "0"], "--seconds must be a finite number above 0; got 0.0."),
        (["--jobs", "-1"], "--jobs must be a whole number of at least 0; got -1."),
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


def test_the_sweeps_are_cases_that_differ_in_one_size() -> None:
    for entry, _, names in performance.SWEPT.values():
        along = [bench.CASES[name] for name in names]
        assert len({getattr(case, entry) for case in along}) >= 4
        others = {"steps", "hidden_size", "batch_size"} - {entry}
        if entry == "hidden_size":
            others.remove("steps")  # a step costs the same at 180 steps as at 320, near enough
        for other in others:
            assert len({getattr(case, other) for case in along}) == 1
