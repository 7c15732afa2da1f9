"""The project's recipe, called *ours* in the tables: how a model is trained here, with a memory or without one.

It is about training alone, and the same for every method and cell. The memory is the layers' default one, with the
k_trunc, k_top and k_att of the row. docs/recipes.md describes the experiments behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sab.errors import UserValueError, check_choice
from sab.lab.experiments.settings import PAPERS, Setting
from sab.lab.models import Method, ModelConfig
from sab.lab.tasks import TASKS, Adding, Copying, Task
from sab.lab.training import RunConfig, TrainConfig

HIDDEN_SIZE, BATCH_SIZE = 128, 64
"""The paper's for copying and adding, which the recipe does not change."""
OURS: dict[str, Setting] = {
    "ptb": replace(
        PAPERS["ptb"],
        lr=4e-3,
        lr_decay=0.4,
        dropout=0.3,
        weight_decay=0.05,
        options={"shifted": True},
        epochs=8,
        patience=None,
    ),
    "text8": replace(PAPERS["text8"], lr=3e-3, lr_decay=0.1, epochs=8),
    "mnist": replace(PAPERS["mnist"], lr=2e-3, lr_decay=0.5, clip=0.1, precision="bfloat16", epochs=10, patience=None),
}
"""The tasks with data sets. Penn Treebank is so small that a model of this size would learn it by heart; dropout,
weight decay and sequences that begin elsewhere in every epoch prevent that."""
OURS["cifar10"] = OURS["mnist"]  # not tuned


def self_attention(task: Task) -> dict[str, Any]:
    """The options with which every step reads every earlier hidden state and nothing is cut."""
    return {"k_top": task.steps, "k_att": 1, "k_trunc": None, "forward": "dense"}


def ours(
    task: str,
    length: int | None,
    method: Method,
    k_trunc: int | None,
    k_top: int,
    k_att: int,
    cell: str = "lstm",
    **options: Any,
) -> RunConfig:
    """The recipe for a task; the method `bptt` or `tbptt` is trained in the same way, without a memory.

    `length` is for copying and adding, where it must be given, and `options` are further ones of the task.
    """
    check_choice("task", task, ("copying", "adding", *OURS))
    model: dict[str, Any] = {"method": method, "cell": cell, "k_trunc": k_trunc, "k_top": k_top, "k_att": k_att}
    if task in OURS:
        if length is not None:
            raise UserValueError(f"length must be None for task {task}; got {length!r}.", "length")
        setting = OURS[task]
        return setting.config(TASKS[task](**{**setting.options, **options}), **model)  # pyright: ignore[reportArgumentType]
    options = {"length": length, "train_lengths": "grid", **options}
    training = TrainConfig(iterations=6_000, batch_size=BATCH_SIZE, lr=6e-3, lr_decay=0.5, clip=0.1, eval_every=100)
    model_config = ModelConfig.from_options({**model, "hidden_size": HIDDEN_SIZE})
    if task == "copying":
        return RunConfig(Copying(**options), model_config, training)
    adding = Adding(**options)
    training = replace(training, iterations=25 * adding.length, lr=4e-3, lr_decay=0.3, eval_every=250)
    return RunConfig(adding, model_config, training)
