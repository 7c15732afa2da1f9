"""The paper's tables as data: every row with the paper's values and the run that is made of it.

Full self-attention, permuted MNIST and CIFAR-10 are those of the authors' later paper (arXiv 1809.03702).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sab.errors import UserValueError, check_choice
from sab.lab import data
from sab.lab.experiments.recipe import BATCH_SIZE, HIDDEN_SIZE, ours, self_attention
from sab.lab.experiments.settings import BATCHES, PAPERS
from sab.lab.models import Method, ModelConfig
from sab.lab.tasks import TASKS, StoredTask, Task, Text8
from sab.lab.tasks.text8 import Part
from sab.lab.training import RunConfig, TrainConfig

Reading = Literal["as written", "as released", "ours"]
PAPERS_MEMORY = {"scorer": "mlp", "weighting": "softmax", "incorporate": "add", "input_start": "torch"}
"""What all rows in the paper's setting have in common, unless a reading replaces it; without a memory it does nothing,
but is part of a stored configuration."""
READINGS: dict[Reading, dict[str, str]] = {
    "as written": {"scorer": "affine", "weighting": "relu", "readout": "hidden+weights"},
    "as released": {"scorer": "affine_tanh", "weighting": "relu_norm", "readout": "hidden+summary"},
}
"""The paper's equations 1, 2 and 4, and its authors' released code; *ours* is the layers' default memory."""
IN_ALL_READINGS = {"copying": {(5, 5), (10, 10)}, "ptb": {(5, 10)}, "text8": {(5, 5)}, "mnist": {(14, 10)}}
"""The (k_trunc, k_top) of a task that have a row in these readings too, where the paper has a value."""
ITERATIONS = 20_000
"""How long a row of copying or adding is trained in the paper's setting: a tenth of what its authors allow."""
FULL_BUDGET = 10 * ITERATIONS
SEEDS = 3
"""How many seeds most rows need."""
CARRIED = 16
"""For how many sequences in a row the rows that are trained so carry their state."""
K_ATT = 2
COLUMNS = {
    "copying": ("accuracy_last10", "cross_entropy_last10", "cross_entropy"),
    "adding": ("mse",),
    "ptb": ("valid", "test"),
    "text8": ("valid", "test"),
    "mnist": ("valid", "test"),
    "cifar10": ("valid", "test"),
}
"""What the paper's tables have, in their order: metrics or, for the tasks with data sets, the one metric by split."""


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    task: str
    length: int | None
    """For copying and adding alone."""
    method: Method
    k_trunc: int | None = None
    k_top: int = 0
    k_att: int = K_ATT
    reading: Reading | None = None
    """How the method is read; None for a baseline in the paper's setting, `ours` for one in our way of training."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's values by column as it prints them, accuracies in per cent; empty for a row that is not in it."""
    cell: str = "lstm"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the task."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Options of the training that replace those of the setting or the recipe."""
    is_clipped: bool = True
    """Whether gradients are clipped as in the setting or the recipe; if not, they are not clipped at all."""
    other_lengths: tuple[int, ...] = ()
    """Lengths that the model is tested at, unchanged, after its training."""
    moments: tuple[int, ...] = ()
    """Iterations after which the attention of seed 0 is kept."""
    reads_all: bool = False
    """Whether every step reads every earlier hidden state and nothing is cut: full self-attention."""
    is_full_budget: bool = False
    """Whether it is trained for as long as the paper's authors allow; for copying and adding alone."""
    seeds: int = SEEDS
    """How many seeds the row needs, counted from 0."""

    @property
    def id(self) -> str:
        """Stable row id; never change it."""
        parts = [self.task]
        parts += ["permuted"] if self.is_permuted else []
        parts += ["carried"] if self.is_carried else []
        parts += [] if self.length is None else [str(self.length)]
        parts += ["self-attention" if self.reads_all else self.method]
        parts += [str(k) for k in (self.k_trunc, self.k_top) if k]
        parts += [self.reading.replace(" ", "-")] if self.reading else []
        parts += [] if self.cell == "lstm" else [self.cell]
        parts += [] if self.is_clipped else ["unclipped"]
        parts += ["full-budget"] if self.is_full_budget else []
        return "-".join(parts)

    @property
    def credit(self) -> Literal["sab", "bptt", "tbptt"]:
        """How the past gets credit: with a memory, by full or by truncated backpropagation."""
        return "sab" if self.method == "sab" else "tbptt" if self.method == "tbptt" else "bptt"

    @property
    def is_permuted(self) -> bool:
        return self.options.get("permuted", False)

    @property
    def is_carried(self) -> bool:
        """Whether it is trained with the state carried from one sequence to the next."""
        return "carried" in self.options

    @property
    def is_control(self) -> bool:
        """Whether this is a baseline that is trained in our way: what a memory is worth on its own."""
        return self.method != "sab" and self.reading == "ours"

    @property
    def is_papers(self) -> bool:
        """Whether the row is in the paper; of SAB's readings only *ours* counts, and no row is counted twice."""
        return bool(self.paper) and self.reading in (None, "ours") and not self.is_full_budget

    @property
    def judged(self) -> str:
        """The column by which a row is compared with the paper."""
        columns = COLUMNS[self.task]
        return "test" if "test" in columns else columns[0]

    def config(self, seed: int, iterations: int | None = None, device: str = "auto") -> RunConfig:
        """The run of this row from a seed, with as many iterations as the row has or as are given."""
        config = self._ours() if self.reading == "ours" else self._papers()
        if self.reads_all:
            config = replace(config, model=config.model.with_options(**self_attention(config.task)))
        changed: dict[str, Any] = {"seed": seed, "device": device}
        changed |= {"iterations": FULL_BUDGET, "checkpoint_every": 5_000} if self.is_full_budget else {}
        changed |= self.overrides
        changed |= {} if iterations is None else {"iterations": iterations}
        changed |= {} if self.is_clipped else {"clip": None}
        return replace(config, training=replace(config.training, **changed))

    def on(self, data_dir: Path | None) -> Row:
        """The row on the data in a folder: on the text8 prefix where only that part of text8 is available."""
        if self.task != "text8":
            return self
        is_prefix = data.has("text8 prefix", data_dir) and not data.has("text8", data_dir)
        return self._on_part("prefix" if is_prefix else "full")

    def as_in(self, config: RunConfig) -> Row:
        """The row on the data of a run that was made of it."""
        return self._on_part(config.task.part) if isinstance(config.task, Text8) else self

    def _on_part(self, part: Part) -> Row:
        return replace(self, options={**self.options, "part": part})

    def _ours(self) -> RunConfig:
        memory = self.k_trunc, self.k_top, self.k_att
        return ours(self.task, self.length, self.method, *memory, self.cell, **self.options)

    def _papers(self) -> RunConfig:
        """The paper's setting: for copying and adding hidden size 128, batches of 64 of one length, 1e-3, clip 1."""
        task = self._task()
        model: dict[str, Any] = {**PAPERS_MEMORY, "method": self.method, "cell": self.cell}
        model |= {"k_trunc": self.k_trunc, "k_top": self.k_top, "k_att": self.k_att}
        if self.reading is not None:
            model |= READINGS[self.reading]
            model["max_microstates"] = max(task.steps // self.k_att, 1)  # b_i of equation 1, one for each
        if isinstance(task, StoredTask):
            return PAPERS[self.task].config(task, **model)
        training = TrainConfig(iterations=ITERATIONS, batch_size=BATCH_SIZE, lr=1e-3, clip=1.0, eval_every=1000)
        return RunConfig(task, ModelConfig.from_options({"hidden_size": HIDDEN_SIZE, **model}), training)

    def _task(self) -> Task:
        length = {} if self.length is None else {"length": self.length}
        return TASKS[self.task](**length, **self.options)


OTHER_LENGTHS = (200, 300, 400, 2000, 5000)
MOMENTS = (100, 300, 600)
"""The paper's figure 3 shows 400, 800 and 3,000 of 200,000 iterations; ours are a few thousand."""


def _printed(task: str, values: str) -> dict[str, str]:
    return dict(zip(COLUMNS[task], values.split(" / "), strict=True))


def _baselines(task: str, length: int | None, values: Mapping[int | None, str], **options: Any) -> list[Row]:
    """Rows without a memory from what the paper has for each k_trunc; None is full backpropagation."""
    return [
        Row(task, length, "bptt" if k_trunc is None else "tbptt", k_trunc, paper=_printed(task, value), **options)
        for k_trunc, value in values.items()
    ]


def _controls(task: str, length: int | None, *truncations: int | None, **options: Any) -> list[Row]:
    """Rows without a memory in our way of training."""
    return [Row(task, length, "bptt" if k is None else "tbptt", k, reading="ours", **options) for k in truncations]


def _sab(task: str, length: int | None, values: Mapping[tuple[int, ...], str | None], **options: Any) -> list[Row]:
    """Rows of SAB from what the paper has for (k_trunc, k_top[, k_att]), some of them in every reading."""
    rows: list[Row] = []
    for (k_trunc, k_top, *k_att), value in values.items():
        paper = {} if value is None else _printed(task, value)
        row = Row(task, length, "sab", k_trunc, k_top, *k_att, reading="ours", paper=paper, **options)
        in_all_readings = value is not None and (k_trunc, k_top) in IN_ALL_READINGS.get(task, ())
        rows += [replace(row, reading=reading, other_lengths=()) for reading in READINGS if in_all_readings]
        rows.append(row)
    return rows


def _variants(row: Row) -> list[Row]:
    """A row of the paper with what is not in it: other cells, and gradients that are not clipped."""
    plain = replace(row, paper={})
    return [*(replace(plain, cell=cell) for cell in ("gru", "rnn_tanh")), replace(plain, is_clipped=False)]


def _self_attention(length: int, **options: Any) -> Row:
    return Row("copying", length, "sab", reading="ours", reads_all=True, **options)


def _with_full_budget(rows: Iterable[Row], seeds: int = SEEDS) -> list[Row]:
    """The same rows, trained for as long as the paper's authors allow."""
    return [replace(row, is_full_budget=True, seeds=seeds) for row in rows]


def _copying() -> list[Row]:
    rows = [*_copying_100(), *_copying_200(), *_copying_300()]
    rows += [row for length in (500, 1000, 2000) for row in _sab("copying", length, {(10, 10): None})]
    drawn = "copying-200-sab-10-10-ours"
    return [replace(row, moments=MOMENTS) if row.id == drawn else row for row in rows]


def _copying_100() -> list[Row]:
    baselines = _baselines(
        "copying",
        100,
        {
            None: "98.8 / 0.030 / 0.002",
            5: "31.0 / 1.737 / 0.145",
            10: "29.6 / 1.772 / 0.148",
            20: "30.5 / 1.714 / 0.143",
        },
    )
    # What people do today for long memories: the start of Tallec and Ollivier (2018), and a rate that falls.
    today = Row("copying", 100, "chrono", is_full_budget=True, overrides={"lr_decay": 0.5})
    sab = _sab(
        "copying",
        100,
        {(5, 5): "99.6 / 0.017 / 0.001", (10, 10): "100.0 / 0.000 / 0.001"},
        other_lengths=OTHER_LENGTHS,
    )
    return [
        *baselines,
        *_with_full_budget(baselines),
        today,
        *_controls("copying", 100, None, 5, 10),
        _self_attention(100, other_lengths=OTHER_LENGTHS),
        *_sab("copying", 100, {(1, 1): "17.6 / 2.044 / 0.170", (1, 10): "62.7 / 0.964 / 0.080"}),
        *sab,
        *_with_full_budget(row for row in sab if row.reading == "as released"),
    ]


def _copying_200() -> list[Row]:
    baselines = _baselines(
        "copying",
        200,
        {
            None: "56.0 / 1.07 / 0.046",
            5: "17.1 / 2.03 / 0.092",
            10: "20.2 / 1.98 / 0.090",
            20: "35.8 / 1.61 / 0.073",
            150: "35.0 / 1.596 / 0.073",
        },
    )
    sab = {(1, 1): "29.8 / 1.818 / 0.083", (5, 5): "99.3 / 0.032 / 0.001", (10, 10): "98.7 / 0.049 / 0.002"}
    # The authors' released file names this setting as that of its best checkpoint.
    checkpoint = Row("copying", 200, "sab", 1, 5, reading="as released", overrides={"clip": 0.5})
    return [
        *baselines,
        *_with_full_budget(baselines[:1], seeds=1),
        *_controls("copying", 200, None, 5),
        _self_attention(200),
        *_sab("copying", 200, sab),
        *_with_full_budget([checkpoint], seeds=1),
    ]


def _copying_300() -> list[Row]:
    baselines = _baselines(
        "copying",
        300,
        {
            None: "35.9 / 0.197 / 0.047",
            1: "14.0 / 2.077 / 0.065",
            20: "25.7 / 1.848 / 0.197",
            150: "24.4 / 1.857 / 0.058",
        },
    )
    sab = {
        (1, 1): "26.7 / 0.27 / 0.059",
        (1, 5): "46.5 / 1.340 / 0.042",
        (5, 5): "98.9 / 0.048 / 0.002",
        (10, 10): None,
    }
    return [
        *baselines,
        *_with_full_budget(baselines[:1], seeds=1),
        *_controls("copying", 300, None, 5),
        _self_attention(300),
        *_sab("copying", 300, sab),
    ]


def _adding() -> list[Row]:
    shorter = _baselines("adding", 200, {None: "0.0000", 20: "0.0011", 50: "0.0003"})
    longer = _baselines("adding", 400, {None: "0.00000", 100: "0.00068"})
    return [
        *shorter,
        *_with_full_budget(shorter[:1], seeds=1),
        *_controls("adding", 200, None, 10),
        *_sab("adding", 200, {(5, 10): "0.0004", (10, 10): "0.0001"}),
        *longer,
        *_with_full_budget(longer[:1], seeds=1),
        *_controls("adding", 400, None, 10),
        *_sab("adding", 400, {(5, 10, 5): "0.00037", (10, 10, 10): "0.00014"}),
    ]


def _ptb() -> list[Row]:
    rows = [
        *_baselines("ptb", None, {None: "1.48 / 1.38", 1: "1.57 / 1.47", 5: "1.54 / 1.44", 20: "1.52 / 1.43"}),
        *_controls("ptb", None, None, 5),
        *_sab("ptb", None, {(5, 5): "1.51 / 1.42", (5, 10): "1.49 / 1.40"}),
    ]
    return [*rows, *_variants(rows[-1]), *_carried(*_controls("ptb", None, None, 5), rows[-1])]


def _carried(*rows: Row) -> list[Row]:
    """The same rows trained with the state carried."""
    return [replace(row, paper={}, options={"carried": CARRIED}) for row in rows]


def _text8() -> list[Row]:
    return [
        *_baselines("text8", None, {None: "1.54 / 1.51", 5: "1.64 / 1.60"}, seeds=1),
        *_controls("text8", None, None, 5, seeds=1),
        *_sab("text8", None, {(5, 5, 5): "1.56 / 1.53"}),
    ]


OVERRIDES: dict[str, dict[str, Any]] = {"mnist-bptt": {"iterations": 50 * BATCHES["mnist"], "patience": 20}}
"""Full backpropagation in the paper's setting stays on a plateau for 16 epochs."""


def _mnist() -> list[Row]:
    rows = [
        *_baselines("mnist", None, {None: "91.2 / 90.3"}),
        *_controls("mnist", None, None, 14, 10),
        *_sab("mnist", None, {(14, 5, 14): "90.6 / 89.8", (14, 10, 14): "92.2 / 90.9", (10, 10, 10): "92.2 / 91.1"}),
    ]
    chosen = next(row for row in rows if row.id == "mnist-sab-14-10-ours")
    permuted = [*_controls("mnist", None, None), replace(chosen, paper={})]
    rows += [*(replace(row, options={"permuted": True}) for row in permuted), *_variants(chosen)]
    return [replace(row, overrides=OVERRIDES.get(row.id, {})) for row in rows]


def _cifar10() -> list[Row]:
    return [
        *_controls("cifar10", None, None, 16),
        *_sab("cifar10", None, {(16, 10, 16): None}),
    ]


ROWS: dict[str, Row] = {row.id: row for row in (*_copying(), *_adding(), *_ptb(), *_text8(), *_mnist(), *_cifar10())}
"""Every row by its id, in the order of the tables."""


def find(tasks: Iterable[str] = (), patterns: Iterable[str] | None = None, papers: bool = False) -> list[Row]:
    """The rows of some tasks, none of which means all, whose ids match one of the patterns, as file names do.

    With `papers` they are the paper's own alone, each in one reading.
    """
    with_tables = list(dict.fromkeys(row.task for row in ROWS.values()))
    wanted = [check_choice("task", task, with_tables) for task in tasks] or with_tables
    rows = [row for row in ROWS.values() if row.task in wanted and (row.is_papers or not papers)]
    if patterns is None:
        return rows
    ids = [row.id for row in rows]
    chosen: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(ids, pattern)
        if not matching:
            shown = ", ".join(ids[:3]) + (f", … ({len(ids)} rows: `sab reproduce --list`)" if len(ids) > 3 else "")
            raise UserValueError(f"rows must match at least one of {shown}; got {pattern!r}.", "rows")
        chosen.update(matching)
    return [row for row in rows if row.id in chosen]
