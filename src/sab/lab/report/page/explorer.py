"""The credit explorer: what each step of a sequence reads, and how its credit flows back, at moments of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor

from sab.errors import UserError, UserValueError, printable
from sab.lab.experiments.records import Attention, Record, read_notes
from sab.lab.models import SequenceModel
from sab.lab.report.page.elements import Figure, embedded, label
from sab.lab.report.page.scenes import Scene, predictions_of, scene_of, ticks, unknown_scene
from sab.lab.report.page.titles import model_name, task_name
from sab.lab.tasks import Task
from sab.lab.training.checkpoint import load_kept, load_moment, moments
from sab.lab.training.evaluation import mean_attention, rows_of_figure
from sab.lab.training.run import Run, RunConfig
from sab.tracing import Trace, trace

TRACED_STEPS = 2400
"""Over how many steps gradients are followed back: as many answers are traced as that allows, and at least one."""
MOST_PATHS, MOST_READS = 12, 12
MOST_ROWS = 112
"""How many steps the map of attention has a row for."""
MOST_MOMENTS = 24
CPU = torch.device("cpu")
ROOM = 80_000
"""How many selections the moments of a model may have together, so that a page stays small."""
MOST_LOOKED_AT = 4 * TRACED_STEPS
"""How many steps the sequence may have at all moments of a model together: at each one answer is traced at least."""
LEAST_WEIGHT, LEAST_CREDIT = 0.002, 0.004
"""What is left out: lower weights, and credit below that part of the largest one's."""
BATCH = "mean over a batch of validation data"


@dataclass(frozen=True)
class Moment:
    """What is known of a model after some iterations; everything in it is as the page's script takes it."""

    iteration: int
    reads: dict[int, list[list[float]]]
    """By step the microstates that it read: the steps at which they were kept, with their weights, largest first."""
    attention: list[list[float | None]]
    """Mean weights over a batch, of attending steps and microstates."""
    credit: dict[int, dict[str, Any]]
    """By step whose answer counts: the credit of earlier ones in its parts, and its paths."""
    predictions: dict[int, str]
    is_mean: bool = False
    """Whether what was read is the mean over a batch, and not what this sequence read."""


@dataclass(frozen=True)
class Explorer:
    """A sequence and what a model made of it."""

    name: str
    about: str
    task: Task
    scene: Scene
    k_att: int
    moments: tuple[Moment, ...]

    def with_earlier(self, moments: Sequence[Moment]) -> Explorer:
        """The same with moments from before, of which some are dropped where they are many."""
        known = {moment.iteration: moment for moment in (*moments, *self.moments)}
        ordered = [known[iteration] for iteration in sorted(known)]
        while len(ordered) > MOST_MOMENTS:
            ordered = [*ordered[:-1:2], ordered[-1]]
        return replace(self, moments=tuple(ordered))


# From runs and records


