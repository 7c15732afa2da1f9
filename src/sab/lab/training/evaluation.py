"""Evaluation of a model on a task's data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sab.errors import UserValueError, check_int
from sab.lab.models import ModelConfig, SequenceModel, State
from sab.lab.tasks import CharacterTask, Split, StoredTask, Task
from sab.lab.training import distributed
from sab.lab.training.config import TrainConfig

LONGEST = 5000
"""How many steps a sequence may have that a figure or the report page is made from."""
MOST_ROWS = 1000
"""How many sequences a mean in a figure is over, at most."""
AT_ONCE, MOST_NUMBERS = 2**24, 2**26
"""How many numbers (hidden states, selections, weights) a figure's sequences may have that are looked at at once, and
all of them."""


def evaluate(
    model: nn.Module, task: Task, config: TrainConfig, split: Split = "test", batches: int | None = None
) -> dict[str, float]:
    """Means of the task's metrics over the first `batches` batches of a split, by default `config.eval_batches`.

    If that is None, the means are over the whole split, with each target counted once.
    """
    count = config.eval_batches if batches is None else check_int("batches", batches, 1)
    device = next(model.parameters()).device
    return mean_metrics(model, task, config, _batches(task, config, split, count, device))


def mean_metrics(
    model: nn.Module, task: Task, config: TrainConfig, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Means of the task's metrics over some batches; every target has the same weight."""
    seen: list[tuple[int, dict[str, Tensor]]] = []
    with _evaluating(model):
        for inputs, targets in distributed.own_items(batches):
            seen.append((targets.numel(), task.metrics(predict(model, inputs, config), targets)))
    # Only now, since reading a number waits for the device.
    mine = [(size, {name: value.item() for name, value in metrics.items()}) for size, metrics in seen]
    found = distributed.gather(mine)
    sizes = {size for size, _ in found}
    weights = [1 if len(sizes) == 1 else size for size, _ in found]
    return {
        name: sum(weight * metrics[name] for weight, (_, metrics) in zip(weights, found, strict=True)) / sum(weights)
        for name in found[0][1]
    }


def evaluate_fully(
    model: SequenceModel,
    task: Task,
    config: TrainConfig,
    split: Split = "test",
    streams: int | None = None,
    max_memory: int | None = None,
) -> dict[str, float]:
    """The metrics of `evaluate`, over the whole split where it is finite; for a text also `carried_bits`, where the
    model can stream."""
    for option, value in (("streams", streams), ("max_memory", max_memory)):
        if value is not None and not isinstance(task, CharacterTask):
            raise UserValueError(
                f"{option} must be None for task {task.name}, which is no text; got {value!r}.", option
            )
    found = evaluate(model, task, replace(config, eval_batches=None) if isinstance(task, StoredTask) else config, split)
    if isinstance(task, CharacterTask) and model.can_stream:
        characters = task.characters(split)
        count = min(config.batch_size, len(characters) - 1) if streams is None else streams
        bits = carried_bits(model, task, config, characters, count, max_memory)
        found["bits_per_character_carried"] = distributed.from_first(bits)
    return found


def carried_bits(
    model: SequenceModel,
    task: CharacterTask,
    config: TrainConfig,
    characters: Tensor,
    streams: int,
    max_memory: int | None = None,
) -> float:
    """Bits per character of a text, [N], with state and macrostate carried through from one sequence to the next.

    The text is divided into `streams` parts, read in parallel, each from a new state. Each character but the first is
    predicted once. A quarter of a sequence is read at a time; before each, `remember` drops all but the latest
    microstates.
    """
    check_int("streams", streams, 1)
    check_int("max_memory", max_memory, 0, optional=True)
    said = len(characters) - 1
    if streams > said:
        raise UserValueError(
            f"streams must be at most {said}, the number of characters to say; got {streams}.", "streams"
        )
    edge = said // streams * streams
    seen, to_say = (text[:edge].view(streams, -1).t() for text in (characters, characters[1:]))
    with _evaluating(model):
        found, state = _read_on(model, task, config, seen, to_say, model.first_state(), max_memory)
        if edge < said:  # the last stream continues to the end
            state = state.select([streams - 1])
            rest = characters[edge:].unsqueeze(1)
            found += _read_on(model, task, config, rest[:-1], rest[1:], state, max_memory)[0]
    return sum(size * bits.item() for size, bits in found) / said


