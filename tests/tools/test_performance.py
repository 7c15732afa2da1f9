"""The generated parts of docs/performance.md and docs/from-torch.md, and the figures."""

from __future__ import annotations

from typing import Any

import pytest

from sab.lab.report.performance import _upgraded, load
from tests.lab.report.test_performance import first_version, record, sweep
from tools.pages import ROOT, with_part
from tools.performance import cost_part, earlier_part, page_part


def test_the_page() -> None:
    told = page_part([record(), record("G", error="it broke", device="cpu (x)"), *sweep()[1:]])
    assert page_part([]) == "Nothing has been measured yet."
    assert "| A | 128 | 64 | 320 | 3.00 | 2.00 | 1.50 > 1.3 | 1.50 ≤ 1.5 | 0.75, 1.25 |" in told
    assert "| A, forward | 128 | 64 | 320 | 3.00 | 2.00 | 1.50 > 1.2 | – | – |" in told
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
    assert "| A, mlp bfloat16 | 128 | 64 | 320 | 3.00 | 3.00 | 1.00 ≤ 1.5 | – | 1.25 |" in told
    assert "| A | mlp | 320 | 180 | 3.00 | 60.0 |" in told
    assert earlier_part([record()]) == "Nothing has been measured yet."


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
        ("performance.md", "earlier", earlier_part),
        ("from-torch.md", "cost", cost_part),
    ],
)
def test_a_page_is_up_to_date_with_the_committed_records(page: str, name: str, part: Any) -> None:
    records = load(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert with_part(text, name, part(records)) == text, "run: make performance"
