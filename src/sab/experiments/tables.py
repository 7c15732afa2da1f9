"""The paper's tables as data: every row with the paper's values and the run that is made of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sab.errors import ValueMistake, check_choice
from sab.experiments.recipe import BATCH_SIZE, HIDDEN_SIZE, ours
from sab.models import Method, ModelConfig
from sab.tasks import TASKS
from sab.training import RunConfig, TrainConfig

Reading = Literal["as written", "as released", "ours"]
READINGS: dict[Reading, dict[str, str]] = {
    "as written": {"scorer": "affine", "weighting": "relu", "readout": "hidden+weights"},
    "as released": {"scorer": "affine_tanh", "weighting": "relu_norm", "readout": "hidden+summary"},
}
"""What the paper's equations 1, 2 and 4 say, and what its authors' code does; *ours* is in recipe.py."""
ITERATIONS = 20_000
"""How long a row is trained in the paper's setting: a tenth of what its authors allow."""
K_ATT = 2
COLUMNS = {"copying": ("accuracy_last10", "cross_entropy_last10", "cross_entropy"), "adding": ("mse",)}
"""The metrics that the paper's tables have, in their order."""


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    task: str
    length: int
    method: Method
    k_trunc: int | None = None
    k_top: int = 0
    k_att: int = K_ATT
    reading: Reading | None = None
    """How the method is read; None for a baseline in the paper's setting, `ours` for one in our way of training."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's values by metric as it prints them, accuracies in per cent; empty for a row that is not in it."""
    other_lengths: tuple[int, ...] = ()
    """Lengths that the model is tested at, unchanged, after its training."""
    moments: tuple[int, ...] = ()
    """Iterations after which the attention of seed 0 is kept."""

    @property
    def id(self) -> str:
        """What the row is called, for ever."""
        parts = [self.task, str(self.length), self.method]
        parts += [str(k) for k in (self.k_trunc, self.k_top) if k]
        parts += [self.reading.replace(" ", "-")] if self.reading else []
        return "-".join(parts)

    @property
    def is_control(self) -> bool:
        """Whether this is a baseline that is trained in our way: what a memory is worth on its own."""
        return self.method != "sab" and self.reading == "ours"

    def config(self, seed: int, iterations: int | None = None, device: str = "auto") -> RunConfig:
        """The run of this row from a seed, with as many iterations as the row has or as are given."""
        config = self._ours() if self.reading == "ours" else self._papers()
        changed: dict[str, Any] = {"seed": seed, "device": device}
        changed |= {} if iterations is None else {"iterations": iterations}
        return replace(config, training=replace(config.training, **changed))

    def _ours(self) -> RunConfig:
        return ours(self.task, self.length, self.method, self.k_trunc, self.k_top, self.k_att)

    def _papers(self) -> RunConfig:
        """The paper's setting: hidden size 128, batches of 64 sequences of one length, Adam at 1e-3, clip at 1."""
        task = TASKS[self.task](length=self.length)  # pyright: ignore[reportCallIssue]
        options: dict[str, Any] = {} if self.reading is None else dict(READINGS[self.reading])
        if self.reading is not None:
            options["max_microstates"] = max(task.steps // self.k_att, 1)  # b_i of equation 1, one for each
        memory = {"k_trunc": self.k_trunc, "k_top": self.k_top, "k_att": self.k_att}
        model = ModelConfig(method=self.method, hidden_size=HIDDEN_SIZE, **memory, **options)
        training = TrainConfig(iterations=ITERATIONS, batch_size=BATCH_SIZE, lr=1e-3, clip=1.0, eval_every=1000)
        return RunConfig(task, model, training)


OTHER_LENGTHS = (200, 300, 400, 2000, 5000)
MOMENTS = (100, 300, 600)
"""The paper's figure 3 shows 400, 800 and 3,000 of 200,000 iterations; ours are a few thousand."""


def _printed(task: str, values: str) -> dict[str, str]:
    return dict(zip(COLUMNS[task], values.split(" / "), strict=True))


def _baselines(task: str, length: int, values: Mapping[int | None, str]) -> list[Row]:
    """Rows without a memory from what the paper has for each k_trunc; None is full backpropagation."""
    return [
        Row(task, length, "bptt" if k_trunc is None else "tbptt", k_trunc, paper=_printed(task, value))
        for k_trunc, value in values.items()
    ]


def _sab(task: str, length: int, values: Mapping[tuple[int, ...], str | None], **options: Any) -> list[Row]:
    """Rows of SAB from what the paper has for (k_trunc, k_top[, k_att]); copying's 5,5 and 10,10 in every reading."""
    rows: list[Row] = []
    for (k_trunc, k_top, *k_att), value in values.items():
        paper = {} if value is None else _printed(task, value)
        row = Row(task, length, "sab", k_trunc, k_top, *k_att, reading="ours", paper=paper, **options)
        is_read_otherwise = task == "copying" and value is not None and k_trunc == k_top and k_top in (5, 10)
        rows += [replace(row, reading=reading, other_lengths=()) for reading in READINGS if is_read_otherwise]
        rows.append(row)
    return rows


def _copying() -> list[Row]:
    rows = [
        *_baselines(
            "copying",
            100,
            {
                None: "98.8 / 0.030 / 0.002",
                5: "31.0 / 1.737 / 0.145",
                10: "29.6 / 1.772 / 0.148",
                20: "30.5 / 1.714 / 0.143",
            },
        ),
        *(Row("copying", 100, "bptt" if k is None else "tbptt", k, reading="ours") for k in (None, 5, 10)),
        *_sab("copying", 100, {(1, 1): "17.6 / 2.044 / 0.170", (1, 10): "62.7 / 0.964 / 0.080"}),
        *_sab(
            "copying",
            100,
            {(5, 5): "99.6 / 0.017 / 0.001", (10, 10): "100.0 / 0.000 / 0.001"},
            other_lengths=OTHER_LENGTHS,
        ),
        *_baselines(
            "copying",
            200,
            {
                None: "56.0 / 1.07 / 0.046",
                5: "17.1 / 2.03 / 0.092",
                10: "20.2 / 1.98 / 0.090",
                20: "35.8 / 1.61 / 0.073",
                150: "35.0 / 1.596 / 0.073",
            },
        ),
        *_sab(
            "copying",
            200,
            {(1, 1): "29.8 / 1.818 / 0.083", (5, 5): "99.3 / 0.032 / 0.001", (10, 10): "98.7 / 0.049 / 0.002"},
        ),
        *_baselines(
            "copying",
            300,
            {
                None: "35.9 / 0.197 / 0.047",
                1: "14.0 / 2.077 / 0.065",
                20: "25.7 / 1.848 / 0.197",
                150: "24.4 / 1.857 / 0.058",
            },
        ),
        *_sab(
            "copying",
            300,
            {
                (1, 1): "26.7 / 0.27 / 0.059",
                (1, 5): "46.5 / 1.340 / 0.042",
                (5, 5): "98.9 / 0.048 / 0.002",
                (10, 10): None,
            },
        ),
        *(row for length in (500, 1000, 2000) for row in _sab("copying", length, {(10, 10): None})),
    ]
    drawn = "copying-200-sab-10-10-ours"
    return [replace(row, moments=MOMENTS) if row.id == drawn else row for row in rows]


def _adding() -> list[Row]:
    return [
        *_baselines("adding", 200, {None: "0.0000", 20: "0.0011", 50: "0.0003"}),
        *_sab("adding", 200, {(5, 10): "0.0004", (10, 10): "0.0001"}),
        *_baselines("adding", 400, {None: "0.00000", 100: "0.00068"}),
        *_sab("adding", 400, {(5, 10, 5): "0.00037", (10, 10, 10): "0.00014"}),
    ]


ROWS: dict[str, Row] = {row.id: row for row in (*_copying(), *_adding())}
"""Every row by its id, in the order of the tables."""


def find(tasks: Iterable[str] = (), patterns: Iterable[str] | None = None) -> list[Row]:
    """The rows of some tasks, none of which means all, whose ids match one of the patterns, as file names do."""
    with_tables = list(dict.fromkeys(row.task for row in ROWS.values()))
    wanted = [check_choice("task", task, with_tables) for task in tasks] or with_tables
    rows = [row for row in ROWS.values() if row.task in wanted]
    if patterns is None:
        return rows
    ids = [row.id for row in rows]
    chosen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(ids, pattern)
        if not matching:
            raise ValueMistake(f"rows must match at least one of {', '.join(ids)}; got {pattern!r}.", "rows")
        chosen.update(matching)
    return [row for row in rows if row.id in chosen]
