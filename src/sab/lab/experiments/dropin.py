"""The drop-in table: torch.nn's layers and the SAB layers with default options, all trained alike.

On the synthetic tasks every learning rate is trained from every seed. On real data a selection run of each rate, from a
seed of its own, comes first; the rate that is best on its validation data is then trained from the seeds that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from sab.errors import check_choice
from sab.lab.experiments import selection
from sab.lab.experiments.records import Record
from sab.lab.experiments.selection import Contender, Table
from sab.lab.models import Method, ModelConfig
from sab.lab.tasks import TASKS

METHODS: tuple[Method, ...] = ("torch", "torch_start", "sab")
CELLS = ("lstm", "gru", "rnn_tanh")


@dataclass(frozen=True)
class Problem(selection.Problem):
    """A task of the table, its cells and its methods."""

    cells: tuple[str, ...] = CELLS
    methods: tuple[Method, ...] = METHODS


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
ENTRIES = selection.ENTRIES | {"cell": Literal[CELLS], "method": Literal[METHODS]}
TABLE = Table("dropin", "the drop-in table", PROBLEMS, ENTRIES)


@dataclass(frozen=True)
class DropInRow(selection.Row):
    """A method with a cell and a learning rate on a problem: default options of the layer."""

    problem: Problem
    cell: str
    method: Method
    rate: float

    task: str = field(default=TABLE.file, init=False)
    moments: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return f"{self.cell}-{self.method}"

    @property
    def entries(self) -> Record:
        return {"cell": self.cell, "method": self.method}

    @property
    def weight(self) -> int:
        return 3 if self.method == "sab" else 1

    def model(self) -> ModelConfig:
        return ModelConfig(method=self.method, cell=self.cell, hidden_size=self.problem.hidden_size)


@dataclass(frozen=True)
class Part(selection.Part):
    """A part of the table; what is not given is not restricted."""

    cells: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None

    table: ClassVar[Table] = TABLE

    def __post_init__(self) -> None:
        for cell in self.cells or ():
            check_choice("cells", cell, CELLS)
        for method in self.methods or ():
            check_choice("methods", method, METHODS)
        super().__post_init__()

    def contenders(self, problem: Problem) -> Iterable[Contender]:
        for cell in problem.cells:
            for method in problem.methods:
                if self._has(cell, method):
                    yield partial(DropInRow, problem, cell, method)

    def _has(self, cell: str, method: str) -> bool:
        return (self.cells is None or cell in self.cells) and (self.methods is None or method in self.methods)


def load(results: Path) -> list[Record]:
    """The records of the table."""
    return selection.load(TABLE, results)
