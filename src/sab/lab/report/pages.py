"""Pages of which a part is made from records: it lies between two marks, and the rest is a person's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sab.errors import UserValueError
from sab.lab.files import write_text

NONE = "–"
"""What a cell has that has nothing."""


def marks(name: str) -> tuple[str, str]:
    """What a page has around its part of that name."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def renew(page: Path, name: str, part: str, option: str | None = None) -> None:
    """Writes a part of a page anew; `option` is what the user chose the page by."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        wanted = f"{_called(page, option)} must be a page to renew"
        raise UserValueError(f"{wanted}; it cannot be read: {error.strerror or error}.", option) from error
    write_text(page, renewed(text, name, part, page, option), option)


def renewed(text: str, name: str, part: str, page: Path, option: str | None = None) -> str:
    """The page's text with its part of that name replaced."""
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserValueError(
            f"{_called(page, option)} must hold {begin} and then {end} once each; it does not.", option
        )
    whole = f"{begin}\n{part}\n{end}"
    return re.sub(re.escape(begin) + ".*" + re.escape(end), lambda _: whole, text, flags=re.DOTALL)


def _called(page: Path, option: str | None) -> str:
    return f"{option} {str(page)!r}" if option else repr(str(page))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def command(task: str, patterns: str, seeds: str = "0,1,2") -> str:
    """The command that makes a table's runs, as a block."""
    return f"```\nsab reproduce {task} --rows '{patterns}' --seeds {seeds}\n```"
