"""Tables in which learning rates are chosen by selection runs: from a seed of their own, on validation data.

The rate that is best there is then trained from the seeds that count. A problem may also have every rate trained from
every seed, and chooses none.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from sab.errors import UserValueError, check_int
from sab.lab.experiments import records
from sab.lab.experiments.records import Record
from sab.lab.experiments.reproduce import (
    TOGETHER,
    Job,
    Outcome,
    Runner,
    deadline_after,
    make_folders,
    plan_of,
    reading_from,
    run_plan,
)
from sab.lab.models import ModelConfig
from sab.lab.stored import first_mismatch
from sab.lab.tasks import TASKS, StoredTask, Task
from sab.lab.training import RunConfig, TrainConfig
from sab.lab.training.config import resolve_device
from sab.lab.training.loop import check_seeds
from sab.lab.training.run import Run

RATES = (5e-4, 2e-3, 8e-3)
SELECTION_SEED = 1000
"""The seed of the runs that choose a learning rate; tables show it only with a §, where no other seed was run."""
ENTRIES = {
    "problem": str,
    "rate": float,
    "parameters": int,
    "is_finite": bool,
    "best": float | None,
    "valid": records.Metrics,
    "best_at": int | None,
}
"""Entries that every record of such a table has, besides those of all records. `is_finite`: whether every loss,
gradient and metric was; `best`: the best headline metric of an evaluation, on validation data."""


@dataclass(frozen=True)
class Problem:
    """A task of a table, and how all methods are trained on it."""

    name: str
    """Its name on the command line, in row ids and in records."""
    task: str
    """The task's name in the registry."""
    iterations: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task."""
    rates: tuple[float, ...] = RATES
    seeds: int = 3
    """How many seeds count: 0, 1, 2, …"""
    hidden_size: int = 128
    batch_size: int = 64
    eval_every: int = 250
    other_lengths: tuple[int, ...] = ()
    """Further lengths that the trained models are tested at."""

    def make_task(self) -> Task:
        return TASKS[self.task](**self.options)

    @property
    def is_real(self) -> bool:
        """Whether its data are real: then the best weights are kept."""
        return issubclass(TASKS[self.task], StoredTask)

    @property
    def chooses_rate(self) -> bool:
        """Whether the learning rate is chosen by selection runs."""
        return self.is_real


class Row(ABC):
    """A contender at a learning rate on a problem."""

    problem: Any
    """A `Problem` of the table's own kind."""
    rate: float
    task: str
    """The file of the records; the task itself is the problem's."""
    moments: tuple[int, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """The contender's part of the row's id."""

    @property
    @abstractmethod
    def entries(self) -> Record:
        """What a record has to know the contender by."""

    @abstractmethod
    def model(self) -> ModelConfig: ...

    @property
    def weight(self) -> int:
        """How much longer a step takes than that of a plain layer, roughly."""
        return 1

    @property
    def id(self) -> str:
        """Stable row id; never change it."""
        return f"{self.problem.name}-{self.name}-{self.rate:g}"

    @property
    def other_lengths(self) -> tuple[int, ...]:
        return self.problem.other_lengths

    def config(
        self, seed: int, iterations: int | None = None, device: str = "auto", threads: int | None = None
    ) -> RunConfig:
        """The run from a seed: Adam at a constant rate, clip 1."""
        problem: Problem = self.problem
        training = TrainConfig(
            iterations=problem.iterations if iterations is None else iterations,
            batch_size=problem.batch_size,
            lr=self.rate,
            clip=1.0,
            seed=seed,
            device=device,  # pyright: ignore[reportArgumentType]
            threads=threads,
            eval_every=problem.eval_every,
            eval_batches=None if problem.is_real else 10,
            checkpoint_every=2_000,
            keep="best" if problem.is_real else "last",
            on_nan="stop",
        )
        return RunConfig(problem.make_task(), self.model(), training)


Contender = Callable[[float], Row]
"""The row at each learning rate."""


@dataclass(frozen=True)
class Unit:
    """A run of a table; without a rate it has the one that the selection runs choose."""

    row: Contender
    rate: float | None
    seed: int

    @property
    def problem(self) -> Problem:
        return self._any_row.problem

    @property
    def label(self) -> str:
        rate = "chosen rate" if self.rate is None else f"{self.rate:g}"
        return f"{self.problem.name}-{self._any_row.name}-{rate} seed {self.seed}"

    @property
    def cost(self) -> int:
        """What the run takes, roughly."""
        steps = self.problem.iterations * self.problem.make_task().steps
        return steps * self._any_row.weight * self.problem.hidden_size

    @property
    def _any_row(self) -> Row:
        return self.row(self.rate or 0.0)


@dataclass(frozen=True)
class Table:
    """A table's problems and records."""

    file: str
    """The records are in results/<file>.jsonl."""
    title: str
    problems: dict[str, Any]
    """Every problem by its name, in the order of the tables."""
    entries: dict[str, Any]
    """Entries that every record has, besides those of all records."""


@dataclass(frozen=True)
class Part(ABC):
    """A part of a table; what is not given is not restricted."""

    tasks: tuple[str, ...] = ()
    """Names of problems, or patterns of them as for files."""
    rates: tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None
    """The seeds that count, instead of the table's; selection runs have their own."""
    slice: str | None = None
    """`i/n`: every n-th run from the i-th on, counted from 1, so that n processes share the table."""

    table: ClassVar[Table]

    def __post_init__(self) -> None:
        for rate in self.rates or ():
            if rate not in RATES:
                allowed = ", ".join(f"{one:g}" for one in RATES)
                raise UserValueError(f"rates must be of {allowed}; got {rate:g}.", "rates")
        if self.seeds is not None and SELECTION_SEED in check_seeds(self.seeds):
            raise UserValueError(f"seeds must not have {SELECTION_SEED}, the seed of the selection runs.", "seeds")
        self.stride()

    @abstractmethod
    def contenders(self, problem: Any) -> Iterable[Contender]:
        """The contenders of a problem that this part has."""

    def problems(self) -> list[Any]:
        """The problems in the table's order."""
        chosen: set[str] = set()
        known = self.table.problems
        for pattern in self.tasks or ("*",):
            matching = fnmatch.filter(known, pattern)
            if not matching:
                raise UserValueError(f"task must be one of {', '.join(known)}; got {pattern!r}.", "task")
            chosen.update(matching)
        return [problem for name, problem in known.items() if name in chosen]

    def stride(self) -> slice:
        """The places of this slice's runs."""
        if self.slice is None:
            return slice(None)
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.slice)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserValueError(f"slice must be i/n with i from 1 to n, as in 2/16; got {self.slice!r}.", "slice")
        return slice(int(found[1]) - 1, None, int(found[2]))

    def rates_of(self, problem: Problem) -> tuple[float, ...]:
        return tuple(rate for rate in problem.rates if self.rates is None or rate in self.rates)

    def units(self) -> tuple[list[Unit], list[Unit]]:
        """The runs with a known rate, and those whose rate is to be chosen; each in the order of this part's slices."""
        fixed: list[Unit] = []
        chosen: list[Unit] = []
        for problem in self.problems():
            seeds = range(problem.seeds) if self.seeds is None else self.seeds
            rates = self.rates_of(problem)
            for contender in self.contenders(problem):
                of_rates = (SELECTION_SEED,) if problem.chooses_rate else seeds
                fixed += [Unit(contender, rate, seed) for rate in rates for seed in of_rates]
                if problem.chooses_rate and rates:
                    chosen += [Unit(contender, None, seed) for seed in seeds]
        for units in (fixed, chosen):  # so that slices take about the same time
            units.sort(key=lambda unit: -unit.cost)
        return fixed[self.stride()], chosen[self.stride()]


