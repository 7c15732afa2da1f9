"""What a trained model can be used for: `sab eval`, `sample` and `score`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from sab.errors import UserValueError
from sab.lab.commands.parsing import RunFolder
from sab.lab.tasks import Split, StoredTask, Task
from sab.lab.training import Run, evaluate
from sab.lab.training.checkpoint import load_kept, load_model
from sab.lab.training.config import Device, resolve_device
from sab.lab.training.evaluation import evaluate_fully
from sab.lab.training.progress import METRICS, show_metric
from sab_cli.exits import DONE


def evaluate_run(
    run: RunFolder,
    split: Split = "test",
    batches: int | None = None,
    length: int | None = None,
    streams: int | None = None,
    max_memory: int | None = None,
    data_dir: Path | None = None,
    device: Device = "auto",
) -> int:
    """Evaluate the best weights of a run that keeps them, or the newest ones.

    Args:
        run: Folder of the run.
        split: Which data to evaluate on.
        batches: How many batches to take; None means all data or, where they have no end, as many as in training.
        length: Length of the task's sequences; None means the one trained on.
        streams: At how many places side by side a text is read with the state carried through; None means as many as
            a batch has sequences, and 1 reads it from its first character to its last.
        max_memory: How many of the latest microstates are carried on with it; None means as many as in training.
        data_dir: Folder of the data sets; None means SAB_DATA or the user's cache.
        device: Where to evaluate; auto takes CUDA where there is one.
    """
    for option, given in {"streams": streams, "max_memory": max_memory}.items():
        if given is not None and batches is not None:
            raise UserValueError(f"{option} must not be given together with --batches; got both.", option)
    opened = Run.open(run)
    task = opened.config.task
    if length is not None:
        if "length" not in task.options():
            raise UserValueError(
                f"length must not be given for task {task.name}, which has none; got {length}.", "length"
            )
        task = replace(task, length=length)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if data_dir is not None:
        if not isinstance(task, StoredTask):
            raise UserValueError(f"data_dir must not be given for task {task.name}, which reads no files.", "data_dir")
        task = replace(task, data_dir=data_dir)
    model, best_at = load_kept(opened, resolve_device(device))
    if batches is None:
        found = evaluate_fully(model, task, opened.config.training, split, streams, max_memory)
    else:
        found = evaluate(model, task, opened.config.training, split, batches)
    for metric, value in found.items():
        named = f"{METRICS.get(metric, metric)}: {show_metric(metric, value)}"
        print(f"{metric} {value:.6g}{_label(task, best_at, named)}")
    return DONE


def _label(task: Task, best_at: int | None, *names: str) -> str:
    """What goes with every figure of a run: the task's data where its name is not enough, and the best weights."""
    notes = [*names, *([task.title] if task.title != task.name else [])]
    notes += [] if best_at is None else [f"weights of iteration {best_at}"]
    return f"  # {', '.join(notes)}" if notes else ""


def sample(
    run: RunFolder,
    prompt: str | None = None,
    length: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
    max_memory: int | None = None,
    device: Device = "auto",
) -> int:
    """Continue a text with a character model.

    Each character is one step, at a cost that does not grow with the text.

    Args:
        run: Folder of a run on ptb or text8.
        prompt: What the text begins with; None begins a line, or a word.
        length: How many characters to write.
        temperature: Below 1 the likely characters become likelier still; 0 takes the likeliest each time.
        seed: Seed of the choices.
        max_memory: How many of the latest microstates are kept; None means as many as in training.
        device: Where to compute; auto takes CUDA where there is one.
    """
    from sab.lab.training import text

    opened = Run.open(run)
    task = text.character_task(opened.config.task)
    model = load_model(opened, resolve_device(device))
    made = text.sample(model, task, opened.config.training, prompt, length, temperature, seed, max_memory)
    print(prompt or "", end="", flush=True)
    for character in made:
        print(character, end="", flush=True)
    print()
    return DONE


def score(
    run: RunFolder,
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    skip_unknown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    max_memory: int | None = None,
    device: Device = "auto",
) -> int:
    """Score a text of yours with a character model, in bits per character.

    Once with a fresh state for each sequence, as in training, and once with the state carried through the whole text.

    Args:
        run: Folder of a run on ptb or text8.
        file: The text, in UTF-8; .gz and .xz are unpacked.
        skip_unknown: Leave out the characters that the model does not know, instead of stopping at the first.
        max_memory: How many of the latest microstates are carried on; None means as many as in training.
        device: Where to compute; auto takes CUDA where there is one.
    """
    from sab.lab.training import text

    opened = Run.open(run)
    task = opened.config.task
    given = text.read_text(file, task)
    model, best_at = load_kept(opened, resolve_device(device))
    label = _label(task, best_at)
    for what, value in text.score(model, task, opened.config.training, given, skip_unknown, max_memory).items():
        print(f"{what} {value:.6g}{label}" if isinstance(value, float) else f"{what} {value}")
    return DONE
