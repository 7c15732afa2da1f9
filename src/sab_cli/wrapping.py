"""Text that fits a terminal: wrapped at words. What goes into a file or a pipe stays as it is."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TextIO

NARROWEST = 40
"""On a narrower terminal text is wrapped as on one of this width."""


def columns(stream: TextIO | None = None) -> int | None:
    """How many columns a terminal has that a stream leads to, by default stdout; None where it leads to none."""
    where: TextIO = sys.stdout if stream is None else stream
    try:
        if not where.isatty():  # whatever COLUMNS says, which readline sets for every process that it starts
            return None
        given = os.environ.get("COLUMNS", "")
        found = int(given) if given.isdecimal() and int(given) > 0 else os.get_terminal_size(where.fileno()).columns
    except (OSError, ValueError):  # a stream that is no file, or is closed
        return None
    return max(found, NARROWEST)


def wrapped(text: str, width: int | None, indent: int = 0) -> str:
    """The text in lines of at most so many columns, all but the first indented; words are never cut."""
    if width is None:
        return text
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) or text


def listed(entries: dict[str, str], width: int | None, start: str = "") -> list[str]:
    """A line for each entry, its text in a column of its own."""
    longest = max(map(len, entries), default=0)
    indent = len(start) + longest + 2
    return [wrapped(f"{start}{name:{longest}}  {text}", width, indent) for name, text in entries.items()]


def print_mistake(sentence: str) -> None:
    """Prints what went wrong."""
    sys.stderr.write(wrapped(f"sab: {sentence}", columns(sys.stderr)) + "\n")
