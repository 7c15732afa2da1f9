"""Trained on 100 steps, streamed over a million: the measurement, its tables and its figure in docs/long-memory.md.

    python -m tools.long_streams measure RUNS    # trains into the folder RUNS, and adds records; an hour of one core
    python -m tools.long_streams                 # the tables and the figure from the records

A sequence of T steps shows everything at its beginning (copying) or scattered over it (recall), and asks at its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor

from sab.config import SABConfig
from sab.lab.models import ModelConfig, SequenceModel
from sab.lab.report.figures import save_in_every_format
from sab.lab.tasks import Copying, Recall
from sab.lab.training import TrainConfig, train
from sab.lab.training.checkpoint import load_model
from sab.lab.training.run import Run, RunConfig, provenance
from sab.plot.drawing import COLOURS, label_lines, plain, use_log_scale
from sab.search import IndexedStream
from tools.pages import IMAGES, ROOT, markdown, replace_part

PAGE, RECORDS = ROOT / "docs" / "long-memory.md", ROOT / "benchmarks" / "long-streams.jsonl"
FIGURE = "long-streams"
PIECE, ROWS, COMPARED = 1000, 4, 10_000
"""Steps in a call, sequences at once, and steps after which a compacted stream is compared with the whole one."""
BOUND = 256
SEEDS = (0, 1, 2)
_OPTIONS: dict[str, Any] = {"lr_decay": 0.6, "eval_every": 200, "checkpoint_every": 1000, "device": "cpu", "threads": 1}
_COPYING = Copying(length=100, train_lengths="uniform")


def _config(task: Any, size: int, memory: dict[str, Any], **training: Any) -> RunConfig:
    model = ModelConfig(cell="gru", hidden_size=size, memory=SABConfig(**memory))
    return RunConfig(task, model, TrainConfig(**_OPTIONS, **training))


MODELS = {
    "copying": _config(_COPYING, 64, {}, iterations=1500, batch_size=32, lr=4e-3),
    "recall": _config(
        Recall(length=100, pairs=4, keys=8, train_lengths="uniform"), 128, {}, iterations=3000, batch_size=64, lr=4e-3
    ),
    "affine": _config(
        _COPYING, 128, {"scorer": "affine", "k_att": 1, "k_trunc": 20}, iterations=3000, batch_size=32, lr=3e-3
    ),
    "bounded": _config(
        _COPYING,
        128,
        {"max_memory": 32, "forget": "most_read", "k_att": 1},
        iterations=3000,
        batch_size=32,
        lr=3e-3,
        keep="best",
        stop_at=0.99,
    ),
}
NAMES = {
    "copying": "copying, default",
    "recall": "recall, default",
    "affine": "copying, `affine`",
    "bounded": "copying, trained with a bound",
}
MODES: dict[str, dict[str, Any]] = {
    "all": {},
    "distinct": {},
    "recent": {"max_memory": BOUND, "forget": "recent"},
    "most_read": {"max_memory": BOUND, "forget": "most_read"},
    "reservoir": {"max_memory": BOUND, "forget": "reservoir"},
    "compact": {},
    "index": {},
}
"""What changes in a trained model's memory."""
MODE_NAMES = {
    "all": "all microstates",
    "distinct": f"{BOUND}, `state.distinct` every {PIECE:,} steps",
    "recent": f"{BOUND}, `recent`",
    "most_read": f"{BOUND}, `most_read`",
    "reservoir": f"{BOUND}, `reservoir`",
    "compact": "k_top, `layer.compact(state)`",
    "index": "all, through an index",
}
DRAWN = (
    ("copying", "all"),
    ("copying", "index"),
    ("copying", "distinct"),
    ("copying", "most_read"),
    ("affine", "compact"),
)
"""The models and modes in the figure."""
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)


