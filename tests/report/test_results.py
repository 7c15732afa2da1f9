"""The tables made from records: medians, what diverged, what was not run, what falls short; and the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from sab import cli
from sab.experiments import records as stored
from sab.experiments.tables import ROWS
from sab.report import figures, pages, results
from sab.report.results import load, median, page_part, readme_part, table, verdict
from sab.tasks import Copying

ROOT = Path(__file__).parents[2]
SAB = "copying-300-sab-5-5-ours"


def record(row: str = SAB, seed: int = 0, value: float = 1.0, **entries: Any) -> dict[str, Any]:
    """A record whose every metric has the same value."""
    config = ROWS[row].config(seed)
    metrics = dict.fromkeys(("mse",) if config.task.name == "adding" else results.COLUMNS["copying"], value)
    history = [{"step": step, "loss": 1.0, "metrics": metrics, "grad_norm_max": 2.0} for step in (100, 200)]
    made = {"schema": stored.SCHEMA, "row": row, "task": config.task.name, "seed": seed, "status": "finished"}
    made |= {"message": "finished.", "iterations": config.training.iterations, "solved_at": 400, "metrics": metrics}
    made |= {"wall_time": 75.0, "together": 8, "other_lengths": {}, "device": "cuda (GPU)", "commit": "abcdef0123456"}
    made |= {"versions": {"torch": "2.11"}, "date": "2026-01-02T03:04:05+00:00"}
    return {**made, "config": config.to_json(), "history": history, **entries}


def diverged(row: str = SAB, seed: int = 0, after: int = 240) -> dict[str, Any]:
    message = f"the loss of iteration {after + 1} is nan; the weights were left as they were before it."
    return record(row, seed, 0.5, status="diverged", iterations=after, solved_at=None, message=message)


def by_row(*made: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for one in made:
        grouped.setdefault(one["row"], []).append(one)
    return grouped


def cells(row: str, *made: dict[str, Any]) -> dict[str, str]:
    """A row's cells by their column."""
    header, _, line, *_ = table([ROWS[row]], by_row(*made)).splitlines()
    names, values = ([cell.strip() for cell in text.strip("|").split("|")] for text in (header, line))
    return dict(zip(names, values, strict=True))


def test_a_row_with_its_seeds() -> None:
    told = cells(
        SAB, record(seed=0, value=0.9958), record(seed=1, value=1.0), record(seed=2, value=0.98, solved_at=None)
    )
    assert (told["method"], told["reading"], told["k_trunc"], told["k_top"]) == ("SAB", "ours", "5", "5")
    assert (told["paper: accuracy, %"], told["paper: CE, last 10"], told["paper: CE"]) == ("98.9", "0.048", "0.002")
    assert told["here: accuracy, %"] == "99.6"
    assert told["here: CE"] == "0.996"
    assert told["each seed"] == "99.6, 100.0, 98.0"
    assert (told["seeds"], told["iterations"], told["first solved"]) == ("3", "3,000", "400, 400, never")
    assert told["wall time"] == "1:15 min, 8 at once"
    assert told["against the paper"] == "reached by 2 of 3 seeds"


def test_a_row_that_was_not_run_says_so() -> None:
    told = cells(SAB)
    assert told["here: accuracy, %"] == "not run"
    assert {told[name] for name in ("each seed", "iterations", "wall time", "against the paper")} == {"–"}


def test_divergence_is_told_and_counts_as_worse_than_any_number() -> None:
    told = cells(SAB, record(seed=0), diverged(seed=1), diverged(seed=2, after=99))
    assert told["here: accuracy, %"] == told["here: CE"] == "diverged"
    assert told["each seed"] == "100.0, diverged at iteration 241, diverged at iteration 100"
    assert told["iterations"] == "3,000, 240, 99"
    assert told["against the paper"] == "reached by 1 of 3 seeds"
    assert cells(SAB, diverged())["against the paper"] == "not reached: diverged"
    told = cells(SAB, record(seed=0), record(seed=1, value=0.5), diverged(seed=2))
    assert told["here: accuracy, %"] == "50.0"
    assert told["first solved"] == "400, 400, never"


