"""The comparison of a GPU's kernels with float64: what it measures, by the interpreter, and its table."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from sab import SABLSTM
from sab.ops.triton import large
from tools import checks
from tools.pages import with_part

CASE = replace(
    checks.case_of(0),
    n=6,
    steps=9,
    batch=2,
    cell="lstm",
    scorer="cosine",
    weighting="softmax",
    incorporate="gate",
    k_top=2,
    k_att=1,
    attention_size=None,
    lengths=False,
    in_pieces=True,
    max_memory=None,
)
interpreted = pytest.mark.skipif(
    not large.INTERPRETED, reason="TRITON_INTERPRET=1 must be set before triton is imported"
)


def test_the_page_holds_the_records() -> None:
    page = checks.PAGE.read_text(encoding="utf-8")
    assert with_part(page, "checks", checks.page_part(checks.RECORDS.read_text(encoding="utf-8"))) == page


def test_cases_are_the_same_for_the_same_number() -> None:
    cases = [checks.case_of(number) for number in range(checks.CASES)]
    assert cases == [checks.case_of(number) for number in range(checks.CASES)]
    assert {case.cell for case in cases} == {"lstm", "gru", "rnn_tanh", "rnn_relu"}
    assert any(case.n > 128 for case in cases)
    assert any(case.max_memory for case in cases)


@interpreted
def test_the_kernels_equal_the_reference_in_exact_numbers() -> None:
    exact, _ = checks.results(CASE, "reference", "cpu", None)
    found, gap = checks.results(CASE, "triton", "cpu", None)
    assert gap == 0
    assert torch.equal(found["numbers"], exact["numbers"])
    assert max(checks.relative(found[name], exact[name], 0.0) for name in exact if name != "numbers") < 1e-9


@interpreted
def test_a_wrong_selection_shows() -> None:
    layer = SABLSTM(3, 6, k_top=2, k_att=1, k_trunc=None, backend="triton", dtype=torch.float64)
    with checks._passes() as passes:
        layer(torch.randn(9, 2, 3, dtype=torch.float64))
    ((plan, buffers),) = passes
    assert checks.gap_of(plan, buffers, layer) == 0
    chosen = buffers.selected[-1, 0]
    others = [slot for slot in range(plan.slots_at(plan.steps - 1)) if slot not in chosen.tolist()]
    chosen[0] = others[0]
    assert checks.gap_of(plan, buffers, layer) > 0
    chosen[0] = chosen[1]  # the same one twice
    assert checks.gap_of(plan, buffers, layer) == math.inf


def test_what_is_0_in_exact_numbers_is_compared_with_the_rest() -> None:
    assert checks.relative(torch.full((4,), 1e-9), torch.zeros(4, dtype=torch.float64), 1e-3) == pytest.approx(2e-6)
    assert checks.relative(torch.full((4,), torch.nan), torch.zeros(4, dtype=torch.float64), 1e-3) == math.inf