def remember(model: SequenceModel, task: CharacterTask, state: State, max_memory: int | None) -> Any:
    """The state with its latest `max_memory` microstates or, if None, as many as the model had in training.

    A model with `max_memory` had at most as many as its state has. Another one had as many as a sequence has: among far
    more microstates some would score higher than any did there.
    """
    if max_memory is None and not model.is_rival and model.config.layer_config().forgets:
        return state
    k_att = 1 if model.is_rival else model.config.memory.k_att
    return state.recent(task.steps // k_att if max_memory is None else max_memory)


def _read_on(
    model: SequenceModel,
    task: CharacterTask,
    config: TrainConfig,
    inputs: Tensor,
    targets: Tensor,
    state: State | None,
    max_memory: int | None,
) -> tuple[list[tuple[int, Tensor]], State]:
    """The size and the bits per character of each piece of parallel texts, and the final state."""
    device = next(model.parameters()).device
    found: list[tuple[int, Tensor]] = []
    piece = max(task.steps // 4, 1)
    for start in range(0, len(inputs), piece):
        seen, said = (text[start : start + piece].to(device).long() for text in (inputs, targets))
        outputs, end = predict_on(model, seen, state, config)
        state = remember(model, task, end, max_memory)
        found.append((said.numel(), task.metrics(outputs, said)["bits_per_character"]))
    assert state is not None  # there is at least one character
    return found, state


def _batches(
    task: Task, config: TrainConfig, split: Split, count: int | None, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `count` batches of a split, or all of it."""
    if count is None:
        if not isinstance(task, StoredTask):
            raise UserValueError(
                f"batches must be a whole number for task {task.name}, whose data have no end.", "batches"
            )
        yield from task.whole(split, config.batch_size, device, config.dtype)
    else:
        for index in range(count):
            yield task.batch(config.seed, index, config.batch_size, split, device, config.dtype)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def predict(model: nn.Module, inputs: Tensor, config: TrainConfig) -> Tensor:
    """The model's outputs in the precision of the weights."""
    return predict_on(model, inputs, None, config)[0]


def predict_on(
    model: nn.Module, inputs: Tensor, state: State | None, config: TrainConfig, kept: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The same for a sequence that goes on from a state, and the final state; `kept` as in `SequenceModel.forward`."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        outputs, end = model(inputs, state, kept=kept)
    return outputs.to(config.dtype), end


def mean_attention(model: SequenceModel, task: Task, config: TrainConfig, split: Split = "test") -> Tensor:
    """Attention weights averaged over a batch, [layers, attending steps, microstates]; NaN before a microstate exists.

    The model must have a memory, and the task more steps than k_att.
    """
    k_att, device = model.config.memory.k_att, next(model.parameters()).device
    rows, at_once = rows_of_figure(model.config, task, config.batch_size)
    inputs, _ = task.batch(config.seed, 0, rows, split, device, config.dtype)
    columns = (task.attending_steps[-1] - 1) // k_att
    attending = torch.tensor(task.attending_steps)
    total = torch.zeros(model.config.num_layers, len(attending), columns, dtype=config.dtype)
    for some in inputs.split(at_once, dim=1):
        with _evaluating(model):
            _, _, attention = model(some, return_attention=True)
        numbers, selected = (tensor[..., attending - 1, :, :].cpu() for tensor in attention)
        none = columns  # an extra column for slots that selected nothing
        full = selected.new_zeros(*selected.shape[:-1], columns + 1)
        full.scatter_add_(-1, torch.where(numbers < 0, none, numbers), selected)
        total += full[..., :none].sum(-2).reshape(total.shape)
    kept_at = (torch.arange(columns) + 1) * k_att
    return (total / rows).masked_fill(kept_at >= attending[:, None], float("nan"))


def rows_of_figure(model: ModelConfig, task: Task, batch_size: int) -> tuple[int, int]:
    """How many sequences of a batch a figure is made from, and how many of them are looked at at once.

    A run's configuration may ask for any size, and its files do not tell. So there are bounds, which are far above what
    one trains with: at a sequence that is too long or too large an error is raised; of too many there are fewer.
    """
    if task.steps > LONGEST:
        raise UserValueError(
            f"a figure must be of sequences of at most {LONGEST:,} steps; those of {task.label} have {task.steps:,}."
        )
    memory = model.layer_config()
    columns = task.steps // memory.k_att
    numbers = model.num_layers * task.steps * (model.hidden_size + memory.k_top + columns)
    if numbers > AT_ONCE:
        raise UserValueError(
            f"a figure must be of models with at most {AT_ONCE:,} numbers in a sequence; with "
            f"{task.steps:,} steps, hidden_size {model.hidden_size:,} and k_top {memory.k_top:,} there are more."
        )
    return min(batch_size, MOST_ROWS, MOST_NUMBERS // numbers), AT_ONCE // numbers
