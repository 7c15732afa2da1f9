"""The tables of docs/streams.md."""

from __future__ import annotations

from matplotlib.figure import Figure

from tools import long_streams, search, streams
from tools.pages import with_part


def test_the_page_has_the_tables_of_its_records() -> None:
    page = streams.PAGE.read_text(encoding="utf-8")
    runs = streams.load(streams.RECORDS.read_text(encoding="utf-8"))
    assert with_part(page, "streams", streams.page_part(runs)) == page
    assert with_part(page, "weights", streams.weights_part()) == page
    assert {distance for distance, *_ in runs} == {10_000, 100_000}


def test_the_page_has_the_table_of_searches() -> None:
    page, records = search.PAGE.read_text(encoding="utf-8"), search.load()
    assert with_part(page, "search", search.page_part(records)) == page
    assert {one["microstates"] for one in records} >= {100_000, 1_000_000}
    assert all(0 <= one["recall"] <= 1 and one["checked"] > 0 for one in records if "recall" in one)


def test_the_page_has_the_tables_of_long_streams() -> None:
    page, records = long_streams.PAGE.read_text(encoding="utf-8"), long_streams.load()
    assert with_part(page, "long streams", long_streams.page_part(records)) == page
    assert isinstance(long_streams.figure(records), Figure)
    compared = [one["equals_whole"] for one in records if "equals_whole" in one]
    assert compared
    assert all(compared)
    assert max(one["steps"] for one in records) == 1_000_000
