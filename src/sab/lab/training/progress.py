"""Displays of a run's progress while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.progress import Task as Bar
from rich.table import Column
from rich.text import Text

from sab.lab.tasks import Headline
from sab.lab.training.run import LoggedEvaluation


class ShownEvaluation(LoggedEvaluation):
    """An evaluation as progress displays get it: with the best so far."""

    best: float | None
    """The best headline metric."""
    best_at: int | None
    """Its iteration."""


class Progress:
    """Receives the events of a run; the base class shows nothing."""

    def begin(self, headline: Headline, step: int, iterations: int, where: str = "") -> None:
        """The run starts or resumes after `step` of its `iterations`; `where` names device and folder."""

    def iteration(self, step: int, loss: float) -> None:
        """Update number `step` was made, and its loss was read; on a GPU not every update is reported."""

    def evaluation(self, line: ShownEvaluation) -> None:
        """An evaluation was written to metrics.jsonl."""

    def end(self) -> None:
        """The run makes no further update."""


class SafeProgress(Progress):
    """Passes events on to another display until that one can no longer write, for example because the terminal is gone.

    From then on it drops them, and `failure` holds the error: the run writes a checkpoint before it is raised.
    """

    def __init__(self, progress: Progress):
        self.failure: BaseException | None = None
        self._progress = progress

    def begin(self, headline: Headline, step: int, iterations: int, where: str = "") -> None:
        self._progress.begin(headline, step, iterations, where)  # it may raise: nothing is lost yet

    def iteration(self, step: int, loss: float) -> None:
        self._try(lambda: self._progress.iteration(step, loss))

    def evaluation(self, line: ShownEvaluation) -> None:
        self._try(lambda: self._progress.evaluation(line))

    def end(self) -> None:
        self._try(self._progress.end)

    def _try(self, show: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            show()
        except OSError as error:
            self.failure = error
        except SystemExit as stop:  # which rich makes of a BrokenPipeError
            if not isinstance(stop.__context__, BrokenPipeError):
                raise
            self.failure = stop


class Lines(Progress):
    """A line for every evaluation; it begins with the label where there are several runs."""

    def __init__(self, console: Console, label: str, is_one_of_many: bool = False):
        self._console = console
        self._label = label
        self._start = f"{label}  " if is_one_of_many else ""

    def begin(self, headline: Headline, step: int, iterations: int, where: str = "") -> None:
        self._headline = headline
        self._iterations = iterations
        self._print(f"{self._label}: iterations {step} to {iterations}{where}")

    def evaluation(self, line: ShownEvaluation) -> None:
        step, speed = line["step"], line["iterations_per_second"]
        loss, norm = (_show_number(line[name], places) for name, places in (("loss", 4), ("grad_norm", 2)))
        self._print(
            f"{self._start}{step:>{len(str(self._iterations))}}/{self._iterations}  loss {loss}  "
            f"{_show_evaluation(self._headline, line)}  gradient norm {norm}{_show_trouble(line)}  "
            f"{speed:.1f} it/s  {show_seconds((self._iterations - step) / speed)} left"
        )

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


class Live(Progress):
    """A bar that moves, with the loss, the headline metric, the speed and the time left.

    Several runs have their bars below each other, in the same `bars`.
    """

    def __init__(self, console: Console, label: str, bars: Bars | None = None):
        self._label = label
        self._console = console
        self._bars = bars or _bars(console)
        self._is_narrow = is_narrow(console)

    def begin(self, headline: Headline, step: int, iterations: int, where: str = "") -> None:
        self._headline = headline
        self._bar = self._bars.add_task(
            cut(self._label, 20) if self._is_narrow else self._label,
            total=iterations,
            completed=step,
            loss="…",
            headline=f"{headline.short} …",
        )
        text = f"{self._label}: iterations {step:,} to {iterations:,}{where}"
        self._console.print(text, markup=False, highlight=False)
        self._bars.start()

    def iteration(self, step: int, loss: float) -> None:
        self._bars.update(self._bar, completed=step, loss=f"{loss:.4f}")

    def evaluation(self, line: ShownEvaluation) -> None:
        short = self._headline.short
        shown = show_headline(self._headline, line["metrics"], short)
        shown = shown if self._is_narrow else _show_evaluation(self._headline, line, short)
        self._bars.update(self._bar, headline=shown)

    def end(self) -> None:
        self._bars.stop_task(self._bar)
        if all(bar.stop_time is not None for bar in self._bars.tasks):
            self._bars.stop()


NARROW = 100
"""On a terminal with fewer columns a bar leaves out the speed and the best value, so that the rest has its room."""


def is_narrow(console: Console) -> bool:
    return console.width < NARROW


def cut(text: str, most: int) -> str:
    """A label of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line() -> Column:
    """A column of a bar that is never broken into lines."""
    return Column(no_wrap=True)


