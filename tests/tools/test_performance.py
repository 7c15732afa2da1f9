"""The generated parts of docs/performance.md and docs/from-torch.md, and the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sab.lab.experiments.bench import CASES, compared
from sab.lab.experiments.timing import BOTH
from sab.lab.report.performance import _upgraded, load
from tests.lab.report.test_performance import first_version, record, sweep
from tools import floors
from tools.pages import ROOT, with_part
from tools.performance import IN_A_LIST, cost_part, earlier_part, floors_part, latency_part, page_part, speed_part


def without(made: dict[str, Any], name: str) -> dict[str, Any]:
    """A record without the times of one contender."""
    times = {one: ways for one, ways in made["milliseconds"].items() if one != name}
    return {**made, "milliseconds": times, **compared(times, {}), "memory_ratio": made["memory_ratio"]}


def test_the_page() -> None:
    told = page_part([record(), record("G", error="it broke", device="cpu (x)"), *sweep()[1:]]).replace("\u00a0", " ")
    assert page_part([]) == "Nothing has been measured yet."
    assert "| A | 128 | 64 | 320 | 3.00 | 2.00 | 1.50 > 1.3 | 0.75 | 1.50 ≤ 1.5 | 0.75, 1.25 |" in told
    assert "| A, forward | 128 | 64 | 320 | 3.00 | 2.00 | 1.50 > 1.2 | 0.75 | – | – |" in told
    assert "| B | 128 | 64 | 784 | 7.84 | 2.00 | 3.92 > 1.3 | 1.96 | " in told
    assert "- G  n=1000 B=32 T=100: failed: it broke" in told
    assert "(images/time-of-a-step.png)" in told
    assert "images" not in page_part([record("G")])
    for line in told.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            assert len(line) <= 90


def test_what_the_first_version_measured() -> None:
    context = first_version(kind="context", beside="reference", target=None, speedup={"forward+backward": 60.0})
    context["milliseconds"]["reference"] = {"eager": {"forward+backward": {"median": 180.0, "min": 170.0}}}
    old = [_upgraded(one) or {} for one in (first_version(), context)]
    told = earlier_part([record(), *old])
    assert "| A, mlp bfloat16 | 128 | 64 | 320 | 3.00 | 3.00 | 1.00 ≤ 1.5 | – | – | 1.25 |" in told
    assert "| A | mlp | 320 | 180 | 3.00 | 60.0 |" in told
    assert earlier_part([record()]) == "Nothing has been measured yet."


def test_the_readme_has_some_of_the_cases() -> None:
    found = [record("C"), record("H-200", device="cpu (x)"), record("stream-cell", device="cpu (x)")]
    assert speed_part([*found, record("B"), record("A", error="it broke")]).splitlines()[2:] == [
        "| GPU | training, LSTM | 1000 | 64 | 180 | 1.50 | 0.75 |",
        "| 2 CPU threads | training, LSTM | 64 | 32 | 200 | 1.50 | 0.75 |",
        "| 2 CPU threads | a stream, step by step | 128 | 1 | 100 | 1.50 | 0.75 |",
    ]
    assert speed_part([]) == "Nothing has been measured yet."


def test_the_readme_has_no_number_where_none_is_fair() -> None:
    half_alone, disturbed = without(record(), "nn.LSTM float32"), record("C")
    disturbed["milliseconds"]["nn.LSTM autocast"]["eager"][BOTH]["min"] = 1.0
    assert [line.split(" | ")[5:] for line in speed_part([half_alone, disturbed]).splitlines()[2:]] == [
        ["1.50", "– |"],
        ["–", "0.75 |"],
    ]


def test_the_costs_on_each_device() -> None:
    found = [record(ours=4.0), record("C"), record("E-4000", ours=6.0), record("GRU", cell="gru", ours=99.0)]
    found += [record("packed", ours=99.0), record("E-4000-affine", scorer="affine", ours=99.0)]
    assert latency_part([*found, record("F", device="cpu (x)", ours=5.0)]).splitlines() == [
        "A training step with default options takes this many times as long as `nn.LSTM`'s:",
        "",
        "- GPU: **1.5 to 2.0** (0.8 to 1.0) up to 320 steps, **3.0** (1.5) at 4,000.",
        "- 2 CPU threads: **2.5** (1.2) up to 120 steps.",
        "",
        "Each side has its faster precision, bfloat16 autocast or float32. In parentheses both are in float32, as "
        "without autocast.",
    ]
    assert latency_part([record("E-4000")]) == latency_part([]) == "Nothing has been measured yet."


def test_the_costs_without_float32() -> None:
    half_alone = without(record(), "ours float32")
    told = latency_part([half_alone, record("F", device="cpu (x)")]).splitlines()
    assert told[2:4] == ["- GPU: **3.0** up to 320 steps.", "- 2 CPU threads: **1.5** (0.8) up to 120 steps."]
    told = latency_part([half_alone]).splitlines()
    assert told[-1] == "Each side has its faster precision, bfloat16 autocast or float32."


def test_a_record_with_times_of_a_graph_alone() -> None:
    alone = record()
    for ways in alone["milliseconds"].values():
        del ways["eager"]
    del alone["ratio"]["eager"]
    assert "| A | 128 | 64 | 320 | 1.50 | 1.00 | – | – | 1.50 ≤ 1.5 | 0.75, 1.25 |" in page_part([alone]).replace(
        "\u00a0", " "
    )
    assert speed_part([alone]) == latency_part([alone]) == "Nothing has been measured yet."
    on_cpu = {**alone, "case": "F"}, {**alone, "case": "H-200"}
    assert "| F | 1.81 | – |" in floors_part(on_cpu)
    assert cost_part(on_cpu) == "Nothing has been measured yet."


def test_every_case_has_a_floor() -> None:
    told = floors_part([record(ours=3.0), record("B", error="it broke"), record("F", ours=4.0)]).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in told if line.startswith("| ")] == [
        "case",
        "---",
        *(name for name, case in CASES.items() if case.device == "cuda"),
        "case",
        "---",
        *(name for name, case in CASES.items() if case.device == "cpu"),
    ]
    a = next(line for line in told if line.startswith("| A |"))
    floor = floors.of_gpu(CASES["A"]).most * 1e3
    assert a.endswith(f"| {floor:.2f} | 1.50 | {1.5 / floor:.1f} |"), "from a graph"
    assert next(line for line in told if line.startswith("| B |")).endswith("| – | – |")
    assert "| F | 1.81 | 2.00 |" in told
    assert max(map(len, told)) <= 90


def test_floors_are_those_of_the_sizes() -> None:
    a, steps = CASES["A"], 320
    products, memory, chain = floors.of_gpu(a)
    rows, n = 64 * steps, 128
    assert products == pytest.approx(2 * rows * (3 * (4 + 3.5) * n * n + 2 * 4 * n * n + steps / 4 * n) / 989e12)
    assert memory == pytest.approx(4 * rows * 62 * n / 4.8e12)
    assert chain == pytest.approx(steps * (1.8e-6 + 2 * n * steps / 4 / (64 * 1.98e9)))
    longer = floors.of_gpu(replace(a, steps=2 * steps))
    assert longer.products > 2 * products, "there is more to score"
    assert longer.memory == pytest.approx(2 * memory)
    assert floors.of_gpu(CASES["C"]).chain == pytest.approx(180 * (6 * 0.7e-6 + 2 * 2 * 6.192e6 / (132 * 64 * 1.98e9)))
    assert floors.multiply_adds(CASES["F"]) == pytest.approx(1 + 3.5 * 128 / (4 * 138))
    assert floors.of_gpu(CASES["packed"]).chain == pytest.approx(4 * chain)


def test_the_cost_against_the_length() -> None:
    told = cost_part([record("H-3000", ours=9.0), record("H-200"), record()]).splitlines()
    assert told[2:4] == [
        "| 200 | 3.00 | 2.00 | 1.50 | 3.00 | 2.00 | 1.50 |",
        "| 3,000 | 9.00 | 2.00 | 4.50 | 9.00 | 2.00 | 4.50 |",
    ]
    assert told[-1] == "Hidden size 64, batches of 32, 10 inputs, 2 threads."
    assert cost_part([record()]) == "Nothing has been measured yet."


@pytest.mark.parametrize(
    ("page", "name", "part"),
    [
        ("performance.md", "benchmark", page_part),
        ("engine.md", "floors", floors_part),
        ("engine-appendix.md", "earlier", earlier_part),
        ("from-torch.md", "cost", cost_part),
        ("../README.md", "speed", speed_part),
        *((page, "latency", latency_part) for page in IN_A_LIST),
    ],
)
def test_a_page_is_up_to_date_with_the_committed_records(page: str, name: str, part: Any) -> None:
    records = load(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert with_part(text, name, part(records)) == text, "run: make performance"
