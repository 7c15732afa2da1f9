"""The paper's tables with its numbers and ours: in a terminal, and in pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sab.experiments.reproduce import Standing
from sab.experiments.tables import COLUMNS, Row

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
