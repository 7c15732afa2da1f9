"""The page in a real browser. That nothing is written to the console, and nobody asked for anything, is part of every
test: see `open_page`."""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import subprocess
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
from tests.lab.browser.conftest import ROOT, Open, Scheme


def told(page: Page) -> str:
    return page.inner_text("#told")


def records() -> list[dict[str, Any]]:
    return list(map(json.loads, (ROOT / "results/copying.jsonl").read_text(encoding="utf-8").splitlines()))


def shapes(page: Page, kind: str = "path") -> list[dict[str, Any]]:
    return [one for one in page.evaluate("document.getElementById('timeline').layout.shapes") if one["type"] == kind]


def test_every_figure_of_the_results_is_drawn_as_plotly_knows_it(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page)
    figures = page.evaluate("Object.keys(data.figures).length")
    assert figures >= 10
    assert page.locator("figure > .plot.js-plotly-plot").count() >= figures  # also those that nobody scrolled to
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
        expect(page.locator("#told")).to_contain_text(f"Step {step}: input")
        assert page.input_value("#step") == str(step)
    assert told(page) != before
    traced = sab.trace(load_model(run, torch.device("cpu")), run.config.task.batch(0, 0, 3, "valid")[0][:, :1], 25)
    reads = [
        (at, weight) for at, weight in zip(traced.kept_at[24].tolist(), traced.weights[24].tolist(), strict=True) if at
    ]
    assert f"It reads step {reads[0][0]} (" in told(page)
    assert sum(one["yref"] == "y" for one in shapes(page)) == len(reads)
    assert any(one["yref"] == "y3" for one in shapes(page))
    page.evaluate("document.getElementById('numbers').closest('details').open = true")
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
    expect(page.locator("#told")).to_contain_text("Step 220: input")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#told")).to_contain_text("Step 219: input")
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
    for _ in range(24):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""(() => { const one = document.activeElement;
            const name = one.id || one.getAttribute("href") || one.textContent || one.tagName;
            return [name, getComputedStyle(one).outlineStyle]; })()""")
        assert outline != "none", name
        reached.append(name)
    assert reached[:5] == ["#main", "theme", "#explorer", "#runs", "step"]
    assert reached[5:12] == [
        "reads",
        "credit over skips",
        "along the chain",
        "directly from the answer",
        "pin",
        "permalink",
        "timeline",
    ]
    assert reached[12:19] == ["PNG", "SVG", "CSV"] * 2 + ["Numbers of this step"]
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.get_attribute("html", "data-theme") == "dark"


@pytest.fixture(scope="session")
def two_hostile_page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "hostile.html"
    other = Run(run.path.with_name("other"), replace(run.config, training=replace(run.config.training, lr=0.5)))
    material = Material(runs={str(run.path): run, str(other.path): other})
    document.write(material, out)
    return out


def test_hostile_names_are_shown_as_text(open_page: Open, run_page: Path, two_hostile_page: Path, run: Run) -> None:
    page = open_page(run_page)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img, main script").count() == 0
    command = page.evaluate("document.querySelector('.commands code').textContent")
    assert command.endswith(f"--out {printable(shlex.quote(str(run.path)))}")
    # Two models of one kind are told apart by their folders.
    page = open_page(two_hostile_page)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img, main script").count() == 0
    assert printable(run.path) in page.evaluate("document.querySelector('#runs td').textContent")
    assert printable(run.path) in page.evaluate("document.querySelector('#model option').textContent")
    assert printable(run.path) in page.evaluate("document.querySelector('#runs .key button').textContent")
    assert "<" not in page.evaluate("document.querySelector('#runs .plot').data.at(0).name")


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
        ("Home", "after 1 iteration"),
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
        page.wait_for_selector("#timeline .main-svg")
        alone = box(page, "#timeline .main-svg")
        page.select_option("#model", "1")
        page.wait_for_selector("#image .main-svg")
        beside = box(page, "#timeline .main-svg")
        assert alone[0] <= box(page, "#image .main-svg")[2] <= beside[0]
        page.set_viewport_size({"width": 700, "height": 900})
        page.wait_for_function("() => document.getElementById('timeline').layout.width < 700")
        assert box(page, "#timeline .main-svg")[2] <= 700


def test_the_map_follows_the_mouse(browser: Browser, two_models_page: Path) -> None:
    with browser.new_page(viewport={"width": 1280, "height": 400}) as page:
        page.goto(two_models_page.as_uri())
        page.wait_for_selector("#timeline .main-svg")
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
    assert page.locator("details.fold").count() == page.locator("details.fold:not([open])").count() > 0
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.body.scrollWidth") <= 360
    sideways = page.evaluate("""[...document.querySelectorAll("body *")].filter((one) =>
        one.scrollWidth > one.clientWidth + 1
        && ["auto", "scroll"].includes(getComputedStyle(one).overflowX)).map((one) => one.className)""")
    assert set(sideways) <= {"scroll"}, "only tables, which are folded, scroll sideways"


def test_figures_have_words(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page)
    silent = page.evaluate("""[...document.querySelectorAll("[role=img], [role=region], input, select, button")].filter(
        (one) => !(one.ariaLabel || one.getAttribute("aria-describedby") || one.labels?.length || one.textContent)
    ).map((one) => one.outerHTML.slice(0, 200))""")
    assert silent == []
    assert page.locator("figure details table").count() == page.evaluate("Object.keys(data.figures).length")


def drawn_widths(page: Page, axis: str) -> list[float]:
    return sorted((one["line"]["width"] for one in shapes(page) if one["yref"] == axis), reverse=True)


def test_arcs_are_as_wide_as_their_shares(open_page: Open, two_models_page: Path) -> None:
    """In pixels, at every moment and step: nothing is scaled to what happens to be the largest."""
    page = open_page(two_models_page)
    page.select_option("#model", "0")
    widest = page.evaluate("WIDEST")
    moments = page.evaluate("data.explorers[0].moments")
    compared = 0
    for place, moment in enumerate(moments):
        for step, credit in moment["credit"].items():
            page.evaluate(f"Object.assign(chosen, {{moment: {place}, step: {step}}}); explore()")
            weights = sorted((weight for _, weight in moment["reads"].get(step, [])), reverse=True)
            assert drawn_widths(page, "y") == pytest.approx([widest * weight for weight in weights])
            shares: dict[tuple[int, ...], float] = {}
            for share, skips in credit["paths"]:
                for skip in map(tuple, skips):
                    shares[skip] = shares.get(skip, 0.0) + share
            wanted = sorted((widest * share for share in shares.values()), reverse=True)
            assert drawn_widths(page, "y3") == pytest.approx(wanted)
            compared += len(wanted)
    assert compared > 20
    drawn = page.evaluate("""[...document.querySelectorAll("#timeline .shapelayer path")].map(
        (one) => parseFloat(one.style.strokeWidth))""")
    for width in drawn_widths(page, "y"):
        assert any(one == pytest.approx(width, abs=0.01) for one in drawn)


def test_a_click_pins_a_step_which_has_an_address(open_page: Open, run_page: Path, browser: Browser) -> None:
    page = open_page(run_page, width=1100)

    def move_to(step: int) -> None:
        x = page.evaluate(f"""(({{_offset, _length}}) => _offset + _length * model().at[{step - 1}] /
            document.getElementById("timeline").layout.xaxis.range[1])(document.getElementById("timeline")._fullLayout.xaxis)""")
        left, top, _, _ = box(page, "#timeline")
        page.mouse.move(left + x, top + 60)

    move_to(22)
    expect(page.locator("#told")).to_contain_text("Step 22: input")
    page.mouse.down()
    page.mouse.up()
    expect(page.locator("#pin")).to_have_text("Release step 22")
    move_to(25)
    page.wait_for_timeout(150)
    assert told(page).startswith("Step 22: input")  # the mouse moves nothing any more
    assert page.url.endswith("#model=0&iteration=4&step=22")
    address = page.url
    page.click("#pin")
    move_to(25)
    move_to(24)
    expect(page.locator("#told")).to_contain_text("Step 24: input")
    assert page.evaluate("document.getElementById('permalink').href").endswith("#model=0&iteration=4&step=24")
    with browser.new_page() as other:
        other.goto(address)
        expect(other.locator("#told")).to_contain_text("Step 22: input")
        expect(other.locator("#pin")).to_have_attribute("aria-pressed", "true")
        other.goto(address.replace("step=22", "step=9999"))
        expect(other.locator("#told")).to_contain_text("Step 26: input")


def test_the_diagram_follows_the_keyboard(open_page: Open, run_page: Path) -> None:
    page = open_page(run_page, width=1200)
    page.focus("#timeline")
    for key, step in (
        ("Home", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("ArrowLeft", 1),
        ("End", 26),
        ("PageDown", 16),
    ):
        page.keyboard.press(key)
        expect(page.locator("#told")).to_contain_text(f"Step {step}: input")
        expect(page.locator("#timeline")).to_have_attribute("aria-valuenow", str(step))
    page.keyboard.press("Enter")
    expect(page.locator("#pin")).to_have_text("Release step 16")
    page.keyboard.press("Escape")
    expect(page.locator("#pin")).to_have_text("Pin step 16")


def test_a_step_without_credit_offers_the_nearest_that_has_it(open_page: Open, run_page: Path) -> None:
    page = open_page(run_page, width=1200)
    page.focus("#timeline")
    page.keyboard.press("Home")
    expect(page.locator("#told")).to_contain_text("Nothing to read: no microstate has been kept yet.")
    expect(page.locator("#told")).to_contain_text("No credit: no answer counts at this step.")
    nearest = min(map(int, page.evaluate("Object.keys(moment().credit)")))
    expect(page.locator("#nearest")).to_have_text(f"Nearest step with credit: {nearest}")
    page.click("#nearest")
    expect(page.locator("#told")).to_contain_text(f"Step {nearest}: input")
    expect(page.locator("#nearest")).to_be_hidden()


def test_series_can_be_hidden(open_page: Open, run_page: Path, results_page: Path) -> None:
    page = open_page(run_page, width=1200)
    page.evaluate("choose({step: model().start, isPinned: false}); explore()")
    assert drawn_widths(page, "y")
    for series, axis in (("read", "y"), ("skip", "y3")):
        page.click(f"[data-series={series}]")
        expect(page.locator(f"[data-series={series}]")).to_have_attribute("aria-pressed", "false")
        page.wait_for_timeout(100)
        assert drawn_widths(page, axis) == []
        page.click(f"[data-series={series}]")
        page.wait_for_timeout(100)
        assert drawn_widths(page, axis)
    page = open_page(results_page)
    figure = page.locator("figure", has=page.locator("[id=curves-copying-t-100]"))
    visible = "document.getElementById('curves-copying-t-100').data.filter((one) => one.visible !== false).length"
    before = page.evaluate(visible)
    assert figure.locator(".key button[aria-pressed=false]").count() == 6  # controls and other readings
    figure.locator(".key button").first.click()
    assert page.evaluate(visible) == before - 3  # the line, and the two edges of its band


def test_figures_and_numbers_are_saved(open_page: Open, run_page: Path, run: Run) -> None:
    page = open_page(run_page)
    tools = page.locator("#runs .tools")
    saved: dict[str, bytes] = {}
    for kind in ("PNG", "SVG", "CSV"):
        with page.expect_download() as download:
            tools.get_by_role("button", name=kind).click()
        assert download.value.suggested_filename == f"runs-copying-t-6.{kind.lower()}"
        saved[kind] = download.value.path().read_bytes()
    assert saved["PNG"].startswith(b"\x89PNG")
    assert b"<svg" in saved["SVG"]
    rows = list(csv.reader(io.StringIO(saved["CSV"].decode())))
    lines = run.evaluations()
    assert rows[0] == ["series", "x", "y"]
    assert [int(row[1]) for row in rows[1:]] == [line["step"] for line in lines]
    assert [float(row[2]) for row in rows[1:]] == pytest.approx(
        [line["metrics"]["accuracy_last10"] for line in lines], rel=1e-4
    )


def test_the_results_can_be_filtered(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page, width=1300)
    rows = page.locator("tr[data-method]:not([hidden])")
    every = rows.count()
    expect(page.locator("#filtered")).to_have_text(f"all {every} rows")
    page.select_option("#filter-method", "sab")
    page.select_option("#filter-verdict", "reached")
    assert 0 < rows.count() < every
    assert all("reached" in text and text.startswith("SAB") for text in rows.all_inner_texts())
    expect(page.locator("#filtered")).to_have_text(f"{rows.count()} of {every} rows")
    page.fill("#filter", "adding")
    assert page.locator(".block:not([hidden]) h3").all_inner_texts() == ["Adding, T = 200", "Adding, T = 400"]


def test_the_verdict_is_seen_without_scrolling(open_page: Open, results_page: Path) -> None:
    page = open_page(results_page, width=1000)
    right = page.evaluate("""[...document.querySelectorAll(".block th")]
        .filter(({textContent}) => textContent === "against the paper")
        .map((one) => one.getBoundingClientRect().right)""")
    assert len(right) > 8
    assert max(right) <= 1000


def test_paper_has_everything(browser: Browser, results_page: Path, tmp_path: Path) -> None:
    """All figures are drawn before printing, in light colours, and nothing is wider than the paper."""
    with browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark") as page:
        page.goto(results_page.as_uri())
        page.evaluate("""addEventListener("beforeprint", () => { printed = {
            theme: document.documentElement.dataset.theme,
            missing: Object.keys(data.figures).filter((name) => !document.querySelector(`[id="${name}"] .main-svg`)),
            wide: [...document.querySelectorAll("main *")].filter((one) => one.offsetParent && !one.closest("svg")
                && one.getBoundingClientRect().right > document.body.getBoundingClientRect().right + 1)
                .map((one) => one.outerHTML.slice(0, 90)),
            folded: document.querySelectorAll("details.fold:not([open])").length,
        }; })""")
        page.pdf(path=tmp_path / "page.pdf", format="A4")
        assert page.evaluate("printed") == {"theme": "light", "missing": [], "wide": [], "folded": 0}
        assert page.evaluate("[document.documentElement.dataset.theme, document.documentElement.className]") == [
            "dark",
            "",
        ]
        captions = page.locator("#tables figcaption").all_inner_texts()
    if shutil.which("pdftotext") is None:
        pytest.skip("the text of the PDF is compared where pdftotext (poppler-utils) is installed")
    made = subprocess.run(
        ["pdftotext", "-layout", tmp_path / "page.pdf", "-"], capture_output=True, text=True, check=True
    )
    text = " ".join(made.stdout.split())
    for caption in captions:
        assert caption in text
    assert text.count("accuracy on the last 10") > 6  # the axes of figures are letters, too
    assert "100.0 ‡" in text


AXE = ROOT / "build" / "npm" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.parametrize(("which", "scheme"), [("run_page", "light"), ("run_page", "dark"), ("results_page", "light")])
def test_nothing_hinders_people_seriously(
    browser: Browser, which: str, scheme: Scheme, request: pytest.FixtureRequest
) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: npm install --prefix build/npm --no-save axe-core@4.14.0")
    with browser.new_context(bypass_csp=True, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(request.getfixturevalue(which).as_uri())
        page.wait_for_selector("#timeline .main-svg")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.add_script_tag(path=AXE)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    told = [f"{one['impact']}: {one['help']}: {one['nodes'][0]['html'][:200]}" for one in found["violations"]]
    assert told == []
    assert len(found["passes"]) > 10


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
        page.evaluate("document.querySelector('#runs figure details').open = true")
        expect(page.locator("#runs figure table td").nth(2)).to_have_text("9", timeout=20_000)
        assert page.inner_text("h1") != ""
        expect(page.locator("#told")).to_contain_text("Step 1: input")  # what was chosen stays
    metrics.write_text(before)


def test_as_many_as_fifty_runs(open_page: Open, run: Run, tmp_path: Path) -> None:
    runs = {f"run {seed}": run for seed in range(50)}
    material = Material(runs=runs)
    out = tmp_path / "fifty.html"
    out.write_text(document.page(document.parts(material, [explorer.of_run("run 0", run, 1)])), encoding="utf-8")
    assert out.stat().st_size < 5e6
    page = open_page(out)
    assert page.locator("[aria-label=Runs] tbody tr").count() == 50
