"""Pieces of HTML. Whatever comes from a run or a record goes through `text` or `embedded`, and so is never markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sab.errors import printable

LONG = 36
"""How many characters stand in one line of a table."""
Figure = dict[str, Any]
"""What plotly.js draws: `data` and `layout`."""


class Drawn(NamedTuple):
    """A figure with its text for those who do not see it."""

    figure: Figure
    caption: str
    summary: str
    """What it shows, in sentences."""
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    """Its numbers as a table."""


def text(given: Any) -> str:
    """Anything as text of a page or of an attribute."""
    return html.escape(printable(given), quote=True)


def label(given: Any) -> str:
    """Anything as text of a figure, where plotly.js knows some tags."""
    return html.escape(printable(given), quote=False)


def embedded(value: Any) -> str:
    """A value as JSON that can stand in a script element: nothing in it ends the element, nor a line of script."""
    made = json.dumps(value, allow_nan=False, separators=(",", ":"))  # in ASCII, so without U+2028
    for character in "<>&":
        made = made.replace(character, f"\\u{ord(character):04x}")
    return made


def digest(script: str) -> str:
    """What a Content-Security-Policy knows a script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def table(header: Sequence[str], lines: Iterable[Sequence[str]], called: str) -> str:
    """A table that scrolls by itself where it is too wide; `called` is its name for those who do not see it."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in lines)
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(called)}">{whole}</div>'


def _cell(content: str) -> str:
    """A cell; a long one has several lines."""
    kind = ' class="long"' if len(content) > LONG else ""
    return f"<td{kind}>{text(content)}</td>"


def figure(name: str, drawn: Drawn) -> str:
    """A place for the figure of that name, with its caption, its summary and its numbers."""
    numbers = table(drawn.header, drawn.lines, f"Numbers of: {drawn.caption}")
    return (
        f'<figure><div class="plot" id="{text(name)}" role="img" aria-label="{text(drawn.summary)}"></div>'
        f"<figcaption>{text(drawn.caption)}</figcaption>"
        f"<details><summary>In words and numbers</summary><p>{text(drawn.summary)}</p>{numbers}</details></figure>"
    )


def section(name: str, title: str, parts: Iterable[str]) -> str:
    """A part of the page that the navigation leads to."""
    return f'<section id="{text(name)}"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def heading(content: str) -> str:
    return f"<h3>{text(content)}</h3>"


def paragraph(content: str) -> str:
    return f"<p>{text(content)}</p>"
