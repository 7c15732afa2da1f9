from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import median

import pytest
import torch

from sab.errors import UserValueError
from sab.lab.experiments.tables import ROWS
from sab.lab.report.numbers import mark, verdict
from sab.lab.report.page import document, elements, titles
from sab.lab.report.page.material import Material, gather
from sab.lab.report.tables import table_cells
from sab.lab.tasks import Copying
from sab.lab.training import Run
from sab.lab.training.checkpoint import load_model
from sab.lab.training.progress import show_seconds
from tests.lab.report import made_up
from tests.lab.report.page.test_elements import Tags
from tests.lab.report.page.test_explorer import attention

ROOT = Path(__file__).parents[4]


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def page_of(material: Material) -> str:
    return document.page(document.parts(material, document.explorers(material)))


@pytest.fixture(scope="module")
def of_results() -> str:
    return page_of(gather([ROOT / "results"]))


def test_the_file_is_one_and_asks_nobody(of_results: str) -> None:
    assert len(of_results.encode()) < 5e6
    policy = unescape(Tags(of_results.split("<style>")[0]).attributes["content"] or "")  # of the last meta element
    assert policy == "light dark"
    found = re.search('Content-Security-Policy" content="(.*?)">', of_results)
    assert found
    rules = dict(rule.strip().split(" ", 1) for rule in unescape(found[1]).split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    scripts = re.findall("<script>(.*?)</script>", of_results, re.DOTALL)
    assert rules["script-src"].split() == [elements.digest(script) for script in scripts]
    for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", of_results.split("<script>")[0]):
        assert "http" not in tag


def test_the_tables_have_the_records_numbers(of_results: str) -> None:
    by_row = gather([ROOT / "results"]).by_row
    cells = re.findall("<td>(.*?)</td>", of_results)
    for row, records in by_row.items():
        values = [record["metrics"].get("accuracy_last10") for record in records]
        if row.startswith("copying") and None not in values and all(one["status"] == "finished" for one in records):
            assert f"{100 * median(values):.1f}" in cells
            marks = [mark(ROWS[row], record) for record in records]
            shown = (f"{100 * value:.1f}{marked}" for value, marked in zip(values, marks, strict=True))
            assert ", ".join(shown) in cells


def test_curves_are_the_records_histories(of_results: str) -> None:
    records = gather([ROOT / "results"]).by_row["copying-200-sab-10-10-ours"]
    figure = data_of(of_results)["figures"]["curves-copying-t-200"]
    drawn = next(one for one in figure["data"] if one.get("name") == "SAB 10, 10 (3 seeds)")
    for place, step in enumerate(drawn["x"]):
        values = [
            point["metrics"]["accuracy_last10"]
            for record in records
            for point in record["history"]
            if point["step"] == step
        ]
        assert drawn["y"][place] == pytest.approx(median(values), rel=1e-4)


def test_sections_are_those_that_there_is_something_for(trained: Run, of_results: str) -> None:
    assert re.findall('<section id="(.*?)">', of_results) == ["tables", "explorer", "speed"]
    assert "Of the paper&#x27;s 45 rows 45 were run." in of_results
    page = page_of(Material(runs={"a run": trained}))
    assert re.findall('<section id="(.*?)">', page) == ["explorer", "runs"]
    result = trained.result()
    assert result is not None
    accuracy = f"{result.metrics['accuracy_last10']:.1%}"
    assert f'<h1 id="title">Copying, T = 3: SAB {accuracy}</h1>' in page
    assert "Task: repeat ten digits after 3 blanks." in page
    assert f"Outcome on test data, accuracy on the last 10: SAB {accuracy}; chance 12.5%." in page
    assert document.ARCS.partition(".")[0] in page
    record = made_up.record("copying-200-sab-10-10-ours")
    told = re.search("Not run: (.*?)[.]<", page_of(Material(by_row={record["row"]: [record]})))
    assert told
    assert {"Copying, T = 100", "Penn Treebank", "text8"} <= set(told[1].split("; "))


def test_nothing_of_a_run_or_a_record_is_markup(trained: Run) -> None:
    hostile = "</script><script>hacked=1</script><img src=x onerror=hacked=1>"
    record = made_up.record("copying-200-sab-10-10-ours", device=hostile, attention=attention())
    run = Run(Path(hostile), trained.config)
    material = Material(
        runs={hostile: run, "other": trained},
        by_row={record["row"]: [record]},
        left_out={hostile: UserValueError(hostile)},
    )
    page = page_of(material)
    assert hostile not in page
    assert page.count("<script") == 3
    assert "<img" not in page.split("<script>")[0]
    assert elements.text(hostile) in page


def cells_of(page: str, name: str) -> list[list[str]]:
    """The rows of the table of that name, the header among them."""
    found = re.search(f'aria-label="{re.escape(name)}"><table>(.*?)</table>', page)
    assert found
    rows = re.findall("<tr.*?>(.*?)</tr>", found[1])
    return [[unescape(re.sub("<.*?>", "", one)) for one in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]


def test_the_runs_have_what_they_took(trained: Run) -> None:
    result = trained.result()
    assert result is not None
    made = document.parts(Material(runs={"a": trained}), []).main()
    header, line = cells_of(made, "Runs")
    found = dict(zip(header, line, strict=True))
    assert found["run"] == "SAB, LSTM 6, k_trunc 4, k_top 3, seed 0"
    assert found["time"] == show_seconds(result.wall_time)
    assert (found["first solved"], found["iterations"], found["status"]) == ("never", "4", "finished")
    model = load_model(trained, torch.device("cpu"))
    assert found["parameters"] == f"{sum(one.numel() for one in model.parameters()):,}"
    assert found["test"] == f"{result.metrics['accuracy_last10']:.1%}"
    assert elements.text(titles.command(trained.config, trained.path)) in made


def test_the_summary_has_the_records_numbers(of_results: str) -> None:
    by_row = gather([ROOT / "results"]).by_row
    header, *lines = cells_of(of_results, "Summary of all tables")
    summary = {line[0]: dict(zip(header, line, strict=True)) for line in lines}

    def best(method: str) -> float:
        rows = [row for row in ROWS.values() if (row.task, row.length, row.method) == ("copying", 200, method)]
        values = [[one["metrics"]["accuracy_last10"] for one in by_row.get(row.id, [])] for row in rows]
        return max(median(found) for found in values if found and None not in found)

    found = summary["Copying, T = 200"]
    assert found["SAB here"] == f"{100 * best('sab'):.1f}"
    assert found["truncated BPTT"] == f"{100 * best('tbptt'):.1f}"
    assert found["full BPTT"] == f"{100 * best('bptt'):.1f}"
    judged = [
        row for row in ROWS.values() if (row.task, row.length, row.reading) == ("copying", 200, "ours") and row.paper
    ]
    reached = [row for row in judged if verdict(row, by_row[row.id]) == "reached"]
    assert found["SAB rows that reach the paper"] == f"{len(reached)} of {len(judged)}"
    assert '<h1 id="title">SAB reaches the paper&#x27;s numbers in ' in of_results


def test_the_verdict_comes_before_the_numbers() -> None:
    rows = [row for row in ROWS.values() if (row.task, row.length) == ("copying", 200)]
    header, _ = table_cells(rows, {})
    order = ["method", "against the paper", "here: accuracy, %", "paper: accuracy, %", "each seed"]
    assert sorted(order, key=header.index) == order


def test_a_run_without_weights_is_told(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((trained.path / "config.json").read_text())
    page = page_of(gather([tmp_path]))
    assert "must hold a checkpoint" in page
    assert 'id="timeline"' not in page
    assert "under way" in page


def test_more_models_than_can_be_traced_are_told(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_EXPLORERS", 1)
    other = Run(trained.path, replace(trained.config, task=Copying(length=4)))
    made = document.parts(Material(runs={"a": trained, "b": other}), [])
    assert "1 more model not traced" in made.main()


def test_a_seed_of_records_and_of_runs_counts_once() -> None:
    one, other = made_up.record(seed=0, value=0.25), made_up.record(seed=0, value=0.75)
    third = made_up.record(seed=1)
    merged = document._merged({one["row"]: [third, one]}, {one["row"]: [other]})
    assert merged == {one["row"]: [other, third]}


def test_written_in_one_move(trained: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    told: list[str] = []
    document.write(Material(runs={"a": trained}), out, told.append)
    assert told == ["model 1 of 1: SAB, LSTM 6, k_trunc 4, k_top 3"]
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_what_cannot_be_written_is_told(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(UserValueError, match=r"out must end in .html; got 'page.pdf'"):
        document.write(Material(), Path("page.pdf"))
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserValueError, match="must be a file; it is a folder"):
        document.write(Material(), tmp_path / "folder.html")
    (tmp_path / "file").touch()
    with pytest.raises(UserValueError, match=r"must be a place that can be written to; it is not"):
        document.write(Material(runs={"a": trained}), tmp_path / "file" / "page.html")


def test_plotly_is_the_one_that_was_published() -> None:
    assert document.plotly_script().startswith("/**\n* plotly.js (cartesian - minified) v4.1.1")
    assert "</script" not in document.plotly_script()
