from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Annotation

from sab.config import SABConfig
from sab.lab.models import ModelConfig
from sab.lab.report import figures
from sab.lab.report.figures import attention, learning_curve, mean_attention, save
from sab.lab.tasks import Adding, Copying, Task
from sab.lab.training import Run, TrainConfig, train
from sab.lab.training.checkpoint import load_model
from sab.plot import drawing
from sab.plot.drawing import METHODS
from tests.lab.report.test_performance import sweep

TRAINING = TrainConfig(iterations=4, batch_size=3, eval_every=2, eval_batches=1)


def trained(out: Path, task: Task, **options: Any) -> Run:
    model = ModelConfig.from_options({"hidden_size": 6, "k_top": 3, "k_trunc": 4, **options})
    train(task, model, TRAINING, out)
    return Run.open(out)


def test_mean_attention_against_a_plain_loop(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", Copying(length=3), weighting="softmax_sink")
    inputs, _ = run.config.task.batch(0, 0, 3, "test")
    _, _, attention = load_model(run, torch.device("cpu"))(inputs, return_attention=True)
    weights = mean_attention(run)
    assert weights.shape == (1, 11, 11)
    for row, step in enumerate(range(13, 24)):
        for column in range(11):
            kept_at = (column + 1) * 2
            if kept_at >= step:
                assert weights[0, row, column].isnan()
                continue
            expected = sum(
                attention.weights[step - 1, b, slot].item()
                for b in range(3)
                for slot in range(3)
                if attention.numbers[step - 1, b, slot] == column
            )
            assert weights[0, row, column].item() == pytest.approx(expected / 3, abs=1e-6)


@pytest.mark.parametrize("task", [Copying(length=3), Adding(length=7)])
@pytest.mark.parametrize("layers", [1, 2])
def test_pictures(tmp_path: Path, task: Task, layers: int) -> None:
    run = trained(tmp_path / "run", task, num_layers=layers)
    drawn = attention(run)
    panels = [axes for axes in drawn.axes if axes.images]
    assert len(panels) % layers == 0
    assert drawn.get_supxlabel().startswith("time step of the attended microstate")
    # The centre of the first column is the first microstate's time step, that of the first row the first step shown.
    left, _, _, top = panels[0].images[0].get_extent()
    assert (left + run.config.model.memory.k_att / 2, top + 0.5) == (
        run.config.model.memory.k_att,
        task.attending_steps[0],
    )
    curves = learning_curve({"one": run, "other": run})
    assert [axes.get_xlabel() for axes in curves.axes] == ["iteration", "iteration"]
    assert {text.get_text() for text in curves.axes[1].texts} == {"one", "other", "chance"}
    for name, figure in (("attention.png", drawn), ("curves.png", curves)):
        save(figure, tmp_path / name)
        assert imread(tmp_path / name).std() > 0.01
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    run = trained(tmp_path / "plain", Adding(length=4), method="tbptt")
    with pytest.raises(ValueError, match="must be a run of a model with a memory; it has none"):
        attention(run)
    run = trained(tmp_path / "short", Adding(length=4), k_att=4)
    with pytest.raises(ValueError, match="must have sequences longer than k_att; they have 4 steps"):
        attention(run)
    (run.path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"must hold evaluations to be plotted; its metrics\.jsonl has none yet"):
        learning_curve({"short": run})


def test_a_metric_that_was_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", Adding(length=4))
    line = run.evaluations()[-1]
    run.log({**line, "step": 6, "metrics": {"mse": None}})
    save(learning_curve({"run": Run(run.path, replace(run.config))}), tmp_path / "curves.png")


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


def test_the_trace_of_a_run_is_of_its_model_on_test_data(runs: list[Path]) -> None:
    trace = figures.trace_of(Run.open(runs[0]), target_step=20, row=2)
    assert trace.target_step == 20
    assert len(trace.numbers) == 23
    assert trace.value != figures.trace_of(Run.open(runs[0]), target_step=20, row=1).value


def test_every_kind_as_its_own_figure_and_in_given_axes(runs: list[Path]) -> None:
    drawings: list[tuple[Any, Any, str]] = [
        (figures.attention, runs[0], "time step of the attended microstate (grey: not kept yet)"),
        (figures.learning_curve, runs[:2], "iteration"),
        (figures.gradient_norms, Run.open(runs[0]), "iteration"),
        (figures.scaling, sweep(), "steps T"),
    ]
    for draw, of, label in drawings:
        made = draw(of)
        assert label in [made.get_supxlabel().partition(";")[0], *(one.get_xlabel() for one in made.axes)], draw
        figure = Figure()
        other, given = figure.subplots(1, 2)
        assert draw(of, ax=given) is figure
        assert given.get_xlabel() == label
        assert not other.has_data()


def test_runs_and_their_labels(runs: list[Path]) -> None:
    assert list(figures.labelled(runs)) == ["sab", "tbptt", "adding"]
    assert list(figures.labelled(str(runs[0]))) == ["sab"]
    assert list(figures.labelled({"one": runs[0], "other": Run.open(runs[0])})) == ["one", "other"]
    curves = figures.learning_curve({"one": runs[0], "other": runs[1]})
    assert {text.get_text() for text in curves.axes[1].texts} == {"one", "other", "chance"}
    assert [line.get_color() for line in curves.axes[0].lines] == [METHODS["sab"], METHODS["tbptt"]]
    many = figures.learning_curve({str(place): runs[0] for place in range(6)})
    assert len(many.legends[0].get_texts()) == 7
    drawn = [line.get_marker() for line in curves.axes[0].lines]
    assert len(set(drawn)) == len(drawn) == 2  # for print in black
    norms = figures.gradient_norms(runs[:2])
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
            figures.learning_curve(given)


def test_a_panel_for_each_size_that_records_vary() -> None:
    figure = figures.scaling(sweep())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "SAB, default",
        "SAB, affine",
        "torch.nn.LSTM",
    ]
    steps, hidden = figure.axes
    assert steps.get_ylabel() == "microseconds a step,\nin eager mode"
    assert (steps.get_xlabel(), hidden.get_xlabel()) == ("steps T", "hidden size n")
    assert (steps.get_xscale(), steps.get_yscale()) == ("log", "log")
    default, affine, torchs = steps.lines
    assert numpy.asarray(default.get_ydata()).tolist() == pytest.approx([10.0] * 3)
    assert numpy.asarray(affine.get_xdata()).tolist() == [4000]
    assert numpy.asarray(torchs.get_ydata()).tolist() == pytest.approx([2000 / steps for steps in (320, 784, 4000)])
    colours = {str(line.get_label()): line.get_color() for panel in figure.axes for line in panel.lines}
    assert len(set(colours.values())) == 3
    with pytest.raises(ValueError, match=r"records must hold two of the cases A, B, .* that differ in T, n or B"):
        figures.scaling([])