def _bars(console: Console) -> Bars:
    narrow = is_narrow(console)
    return Bars(
        TextColumn("[bold]{task.description}", table_column=one_line()),
        BarColumn(bar_width=8 if narrow else None),
        MofNCompleteColumn(table_column=one_line()),
        TextColumn("loss {task.fields[loss]}", table_column=one_line()),
        TextColumn("[cyan]{task.fields[headline]}", table_column=one_line()),
        *([] if narrow else [_Speed(one_line())]),
        TimeRemainingColumn(compact=narrow, table_column=one_line()),
        console=console,
    )


class _Speed(ProgressColumn):
    def render(self, task: Bar) -> Text:
        speed = task.finished_speed or task.speed
        return Text("… it/s" if speed is None else f"{speed:.1f} it/s")


def progress_for(console: Console, label: str) -> Progress:
    """A live display on a terminal, plain lines anywhere else."""
    return Live(console, label) if console.is_terminal else Lines(console, label)


def progress_for_each(console: Console, labels: Iterable[str]) -> list[Progress]:
    """The same for several runs at once, one for each label."""
    if console.is_terminal:
        bars = _bars(console)
        return [Live(console, label, bars) for label in labels]
    return [Lines(console, label, is_one_of_many=True) for label in labels]


METRICS = {
    "accuracy_last10": "accuracy on the last 10",
    "cross_entropy_last10": "cross entropy on the last 10",
    "cross_entropy": "cross entropy",
    "mse": "mean squared error",
    "accuracy": "accuracy",
    "bits_per_character": "bits per character, a fresh state for each sequence",
    "bits_per_character_carried": "bits per character, the state carried on",
}
"""What the metrics are called."""


def show(value: Any) -> str:
    """A value as people write it: 10,000 and 0.00491."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show_metric(metric: str, value: float | None) -> str:
    """A metric as people write it: accuracies in per cent."""
    if value is None:
        return "not finite"
    return f"{value:.1%}" if metric.startswith("accuracy") else f"{value:.4g}"


def show_headline(headline: Headline, metrics: dict[str, float | None], name: str | None = None) -> str:
    """The headline metric with its name, by default the full one."""
    value = metrics.get(headline.metric)
    return f"{name or headline.label} {'not finite' if value is None else headline.show(value)}"


def _show_evaluation(headline: Headline, line: ShownEvaluation, name: str | None = None) -> str:
    """The headline metric, and the best one so far where that is another."""
    shown, best = show_headline(headline, line["metrics"], name), line["best"]
    return shown if best is None or line["best_at"] == line["step"] else f"{shown} (best {headline.show(best)})"


def _show_number(value: float | None, places: int) -> str:
    return "not finite" if value is None else f"{value:.{places}f}"


def _show_trouble(line: ShownEvaluation) -> str:
    """How many iterations were skipped or rolled back, where any were."""
    return "".join(f"  {name} {line[name]}" for name in ("skipped", "rollbacks") if line.get(name))


def show_seconds(seconds: float) -> str:
    """A duration as people say it: 12 s, 3:20 min, 1:02 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
