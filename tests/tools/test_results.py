"""The generated parts of docs/results.md and the README, and their figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib.image import imread

from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.tables import ROWS
from sab.lab.report.figures import save
from sab.lab.report.results import load
from sab.lab.report.tables import summary_of
from sab.lab.tasks import Copying
from sab.plot.drawing import METHODS
from tests.lab.report.made_up import SAB, by_row, record
from tools import figures, summary, synthetic
from tools.pages import ROOT, with_part
from tools.results import page_part, parts


def everything() -> list[dict[str, Any]]:
    made = [record(row, seed, 0.9) for row in synthetic.CURVE_ROWS.values() for seed in (0, 1)]
    weights = [[0.5, 0.5, None], [0.25, 0.5, 0.25]]
    attention = {"moments": {"100": weights, "300": weights, "600": weights}, "k_att": 2, "first": 6}
    made += [record(synthetic.ATTENTION_ROW, attention=attention), record("adding-200-bptt", value=1e-6)]
    clipping = [f"{row}{end}" for row in ("ptb-sab-5-10-ours", "mnist-sab-14-10-ours") for end in ("", "-unclipped")]
    return [*made, *(record(row, value=0.9) for row in (*clipping, "mnist-bptt")), record("text8-bptt", part="prefix")]


def test_the_page() -> None:
    text = page_part(by_row(*everything()))
    assert text.startswith("Run on\n\n- cuda (GPU): 16 runs; torch 2.11; commit abcdef012345; 2026-01-02\n")
    for row in ROWS.values():
        if row.length is not None and row.length <= 300:
            assert text.count(f"sab reproduce {row.task} --rows '{row.task}-{row.length}-*") == 1
    assert f"(images/{synthetic.ATTENTION})" in text
    assert f"(images/{synthetic.CURVES})" in text
    for name in figures.of_results(by_row(*everything())):
        assert text.count(f"(images/{name})") == 1
    empty = page_part({})
    assert empty.startswith("Nothing has been run yet.")
    assert "![" not in empty
    assert "The figure is not made yet." in empty


def test_tables_fit_the_page_and_fold_the_rest() -> None:
    text = page_part(by_row(*everything()))
    folded = re.findall(r"<details.*?</details>", text, re.DOTALL)
    assert folded
    assert all("| wall time |" in part for part in folded), "everything is there"
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
    text = summary.part(made)
    assert (
        "| Copying T = 100, accuracy on the last 10 in per cent | 100.0 (1) | 100.0 | reached | 30.0 | not run |"
        in text
    )
    assert "| Copying T = 200, accuracy on the last 10 in per cent | not run | – | – | not run | not run |" in text
    assert "| text8 prefix, bits per character | 1.900 (1) | 1.53 | missed | not run | not run |" in text
    assert summary_of([row for row in ROWS.values() if row.length == 100], made).reached == "1 of 2"


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
    attention = synthetic.attention_record(made)
    assert attention is not None
    figure = figures.attention_moments(attention)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == [f"after {n} iterations" for n in (100, 300, 600)]
    assert panels[0].images[0].get_extent() == [1.0, 7.0, 7.5, 5.5]
    curves = figures.seeds_over_time({"SAB": made[SAB], "BPTT": made["copying-300-bptt"]}, Copying.headline)
    assert len(curves.axes[0].lines) == 3
    assert {text.get_text() for text in curves.axes[0].texts} == {"SAB", "BPTT", "chance"}
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
