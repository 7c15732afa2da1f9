"""The runner of the tables on a Ray cluster: every run is a task, and the folder of the runs is one that all share.

A task does what the runner does with one run, in a process of its own on some machine of the cluster. If that process
or its machine is lost, Ray gives the task to another one, which goes on from the run's checkpoint. The records come
back to the caller, who alone writes them; so do, through an actor, the reports on how far the runs are. To end, by
Ctrl-C or when the time is over, is to cancel the tasks: those under way take it as Ctrl-C and write their checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sab.extras import require

require("ray")

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from rich.console import Console

from sab.errors import UserValueError, check_choice, check_int
from sab.lab.experiments.progress import Board
from sab.lab.experiments.records import Record
from sab.lab.experiments.reproduce import TOGETHER, Job, Outcome, Plan, Runner, is_recorded, make_folders, make_plan
from sab.lab.experiments.tables import Row
from sab.lab.tasks import Headline
from sab.lab.training.config import resolve_device
from sab.lab.training.interrupt import Interrupt
from sab.lab.training.progress import Progress, ShownEvaluation
from sab.lab.training.trainer import torch_settings

RETRIES = 3
"""How often a run is given to another worker after its own was lost."""
LOOK_EVERY = 0.5
"""Seconds after which the caller looks again at what has come."""
REPORT_EVERY = 2.0
"""Seconds between two reports of a run."""
KNOCK = 10.0
"""Seconds to wait for an answer at an address."""
OBJECT_STORE = 100 * 2**20
"""Bytes of a local cluster's store, which holds hardly anything."""
Event = tuple[str, tuple[Any, ...]]
"""A call of one of the methods of `Progress`."""


class Finished(NamedTuple):
    """The outcome of a task."""

    record: Record | None
    failed: str | None
    """Why the run could not go on, in a sentence."""
    line: str
    """A line about it for a person."""


def reproduce_on_ray(
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
    address: str | None = None,
) -> Outcome:
    """What `reproduce` does, on the Ray cluster at `address` or, without one, on a local one that ends with it.

    `out` and the data must be folders that every machine of the cluster has under the same name. Small models have a
    GPU's share of one in `together` (8), large ones a whole GPU; where there are none, each run has a CPU core.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    together = TOGETHER["cuda"] if together is None else check_int("together", together, 1)
    data_dir = None if data_dir is None else data_dir.absolute()
    plan = make_plan(rows, seeds, out.absolute(), minutes, iterations, device, data_dir)
    with _connected(address), Interrupt() as interrupt, Board(console or Console(), plan.total) as board:
        make_folders(results, out)
        kind = _kind(device, board)
        driver = _Driver(plan, results, kind, together, commit, board)
        driver.run(lambda: interrupt.requested or plan.is_late())
        driver.outcome.was_interrupted = interrupt.requested
    return driver.outcome


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Connects to a cluster, or starts a local one, and disconnects at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    alone: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        _knock(where)
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, **alone if where == "local" else {})
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        wanted = "address must be that of a Ray cluster that can be reached, or auto"
        raise UserValueError(f"{wanted}; {where!r} is not: {reason}.", "address") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises where no one listens at an address; Ray itself would wait for many minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError("it has no host and port, as in 10.0.0.1:6379")
    socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()


def _kind(device: str, board: Board) -> str:
    """The type of the devices that the runs are to have."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if device == "auto":
        return "cuda" if has_gpus else "cpu"
    if device == "cuda" and not has_gpus:
        board.show("The cluster has no GPU now; the runs wait until it has one.")
    return device


