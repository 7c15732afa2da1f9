"""The tables of docs/streams.md."""

from __future__ import annotations

from tools import streams
from tools.pages import with_part


def test_the_page_has_the_tables_of_its_records() -> None:
    page = streams.PAGE.read_text(encoding="utf-8")
    runs = streams.load(streams.RECORDS.read_text(encoding="utf-8"))
    assert with_part(page, "streams", streams.page_part(runs)) == page
    assert with_part(page, "weights", streams.weights_part()) == page
    assert {distance for distance, *_ in runs} == {10_000, 100_000}
