"""The project's recipe, called *ours* in the tables: how a model with a memory is trained here.

docs/recipes.md describes the experiments behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sab.errors import UserValueError, check_choice
from sab.lab.experiments.settings import PAPERS, Setting
from sab.lab.models import Method, ModelConfig
from sab.lab.tasks import TASKS, Adding, Copying
from sab.lab.training import RunConfig, TrainConfig

HIDDEN_SIZE, BATCH_SIZE = 128, 64
"""The paper's for copying and adding, which no recipe changes."""
MEMORY = {"scorer": "mlp", "weighting": "softmax", "incorporate": "add"}
READER = {**MEMORY, "incorporate": "concat", "initial_summary": 0.0, "readout": "hidden+summary", "attention_size": 64}
"""For text. What is read is in the way where it is added to the hidden state, since a microstate says which character
was likely then; here it goes to the readout on a way of its own. A scorer as wide as 1,000 hidden units would change
its scores by more than 1 at each of Adam's steps."""
MEMORY_OF = {"ptb": READER, "text8": READER}
MEMORY_LR_OF = {"ptb": 0.03, "text8": 0.03}
"""At the full rate one step of Adam would change the output of `concat`'s matrix [1000, 2000] by its own size."""
EPOCHS_OF = {"text8": 8}
"""With a memory: an iteration takes three times as long as without one."""
BOUNDED = {"weighting": "softmax_sink", "incorporate": "add_bounded", "initial_summary": 1.0, "readout": "hidden"}
MEMORY_OF_CELL = {"gru": {**BOUNDED, "initial_score": -4.0}, "rnn_tanh": BOUNDED, "rnn_relu": BOUNDED}
"""What differs for cells other than the LSTM. A GRU's next state has a share of its last one: what is added to that
would grow from step to step, so its memory also begins hardly read."""
LR_OF_CELL = {"rnn_tanh": 1e-3, "rnn_relu": 1e-3}
BRIEF_PTB = replace(PAPERS["ptb"], lr=4e-3, lr_decay=0.4, input_scale=4.0, epochs=5, patience=None)
OURS: dict[str, Setting] = {
    "ptb": replace(BRIEF_PTB, dropout=0.3, weight_decay=0.05, options={"shifted": True}, epochs=8),
    "text8": replace(PAPERS["text8"], lr=3e-3, lr_decay=0.1, input_scale=4.0, epochs=12),
    "mnist": replace(
        PAPERS["mnist"],
        lr=2e-3,
        lr_decay=0.5,
        clip=0.1,
        input_scale=8.0,
        precision="bfloat16",
        epochs=10,
        patience=None,
    ),
}
"""What is not the paper's for the tasks with data sets. Penn Treebank is so small that a model of this size would learn
it by heart; dropout, the decay of weights and sequences that begin elsewhere in every epoch are against that."""
OURS_OF_CELL = {("ptb", cell): replace(BRIEF_PTB, lr=lr) for cell, lr in LR_OF_CELL.items()}
"""For a cell without gates, which does not overfit ptb."""


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
    """The recipe for a task; with the method `bptt` or `tbptt` it is its training alone, without a memory.

    `length` is for copying and adding, where it must be given, and `options` are further ones of the task.
    """
    check_choice("task", task, ("copying", "adding", *OURS))
    model: dict[str, Any] = {**MEMORY_OF.get(task, MEMORY), "method": method, "cell": cell}
    model |= {"k_trunc": k_trunc, "k_top": k_top, "k_att": k_att}
    model |= MEMORY_OF_CELL.get(cell, {})
    if task in OURS:
        if length is not None:
            raise UserValueError(f"length must be None for task {task}; got {length!r}.", "length")
        usual = replace(OURS[task], lr=LR_OF_CELL.get(cell, OURS[task].lr))
        setting = OURS_OF_CELL.get((task, cell), usual)
        if method == "sab" and cell not in MEMORY_OF_CELL:
            memory_lr, epochs = MEMORY_LR_OF.get(task, 1.0), EPOCHS_OF.get(task, setting.epochs)
            setting = replace(setting, memory_lr=memory_lr, epochs=epochs)
        return setting.config(TASKS[task](**{**setting.options, **options}), **model)  # pyright: ignore[reportArgumentType]
    options = {"length": length, "train_lengths": "grid", **options}
    training = TrainConfig(iterations=3_000, batch_size=BATCH_SIZE, lr=6e-3, lr_decay=0.5, clip=0.1, eval_every=100)
    scale = 8.0 if task == "copying" else 4.0
    model_config = ModelConfig.from_options({**model, "hidden_size": HIDDEN_SIZE, "input_scale": scale})
    if task == "copying":
        return RunConfig(Copying(**options), model_config, training)
    adding = Adding(**options)
    training = replace(training, iterations=25 * adding.length, lr=4e-3, lr_decay=0.3, eval_every=250)
    return RunConfig(adding, model_config, training)
