"""Progress of a benchmark, or of the tables' runs, for a person."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sab.lab.tasks import Headline
from sab.lab.training import progress as training_progress
from sab.lab.training.progress import cut, is_narrow, one_line

HEARTBEAT = 30.0
"""Seconds between two lines about a run under way where there is no terminal."""


def show_line(console: Console, line: str) -> None:
    """Prints a line, on a terminal wrapped at words."""
    console.print(line, soft_wrap=not console.is_terminal, markup=False, highlight=False)


class Bar:
    """A line for every row that is measured and, on a terminal, a bar with the present one."""

    def __init__(self, console: Console, rows: int):
        self._console = console
        self._most = 48 if is_narrow(console) else 100
        columns = (
            TextColumn("{task.description}", table_column=one_line()),
            BarColumn(bar_width=8 if is_narrow(console) else 40),
            MofNCompleteColumn(table_column=one_line()),
            TimeElapsedColumn(table_column=one_line()),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._bar = self._bars.add_task("starting", total=rows)

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bars.stop()

    def begin(self, what: str) -> None:
        """Shows what is being measured or prepared."""
        self._bars.update(self._bar, description=cut(what, self._most))
        self._bars.refresh()

    def end(self, line: str) -> None:
        """The row is measured; prints its line."""
        self._bars.advance(self._bar)
        show_line(self._console, line)


class Board:
    """Many runs, of which a few are under way: how many have ended and how far each of those few is.

    On a terminal that is a bar for all and one for each run; elsewhere a line when a run begins or ends and, every
    HEARTBEAT seconds, one for each that is under way.
    """

    def __init__(self, console: Console, total: int):
        self._console = console
        self.most = 33 if is_narrow(console) else 60
        """How many characters of a run's label its bar has."""
        columns = (
            TextColumn("{task.description}", table_column=one_line()),
            BarColumn(bar_width=5 if is_narrow(console) else 40),
            MofNCompleteColumn(table_column=one_line()),
            TextColumn("[cyan]{task.fields[shown]}", table_column=one_line()),
            TimeElapsedColumn(table_column=one_line()),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._all = self._bars.add_task("[bold]runs", total=total, shown="")
        self._ended: set[str] = set()
        self._total = total
        self._going: dict[str, RunProgress] = {}
        self._shown_at = time.monotonic()

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bars.stop()

    def progress_of(self, label: str) -> training_progress.Progress:
        """What a run that is about to begin reports to."""
        self._going[label] = RunProgress(self, self._bars, label)
        return self._going[label]

    def has(self, label: str) -> bool:
        """Whether a run is under way."""
        return label in self._going

    def going(self, label: str) -> training_progress.Progress:
        """What a run that is under way reports to."""
        return self._going[label]

    def begin(self, line: str) -> None:
        """A run begins or goes on."""
        if not self._console.is_terminal:
            self.show(line)

    def skip(self, label: str) -> None:
        """A run had ended before."""
        self._ended.add(label)
        self._bars.update(self._all, completed=len(self._ended))

    def end(self, label: str, line: str) -> None:
        """A run ended or failed; prints its line."""
        self.skip(label)
        self.show(f"[{len(self._ended)}/{self._total}] {line}")

    def close(self, label: str) -> None:
        """A run is no longer under way."""
        run = self._going.pop(label, None)
        if run is not None:
            run.remove()

    def beat(self) -> None:
        """Prints the progress of the runs under way, every HEARTBEAT seconds at most."""
        now = time.monotonic()
        if not self._console.is_terminal and now - self._shown_at >= HEARTBEAT:
            self._shown_at = now
            for run in self._going.values():
                self.show(f"  {run.line}")

    def show(self, line: str) -> None:
        show_line(self._console, line)


class RunProgress(training_progress.Progress):
    """One of the runs on a board."""

    def __init__(self, board: Board, bars: Progress, label: str):
        self._board, self._bars, self._label = board, bars, label
        self._bar: TaskID | None = None
        self._step = self._iterations = 0
        self._shown = "…"

    @property
    def line(self) -> str:
        """Where the run is."""
        return f"{self._label}: {self._step}/{self._iterations}  {self._shown}"

    def begin(self, headline: Headline, step: int, iterations: int, where: str = "") -> None:
        self._headline, self._step, self._iterations = headline, step, iterations
        label = cut(self._label, self._board.most)
        self._bar = self._bars.add_task(label, total=iterations, completed=step, shown=self._shown)
        self._board.begin(f"{self._label}: iterations {step} to {iterations}{where}")

    def iteration(self, step: int, loss: float) -> None:
        self._step = step
        if self._bar is not None:
            self._bars.update(self._bar, completed=step)
        self._board.beat()

    def evaluation(self, line: training_progress.ShownEvaluation) -> None:
        headline = training_progress.show_headline(self._headline, line["metrics"], self._headline.short)
        self._shown = f"{headline}  {line['iterations_per_second']:.1f} it/s"
        if self._bar is not None:
            self._bars.update(self._bar, shown=self._shown)

    def remove(self) -> None:
        """Takes the run off the board."""
        if self._bar is not None:
            self._bars.remove_task(self._bar)
