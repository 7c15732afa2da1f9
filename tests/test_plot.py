"""The figures of a trace, and the front that draws every kind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import sab
from sab.config import SABConfig
from sab.lab.models import ModelConfig
from sab.lab.report.figures import check_picture, labelled, save, trace_of
from sab.lab.report.traces import weight_matrix
from sab.lab.tasks import Adding, Copying
from sab.lab.training import Run, TrainConfig, train
from tests.lab.report.test_performance import sweep


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one task, the second without a memory, and one of another task."""
    folder = tmp_path_factory.mktemp("runs")
    training = TrainConfig(iterations=4, batch_size=3, eval_every=2, eval_batches=1)
    model = ModelConfig(hidden_size=6, memory=SABConfig(k_top=3, k_trunc=4))
    train(Copying(length=3), model, training, folder / "sab")
    train(Copying(length=3), replace(model, method="tbptt"), training, folder / "tbptt")
    train(Adding(length=6), model, training, folder / "adding")
    return [folder / "sab", folder / "tbptt", folder / "adding"]


@pytest.fixture
def trace() -> sab.Trace:
    torch.manual_seed(3)
    return sab.trace(sab.SABLSTM(2, 8, k_top=3, k_att=3, k_trunc=4), torch.randn(17, 2), target_step=16)


def axes() -> tuple[Figure, Any]:
    figure = Figure()
    return figure, figure.subplots(1, 2)[1]


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
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in below.containers}
    assert heights["over skips"] == pytest.approx(trace.credit.skip.tolist())
    assert heights["along the chain"] == pytest.approx(trace.credit.chain.tolist())
    assert heights["direct"] == pytest.approx(trace.credit.direct.tolist())
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told[0] == f"1st skip (widest: {trace.paths[0].share:.0%} of all paths)"
    assert "target, step 16" in told


def test_of_a_layer_without_a_memory() -> None:
    trace = sab.trace(sab.SABGRU(2, 3, k_top=0), torch.randn(5, 2))
    assert len(sab.plot.credit_paths(trace).axes) == 2
    with pytest.raises(ValueError, match="trace must be of a layer with a memory and of more steps than k_att"):
        sab.plot.attention(trace)


def test_the_trace_of_a_run_is_of_its_model_on_test_data(runs: list[Path]) -> None:
    trace = trace_of(Run.open(runs[0]), target_step=20, row=2)
    assert trace.target_step == 20
    assert len(trace.numbers) == 23
    assert trace.value != trace_of(Run.open(runs[0]), target_step=20, row=1).value


def test_every_kind_as_its_own_figure_and_in_given_axes(runs: list[Path], trace: sab.Trace) -> None:
    drawings: list[tuple[Any, Any, str]] = [
        (sab.plot.attention, trace, "time step of the attended microstate (grey: not kept yet)"),
        (sab.plot.attention, runs[0], "time step of the attended microstate (grey: not kept yet)"),
        (sab.plot.credit_paths, trace, "time step (shading: the chain is cut every 4 steps)"),
        (sab.plot.learning_curve, runs[:2], "iteration"),
        (sab.plot.gradient_norms, Run.open(runs[0]), "iteration"),
        (sab.plot.scaling, sweep(), "steps T"),
    ]
    for draw, of, label in drawings:
        assert label in [one.get_xlabel() for one in draw(of).axes], draw
        figure, given = axes()
        assert draw(of, ax=given) is figure
        assert given.get_xlabel() == label
        assert not figure.axes[0].has_data(), "nothing is drawn beside them"


def test_runs_and_their_labels(runs: list[Path]) -> None:
    assert list(labelled(runs)) == ["sab", "tbptt", "adding"]
    assert list(labelled(str(runs[0]))) == ["sab"]
    assert list(labelled({"one": runs[0], "other": Run.open(runs[0])})) == ["one", "other"]
    curves = sab.plot.learning_curve({"one": runs[0], "other": runs[1]})
    assert [text.get_text() for text in curves.legends[0].get_texts()] == ["one", "other", "chance"]
    drawn = [line.get_marker() for line in curves.axes[0].lines]
    assert len(set(drawn)) == len(drawn) == 2  # for print in black
    norms = sab.plot.gradient_norms(runs[:2])
    told = [text.get_text() for text in norms.legends[0].get_texts()]
    assert told == ["sab, largest", "sab, mean", "tbptt, largest", "tbptt, mean", "what it is clipped to"]
    largest = norms.axes[0].lines[0].get_ydata()
    assert numpy.asarray(largest).tolist() == [line["grad_norm_max"] for line in Run.open(runs[0]).evaluations()]
    for given, sentence in (
        ([], "runs must be at least one; got none"),
        ([runs[0], runs[0]], "runs must be different ones; got one of them twice"),
        ([runs[0], runs[2]], "runs must be of one task; got copying, adding"),
    ):
        with pytest.raises(ValueError, match=sentence):
            sab.plot.learning_curve(given)


def test_a_scorer_has_one_colour_in_both_sweep() -> None:
    figure = sab.plot.scaling(sweep())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "SAB, affine",
        "SAB, dot",
        "SAB, mlp",
        "torch.nn.LSTM",
    ]
    colours = {str(line.get_label()): line.get_color() for panel in figure.axes for line in panel.lines}
    assert len(set(colours.values())) == 4
    with pytest.raises(ValueError, match="records must hold a sweep, T or n of `sab bench --cases`; they hold none"):
        sab.plot.scaling([])


def test_saved_in_the_format_of_the_name(tmp_path: Path, trace: sab.Trace) -> None:
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    for kind, start in starts.items():
        for name in ("one", "again"):
            save(sab.plot.attention(trace), tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes().startswith(start)
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"again.{kind}").read_bytes()
    with pytest.raises(ValueError, match=r"out must end in one of \.png, \.pdf, \.svg; got 'figure\.gif'"):
        check_picture(Path("figure.gif"))


def test_importing_sab_imports_no_more_than_it_needs() -> None:
    code = "import sys, sab; sab.trace; bad = {'matplotlib', 'tyro', 'safetensors', 'sab.plot'} & sys.modules.keys()"
    code += "; assert not bad, bad; sab.plot.attention; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'sab' has no attribute 'plots'"):
        sab.plots  # type: ignore[attr-defined]  # noqa: B018
