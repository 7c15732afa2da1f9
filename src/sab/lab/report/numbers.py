"""A row's numbers from its records: medians over its seeds, compared with the paper and with other rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from sab.lab.experiments.records import Record, is_stale, other_memory
from sab.lab.experiments.tables import FULL_BUDGET, ROWS, Row
from sab.lab.rivals import RIVALS
from sab.lab.tasks import TASKS, CharacterTask, Headline
from sab.lab.training.progress import show_seconds

ByRow = Mapping[str, list[Record]]
"""Records by their row's id, a row's in the order of the seeds."""
NONE = "–"
"""A cell without a value."""
NOT_RUN = "not run"
STALE = "†"
STALE_NOTE = f"{STALE} Made with another configuration than the row now has."
OTHER_MEMORY = "‡"
OTHER_MEMORY_NOTE = f"{OTHER_MEMORY} Recorded with an earlier memory."
REACHED, PARTLY, MISSED = "reached", "partly", "missed"
"""A verdict in a word: every seed, some or none reach the paper."""
METHODS = {
    "bptt": "LSTM, full BPTT",
    "tbptt": "LSTM, TBPTT",
    "sab": "SAB",
    "torch": "torch.nn",
    "torch_start": "torch.nn, our start",
    **{method: rival.title for method, rival in RIVALS.items()},
    "chrono": "LSTM, full BPTT, chrono start",
}
SELF_ATTENTION = "LSTM, full self-attention"
CONTROL = "our training, no memory"
DECIMALS = {
    "accuracy_last10": 1,
    "cross_entropy_last10": 3,
    "cross_entropy": 3,
    "mse": 5,
    "bits_per_character": 3,
    "bits_per_character_carried": 3,
    "accuracy": 2,
}


def value_of(record: Record, metric: str, split: str = "test") -> float | None:
    """A final metric; None where it is not finite, or where the run diverged and had no weights that it kept."""
    if record["status"] == "diverged" and record.get("best_at") is None:
        return None
    return (record["metrics"] if split == "test" else record.get(split, {})).get(metric)


def show(metric: str, value: float) -> str:
    """A metric as the tables have it: accuracies in per cent."""
    return f"{scaled(metric, value):.{DECIMALS[metric]}f}"


def scaled(metric: str, value: float) -> float:
    """A metric in the paper's unit."""
    return 100 * value if metric.startswith("accuracy") else value


def label(headline: Headline) -> str:
    """What the tables call a task's metric."""
    return f"{headline.label} in per cent" if headline.metric.startswith("accuracy") else headline.label


def show_each(record: Record, values: Mapping[str, float | None]) -> str:
    """A seed's numbers by their metrics, or why there are none."""
    values_shown = " / ".join(
        "not finite" if value is None else show(metric, value) for metric, value in values.items()
    )
    if record["status"] != "diverged":
        return values_shown
    diverged = f"diverged at iteration {record['iterations'] + 1}"
    return diverged if None in values.values() else f"{values_shown} ({diverged})"


def median(values: Sequence[float | None], higher_is_better: bool) -> float | None:
    """The median, in which no value (the run diverged) is worse than any; None where it falls on such a one."""
    if not values:
        return None
    ranked: list[float | None] = [value for value in values if value is not None]
    ranked.sort(reverse=higher_is_better)  # pyright: ignore[reportCallIssue, reportArgumentType]
    ranked += [None] * (len(values) - len(ranked))
    middle = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    return None if None in middle else statistics.fmean(value for value in middle if value is not None)


def median_of(records: Sequence[Record], metric: str, higher_is_better: bool, split: str = "test") -> float | None:
    """The median of a metric over seeds."""
    return median([value_of(record, metric, split) for record in records], higher_is_better)


def show_median(records: Sequence[Record], metric: str, higher_is_better: bool, split: str = "test") -> str:
    """The same as the tables have it."""
    value = median_of(records, metric, higher_is_better, split)
    if value is not None:
        return show(metric, value)
    return "diverged" if any(record["status"] == "diverged" for record in records) else NONE


def show_times(records: Sequence[Record]) -> str:
    """What a run took, and how many ran at once."""
    together = max(record.get("together", 1) for record in records)
    seconds = show_seconds(statistics.median(record["wall_time"] for record in records))
    return f"{seconds}, {together} at once" if together > 1 else seconds


def footnotes(rows: Sequence[Row], by_row: ByRow) -> list[str]:
    """What the marks behind numbers in a table of these rows mean, a sentence for each mark that is there."""
    found = [(row, record) for row in rows for record in by_row.get(row.id, [])]
    marks = {mark(row, record).strip() for row, record in found}
    notes = [STALE_NOTE] if STALE in marks else []
    memories = dict.fromkeys(memory for row, record in found if (memory := other_memory(row, record)))
    if memories:
        notes.append(f"{OTHER_MEMORY} Recorded with the memory of its time: {'; '.join(memories)}.")
    return notes


