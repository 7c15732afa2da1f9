"""Reading JSON files: everything in them is checked before it is used.

A file may be damaged or malicious. Reading it gives what was asked for or raises an `OSError` or a `ValueError`, from
which the caller makes a sentence.
"""

from __future__ import annotations

import functools
import json
import math
import os
import stat
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sab.errors import LARGEST_INT

MOST_JSON = 2**28
"""How many bytes a file of JSON may have."""
MOST_NESTED = 50
"""How deep lists and dictionaries may be nested; recursive functions have a limit of their own."""
LARGEST = 1e300
"""Beyond it, sums of numbers may not be finite."""
T = TypeVar("T")


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return parse_json(read_text(path))


def read_json_lines(path: Path) -> list[Any]:
    """The values in a file of JSON lines; the last line may lack its newline."""
    return [parse_json(line) for line in read_text(path).removesuffix("\n").split("\n") if line]


def read_text(path: Path) -> str:
    """The text of a JSON file; only a plain file is read, since a pipe may never end."""
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no plain file")
        content = file.read(min(status.st_size, MOST_JSON) + 1)
    if len(content) > MOST_JSON:
        raise ValueError(f"it has more than {MOST_JSON:,} bytes")
    return content.decode("utf-8")


def _without_waiting(path: str, flags: int) -> int:
    """An opener that does not block on a pipe without a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_json(text: str) -> Any:
    """The value that a JSON text holds."""
    too_deep = ValueError(f"it is nested more than {MOST_NESTED} deep")
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise too_deep from None
    if text.count("[") + text.count("{") > MOST_NESTED and _is_nested(value, MOST_NESTED):
        raise too_deep
    return value


def _finite(text: str) -> float:
    """A finite number: JSON has no others, though Python writes and reads them."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} in it is not finite")
    return number


def _is_nested(value: Any, most: int) -> bool:
    """Whether lists and dictionaries are nested more than `most` deep."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inside is not None and (most == 0 or any(_is_nested(one, most - 1) for one in inside))


def matches(value: Any, kind: Any) -> bool:
    """Whether a value from JSON has a type: a plain one, or a union, a list or a dictionary of such.

    Numbers must be finite and of reasonable size, whole ones not negative; texts must be printable.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin in (Union, UnionType):
        return any(matches(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(matches(one, parts[0]) for one in value)
    if origin is dict:
        name, entry = parts
        return isinstance(value, dict) and all(matches(k, name) and matches(v, entry) for k, v in value.items())
    if kind in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if kind is int:
            return whole and 0 <= value <= LARGEST_INT
        return (whole or isinstance(value, float)) and abs(value) <= LARGEST  # false for NaN
    return isinstance(value, kind) and (kind is not str or value.isprintable())


def as_dataclass(kind: type[T], stored: Any) -> T:
    """An instance of a dataclass from its entries in JSON; those with a default may be missing."""
    entries = fields(kind)  # pyright: ignore[reportArgumentType]
    needed = {entry.name for entry in entries if entry.default is MISSING and entry.default_factory is MISSING}
    if not isinstance(stored, dict) or not needed <= stored.keys() <= {entry.name for entry in entries}:
        raise ValueError("it has other entries than one")
    wrong = first_mismatch(stored, _kinds_of(kind))
    if wrong is not None:
        raise ValueError(f"its {wrong} is {shortened(stored[wrong])}")
    return kind(**stored)


@functools.cache
def _kinds_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def first_mismatch(stored: dict[str, Any], kinds: dict[str, Any]) -> str | None:
    """The name of the first entry that is present and has the wrong type."""
    return next((name for name, kind in kinds.items() if name in stored and not matches(stored[name], kind)), None)


def shortened(value: Any) -> str:
    """The repr of a value, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
