"""The generated parts of docs/streams.md and its figures, from the records of tools/stream_runs.py.

`python -m tools.streams compare-weights` first measures how far the gradients with the weights of now and then differ.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from sab.lab.report.figures import save_in_every_format
from sab.lab.rivals import RIVALS
from sab.online import Learner
from sab.online.stream import Part
from sab.plot import drawing
from sab.plot.drawing import GREY, label_lines, plain, use_per_cent
from tools import stream_runs
from tools.pages import IMAGES, ROOT, markdown, replace_part
from tools.recordings import RECORDINGS
from tools.stream_runs import METHODS, score

PAGE = ROOT / "docs" / "streams.md"
ACCURACY, COST = "streams-accuracy.png", "streams-cost.png"
FORECAST = ("demand",)
"""The recordings on the page."""
SHOWN = 10_000
"""The distance whose runs are drawn."""
MB = 2**20
TITLES = {"sab": "SAB", "truncated": "truncated backpropagation"}
TITLES |= {method: RIVALS[method].title for method in METHODS[2:]}
COLOURS: dict[str, str] = dict(zip(METHODS, (*drawing.COLOURS[:2], *drawing.COLOURS[3:5]), strict=True))
WEIGHTS = ROOT / "benchmarks" / "streams-weights.jsonl"
DISTANCE = 2000
"""Of the stream on which weights are compared."""
Record = dict[str, Any]


class Run(NamedTuple):
    """What a record is of."""

    stream: str
    distance: int
    method: str
    weights: str
    seed: int


Runs = dict[Run, list[Record]]


def main() -> None:
    if sys.argv[1:] == ["compare-weights"]:
        compare_weights()
    replace_part(PAGE, "weights", weights_part())
    cues, recordings = load(stream_runs.CUES), load(stream_runs.RECORDINGS)
    replace_part(PAGE, "streams", cues_part(cues))
    for stream in FORECAST:
        replace_part(PAGE, stream, recording_part(recordings, stream))
    for name, figure in figures(cues, recordings).items():
        save_in_every_format(figure, IMAGES / name)


class Comparing(Learner):
    """Learns with the weights of then, and compares each gradient that goes far back with that of now."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, weights="then", **options)
        self.compared: list[tuple[float, float]] = []
        """For each, the cosine of the two and the norm of now as a part of that of then."""

    def _gradients(self, period: Any) -> Any:
        then = super()._gradients(period)
        if then[2] > 0:
            again: Any = self._again(period.pieces)
            stream = again.begun.stream
            chunks = [one._replace(parts=tuple(Part(x, None) for x, _ in one.parts)) for one in stream.chunks]
            begun = again.begun._replace(stream=stream._replace(chunks=tuple(chunks)))
            now = super()._gradients(again._replace(begun=begun))
            flat = [torch.cat([one.flatten() for one in found[0] if one is not None]) for found in (then, now)]
            cosine = torch.nn.functional.cosine_similarity(*flat, dim=0).item()
            self.compared.append((cosine, now[1] / then[1]))
        return then


def compare_weights() -> None:
    """Measure how far the gradients with the weights of now and of then are apart, and keep the records."""
    sys.path.insert(0, str(ROOT / "examples"))
    example: Any = importlib.import_module("online")
    torch.set_num_threads(1)
    lines: list[str] = []
    for rate in (0.01, 0.001):
        torch.manual_seed(0)
        model = example.Answerer(DISTANCE, 10, example.CUT)
        optimizer, loss = torch.optim.Adam(model.parameters(), rate), torch.nn.functional.cross_entropy
        learner = Comparing(model, optimizer, loss, clip=1.0, max_memory=example.MICROSTATES, max_chunks=4)
        for x, y, _ in example.stream(DISTANCE, 0):
            learner.step(x, y)
            if learner.seen >= 3 * DISTANCE:
                break
        cosines, ratios = zip(*learner.compared, strict=True)
        record = {"distance": DISTANCE, "learning_rate": rate, "updates": len(cosines)}
        record |= {"cosine": statistics.median(cosines), "lowest_cosine": min(cosines)}
        lines.append(json.dumps(record | {"norm_ratio": statistics.median(ratios)}) + "\n")
    WEIGHTS.write_text("".join(lines), encoding="utf-8")


