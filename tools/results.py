"""Renews the tables and figures of docs/results.md, docs/drop-in.md and the README: `python -m tools.results`."""

from __future__ import annotations

from sab.lab.experiments import dropin as drop_in_table
from sab.lab.report.figures import save_in_every_format
from sab.lab.report.numbers import ByRow
from sab.lab.report.results import load, total_time
from tools import datasets, dropin, synthetic
from tools.figures import of_results
from tools.pages import IMAGES, ROOT, machines, replace_part


def main() -> None:
    by_row = load(ROOT / "results")
    replace_part(ROOT / "docs" / "results.md", "results", page_part(by_row))
    replace_part(ROOT / "README.md", "results", readme_part(by_row))
    replace_part(ROOT / "docs" / "drop-in.md", "drop-in", dropin.page_part(drop_in_table.load(ROOT / "results")))
    for name, figure in of_results(by_row).items():
        save_in_every_format(figure, IMAGES / name)


def page_part(by_row: ByRow) -> str:
    """The generated part of docs/results.md."""
    parts = [
        _about(by_row),
        *total_time(by_row),
        *synthetic.tables(by_row),
        *datasets.tables(by_row),
        *synthetic.beyond(by_row),
        *datasets.beyond(by_row),
        *synthetic.attention(by_row),
    ]
    return "\n\n".join(parts)


def readme_part(by_row: ByRow) -> str:
    """The generated part of the README: short tables."""
    return "\n\n".join([*synthetic.readme(by_row), *datasets.readme(by_row), *total_time(by_row)])


def _about(by_row: ByRow) -> str:
    """Where the numbers come from, a line for each device."""
    lines = machines(
        (record for records in by_row.values() for record in records),
        lambda device, group: f"{device}: {len(group)} run{'s' * (len(group) > 1)};",
    )
    return "\n".join(["Run on", "", *lines]) if lines else "Nothing has been run yet."


if __name__ == "__main__":
    main()
