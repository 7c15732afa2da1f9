"""The drop-in table: torch.nn's layers and the SAB layers with default options, all trained alike.

On the synthetic tasks every learning rate is trained from every seed. On real data a selection run of each rate, from a
seed of its own, comes first; the rate that is best on its validation data is then trained from the seeds that count.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from sab.errors import UserValueError, check_choice, check_int
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
from sab.lab.models import Method, ModelConfig
from sab.lab.stored import first_mismatch
from sab.lab.tasks import TASKS, StoredTask, Task
from sab.lab.training import RunConfig, TrainConfig
from sab.lab.training.config import resolve_device
from sab.lab.training.loop import check_seeds
from sab.lab.training.run import Run

FILE = "dropin"
"""The records are in results/dropin.jsonl."""
METHODS: tuple[Method, ...] = ("torch", "torch_start", "sab")
CELLS = ("lstm", "gru", "rnn_tanh")
RATES = (5e-4, 2e-3, 8e-3)
SELECTION_SEED = 1000
"""The seed of the runs that choose a learning rate; it is never reported."""
ENTRIES = {
    "problem": str,
    "cell": Literal[CELLS],
    "method": Literal[METHODS],
    "rate": float,
    "parameters": int,
    "is_finite": bool,
    "best": float | None,
    "valid": records.Metrics,
    "best_at": int | None,
}
"""Entries that every record of this table has, besides those of all records. `is_finite`: whether every loss, gradient
and metric was; `best`: the best headline metric of an evaluation, on validation data."""


@dataclass(frozen=True)
class Problem:
    """A task of the table, and how all methods are trained on it."""

    name: str
    """Its name on the command line, in row ids and in records."""
    task: str
    """The task's name in the registry."""
    iterations: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task."""
    cells: tuple[str, ...] = CELLS
    methods: tuple[Method, ...] = METHODS
    rates: tuple[float, ...] = RATES
    seeds: int = 3
    """How many seeds count: 0, 1, 2, …"""
    hidden_size: int = 128
    batch_size: int = 64
    eval_every: int = 250

    def make_task(self) -> Task:
        return TASKS[self.task](**self.options)

    @property
    def is_real(self) -> bool:
        """Whether its data are real: then the rate is chosen on validation data, and the best weights are kept."""
        return issubclass(TASKS[self.task], StoredTask)


def _real(name: str, task: str, iterations: int, eval_every: int, **changed: Any) -> Problem:
    """A problem on real data; `eval_every` is an epoch, or a few for the small series."""
    return Problem(name, task, iterations, cells=("lstm", "gru"), eval_every=eval_every, **changed)


def _alone(name: str, task: str, length: int) -> Problem:
    """A longer problem for SAB alone, at one rate."""
    return Problem(name, task, 6_000, {"length": length}, methods=("sab",), rates=(2e-3,))


_ALL = (
    Problem("copying-100", "copying", 6_000, {"length": 100}),
    Problem("adding-200", "adding", 6_000, {"length": 200}),
    Problem("recall-200", "recall", 6_000, {"length": 200}),
    _alone("copying-300", "copying", 300),
    _alone("adding-400", "adding", 400),
    _real("mnist", "mnist", 5 * 781, 781),
    _real("ptb", "ptb", 2 * 783, 783, hidden_size=256),
    _real("osuleaf", "series", 1_000, 50, options={"dataset": "osuleaf"}, batch_size=32, seeds=5),
    _real("plaid", "series", 1_000, 50, options={"dataset": "plaid"}, batch_size=32, seeds=5),
    _real("ecg", "ecg", 1_000, 50, batch_size=32, seeds=5),
    _real("imdb", "imdb", 2 * 310, 310),
)
PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in _ALL if problem.task in TASKS}
"""Every problem by its name, in the order of the tables."""


@dataclass(frozen=True)
class DropInRow:
    """A method with a cell and a learning rate on a problem."""

    problem: Problem
    cell: str
    method: Method
    rate: float

    task: str = field(default=FILE, init=False)
    """The file of the records; the task itself is the problem's."""
    other_lengths: tuple[int, ...] = field(default=(), init=False)
    moments: tuple[int, ...] = field(default=(), init=False)

    @property
    def id(self) -> str:
        """Stable row id; never change it."""
        return f"{self.problem.name}-{self.cell}-{self.method}-{self.rate:g}"

    def config(
        self, seed: int, iterations: int | None = None, device: str = "auto", threads: int | None = None
    ) -> RunConfig:
        """The run from a seed: default options of the layer, Adam at a constant rate, clip 1."""
        problem = self.problem
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
        model = ModelConfig(method=self.method, cell=self.cell, hidden_size=problem.hidden_size)
        return RunConfig(problem.make_task(), model, training)


@dataclass(frozen=True)
class Unit:
    """A run of the table; without a rate it has the one that the selection runs choose."""

    problem: Problem
    cell: str
    method: Method
    rate: float | None
    seed: int

    @property
    def label(self) -> str:
        rate = "chosen rate" if self.rate is None else f"{self.rate:g}"
        return f"{self.problem.name}-{self.cell}-{self.method}-{rate} seed {self.seed}"

    @property
    def cost(self) -> int:
        """What the run takes, roughly."""
        steps = self.problem.iterations * self.problem.make_task().steps
        return steps * (3 if self.method == "sab" else 1) * self.problem.hidden_size

    def row(self, rate: float) -> DropInRow:
        return DropInRow(self.problem, self.cell, self.method, rate)


