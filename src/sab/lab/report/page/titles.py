"""What tasks, models and runs are called for a reader, and the command that makes a run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sab.lab.report.tables import TITLES
from sab.lab.rivals import RIVALS
from sab.lab.tasks import TASKS, Task
from sab.lab.training.run import Run, RunConfig

METHODS = {
    "sab": "SAB",
    "tbptt": "truncated BPTT",
    "bptt": "full BPTT",
    "torch": "torch.nn",
    "torch_start": "torch.nn, our start",
    **{method: rival.title for method, rival in RIVALS.items()},
}
CELLS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "tanh RNN", "rnn_relu": "ReLU RNN"}


def task_name(task: Task) -> str:
    """The task and how long its sequences are: Copying, T = 30."""
    name = TITLES.get(task.title, task.title)
    length = task.options().get("length")
    return f"{name[:1].upper()}{name[1:]}" + ("" if length is None else f", T = {length:,}")


def model_name(config: RunConfig) -> str:
    """The method, the cell and the memory: SAB, GRU 128, k_trunc 5, k_top 10."""
    model, memory = config.model, config.model.layer_config()
    cell = f"{CELLS.get(model.cell, model.cell)} " if model.has_cell else ""
    parts = [METHODS[model.method], f"{cell}{model.hidden_size:,}"]
    parts[1] += f" × {model.num_layers}" if model.num_layers > 1 else ""
    parts += [] if memory.k_trunc is None else [f"k_trunc {memory.k_trunc}"]
    parts += [f"k_top {memory.k_top}"] if memory.k_top else []
    return ", ".join(parts)


def group_titles(groups: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Titles of groups of runs by the groups' folders: the task where there are several, the model, and the folder
    where that is not enough to tell them apart."""
    configs = {name: runs[0].config for name, runs in groups.items()}
    has_tasks = len({config.task.label for config in configs.values()}) > 1
    titles = {
        name: (f"{task_name(config.task)}: " if has_tasks else "") + model_name(config)
        for name, config in configs.items()
    }
    counts = Counter(titles.values())
    return {name: title if counts[title] == 1 else f"{title} ({name})" for name, title in titles.items()}


def command(config: RunConfig, out: Path) -> str | None:
    """The command that trains such a run into a folder; None where an option is one of an older version."""
    if config.input_scale != 1:
        return None
    defaults = RunConfig.default(TASKS[config.task.name]()).options()
    changed = {name: value for name, value in config.options().items() if value != defaults[name]}
    flags = [word for name, value in changed.items() for word in _flag(name, value)]
    return shlex.join(["sab", "train", config.task.name, *flags, "--out", str(out)])


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
