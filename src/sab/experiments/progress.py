"""What a person sees of a benchmark while it runs."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A line for every row that is measured and, on a terminal, a bar that tells which one is being."""

    def __init__(self, console: Console, rows: int):
        self._console = console
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._bar = self._bars.add_task("starting", total=rows)

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bars.stop()

    def begin(self, what: str) -> None:
        """Something is being measured, or prepared."""
        self._bars.update(self._bar, description=what)
        self._bars.refresh()

    def end(self, line: str) -> None:
        """It was, and this is what came of it."""
        self._bars.advance(self._bar)
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
