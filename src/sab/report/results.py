"""The paper's tables with its numbers and ours: in a terminal, and in docs/results.md and the README."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sab.errors import Mistake
from sab.experiments import records as stored
from sab.experiments.records import Record
from sab.experiments.reproduce import Standing
from sab.experiments.tables import COLUMNS, K_ATT, ROWS, Row
from sab.report.pages import NONE, markdown
from sab.tasks import TASKS, Headline
from sab.training import RunConfig
from sab.training.progress import show_seconds

ByRow = Mapping[str, list[Record]]
"""Records by their row's id, a row's in the order of the seeds."""
ATTENTION, CURVES = "attention-during-training.png", "copying-300.png"
"""The files of the figures."""
NOT_RUN = "not run"
METHODS = {"bptt": "LSTM, full BPTT", "tbptt": "LSTM, TBPTT", "sab": "SAB"}
NAMES = {
    "accuracy_last10": "accuracy, %",
    "cross_entropy_last10": "CE, last 10",
    "cross_entropy": "CE",
    "mse": "error",
}
DECIMALS = {"accuracy_last10": 1, "cross_entropy_last10": 3, "cross_entropy": 3, "mse": 5}
CONTROL = "our training, no memory"
STALE = "†"
LONGEST_OF_THE_PAPER = {"copying": 300, "adding": 400}
CURVE_ROWS = {
    "SAB, k_trunc = k_top = 5": "copying-300-sab-5-5-ours",
    "SAB, k_trunc = k_top = 10": "copying-300-sab-10-10-ours",
    "LSTM, full BPTT": "copying-300-bptt",
    "LSTM, TBPTT 20": "copying-300-tbptt-20",
}
ATTENTION_ROW = next(row.id for row in ROWS.values() if row.moments)


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


# Numbers


def value_of(record: Record, metric: str) -> float | None:
    """A final metric; None where the run diverged, or where it is not finite."""
    return None if record["status"] == "diverged" else record["metrics"].get(metric)


def show(metric: str, value: float) -> str:
    """A metric as the tables have it: accuracies in per cent."""
    return f"{_scaled(metric, value):.{DECIMALS[metric]}f}"


def _scaled(metric: str, value: float) -> float:
    return 100 * value if metric.startswith("accuracy") else value


def show_each(record: Record, metric: str, value: float | None) -> str:
    """A seed's number, or why there is none."""
    if record["status"] == "diverged":
        return f"diverged at iteration {record['iterations'] + 1}"
    return "not finite" if value is None else show(metric, value)


def median(values: Sequence[float | None], higher_is_better: bool) -> float | None:
    """The median, in which no value (the run diverged) is worse than any; None where it falls on such a one."""
    if not values:
        return None
    ranked: list[float | None] = [value for value in values if value is not None]
    ranked.sort(reverse=higher_is_better)  # pyright: ignore[reportCallIssue, reportArgumentType]
    ranked += [None] * (len(values) - len(ranked))
    middle = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    return None if None in middle else statistics.fmean(value for value in middle if value is not None)


def show_median(records: Sequence[Record], metric: str, higher_is_better: bool) -> str:
    """The median of a metric over seeds."""
    value = median([value_of(record, metric) for record in records], higher_is_better)
    return "diverged" if value is None else show(metric, value)


def is_reached(headline: Headline, printed: str, value: float | None) -> bool:
    """Whether a value, rounded as the paper rounds its own, is at least as good as that."""
    decimals = len(printed.partition(".")[2])
    if value is None:
        return False
    return headline.reaches(round(_scaled(headline.metric, value), decimals), float(printed))


def verdict(row: Row, records: Sequence[Record]) -> str:
    """Whether the seeds reach what the paper has."""
    if not row.paper or not records:
        return NONE
    headline = TASKS[row.task].headline
    values = [value_of(record, headline.metric) for record in records]
    reached = sum(is_reached(headline, row.paper[headline.metric], value) for value in values)
    if reached == len(values):
        return "reached" if len(values) > 1 else "reached by the one seed"
    if reached:
        return f"reached by {reached} of {len(values)} seeds"
    if None in values and all(value is None for value in values):
        return "not reached: diverged"
    return "below" if headline.higher_is_better else "above"


def is_stale(row: Row, record: Record) -> bool:
    """Whether a record was made with another configuration than the row now has."""
    try:
        config = RunConfig.from_json(record["config"])
    except (KeyError, TypeError, Mistake):
        return True
    wanted = row.as_in(config).config(record["seed"])
    return config.difference(wanted) is not None or config.training.iterations != wanted.training.iterations


# Tables