class _Driver:
    """Brings the jobs of a plan to their records, as tasks."""

    def __init__(self, plan: Plan, results: Path, device: str, together: int, commit: str | None, board: Board):
        self.outcome = Outcome(failed=dict(plan.missing))
        self._plan, self._results, self._board = plan, results, board
        self._device, self._together, self._commit = device, together, commit
        self._mailbox: Any = ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1).remote()
        self._came_to: dict[str, int] = {}
        self._done: set[str] = set()

    def run(self, is_over: Any) -> None:
        """Trains unfinished runs whose data are available; all end early when `is_over`."""
        pending = {self._begin(job): job for job in self._waiting()}
        is_cancelled = False
        while pending:
            ended, _ = ray.wait(list(pending), num_returns=len(pending), timeout=LOOK_EVERY)
            self._show_reports()
            for reference in ended:
                self._end(pending.pop(reference), reference)
            self._board.beat()
            if not is_cancelled and is_over():
                is_cancelled = True
                for reference in pending:
                    ray.cancel(reference)
        self.outcome.left = [job for job in self._plan.jobs if job.label not in self._done]

    def _waiting(self) -> Iterator[Job]:
        """The jobs that need work, if only to make a record."""
        for job in self._plan.jobs:
            run = job.stored() if job.label in self._plan.have_ended else None
            if run is not None and is_recorded(job, run, self._results):
                self._done.add(job.label)
                self._board.skip(job.label)
            elif job.label not in self._plan.lacking:
                yield job

    def _begin(self, job: Job) -> Any:
        self._came_to[job.label] = job.made() or 0
        share = 1 if job.is_large or self._device == "cpu" else self._together
        gpus = 0 if self._device == "cpu" else 1 / share
        task: Any = ray.remote(train).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, name=job.label)
        return task.remote(job, self._device, share, self._mailbox, self._commit)

    def _end(self, job: Job, reference: Any) -> None:
        """Handles the outcome of a task."""
        self._board.close(job.label)
        try:
            record, failed, line = ray.get(reference)
        except TaskCancelledError:
            return
        except RayError as error:
            record, failed = None, _sentence(error)
            line = f"{job.label}: failed: {failed}"
        if record is not None:
            line = self.outcome.keep(record, self._results, line)
            self._done.add(job.label)
        if failed is not None:
            self.outcome.failed[job.label] = failed
        if line:  # else it has ended before its time
            self._board.end(job.label, line)

    def _show_reports(self) -> None:
        reports: list[tuple[str, list[Event]]] = []
        with contextlib.suppress(RayError):  # the actor's machine was lost; Ray restarts it
            reports = ray.get(self._mailbox.take.remote())
        for label, events in reports:
            for method, arguments in events:
                if method == "begin":
                    self._show_begin(label, arguments[1])
                getattr(self._board.going(label), method)(*arguments)

    def _show_begin(self, label: str, step: int) -> None:
        if step > self._came_to[label] or self._board.has(label):
            self._board.show(f"{label}: its worker was lost, another one goes on")
        self._board.close(label)
        self._board.progress_of(label)


def _sentence(error: RayError) -> str:
    """Why a task returned nothing: the last line of its own error, or the first line of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if isinstance(error, RayTaskError) else f"{lines[0].rstrip('.')}."


# What runs elsewhere


class Mailbox:
    """The actor through which the runs report to the caller."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, list[Event]]] = []

    def post(self, label: str, events: list[Event]) -> None:
        self._reports.append((label, events))

    def take(self) -> list[tuple[str, list[Event]]]:
        reports, self._reports = self._reports, []
        return reports


def train(job: Job, device: str, share: int, mailbox: Any, commit: str | None) -> Finished:
    """Brings a run to its record, from its checkpoint where there is one; Ctrl-C ends it with a checkpoint.

    `share` is how many runs have the device at once.
    """
    where, board = resolve_device(device), RemoteBoard(mailbox)
    if share > 1:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        job.note(together=max(share, job.noted().get("together", 1)))
    with tempfile.TemporaryDirectory() as own, torch_settings(job.config.training, where), Interrupt() as interrupt:
        runner = Runner([job], Path(own), where, board, lambda: interrupt.requested, commit)
        runner.run(1, set() if job.result() is None else {job.label}, set())
    made = runner.outcome
    return Finished(next(iter(made.recorded), None), made.failed.get(job.label), board.line)


class RemoteBoard(Board):
    """The board of a remote task: reports go to the mailbox, and the last line is kept."""

    def __init__(self, mailbox: Any):
        super().__init__(Console(quiet=True), total=1)
        self._mailbox = mailbox
        self.line = ""

    def progress_of(self, label: str) -> Progress:
        return RemoteProgress(self._mailbox, label)

    def end(self, label: str, line: str) -> None:
        self.line = line


class RemoteProgress(Progress):
    """Reports a run's progress to the mailbox: every evaluation, and iterations every REPORT_EVERY seconds at most."""

    def __init__(self, mailbox: Any, label: str):
        self._mailbox, self._label = mailbox, label
        self._reported_at = 0.0

    def begin(self, headline: Headline, step: int, iterations: int, where: str = "") -> None:
        self._post(("begin", (headline, step, iterations, f"{where}, by {socket.gethostname()}")))

    def iteration(self, step: int, loss: float) -> None:
        if time.monotonic() - self._reported_at >= REPORT_EVERY:
            self._post(("iteration", (step, loss)))

    def evaluation(self, line: ShownEvaluation) -> None:
        self._post(("iteration", (line["step"], line["loss"])), ("evaluation", (line,)))

    def _post(self, *events: Event) -> None:
        self._reported_at = time.monotonic()
        self._mailbox.post.remote(self._label, list(events))
