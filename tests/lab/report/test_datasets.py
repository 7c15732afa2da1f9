"""The tables of ptb, text8 and mnist: both ways to judge a text, epochs, the prefix, and what is beyond the paper."""

from __future__ import annotations

from typing import Any

from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.tables import ROWS
from sab.lab.report.tables import CARRIED, CELLS, CIFAR10, PAPERS_TABLES, PERMUTED, UNCLIPPED
from tests.lab.report import made_up
from tests.lab.report.made_up import by_row, diverged, record
from tools import datasets, summary

PTB, MNIST, TEXT8 = "ptb-sab-5-10-ours", "mnist-sab-14-10-ours", "text8-sab-5-5-ours"


def cells(row: str, *made: dict[str, Any]) -> dict[str, str]:
    return made_up.cells(row, by_row(*made))


def test_a_row_of_text() -> None:
    told = cells(PTB, record(PTB, 0, 1.398), record(PTB, 1, 1.42, best_at=4 * 1567), record(PTB, 2, 1.41))
    assert (told["method"], told["reading"], told["k_trunc"], told["k_top"], told["k_att"]) == (
        *("SAB", "ours"),
        *("5", "10", "2"),
    )
    assert (told["paper: valid"], told["paper: test"]) == ("1.49", "1.40")
    assert (told["fresh: valid"], told["fresh: test"]) == ("1.420", "1.410")
    assert (told["carried: valid"], told["carried: test"]) == ("1.420", "1.410")
    assert told["each seed"] == "1.398 / 1.398, 1.420 / 1.420, 1.410 / 1.410"
    assert (told["seeds"], told["epochs"], told["best epoch"]) == ("3", f"{OURS['ptb'].epochs:g}", "2, 4, 2")
    assert told["wall time"] == "1:15 min, 8 at once"
    assert told["against the paper"] == "reached by 1 of 3 seeds"
    assert told["better than TBPTT here"] == "not run (the paper's training); not run (our training)"
    assert not told.keys() & {"cell", "clip", "data", "largest gradient norm"}


def test_a_row_of_digits() -> None:
    stopped = record(MNIST, 1, 0.95, status="stopped", iterations=5 * 781, epochs=5.0)
    told = cells(MNIST, record(MNIST, 0, 0.97), stopped)
    assert (told["here: valid"], told["here: test"], told["each seed"]) == ("97.00", "96.00", "97.00, 95.00")
    assert (told["epochs"], told["best epoch"], told["k_att"]) == (f"{OURS['mnist'].epochs:g}, 5", "2", "14")
    assert told["against the paper"] == "reached"


def test_divergence() -> None:
    told = cells(PTB, diverged(PTB, after=120))
    assert told["fresh: valid"] == told["carried: test"] == "diverged"
    assert (told["each seed"], told["best epoch"]) == ("diverged at iteration 121", "–")
    assert told["against the paper"] == "not reached: diverged"
    told = cells(PTB, record(PTB, value=1.5, status="diverged", iterations=9000))
    assert (told["fresh: test"], told["each seed"]) == ("1.500", "1.500 / 1.500 (diverged at iteration 9001)")


def test_the_prefix_is_named_wherever_its_numbers_are() -> None:
    made = by_row(record(TEXT8, part="prefix"), record("text8-bptt", part="prefix"))
    assert made_up.cells(TEXT8, made)["data"] == "text8 prefix"
    assert "## text8 prefix" in datasets.tables(made)
    assert "| text8 prefix, bits |" in summary.part(made, [])
    assert "data" not in cells(TEXT8, record(TEXT8))
    assert "## text8" in datasets.tables({})
    both = by_row(record(TEXT8, part="prefix"), record("text8-bptt"))
    assert "## text8, text8 prefix" in datasets.tables(both)


def test_a_command_runs_the_rows_of_its_table() -> None:
    sections = [*PAPERS_TABLES, PERMUTED, CIFAR10, *CELLS, *UNCLIPPED, CARRIED]
    page = "\n".join([*datasets.tables({}), *datasets.beyond({})])
    for section in sections:
        assert f"sab reproduce {section.task} --rows '{section.patterns}'\n" in page
    shown = {row.id for section in sections for row in section.rows}
    assert shown == {row.id for row in ROWS.values() if row.length is None}, "every row is in a table"
    for section in PAPERS_TABLES:
        assert {row.id for row in section.rows} >= {
            row.id for row in ROWS.values() if row.task == section.task and row.paper
        }