def of_run(
    name: str, run: Run, traced_steps: int = TRACED_STEPS, room: int = ROOM, known: Sequence[Moment] = ()
) -> Explorer:
    """What the weights that a run ends with, and those of the moments that it keeps, make of the first validation
    sequence; moments that are `known` are not looked at again.

    Over `traced_steps` steps the answers of the weights are traced, over half as many those of all moments together.
    """
    model, best_at = load_kept(run, CPU)
    task, config = run.config.task, run.config.training
    rows, _ = rows_of_figure(run.config.model, task, config.batch_size)
    inputs, targets = task.batch(config.seed, 0, rows, "valid", dtype=config.dtype)
    scene = scene_of(task, inputs, targets)
    memory = run.config.model.layer_config()
    selections = scene.steps * max(min(memory.k_top, scene.steps // memory.k_att), 1)
    if selections > ROOM:
        raise UserValueError(
            f"{str(run.path)!r} must select at most {ROOM:,} times in a sequence to be explored; with "
            f"{scene.steps:,} steps and k_top {memory.k_top:,} it selects {selections:,} times."
        )
    iteration = newest_iteration(run) if best_at is None else best_at
    most = min(MOST_MOMENTS, room // selections, MOST_LOOKED_AT // scene.steps)
    others = _thinned([step for step in moments(run.moments) if step != iteration], max(most - 1, 0))
    new = [step for step in others if step not in {moment.iteration for moment in known}]
    made: list[Moment] = []
    damaged = ""

    def look(model: SequenceModel, step: int, traced_steps: int) -> None:
        answers = _thinned(sorted(scene.right), max(traced_steps // scene.steps, 1))
        made.append(_moment(model, run.config, inputs[:, :1], answers, step))

    with _one_thread():
        look(model, iteration, traced_steps)
        for step in new:
            try:
                look(load_moment(run, CPU, step), step, traced_steps // (2 * len(others)))
            except UserError as mistake:
                damaged += f" {mistake}"
    explored = Explorer(name, "", task, scene, run.config.model.memory.k_att, tuple(made))
    explored = explored.with_earlier([*_noted_of_run(run), *known])
    about = f"{task_name(task)}, seed {config.seed}: the first validation sequence, with the "
    count = len(explored.moments)
    about += f"weights of iteration {iteration:,}" if count == 1 else f"weights of {count} moments of the training"
    about += f"; the best are those of iteration {best_at:,}" if count > 1 and best_at is not None else ""
    return replace(explored, about=f"{about}.{damaged}")


def of_run_or_reason(
    name: str, run: Run, traced_steps: int, room: int = ROOM, known: Sequence[Moment] = ()
) -> Explorer:
    """The same or, where that cannot be made, one without moments that tells why: there is no checkpoint yet, the data
    are not here, or a file is hostile in a way that nobody thought of, which must not deny the rest of the page."""
    try:
        made = of_run(name, run, traced_steps, room, known)
        embedded(spec(made))  # the numbers may be some that no page can hold
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"not explored, {type(error).__name__}: {error}."
        return Explorer(name, reason, run.config.task, Scene([]), run.config.model.memory.k_att, ())
    return made


def of_record(record: Record) -> Explorer:
    """What a record keeps of the attention at some moments of training."""
    config = RunConfig.from_json(record["config"])
    rows, _ = rows_of_figure(config.model, config.task, config.training.batch_size)
    try:
        inputs, targets = config.task.batch(config.training.seed, 0, rows, "valid")
        scene = scene_of(config.task, inputs, targets)
    except UserError:  # its data are not here
        scene = unknown_scene(config.task)
    about = f"{record['row']}, seed {record['seed']}: a validation sequence, and mean attention weights over a batch. "
    about += "Records hold no weights of models, so there is no credit here."
    name = f"{task_name(config.task)}: {model_name(config)}"
    moments = tuple(_noted(record["attention"], config.task))
    return Explorer(name, about, config.task, scene, record["attention"]["k_att"], moments)


def _noted(attention: Attention, task: Task) -> list[Moment]:
    """The moments of which the mean attention was noted."""
    k_att, first, steps = attention["k_att"], attention["first"], task.attending_steps
    made: list[Moment] = []
    for iteration, weights in attention["moments"].items():
        fits = first == steps[0] and len(weights) == len(steps) and 0 < k_att * len(weights[0]) <= task.steps
        if not fits or not iteration.isdecimal():
            raise UserValueError(f"attention must be of steps that {task.label} has; that after {iteration!r} is not.")
        rows = [weights[place] for place in attending_rows(task)]
        made.append(Moment(int(iteration), _strongest(weights, first, k_att), _rounded(rows), {}, {}, is_mean=True))
    return sorted(made, key=lambda moment: moment.iteration)


def _noted_of_run(run: Run) -> list[Moment]:
    """The same of a run that `sab reproduce` made, which keeps its notes next to the run's folder."""
    try:
        attention = read_notes(run.path.with_name(f"{run.path.name}.json")).get("attention")
        return [] if attention is None else _noted(attention, run.config.task)
    except (UserError, ValueError):  # no such notes, or a path that has no name
        return []


def newest_iteration(run: Run) -> int:
    """The iteration of the newest checkpoint, from the names of the files."""
    names = sorted(path.name for path in run.checkpoints.glob("step-*"))
    return int(names[-1].removeprefix("step-")) if names else 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """A trace is many tiny operations, at which several threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _moment(model: SequenceModel, config: RunConfig, inputs: Tensor, answers: Sequence[int], iteration: int) -> Moment:
    task = config.task
    traces = {step: trace(model, inputs, step, max_paths=MOST_PATHS) for step in answers}
    memory = config.model.layer_config()
    attention = _mean_weights(model, config) if memory.k_top and task.steps > memory.k_att else []
    with torch.no_grad():
        outputs, _ = model(inputs)
    return Moment(
        iteration,
        _reads(next(iter(traces.values()))),
        attention,
        {step: _credit(traced, step) for step, traced in traces.items()},
        predictions_of(task, outputs[:, 0]),
    )


def _mean_weights(model: SequenceModel, config: RunConfig) -> list[list[float | None]]:
    weights = mean_attention(model, config.task, config.training, "valid")[-1]
    return _rounded(weights[attending_rows(config.task)].tolist())


def attending_rows(task: Task) -> list[int]:
    """The places, among the attending steps, of those that a map has a row for."""
    return _thinned(range(len(task.attending_steps)), MOST_ROWS)


def _thinned(steps: Sequence[int], most: int) -> list[int]:
    """At most so many, evenly spaced, the last among them."""
    if most == 0 or not steps:
        return []
    every = ceil(len(steps) / most)
    return list(steps[::-1][::every])[::-1]


def _reads(traced: Trace) -> dict[int, list[list[float]]]:
    """By step, what it read; steps that read nothing are left out."""
    found: dict[int, list[list[float]]] = {}
    for step, (kept, weights) in enumerate(zip(traced.kept_at.tolist(), traced.weights.tolist(), strict=True), start=1):
        pairs = [
            [at, _short(weight)] for at, weight in zip(kept, weights, strict=True) if at and abs(weight) >= LEAST_WEIGHT
        ]
        if pairs:
            found[step] = sorted(pairs, key=lambda pair: -pair[1])
    return found


def _credit(traced: Trace, target: int) -> dict[str, Any]:
    """The credit of the steps that have some, in its parts, and the largest paths with their shares."""
    parts = traced.credit
    largest = parts.total.max().item()
    steps = [
        step
        for step in range(1, target + 1)
        if max(part[step - 1].item() for part in parts) >= LEAST_CREDIT * largest and largest > 0
    ]
    credit: dict[str, Any] = {"steps": steps}
    for name in ("direct", "chain", "skip"):
        credit[name] = [_short(getattr(parts, name)[step - 1].item()) for step in steps]
    credit["paths"] = [
        [_short(path.share), [[skip.step, skip.kept_at] for skip in path.skips]] for path in traced.paths[:MOST_PATHS]
    ]
    return credit


def _strongest(weights: Sequence[Sequence[float | None]], first: int, k_att: int) -> dict[int, list[list[float]]]:
    """By step the microstates with the largest mean weights."""
    found: dict[int, list[list[float]]] = {}
    for step, row in enumerate(weights, start=first):
        pairs = [[(place + 1) * k_att, weight] for place, weight in enumerate(row) if weight and weight >= LEAST_WEIGHT]
        if pairs:
            found[step] = [[at, _short(weight)] for at, weight in sorted(pairs, key=lambda pair: -pair[1])[:MOST_READS]]
    return found


def _rounded(weights: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    return [[None if one is None or not isfinite(one) else round(one, 3) for one in row] for row in weights]


def _short(number: float) -> float:
    return float(f"{number:.3g}")


# What the page's script takes


def spec(explorer: Explorer) -> dict[str, Any]:
    """An explorer in JSON: figures, and what changes in them with the step and the moment."""
    scene = explorer.scene
    has_credit = any(moment.credit for moment in explorer.moments)
    made: dict[str, Any] = {"name": printable(explorer.name), "about": printable(explorer.about)}
    made |= {"seen": scene.seen, "right": scene.right, "names": scene.names, "isText": scene.is_text}
    made |= {"at": scene.positions, "widths": scene.widths, "places": scene.places, "start": _start(explorer)}
    made |= {"keptEvery": explorer.k_att, "hasMemory": any(moment.reads for moment in explorer.moments)}
    made["timeline"] = _timeline(scene, has_credit)
    made["map"] = _map(explorer) if any(moment.attention for moment in explorer.moments) else None
    made["image"] = None if scene.places is None else _image(scene)
    made["moments"] = [
        {
            "iteration": moment.iteration,
            "reads": moment.reads,
            "attention": moment.attention,
            "credit": moment.credit,
            "predictions": moment.predictions,
            "of": BATCH if moment.is_mean else "",
        }
        for moment in explorer.moments
    ]
    return made


def _start(explorer: Explorer) -> int:
    """The step to begin with: of those whose answer counts, and is traced at every moment, the one that looks back
    farthest."""
    last = explorer.moments[-1]
    traced = [set(moment.credit) for moment in explorer.moments if moment.credit]
    steps = sorted(set.intersection(*traced)) if traced else []
    steps = steps or [step for step in explorer.scene.right if step in last.reads] or [explorer.scene.steps]
    return max(steps, key=lambda step: sum(weight * (step - at) for at, weight in last.reads.get(step, [])))


ROWS = {"y": (0.64, 0.955), "y2": (0.465, 0.62), "y3": (0.24, 0.4), "y4": (0.0, 0.18)}
"""The rows of the time line, from above: what a step reads, the sequence, the paths of its credit, the credit."""
ROWS_OF_READS = {"y": (0.36, 0.92), "y2": (0.04, 0.32)}
"""Without the weights of a model there is no credit."""
TITLES = {
    "y": "Reads: arc width = attention weight",
    "y3": "Credit paths: arc width = share of the credit, of all paths over it",
    "y4": "Credit: norm of the gradient at each step",
}


def _timeline(scene: Scene, has_credit: bool) -> Figure:
    """The rows above each other along time; the script puts in what the chosen step has."""
    positions = scene.positions
    end = positions[-1] + scene.widths[-1] / 2
    rows = ROWS if has_credit else ROWS_OF_READS
    layout: Figure = {"showlegend": False, "hovermode": "x", "hoverdistance": -1}
    layout |= {"margin": {"l": 52, "r": 12, "t": 8, "b": 44}, "dragmode": False}
    layout["xaxis"] = {"range": [0, end], "anchor": "free", "position": 0, "showgrid": False, "zeroline": False}
    layout["xaxis"] |= {**ticks(scene), "tickangle": 0, "fixedrange": True, "automargin": False}
    layout["xaxis"]["title"] = {"text": "step", "standoff": 2}
    for name, domain in rows.items():
        layout[f"yaxis{name[1:]}"] = {"domain": domain, "range": [0, 1], "visible": False, "fixedrange": True}
    layout["annotations"] = [
        {**_note(title, rows[name][1] + 0.005), "x": 0, "xanchor": "left", "yanchor": "bottom"}
        for name, title in TITLES.items()
        if name in rows
    ]
    layout["annotations"] += _named_rows(scene)
    # Invisible points, one a step in each row, so that the mouse meets the nearest step wherever it is.
    invisible = {"x": positions, "y": [0.5] * scene.steps, "mode": "markers", "opacity": 0, "hoverinfo": "none"}
    data = [{**invisible, "yaxis": name} for name in rows]
    data += _sequence(scene)
    at = [positions[step - 1] for step in scene.right]
    text: dict[str, Any] = {"mode": "text", "yaxis": "y2", "x": at, "hoverinfo": "skip", "cliponaxis": False}
    answers = {**text, "y": [ANSWERS] * len(at), "text": [label(one) for one in scene.right.values()]}
    data.append({**answers, "name": "answers", "textfont": {"family": "@mono", "size": 16, "color": "@muted"}})
    marks = {**text, "y": [MARKS] * len(at), "text": [""] * len(at), "name": "marks"}
    data.append({**marks, "textfont": {"size": 12, "color": "@muted"}})
    if has_credit or scene.marked:
        layout |= {"bargap": 0, "barmode": "overlay"}
    if has_credit:
        layout["yaxis4"] |= {"range": None, "autorange": True, "rangemode": "tozero"}
        bars = {"type": "bar", "yaxis": "y4", "x": [], "y": [], "hoverinfo": "skip"}
        data += [{**bars, "name": name, "marker": {"color": f"@{name}"}} for name in ("direct", "chain", "skip")]
    return {"data": data, "layout": layout}


INPUTS, ANSWERS, MARKS = 0.85, 0.45, 0.12
"""Heights in the row of the sequence: what the steps see, the answers, whether those are right."""


def _note(text: str, y: float, yref: str = "paper", size: int = 12) -> dict[str, Any]:
    """Text in a figure."""
    place = {"xref": "paper", "yref": yref, "y": y, "showarrow": False}
    return {**place, "text": text, "font": {"size": size, "color": "@muted"}}


def _named_rows(scene: Scene) -> list[dict[str, Any]]:
    """What the lines of the sequence are, at the left, and which stretches are narrower than they should be."""
    names = [("input", INPUTS), *([("answer", ANSWERS)] if scene.right else [])]
    side = {"x": 0, "xanchor": "right", "yanchor": "middle", "xshift": -6}
    notes = [{**_note(name, height, "y2", 11), **side} for name, height in names]
    for first, last in scene.narrowed:
        middle = (scene.positions[first - 1] + scene.positions[last - 1]) / 2
        text = f"steps {first:,} to {last:,}: blank, drawn narrower"
        notes.append({**_note(text, ANSWERS, "y2", 11), "xref": "x", "x": middle, "name": "narrowed"})
    return notes


def _sequence(scene: Scene) -> list[dict[str, Any]]:
    """What the steps see, as symbols, bars or a strip of pixels."""
    common = {"yaxis": "y2", "hoverinfo": "skip"}
    if scene.places is not None:
        strip = {
            "type": "heatmap",
            "x": scene.positions,
            "y": [INPUTS],
            "z": [[_short(one) for one in scene.values or ()]],
        }
        return [{**common, **strip, "dy": 0.3, "colorscale": "@pixels", "showscale": False, "zmin": 0, "zmax": 1}]
    if scene.values is not None:
        colours = ["@ink" if step in scene.marked else "@faint" for step in range(1, scene.steps + 1)]
        values = [_short(0.4 * one) for one in scene.values]
        bars = {
            "type": "bar",
            "x": scene.positions,
            "y": values,
            "base": 0.6,
            "width": 0.8,
            "marker": {"color": colours},
        }
        return [{**common, **bars}]
    symbols = {
        "mode": "text",
        "x": scene.positions,
        "y": [INPUTS] * scene.steps,
        "text": [label(one) for one in scene.seen],
        "name": "inputs",
    }
    return [{**common, **symbols, "textfont": {"family": "@mono", "size": 16, "color": "@ink"}}]


def _map(explorer: Explorer) -> Figure:
    """The mean attention of the attending steps over the microstates; the script puts in that of the moment."""
    task = explorer.task
    attending = [task.attending_steps[place] for place in attending_rows(task)]
    columns = len(next(moment.attention for moment in explorer.moments if moment.attention)[0])
    largest = max((one or 0.0 for moment in explorer.moments for row in moment.attention for one in row), default=1.0)
    data: dict[str, Any] = {"type": "heatmap", "x": [(place + 1) * explorer.k_att for place in range(columns)]}
    data |= {"y": attending, "z": [], "zmin": 0, "zmax": largest, "colorscale": "@weights", "hoverongaps": False}
    data["colorbar"] = {"thickness": 10, "outlinewidth": 0, "title": {"text": "weight", "side": "right"}}
    data["hovertemplate"] = "step %{y} reads step %{x}: %{z}<extra></extra>"
    layout = {
        "xaxis": {"title": {"text": "step of the microstate that is read"}, "showgrid": False, "fixedrange": True}
    }
    layout["yaxis"] = {
        "title": {"text": "reading step"},
        "autorange": "reversed",
        "showgrid": False,
        "fixedrange": True,
    }
    return {"data": [data], "layout": {**layout, "dragmode": False}}


def _image(scene: Scene) -> Figure:
    """The pixels in their places; the script marks the step, what it reads and where its credit goes."""
    assert scene.places is not None
    assert scene.values is not None
    side = round(scene.steps**0.5)
    pixels = [[0.0] * side for _ in range(side)]
    for place, value in zip(scene.places, scene.values, strict=True):
        pixels[place // side][place % side] = _short(value)
    image = {"type": "heatmap", "z": pixels, "colorscale": "@pixels", "showscale": False, "hoverinfo": "none"}
    marks = {"mode": "markers", "x": [], "y": [], "hoverinfo": "skip"}
    square = {"visible": False, "fixedrange": True}
    layout = {"xaxis": {**square, "constrain": "domain"}, "showlegend": False, "dragmode": False}
    layout["yaxis"] = {**square, "autorange": "reversed", "scaleanchor": "x"}
    layout["margin"] = {"l": 0, "r": 0, "t": 0, "b": 0}
    looks: dict[str, dict[str, Any]] = {
        "credit": {"color": "@skip", "opacity": 0.75},
        "reads": {"color": "rgba(0,0,0,0)", "line": {"color": "@read", "width": 2.5}},
        "step": {"color": "@c4", "symbol": "x"},
    }
    data = [image, *({**marks, "name": name, "marker": look} for name, look in looks.items())]
    return {"data": data, "layout": layout}
