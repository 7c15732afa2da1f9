"""The generated parts of docs/performance.md and docs/from-torch.md, and the figures."""

from __future__ import annotations

from typing import Any

import pytest

from sab.lab.report.performance import load
from tests.lab.report.test_performance import record, sweep
from tools.figures import step_times
from tools.pages import ROOT, with_part
from tools.performance import cost_part, page_part


def test_the_page() -> None:
    context = {"kind": "context", "beside": "reference", "target": None}
    slow = record(speedup={"forward+backward": 60.0, "forward": 1.0}, **context)
    slow["milliseconds"]["reference"] = {"eager": {"forward+backward": {"median": 180.0, "min": 170.0}}}
    broken = record(scorer="dot", error="it broke")
    told = page_part([record(), broken, slow, *sweep()])
    assert told.startswith("Measured on")
    assert page_part([]) == "Nothing has been measured yet."
    assert "| A | mlp | float32 | triton | 3.00 | 2.00 | 1.50 | 1.50 | 1.50 | 1.00 | 1.50 | 1.25 | 1.5 | yes |" in told
    assert "| A | dot | float32 | triton | failed |" in told
    assert "dot float32: failed: it broke" in told
    assert "| A | reference | mlp | 320 | 180 | 3.00 | 60.0 | – | – |" in told
    assert "| T | affine | dot | nn.LSTM |" in told
    assert "| 100 | 5.00 | 5.00 | 15.0 |" in told, "microseconds a step, from the graph"
    for line in told.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    for picture in ("time-against-T.png", "time-against-n.png"):
        assert f"(images/{picture})" in told


def test_the_cost_against_the_length() -> None:
    told = cost_part([record(case="H", steps=3000, ours=9.0), record(case="H", steps=200), record()]).splitlines()
    assert told[2:4] == [
        "| 200 | 3.00 | 2.00 | 1.50 | 3.00 | 2.00 | 1.50 |",
        "| 3,000 | 9.00 | 2.00 | 4.50 | 9.00 | 2.00 | 4.50 |",
    ]
    assert told[-1] == "Hidden size 128, batches of 64, 128 inputs, 2 threads."
    assert cost_part([record()]) == "Nothing has been measured yet."


def test_a_figure_says_what_it_shows() -> None:
    figure = step_times([one for one in sweep() if one["case"] == "T"], "T")
    left, right = figure.axes
    assert left.get_ylabel() == "microseconds a step,\nfrom a CUDA graph"
    assert (left.get_xlabel(), right.get_xlabel()) == ("steps T", "steps T")
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["SAB, affine", "SAB, dot", "torch.nn.LSTM"]
    assert [line.get_ydata()[0] for line in left.lines] == [5.0, 5.0, 15.0]  # pyright: ignore


@pytest.mark.parametrize(
    ("page", "name", "part"), [("performance.md", "benchmark", page_part), ("from-torch.md", "cost", cost_part)]
)
def test_a_page_is_up_to_date_with_the_committed_records(page: str, name: str, part: Any) -> None:
    records = load(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert with_part(text, name, part(records)) == text, "run: make performance"
