"""`sab train`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import tyro
from rich.console import Console

from sab.config import SABConfig
from sab.errors import UserValueError, check_choice, printable
from sab.lab.commands.parsing import parse, parse_seeds
from sab.lab.models import ModelConfig
from sab.lab.tasks import TASKS, Task
from sab.lab.training import Run, RunConfig, TrainConfig, distributed
from sab.lab.training import train as train_model
from sab.lab.training import train_seeds as train_models
from sab.lab.training.interrupt import Interrupt
from sab.lab.training.loop import seed_folder
from sab.lab.training.progress import progress_for, progress_for_each, show_headline, show_seconds
from sab.lab.training.run import Result
from sab.parts.registry import SCORERS
from sab_cli.exits import DIVERGED, DONE
from sab_cli.wrapping import columns, wrapped

TaskT = TypeVar("TaskT", bound=Task)


@dataclass(frozen=True)
class TrainOptions(Generic[TaskT]):
    """Train a model on a task into a folder: configuration, metrics, checkpoint, result."""

    task: TaskT
    model: ModelConfig
    training: TrainConfig
    seeds: Annotated[str | None, tyro.conf.arg(metavar="{None}|SEED,SEED,...")] = None
    """Several seeds at once instead of --seed, as in 0,1,2: a run for each, in folders seed-0, seed-1, ... below that
    of --out. They take turns; on a GPU, which one small run leaves mostly idle, they share it."""
    out: Path | None = None
    """Folder of the run; None makes a name below runs/ from the options."""
    resume: bool = False
    """Go on with the run in that folder, or with those of all --seeds; options that are not given are then the run's
    own."""

    @property
    def config(self) -> RunConfig:
        return RunConfig(self.task, self.model, self.training)

    @property
    def folder(self) -> Path:
        if self.out is not None:
            return self.out
        return self.config.default_out() if self.seeds is None else self.config.default_out_of_seeds()


def train(arguments: Sequence[str]) -> int:
    """Train a model on a task."""
    names = ", ".join(TASKS)
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: sab train TASK [OPTIONS]\n")
        _say(f"TASK is one of {names}; `sab train TASK --help` shows its options.")
        return DONE
    if not arguments:
        raise UserValueError(f"task must be one of {names}; got none.", "task")
    name, *rest = arguments
    check_choice("task", name, TASKS)
    options = _parse_training(name, rest, RunConfig.default(TASKS[name]()))
    seeds = None if options.seeds is None else parse_seeds(options.seeds)
    if seeds is not None and any(re.match(r"--seed(=|$)", argument) for argument in rest):
        raise UserValueError("seeds must not be given together with --seed; got both.", "seeds")
    if options.resume:
        left = [seed for seed in seeds or [] if not seed_folder(options.folder, seed).exists()]
        if left and len(left) < len(seeds or []):
            raise UserValueError(
                f"seeds must have runs to resume; there is none of {', '.join(map(str, left))} in "
                f"{str(options.folder)!r}: train them with --seeds {','.join(map(str, left))}, without --resume.",
                "seeds",
            )
        first = options.folder if seeds is None else seed_folder(options.folder, seeds[0])
        stored = Run.open(first, "out").config
        if name != stored.task.name:
            where = str(first)
            raise UserValueError(f"task must be {stored.task.name!r} to resume {where!r}; got {name!r}.", "task")
        options = replace(_parse_training(name, rest, stored), out=options.folder)
    if seeds is not None:
        return _train_seeds(name, options, seeds)
    with contextlib.ExitStack() as silence:
        if not distributed.is_main():
            silence.enter_context(contextlib.redirect_stdout(silence.enter_context(open(os.devnull, "w"))))
        return _train_one(name, options)


def _train_one(name: str, options: TrainOptions) -> int:
    label = f"{options.task.title} {options.model.method}"
    interrupt = Interrupt()
    goes_on = distributed.was_restarted() and (options.folder / "config.json").is_file()
    result = train_model(
        options.task,
        options.model,
        options.training,
        options.folder,
        options.resume or goes_on,
        progress_for(Console(), label),
        interrupt,
    )
    _say(f"{result.message[0].upper()}{result.message[1:]}")
    if result.status == "interrupted":
        print(f"Resume with: sab train {name} --out {_quoted(options.folder)} --resume")
        return interrupt.exit_status
    _say(_on_unseen_data(options.task, result))
    _say(_what_it_took(Run.open(options.folder), result))
    folder = _quoted(options.folder)
    _say(f"The run is in {printable(options.folder)}.")
    _say(f"Next: sab report {folder} (a page), sab plot {folder} (pictures).")
    return DIVERGED if result.status == "diverged" else DONE


def _train_seeds(name: str, options: TrainOptions, seeds: list[int]) -> int:
    labels = [f"{options.task.title} {options.model.method} seed {seed}" for seed in seeds]
    interrupt = Interrupt()
    results = train_models(
        options.task,
        options.model,
        options.training,
        seeds,
        options.folder,
        options.resume,
        progress_for_each(Console(), labels),
        interrupt,
    )
    for seed, result in results.items():
        _say(f"Seed {seed}: {_outcome(options.task, result)}")
    statuses = {result.status for result in results.values()}
    out = _quoted(options.folder)
    if "interrupted" in statuses:
        print(f"Resume with: sab train {name} --out {out} --seeds {','.join(map(str, seeds))} --resume")
        return interrupt.exit_status
    seconds = show_seconds(sum(result.wall_time for result in results.values()))
    solved = [result.solved_at for result in results.values() if result.solved_at is not None]
    _say(f"It took {seconds} in all; {len(solved)} of {len(seeds)} runs solved the task{_after(solved)}.")
    first = _quoted(seed_folder(options.folder, seeds[0]))
    _say(f"The runs are in {printable(options.folder)}.")
    _say(f"Next: sab report {out} (a page), sab plot {first} (pictures).")
    return DIVERGED if "diverged" in statuses else DONE


def _after(solved: Sequence[int]) -> str:
    return f", after {', '.join(f'{one:,}' for one in solved)} iterations" if solved else ""


def _say(text: str) -> None:
    """Prints a sentence, on a terminal wrapped at words."""
    print(wrapped(text, columns()))


def _what_it_took(run: Run, result: Result) -> str:
    """Time, when the task was solved, and the best evaluation of a run."""
    headline = run.config.task.headline
    values = [(line["metrics"][headline.metric], line["step"]) for line in run.evaluations()]
    known = [(value, step) for value, step in values if value is not None]
    sentence = f"It took {show_seconds(result.wall_time)} and "
    solved_at = result.solved_at
    sentence += "did not solve the task" if solved_at is None else f"solved the task after {solved_at:,} iterations"
    if known:
        choose = max if headline.higher_is_better else min
        value, step = choose(known, key=lambda pair: pair[0])
        sentence += f"; best on validation data: {headline.show(value)} at iteration {step:,}"
    return f"{sentence}."


def _quoted(folder: Path) -> str:
    """A folder as a shell takes it and a terminal shows it."""
    return printable(shlex.quote(str(folder)))


def _outcome(task: Task, result: Result) -> str:
    if result.status == "interrupted":
        return result.message
    return f"{result.message} {_on_unseen_data(task, result)}"


def _on_unseen_data(task: Task, result: Result) -> str:
    weights = "" if result.best_at is None else f", by the weights of iteration {result.best_at}"
    return f"On unseen data{weights}: {show_headline(task.headline, result.metrics)}{_in_brackets(task)}."


def _in_brackets(task: Task) -> str:
    return f" ({task.title})" if task.title != task.name else ""


def _named_scorer(kind: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[str] | None:
    """Rule of the parser: a scorer, which may be a callable in Python, is chosen by its name."""
    if kind.type != get_type_hints(SABConfig)["scorer"]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(SCORERS)}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
        choices=tuple(SCORERS),
    )


REGISTRY = tyro.constructors.ConstructorRegistry()
REGISTRY.primitive_rule(_named_scorer)


def _parse_training(name: str, arguments: Sequence[str], default: RunConfig) -> TrainOptions:
    """The options, where those that are not given are as in `default`."""
    options = parser_options(default)
    return parse(options.pop("f"), arguments, prog=f"sab train {name}", **options)


def parser_options(default: RunConfig) -> dict[str, Any]:
    """What makes tyro's parser of a task's options."""
    return {
        "f": TrainOptions[type(default.task)],
        "default": TrainOptions(default.task, default.model, default.training),
        "config": (tyro.conf.OmitArgPrefixes,),
        "registry": REGISTRY,
    }
