"""The paper's tables with its numbers and ours: in a terminal, and in docs/results.md and the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from sab.lab.experiments import calls
from sab.lab.experiments import records as stored
from sab.lab.experiments.calls import Call
from sab.lab.experiments.records import Record
from sab.lab.experiments.reproduce import Standing
from sab.lab.experiments.tables import COLUMNS, ROWS, Row
from sab.lab.report import datasets, synthetic
from sab.lab.report.numbers import ByRow
from sab.lab.training.progress import show_seconds


def load(results: Path) -> ByRow:
    """All records in a folder."""
    by_row: dict[str, list[Record]] = {}
    for task in COLUMNS:
        for record in stored.load(task, results):
            by_row.setdefault(record["row"], []).append(record)
    return {row: sorted(found, key=lambda record: record["seed"]) for row, found in by_row.items()}


# In a terminal


def listing(rows: Sequence[Row]) -> list[str]:
    """The rows, a line each, with the paper's values."""
    width = max(len(row.id) for row in rows)
    return [f"{row.id:{width}}  {row.config(0).training.iterations:>6} iterations  {_paper(row)}" for row in rows]


def _paper(row: Row) -> str:
    if not row.paper:
        return "not in the paper"
    return f"paper: {' / '.join(row.paper[metric] for metric in COLUMNS[row.task])}"


def standing_lines(standings: Iterable[Standing]) -> list[str]:
    """How far each run has come, a line each, and then in all."""
    standings = list(standings)
    width = max(len(standing.job.label) for standing in standings)
    lines: list[str] = []
    for standing in standings:
        iterations = f"{standing.iterations}/{standing.job.config.training.iterations}"
        lines.append(f"{standing.job.label:{width}}  {standing.state:9}  {iterations:>13}  {standing.told}".rstrip())
    counts = Counter(standing.state for standing in standings)
    return [*lines, f"{len(standings)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.items())]


# The pages


def page_part(by_row: ByRow, images: str, made: Sequence[Call] = ()) -> str:
    """The part of docs/results.md that is made from records and calls; `images` is where it finds the figures."""
    parts = [
        _about(by_row),
        *total_time(by_row, made),
        *synthetic.tables(by_row, images),
        *datasets.tables(by_row, images),
        *synthetic.beyond(by_row),
        *datasets.beyond(by_row, images),
        *synthetic.attention(by_row, images),
    ]
    return "\n\n".join(parts)


def readme_part(by_row: ByRow, made: Sequence[Call] = ()) -> str:
    """The README's short tables."""
    return "\n\n".join([*synthetic.readme(by_row), *datasets.readme(by_row), *total_time(by_row, made)])


def _about(by_row: ByRow) -> str:
    """Where the numbers come from, a line for each device."""
    machines: dict[str, list[Record]] = {}
    for record in (record for records in by_row.values() for record in records):
        machines.setdefault(record["device"], []).append(record)
    if not machines:
        return "Nothing has been run yet."
    told: list[str] = []
    for device, group in machines.items():
        newest = max(group, key=lambda record: record["date"])
        versions = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
        commits = ", ".join(sorted({str(record["commit"])[:12] for record in group if record["commit"]})) or "not known"
        runs = f"{len(group)} run{'s' * (len(group) > 1)}"
        told.append(f"- {device}: {runs}; {versions}; commit {commits}; {newest['date'][:10]}")
    return "\n".join(["Run on", "", *told])


def total_time(by_row: ByRow, made: Sequence[Call] = ()) -> list[str]:
    """What the paper's rows took, a run of each, in a sentence; nothing where there is none."""
    rows = [row for row in ROWS.values() if row.is_papers]
    call = calls.largest(made, {row.id for row in rows})
    if call is not None:
        others = [row.id for row in rows if row.id not in call.rows]
        if all(row in by_row for row in others):
            return [_measured_time(call, len(rows), [by_row[row][0] for row in others])]
    runs = [by_row[row.id][0] for row in rows if row.id in by_row]
    if not runs:
        return []
    whole = show_seconds(sum(run["wall_time"] for run in runs))
    shares = show_seconds(sum(run["wall_time"] / run.get("together", 1) for run in runs))
    devices = ", ".join(dict.fromkeys(run["device"] for run in runs))
    return [
        f"Of the paper's {len(rows)} rows {len(runs)} were run. The wall times of one run of each, that of the lowest "
        f"seed, add up to {whole} on {devices}, or to {shares} with each divided by how many runs shared its process."
    ]


def _measured_time(call: Call, count: int, others: Sequence[Record]) -> str:
    """What a call took in a sentence, with the runs of the rows that it was not asked for."""
    what = f"The paper's {count} rows"
    if others:
        what = f"{len(call.rows)} of the paper's {count} rows ({', '.join(call.data)})"
    took = f"{what}, one seed of each, took {show_seconds(call.wall_time)} on {call.device}"
    took += ", measured over one call of `sab reproduce`."
    if not others:
        return took
    alone = ", each alone in its process," if all(run.get("together", 1) == 1 for run in others) else ""
    seconds = sum(run["wall_time"] for run in others)
    return (
        f"{took} The wall times of the other {len(others)}{alone} add up to {show_seconds(seconds)}: "
        f"{show_seconds(call.wall_time + seconds)} in all, but for what those took to begin and to be tested."
    )
