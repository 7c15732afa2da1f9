"""The progress display of downloads."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sab.lab.data.sources import DataFile


class Bar:
    """A bar for each file that is downloaded, on a terminal; nothing anywhere else."""

    def __init__(self, console: Console):
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bars: dict[DataFile, TaskID] = {}

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, file: DataFile, come: int, total: int | None) -> None:
        """Shows that `come` bytes of a file have come."""
        if file not in self._bars:
            self._bars[file] = self._progress.add_task(file.name, total=total)
        self._progress.update(self._bars[file], completed=come, total=total)
