"""The generated part of docs/drop-in.md: the tables of torch.nn's layers and SAB's, from results/dropin.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from sab.lab.experiments.dropin import CELLS, METHODS, PROBLEMS, DropInRow, Problem
from sab.lab.experiments.records import Record
from sab.lab.experiments.selection import is_stale
from sab.lab.report.numbers import NONE, NOT_RUN
from tools.groups import Group, about, chosen_group, group_of, show, title
from tools.pages import markdown

NAMES = {"torch": "torch.nn", "torch_start": "our start", "sab": "SAB"}
"""The methods in the tables; the page explains them."""


def page_part(records: Sequence[Record]) -> str:
    """All tables, those for an overview first."""
    records = [record for record in records if record["problem"] in PROBLEMS]
    if not records:
        return "Nothing has been run yet."
    done = [problem for name, problem in PROBLEMS.items() if any(record["problem"] == name for record in records)]
    synthetic, real = ([one for one in done if one.is_real == is_real] for is_real in (False, True))
    parts = [
        *_overview(synthetic, records),
        *_comparison(real, records),
        _finite(records),
        *(part for problem in done for part in _section(problem, records)),
        about(records, _is_stale),
    ]
    return "\n\n".join(parts)


def swap_part(records: Sequence[Record]) -> str:
    """A short table for readers in a hurry: each cell of `torch.nn` next to SAB's on real data, the better one bold."""
    lines = []
    for problem in (one for one in PROBLEMS.values() if one.is_real):
        line = [f"{title(problem)}, {problem.make_task().headline.label}"]
        for cell in problem.cells:
            groups = [_chosen(problem, cell, method, records) for method in ("torch", "sab")]
            values = [group.median if group else None for group in groups]
            shown = [
                show(problem, value, "not finite") if group else NOT_RUN
                for group, value in zip(groups, values, strict=True)
            ]
            if all(groups) and shown[0] != shown[1]:
                better = int(_reaches(problem, values[1], values[0]))
                shown[better] = f"**{shown[better]}**"
            line += shown
        lines.append(line)
    return markdown(["", "`nn.LSTM`", "`SABLSTM`", "`nn.GRU`", "`SABGRU`"], lines)


def _group(problem: Problem, cell: str, method: str, rate: float, records: Sequence[Record]) -> Group:
    return group_of(problem, {"cell": cell, "method": method}, rate, records)


def _pairs(problem: Problem) -> list[tuple[str, str]]:
    return [(cell, method) for cell in problem.cells for method in problem.methods]


def _overview(problems: Sequence[Problem], records: Sequence[Record]) -> list[str]:
    """At how many learning rates, of those that all seeds were run at, every seed solves a synthetic task."""
    if not problems:
        return []
    lines = []
    for cell in CELLS:
        for method in METHODS:
            cells = [_solved_rates(problem, cell, method, records) for problem in problems]
            lines.append([cell, NAMES[method], *cells])
    header = ["cell", "method", *(problem.name for problem in problems)]
    return ["### Learning rates at which every seed solves the task", markdown(header, lines)]


def _solved_rates(problem: Problem, cell: str, method: str, records: Sequence[Record]) -> str:
    groups = [_group(problem, cell, method, rate, records) for rate in problem.rates]
    complete = [group for group in groups if len(group.records) >= problem.seeds]
    return f"{sum(group.solved == len(group.records) for group in complete)} of {len(complete)}" if complete else NONE


