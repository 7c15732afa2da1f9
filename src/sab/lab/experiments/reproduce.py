"""The runner of the tables: many runs at once, within a time limit, continued by the next call.

A row's run from seed k is the folder `<out>/<row id>/seed<k>`, an ordinary run; what else is known of it (the attention
at some moments, the tests at other lengths, how many ran at once) is in `seed<k>.json` next to it. All runs of the
first seed come before those of the second, so that what is there after a while is broad. Within a seed the longest
come first, which fills a device best, but where a time limit is set the shortest do, so that most rows are there. Large
models, which fill a device alone, come before all others, or after them where a time limit is set.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from sab.errors import UserError, UserValueError, check_float, check_int
from sab.lab import data
from sab.lab.experiments import records
from sab.lab.experiments.progress import Board
from sab.lab.experiments.records import Attention, Notes, Record, TableRow
from sab.lab.experiments.tables import Row
from sab.lab.files import write_text, writing
from sab.lab.locks import Lock
from sab.lab.tasks import StoredTask, Task
from sab.lab.training import Result, Run, RunConfig, TrainConfig, evaluate
from sab.lab.training.checkpoint import load_model
from sab.lab.training.config import resolve_device
from sab.lab.training.evaluation import mean_attention
from sab.lab.training.interrupt import Interrupt
from sab.lab.training.loop import check_seeds
from sab.lab.training.progress import show_headline, show_seconds
from sab.lab.training.run import finite
from sab.lab.training.trainer import Trainer, torch_settings
from sab.lab.training.turns import by_turns

TOGETHER = {"cuda": 8, "cpu": 1}
"""How many runs take turns on each type of device."""
LARGEST_SMALL = 128
"""The largest hidden size with which runs share a device; larger models run alone."""
OTHER_LENGTH_BATCHES = 4
"""How many batches a test at another length takes its means over."""
LONGEST_END = 15.0
"""Seconds of a time limit that are kept for the checkpoints; at most a twentieth of it."""


@dataclass(frozen=True)
class Job:
    """A row's run from a seed."""

    row: TableRow
    config: RunConfig
    out: Path

    @property
    def seed(self) -> int:
        return self.config.training.seed

    @property
    def label(self) -> str:
        return f"{self.row.id} seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / self.row.id / f"seed{self.seed}"

    @property
    def errors(self) -> Path:
        """The file for an unexpected error."""
        return self.folder.with_suffix(".error.txt")

    @property
    def cost(self) -> int:
        """What the run takes, in steps of sequences."""
        return self.config.training.iterations * self.config.task.steps

    @property
    def is_large(self) -> bool:
        """Whether the run fills a device alone."""
        return self.config.model.hidden_size > LARGEST_SMALL

    @property
    def dataset(self) -> str | None:
        """The data set that it reads, if it reads one."""
        task = self.config.task
        return task.dataset if isinstance(task, StoredTask) else None

    def stored(self) -> Run | None:
        """The run in its folder, if there is one that can go on; it must be of this configuration."""
        if not (self.folder / "config.json").is_file():
            return None
        run = Run.open(self.folder, "out")
        try:
            run.check_resumable(self.config)
        except UserError as mistake:
            wanted = f"out {str(self.folder)!r} must hold a run as the row now is; there {str(mistake).rstrip('.')}"
            raise UserValueError(f"{wanted}: choose another folder, or remove that one.", "out") from mistake
        return run

    def result(self) -> Result | None:
        """How the run ended, where no iteration is left to make."""
        run = self.stored()
        result = None if run is None else run.result()
        if result is None or (result.status == "finished" and result.iterations < self.config.training.iterations):
            return None
        return result

    def made(self) -> int | None:
        """How many iterations its newest checkpoint has seen, if there is one."""
        steps = (self.folder / "checkpoint").glob("step-" + "[0-9]" * 8)
        return max((int(path.name.removeprefix("step-")) for path in steps), default=None)

    def noted(self) -> Notes:
        """The notes on the run."""
        return records.read_notes(self._notes)

    def note(self, **entries: Any) -> None:
        """Adds to the notes on the run."""
        write_text(self._notes, json.dumps({**self.noted(), **entries}) + "\n", "out")

    @property
    def _notes(self) -> Path:
        return self.folder.with_suffix(".json")


