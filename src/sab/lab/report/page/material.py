"""What a page is made from: runs, records of `sab reproduce` and of `sab bench`, at the paths that were given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sab.errors import UserError, UserValueError
from sab.lab.experiments import records as stored
from sab.lab.experiments.tables import COLUMNS, ROWS, Row
from sab.lab.report import performance, results
from sab.lab.report.numbers import ByRow
from sab.lab.training.run import Run

BENCHMARKS = Path("benchmarks/results")
"""Folder of the benchmark's records, relative to the parent of the results folder."""


@dataclass
class Material:
    """Everything that was found."""

    runs: dict[str, Run] = field(default_factory=dict)
    """By the path that a reader knows them by."""
    by_row: dict[str, list[stored.Record]] = field(default_factory=dict)
    """The records of `sab reproduce`."""
    benchmark: list[performance.Record] = field(default_factory=list)
    left_out: dict[str, UserError] = field(default_factory=dict)
    """What cannot be read, and why; it does not deny the page for the rest."""

    def add_run(self, path: Path) -> None:
        """Adds the run in a folder, where all of it can be read that the page shows."""
        with self._leaving_out(path):
            run = Run.open(path)
            run.result()
            run.evaluations()
            self.runs[str(path)] = run

    def add_records(self, path: Path) -> None:
        """Adds the records of `sab reproduce` in a folder."""
        with self._leaving_out(path):
            for row, records in results.load(path).items():
                self.by_row.setdefault(row, []).extend(records)

    def add_benchmark(self, paths: Sequence[Path]) -> None:
        """Adds the records of `sab bench` in some files."""
        readable: list[Path] = []
        for path in paths:
            with self._leaving_out(path):
                performance.load([path])
                readable.append(path)
        if readable:
            self.benchmark = performance.load(readable)

    @contextmanager
    def _leaving_out(self, path: Path) -> Iterator[None]:
        try:
            yield
        except UserError as mistake:
            self.left_out[str(path)] = mistake


def gather(paths: Sequence[Path]) -> Material:
    """What is at some paths: runs, folders with runs below them, folders of records, files of a benchmark's records."""
    if not paths:
        raise UserValueError("run must be given at least once; got none.", "run")
    found, benchmarks = Material(), []
    for path in paths:
        if (path / "config.json").is_file():
            found.add_run(path)
        elif has_records(path):
            found.add_records(path)
            benchmarks += sorted((path.parent / BENCHMARKS).glob("*.jsonl"))
        elif path.is_file() and path.suffix == ".jsonl":
            benchmarks.append(path)
        else:
            for one in _runs_below(path):
                found.add_run(one)
    found.add_benchmark(list(dict.fromkeys(benchmarks)))
    if not (found.runs or found.by_row or found.benchmark):
        for mistake in found.left_out.values():
            raise mistake
        raise UserValueError(f"run {str(paths[0])!r} must hold records; its files have none.", "run")
    return found


def has_records(path: Path) -> bool:
    """Whether a folder is one that `sab reproduce` keeps its records in."""
    return any(stored.path_of(task, path).is_file() for task in COLUMNS)


def _runs_below(path: Path) -> list[Path]:
    """The runs of several seeds in a folder, or those of several such folders."""
    wanted = "the folder of a run, of runs or of records, or a file of benchmark records"
    configs = [*path.glob("*/config.json"), *path.glob("*/*/config.json")] if path.is_dir() else []
    if not configs:
        reason = "it holds none" if path.is_dir() else "it is none" if path.exists() else "there is no such folder"
        raise UserValueError(f"run {str(path)!r} must be {wanted}; {reason}.", "run")
    return sorted(config.parent for config in configs)


def rows_of(runs: Iterable[Run]) -> ByRow:
    """Records of the runs at their end that are rows of the paper's tables, by the row."""
    by_row: dict[str, list[stored.Record]] = {}
    for run in runs:
        row = row_of(run)
        if row is not None and run.result() is not None:
            by_row.setdefault(row.id, []).append(stored.make(row, run, {}))
    return by_row


def row_of(run: Run) -> Row | None:
    """The row of the paper's tables that a run is one of, if it is."""
    config = run.config
    for row in ROWS.values():
        if row.task == config.task.name:
            wanted = row.as_in(config).config(config.training.seed)
            if wanted.difference(config) is None and wanted.training.iterations == config.training.iterations:
                return row
    return None


def groups_of(runs: dict[str, Run]) -> dict[str, list[Run]]:
    """The runs, those together that differ in nothing but their seed, by what they are called."""
    groups: dict[str, list[tuple[str, Run]]] = {}
    for name, run in runs.items():
        options = {option: value for option, value in run.config.options().items() if option != "seed"}
        groups.setdefault(repr(options), []).append((name, run))
    return {_called([name for name, _ in group]): [run for _, run in group] for group in groups.values()}


def _called(names: Sequence[str]) -> str:
    """What several runs are called: the folder that they share, or the first of them."""
    if len(names) == 1:
        return names[0]
    parents = {str(Path(name).parent) for name in names}
    return parents.pop() if len(parents) == 1 and "." not in parents else f"{names[0]} and {len(names) - 1} more"