@dataclass
class TableOutcome:
    """What a call came to."""

    total: int
    """How many runs the part has."""
    outcome: Outcome
    undecided: list[str] = field(default_factory=list)
    """The runs whose rate is not chosen yet, since selection runs are missing."""

    @property
    def left(self) -> list[str]:
        """The runs that are not at their end."""
        return [*(job.label for job in self.outcome.left), *self.undecided]


def train_part(
    part: Part,
    out: Path,
    results: Path,
    minutes: float | None = None,
    iterations: int | None = None,
    device: str = "auto",
    together: int | None = None,
    threads: int | None = None,
    commit: str | None = None,
    data_dir: Path | None = None,
    console: Console | None = None,
    runner_type: type[TableRunner] | None = None,
) -> TableOutcome:
    """Trains the runs of a part of a table that are not recorded yet, and records them.

    A run whose rate is to be chosen waits for the records of all its selection runs, which other processes may make:
    where some are missing at the end, the same call later goes on. The rest is as in `reproduce`.
    """
    where = resolve_device(device)
    together = TOGETHER[where.type] if together is None else check_int("together", together, 1)
    check_int("iterations", iterations, 1, optional=True)
    deadline = deadline_after(minutes)
    fixed, chosen = part.units()
    if not fixed and part.slice is None:  # a slice of few runs may be empty
        raise UserValueError("task must have a run in this part of the table; none has.", "task")

    def make_job(unit: Unit, rate: float) -> Job:
        config = unit.row(rate).config(unit.seed, iterations, device, threads)
        return Job(unit.row(rate), reading_from(data_dir, config), out)

    def run(jobs: Sequence[Job], made: Outcome) -> None:
        known = load(part.table, results)
        jobs = [job for job in jobs if recorded(known, job.row, job.config) is None]
        if not jobs or made.was_interrupted:
            made.left += jobs
            return
        plan = plan_of(jobs, sorted({job.seed for job in jobs}), deadline)
        make_folders(results, out)
        outcome = run_plan(plan, results, where, together, commit, console or Console(), runner_type or TableRunner)
        made.recorded += outcome.recorded
        made.failed |= outcome.failed
        made.left += outcome.left
        made.was_interrupted = outcome.was_interrupted

    outcome = Outcome()
    run([make_job(unit, unit.rate) for unit in fixed if unit.rate is not None], outcome)
    known = load(part.table, results)
    rates = [(unit, choose_rate(unit, part.rates_of(unit.problem), known, iterations)) for unit in chosen]
    run([make_job(unit, rate) for unit, rate in rates if rate is not None], outcome)
    undecided = [unit.label for unit, rate in rates if rate is None]
    return TableOutcome(len(fixed) + len(chosen), outcome, undecided)