def cases() -> Iterator[tuple[str, int, str, int]]:
    """What is measured: model, seed, mode and steps."""
    for seed in SEEDS:
        for model, modes in {
            "affine": {"compact": 1_000_000},
            "bounded": {"all": 1_000_000},
            "copying": {
                "all": 100_000,
                "distinct": 1_000_000,
                "recent": 10_000,
                "reservoir": 10_000,
                "most_read": 100_000,
            },
            "recall": {
                "all": 100_000,
                "distinct": 1_000_000,
                "recent": 10_000,
                "reservoir": 10_000,
                "most_read": 10_000,
            },
        }.items():
            for mode, most in modes.items():
                yield from ((model, seed, mode, steps) for steps in LENGTHS if steps <= most)
    yield "copying", 0, "most_read", 1_000_000
    yield "copying", 0, "index", 1_000_000


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["measure"]:
        measure(Path(arguments[1]))
    elif arguments[:1] == ["stream"]:
        runs, model, seed, mode, steps = arguments[1:]
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(stream(Path(runs), model, int(seed), mode, int(steps))) + "\n")
        return
    records = load()
    replace_part(PAGE, "long streams", page_part(records))
    save_in_every_format(figure(records), IMAGES / FIGURE)


def measure(runs: Path) -> None:
    """Train what is not trained, and measure what is not in the records, each in a process of its own."""
    for seed in SEEDS:
        for name, config in MODELS.items():
            path = _run_of(runs, name, seed)
            training = replace(config.training, seed=seed)
            train(config.task, config.model, training, path, resume=path.exists())
    done = {(one["model"], one["seed"], one["mode"], one["steps"]) for one in load()}
    for case in cases():
        if case not in done:
            command = [sys.executable, "-m", "tools.long_streams", "stream", str(runs), *map(str, case)]
            subprocess.run(command, cwd=ROOT, check=True)


def _run_of(runs: Path, model: str, seed: int) -> Path:
    return runs / f"{model}-seed{seed}"


@torch.no_grad()
def stream(runs: Path, name: str, seed: int, mode: str, steps: int) -> dict[str, Any]:
    """The record of one model over one length."""
    torch.set_num_threads(1)
    run = Run.open(_run_of(runs, name, seed))
    config = run.config.model
    trained = load_model(run, torch.device("cpu")).eval()
    changed = replace(run.config, model=replace(config, memory=replace(config.memory, **MODES[mode])))
    model = changed.build_model(torch.device("cpu")).eval()
    model.load_state_dict(trained.state_dict())
    rows = 1 if mode == "index" else ROWS
    task: Any = run.config.task
    task = replace(task, length=task.length + steps - task.steps)
    inputs, targets = task.draw(torch.Generator().manual_seed(1000 + seed), rows, "test")
    points: list[list[float]] = []
    began, told = time.process_time(), 0
    follow, last = Follower(model, mode), torch.empty(0, rows, run.config.task.output_size)
    for first in range(0, len(inputs), PIECE):
        last = torch.cat([last, follow(inputs[first : first + PIECE])])[-20:]
        seen = first + PIECE
        if seen in (*LENGTHS, *(3 * one for one in LENGTHS), steps):
            points.append([seen, (time.process_time() - began) / (seen - told) * 1e6, memory()])
            began, told = time.process_time(), seen
    headline = task.headline
    value = float(task.metrics(last, targets[-20:])[headline.metric])
    result = run.result()
    assert result is not None
    record = {"model": name, "seed": seed, "mode": mode, "steps": steps, "rows": rows, "accuracy": value}
    record |= {"trained_accuracy": result.metrics[headline.metric], "points": points, **follow.facts()}
    if mode == "compact" and steps == COMPARED:
        record["equals_whole"] = equals_whole(model, inputs)
    of = provenance(torch.device("cpu"))
    return record | {"device": of.device, "versions": of.versions, "commit": of.commit}


class Follower:
    """Runs a model over the pieces of a stream."""

    def __init__(self, model: SequenceModel, mode: str):
        self.model, self.mode, self.state = model, mode, None
        self.indexed = IndexedStream(model.layers) if mode == "index" else None

    def __call__(self, piece: Tensor) -> Tensor:
        """The outputs of the steps of a piece."""
        if self.indexed is not None:
            return self.model.readout(self.indexed.step(self.model._encode(piece)))
        outputs, self.state = self.model(piece, self.state)
        if self.mode == "compact":
            self.state = self.model.layers.compact(self.state)
        if self.mode == "distinct":
            self.state = self.state.distinct(BOUND)
        return outputs

    def facts(self) -> dict[str, Any]:
        """How many microstates there are, and the recall of an index."""
        state: Any = self.state if self.indexed is None else self.indexed.state.state
        recall = (
            {} if self.indexed is None else {"recall": self.indexed.recall.share, "checked": self.indexed.recall.steps}
        )
        return {"microstates": state.numbers.shape[-1], **recall}


