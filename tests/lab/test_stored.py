"""What a file says is checked before anybody believes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from sab.lab.stored import MOST_NESTED, as_dataclass, matches, parse_json, read_json_lines, read_text


def test_json_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_json("[" * MOST_NESTED + "]" * MOST_NESTED)
    for depth in (MOST_NESTED + 1, 100_000):
        with pytest.raises(ValueError, match="nested more than"):
            parse_json("[" * depth + "]" * depth)
    for text in ("NaN", "[-Infinity]", "1e999", "9" * 400 + ".0"):
        with pytest.raises(ValueError, match=r"in it is not finite$"):
            parse_json(text)
    monkeypatch.setattr("sab.lab.stored.MOST_JSON", 9)
    (tmp_path / "file").write_text("123456789")
    assert read_text(tmp_path / "file") == "123456789"
    (tmp_path / "file").write_text("1234567890")
    with pytest.raises(ValueError, match="it has more than 9 bytes"):
        read_text(tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes that have names")
def test_a_pipe_that_nobody_writes_to_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    other = os.open(tmp_path / "pipe", os.O_RDWR)  # with which opening it would not wait, but reading from it would
    with pytest.raises(ValueError, match="it is no plain file"):
        read_text(tmp_path / "pipe")
    os.close(other)
    with pytest.raises(ValueError, match="it is no plain file"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("value", "kind", "is_one"),
    [
        (3, int, True),
        (-1, int, False),
        (True, int, False),
        (2**63, int, False),
        (3, float, True),
        (-2.5, float, True),
        (False, float, False),
        (float("nan"), float, False),
        (float("inf"), float, False),
        (10**400, float, False),
        (None, float | None, True),
        ("a", float | None, False),
        ("a", str, True),
        ("a\nb", str, False),
        ("\x1b[2J", str, False),
        ("\ud800", str, False),
        ({"a": [1.0, None]}, dict[str, list[float | None]], True),
        ({"a\n": []}, dict[str, list[float]], False),
        ({"a": 1}, dict[str, list[float]], False),
        ([], dict[str, Any], False),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        ([], Literal["a", "b"], False),
    ],
)
def test_types_of_values_from_files(value: Any, kind: Any, is_one: bool) -> None:
    assert matches(value, kind) is is_one


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text, found in (("", []), ("1\n[2]\n", [1, [2]]), ("1\n2", [1, 2])):
        path.write_text(text)
        assert read_json_lines(path) == found


@dataclass
class Entries:
    count: int
    name: str | None = None


def test_dataclasses_from_their_entries() -> None:
    assert as_dataclass(Entries, {"count": 3}) == Entries(3)
    assert as_dataclass(Entries, {"count": 3, "name": "a"}) == Entries(3, "a")
    for stored in ({}, [], None, {"count": 3, "more": 1}):
        with pytest.raises(ValueError, match=r"^it has other entries than one$"):
            as_dataclass(Entries, stored)
    with pytest.raises(ValueError, match=r"^its name is 3$"):
        as_dataclass(Entries, {"count": 3, "name": 3})
    with pytest.raises(ValueError, match=r"^its count is '9{99}…$"):
        as_dataclass(Entries, {"count": "9" * 1000})