@pytest.mark.parametrize(
    ("values", "higher", "expected"),
    [
        ([0.1, 0.3, 0.2], True, 0.2),
        ([0.1, 0.3], False, 0.2),
        ([None, 0.3, 0.2], True, 0.2),
        ([None, 0.3, 0.2], False, 0.3),
        ([None, 0.3], True, None),
        ([None], True, None),
        ([], True, None),
    ],
)
def test_median(values: list[float | None], higher: bool, expected: float | None) -> None:
    assert median(values, higher) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("row", "value", "told"),
    [
        (SAB, 0.98850, "reached by the one seed"),  # 98.9 as the paper rounds
        (SAB, 0.98840, "below"),
        ("copying-100-sab-10-10-ours", 0.9996, "reached by the one seed"),
        ("copying-100-sab-10-10-ours", 0.9990, "below"),
        ("adding-200-sab-10-10-ours", 0.00014, "reached by the one seed"),
        ("adding-200-sab-10-10-ours", 0.00016, "above"),
        ("adding-400-bptt", 0.000004, "reached by the one seed"),
        ("adding-400-bptt", 0.000006, "above"),
        ("copying-500-sab-10-10-ours", 0.1, "–"),
    ],
)
def test_against_the_paper(row: str, value: float, told: str) -> None:
    assert verdict(ROWS[row], [record(row, value=value)]) == told


def test_every_seed_must_reach_it() -> None:
    assert verdict(ROWS[SAB], [record(), record(seed=1)]) == "reached"
    assert verdict(ROWS[SAB], [record(), record(seed=1, value=0.5)]) == "reached by 1 of 2 seeds"


def test_a_record_of_another_configuration_is_marked() -> None:
    config = ROWS[SAB].config(0).to_json()
    config["training"]["lr"] = 0.5
    text = table([ROWS[SAB]], by_row(record(config=config), record(seed=1, config={"task": {}}), record(seed=2)))
    assert "100.0 †, 100.0 †, 100.0 |" in text
    assert "† Made with another configuration than the row now has." in text
    assert "†" not in table([ROWS[SAB]], by_row(record()))
    config["training"] |= {"lr": 6e-3, "device": "cuda"}
    assert "†" not in table([ROWS[SAB]], by_row(record(config=config))), "the device is free"
    config["training"]["iterations"] = 2
    assert "100.0 † |" in table([ROWS[SAB]], by_row(record(config=config))), "a trial is another thing"


def test_columns_that_say_nothing_are_left_out() -> None:
    assert "k_att" not in cells(SAB)
    assert cells("adding-400-sab-5-10-ours")["k_att"] == "5"
    assert not [name for name in cells("copying-500-sab-10-10-ours") if "paper" in name]
    assert cells("copying-100-bptt-ours")["reading"] == "our training, no memory"


def test_other_lengths() -> None:
    rows = [row for row in ROWS.values() if row.other_lengths]
    tested = {str(length): {"accuracy_last10": 0.9} for length in (200, 300)}
    made = by_row(record(rows[0].id, 0, other_lengths=tested), record(rows[0].id, 1), diverged(rows[0].id, 2))
    text = results.other_lengths_table(rows, made)
    assert (
        "| **100.0** (100.0, 100.0, diverged at iteration 241) | **90.0** (90.0) | **90.0** (90.0) | not run |" in text
    )
    assert text.count("not run") == 3 + 6


def everything() -> list[dict[str, Any]]:
    made = [record(row, seed, 0.9) for row in results.CURVE_ROWS.values() for seed in (0, 1)]
    weights = [[0.5, 0.5, None], [0.25, 0.5, 0.25]]
    attention = {"moments": {"100": weights, "300": weights, "600": weights}, "k_att": 2, "first": 6}
    return [*made, record(results.ATTENTION_ROW, attention=attention), record("adding-200-bptt", value=1e-6)]


