"""The generated parts of the pages of results and of the README, their figures and the CSV."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib.image import imread

from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.rivals import PROBLEMS
from sab.lab.experiments.selection import SELECTION_SEED
from sab.lab.experiments.tables import ROWS
from sab.lab.report.figures import save
from sab.lab.report.results import load
from sab.lab.report.tables import summary_of
from sab.lab.tasks import Copying
from sab.plot.drawing import METHODS
from tests.lab.report.made_up import SAB, by_row, diverged, record, rival_record
from tools import distance, figures, rivals, rows, summary
from tools.groups import SELECTION_NOTE, SELECTION_SIGN
from tools.pages import ROOT, with_part
from tools.results import ROWS as EVERY_ROW
from tools.results import page_part, parts


def everything() -> list[dict[str, Any]]:
    made = [record(row, seed, 0.9) for row in figures.CURVE_ROWS.values() for seed in (0, 1)]
    weights = [[0.5, 0.5, None], [0.25, 0.5, 0.25]]
    attention = {"moments": {"100": weights, "300": weights, "600": weights}, "k_att": 2, "first": 6}
    made += [record(figures.ATTENTION_ROW, attention=attention), record("adding-200-bptt", value=1e-6)]
    clipping = [f"{row}{end}" for row in ("ptb-sab-5-10-ours", "mnist-sab-14-10-ours") for end in ("", "-unclipped")]
    return [*made, *(record(row, value=0.9) for row in (*clipping, "mnist-bptt")), record("text8-bptt", part="prefix")]


def test_the_page() -> None:
    text = page_part(by_row(*everything()))
    assert "## Where it was run\n\n- cuda (GPU): 16 runs; torch 2.11; commit abcdef012345; 2026-01-02\n" in text
    for row in ROWS.values():
        if row.length is not None and row.length <= 300:
            assert text.count(f"sab reproduce {row.task} --rows '{row.task}-{row.length}-*") == 1
    assert page_part({}).endswith("Nothing has been run yet.")


def test_every_figure_is_shown_once() -> None:
    docs = ROOT / "docs"
    pages = "".join((docs / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "results-appendix"))
    assert re.findall(r"\(images/(\S+)\)", pages)
    for name in figures.of_results(by_row(*everything())):
        assert pages.count(f"(images/{name})") == 1


def test_the_results_are_a_few_screens() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 220


def lines(*made: dict[str, Any]) -> list[dict[str, str]]:
    return list(csv.DictReader(rows.text(by_row(*made)).splitlines()))


def test_the_csv_has_every_number_of_every_seed() -> None:
    tested = {"200": {"accuracy_last10": 0.25}}
    row = "copying-100-sab-5-5-ours"
    found = lines(record(row, 1, 0.9, other_lengths=tested), diverged(row, 2), record("ptb-sab-5-10-ours", value=1.5))
    assert {line["row"] for line in found} == ROWS.keys()
    here = {
        (line["seed"], line["metric"], line["tested_length"]): (line["value"], line["paper"], line["status"])
        for line in found
        if line["row"] == row
    }
    assert here["1", "accuracy_last10", "100"] == ("90", "99.6", "finished")
    assert here["1", "accuracy_last10", "200"] == ("25", "", "finished")
    assert here["2", "cross_entropy", "100"] == ("", "0.001", "diverged")
    assert ("1", "accuracy_last10", "300") not in here, "it was not tested there"
    text = [line for line in found if line["row"] == "ptb-sab-5-10-ours"]
    assert [(line["metric"], line["split"], line["value"], line["paper"]) for line in text] == [
        ("bits_per_character", "valid", "1.51", "1.49"),
        ("bits_per_character", "test", "1.5", "1.40"),
        ("bits_per_character_carried", "valid", "1.51", "1.49"),
        ("bits_per_character_carried", "test", "1.5", "1.40"),
    ]
    assert (text[0]["data"], text[0]["k_trunc"], text[0]["k_top"], text[0]["outdated"]) == ("ptb", "5", "10", "")
    (waiting, *_) = (line for line in found if line["row"] == "mnist-bptt")
    assert (waiting["status"], waiting["seed"], waiting["value"]) == ("not run", "", "")


def test_the_csv_marks_records_of_older_rows() -> None:
    config = ROWS["copying-100-sab-5-5-ours"].config(0).to_json()
    older = {**config, "model": {**config["model"], "scorer": "dot"}}
    shorter = {**config, "training": {**config["training"], "iterations": 5}}
    row = "copying-100-sab-5-5-ours"
    marks = {line["outdated"] for line in lines(record(row, config=older)) if line["row"] == row}
    assert len(marks) == 1
    assert marks.pop().startswith("memory: dot, ")
    assert {line["outdated"] for line in lines(record(row, config=shorter)) if line["row"] == row} == {"configuration"}


def test_tables_fit_the_page_and_fold_the_rest() -> None:
    text = page_part(by_row(*everything()))
    folded = re.findall(r"<details.*?</details>", text, re.DOTALL)
    assert folded
    assert all("| wall time |" in part for part in folded), "everything is there"
    assert not any("| against the paper |" in part or "here: accuracy, %" in part for part in folded), "once"
    fitting = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    headers = re.findall(r"^(\|.*)\n\| ---", fitting, re.MULTILINE)
    assert max(header.count("|") - 1 for header in headers) <= 9
    assert "| SAB, ours | 5, 5 | below | 90.0 | 98.9 | 90.0, 90.0 |" in fitting
    assert "| SAB, ours | 14, 10, 14 | below | 90.00 | 90.9 |" in fitting


def test_the_summary() -> None:
    made = by_row(
        record("copying-100-sab-10-10-ours", value=1.0),
        record("copying-100-sab-5-5-ours", value=0.5),
        record("copying-100-tbptt-10", value=0.2),
        record("copying-100-tbptt-20", value=0.3),
        record("text8-sab-5-5-ours", value=1.9, part="prefix"),
    )
    text = summary.part(made, [])
    assert "| Copying T = 100, % | 100.0 (1) | 100.0 | reached | 30.0 (1) | not run | – |" in text
    assert "| Copying T = 300, % | not run | – | – | not run | not run | not run |" in text
    assert "| text8 prefix, bits | 1.900 (1) | 1.53 | missed | not run | not run | – |" in text
    assert summary_of([row for row in ROWS.values() if row.length == 100], made).reached == "1 of 2"
    assert "of 8, SAB in our training reaches the paper's best value in 1. " in summary.sentence(made)
    assert "best value in none. " in summary.sentence({})


def test_the_best_rival_is_no_sab_and_at_its_chosen_rate() -> None:
    problem = PROBLEMS["copying-300"]
    made = [
        rival_record(problem, name, rate, seed, value, value)
        for name, rate, value in (("sab", 2e-3, 1.0), ("lstm", 2e-3, 0.3), ("self_attention", 2e-3, 0.8))
        for seed in (SELECTION_SEED, 0, 1)
    ]
    made += [rival_record(problem, "gru", 2e-3, 0, None, 0.99), rival_record(problem, "chrono", 8e-3, 0, 0.9, 0.95)]
    assert "| not run | not run | 80.0 (2) LSTM, full self-attention |" in summary.part({}, made)
    errors = {"lstm": 0.01, "mamba": 0.002}
    adding = [
        rival_record(PROBLEMS["adding-400"], name, 2e-3, seed, value, value)
        for name, value in errors.items()
        for seed in (SELECTION_SEED, 0)
    ]
    assert "| Adding T = 400, error | not run | – | – | not run | not run | 0.00200 (1) Mamba |" in summary.part(
        {}, adding
    )


def test_a_rival_whose_rates_alone_were_tried_counts_with_a_sign() -> None:
    problem = PROBLEMS["copying-300"]
    made = [rival_record(problem, "lstm", 2e-3, seed, 0.3, 0.3) for seed in (SELECTION_SEED, 0)]
    tried = [
        rival_record(problem, "transformer", rate, SELECTION_SEED, value, value - 0.1)
        for rate, value in zip(problem.rates, (0.5, 0.9, 0.6), strict=True)
    ]
    text = summary.part({}, [*made, *tried])
    assert f"| not run | not run | 80.0 {SELECTION_SIGN} Transformer, rotary |" in text
    assert text.endswith(f" {SELECTION_NOTE}")
    overview = rivals.overview([*made, *tried])
    assert f"| Transformer, rotary | 80.0% {SELECTION_SIGN} | not run |" in overview
    assert overview.endswith(f"\n\n{SELECTION_NOTE}")
    for some in ([*made, *tried[:2]], [*made, *tried, rival_record(problem, "transformer", 2e-3, 0, 0.2, 0.2)]):
        assert SELECTION_SIGN not in summary.part({}, some) + rivals.overview(some)
        assert "30.0 (1) LSTM |" in summary.part({}, some)


def test_the_best_lstms_count_every_budget_and_start() -> None:
    values = {
        "bptt": 0.2,
        "bptt-full-budget": 0.6,
        "chrono-full-budget": 0.9,
        "tbptt-5": 0.2,
        "tbptt-5-full-budget": 0.3,
    }
    made = by_row(*(record(f"copying-100-{row}", value=value) for row, value in values.items()))
    text, sign = summary.part(made, []), summary.BUDGET_SIGN
    assert f"| Copying T = 100, % | not run | – | – | 30.0 (1) {sign} | 90.0 (1) {sign} | – |" in text
    assert f" {sign} With the paper's 200,000 iterations" in text
    few = by_row(record("copying-100-bptt", value=0.2), record("copying-100-tbptt-5", value=0.3))
    assert "| 30.0 (1) | 20.0 (1) | – |" in summary.part(few, [])
    assert sign not in summary.part(few, [])


def test_the_distance_that_is_closed() -> None:
    values = {
        "copying-100-tbptt-10": 0.2,
        "copying-100-sab-10-10": 1.0,
        "copying-100-bptt": 0.6,
        "copying-100-sab-5-5": 0,
    }
    values |= {"ptb-tbptt-5": 1.5, "ptb-sab-5-10": 1.45, "ptb-bptt": 1.3, "adding-200-sab-10-10": 1e-5}
    values |= {"mnist-tbptt-10": 0.5, "mnist-sab-10-10": 0.6, "mnist-bptt": 0.4}
    made = by_row(*(record(f"{row}-ours", value=value) for row, value in values.items()))
    text = distance.part(made)
    assert "| Copying T = 100 | 20.0 | 100.0 | 60.0 | 200 % | 102 % |" in text
    assert "| Penn Treebank, fresh | 1.500 | 1.450 | 1.300 | 25 % | 67 % |" in text
    assert "| Penn Treebank, carried | 1.500 | 1.450 | 1.300 | 25 % | 67 % |" in text
    assert "| Penn Treebank, carried, better training | 1.500 | 1.450 | 1.300 | 25 % | – |" in text
    carried = {"ptb-carried-tbptt-5": 1.4, "ptb-carried-sab-5-10": 1.3, "ptb-carried-bptt": 1.4}
    trained_carried = [record(f"{row}-ours", value=value) for row, value in carried.items()]
    for records, line in (
        (trained_carried, "1.400 | 1.300 | 1.400 | full is not better"),
        ([*trained_carried, *(one for ones in made.values() for one in ones)], "1.400 | 1.300 | 1.300 | 100 %"),
    ):
        assert f"| Penn Treebank, carried, better training | {line} | – |" in distance.part(by_row(*records))
    assert "| Pixel-by-pixel MNIST | 50.00 | 60.00 | 40.00 | full is not better | – |" in text
    assert "| Adding T = 200 | not run | 0.00001 | not run | – | 67 % |" in text
    assert "†" not in text
    assert distance.share(0.5, 0.9, 0.501, higher_is_better=True) == "over 999 %"
    assert distance.share(0.5, 0.4, 0.9, higher_is_better=True) == "none: behind truncated"
    stale = record("copying-100-bptt-ours", value=0.6, config={**ROWS["copying-100-bptt-ours"].config(1).to_json()})
    stale["config"]["training"]["iterations"] = 5
    assert "60.0 †" in distance.part(by_row(stale))
    assert "† Made with another configuration" in distance.part(by_row(stale))


def test_learning_curves_over_epochs() -> None:
    made = by_row(*everything(), record("mnist-bptt", 1, 0.8), record("mnist-sab-14-10-as-written", history=[]))
    drawn = figures.of_results(made)
    (axes,) = drawn["mnist.png"].axes
    assert axes.get_ylabel() == "accuracy, validation data, mnist"
    assert {text.get_text() for text in axes.texts} == {"full BPTT", "SAB 14, 10"}
    assert [numpy.asarray(line.get_xdata()).tolist() for line in axes.lines] == [[1, 2]] * 2
    assert [line.get_color() for line in axes.lines] == [METHODS["bptt"], METHODS["sab"]]
    assert drawn["text8.png"].axes[0].get_ylabel().endswith("text8 prefix")
    rows = [row for row in ROWS.values() if row.task == "ptb"]
    recorded = by_row(*[record(row.id) for row in rows])
    chosen = figures.best_of_each_kind(rows, recorded)
    assert 3 <= len(chosen) <= 5
    assert len({(row.method, figures._is_ours(row)) for row in chosen}) == len(chosen), "no two lines look the same"


def test_gradient_norms_with_and_without_clipping() -> None:
    figure = figures.of_results(by_row(*everything()))["clipping.png"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Penn Treebank", "Pixel-by-pixel MNIST"]
    for axes, clip in zip(figure.axes, (OURS["ptb"].clip, OURS["mnist"].clip), strict=True):
        assert [line.get_label() for line in axes.lines] == [
            *("clipped, largest", "clipped, mean", "not clipped, largest", "not clipped, mean"),
            "what it is clipped to",
        ]
        heights = [numpy.asarray(line.get_ydata())[0] for line in axes.lines]
        assert heights == [2.0, 0.5, 2.0, 0.5, clip]


def test_figures(tmp_path: Path) -> None:
    made = by_row(*everything())
    (attention,) = made[figures.ATTENTION_ROW]
    figure = figures.attention_moments(attention)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == [f"after {n} iterations" for n in (100, 300, 600)]
    assert panels[0].images[0].get_extent() == [1.0, 7.0, 7.5, 5.5]
    moved = [[[0.0] * 30 + [0.9] + [0.0] * 69], [[0.8] + [0.0] * 99]]
    shown = figures.attention_moments(
        {"attention": {"moments": {"1": moved[0], "2": moved[1]}, "k_att": 2, "first": 6}}
    )
    limits = [axes.get_xlim() for axes in shown.axes if axes.images]
    assert limits == [(59.0, 65.0), (1.0, 5.0)], "each where most is read at that moment"
    curves = figures.seeds_over_time({"SAB": made[SAB], "BPTT": made["copying-300-bptt"]}, Copying.headline)
    assert len(curves.axes[0].lines) == 3
    assert {text.get_text() for text in curves.axes[0].texts} == {"SAB", "BPTT", "chance"}
    two = figures.seeds_over_time({"SAB": made[SAB], "SAB again": made[SAB]}, Copying.headline)
    assert {text.get_text() for text in two.axes[0].texts} == {"SAB", "SAB again (dashed)", "chance"}
    for name, one in (("attention.png", figure), ("curves.png", curves)):
        save(one, tmp_path / name)
        assert imread(tmp_path / name).std() > 0.01


def test_a_part_is_replaced_between_its_marks() -> None:
    page = "before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n"
    assert with_part(page, "results", r"new \1") == page.replace("old", r"new \1")
    for wrong in ("no marks", page + page, "<!-- results: end --><!-- results: begin -->"):
        with pytest.raises(SystemExit, match="The page must hold <!-- results: begin --> and then"):
            with_part(wrong, "results", "new")


def test_the_pages_are_up_to_date_with_the_committed_records() -> None:
    for page, name, part in parts(load(ROOT / "results")):
        text = page.read_text(encoding="utf-8")
        assert with_part(text, name, part) == text, "run: make results"
    assert EVERY_ROW.read_text(encoding="utf-8") == rows.text(load(ROOT / "results")), "run: make results"
