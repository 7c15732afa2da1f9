"""The pages made from records, the figures, and the command that renews them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib.image import imread

from sab.lab import cli
from sab.lab.experiments import calls
from sab.lab.experiments import records as stored
from sab.lab.experiments.calls import Call
from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.tables import ROWS
from sab.lab.report import figures, pages, synthetic
from sab.lab.report.results import load, page_part, readme_part, total_time
from sab.lab.tasks import Copying
from tests.lab.report.made_up import SAB, by_row, record

ROOT = Path(__file__).parents[3]


def everything() -> list[dict[str, Any]]:
    made = [record(row, seed, 0.9) for row in synthetic.CURVE_ROWS.values() for seed in (0, 1)]
    weights = [[0.5, 0.5, None], [0.25, 0.5, 0.25]]
    attention = {"moments": {"100": weights, "300": weights, "600": weights}, "k_att": 2, "first": 6}
    made += [record(synthetic.ATTENTION_ROW, attention=attention), record("adding-200-bptt", value=1e-6)]
    clipping = [f"{row}{end}" for row in ("ptb-sab-5-10-ours", "mnist-sab-14-10-ours") for end in ("", "-unclipped")]
    return [*made, *(record(row, value=0.9) for row in (*clipping, "mnist-bptt")), record("text8-bptt", part="prefix")]


def test_the_page() -> None:
    text = page_part(by_row(*everything()), "images")
    assert text.startswith("Run on\n\n- cuda (GPU): 16 runs; torch 2.11; commit abcdef012345; 2026-01-02\n")
    for row in ROWS.values():
        if row.length is not None and row.length <= 300:
            assert text.count(f"sab reproduce {row.task} --rows '{row.task}-{row.length}-*") == 1
    assert f"(images/{synthetic.ATTENTION})" in text
    assert f"(images/{synthetic.CURVES})" in text
    for name in figures.of_results(by_row(*everything())):
        assert text.count(f"(images/{name})") == 1
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


def test_the_time_of_the_papers_rows() -> None:
    assert total_time({}) == []
    made = by_row(*everything())
    (told,) = total_time(made)
    # Of copying three at T = 300 and one at 200, one each of adding, ptb and text8, two of mnist.
    assert told.startswith("Of the paper's 45 rows 9 were run. The wall times of one run of each, that of the lowest ")
    assert "add up to 11:15 min on cuda (GPU), or to " in told


def call(rows: list[str], **other: Any) -> Call:
    """A call that brought rows to their end from seed 0, in a minute."""
    usual = {"seeds": [0], "iterations": None, "resumed": 0, "left": 0, "together": 8, "wall_time": 60.0}
    usual |= {"data": list(dict.fromkeys(ROWS[row].task for row in rows)), "ended": [f"{row} seed 0" for row in rows]}
    usual |= {"device": "cuda (GPU)", "versions": {}, "commit": "abc", "date": "2026-11-16T05:00:00+00:00"}
    return Call(rows=rows, **{**usual, **other})


def test_the_time_of_the_papers_rows_as_it_was_measured() -> None:
    papers = [row.id for row in ROWS.values() if row.is_papers]
    (told,) = total_time({}, [call(papers)])
    where = "on cuda (GPU), measured over one call of `sab reproduce`"
    assert told == f"The paper's 45 rows, one seed of each, took 1:00 min {where}."
    small = [row for row in papers if ROWS[row].task == "adding"]
    others = by_row(*(record(row, 0, together=1, wall_time=10.0) for row in papers if row not in small))
    (told,) = total_time(others, [call(small[:1]), call(small), call(papers[:2])])
    ends = "add up to 6:00 min: 7:00 min in all, but for what those took to begin and to be tested."
    assert told == (
        f"9 of the paper's 45 rows (adding), one seed of each, took 1:00 min {where}. "
        f"The wall times of the other 36, each alone in its process, {ends}"
    )
    shared = {**others, papers[0]: [{**others[papers[0]][0], "together": 2}]}
    assert total_time(shared, [call(small)])[0].endswith(f". The wall times of the other 36 {ends}")
    assert total_time({}, [call(small)]) == [], "nothing is known of the others"


def test_what_is_no_measurement_of_the_whole() -> None:
    papers = [row.id for row in ROWS.values() if row.is_papers]
    some = papers[:2]

    def is_found(made: Call) -> bool:
        return calls.largest([made], papers) is made

    assert is_found(call(some))
    assert not is_found(call(some, left=1)), "not at the end"
    assert not is_found(call(some, ended=[f"{some[0]} seed 0"])), "one was there before, or made by another process"
    assert not is_found(call(some, resumed=1)), "begun by another call"
    assert not is_found(call(some, iterations=3)), "in brief"
    assert not is_found(call([*some, "ptb-bptt-ours"])), "a row that the paper does not have"
    both = [f"{row} seed {seed}" for row in some for seed in (0, 1)]
    assert not is_found(call(some, seeds=[0, 1], ended=both)), "two seeds"
    assert calls.largest([], papers) is None
    longest, later = call(papers), call(some, wall_time=7.0)
    assert calls.largest([call(some), later], papers) is later
    assert calls.largest([longest, later], papers) is longest


def test_learning_curves_over_epochs() -> None:
    made = by_row(*everything(), record("mnist-bptt", 1, 0.8), record("mnist-sab-14-10-as-written", history=[]))
    drawn = figures.of_results(made)
    (axes,) = drawn["mnist.png"].axes
    assert axes.get_ylabel() == "accuracy, validation data, mnist"
    labels = [text.get_text() for text in drawn["mnist.png"].legends[0].get_texts()]
    assert labels == ["full BPTT", "SAB 14, 10"]
    assert [numpy.asarray(line.get_xdata()).tolist() for line in axes.lines] == [[1, 2]] * 3
    assert drawn["text8.png"].axes[0].get_ylabel().endswith("text8 prefix")
    rows = [row for row in ROWS.values() if row.task == "ptb"]
    styles = [tuple(style.values()) for style in figures._styles(rows)]
    assert len(set(styles)) == len(rows), "no two lines look the same"


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
    calls.save(call([row.id for row in ROWS.values() if row.is_papers]), Path("results"))
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
    names = [synthetic.ATTENTION, synthetic.CURVES, "ptb.png", "text8.png", "mnist.png", "clipping.png"]
    assert sorted(told) == sorted(["docs/results.md", "README.md", *(f"docs/images/{name}" for name in names)])
    assert all(Path(name).is_file() for name in told)
    text = Path("docs/results.md").read_text()
    assert text.startswith(f"before\n{begin}\nRun on\n")
    for page in (text, Path("README.md").read_text()):
        assert "\nThe paper's 45 rows, one seed of each, took 1:00 min on cuda (GPU), " in page
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
    made, timed = load(ROOT / "results"), calls.load(ROOT / "results")
    for page, part in (
        (ROOT / "docs" / "results.md", page_part(made, "images", timed)),
        (ROOT / "README.md", readme_part(made, timed)),
    ):
        text = page.read_text(encoding="utf-8")
        assert pages.renewed(text, "results", part, page) == text, "run: make results"