def weights_part() -> str:
    """The table of that."""
    records = [json.loads(line) for line in WEIGHTS.read_text(encoding="utf-8").splitlines()]
    header = ["learning rate", "cosine, median", "lowest", "norm of now / then, median", "updates"]
    rows = [
        [
            f"{one['learning_rate']:g}",
            *(f"{one[name]:.2f}" for name in ("cosine", "lowest_cosine", "norm_ratio")),
            str(one["updates"]),
        ]
        for one in records
    ]
    return markdown(header, rows)


def load(path: Path) -> Runs:
    """The records of a file by run."""
    runs: Runs = {}
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        key = Run(record["stream"], record.get("distance", 0), record["method"], record["weights"], record["seed"])
        runs.setdefault(key, []).append(record)
    return runs


def groups_of(runs: Runs, stream: str = "cues") -> dict[Run, list[list[Record]]]:
    """The runs of a stream that differ in their seed alone, by the first of them: short distances and SAB first."""
    groups: dict[Run, list[list[Record]]] = {}
    for key in sorted(runs, key=lambda one: (one.distance, METHODS.index(one.method), one.weights, one.seed)):
        if key.stream == stream:
            groups.setdefault(key._replace(seed=0), []).append(runs[key])
    return groups


def longest_of(runs: Runs) -> list[Record]:
    """The longest run of SAB."""
    return max((run for key, run in runs.items() if key.method == "sab"), key=lambda run: run[-1]["steps"])


def parts_of(run: list[Record]) -> list[tuple[int, list[Record]]]:
    """A run in parts of 100,000 steps, the first of them in four, by the last step of each."""
    ends = [0, 10_000, 20_000, 50_000, *range(100_000, run[-1]["steps"] + 1, 100_000)]
    return [(end, [one for one in run if begin < one["steps"] <= end]) for begin, end in pairwise(ends)]


def cues_part(runs: Runs) -> str:
    """Every method at every distance, and the longest run of SAB over its steps."""
    rows = [
        [
            f"{key.distance:,}",
            _name(key, group),
            *(" · ".join(_percent(_last_half(run), which) for run in group) for which in ("far", "near")),
            *_costs(group),
            _lengths(group),
        ]
        for key, group in groups_of(runs).items()
    ]
    longest = longest_of(runs)
    over_time = [
        [
            f"{end:,}",
            f"{_mean(part, 'cpu_us_a_step'):.0f}",
            f"{part[-1]['process_bytes'] / MB:.0f}",
            f"{part[-1]['kept_bytes'] / 1024:,.0f}",
            *(_percent(part, which) for which in ("far", "near")),
        ]
        for end, part in parts_of(longest)
    ]
    header = ["up to steps back", "method", "far, %", "near, %", "µs a step", "kept, KB", "peak, MB", "thousand steps"]
    return "\n\n".join(
        [
            "Right answers in the second half of each run, a number for each of the seeds 0, 1, …; *far* is more than "
            "half of the distance, chance is 25 %. *Kept* is what is carried from piece to piece; *peak* is what the "
            "process needed at most, besides what it had before the first step:",
            markdown(header, rows),
            f"![Right answers over the stream, up to {SHOWN:,} steps back](images/{ACCURACY})",
            f"The longest run of SAB over its steps (up to {longest[0]['distance']:,} back):",
            markdown(["steps", "µs a step", "process, MB", "kept, KB", "far, %", "near, %"], over_time),
            f"![Time of a step and memory of the process over the stream](images/{COST})",
        ]
    )


def recording_part(runs: Runs, stream: str) -> str:
    """The errors of forecasts after the part of a recording that settings were chosen on."""
    recording, groups = RECORDINGS[stream], groups_of(runs, stream)
    rows: list[list[str]] = []
    known: list[Record] = []
    for key, group in groups.items():
        reported = [[record for record in run if record["is_reported"]] for run in group]
        errors = " · ".join(f"{_mean(run, 'learned'):.3f}" for run in reported)
        rows.append([_name(key, group), errors, *_costs(group)])
        known = reported[0]
    rows += [[f"no learning: {name}", f"{_mean(known, name):.3f}", "", "", ""] for name in recording.baselines]
    header = ["forecast", f"error, {recording.unit}, by seed", "µs a step", "kept, KB", "peak, MB"]
    image = f"![Error over time, {recording.title}](images/{error_image(stream)})"
    return f"{markdown(header, rows)}\n\n{image}"


def error_image(stream: str) -> str:
    """The file of a recording's figure."""
    return f"streams-{stream}.png"


