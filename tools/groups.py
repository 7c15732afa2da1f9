"""The reported runs of tables whose learning rates are chosen: what the pages of such tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sab.lab.experiments.records import Record
from sab.lab.experiments.selection import SELECTION_SEED, Problem, best_rate
from sab.lab.report.numbers import NONE, median, value_of
from sab.lab.tasks import Headline
from tools.pages import machines

SELECTION_SIGN = "§"
SELECTION_NOTE = (
    f"{SELECTION_SIGN} One run only, the one that chose the learning rate on validation data; the seeds that count "
    "have not been run."
)
TITLES = {"mnist": "Pixel-by-pixel MNIST", "ptb": "Penn Treebank", "imdb": "IMDB reviews", "ecg": "ECG"}
TITLES |= {"osuleaf": "OSULeaf", "plaid": "PLAID"}


class Group(NamedTuple):
    """The runs of a contender at one rate that a table shows: the records of the seeds that count, in their order, or
    of a selection run alone."""

    problem: Problem
    records: list[Record]

    @property
    def headline(self) -> Headline:
        return self.problem.make_task().headline

    @property
    def values(self) -> list[float | None]:
        """The final metric of each seed on test data; None where the run became non-finite."""
        return [value_of(record, self.headline.metric) for record in self.records]

    @property
    def median(self) -> float | None:
        return median(self.values, self.headline.higher_is_better)

    @property
    def worst(self) -> float | None:
        values = [value for value in self.values if value is not None]
        if len(values) < len(self.values):
            return None
        return min(values) if self.headline.higher_is_better else max(values)

    @property
    def solved(self) -> int:
        """How many seeds end at the task's threshold."""
        headline = self.headline
        return sum(value is not None and headline.reaches(value, headline.solved) for value in self.values)

    @property
    def not_finite(self) -> int:
        return sum(not record["is_finite"] for record in self.records)


def group_of(problem: Problem, contender: Mapping[str, Any], rate: float, records: Iterable[Record]) -> Group:
    """The reported runs of a row; `contender` are the entries of the records that it is known by."""
    wanted = {"problem": problem.name, **contender, "rate": rate}
    found = [one for one in records if one["seed"] != SELECTION_SEED and wanted.items() <= one.items()]
    return Group(problem, sorted(found, key=lambda record: record["seed"]))


def chosen_group(problem: Problem, contender: Mapping[str, Any], records: Iterable[Record]) -> Group | None:
    """The reported runs at the rate that the selection runs choose, if there are any."""
    records = list(records)
    selected = _selection_runs(problem, contender, records)
    group = group_of(problem, contender, best_rate(selected, problem), records) if selected else None
    return group if group is not None and group.records else None


def shown_group(problem: Problem, contender: Mapping[str, Any], records: Iterable[Record]) -> tuple[Group | None, str]:
    """The runs that a table shows, and the sign behind their median.

    They are the reported runs, without a sign. Where there are none, it is the selection run whose rate is chosen; that
    is not known before every rate has one.
    """
    records = list(records)
    group = chosen_group(problem, contender, records)
    selected = _selection_runs(problem, contender, records)
    if group is not None or not selected.keys() >= set(problem.rates):
        return group, ""
    return Group(problem, [selected[best_rate(selected, problem)]]), f" {SELECTION_SIGN}"


def selection_notes(lines: Iterable[Sequence[str]]) -> list[str]:
    """The note on the sign, where a cell of a table has it."""
    return [SELECTION_NOTE] if any(SELECTION_SIGN in cell for line in lines for cell in line) else []


def _selection_runs(problem: Problem, contender: Mapping[str, Any], records: Iterable[Record]) -> dict[float, Record]:
    """The selection runs by their rates."""
    wanted = {"problem": problem.name, **contender, "seed": SELECTION_SEED}
    return {record["rate"]: record for record in records if wanted.items() <= record.items()}


def show(problem: Problem, value: float | None, missing: str = NONE) -> str:
    return missing if value is None else problem.make_task().headline.show(value)


def title(problem: Problem) -> str:
    name, _, length = problem.name.partition("-")
    return TITLES.get(problem.name, f"{name.capitalize()}, T = {length}")


def about(records: Sequence[Record], is_stale: Callable[[Record], bool]) -> str:
    """Where the numbers come from, and whether some were made otherwise than the table now is."""
    lines = machines(records, lambda device, group: f"{device}: {len(group)} run{'s' * (len(group) > 1)};")
    stale = sum(map(is_stale, records))
    note = [f"{stale} records were made with another configuration than the table now has."] if stale else []
    return "\n".join(["### Where it was run", "", *lines, *(["", *note] if note else [])])
