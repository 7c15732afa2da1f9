"""The records of the paper's rows, and how the rows and their runs are listed in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sab.lab.experiments import records as stored
from sab.lab.experiments.records import Record
from sab.lab.experiments.reproduce import Coverage, Standing
from sab.lab.experiments.tables import COLUMNS, ROWS, Row
from sab.lab.report.numbers import ByRow
from sab.lab.training.progress import show_seconds


def load(results: Path) -> ByRow:
    """All records in a folder."""
    by_row: dict[str, list[Record]] = {}
    for task in COLUMNS:
        for record in stored.load(task, results):
            by_row.setdefault(record["row"], []).append(record)
    return {row: sorted(found, key=lambda record: record["seed"]) for row, found in by_row.items()}


def listing(rows: Sequence[Row]) -> list[str]:
    """The rows, a line each, with the paper's values, below a header."""
    width = max(len(row.id) for row in rows)
    header = f"{'row':{width}}  seeds  iterations  the paper's values"
    lines = (
        f"{row.id:{width}}  {row.seeds:5}  {row.config(0).training.iterations:>10,}  {_paper(row)}" for row in rows
    )
    return [header, *lines]


def _paper(row: Row) -> str:
    if not row.paper:
        return "not in the paper"
    return " / ".join(row.paper[metric] for metric in COLUMNS[row.task])


def coverage_lines(covered: Mapping[str, Coverage]) -> list[str]:
    """How many rows of each kind have their seeds, a line for each kind that has rows."""
    return [
        f"{kind}: {one.complete} of {one.rows} have all their seeds, {one.left} runs are left"
        for kind, one in covered.items()
        if one.rows
    ]


def standing_lines(standings: Iterable[Standing]) -> list[str]:
    """How far all runs have come, and then each, a line each."""
    standings = list(standings)
    width = max(len(standing.job.label) for standing in standings)
    lines = [f"{'run':{width}}  state      iterations"]
    for standing in standings:
        iterations = f"{standing.iterations:,}/{standing.job.config.training.iterations:,}"
        lines.append(f"{standing.job.label:{width}}  {standing.state:9}  {iterations:13}  {standing.summary}".rstrip())
    counts = Counter(standing.state for standing in standings)
    return [f"{len(standings)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.items()), *lines]


def total_time(by_row: ByRow) -> list[str]:
    """How long the paper's rows took, one run of each, in a sentence; nothing where there is none."""
    rows = [row for row in ROWS.values() if row.is_papers]
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