@dataclass
class Outcome:
    """What a call came to."""

    recorded: list[Record] = field(default_factory=list)
    """The records that it wrote."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a run could not go on, in a sentence, by its label; why none on a data set could, by the data set's name."""
    left: list[Job] = field(default_factory=list)
    """The runs that are not at their end, the failed ones among them."""
    was_interrupted: bool = False
    """Whether it was Ctrl-C that ended it."""

    def keep(self, record: Record, results: Path, line: str) -> str:
        """Writes a record; returns the line about the run."""
        if not records.save(record, results):
            return f"{line}; not recorded, since the record there is of a longer run"
        self.recorded.append(record)
        return line


def seeds_of(rows: Iterable[Row], seeds: Iterable[int] | None) -> list[int]:
    """The seeds that are given or, without any, all that some row needs."""
    return list(range(max(row.seeds for row in rows))) if seeds is None else check_seeds(seeds)


def jobs_of(
    rows: Sequence[Row],
    seeds: Iterable[int] | None,
    out: Path,
    iterations: int | None = None,
    device: str = "auto",
    data_dir: Path | None = None,
) -> list[Job]:
    """The runs of some rows, seed by seed, on the data that are in the folder.

    Without seeds each row has as many as it needs.
    """
    check_int("iterations", iterations, 1, optional=True)
    rows = [row.on(data_dir) for row in rows]
    return [
        Job(row, reading_from(data_dir, row.config(seed, iterations, device)), out)
        for seed in seeds_of(rows, seeds)
        for row in rows
        if seeds is not None or seed < row.seeds
    ]


def reading_from(data_dir: Path | None, config: RunConfig) -> RunConfig:
    """The run on the data in a folder, where it reads some."""
    if not isinstance(config.task, StoredTask):
        return config
    return replace(config, task=replace(config.task, data_dir=data_dir))