def figures(cues: Runs, recordings: Runs) -> dict[str, Figure]:
    """The figures of the page, by their files."""
    drawn = {ACCURACY: draw_accuracy(cues), COST: draw_cost(longest_of(cues))}
    return drawn | {error_image(stream): draw_error(recordings, stream) for stream in FORECAST}


def draw_accuracy(runs: Runs) -> Figure:
    """Right answers over the stream, near and far."""
    figure, axes = _canvas()
    for key, group in groups_of(runs).items():
        if key.distance == SHOWN and key.weights == "now":
            _draw_seeds(axes, key, group, [[score([record]) for record in run] for run in group])
    axes.axhline(0.25, color=GREY, linestyle=":", linewidth=1.5, label="chance")
    axes.set_ylabel("right answers")
    use_per_cent(axes)
    axes.set_xlim(left=0)
    label_lines(axes)
    return figure


def draw_error(runs: Runs, stream: str) -> Figure:
    """The error of forecasts over a recording. The part that settings were chosen on has a grey ground."""
    figure, axes = _canvas()
    recording, groups = RECORDINGS[stream], groups_of(runs, stream)
    run = next(iter(groups.values()))[0]
    for name, dash in zip(recording.baselines, (":", "--", "-."), strict=True):
        errors = numpy.array([record.get(name) for record in run], dtype=float)
        axes.plot([record["steps"] for record in run], errors, dash, color=GREY, linewidth=1.5, label=name)
    for key, group in groups.items():
        _draw_seeds(axes, key, group, [[record["learned"] for record in run] for run in group])
    chosen = [record["steps"] for record in run if not record["is_reported"]]
    axes.axvspan(0, chosen[-1], color="0.95", linewidth=0, zorder=0)
    axes.set_ylabel(f"mean absolute error, {recording.unit}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    label_lines(axes)
    return figure


def draw_cost(run: list[Record]) -> Figure:
    """The time of a step and the memory of the process over the steps of a run."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    parts = parts_of(run)
    series = {
        "CPU time of a step, µs": [_mean(part, "cpu_us_a_step") for _, part in parts],
        "memory of the process, MB": [part[-1]["process_bytes"] / MB for _, part in parts],
    }
    for axes, (label, values) in zip(figure.subplots(1, 2), series.items(), strict=True):
        axes.plot([end for end, _ in parts], values, "o-", color=COLOURS["sab"], linewidth=2)
        axes.set(xlabel="steps of the stream", ylabel=label, xscale="log", ylim=(0, 1.25 * max(values)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        plain(axes)
    return figure


def _canvas() -> tuple[Figure, Axes]:
    """Axes over the steps of a stream."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("steps of the stream")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    plain(axes)
    return figure, axes


def _draw_seeds(axes: Axes, key: Run, group: list[list[Record]], curves: list[list[float]]) -> None:
    """The median of the seeds, and a band from the lowest to the highest."""
    steps, values = [record["steps"] for record in group[0]], numpy.array(curves)
    colour = COLOURS[key.method]
    axes.plot(steps, numpy.median(values, axis=0), color=colour, linewidth=2, label=TITLES[key.method])
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _name(key: Run, group: list[list[Record]]) -> str:
    name = TITLES[key.method]
    cut = group[0][0]["cut"]
    name += f", chain of {cut:,}" if cut else ""
    return f"{name}, weights of then" if key.weights == "then" else name


def _costs(group: list[list[Record]]) -> list[str]:
    """Medians of the seeds: time of a step, bytes that are kept, and the largest peak."""
    time = statistics.median(_mean(run, "cpu_us_a_step") for run in group)
    kept = statistics.median(run[-1]["kept_bytes"] for run in group)
    return [f"{time:,.0f}", f"{kept / 1024:,.0f}", f"{max(run[-1]['peak_bytes'] for run in group) / MB:.0f}"]


def _lengths(group: list[list[Record]]) -> str:
    """How many steps the runs have, in thousands."""
    lengths = sorted({run[-1]["steps"] // 1000 for run in group})
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"


def _last_half(run: list[Record]) -> list[Record]:
    return [record for record in run if record["steps"] > run[-1]["steps"] / 2]


def _mean(records: list[Record], name: str) -> float:
    return sum(record[name] for record in records) / len(records)


def _percent(records: list[Record], which: str) -> str:
    """The share of right answers to all such questions in some records."""
    counts = [record[f"{which}_count"] for record in records]
    right = sum((record[which] or 0.0) * count for record, count in zip(records, counts, strict=True))
    return f"{100 * right / sum(counts):.1f}" if sum(counts) else "–"


if __name__ == "__main__":
    main()
