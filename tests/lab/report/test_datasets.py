"""The tables of ptb, text8 and mnist: both ways to judge a text, epochs, the prefix, and what is beyond the paper."""

from __future__ import annotations

from typing import Any

import pytest

from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.settings import PAPERS
from sab.lab.experiments.tables import ROWS, Row
from sab.lab.report.datasets import CELLS, PAPERS_TABLES, PERMUTED, UNCLIPPED, table_cells
from sab.lab.report.numbers import ByRow
from tests.lab.report import made_up
from tests.lab.report.made_up import by_row, diverged, record
from tools import datasets, pages

PTB, MNIST, TEXT8 = "ptb-sab-5-10-ours", "mnist-sab-14-10-ours", "text8-sab-5-5-ours"


def table(rows: list[Row], made: ByRow) -> str:
    return pages.table(table_cells, rows, made)


def cells(row: str, *made: dict[str, Any]) -> dict[str, str]:
    return made_up.cells(table([ROWS[row]], by_row(*made)))


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


def test_a_row_that_was_not_run_says_so() -> None:
    told = cells(PTB)
    assert {told[name] for name in told if name.startswith(("fresh", "carried"))} == {"not run"}
    assert {told[name] for name in ("each seed", "epochs", "best epoch", "against the paper")} == {"–"}


def test_divergence() -> None:
    told = cells(PTB, diverged(PTB, after=120))
    assert told["fresh: valid"] == told["carried: test"] == "diverged"
    assert (told["each seed"], told["best epoch"]) == ("diverged at iteration 121", "–")
    assert told["against the paper"] == "not reached: diverged"
    told = cells(PTB, record(PTB, value=1.5, status="diverged", iterations=9000))
    assert (told["fresh: test"], told["each seed"]) == ("1.500", "1.500 / 1.500 (diverged at iteration 9001)")


def test_stale_records_are_marked() -> None:
    config = ROWS[PTB].config(0).to_json()
    config["training"]["lr"] = 0.5
    text = table([ROWS[PTB]], by_row(record(PTB, value=1.5, config=config), record(PTB, 1, 1.5)))
    assert "| 1.500 / 1.500 †, 1.500 / 1.500 |" in text
    assert text.endswith("† Made with another configuration than the row now has.")


def test_the_prefix_is_named_wherever_its_numbers_are() -> None:
    made = by_row(record(TEXT8, part="prefix"), record("text8-bptt", part="prefix"))
    assert made_up.cells(table([ROWS[TEXT8]], made))["data"] == "text8 prefix"
    assert "### text8 prefix" in datasets.tables(made)
    assert "![Learning curves of text8 prefix](images/text8.png)" in datasets.tables(made)
    assert any(part.startswith("text8 prefix: bits per character") for part in datasets.readme(made))
    assert "data" not in cells(TEXT8, record(TEXT8))
    assert "### text8" in datasets.tables({})
    both = by_row(record(TEXT8, part="prefix"), record("text8-bptt"))
    assert "### text8, text8 prefix" in datasets.tables(both)


def test_a_command_runs_the_rows_of_its_table() -> None:
    sections = [*PAPERS_TABLES, PERMUTED, *CELLS, *UNCLIPPED]
    page = "\n".join([*datasets.tables({}), *datasets.beyond({})])
    for section in sections:
        assert f"sab reproduce {section.task} --rows '{section.patterns}' --seeds 0,1,2" in page
    shown = {row.id for section in sections for row in section.rows}
    assert shown == {row.id for row in ROWS.values() if row.length is None}, "every row is in a table"
    for section in PAPERS_TABLES:
        assert {row.id for row in section.rows} >= {
            row.id for row in ROWS.values() if row.task == section.task and row.paper
        }


def test_beyond_the_paper() -> None:
    made = by_row(
        record(f"{PTB}-gru", value=1.5), record(PTB, value=1.4), record("mnist-permuted-bptt-ours", value=0.9)
    )
    text = "\n\n".join(datasets.beyond(made))
    assert "| SAB | ours | 5 | 10 | 2 | gru | – | – | 1.510 | 1.500 |" in text
    assert "| SAB | ours | 5 | 10 | 2 | lstm | 1.49 | 1.40 | 1.410 | 1.400 |" in text
    assert "| LSTM, full BPTT | our training, no memory | – | – | – | 91.00 | 90.00 |" in text
    assert "![" not in text, "there is none without clipping"
    made = by_row(record(MNIST), record(f"{MNIST}-unclipped", value=0.9))
    text = "\n\n".join(datasets.beyond(made))
    assert "(images/clipping.png)" in text
    epochs = f"{OURS['mnist'].epochs:g}"
    assert f"| none | – | – | 91.00 | 90.00 | 90.00 | 1 | {epochs} | 2 | 2 |" in text
    assert list(datasets.clipping_pairs(made)) == ["Pixel-by-pixel MNIST"]


@pytest.mark.parametrize(("task", "setting"), [(task, setting) for task in PAPERS for setting in (PAPERS, OURS)])
def test_the_settings_are_those_of_the_rows(task: str, setting: dict[str, Any]) -> None:
    name = "ours" if setting is OURS else "the paper's"
    reading = "ours" if setting is OURS else "as released"
    row = next(row for row in ROWS.values() if (row.task, row.reading, row.otherwise) == (task, reading, {}))
    options = row.config(0).options()
    lines = [line for line in datasets.settings_table().splitlines() if line.startswith(f"| {task} | {name} |")]
    (told,) = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert told[2:4] == [str(options["hidden_size"]), str(options["batch_size"])]
    assert (float(told[5]), float(told[7]), float(told[8])) == (
        *(options["lr"], options["clip"]),
        options["input_scale"],
    )
    assert [float(cell) for cell in told[9:11]] == [options["dropout"], options["weight_decay"]]
    assert told[11:13] == ["yes" if options.get("shifted") else "no", f"{setting[task].epochs:g}"]
    assert told[13:] == ["–" if options["patience"] is None else str(options["patience"]), options["precision"]]


def test_the_readme() -> None:
    made = by_row(record("ptb-bptt", value=1.4), record(MNIST, 0, 0.97), record(MNIST, 1, 0.98))
    text = "\n\n".join(datasets.readme(made))
    heading = "Penn Treebank: bits per character, the paper's / here, median (seeds); `sab reproduce ptb`:"
    assert heading in text
    assert "| LSTM, full BPTT | 1.48 / 1.410 (1) | 1.38 / 1.400 (1) | 1.400 (1) |" in text
    assert "| SAB, k_trunc = 5, k_top = 10 | 1.49 / not run | 1.40 / not run | not run |" in text
    assert "| SAB, k_trunc = 14, k_top = 10 | 92.2 / 98.50 (2) | 90.9 / 97.50 (2) |" in text
