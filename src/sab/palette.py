"""The colours of everything that is drawn: the report page, the figures, the diagrams of the documentation.

A method has one colour everywhere, and so has each kind of credit. All have a contrast of at least 3 to 1 to their
background, and people with any kind of colour vision can tell those of a group apart. It needs no other module.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light background and on a dark one."""

    light: str
    dark: str


METHODS = {
    "sab": Colour("#0072b2", "#4aa8ee"),
    "tbptt": Colour("#c44f00", "#f0823a"),
    "bptt": Colour("#00795a", "#2cc295"),
    "torch": Colour("#4a4e57", "#c3cad2"),
    "torch_start": Colour("#8a6d3b", "#c9ab73"),
}
"""By the method of a model."""
CREDIT = {
    "read": Colour("#2a87bd", "#93d2f5"),
    "skip": Colour("#b97a00", "#e6b040"),
    "chain": Colour("#6b7682", "#a3adb8"),
    "direct": Colour("#7a4fb5", "#b79bea"),
}
"""What a step reads, and the ways by which credit arrives: over skips, along the chain, directly."""
WRONG = Colour("#b3261e", "#ff8a80")
"""A wrong answer."""
SERIES = (
    METHODS["sab"],
    METHODS["tbptt"],
    METHODS["bptt"],
    Colour("#a84a82", "#dd8fbd"),
    Colour("#96690a", "#e6b040"),
    Colour("#4a4e57", "#c3cad2"),
)
"""For whatever is neither a method nor a kind of credit."""


def named() -> dict[str, Colour]:
    """All of them by the names that the report page knows them by."""
    return {**METHODS, **CREDIT, "wrong": WRONG, **{f"c{place}": one for place, one in enumerate(SERIES, start=1)}}
