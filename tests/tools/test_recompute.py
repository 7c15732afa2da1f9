"""The table of `recompute=True` in docs/performance.md."""

from __future__ import annotations

from tools import recompute
from tools.pages import with_part


def test_the_page_holds_the_records() -> None:
    page = recompute.PAGE.read_text(encoding="utf-8")
    assert with_part(page, "recompute", recompute.page_part(recompute.RECORDS.read_text(encoding="utf-8"))) == page
