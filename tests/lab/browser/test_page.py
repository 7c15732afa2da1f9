"""The page in a real browser. That nothing is written to the console, and nobody asked for anything, is part of every
test: see `open_page`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import sab
from sab.errors import printable
from sab.lab.report.page import document, explorer, live
from sab.lab.report.page.material import Material
from sab.lab.training import Run, train
from sab.lab.training.checkpoint import load_model
from tests.lab.browser.conftest import ROOT, Open


def told(page: Page) -> str:
    return page.inner_text("#told")


def records() -> list[dict[str, Any]]:
    return list(map(json.loads, (ROOT / "results/copying.jsonl").read_text(encoding="utf-8").splitlines()))


def shapes(page: Page, kind: str = "path") -> list[dict[str, Any]]:
    return [one for one in page.evaluate("document.getElementById('timeline').layout.shapes") if one["type"] == kind]


def show_all(page: Page) -> None:
    """Brings every figure near, so that it is drawn."""
    for name in page.evaluate("Object.keys(data.figures)"):
        page.locator(f"[id='{name}']").scroll_into_view_if_needed()
        page.wait_for_selector(f"[id='{name}'] .main-svg")


def test_every_figure_of_the_results_is_drawn_as_plotly_knows_it(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page)
    show_all(page)
    assert page.evaluate("Object.keys(data.figures).length") >= 10
    wrong = page.evaluate("""[...document.querySelectorAll(".js-plotly-plot")].flatMap((one) =>
        (Plotly.validate(one.data, {...one.layout, template: {}}) ?? []).map(({code, msg}) => [code, one.id, msg]))""")
    assert [one for one in wrong if one[0] not in ("unused", "dynamic")] == []


def test_the_explorer_follows_the_mouse(open_page: Open, run_page: Path, run: Run) -> None:
    page = open_page(run_page)
    at = page.evaluate("data.explorers[0].at")
    box = page.locator("#timeline .xy2").first.bounding_box()
    assert box
    before = told(page)
    for step in (21, 25):
        left, width = page.evaluate(
            "(({_offset, _length}) => [_offset, _length])(document.getElementById('timeline')._fullLayout.xaxis)"
        )
        place = page.locator("#timeline").bounding_box()
        assert place
        end = at[-1] + 0.5
        page.mouse.move(place["x"] + left + width * at[step - 1] / end, place["y"] + 60)
        expect(page.locator("#told")).to_contain_text(f"Step {step} sees")
        assert page.input_value("#step") == str(step)
    assert told(page) != before
    traced = sab.trace(load_model(run, torch.device("cpu")), run.config.task.batch(0, 0, 3, "valid")[0][:, :1], 25)
    reads = [
        (at, weight) for at, weight in zip(traced.kept_at[24].tolist(), traced.weights[24].tolist(), strict=True) if at
    ]
    assert f"It reads step {reads[0][0]} (" in told(page)
    assert sum(one["yref"] == "y" for one in shapes(page)) == len(reads)
    assert any(one["yref"] == "y3" for one in shapes(page))
    page.locator("summary", has_text="Numbers of this step").click()
    cells = {
        int(line.split("\t")[0]): line.split("\t")[2:] for line in page.locator("#numbers tbody tr").all_inner_texts()
    }
    for kept_at, weight in reads:
        assert float(cells[kept_at][0]) == pytest.approx(weight, rel=0.01)
    norms = traced.credit
    for step, (_, *parts) in cells.items():
        for part, norm in zip(parts, (norms.direct, norms.chain, norms.skip), strict=True):
            assert (0.0 if part == "–" else float(part)) == pytest.approx(
                norm[step - 1].item(), rel=0.01, abs=0.005 * norms.total.max().item()
            )


def test_the_explorer_follows_the_keyboard(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page)
    page.focus("#step")
    page.keyboard.press("End")
    expect(page.locator("#told")).to_contain_text("Step 220 sees")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#told")).to_contain_text("Step 219 sees")
    late = page.evaluate("document.getElementById('map').data[0].z"), told(page)
    page.focus("#moment")
    page.keyboard.press("Home")
    expect(page.locator("#moment-told")).to_have_text("after 100 iterations")
    record = next(one for one in records() if one.get("attention"))
    early = late[0]
    for _ in range(100):  # the map is drawn after the text; the page's policy forbids to wait for an expression
        early = page.evaluate("document.getElementById('map').data[0].z")
        if early != late[0]:
            break
        page.wait_for_timeout(100)
    assert early == [
        [one and pytest.approx(one, abs=6e-4) for one in row] for row in record["attention"]["moments"]["100"]
    ]
    assert (early, told(page)) != late
    assert "mean over a batch" in told(page)


def test_everything_can_be_reached_by_the_keyboard(open_page: Open, run_page: Path) -> None:
    page = open_page(run_page, width=1000)
    reached: list[str] = []
    for _ in range(8):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""(() => { const one = document.activeElement;
            return [one.id || one.getAttribute("href") || one.tagName, getComputedStyle(one).outlineStyle]; })()""")
        assert outline != "none", name
        reached.append(name)
    assert reached == ["#main", "theme", "#explorer", "#runs", "step", "SUMMARY", "DIV", "SUMMARY"]
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.get_attribute("html", "data-theme") == "dark"


