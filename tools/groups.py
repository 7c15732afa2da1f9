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
    f"{SELECTION_SIGN} Of the selection run at the best of three rates by its validation data: the seeds that count "
    "are not run."
)
TITLES = {"mnist": "Pixel-by-pixel MNIST", "ptb": "Penn Treebank", "imdb": "IMDB reviews", "ecg": "ECG"}
TITLES |= {"osuleaf": "OSULeaf", "plaid": "PLAID"}


class Group(NamedTuple):
    """The reported runs of a contender at one rate: their records in the order of the seeds."""

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


def best_selection_run(problem: Problem, contender: Mapping[str, Any], records: Iterable[Record]) -> Group | None:
    """The selection run whose rate is chosen, as a group of its own; None where not all rates have one."""
    selected = _selection_runs(problem, contender, records)
    if selected.keys() < set(problem.rates):
        return None
    return Group(problem, [selected[best_rate(selected, problem)]])


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
