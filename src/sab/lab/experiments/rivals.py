"""The rivals' table: SAB and what people use instead, with equal parameters and equal updates on the same batches.

Each contender has the best of three learning rates, by a selection run of each, and is then trained from three seeds.
The methods of online credit are compared at the sizes that they can afford, with SAB and truncated backpropagation of
the same hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from sab.errors import check_choice
from sab.lab.experiments import selection
from sab.lab.experiments.recipe import self_attention
from sab.lab.experiments.records import Record
from sab.lab.experiments.selection import RATES, Table, TableRunner, count_parameters
from sab.lab.models import ModelConfig
from sab.lab.rivals import ONLINE, RIVALS
from sab.lab.tasks import TASKS, Task
from sab.lab.training import RunConfig, TrainConfig
from sab.lab.training.run import Run

MOST_DIFFERENT = 0.1
"""By which share the parameters of a contender may differ from those of the LSTM."""
TEST_ROWS, TEST_BATCHES = 32, 8
"""The batches of a test at another length: few rows, since some models take much memory for long sequences."""


@dataclass(frozen=True)
class Contender:
    """A model of the table."""

    name: str
    """Its name on the command line, in row ids and in records."""
    title: str
    options: Mapping[str, Any]
    """Its options besides its size; `reads_all` stands for those that let every step read every earlier one."""
    weight: int = 1
    """How much longer a step takes than that of a plain layer, roughly."""

    @property
    def is_rival(self) -> bool:
        """Whether it is another method than SAB."""
        return self.options["method"] != "sab" or "reads_all" in self.options

    @property
    def package(self) -> str | None:
        """The optional package that it needs."""
        method = self.options["method"]
        return RIVALS[method].package if method in RIVALS else None

    @property
    def multiple(self) -> int:
        """Its hidden size is a multiple of this, for our kernels and cuDNN's of 4: rows of 16 bytes."""
        method = self.options["method"]
        return RIVALS[method].multiple if method in RIVALS else 4

    def model(self, hidden_size: int, task: Task) -> ModelConfig:
        """Its configuration at a size."""
        options = dict(self.options)
        if options.pop("reads_all", False):
            options |= self_attention(task)
        return ModelConfig.from_options({**options, "hidden_size": hidden_size})


def _rival(method: str, weight: int = 1, **options: Any) -> Contender:
    return Contender(method, RIVALS[method].title, {"method": method, **options}, weight)


def _online(name: str, title: str, method: str, **options: Any) -> Contender:
    return Contender(name, title, {"method": method, "cell": "gru", **options}, 3)


_MATCHED = (
    Contender("sab", "SAB, LSTM", {"method": "sab"}, 3),
    Contender("sab_gru", "SAB, GRU", {"method": "sab", "cell": "gru"}, 3),
    Contender("lstm", "LSTM", {"method": "torch"}),
    Contender("gru", "GRU", {"method": "torch", "cell": "gru"}),
    Contender("chrono", "LSTM, chrono initialisation", {"method": "chrono"}),
    Contender("self_attention", "LSTM, full self-attention", {"method": "sab", "reads_all": True}, 20),
    _rival("min_gru", num_layers=2),
    _rival("xlstm", 10, num_layers=2),
    _rival("lru", num_layers=2),
    _rival("mamba", 3, num_layers=2),
    _rival("transformer", num_layers=2),
    _rival("sparse_transformer", 3, num_layers=2),
)
_OF_ONE_SIZE = (
    _online("sab_small", "SAB, GRU", "sab"),
    _online("tbptt_small", "GRU, truncated backpropagation", "tbptt"),
    _online("bptt_small", "GRU, full backpropagation", "bptt"),
    *(_online(method, RIVALS[method].title, method) for method in ONLINE if method != "rtrl"),
)
CONTENDERS = {contender.name: contender for contender in (*_MATCHED, *_OF_ONE_SIZE)}
"""Every contender by its name, in the order of the tables."""


@dataclass(frozen=True)
class Problem(selection.Problem):
    """A task of the table and its contenders."""

    contenders: tuple[str, ...] = tuple(contender.name for contender in _MATCHED)
    is_matched: bool = True
    """Whether all contenders have as many parameters as the LSTM of `hidden_size`; else all have that hidden size."""
    streams: bool = False
    """Whether the cost of streaming inference is measured with the models of this problem."""

    @property
    def chooses_rate(self) -> bool:
        return True