def table(rows: Sequence[Row], by_row: ByRow) -> str:
    """The rows of one task with the paper's values, ours, and what they took; columns that say nothing are left out."""
    columns = [_columns(row, by_row.get(row.id, [])) for row in rows]
    optional = {"T": len({row.length for row in rows}) > 1, "k_att": any(row.k_att != K_ATT for row in rows)}
    in_paper = any(row.paper for row in rows)
    shown = [name for name in columns[0] if optional.get(name, in_paper or "paper" not in name)]
    made = markdown(shown, ([cells[name] for name in shown] for cells in columns))
    if any(is_stale(row, record) for row in rows for record in by_row.get(row.id, [])):
        made += f"\n\n{STALE} Made with another configuration than the row now has."
    return made


def _columns(row: Row, records: Sequence[Record]) -> dict[str, str]:
    """A row's cells by the names of their columns."""
    metrics, headline = COLUMNS[row.task], TASKS[row.task].headline
    cells = {"T": str(row.length), "method": METHODS[row.method]}
    cells["reading"] = CONTROL if row.is_control else row.reading or NONE
    cells |= {"k_trunc": str(row.k_trunc or NONE), "k_top": str(row.k_top or NONE)}
    cells["k_att"] = str(row.k_att) if row.k_top else NONE
    cells |= {f"paper: {NAMES[metric]}": row.paper.get(metric, NONE) for metric in metrics}
    for metric in metrics:
        is_better = headline.higher_is_better and metric == headline.metric
        cells[f"here: {NAMES[metric]}"] = show_median(records, metric, is_better) if records else NOT_RUN
    took = dict.fromkeys(("each seed", "seeds", "iterations", "first solved", "wall time"), NONE)
    if records:
        took |= {"each seed": _each(row, records, headline.metric), "seeds": str(len(records))}
        took |= {"iterations": _iterations(records), "first solved": _solved(records), "wall time": _times(records)}
    return {**cells, **took, "against the paper": verdict(row, records)}


def _each(row: Row, records: Sequence[Record], metric: str) -> str:
    return ", ".join(
        show_each(record, metric, value_of(record, metric)) + (f" {STALE}" if is_stale(row, record) else "")
        for record in records
    )


def _iterations(records: Sequence[Record]) -> str:
    return ", ".join(f"{count:,}" for count in dict.fromkeys(record["iterations"] for record in records))


def _solved(records: Sequence[Record]) -> str:
    if all(record["solved_at"] is None for record in records):
        return "never"
    return ", ".join("never" if record["solved_at"] is None else f"{record['solved_at']:,}" for record in records)


def _times(records: Sequence[Record]) -> str:
    together = max(record.get("together", 1) for record in records)
    told = show_seconds(statistics.median(record["wall_time"] for record in records))
    return f"{told}, {together} at once" if together > 1 else told


def other_lengths_table(rows: Sequence[Row], by_row: ByRow) -> str:
    """The headline metric of models that are tested at other lengths than they were trained at."""
    headline = TASKS[rows[0].task].headline
    lengths = rows[0].other_lengths
    lines: list[list[str]] = []
    for row in rows:
        start = [f"{METHODS[row.method]}, {row.reading}", str(row.k_trunc), str(row.k_top)]
        cells: list[str] = []
        for length in (row.length or 0, *lengths):
            tested = [
                (record, metrics.get(headline.metric) if record["status"] != "diverged" else None)
                for record in by_row.get(row.id, [])
                if (metrics := _metrics_at(row, record, length)) is not None
            ]
            if not tested:
                cells.append(NOT_RUN)
                continue
            middle = median([value for _, value in tested], headline.higher_is_better)
            each = ", ".join(show_each(record, headline.metric, value) for record, value in tested)
            cells.append(f"**{'diverged' if middle is None else show(headline.metric, middle)}** ({each})")
        lines.append([*start, *cells])
    header = ["method", "k_trunc", "k_top", f"T={rows[0].length}, trained", *(f"T={length}" for length in lengths)]
    return markdown(header, lines)


def _metrics_at(row: Row, record: Record, length: int) -> dict[str, Any] | None:
    return record["metrics"] if length == row.length else record.get("other_lengths", {}).get(str(length))


# The pages