def test_what_is_read_by_none_is_cut_out() -> None:
    weights = numpy.zeros((3, 100))
    weights[0, 4], weights[1, 6], weights[2, 95] = 1.0, 0.5, 0.3
    weights[1, 50] = 0.02
    spans = drawing.signal_spans(weights)
    assert spans == [(3, 7), (94, 96)]
    assert drawing.largest_outside(weights, spans) == 0.02
    assert drawing.signal_spans(numpy.full((2, 5), numpy.nan)) == [(0, 4)]
    assert drawing.signal_spans(numpy.ones((2, 5))) == [(0, 4)]


def test_names_of_lines_do_not_lie_on_each_other() -> None:
    axes = Figure().subplots()
    for place in range(4):
        axes.plot([0, 1], [0, 0.01 * place], label=f"line {place}")
    axes.set_ylim(0, 1)
    drawing.label_lines(axes, room=0.1)
    heights = sorted(text.xy[1] for text in axes.texts if isinstance(text, Annotation))
    assert len(heights) == 4
    assert min(numpy.diff(heights)) >= 0.1 - 1e-9
    assert [text.get_color() for text in axes.texts] == [line.get_color() for line in axes.lines]


def test_saved_in_every_format(tmp_path: Path) -> None:
    written = figures.save_in_every_format(figures.scaling(sweep()), tmp_path / "one.png")
    assert [path.name for path in written] == ["one.png", "one.pdf", "one.svg"]
    assert all(path.is_file() for path in written)


def test_saved_in_the_format_of_the_name(tmp_path: Path) -> None:
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    for kind, start in starts.items():
        for name in ("one", "again"):
            save(figures.scaling(sweep()), tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes().startswith(start)
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"again.{kind}").read_bytes()
    with pytest.raises(ValueError, match=r"out must end in one of \.png, \.pdf, \.svg; got 'figure\.gif'"):
        figures.check_picture(Path("figure.gif"))
