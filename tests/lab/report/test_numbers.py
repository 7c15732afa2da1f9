"""Numbers from records: medians, and what is said of them beside the paper's and beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from sab.lab.experiments.records import is_stale
from sab.lab.experiments.tables import ROWS
from sab.lab.models import METHODS as ALL_METHODS
from sab.lab.report.numbers import METHODS, STALE_NOTE, against_truncation, footnotes, mark, median, verdict
from tests.lab.report.made_up import SAB, by_row, diverged, record


def test_every_method_has_a_name() -> None:
    assert METHODS.keys() == set(ALL_METHODS)


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ([0.1, 0.3, 0.2], True, 0.2),
        ([0.1, 0.3], False, 0.2),
        ([None, 0.3, 0.2], True, 0.2),
        ([None, 0.3, 0.2], False, 0.3),
        ([None, 0.3], True, None),
        ([None], True, None),
        ([], True, None),
    ],
)
def test_median(values: list[float | None], higher: bool, expected: float | None) -> None:
    assert median(values, higher) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("row", "value", "told"),
    [
        (SAB, 0.98850, "reached by the one seed"),  # 98.9 as the paper rounds
        (SAB, 0.98840, "below"),
        ("copying-100-sab-10-10-ours", 0.9996, "reached by the one seed"),
        ("copying-100-sab-10-10-ours", 0.9990, "below"),
        ("adding-200-sab-10-10-ours", 0.00014, "reached by the one seed"),
        ("adding-200-sab-10-10-ours", 0.00016, "above"),
        ("adding-400-bptt", 0.000004, "reached by the one seed"),
        ("adding-400-bptt", 0.000006, "above"),
        ("copying-500-sab-10-10-ours", 0.1, "–"),
    ],
)
def test_against_the_paper(row: str, value: float, told: str) -> None:
    assert verdict(ROWS[row], [record(row, value=value)]) == told


def test_every_seed_must_reach_it() -> None:
    assert verdict(ROWS[SAB], [record(), record(seed=1)]) == "reached"
    assert verdict(ROWS[SAB], [record(), record(seed=1, value=0.5)]) == "reached by 1 of 2 seeds"


BITS = "ptb-sab-5-10-ours"
"""The paper has 1.40."""


def bits(seed: int, fresh: float, carried: float) -> dict[str, Any]:
    metrics = {"bits_per_character": fresh, "bits_per_character_carried": carried}
    return record(BITS, seed, metrics=metrics)


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ([(1.404, 1.30)], "reached by the one seed"),
        ([(1.406, 1.404)], "reached by the one seed (carried only)"),
        ([(1.38, 1.5)], "reached by the one seed (fresh only)"),
        ([(1.5, 1.5)], "above"),
        ([(1.3, 1.3), (1.3, 1.3)], "reached"),
        ([(1.3, 1.3), (1.5, 1.3)], "fresh: reached by 1 of 2 seeds; carried: reached"),
        ([(1.5, 1.3), (1.5, 1.5)], "reached by 1 of 2 seeds (carried only)"),
    ],
)
def test_text_is_judged_in_both_ways(seeds: list[tuple[float, float]], told: str) -> None:
    assert verdict(ROWS[BITS], [bits(seed, *values) for seed, values in enumerate(seeds)]) == told


def test_digits_are_judged_on_test_data() -> None:
    row = "mnist-sab-14-10-ours"
    assert verdict(ROWS[row], [record(row, value=0.9086)]) == "reached by the one seed"
    assert verdict(ROWS[row], [record(row, value=0.9084)]) == "below"
    assert verdict(ROWS[f"{row}-gru"], [record(f"{row}-gru")]) == "–"


def test_a_run_that_diverged_counts_by_the_weights_that_it_kept() -> None:
    kept = record(BITS, value=1.3, status="diverged")
    assert verdict(ROWS[BITS], [kept]) == "reached by the one seed"
    assert verdict(ROWS[BITS], [diverged(BITS)]) == "not reached: diverged"


def test_against_our_own_rows_without_a_memory() -> None:
    made = by_row(bits(0, 1.40, 1.39), record("ptb-tbptt-5", value=1.41), record("ptb-tbptt-5-ours", value=1.395))
    told = "yes (1.410 / 1.410, the paper's training); carried only (1.395 / 1.395, our training)"
    assert against_truncation(ROWS[BITS], made) == told
    made.pop("ptb-tbptt-5-ours")
    assert against_truncation(ROWS[BITS], made).endswith("; not run (our training)")
    made[BITS] = [diverged(BITS)]
    assert against_truncation(ROWS[BITS], made).startswith("no (1.410")
    made["ptb-tbptt-5"] = [diverged("ptb-tbptt-5")]
    assert against_truncation(ROWS[BITS], made).startswith("no (diverged / diverged")
    assert against_truncation(ROWS["ptb-tbptt-5"], made) == "–"
    assert against_truncation(ROWS["ptb-sab-5-5-ours"], made) == "–", "it was not run"
    gru = record(f"{BITS}-gru")
    assert against_truncation(ROWS[gru["row"]], by_row(gru)) == "–", "there is no such row of that cell"
    fair = by_row(record("mnist-sab-10-10-ours", value=0.95), record("mnist-tbptt-10-ours", value=0.95))
    assert against_truncation(ROWS["mnist-sab-10-10-ours"], fair) == "no (95.00, our training)", "as good is not better"


def test_the_memory_that_a_baseline_does_not_have_makes_no_record_stale() -> None:
    for row, makes_a_difference in ((ROWS["ptb-sab-5-5-ours"], True), (ROWS["ptb-tbptt-5-ours"], False)):
        config = row.config(0).to_json()
        config["model"] |= {"weighting": "relu", "readout": "hidden+weights", "attention_size": 3}
        assert is_stale(row, record(row.id, config=config)) == makes_a_difference
        config["model"]["cell"] = "gru"
        assert is_stale(row, record(row.id, config=config))


def test_a_record_with_another_memory_has_a_mark_and_a_footnote() -> None:
    row, control = ROWS[SAB], ROWS["copying-100-bptt-ours"]
    config = row.config(0).to_json()
    config["model"] |= {"scorer": "mlp", "incorporate": "add", "readout": "hidden+summary", "attention_size": 64}
    config["model"] |= {"input_scale": 8.0, "initial_score": -4.0}
    older, now = record(SAB, config=config), record(SAB, 1)
    assert (mark(row, older), mark(row, now)) == (" ‡", "")
    words = "mlp, softmax, add, keys of size 64, readout hidden+summary, inputs × 8"
    assert footnotes([row], by_row(older, now)) == [f"‡ Recorded with the memory of its time: {words}."]
    assert footnotes([row], by_row(now)) == []
    config = row.config(0).to_json()
    config["training"]["lr"] = 0.5
    assert mark(row, record(SAB, config=config)) == " †"
    config = control.config(0).to_json()
    config["model"]["input_scale"] = 8.0
    scaled = record(control.id, config=config)
    assert mark(control, scaled) == " †", "it has no memory"
    assert footnotes([row, control], by_row(scaled, now)) == [STALE_NOTE]
    assert len(footnotes([row, control], by_row(scaled, older))) == 2


def test_a_record_of_the_prefix_is_not_stale() -> None:
    row = ROWS["text8-sab-5-5-ours"]
    assert not is_stale(row, record(row.id, part="prefix"))
    assert not is_stale(row, record(row.id))
    config = row.config(0).to_json()
    config["task"]["part"] = "prefix"
    assert is_stale(row, record(row.id, config=config)), "so many iterations are those of the whole"
