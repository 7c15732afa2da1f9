"""The sentences about mistakes in options, for the table's check and for the parser alike."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable


def not_a_choice(name: str, choices: Iterable[str], given: str) -> str:
    return f"{name} must be one of {', '.join(choices)}; got {given}."


def not_an_option(flag: str, options: Iterable[str]) -> str:
    close = difflib.get_close_matches(flag, [one for one in options if one.startswith("--")], n=1)
    return f"{flag} is no option of this command" + (f"; did you mean {close[0]}?" if close else ".")


def no_value(name: str) -> str:
    return f"{name} must be given a value; got none."


def not_a_number(flag: str, is_whole: bool, may_be_none: bool, given: str) -> str:
    kind = "a whole number" if is_whole else "a number"
    return f"{flag} must be {kind}{', or None' if may_be_none else ''}; got {given}."


def wrong_value(flag: str, kind: str, allowed: str, value: str) -> str | None:
    """What is wrong with a value, or None.

    `kind` is INT, FLOAT, {one,other} or another word for what is not looked at, after {None}| where the value may be
    None; `allowed` is the range in the words of `sab.errors`, as in "a whole number of at least 1", or empty.
    """
    may_be_none, kind = kind.startswith("{None}|"), kind.removeprefix("{None}|")
    if may_be_none and value in ("None", "none"):
        return None
    if kind.startswith("{"):
        choices = kind.strip("{}").split(",")
        return None if value in choices else not_a_choice(flag, choices, repr(value))
    if kind not in ("INT", "FLOAT"):
        return None
    try:
        number = int(value) if kind == "INT" else float(value)
    except ValueError:
        return not_a_number(flag, kind == "INT", may_be_none, repr(value))
    if not allowed or _is_in(number, allowed):
        return None
    return f"{flag} must be {allowed}; got {number!r}."


def _is_in(number: float, allowed: str) -> bool:
    """Whether a number is in a range that is given in words."""
    found = re.findall(r"(at least|above|at most|below) ([^\s,]+)", allowed)
    bounds = {words: float(bound) for words, bound in found}
    return (
        math.isfinite(number)
        and number >= bounds.get("at least", -math.inf)
        and number > bounds.get("above", -math.inf)
        and number <= bounds.get("at most", math.inf)
        and number < bounds.get("below", math.inf)
    )
