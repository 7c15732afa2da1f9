"""The project's recipe, called *ours* in the tables: how a model with a memory is trained here.

docs/recipes.md tells what was tried before it came to this.
"""

from __future__ import annotations

from sab.errors import check_choice
from sab.models import Method, ModelConfig
from sab.tasks import Adding, Copying
from sab.training import RunConfig, TrainConfig

HIDDEN_SIZE, BATCH_SIZE = 128, 64
"""The paper's, which no recipe changes."""
MEMORY = {"scorer": "mlp", "weighting": "softmax", "incorporate": "add"}


def ours(task: str, length: int, method: Method, k_trunc: int | None, k_top: int, k_att: int) -> RunConfig:
    """The recipe for a task; with the method `bptt` or `tbptt` it is its training alone, without a memory."""
    check_choice("task", task, ("copying", "adding"))
    model = {**MEMORY, "method": method, "hidden_size": HIDDEN_SIZE}
    model |= {"k_trunc": k_trunc, "k_top": k_top, "k_att": k_att}
    if task == "copying":
        return RunConfig(
            Copying(length, train_lengths="grid"),
            ModelConfig(**model, input_scale=8.0),
            TrainConfig(iterations=3_000, batch_size=BATCH_SIZE, lr=6e-3, lr_decay=0.5, clip=0.1, eval_every=100),
        )
    return RunConfig(
        Adding(length, train_lengths="grid"),
        ModelConfig(**model),
        TrainConfig(iterations=25 * length, batch_size=BATCH_SIZE, lr=6e-3, lr_decay=0.5, clip=0.1, eval_every=250),
    )
