"""Uses of a trained character model: sampling text, and scoring a user's text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sab.errors import UserValueError, check_float, check_int
from sab.lab.data import formats
from sab.lab.models import SequenceModel
from sab.lab.tasks import CharacterTask, Task
from sab.lab.training.config import TrainConfig
from sab.lab.training.evaluation import carried_bits, mean_metrics, predict_on, remember

LARGEST_FILE = 2**27
"""How many bytes a user's file may have, unpacked; to read it takes some 10 times as many."""


def character_task(task: Task) -> CharacterTask:
    """The task of a run, which must be one about characters."""
    if not isinstance(task, CharacterTask):
        raise UserValueError(f"run must be one on characters, as of ptb or text8; it is one of {task.name}.", "run")
    return task


def sample(
    model: SequenceModel,
    task: Task,
    config: TrainConfig,
    prompt: str | None = None,
    length: int = 400,
    temperature: float = 1.0,
    seed: int = 0,
    max_memory: int | None = None,
) -> Iterator[str]:
    """Samples characters after a prompt, one by one.

    Each takes one step from the state before it, which holds the latest `max_memory` microstates or, if None, as many
    as in training: time and memory do not grow with the text. A `temperature` of 0 takes the likeliest one.
    """
    task = character_task(task)
    check_int("length", length, 1)
    check_int("max_memory", max_memory, 0, optional=True)
    temperature = check_float("temperature", temperature, minimum=0)
    generator = torch.Generator().manual_seed(check_int("seed", seed, 0))
    given = task.encode(prompt or task.start, "prompt")
    return _sampled(model, task, config, given, length, temperature, generator, max_memory)


def _sampled(
    model: SequenceModel,
    task: CharacterTask,
    config: TrainConfig,
    given: Tensor,
    length: int,
    temperature: float,
    generator: torch.Generator,
    max_memory: int | None,
) -> Iterator[str]:
    device = next(model.parameters()).device
    model.eval()
    state = model.first_state()
    for _ in range(length):
        with torch.no_grad():  # not around the loop: the caller's code runs between two characters
            outputs, state = predict_on(model, given.long().to(device).unsqueeze(1), state, config)
            state = remember(model, task, state, max_memory)
            scores = outputs[-1, 0].double().cpu()
            if temperature == 0:
                given = scores.argmax().unsqueeze(0)
            else:
                given = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)
        yield task.decode(given.tolist())


def read_text(path: Path | str, task: Task) -> str:
    """The text of a user's file, which may be packed, in the form that the task's data set has."""
    task = character_task(task)
    path = Path(path)
    if not path.is_file():
        raise UserValueError(f"file {str(path)!r} must be a text file; there is no such file.", "file")
    try:
        return task.prepare(formats.read(path, LARGEST_FILE)).decode("utf-8")
    except formats.Unreadable as trouble:
        raise UserValueError(f"file {str(path)!r} must be a text file; {trouble}.", "file") from trouble
    except UnicodeDecodeError as error:
        raise UserValueError(f"file {str(path)!r} must be in UTF-8; byte {error.start + 1} is not.", "file") from error


def score(
    model: SequenceModel,
    task: Task,
    config: TrainConfig,
    text: str,
    skip_unknown: bool = False,
    max_memory: int | None = None,
) -> dict[str, float]:
    """Bits per character of a text: with a fresh state for each sequence, as trained, and with the state carried
    through all of it, as in `carried_bits`; and how many characters were predicted: all but the first."""
    task = character_task(task)
    characters = task.encode(text, "file", skip_unknown)
    if len(characters) < 2:
        raise UserValueError(f"file must hold at least 2 characters of {task.dataset}; got {len(characters)}.", "file")
    device = next(model.parameters()).device
    return {
        **mean_metrics(model, task, config, task.sequences(characters.to(device), config.batch_size)),
        "bits_per_character_carried": carried_bits(model, task, config, characters, 1, max_memory),
        "characters": len(characters) - 1,
        "skipped": len(text) - len(characters),
    }