def equals_whole(model: SequenceModel, inputs: Tensor) -> bool:
    """Whether a compacted stream has the outputs of one that keeps every microstate, bit for bit."""
    compacted, whole = Follower(model, "compact"), Follower(model, "all")
    return all(torch.equal(compacted(piece), whole(piece)) for piece in inputs.split(PIECE))


def memory() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def load() -> list[dict[str, Any]]:
    """All records; none where there is no file."""
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()] if RECORDS.exists() else []


def page_part(records: Sequence[dict[str, Any]]) -> str:
    """The tables: accuracy by length, and time and memory over the longest streams."""
    return "\n\n".join([_accuracies(records), _over_time(records)])


def _accuracies(records: Sequence[dict[str, Any]]) -> str:
    kinds = list(dict.fromkeys((one["model"], one["mode"]) for one in records))
    rows: list[list[str]] = []
    for model, mode in sorted(kinds, key=lambda kind: (list(NAMES).index(kind[0]), list(MODES).index(kind[1]))):
        of_kind = sorted(
            (one for one in records if (one["model"], one["mode"]) == (model, mode)), key=lambda one: one["seed"]
        )
        trained = {one["seed"]: one["trained_accuracy"] for one in of_kind}
        cells = [_each(list(trained.values()))]
        cells += [_each([one["accuracy"] for one in of_kind if one["steps"] == steps]) for steps in LENGTHS]
        rows.append([NAMES[model], _memory(model, mode), *cells])
    header = ["model", "memory while streaming", "as trained", *(f"T = {steps:,}" for steps in LENGTHS)]
    return "Accuracy in per cent, of each seed that was run:\n\n" + markdown(header, rows)


def _name(record: dict[str, Any]) -> str:
    return f"{NAMES[record['model']]}; {_memory(record['model'], record['mode'])}"


def _memory(model: str, mode: str) -> str:
    return "32, `most_read`" if model == "bounded" else MODE_NAMES[mode]


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.0f}" for value in values) or "–"


def _longest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest stream of seed 0 of each model and mode that has at least 100,000 steps."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for one in records:
        kind = one["model"], one["mode"]
        if one["seed"] == 0 and one["steps"] >= 100_000 and one["steps"] >= best.get(kind, one)["steps"]:
            best[kind] = one
    return list(best.values())


def _over_time(records: Sequence[dict[str, Any]]) -> str:
    rows: list[list[str]] = []
    for one in _longest(records):
        at = {int(steps): (f"{spent:.0f}", f"{held / 2**20:.0f}") for steps, spent, held in one["points"]}
        spent, held = zip(*(at.get(steps, ("–", "–")) for steps in LENGTHS), strict=True)
        rows += [[_name(one), "µs a step", *spent], ["", "process, MB", *held]]
    header = ["longest stream of seed 0", "", *(f"after {steps:,}" for steps in LENGTHS)]
    return f"CPU time of a step of {ROWS} sequences at once (of one with an index), and memory of the process:\n\n" + (
        markdown(header, rows)
    )


def figure(records: Sequence[dict[str, Any]]) -> Figure:
    """Time a step and resident memory against the steps of a stream."""
    drawn = Figure(figsize=(10, 4.2), layout="constrained")
    panels = drawn.subplots(1, 2)
    lines = [one for one in _longest(records) if (one["model"], one["mode"]) in DRAWN]
    for colour, one in zip(COLOURS, lines, strict=False):
        steps, spent, held = zip(*one["points"], strict=True)
        name = f"{one['model']}: {one['mode']}"
        panels[0].plot(steps, spent, color=colour, marker="o", linewidth=2, label=name)
        panels[1].plot(steps, [value / 2**20 for value in held], color=colour, marker="o", linewidth=2, label=name)
    for axes, label in zip(panels, ("CPU time of a step, µs", "memory of the process, MB"), strict=True):
        axes.set(xlabel="steps of the stream", ylabel=label, xscale="log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        plain(axes)
    use_log_scale(panels[0])
    panels[0].set_ylim(bottom=5)
    panels[1].set_ylim(0, 1.3 * panels[1].get_ylim()[1])
    for axes in panels:
        label_lines(axes)
    return drawn


if __name__ == "__main__":
    main()