def test_hostile_names_are_shown_as_text(open_page: Open, run_page: Path, run: Run) -> None:
    page = open_page(run_page)
    show_all(page)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img, main script").count() == 0
    assert page.evaluate("document.querySelector('h1').textContent") == printable(run.path)
    assert page.title() == printable(run.path)
    assert page.evaluate("document.querySelector('#runs td').textContent") == printable(run.path)
    assert page.evaluate("document.querySelector('#model option').textContent") == printable(run.path)
    drawn = page.evaluate("document.querySelector('#runs .plot').data.at(-1).name")
    assert "<" not in drawn


def test_dark_and_light(open_page: Open, run_page: Path) -> None:
    def look(page: Page) -> tuple[str, str]:
        return (
            page.evaluate("getComputedStyle(document.body).backgroundColor"),
            page.evaluate("document.getElementById('timeline').layout.template.layout.font.color"),
        )

    light, dark = open_page(run_page), open_page(run_page, scheme="dark")
    assert look(light) != look(dark)
    was = look(light)
    light.click("#theme")
    assert look(light) == look(dark)
    light.click("#theme")
    assert look(light) == was


@pytest.fixture(scope="session")
def two_models_page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sequence is no image, at several moments of its training, and one whose sequence is one."""
    path = tmp_path_factory.mktemp("pages")
    config = run.config
    train(config.task, config.model, replace(config.training, moments_every=1), path / "several")
    symbols = explorer.of_run("symbols", Run.open(path / "several"), 26 * 8)
    pixels = replace(
        symbols.scene, places=[min(step, 24) for step in range(26)], values=[step / 26 for step in range(26)]
    )
    made = document.parts(Material(runs={"one": run}), [symbols, replace(symbols, name="pixels", scene=pixels)])
    (path / "two.html").write_text(document.page(made), encoding="utf-8")
    return path / "two.html"


def box(page: Page, selector: str) -> tuple[float, float, float, float]:
    found = page.locator(selector).first.bounding_box()
    assert found
    return found["x"], found["y"], found["x"] + found["width"], found["y"] + found["height"]


def test_training_is_stepped_through(open_page: Open, two_models_page: Path) -> None:
    page = open_page(two_models_page)
    page.focus("#moment")
    seen: list[Any] = []
    for key, moment in (
        ("Home", "after 1 iterations"),
        ("ArrowRight", "after 2 iterations"),
        ("End", "after 4 iterations"),
    ):
        page.keyboard.press(key)
        expect(page.locator("#moment-told")).to_have_text(moment)
        page.wait_for_timeout(50)
        assert any(one["yref"] == "y3" for one in shapes(page))  # credit is there at every moment
        drawn = page.evaluate("document.getElementById('timeline').data.map(({y}) => y)")
        assert drawn not in seen
        seen.append(drawn)


def test_figures_have_the_room_that_there_is(browser: Browser, two_models_page: Path) -> None:
    with browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        page.goto(two_models_page.as_uri())
        page.locator("#map").scroll_into_view_if_needed()
        page.wait_for_selector("#map .main-svg")
        alone = box(page, "#map .main-svg")
        page.select_option("#model", "1")
        page.wait_for_selector("#image .main-svg")
        beside = box(page, "#map .main-svg")
        assert beside[2] <= box(page, "#image .main-svg")[0] < alone[2]
        page.set_viewport_size({"width": 700, "height": 900})
        page.wait_for_function("() => document.getElementById('timeline').layout.width < 700")
        assert box(page, "#timeline .main-svg")[2] <= 700


def test_the_map_follows_the_mouse_also_where_it_was_drawn_late(browser: Browser, two_models_page: Path) -> None:
    with browser.new_page(viewport={"width": 1280, "height": 400}) as page:
        page.goto(two_models_page.as_uri())
        page.wait_for_selector("#timeline .main-svg")
        assert page.locator("#map .main-svg").count() == 0  # it is far below
        page.locator("#map").scroll_into_view_if_needed()
        page.wait_for_selector("#map .nsewdrag")
        left, top, right, bottom = box(page, "#map .nsewdrag")
        before = page.input_value("#step")
        page.mouse.move(left + 20, top + 5)
        page.mouse.move((left + right) / 2, top + 10)
        expect(page.locator("#step")).not_to_have_value(before)
        page.mouse.move((left + right) / 2, bottom - 5)
        expect(page.locator("#step")).to_have_value("26")


@pytest.mark.parametrize("which", ["run_page", "results_page"])
def test_a_phone_has_nothing_beside_the_screen(open_page: Open, which: str, request: pytest.FixtureRequest) -> None:
    page = open_page(request.getfixturevalue(which), width=360)
    show_all(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.body.scrollWidth") <= 360


def test_figures_have_words(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page)
    silent = page.evaluate("""[...document.querySelectorAll("[role=img], [role=region], input, select, button")].filter(
        (one) => !(one.ariaLabel || one.getAttribute("aria-describedby") || one.labels?.length || one.textContent)
    ).map((one) => one.outerHTML.slice(0, 200))""")
    assert silent == []
    assert page.locator("figure details table").count() == page.evaluate("Object.keys(data.figures).length")


@pytest.fixture
def address(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the run is watched."""
    monkeypatch.setattr(live, "TRACED_STEPS", 1)
    with live.server(live.Watch(run.path), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_watch_keeps_the_page_fresh(browser: Browser, run: Run, address: str) -> None:
    metrics = run.path / "metrics.jsonl"
    before = metrics.read_text()
    with browser.new_page() as page:
        page.goto(address)
        page.focus("#step")
        page.keyboard.press("Home")
        run.log(json.loads(before.splitlines()[-1]) | {"step": 9})
        page.locator("#runs summary").click()
        expect(page.locator("#runs figure table td").nth(2)).to_have_text("9", timeout=20_000)
        expect(page.locator("#told")).to_contain_text("Step 1 sees")  # what was chosen stays
    metrics.write_text(before)


def test_as_many_as_fifty_runs(open_page: Open, run: Run, tmp_path: Path) -> None:
    runs = {f"run {seed}": run for seed in range(50)}
    material = Material(runs=runs)
    out = tmp_path / "fifty.html"
    out.write_text(document.page(document.parts(material, [explorer.of_run("run 0", run, 1)])), encoding="utf-8")
    assert out.stat().st_size < 5e6
    page = open_page(out)
    assert page.locator("[aria-label=Runs] tbody tr").count() == 50
