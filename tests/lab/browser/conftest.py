"""A browser: Chromium, where it is installed. Without it these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from sab.config import SABConfig
from sab.lab.models import ModelConfig
from sab.lab.report.page import document
from sab.lab.report.page.material import gather
from sab.lab.tasks import Copying
from sab.lab.training import Run, TrainConfig, train

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).parents[3]
QUIET = "disable-gpu no-first-run disable-background-networking disable-component-update disable-sync disable-quic"
HOSTILE = "<img src=x onerror='hacked=1'>&lt;b&gt;/</script><script>hacked=1</script>/\u2028${x}`"
"""Below a folder of this name is a run: a path that would do harm where it became markup or script."""
Open = Callable[..., Page]
Scheme = Literal["light", "dark"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        arguments = [f"--{name}" for name in (*QUIET.split(), "no-sandbox")]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as browser:
            yield browser


@pytest.fixture(scope="module")
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address, each once; at the end nothing may have gone wrong there, nor anybody have been asked."""
    wrong: list[str] = []
    pages: dict[tuple[Any, ...], Page] = {}

    def opened(address: str | Path, width: int = 1280, scheme: Scheme = "light") -> Page:
        known = (address, width, scheme)
        if known not in pages:
            where = address.as_uri() if isinstance(address, Path) else address
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on(
                "request", lambda one: None if one.url.startswith((where, "data:", "blob:")) else wrong.append(one.url)
            )
            page.goto(where)
            page.wait_for_selector("#timeline .main-svg")
            # Not one that is evaluated again and again, which the page's policy forbids.
            page.evaluate("""new Promise((done) => {
                const look = () => waiting.length ? setTimeout(look) : setTimeout(done, 50);
                look(); })""")
            pages[known] = page
        return pages[known]

    yield opened
    for page in pages.values():
        page.close()
    assert wrong == []


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was trained for a moment, in a folder with a hostile name."""
    path = tmp_path_factory.mktemp("runs") / HOSTILE / "run"
    training = TrainConfig(iterations=4, batch_size=3, eval_every=1, eval_batches=1)
    train(Copying(length=6), ModelConfig(hidden_size=6, memory=SABConfig(k_top=3, k_trunc=4)), training, path)
    return Run.open(path)


@pytest.fixture(scope="session")
def run_page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "run.html"
    document.write(gather([run.path]), out)
    return out


@pytest.fixture(scope="session")
def results_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the records that are kept with the code."""
    out = tmp_path_factory.mktemp("pages") / "results.html"
    document.write(gather([ROOT / "results"]), out)
    return out
