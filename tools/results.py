"""Renews the tables, figures and files that are made from `results/`: `python -m tools.results`."""

from __future__ import annotations

from pathlib import Path

from sab.lab.experiments import costs
from sab.lab.experiments import dropin as drop_in_table
from sab.lab.experiments import rivals as rivals_table
from sab.lab.experiments.records import Record
from sab.lab.files import write_text
from sab.lab.report.figures import save_in_every_format
from sab.lab.report.numbers import ByRow
from sab.lab.report.results import load, total_time
from tools import datasets, distance, dropin, rivals, rows, summary, synthetic
from tools.figures import of_results
from tools.pages import IMAGES, ROOT, machines, replace_part

ROWS = ROOT / "docs" / "results.csv"


def main() -> None:
    by_row = load(ROOT / "results")
    for page, name, part in parts(by_row):
        replace_part(page, name, part)
    write_text(ROWS, rows.text(by_row))
    for name, figure in (of_results(by_row) | rivals.figures(*_of_rivals())).items():
        save_in_every_format(figure, IMAGES / name)


def parts(by_row: ByRow) -> list[tuple[Path, str, str]]:
    """Every generated part: its page, its name there and its text."""
    docs, readme = ROOT / "docs", ROOT / "README.md"
    swaps = drop_in_table.load(ROOT / "results")
    swap = dropin.swap_part(swaps)
    return [
        (docs / "results.md", "summary", summary.part(by_row, _of_rivals()[0])),
        (docs / "results.md", "distance", distance.part(by_row)),
        (docs / "results-tables.md", "tables", page_part(by_row)),
        (docs / "results-appendix.md", "settings", datasets.settings_table()),
        (docs / "drop-in.md", "drop-in", dropin.page_part(swaps)),
        (docs / "when.md", "swap", swap),
        (docs / "rivals.md", "rivals-overview", rivals.overview(_of_rivals()[0])),
        (docs / "rivals.md", "rivals", rivals.page_part(*_of_rivals())),
        (readme, "swap", swap),
        (readme, "summary", summary.sentence(by_row)),
    ]


def _of_rivals() -> tuple[list[Record], list[Record]]:
    return rivals_table.load(ROOT / "results"), costs.load(ROOT / "results")


def page_part(by_row: ByRow) -> str:
    """The generated part of docs/results-tables.md."""
    parts = [
        *synthetic.tables(by_row),
        *datasets.tables(by_row),
        *synthetic.beyond(by_row),
        *datasets.beyond(by_row),
        "## Where it was run",
        _about(by_row),
        *total_time(by_row),
    ]
    return "\n\n".join(parts)


def _about(by_row: ByRow) -> str:
    """Where the numbers come from, a line for each device."""
    lines = machines(
        (record for records in by_row.values() for record in records),
        lambda device, group: f"{device}: {len(group)} run{'s' * (len(group) > 1)};",
    )
    return "\n".join(lines) if lines else "Nothing has been run yet."


if __name__ == "__main__":
    main()