def _online_problem(name: str, task: str, length: int) -> Problem:
    names = tuple(contender.name for contender in _OF_ONE_SIZE)
    return Problem(name, task, 3_000, {"length": length}, hidden_size=32, contenders=names, is_matched=False)


_ALL = (
    Problem("copying-300", "copying", 6_000, {"length": 300}, other_lengths=(100, 1_000, 2_000, 5_000), streams=True),
    Problem("recall-200", "recall", 6_000, {"length": 200, "pairs": 16}, other_lengths=(500, 1_000, 2_000)),
    Problem("adding-400", "adding", 6_000, {"length": 400}),
    Problem("mnist", "mnist", 5 * 781, eval_every=781),
    Problem("ptb", "ptb", 2 * 783, eval_every=783, hidden_size=256),
    _online_problem("copying-20", "copying", 20),
    _online_problem("copying-50", "copying", 50),
    _online_problem("adding-100", "adding", 100),
)
PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in _ALL if problem.task in TASKS}
"""Every problem by its name, in the order of the tables."""
ENTRIES = selection.ENTRIES | {
    "contender": str,
    "hidden_size": int,
    "other_lengths": dict[str, dict[str, float | None]],
}
TABLE = Table("rivals", "the rivals' table", PROBLEMS, ENTRIES)


@dataclass(frozen=True)
class RivalRow(selection.Row):
    """A contender at a learning rate on a problem."""

    problem: Problem
    contender: Contender
    rate: float

    task: str = field(default=TABLE.file, init=False)
    moments: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def entries(self) -> Record:
        return {"contender": self.contender.name, "hidden_size": self.model().hidden_size}

    @property
    def weight(self) -> int:
        return self.contender.weight

    def model(self) -> ModelConfig:
        problem, task = self.problem, self.problem.make_task()
        size = problem.hidden_size
        if problem.is_matched:
            size = matched_size(self.contender.name, problem.task, tuple(problem.options.items()), size)
        return self.contender.model(size, task)


@cache
def matched_size(name: str, task: str, options: tuple[tuple[str, Any], ...], hidden_size: int) -> int:
    """The hidden size at which a contender's parameters come closest to those of the LSTM of `hidden_size`."""
    contender, made = CONTENDERS[name], TASKS[task](**dict(options))

    def count(contender: Contender, size: int) -> int:
        return count_parameters(RunConfig(made, contender.model(size, made), TrainConfig(eval_batches=1)))

    wanted, step = count(CONTENDERS["lstm"], hidden_size), contender.multiple
    low, high = 1, 1  # in multiples of `step`
    while count(contender, high * step) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(contender, middle * step) < wanted else (low, middle)
    return step * min((low, high), key=lambda size: abs(count(contender, size * step) - wanted))


@dataclass(frozen=True)
class Part(selection.Part):
    """A part of the table; what is not given is not restricted."""

    methods: tuple[str, ...] | None = None
    """Names of contenders."""

    table: ClassVar[Table] = TABLE

    def __post_init__(self) -> None:
        for name in self.methods or ():
            check_choice("methods", name, CONTENDERS)
        super().__post_init__()

    def contenders(self, problem: Problem) -> Iterable[selection.Contender]:
        names = (name for name in problem.contenders if self.methods is None or name in self.methods)
        return [partial(RivalRow, problem, CONTENDERS[name]) for name in names]

    def rows(self) -> list[RivalRow]:
        """A row for each problem and contender, at any rate."""
        found = [contender(RATES[0]) for problem in self.problems() for contender in self.contenders(problem)]
        return [row for row in found[self.stride()] if isinstance(row, RivalRow)]


class RivalRunner(TableRunner):
    """The runner, with tests at other lengths on fewer rows at once."""

    def _test_batches(self, run: Run) -> tuple[TrainConfig, int]:
        return replace(run.config.training, batch_size=TEST_ROWS), TEST_BATCHES


def load(results: Path) -> list[Record]:
    """The records of the table."""
    return selection.load(TABLE, results)