def test_the_page() -> None:
    text = page_part(by_row(*everything()), "images")
    assert text.startswith("Run on\n\n- cuda (GPU): 10 runs; torch 2.11; commit abcdef012345; 2026-01-02\n")
    for row in ROWS.values():
        if row.length is not None and row.length <= 300:
            assert text.count(f"sab reproduce {row.task} --rows '{row.task}-{row.length}-*") == 1
    assert f"(images/{results.ATTENTION})" in text
    assert f"(images/{results.CURVES})" in text
    empty = page_part({}, "images")
    assert empty.startswith("Nothing has been run yet.")
    assert "![" not in empty
    assert "The figure is not made yet." in empty


def test_the_readme() -> None:
    text = readme_part(by_row(*everything(), record("copying-100-sab-5-5-ours", value=0.997)))
    assert "median (seeds); `sab reproduce copying`:" in text
    assert "| SAB, k_trunc = k_top = 5 | 99.6 / 99.7 (1) | 99.3 / not run | 98.9 / 90.0 (2) |" in text
    assert "| LSTM, full BPTT, our training | – / not run |  |  |" in text
    assert "| LSTM, TBPTT, k_trunc = 100 |  | 0.00068 / not run |" in text


def test_figures(tmp_path: Path) -> None:
    made = by_row(*everything())
    attention = results.attention_record(made)
    assert attention is not None
    figure = figures.attention_moments(attention)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == [f"after {n} iterations" for n in (100, 300, 600)]
    assert panels[0].images[0].get_extent() == [1.0, 7.0, 7.5, 5.5]
    curves = figures.seeds_over_time({"SAB": made[SAB], "BPTT": made["copying-300-bptt"]}, Copying.headline)
    assert len(curves.axes[0].lines) == 5
    assert [text.get_text() for text in curves.legends[0].get_texts()] == ["SAB (2 seeds)", "BPTT (2 seeds)", "chance"]
    for name, one in (("attention.png", figure), ("curves.png", curves)):
        figures.save(one, tmp_path / name)
        assert imread(tmp_path / name).std() > 0.01


def test_the_report_renews_pages_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for one in everything():
        stored.save(one, Path("results"))
    assert cli.main(["reproduce", "--report"]) == 2
    assert capsys.readouterr().err == "sab: 'docs/results.md' must be a page to renew; it cannot be read: " + (
        "No such file or directory.\n"
    )
    begin, end = pages.marks("results")
    Path("docs").mkdir()
    for page in (Path("docs/results.md"), Path("README.md")):
        page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert cli.main(["reproduce", "--report"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert sorted(told) == sorted(
        ["docs/results.md", "README.md", f"docs/images/{results.ATTENTION}", f"docs/images/{results.CURVES}"]
    )
    assert all(Path(name).is_file() for name in told)
    text = Path("docs/results.md").read_text()
    assert text.startswith(f"before\n{begin}\nRun on\n")
    assert text.endswith(f"{end}\nafter\n")
    assert cli.main(["reproduce", "--report"]) == 0
    assert Path("docs/results.md").read_text() == text
    Path("README.md").write_text("no marks")
    assert cli.main(["reproduce", "--report"]) == 2
    assert "'README.md' must hold <!-- results: begin -->" in capsys.readouterr().err


def test_records_are_loaded_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        stored.save(record(seed=seed), tmp_path)
    assert [one["seed"] for one in load(tmp_path)[SAB]] == [0, 1, 2]
    assert json.loads((tmp_path / "copying.jsonl").read_text().splitlines()[0])["seed"] == 2


def test_the_pages_are_up_to_date_with_the_committed_records() -> None:
    made = load(ROOT / "results")
    for page, part in (
        (ROOT / "docs" / "results.md", page_part(made, "images")),
        (ROOT / "README.md", readme_part(made)),
    ):
        text = page.read_text(encoding="utf-8")
        assert pages.renewed(text, "results", part, page) == text, "run: make results"
