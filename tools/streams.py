"""The generated part of docs/streams.md: the tables of `examples/online.py`, from the records of its `--out`."""

from __future__ import annotations

import json
from typing import Any

from tools.pages import ROOT, markdown, replace_part

PAGE, RECORDS = ROOT / "docs" / "streams.md", ROOT / "benchmarks" / "streams.jsonl"
Runs = dict[tuple[int, str, str, int], list[dict[str, Any]]]


def main() -> None:
    replace_part(PAGE, "streams", page_part(load(RECORDS.read_text(encoding="utf-8"))))


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
