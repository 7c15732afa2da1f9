"""Pieces of HTML. Whatever comes from a run or a record goes through `text` or `embedded`, and so is never markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
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


class Link(NamedTuple):
    """A cell that leads to another place of the page."""

    content: str
    to: str


Cell = str | Link


def table(
    header: Sequence[str], lines: Iterable[Sequence[Cell]], called: str, marks: Sequence[Mapping[str, str]] = ()
) -> str:
    """A table that scrolls by itself where it is too wide; `called` is its name for those who do not see it.

    `marks` are attributes of the rows, by which the page's filters know them.
    """
    lines = list(lines)
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in header)
    body = "".join(
        f"<tr{_attributes(own)}>{''.join(map(_cell, line))}</tr>"
        for line, own in zip(lines, marks or [{}] * len(lines), strict=True)
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(called)}">{whole}</div>'


def _attributes(marks: Mapping[str, str]) -> str:
    return "".join(f' data-{name}="{text(value)}"' for name, value in marks.items())


def _cell(content: Cell) -> str:
    """A cell; a long one has several lines."""
    if isinstance(content, Link):
        return f'<td><a href="#{text(content.to)}">{text(content.content)}</a></td>'
    kind = ' class="long"' if len(content) > LONG else ""
    return f"<td{kind}>{text(content)}</td>"


def folded(title: str, content: str, is_wide: bool = True) -> str:
    """What a reader can fold away; what is wide is folded on a phone, and open elsewhere."""
    kind = ' class="fold" open' if is_wide else ""
    return f"<details{kind}><summary>{text(title)}</summary>{content}</details>"


def commands(found: Mapping[str, str]) -> str:
    """Command lines by what they made."""
    return "".join(f"<dt>{text(name)}</dt><dd><code>{text(line)}</code></dd>" for name, line in found.items()).join(
        ('<dl class="commands">', "</dl>")
    )


def figure(name: str, drawn: Drawn) -> str:
    """A place for the figure of that name, with its caption, its summary and its numbers. The page's script adds what
    shows and hides its lines, and what saves it."""
    numbers = table(drawn.header, drawn.lines, f"Numbers of: {drawn.caption}")
    return (
        f'<figure><figcaption>{text(drawn.caption)}</figcaption><p class="key lines" hidden></p>'
        f'<div class="plot" id="{text(name)}" role="img" aria-label="{text(drawn.summary)}"></div>'
        f'<p class="tools" data-of="{text(name)}" hidden></p>'
        f"<details><summary>In words and numbers</summary><p>{text(drawn.summary)}</p>{numbers}</details></figure>"
    )


def section(name: str, title: str, parts: Iterable[str]) -> str:
    """A part of the page that the navigation leads to."""
    return f'<section id="{text(name)}"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def heading(content: str, name: str) -> str:
    """A title within a section, which can be linked to."""
    return f'<h3 id="{text(name)}">{text(content)}</h3>'


def links(called: str, places: Mapping[str, str]) -> str:
    """Links to places of the page, by their names."""
    made = "".join(f'<a href="#{text(name)}">{text(title)}</a>' for name, title in places.items())
    return f'<nav class="places" aria-label="{text(called)}">{made}</nav>'


def paragraph(content: str) -> str:
    return f"<p>{text(content)}</p>"