def notes_on(lines: Sequence[Sequence[str]]) -> list[str]:
    """The same for the cells of a table, without the names of the memories."""
    notes = {STALE: STALE_NOTE, OTHER_MEMORY: OTHER_MEMORY_NOTE}
    return [note for sign, note in notes.items() if any(sign in cell for line in lines for cell in line)]


def method_name(row: Row) -> str:
    """What a row's method is called."""
    return SELF_ATTENTION if row.reads_all else METHODS[row.method]


def own_training(row: Row) -> list[str]:
    """What of a row's training is its own, in a few words each."""
    words = [f"{FULL_BUDGET:,} iterations"] if row.is_full_budget else []
    words += ["falling rate"] if "lr_decay" in row.overrides else []
    words += [f"clip {row.overrides['clip']:g}"] if "clip" in row.overrides else []
    words += ["state carried"] if row.is_carried else []
    return words


def memory_cells(row: Row) -> dict[str, str]:
    """The cells that describe a row's method, by column."""
    reading = CONTROL if row.is_control else row.reading
    return {
        "method": method_name(row),
        "reading": ", ".join([*([reading] if reading else []), *own_training(row)]) or NONE,
        "k_trunc": str(row.k_trunc or NONE),
        "k_top": str(row.k_top or NONE),
        "k_att": str(row.k_att) if row.k_top else NONE,
    }


def mark(row: Row, record: Record) -> str:
    """What goes behind a number of a record that was made with another memory or configuration than the row's."""
    if other_memory(row, record) is not None:
        return f" {OTHER_MEMORY}"
    return f" {STALE}" if is_stale(row, record) else ""


# Comparisons


def measures(task: str) -> dict[str, str]:
    """The metrics that a task is judged by, by what they are called where there are several."""
    metric = TASKS[task].headline.metric
    if issubclass(TASKS[task], CharacterTask):
        return {"fresh": metric, "carried": f"{metric}_carried"}
    return {"": metric}


def is_reached(headline: Headline, printed: str, value: float | None) -> bool:
    """Whether a value, rounded as the paper rounds its own, is at least as good as that."""
    decimals = len(printed.partition(".")[2])
    if value is None:
        return False
    return headline.reaches(round(scaled(headline.metric, value), decimals), float(printed))


def verdict(row: Row, records: Sequence[Record]) -> str:
    """Whether the seeds reach what the paper has, in each way that the task is judged by."""
    if not row.paper or not records:
        return NONE
    verdicts = {name: _verdict(row, records, metric) for name, metric in measures(row.task).items()}
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    reached = [name for name, one in verdicts.items() if one.startswith("reached")]
    if len(reached) == 1:
        return f"{verdicts[reached[0]]} ({reached[0]} only)"
    return "; ".join(f"{name}: {one}" for name, one in verdicts.items())


def verdict_word(row: Row, records: Sequence[Record]) -> str:
    """The same in a word."""
    given = verdict(row, records)
    if given in (NONE, "reached"):
        return given
    if given == "reached by the one seed":
        return REACHED
    return PARTLY if "reached by" in given or "only" in given else MISSED


def _verdict(row: Row, records: Sequence[Record], metric: str) -> str:
    headline = TASKS[row.task].headline
    values = [value_of(record, metric) for record in records]
    reached = sum(is_reached(headline, row.paper[row.judged], value) for value in values)
    if reached == len(values):
        return "reached" if len(values) > 1 else "reached by the one seed"
    if reached:
        return f"reached by {reached} of {len(values)} seeds"
    if None in values and all(value is None for value in values):
        return "not reached: diverged"
    return "below" if headline.higher_is_better else "above"


def against_truncation(row: Row, by_row: ByRow) -> str:
    """Whether SAB's median is better than that of our rows without a memory that are cut as often."""
    if row.method != "sab" or not by_row.get(row.id):
        return NONE
    comparisons = [_against(row, other, by_row) for other in ROWS.values() if _is_without_memory(row, other)]
    return "; ".join(comparisons) or NONE


def _is_without_memory(row: Row, other: Row) -> bool:
    """Whether the other row is this one without its memory, trained in whichever way."""
    same = all(getattr(row, name) == getattr(other, name) for name in ("task", "length", "k_trunc", "cell", "options"))
    return same and other.method == "tbptt"


def _against(row: Row, other: Row, by_row: ByRow) -> str:
    training = "our training" if other.is_control else "the paper's training"
    records = by_row.get(other.id)
    if not records:
        return f"{NOT_RUN} ({training})"
    higher = TASKS[row.task].headline.higher_is_better
    ways = measures(row.task)
    better = [
        name
        for name, metric in ways.items()
        if _is_better(median_of(by_row[row.id], metric, higher), median_of(records, metric, higher), higher)
    ]
    answer = "no" if not better else "yes" if len(better) == len(ways) else f"{better[0]} only"
    values = " / ".join(show_median(records, metric, higher) for metric in ways.values())
    return f"{answer} ({values}, {training})"


def _is_better(value: float | None, other: float | None, higher_is_better: bool) -> bool:
    if value is None or other is None:
        return value is not None
    return value > other if higher_is_better else value < other
