"""The figures of a trace."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import sab
from sab.plot.traces import WIDEST, weight_matrix


@pytest.fixture
def trace() -> sab.Trace:
    torch.manual_seed(3)
    return sab.trace(sab.SABLSTM(2, 8, k_top=3, k_att=3, k_trunc=4), torch.randn(17, 2), target_step=16)


def test_weights_of_a_trace_are_where_its_microstates_are(trace: sab.Trace) -> None:
    weights = weight_matrix(trace)
    assert weights.shape == (17, 5)
    for step in range(1, 18):
        for number in range(5):
            places = (trace.numbers[step - 1] == number).nonzero().flatten().tolist()
            if (number + 1) * 3 >= step:
                assert numpy.isnan(weights[step - 1, number])
            else:
                expected = trace.weights[step - 1, places[0]].item() if places else 0.0
                assert weights[step - 1, number] == pytest.approx(expected)
    (panel, _) = sab.plot.attention(trace).axes
    assert numpy.asarray(panel.images[0].get_array()).shape == (17, 5)
    left, _, _, top = panel.images[0].get_extent()
    assert (left + 1.5, top + 0.5) == (3, 1)


def test_arcs_are_the_skips_of_the_largest_paths(trace: sab.Trace) -> None:
    figure = sab.plot.credit_paths(trace, paths=4)
    above, below = figure.axes
    drawn = [
        (round(line[0][0]), round(line[-1][0]))
        for lines in above.collections
        if isinstance(lines, LineCollection)
        for line in map(numpy.asarray, lines.get_segments())
        if len(line) > 2
    ]
    assert set(drawn) == {tuple(skip) for path in trace.paths[:4] for skip in path.skips}
    shares: dict[tuple[Any, int], float] = {}
    for path in trace.paths[:4]:
        for place, skip in enumerate(path.skips):
            shares[skip, place] = shares.get((skip, place), 0.0) + path.share
    widths = [
        width
        for lines in above.collections
        if isinstance(lines, LineCollection)
        and len(numpy.asarray(lines.get_segments()[0] if lines.get_segments() else [])) > 2
        for width in numpy.atleast_1d(lines.get_linewidth())
    ]
    assert sorted(widths) == pytest.approx(sorted(WIDEST * share for share in shares.values()))
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in below.containers}
    assert heights["over skips"] == pytest.approx(trace.credit.skip.tolist())
    assert heights["along the chain"] == pytest.approx(trace.credit.chain.tolist())
    assert heights["direct"] == pytest.approx(trace.credit.direct.tolist())
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told[0] == f"1st skip (largest path: {trace.paths[0].share:.0%} of the credit)"
    assert "target, step 16" in told


def test_of_a_layer_without_a_memory() -> None:
    trace = sab.trace(sab.SABGRU(2, 3, k_top=0), torch.randn(5, 2))
    assert len(sab.plot.credit_paths(trace).axes) == 2
    with pytest.raises(ValueError, match="trace must be of a layer with a memory and of more steps than k_att"):
        sab.plot.attention(trace)


def test_in_given_axes(trace: sab.Trace) -> None:
    drawings: list[tuple[Any, str]] = [
        (sab.plot.attention, "time step of the attended microstate (grey: not kept yet)"),
        (sab.plot.credit_paths, "time step (shading: the chain is cut every 4 steps)"),
    ]
    for draw, label in drawings:
        assert label in [one.get_xlabel() for one in draw(trace).axes]
        figure = Figure()
        other, given = figure.subplots(1, 2)
        assert draw(trace, ax=given) is figure
        assert given.get_xlabel() == label
        assert not other.has_data()


def test_sab_has_no_other_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'sab' has no attribute 'plots'"):
        sab.plots  # type: ignore[attr-defined]  # noqa: B018
