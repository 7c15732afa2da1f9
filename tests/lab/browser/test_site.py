"""The documentation in a real browser, from the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from sab.lab.experiments.rivals import CONTENDERS
from tests.lab.browser.conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="needs the extra `docs`")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=300)
    return out


def test_formulas_are_typeset_and_the_search_finds_without_a_network(browser: Browser, site: Path) -> None:
    asked: list[str] = []
    with browser.new_page() as page:
        page.on(
            "request", lambda one: None if one.url.startswith(("file:", "data:", "blob:")) else asked.append(one.url)
        )
        page.goto((site / "mathematics.html").as_uri())
        expect(page.locator(".katex-html").first).to_be_visible()
        assert page.locator(".arithmatex").count() == page.locator(".arithmatex .katex-html").count() > 100
        assert page.locator(".katex-error").count() == 0
        page.click(".md-search__input")
        page.keyboard.type("macrostate")
        expect(page.locator(".md-search-result__item").first).to_contain_text("acrostate", timeout=20_000)
    assert asked == []


def test_the_first_table_of_the_results_fits_the_page(browser: Browser, site: Path) -> None:
    with browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        page.goto((site / "results.html").as_uri())
        table = page.locator("article table").first
        expect(table).to_contain_text("best rival")
        for name in ("", max((one.title for one in CONTENDERS.values()), key=len)):
            if name:  # wherever a rival is best, the longest name
                table.evaluate(
                    "(table, name) => [...table.rows].slice(1).forEach((row) => row.cells[6].textContent = name)",
                    f"100.0 {name}",
                )
            widths = table.evaluate("(table) => [table.scrollWidth, table.closest('article').clientWidth]")
            assert widths[0] <= widths[1] <= 720
