from __future__ import annotations

from statistics import median

import pytest

from sab.lab.report.page.plots import Curve, band, curves, logarithmic
from sab.lab.tasks import PTB, Adding, Copying

SEEDS = [Curve([10, 20], [0.1, 0.5]), Curve([10, 20, 30], [0.3, None, 0.9]), Curve([20], [0.7])]


def test_a_band_is_over_the_seeds_that_were_evaluated() -> None:
    assert band(SEEDS) == ([10, 20, 30], [0.1, 0.5, 0.9], [median([0.1, 0.3]), 0.6, 0.9], [0.3, 0.7, 0.9])
    assert band([Curve([5], [None])]) == ([5], [None], [None], [None])


def test_curves_have_a_band_where_there_are_seeds() -> None:
    drawn = curves({"<b>several</b>": SEEDS, "one": SEEDS[:1]}, Copying.headline, "caption")
    low, high, middle, single = drawn.figure["data"]
    assert (low["y"], high["y"], middle["y"]) == band(SEEDS)[1:2] + band(SEEDS)[3:] + band(SEEDS)[2:3]
    assert high["fill"] == "tonexty"
    assert high["fillcolor"].startswith(middle["line"]["color"])
    assert middle["name"] == "&lt;b&gt;several&lt;/b&gt; (3 seeds)"
    assert single["y"] == [0.1, 0.5]
    assert single["line"]["color"] != middle["line"]["color"]
    assert drawn.lines == [
        ["<b>several</b>", "3 runs", "30", "90.0%", "90.0%", "90.0%"],
        ["one", "1 run", "20", "50.0%", "50.0%", "50.0%"],
    ]
    assert "one: 50.0% after 20 iterations, 1 run." in drawn.summary
    assert drawn.figure["layout"]["yaxis"]["tickformat"] == ".0%"


def test_an_error_has_a_logarithmic_axis() -> None:
    drawn = curves({"one": SEEDS[:1]}, Adding.headline, "caption", over_decades=True)
    assert drawn.figure["layout"]["yaxis"]["type"] == drawn.figure["layout"]["xaxis"]["type"] == "log"
    assert "the dotted line is chance" in drawn.summary
    assert "type" not in curves({"one": SEEDS[:1]}, PTB.headline, "caption").figure["layout"]["yaxis"]


def test_chance_that_is_far_away_takes_no_room() -> None:
    bits = curves({"one": [Curve([10, 20], [1.6, 1.4])]}, PTB.headline, "caption")
    assert bits.figure["layout"]["yaxis"]["range"] == pytest.approx([1.388, 1.612])
    assert "outside of the figure is chance" in bits.summary
    single = curves({"one": [Curve([10], [1.6])]}, PTB.headline, "caption")
    assert single.figure["layout"]["yaxis"]["range"] == pytest.approx([1.5, 1.7])


def test_many_lines_can_be_told_apart() -> None:
    drawn = curves({str(place): SEEDS[:1] for place in range(14)}, Copying.headline, "caption")
    assert len({(one["line"]["color"], one["line"]["dash"]) for one in drawn.figure["data"]}) == 14


def test_ticks_of_a_logarithmic_axis_are_few_and_whole() -> None:
    def shown(*values: float) -> list[str]:
        made = logarithmic(values)
        pairs = zip(made["tickvals"], made["ticktext"], strict=True)
        return [told for value, told in pairs if min(values) <= value <= max(values)]

    assert shown(100, 20_000) == ["100", "300", "1,000", "3,000", "10,000"]
    assert shown(780, 7_800) == ["1,000", "2,000", "5,000"]
    assert shown(0.00001, 0.2) == ["10<sup>−5</sup>", "10<sup>−4</sup>", "0.001", "0.01", "0.1"]
    assert shown(3e6, 4e7) == ["5 × 10<sup>6</sup>", "10<sup>7</sup>", "2 × 10<sup>7</sup>"]
    assert logarithmic([None, 0.0]) == {"type": "log"}


def test_a_method_has_one_colour() -> None:
    groups: dict[str, list[Curve]] = dict.fromkeys(("SAB 5", "SAB 10", "TBPTT"), SEEDS)
    methods = {"SAB 5": "sab", "SAB 10": "sab", "TBPTT": "tbptt"}
    drawn = curves(groups, Copying.headline, "caption", methods=methods, hidden=["TBPTT"])
    lines = [one for one in drawn.figure["data"] if "name" in one]
    assert [one["line"]["color"] for one in lines] == ["@sab", "@sab", "@tbptt"]
    assert lines[0]["line"]["dash"] != lines[1]["line"]["dash"]
    assert [one["visible"] for one in drawn.figure["data"]] == [True] * 6 + [False] * 3
    many = curves(
        {str(place): SEEDS[:1] for place in range(12)},
        Copying.headline,
        "",
        methods=dict.fromkeys(map(str, range(12)), "sab"),
    )
    assert len({(one["line"]["color"], one["line"]["dash"]) for one in many.figure["data"]}) == 12


def test_chance_is_named_where_it_is() -> None:
    (name,) = curves({"one": SEEDS}, Copying.headline, "caption").figure["layout"]["annotations"]
    assert (name["text"], name["y"]) == ("chance 12.5%", 0.125)
    assert "annotations" not in curves({"one": [Curve([10, 20], [1.6, 1.4])]}, PTB.headline, "").figure["layout"]
