"""The generated part of docs/streams.md: the tables of `examples/online.py`, from the records of its `--out`.

`python -m tools.streams compare-weights` first measures how far the gradients with the weights of now and then differ.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from typing import Any

import torch

from sab.online import Learner
from sab.online.stream import Part
from tools.pages import ROOT, markdown, replace_part

PAGE, RECORDS = ROOT / "docs" / "streams.md", ROOT / "benchmarks" / "streams.jsonl"
WEIGHTS = ROOT / "benchmarks" / "streams-weights.jsonl"
DISTANCE = 2000
"""Of the stream on which weights are compared."""
Runs = dict[tuple[int, str, str, int], list[dict[str, Any]]]


def main() -> None:
    if sys.argv[1:] == ["compare-weights"]:
        compare_weights()
    replace_part(PAGE, "weights", weights_part())
    replace_part(PAGE, "streams", page_part(load(RECORDS.read_text(encoding="utf-8"))))


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


def load(lines: str) -> Runs:
    """The records by distance, method, weights and seed."""
    runs: Runs = {}
    for record in map(json.loads, lines.splitlines()):
        runs.setdefault((record["distance"], record["method"], record["weights"], record["seed"]), []).append(record)
    return runs


def page_part(runs: Runs) -> str:
    """Both tables: every run in its last half, and the longest one of SAB over its steps."""
    longest = max((run for (_, method, *_), run in runs.items() if method.startswith("SAB")), key=_steps)
    accuracy = [
        [
            f"{distance:,}",
            f"{method}{', weights of then' if weights == 'then' else ''}",
            str(seed),
            f"{_steps(run):,}",
            *(_percent(run[len(run) // 2 :], which) for which in ("far", "near")),
            f"{_mean(run, 'cpu_us_a_step'):.0f}",
        ]
        for (distance, method, weights, seed), run in sorted(runs.items())
        if weights == "now" or method.startswith("SAB")  # the baseline is shown once
    ]
    over_time = [
        [
            f"{record['steps']:,}",
            f"{record['cpu_us_a_step']:.0f}",
            f"{record['process_bytes'] / 2**20:.0f}",
            f"{record['kept_bytes'] / 1024:,.0f}",
            *(_percent([record], which) for which in ("far", "near")),
        ]
        for record in longest
    ]
    header = ["up to steps back", "method", "seed", "steps", "right, far", "right, near", "µs a step"]
    return "\n\n".join(
        [
            "Answers in the second half of each run; *far* is more than half of the distance, chance is 25 %:",
            markdown(header, accuracy),
            f"The longest of them, over its steps ({longest[0]['distance']:,} back at most):",
            markdown(["steps", "µs a step", "process, MB", "kept, KB", "right, far", "right, near"], over_time),
        ]
    )


def _steps(run: list[dict[str, Any]]) -> int:
    return run[-1]["steps"]


def _mean(records: list[dict[str, Any]], name: str) -> float:
    return sum(record[name] for record in records) / len(records)


def _percent(records: list[dict[str, Any]], which: str) -> str:
    return f"{_mean(records, which):.1%}".replace("%", " %")


if __name__ == "__main__":
    main()