def page_part(by_row: ByRow, images: str) -> str:
    """The part of docs/results.md that is made from records; `images` is where the page finds the figures."""
    parts = [_about(by_row)]
    for task, longest in LONGEST_OF_THE_PAPER.items():
        rows = [row for row in ROWS.values() if row.task == task]
        for length in dict.fromkeys(row.length for row in rows if row.length and row.length <= longest):
            chosen = [row for row in rows if row.length == length]
            parts += [
                f"### {task.capitalize()}, T = {length}",
                _command(task, f"{task}-{length}-*"),
                table(chosen, by_row),
            ]
        if task == "copying" and any(row in by_row for row in CURVE_ROWS.values()):
            parts.append(f"![Learning curves of copying at T = 300]({images}/{CURVES})")
    parts += _beyond(by_row)
    parts += ["### What the model attends to while it learns", _command("copying", ATTENTION_ROW, "0")]
    if attention_record(by_row) is None:
        parts.append(f"The figure is {NOT_RUN.replace('run', 'made')} yet.")
    else:
        parts.append(f"![Attention at three moments of early training]({images}/{ATTENTION})")
        parts.append(
            "Copying, T = 200, k_trunc = k_top = 10, seed 0: attention weights of the marker's step and the ten that "
            "repeat the digits, averaged over a batch of validation data; grey is not kept yet. The digits are steps "
            "1 to 10. The paper's figure 3 shows the same after 400, 800 and 3,000 iterations."
        )
    return "\n\n".join(parts)


def _beyond(by_row: ByRow) -> list[str]:
    rows = [row for row in ROWS.values() if row.length and row.length > LONGEST_OF_THE_PAPER[row.task]]
    lengths = list(dict.fromkeys(row.length for row in rows))
    patterns = ",".join(f"copying-{length}-*" for length in lengths)
    told = f"### Beyond the paper: copying, T = {', '.join(map(str, lengths))}"
    tested = [row for row in ROWS.values() if row.other_lengths]
    return [
        *(told, _command("copying", patterns), table(rows, by_row)),
        "### Beyond the paper: trained at T = 100, tested longer",
        _command("copying", ",".join(row.id for row in tested)),
        "Accuracy on the last 10 in per cent with the same weights: the median, and each seed.",
        other_lengths_table(tested, by_row),
    ]


def _command(task: str, patterns: str, seeds: str = "0,1,2") -> str:
    return f"```\nsab reproduce {task} --rows '{patterns}' --seeds {seeds}\n```"


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


def attention_record(by_row: ByRow) -> Record | None:
    """The record that has the attention of some moments, if there is one."""
    return next(
        (record for record in by_row.get(ATTENTION_ROW, []) if record.get("attention", {}).get("moments")), None
    )


README = {
    "copying": {
        "LSTM, full BPTT": "copying-{}-bptt",
        "LSTM, full BPTT, our training": "copying-{}-bptt-ours",
        "LSTM, TBPTT, k_trunc = 10": "copying-{}-tbptt-10",
        "LSTM, TBPTT, k_trunc = 20": "copying-{}-tbptt-20",
        "SAB, k_trunc = k_top = 5": "copying-{}-sab-5-5-ours",
        "SAB, k_trunc = k_top = 10": "copying-{}-sab-10-10-ours",
    },
    "adding": {
        "LSTM, full BPTT": "adding-{}-bptt",
        "LSTM, TBPTT, k_trunc = 20": "adding-{}-tbptt-20",
        "LSTM, TBPTT, k_trunc = 100": "adding-{}-tbptt-100",
        "SAB, k_trunc = 5, k_top = 10": "adding-{}-sab-5-10-ours",
        "SAB, k_trunc = 10, k_top = 10": "adding-{}-sab-10-10-ours",
    },
}
"""What the README shows of each task: rows by what they are called there."""


def readme_part(by_row: ByRow) -> str:
    """The README's short tables."""
    parts: list[str] = []
    for task, names in README.items():
        headline = TASKS[task].headline
        longest = LONGEST_OF_THE_PAPER[task]
        lengths = [row.length for row in ROWS.values() if row.task == task and row.length and row.length <= longest]
        lengths = list(dict.fromkeys(lengths))
        lines = [[name, *(_brief(form.format(length), by_row) for length in lengths)] for name, form in names.items()]
        unit = " in per cent" if headline.metric.startswith("accuracy") else ""
        parts += [
            f"{task.capitalize()}: {headline.label}{unit}, the paper's / here, median (seeds); `sab reproduce {task}`:",
            markdown(["", *(f"T = {length}" for length in lengths)], lines),
        ]
    return "\n\n".join(parts)


def _brief(row_id: str, by_row: ByRow) -> str:
    row = ROWS.get(row_id)
    if row is None:
        return ""
    headline = TASKS[row.task].headline
    records = by_row.get(row.id, [])
    here = NOT_RUN
    if records:
        here = f"{show_median(records, headline.metric, headline.higher_is_better)} ({len(records)})"
    return f"{row.paper.get(headline.metric, NONE)} / {here}"