def reproduce(
    rows: Sequence[Row],
    seeds: Iterable[int] | None,
    out: Path,
    results: Path,
    minutes: float | None = None,
    iterations: int | None = None,
    device: str = "auto",
    together: int | None = None,
    commit: str | None = None,
    data_dir: Path | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trains every row from every seed and records what it came to; what is at its end already is left as it is.

    Without seeds each row has as many as it needs.

    After `minutes`, and at Ctrl-C, all runs that are under way write their checkpoints, and the next call goes on
    with them. A run that diverges is recorded as such; one that fails leaves the others to go on, and so do
    those whose data are not there. It is a mistake where that is so of all.
    """
    where = resolve_device(device)
    together = TOGETHER[where.type] if together is None else check_int("together", together, 1)
    plan = make_plan(rows, seeds, out, minutes, iterations, device, data_dir)
    make_folders(results, out)
    return run_plan(plan, results, where, together, commit, console or Console())


def run_plan(
    plan: Plan,
    results: Path,
    device: torch.device,
    together: int,
    commit: str | None,
    console: Console,
    runner_type: type[Runner] | None = None,
) -> Outcome:
    """Trains and records what is left of a plan, until it is late or interrupted."""
    with (
        torch_settings(plan.jobs[0].config.training, device),
        Interrupt() as interrupt,
        Board(console, plan.total) as board,
    ):

        def is_over() -> bool:
            return interrupt.requested or plan.is_late()

        runner = (runner_type or Runner)(plan.jobs, results, device, board, is_over, commit)
        runner.outcome.failed |= plan.missing
        runner.run(together, plan.have_ended, plan.lacking)
        runner.outcome.was_interrupted = interrupt.requested
    return runner.outcome


@dataclass(frozen=True)
class Plan:
    """What there is to do, and until when."""

    jobs: list[Job]
    """All runs, in the order in which they are to begin."""
    have_ended: set[str]
    """The labels of those that an earlier call brought to their end."""
    missing: dict[str, str]
    """Why a data set cannot be had, in a sentence, by its name."""
    lacking: set[str]
    """The labels of those that cannot begin without it."""
    deadline: float
    """When, by the monotonic clock, every run has to write its checkpoint."""

    @property
    def total(self) -> int:
        """How many runs can finish."""
        return len(self.jobs) - len(self.lacking)

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline


def make_plan(
    rows: Sequence[Row],
    seeds: Iterable[int] | None,
    out: Path,
    minutes: float | None,
    iterations: int | None,
    device: str,
    data_dir: Path | None,
) -> Plan:
    """What `reproduce` has to do; every mistake shows here, and nothing is written."""
    deadline = deadline_after(minutes)
    if not rows:
        raise UserValueError("rows must be at least one; got none.", "rows")
    chosen = None if seeds is None else check_seeds(seeds)
    return plan_of(jobs_of(rows, chosen, out, iterations, device, data_dir), seeds_of(rows, chosen), deadline)


def deadline_after(minutes: float | None) -> float:
    """When, by the monotonic clock, runs with a time limit have to write their checkpoints."""
    if minutes is None:
        return math.inf
    seconds = 60 * check_float("minutes", minutes, above=0)
    return time.monotonic() + seconds - min(LONGEST_END, seconds / 20)


def plan_of(jobs: Sequence[Job], seeds: Sequence[int], deadline: float) -> Plan:
    """The jobs in the order in which they are to begin: in that of the seeds, then by what they take."""
    jobs = sorted(jobs, key=lambda job: (job.is_large, job.cost), reverse=deadline == math.inf)
    jobs.sort(key=lambda job: seeds.index(job.seed))
    have_ended = {job.label for job in jobs if job.result() is not None}
    missing = _missing_data([job for job in jobs if job.label not in have_ended])
    lacking = {job.label for job in jobs if job.dataset in missing} - have_ended
    if len(lacking) == len(jobs):
        raise UserValueError(" ".join(missing.values()), "data_dir")
    return Plan(jobs, have_ended, missing, lacking, deadline)


def make_folders(results: Path, out: Path | None = None) -> None:
    """Makes the folders of the records and of the runs."""
    for option, folder in (("results", results), ("out", out)):
        if folder is not None:
            with writing(folder, option):
                folder.mkdir(parents=True, exist_ok=True)


def _missing_data(jobs: Iterable[Job]) -> dict[str, str]:
    """Why a data set that some jobs read cannot be had, in a sentence, by its name."""
    missing: dict[str, str] = {}
    for dataset, job in {job.dataset: job for job in jobs if job.dataset}.items():
        task = job.config.task
        assert isinstance(task, StoredTask)
        try:
            data.load(dataset, task.data_dir)  # and to load it once more takes no time
        except UserError as mistake:
            missing[dataset] = str(mistake)
    return missing


@dataclass
class _Going:
    """A job whose trainer has begun."""

    job: Job
    lock: Lock
    together: int = 1
    """How many were under way at once, at most."""


class Runner:
    """Brings jobs to their records."""

    def __init__(
        self,
        jobs: Sequence[Job],
        results: Path,
        device: torch.device,
        board: Board,
        is_over: Callable[[], bool],
        commit: str | None,
    ):
        self.outcome = Outcome()
        self._jobs, self._results, self._device = jobs, results, device
        self._board, self._is_over, self._commit = board, is_over, commit
        self._going: dict[Trainer, _Going] = {}
        self._done: set[str] = set()

    def run(self, together: int, have_ended: set[str], lacking: set[str]) -> None:
        """Trains unfinished runs whose data are available; records finished ones."""
        for job in self._jobs:
            if job.label in have_ended:
                self._try(job, self._record_old)
        waiting = [job for job in self._jobs if job.label not in have_ended | lacking]
        try:
            for trainer, error in by_turns(self._opened(waiting, together), together, self._is_over):
                self._took_turn(trainer, error)
        finally:
            for trainer in list(self._going):
                self._close(trainer)
        self.outcome.left = [job for job in self._jobs if job.label not in self._done]

    def _opened(self, waiting: Iterable[Job], together: int) -> Iterator[Trainer | None]:
        """Trainers that have begun, each when there is room for it; None while there is none."""
        for job in waiting:
            while not self._has_room(job, together) and not self._is_over():
                yield None
            if self._is_over():
                return
            yield from self._try(job, self._open) or []

    def _has_room(self, job: Job, together: int) -> bool:
        going = [going.job for going in self._going.values()]
        return len(going) < together and not (going and (job.is_large or any(one.is_large for one in going)))

    def _open(self, job: Job) -> list[Trainer]:
        lock = Lock(job.folder.with_suffix(".lock"))
        with writing(job.out, "out"):
            is_free = lock.take()
        if not is_free:
            self._board.end(job.label, f"{job.label}: another process is training it")
            return []
        try:
            if job.result() is not None:  # by another process, meanwhile
                lock.release()
                self._record_old(job)
                return []
            stored, resume = job.stored(), job.made() is not None
            if stored is not None and not resume:  # it was killed before there was anything to go on from
                stored.discard()
            trainer = Trainer(job.config, job.folder, resume, self._board.progress_of(job.label), self._device)
        except Exception:
            lock.release()
            raise
        self._going[trainer] = _Going(job, lock)
        try:
            trainer.begin()
        except Exception:
            self._close(trainer)
            raise
        return [trainer]

    def _took_turn(self, trainer: Trainer, error: Exception | None) -> None:
        going = self._going[trainer]
        job, going.together = going.job, max(len(self._going), going.together)
        if error is None and trainer.ending is None:
            if job.seed == 0 and trainer.made in job.row.moments:
                self._try(job, lambda job: self._keep_attention(job, trainer))
            return
        if error is not None:
            self._fail(job, error)
        else:
            self._try(job, lambda job: job.note(together=max(going.together, job.noted().get("together", 1))))
        self._close(trainer)
        if trainer.result is not None and trainer.result.status != "interrupted":
            self._try(job, self._record)

    def _keep_attention(self, job: Job, trainer: Trainer) -> None:
        """Notes the attention weights of the moment, averaged over a batch."""
        task, training = job.config.task, job.config.training
        weights = trainer.look(lambda model: mean_attention(model, task, training, "valid"))[-1]
        shown = [[None if math.isnan(one) else round(one, 4) for one in line] for line in weights.tolist()]
        known = job.noted().get("attention")
        moments = {} if known is None else known["moments"]
        moments[str(trainer.made)] = shown
        job.note(
            attention=Attention(k_att=job.config.model.memory.k_att, first=task.attending_steps[0], moments=moments)
        )

    def _record_old(self, job: Job) -> None:
        """Records a run that an earlier call brought to its end, where that has not been done."""
        run = job.stored()
        assert run is not None
        if is_recorded(job, run, self._results):
            self._done.add(job.label)
            self._board.skip(job.label)
        else:
            self._record(job)

    def _record(self, job: Job) -> None:
        """Tests a run that is at its end at other lengths, and writes its record; left undone when time is over."""
        run = Run.open(job.folder)
        result = run.result()
        assert result is not None
        if result.status != "diverged" and not self._test_elsewhere(job, run):
            return
        record = self._make(job, run)
        line = self.outcome.keep(record, self._results, _line(job, result))
        with contextlib.suppress(OSError):
            job.errors.unlink(missing_ok=True)
        self._done.add(job.label)
        self._board.end(job.label, line)

    def _make(self, job: Job, run: Run) -> Record:
        """The record of a run at its end."""
        return records.make(job.row, run, job.noted(), self._commit)

    def _test_elsewhere(self, job: Job, run: Run) -> bool:
        """Notes the metrics at the row's other lengths; whether all of them are known."""
        known = job.noted().get("other_lengths", {})
        missing = [length for length in job.row.other_lengths if str(length) not in known]
        if not missing:
            return True
        model = load_model(run, self._device)
        training, batches = self._test_batches(run)
        for length in missing:
            if self._is_over():
                return False
            task = _at_length(run.config.task, length)
            metrics = evaluate(model, task, training, "test", batches)
            known[str(length)] = finite(metrics)
            job.note(other_lengths=known)
        return True

    def _test_batches(self, run: Run) -> tuple[TrainConfig, int]:
        """The size and number of the batches of a test at another length."""
        return run.config.training, OTHER_LENGTH_BATCHES

    def _try(self, job: Job, step: Callable[[Job], Any]) -> Any:
        """What a step gives; an error is one job's own."""
        try:
            return step(job)
        except Exception as error:
            self._fail(job, error)
            return None

    def _fail(self, job: Job, error: Exception) -> None:
        # The words alone are kept: a traceback holds on to tensors.
        sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".splitlines()[0]
        if not isinstance(error, UserError):
            with contextlib.suppress(OSError):
                job.errors.parent.mkdir(parents=True, exist_ok=True)
                job.errors.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                sentence = f"{sentence[:300]} (more in {job.errors})"
        self.outcome.failed[job.label] = sentence
        self._board.end(job.label, f"{job.label}: failed: {sentence}")

    def _close(self, trainer: Trainer) -> None:
        going = self._going.pop(trainer)
        with contextlib.suppress(RuntimeError):  # a run that failed may have left the device unusable
            trainer.close()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what graphs used is of no use to others before
        going.lock.release()
        self._board.close(going.job.label)


def is_recorded(job: Job, run: Run, results: Path) -> bool:
    """Whether the records have this very run."""
    same = {"row": job.row.id, "seed": job.seed}
    those = (record for record in records.load(job.row.task, results) if same.items() <= record.items())
    configs = (config for record in those if (config := records.config_of(record)) is not None)
    return any(config.effective() == run.config.effective() for config in configs)


def _at_length(task: Task, length: int) -> Task:
    return replace(task, length=length)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _line(job: Job, result: Result) -> str:
    """What a person reads of a run at its end."""
    text = show_headline(job.config.task.headline, result.metrics) + _in_brackets(job)
    if result.best_at is not None:
        text += f" by the weights of iteration {result.best_at}, after {result.iterations} iterations"
    else:
        solved = "not solved" if result.solved_at is None else f"solved after {result.solved_at}"
        text += f" after {result.iterations} iterations ({solved})"
    if result.status == "diverged":
        diverged = f"diverged: {result.message.partition(';')[0]}"
        text = diverged if result.best_at is None else f"{text}; {diverged}"
    return f"{job.label}: {text}, {show_seconds(result.wall_time)}"


def _in_brackets(job: Job) -> str:
    """What goes with a number where the task's name is not enough."""
    task = job.config.task
    return f" ({task.title})" if task.title != task.name else ""


# Where things stand


@dataclass(frozen=True)
class Standing:
    """How far a job has come."""

    job: Job
    state: str
    """`ended`, `unrecorded` (at its end, but without a record yet), `under way`, `recorded` (there is a record but no
    run), `outdated` (that record is of another configuration than the row now has), `left`, or `of another
    configuration`, where the run is."""
    iterations: int
    summary: str
    """The headline metric so far, or how the run ended."""


class Coverage(NamedTuple):
    """How many of some rows have their seeds in the records, made as the rows now are."""

    rows: int
    complete: int
    left: int
    """How many runs the others lack."""


def coverage(rows: Iterable[Row], results: Path) -> Coverage:
    """What the records have of the rows."""
    rows = list(rows)
    by_row: dict[str, list[Record]] = {}
    for task in dict.fromkeys(row.task for row in rows):
        for record in records.load(task, results):
            by_row.setdefault(record["row"], []).append(record)
    lacking = [row.seeds - _count_current(row, by_row.get(row.id, [])) for row in rows]
    return Coverage(len(rows), lacking.count(0), sum(lacking))


def _count_current(row: Row, known: Iterable[Record]) -> int:
    """How many of the seeds that a row needs have a record of the row as it now is."""
    return len({one["seed"] for one in known if one["seed"] < row.seeds and not records.is_stale(row, one)})


def standings(jobs: Iterable[Job], results: Path) -> list[Standing]:
    """How far the jobs have come, from their folders and from the records."""
    jobs = list(jobs)
    known = {
        (record["row"], record["seed"]): record
        for task in dict.fromkeys(job.row.task for job in jobs)
        for record in records.load(task, results)
    }
    return [_standing(job, known.get((job.row.id, job.seed))) for job in jobs]


def _standing(job: Job, record: Record | None) -> Standing:
    headline = job.config.task.headline
    try:
        run = job.stored()
    except UserValueError:
        return Standing(job, "of another configuration", job.made() or 0, "")
    if run is not None:
        result = job.result()
        if result is not None:
            text = _line(job, result).removeprefix(f"{job.label}: ")
            return Standing(job, "ended" if record is not None else "unrecorded", result.iterations, text)
        lines = run.evaluations()
        text = show_headline(headline, lines[-1]["metrics"]) + _in_brackets(job) if lines else ""
        return Standing(job, "under way", job.made() or 0, text)
    if record is not None:
        text = "diverged" if record["status"] == "diverged" else show_headline(headline, record["metrics"])
        text += f" ({record['data']})" if record.get("data", job.row.task) != job.row.task else ""
        return Standing(job, "outdated" if _is_outdated(job, record) else "recorded", record["iterations"], text)
    return Standing(job, "left", 0, "")


def _is_outdated(job: Job, record: Record) -> bool:
    """Whether a record is neither of the row as it now is nor of the very run."""
    config = records.config_of(record)
    if config is None or not isinstance(job.row, Row):
        return config is None
    lasts_as_long = config.training.iterations == job.config.training.iterations
    return records.is_stale(job.row, record) and not (lasts_as_long and config.difference(job.config) is None)