class TableRunner(Runner):
    """The runner, with what the records of such a table have besides."""

    def _make(self, job: Job, run: Run) -> Record:
        record = super()._make(job, run)
        row, config, headline = job.row, run.config, run.config.task.headline
        assert isinstance(row, Row)
        found = [line["metrics"][headline.metric] for line in run.evaluations()]
        values = [value for value in found if value is not None]
        final = (*record["metrics"].values(), *record["valid"].values())
        if isinstance(config.task, StoredTask):
            record["epochs"] = record["iterations"] / config.task.batches_per_epoch(config.training.batch_size)
        return record | {
            "problem": row.problem.name,
            **row.entries,
            "rate": row.rate,
            "parameters": count_parameters(config),
            "is_finite": record["status"] != "diverged" and None not in (*found, *final),
            "best": max(values, key=lambda value: value if headline.higher_is_better else -value, default=None),
        }


def count_parameters(config: RunConfig) -> int:
    """How many parameters the model of a run has."""
    nowhere = torch.device("meta")
    with nowhere:
        return sum(parameter.numel() for parameter in config.build_model(nowhere).parameters())


# Records


def load(table: Table, results: Path) -> list[Record]:
    """The records of a table, the newest of each row and seed: files of several machines may be joined."""
    path = records.path_of(table.file, results)
    newest: dict[tuple[str, int], Record] = {}
    for number, record in enumerate(records.load(table.file, results), start=1):
        if not record.keys() >= table.entries.keys() or first_mismatch(record, table.entries) is not None:
            raise records.invalid_file(path, f"line {number} is no record of {table.title}")
        key = record["row"], record["seed"]
        if key not in newest or record["date"] >= newest[key]["date"]:
            newest[key] = record
    return list(newest.values())


def recorded(known: Iterable[Record], row: records.TableRow, config: RunConfig) -> Record | None:
    """The record of this very run, if there is one."""
    for record in known:
        if (record["row"], record["seed"]) == (row.id, config.training.seed):
            other = records.config_of(record)
            if other is None or other.training.iterations != config.training.iterations:
                continue
            if other.difference(config) is None:
                return record
    return None


def recorded_from(known: Iterable[Record], row: Row, seed: int, iterations: int | None = None) -> Record | None:
    """The record of a row's run from a seed; the row is configured only where there is one to compare with."""
    those = [record for record in known if (record["row"], record["seed"]) == (row.id, seed)]
    return recorded(those, row, row.config(seed, iterations)) if those else None


def is_stale(record: Record, row: Row) -> bool:
    """Whether a record was made with another configuration than its row now has."""
    return recorded_from([record], row, record["seed"]) is None


def choose_rate(
    unit: Unit, rates: Sequence[float], known: Sequence[Record], iterations: int | None = None
) -> float | None:
    """The rate whose selection run is best on validation data; None where one of these runs is not recorded."""
    selected: dict[float, Record] = {}
    for rate in rates:
        record = recorded_from(known, unit.row(rate), SELECTION_SEED, iterations)
        if record is None:
            return None
        selected[rate] = record
    return best_rate(selected, unit.problem)


def best_rate(selected: Mapping[float, Record], problem: Problem) -> float:
    """The best of the rates by the validation data of their runs; the lowest among equals.

    A run without a finite value is worse than any.
    """
    headline = problem.make_task().headline

    def loss(rate: float) -> float:
        record = selected[rate]
        value = record["valid"].get(headline.metric)
        if value is None or (record["status"] == "diverged" and record["best_at"] is None):
            return inf
        return -value if headline.higher_is_better else value

    return min(sorted(selected), key=loss)


def states(part: Part, results: Path, iterations: int | None = None) -> dict[str, str]:
    """What every run of a part is, by its label: `recorded`, `left`, or `rate not chosen`."""
    known = load(part.table, results)
    found: dict[str, str] = {}
    for unit in (unit for units in part.units() for unit in units):
        rate = unit.rate or choose_rate(unit, part.rates_of(unit.problem), known, iterations)
        if rate is None:
            found[unit.label] = "rate not chosen"
            continue
        row = unit.row(rate)
        is_recorded = recorded_from(known, row, unit.seed, iterations) is not None
        found[f"{row.id} seed {unit.seed}"] = "recorded" if is_recorded else "left"
    return found