@dataclass(frozen=True)
class Part:
    """A part of the table; what is not given is not restricted."""

    tasks: tuple[str, ...] = ()
    """Names of problems, or patterns of them as for files."""
    cells: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    rates: tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None
    """The seeds that count, instead of the table's; selection runs have their own."""
    slice: str | None = None
    """`i/n`: every n-th run from the i-th on, counted from 1, so that n processes share the table."""

    def __post_init__(self) -> None:
        for cell in self.cells or ():
            check_choice("cells", cell, CELLS)
        for method in self.methods or ():
            check_choice("methods", method, METHODS)
        for rate in self.rates or ():
            if rate not in RATES:
                allowed = ", ".join(f"{one:g}" for one in RATES)
                raise UserValueError(f"rates must be of {allowed}; got {rate:g}.", "rates")
        if self.seeds is not None and SELECTION_SEED in check_seeds(self.seeds):
            raise UserValueError(f"seeds must not have {SELECTION_SEED}, the seed of the selection runs.", "seeds")
        self.stride()

    def problems(self) -> list[Problem]:
        """The problems in the table's order."""
        chosen: set[str] = set()
        for pattern in self.tasks or ("*",):
            matching = fnmatch.filter(PROBLEMS, pattern)
            if not matching:
                raise UserValueError(f"task must be one of {', '.join(PROBLEMS)}; got {pattern!r}.", "task")
            chosen.update(matching)
        return [problem for name, problem in PROBLEMS.items() if name in chosen]

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

    def _has(self, cell: str, method: str) -> bool:
        return (self.cells is None or cell in self.cells) and (self.methods is None or method in self.methods)

    def units(self) -> tuple[list[Unit], list[Unit]]:
        """The runs with a known rate, and those whose rate is to be chosen; each in the order of this part's slices."""
        fixed: list[Unit] = []
        chosen: list[Unit] = []
        for problem in self.problems():
            seeds = range(problem.seeds) if self.seeds is None else self.seeds
            rates = self.rates_of(problem)
            for cell in problem.cells:
                for method in problem.methods:
                    if not self._has(cell, method):
                        continue
                    of_rates = (SELECTION_SEED,) if problem.is_real else seeds
                    fixed += [Unit(problem, cell, method, rate, seed) for rate in rates for seed in of_rates]
                    if problem.is_real and rates:
                        chosen += [Unit(problem, cell, method, None, seed) for seed in seeds]
        for units in (fixed, chosen):  # so that slices take about the same time
            units.sort(key=lambda unit: -unit.cost)
        return fixed[self.stride()], chosen[self.stride()]


@dataclass
class DropInOutcome:
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


def drop_in(
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
) -> DropInOutcome:
    """Trains the runs of a part of the table that are not recorded yet, and records them.

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
        known = load(results)
        jobs = [job for job in jobs if recorded(known, job.row, job.config) is None]
        if not jobs or made.was_interrupted:
            made.left += jobs
            return
        plan = plan_of(jobs, sorted({job.seed for job in jobs}), deadline)
        make_folders(out, results)
        outcome = run_plan(plan, results, where, together, commit, console or Console(), DropInRunner)
        made.recorded += outcome.recorded
        made.failed |= outcome.failed
        made.left += outcome.left
        made.was_interrupted = outcome.was_interrupted

    outcome = Outcome()
    run([make_job(unit, unit.rate) for unit in fixed if unit.rate is not None], outcome)
    known = load(results)
    rates = [(unit, choose_rate(unit, part.rates_of(unit.problem), known, iterations)) for unit in chosen]
    run([make_job(unit, rate) for unit, rate in rates if rate is not None], outcome)
    undecided = [unit.label for unit, rate in rates if rate is None]
    return DropInOutcome(len(fixed) + len(chosen), outcome, undecided)


class DropInRunner(Runner):
    """The runner, with what the records of this table have besides."""

    def _make(self, job: Job, run: Run) -> Record:
        record = super()._make(job, run)
        row, config, headline = job.row, run.config, run.config.task.headline
        assert isinstance(row, DropInRow)
        found = [line["metrics"][headline.metric] for line in run.evaluations()]
        values = [value for value in found if value is not None]
        final = (*record["metrics"].values(), *record["valid"].values())
        if isinstance(config.task, StoredTask):
            record["epochs"] = record["iterations"] / config.task.batches_per_epoch(config.training.batch_size)
        return record | {
            "problem": row.problem.name,
            "cell": row.cell,
            "method": row.method,
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


def load(results: Path) -> list[Record]:
    """The records of the table, the newest of each row and seed: files of several machines may be joined."""
    path = records.path_of(FILE, results)
    newest: dict[tuple[str, int], Record] = {}
    for number, record in enumerate(records.load(FILE, results), start=1):
        if not record.keys() >= ENTRIES.keys() or first_mismatch(record, ENTRIES) is not None:
            raise records.invalid_file(path, f"line {number} is no record of the drop-in table")
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


def choose_rate(
    unit: Unit, rates: Sequence[float], known: Sequence[Record], iterations: int | None = None
) -> float | None:
    """The rate whose selection run is best on validation data; None where one of these runs is not recorded."""
    selected: dict[float, Record] = {}
    for rate in rates:
        row = unit.row(rate)
        record = recorded(known, row, row.config(SELECTION_SEED, iterations))
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
    known = load(results)
    found: dict[str, str] = {}
    for unit in (unit for units in part.units() for unit in units):
        rate = unit.rate or choose_rate(unit, part.rates_of(unit.problem), known, iterations)
        if rate is None:
            found[unit.label] = "rate not chosen"
            continue
        row = unit.row(rate)
        is_recorded = recorded(known, row, row.config(unit.seed, iterations)) is not None
        found[f"{row.id} seed {unit.seed}"] = "recorded" if is_recorded else "left"
    return found
