"""Data sets that are text: .ts and .csv files, right and wrong ones."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sab.lab.data.formats import Unreadable
from sab.lab.data.rows import read_column, read_csv, read_ts

HEAD = "#A comment, é\n@problemName x\n@univariate true\n@classLabel true b a\n"
TS = f"{HEAD}@data\n1,2.5,-3e2:a\n\n4:b\n"
CSV = 'text,label\n"a, ""b""\nc",1\nd,0\n'


def test_series() -> None:
    values, labels, classes = read_ts(TS.encode())
    assert [one.tolist() for one in values] == [[1, 2.5, -300], [4]]
    assert values[0].dtype == np.float64
    assert labels.tolist() == [1, 0]
    assert classes == 2
    again = read_ts(TS.replace("\n", "\r\n").replace("@data", "@DATA").replace("@classLabel", "@classlabel").encode())
    assert [one.tolist() for one in again.values] == [[1, 2.5, -300], [4]]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it has no line @data"),
        (HEAD, "it has no line @data"),
        (f"{HEAD}@data\n", "it holds no series"),
        (f"1,2:a\n{TS}", "line 1 is no part of a header"),
        (TS.replace("true b a", "false"), "its @classLabel does not list its classes"),
        (TS.replace("true b a", "true"), "its @classLabel does not list its classes"),
        (TS.replace("true b a", "true a a"), "its @classLabel does not list its classes"),
        (TS.replace("@classLabel true b a\n", ""), "its @classLabel does not list its classes"),
        (TS.replace("@univariate true", "@univariate false"), "its @univariate is 'false' and not 'true'"),
        (TS.replace("@univariate", "@timeStamps"), "its @timestamps is 'true' and not 'false'"),
        (TS.replace("@univariate", "@missing"), "its @missing is 'true' and not 'false'"),
        (TS.replace("4:b", "4:c"), "line 8 does not end in one of its classes"),
        (TS.replace("4:b", "4,5"), "line 8 does not end in one of its classes"),
        (TS.replace("4:b", ":b"), "line 8 holds something else than numbers"),
        (TS.replace("4:b", "4,?:b"), "line 8 holds something else than numbers"),
        (TS.replace("4:b", "4:5:b"), "line 8 holds something else than numbers"),
        (TS.replace("4:b", "4,nan:b"), "line 8 holds a number that is not finite"),
        (TS.replace("4:b", "4,1e999:b"), "line 8 holds a number that is not finite"),
    ],
)
def test_what_is_no_series(content: str, reason: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_ts(content.encode())
    assert str(caught.value) == reason


def test_tables() -> None:
    assert read_csv(CSV.encode(), ("text", "label")) == [['a, "b"\nc', "1"], ["d", "0"]]
    assert read_column(CSV.encode(), ("text", "label"), "label").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "its first line does not name the columns text, label"),
        ("label,text\n", "its first line does not name the columns text, label"),
        (CSV + "e\n", "row 3 has 1 columns and not 2"),
        (CSV + "e,1,2\n", "row 3 has 3 columns and not 2"),
        (CSV + '"e,1\n', "line 5 is no part of a table: unexpected end of data"),
        ("text,label\n", "it holds no rows"),
        (CSV + "e,x\n", "it holds something else than numbers"),
        (CSV + "e,inf\n", "it holds a number that is not finite"),
    ],
)
def test_what_is_no_table(content: str, reason: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_column(content.encode(), ("text", "label"), "label")
    assert str(caught.value) == reason


def test_what_is_no_text() -> None:
    for read in (read_ts, lambda content: read_csv(content, ("text",))):
        with pytest.raises(Unreadable, match="it is no text in UTF-8: invalid start byte at byte 2"):
            read(b"ab\xff")


@given(st.data())
def test_damaged_files_are_refused_or_read(source: st.DataObject) -> None:
    content = bytearray((TS if source.draw(st.booleans()) else CSV).encode())
    for _ in range(source.draw(st.integers(1, 4))):
        content[source.draw(st.integers(0, len(content) - 1))] = source.draw(st.integers(0, 255))
    for read in (read_ts, lambda given: read_column(given, ("text", "label"), "label")):
        with contextlib.suppress(Unreadable):
            read(bytes(content))