def _comparison(problems: Sequence[Problem], records: Sequence[Record]) -> list[str]:
    """The medians of the methods on real data, each at its own best rate."""
    lines = []
    for problem in problems:
        for cell in problem.cells:
            groups = {method: _chosen(problem, cell, method, records) for method in METHODS}
            medians = {method: group.median if group else None for method, group in groups.items()}
            ours, theirs = medians["sab"], medians["torch"]
            verdict = NONE
            if groups["sab"] and groups["torch"]:  # a median that is not finite is worse than any number
                verdict = "equal" if ours == theirs else "yes" if _reaches(problem, ours, theirs) else "no"
            shown = [show(problem, medians[method], "not finite") if groups[method] else NOT_RUN for method in METHODS]
            lines.append([title(problem), cell, *shown, verdict])
    header = ["task", "cell", *(NAMES[method] for method in METHODS), "SAB better than torch.nn"]
    return ["### Real data: medians on test data", markdown(header, lines)] if lines else []


def _chosen(problem: Problem, cell: str, method: str, records: Sequence[Record]) -> Group | None:
    return chosen_group(problem, {"cell": cell, "method": method}, records)


def _reaches(problem: Problem, value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return other is None
    return problem.make_task().headline.reaches(value, other)


def _finite(records: Sequence[Record]) -> str:
    """How many runs of each method became non-finite, selection runs included."""
    counts = []
    for method in METHODS:
        runs = [record for record in records if record["method"] == method]
        counts.append(f"{NAMES[method]} {sum(not run['is_finite'] for run in runs)} of {len(runs)}")
    return f"Runs with a loss, gradient or metric that was not finite: {', '.join(counts)}."


def _section(problem: Problem, records: Sequence[Record]) -> list[str]:
    """A problem's table with its heading and what it shows."""
    headline = problem.make_task().headline
    whose = f"{headline.label.capitalize()} on test data, {problem.iterations:,} iterations, hidden size "
    whose += f"{problem.hidden_size}, batches of {problem.batch_size}; solved at {headline.show(headline.solved)}."
    if problem.is_real:
        return [f"### {title(problem)}", whose, _real_table(problem, records)]
    whose += " For each learning rate: median, worst seed, seeds that solve it."
    return [f"### {title(problem)}", whose, _synthetic_table(problem, records)]


def _synthetic_table(problem: Problem, records: Sequence[Record]) -> str:
    lines = []
    for cell, method in _pairs(problem):
        groups = [_group(problem, cell, method, rate, records) for rate in problem.rates]
        lines.append([cell, NAMES[method], *map(_cell, groups), *_costs(groups)])
    header = ["cell", "method", *(f"{rate:g}" for rate in problem.rates), "parameters", "seconds"]
    return markdown(header, lines)


def _cell(group: Group) -> str:
    if not group.records:
        return NOT_RUN
    shown = f"{show(group.problem, group.median)}, {show(group.problem, group.worst)}, "
    shown += f"{group.solved}/{len(group.records)}"
    return shown + (f", {group.not_finite} not finite" if group.not_finite else "")


def _real_table(problem: Problem, records: Sequence[Record]) -> str:
    lines = []
    for cell, method in _pairs(problem):
        group = _chosen(problem, cell, method, records)
        if group is None:
            lines.append([cell, NAMES[method], NOT_RUN, *[NONE] * 6])
            continue
        seeds = len(group.records)
        numbers = [show(problem, group.median), show(problem, group.worst), f"{group.records[0]['rate']:g}"]
        counts = [f"{group.solved}/{seeds}", f"{group.not_finite}/{seeds}"]
        lines.append([cell, NAMES[method], *numbers, *counts, *_costs([group])])
    header = ["cell", "method", "median", "worst", "rate", "solved", "not finite", "parameters", "seconds"]
    return markdown(header, lines)


def _costs(groups: Iterable[Group]) -> list[str]:
    """Parameters, and the median of the wall times in seconds."""
    found = [record for group in groups for record in group.records]
    if not found:
        return [NONE, NONE]
    return [f"{found[-1]['parameters']:,}", f"{statistics.median(record['wall_time'] for record in found):.0f}"]


def _is_stale(record: Record) -> bool:
    row = DropInRow(PROBLEMS[record["problem"]], record["cell"], record["method"], record["rate"])
    return is_stale(record, row)
