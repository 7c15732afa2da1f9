"""Pages with generated parts. A generated part lies between two marks; the rest of the page is written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sab.lab.experiments.tables import COLUMNS, Row
from sab.lab.files import write_text
from sab.lab.report.numbers import NONE, ByRow, footnotes
from sab.lab.report.tables import NAMES, VERDICT, table_cells

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
KEYS = ("T", "method", "reading", "k_trunc", "k_top", "k_att", "cell", "clip")
"""The columns of a table that its rows are known by."""


def replace_part(page: Path, name: str, part: str) -> None:
    """Replaces the generated part of that name in a page."""
    write_text(page, with_part(page.read_text(encoding="utf-8"), name, part))


def with_part(text: str, name: str, part: str) -> str:
    """The text of a page with its generated part replaced; the page must hold both marks once, in order."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"The page must hold {begin} and then {end} once each; it does not.")
    return text[: text.index(begin)] + f"{begin}\n{part}\n{end}" + text[text.index(end) + len(end) :]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(rows: Sequence[Row], by_row: ByRow) -> str:
    """A table of rows in Markdown: the columns that a reader looks for, and folded below them the others.

    Notes on records that are not of the rows as they are now come last.
    """
    header, lines = table_cells(rows, by_row)
    cells = [dict(zip(header, line, strict=True)) for line in lines]
    last = "test" if rows[0].length is None else NAMES[COLUMNS[rows[0].task][0]]
    looked_for = [name for name in header if name == VERDICT or name.endswith(f": {last}")]
    looked_for += [] if rows[0].length is None else ["each seed"]
    others = [name for name in header if name not in (*looked_for, *KEYS)]
    parts = [_columns(cells, looked_for), folded("More columns", _columns(cells, others)), *footnotes(rows, by_row)]
    return "\n\n".join(parts)


def _columns(cells: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """These columns of a table, after those that its rows are known by."""
    lines = [_key(one) | {name: one[name] for name in names} for one in cells]
    return markdown(list(lines[0]), [list(line.values()) for line in lines])


def _key(cells: Mapping[str, str]) -> dict[str, str]:
    """What a row is known by in its table."""
    found = {name: cells[name] for name in ("T", "method", "cell", "clip") if name in cells}
    found["method"] += "" if cells["reading"] == NONE else f", {cells['reading']}"
    numbers = [cells[name] for name in ("k_trunc", "k_top", "k_att") if cells.get(name, NONE) != NONE]
    return found | {"k": ", ".join(numbers) or NONE}


def folded(title: str, part: str) -> str:
    """A part of a page that opens at a click."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{part}\n\n</details>'


def command(task: str, patterns: str) -> str:
    """The command that trains a table's runs, as a block."""
    return f"```\nsab reproduce {task} --rows '{patterns}'\n```"


def machines(records: Iterable[dict[str, Any]], describe: Callable[[str, list[dict[str, Any]]], str]) -> list[str]:
    """The devices of some records, a line each with versions, commits and the newest date.

    `describe` gets a device and its records, and returns the beginning of the line.
    """
    by_device: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_device.setdefault(record["device"], []).append(record)
    lines: list[str] = []
    for device, group in by_device.items():
        newest = max(group, key=lambda record: record["date"])
        versions = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
        commits = ", ".join(sorted({str(record["commit"])[:12] for record in group if record["commit"]})) or "not known"
        lines.append(f"- {describe(device, group)} {versions}; commit {commits}; {newest['date'][:10]}")
    return lines
