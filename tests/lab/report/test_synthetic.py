"""The tables of copying and adding: medians, what diverged, what was not run, what falls short."""

from __future__ import annotations

from typing import Any

from sab.lab.experiments.tables import ROWS
from tests.lab.report import made_up
from tests.lab.report.made_up import SAB, by_row, diverged, record
from tools import synthetic
from tools.pages import table


def cells(row: str, *made: dict[str, Any]) -> dict[str, str]:
    return made_up.cells(row, by_row(*made))


def test_a_row_with_its_seeds() -> None:
    told = cells(
        SAB, record(seed=0, value=0.9958), record(seed=1, value=1.0), record(seed=2, value=0.98, solved_at=None)
    )
    assert (told["method"], told["reading"], told["k_trunc"], told["k_top"]) == ("SAB", "ours", "5", "5")
    assert (told["paper: accuracy, %"], told["paper: CE, last 10"], told["paper: CE"]) == ("98.9", "0.048", "0.002")
    assert told["here: accuracy, %"] == "99.6"
    assert told["here: CE"] == "0.996"
    assert told["each seed"] == "99.6, 100.0, 98.0"
    assert (told["seeds"], told["iterations"], told["first solved"]) == ("3", "6,000", "400, 400, never")
    assert told["wall time"] == "1:15 min, 8 at once"
    assert told["against the paper"] == "reached by 2 of 3 seeds"


def test_a_row_that_was_not_run_says_so() -> None:
    told = cells(SAB)
    assert told["here: accuracy, %"] == "not run"
    assert {told[name] for name in ("each seed", "iterations", "wall time", "against the paper")} == {"–"}


def test_divergence_is_told_and_counts_as_worse_than_any_number() -> None:
    told = cells(SAB, record(seed=0), diverged(seed=1), diverged(seed=2, after=99))
    assert told["here: accuracy, %"] == told["here: CE"] == "diverged"
    assert told["each seed"] == "100.0, diverged at iteration 241, diverged at iteration 100"
    assert told["iterations"] == "6,000, 240, 99"
    assert told["against the paper"] == "reached by 1 of 3 seeds"
    assert cells(SAB, diverged())["against the paper"] == "not reached: diverged"
    told = cells(SAB, record(seed=0), record(seed=1, value=0.5), diverged(seed=2))
    assert told["here: accuracy, %"] == "50.0"
    assert told["first solved"] == "400, 400, never"


def test_a_record_of_another_configuration_is_marked() -> None:
    config = ROWS[SAB].config(0).to_json()
    config["training"]["lr"] = 0.5
    text = table([ROWS[SAB]], by_row(record(config=config), record(seed=1, config={"task": {}}), record(seed=2)))
    assert "100.0 †, 100.0 †, 100.0 |" in text
    assert "† Made with another configuration than the row now has." in text
    assert "†" not in table([ROWS[SAB]], by_row(record()))
    config["training"] |= {"lr": 6e-3, "device": "cuda"}
    assert "†" not in table([ROWS[SAB]], by_row(record(config=config))), "the device is free"
    config["training"]["iterations"] = 2
    assert "100.0 † |" in table([ROWS[SAB]], by_row(record(config=config))), "a trial is another thing"


def test_columns_that_say_nothing_are_left_out() -> None:
    assert "k_att" not in cells(SAB)
    assert cells("adding-400-sab-5-10-ours")["k_att"] == "5"
    assert not [name for name in cells("copying-500-sab-10-10-ours") if "paper" in name]
    assert cells("copying-100-bptt-ours")["reading"] == "our training, no memory"


def test_what_is_a_rows_own_stands_with_its_method() -> None:
    longer = cells("copying-100-bptt-full-budget", record("copying-100-bptt-full-budget", value=0.99))
    assert (longer["reading"], longer["against the paper"]) == ("200,000 iterations", "reached by the one seed")
    today = cells("copying-100-chrono-full-budget")
    assert (today["method"], today["reading"]) == (
        *("LSTM, full BPTT, chrono start", "200,000 iterations, falling rate"),
    )
    checkpoint = cells("copying-200-sab-1-5-as-released-full-budget")
    assert (checkpoint["reading"], checkpoint["k_top"]) == ("as released, 200,000 iterations, clip 0.5", "5")
    attention = cells("copying-100-self-attention-ours")
    assert [attention[name] for name in ("method", "reading", "k_trunc", "k_top")] == [
        *("LSTM, full self-attention", "ours", "–", "–"),
    ]


def test_other_lengths() -> None:
    rows = [row for row in ROWS.values() if row.other_lengths]
    tested = {str(length): {"accuracy_last10": 0.9} for length in (200, 300)}
    made = by_row(record(rows[0].id, 0, other_lengths=tested), record(rows[0].id, 1), diverged(rows[0].id, 2))
    text = synthetic.other_lengths_table(rows, made)
    assert (
        "| **100.0** (100.0, 100.0, diverged at iteration 241) | **90.0** (90.0) | **90.0** (90.0) | not run |" in text
    )
    assert text.count("not run") == 3 + 6 * (len(rows) - 1)
    assert "| LSTM, full self-attention, ours | – | – |" in text
