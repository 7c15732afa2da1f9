"""Writes src/sab_cli/options.json: the commands with their options, for the check that needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import tyro

import sab_cli
from sab.errors import UserError
from sab.lab import cli
from sab.lab.commands import datasets, experiments, pictures, training
from sab.lab.tasks import TASKS
from sab.lab.training import RunConfig

Options = dict[str, str]
KINDS = {"INT": int, "FLOAT": float}
"""The kinds of numbers."""


def table() -> dict[str, Any]:
    """The content of the file.

    Each option has the kind of its value (that which its help shows; empty for a flag) and, after a semicolon, what a
    number may be.
    """
    commands: dict[str, Callable[..., int]] = {
        **{name: command for name, command in cli.COMMANDS.items() if name not in ("train", "data")},
        **{f"plot {name}": command for name, command in pictures.PLOTS.items()},
        **{f"data {name}": command for name, command in datasets.COMMANDS.items()},
        **{f"reproduce {name}": command for name, command in experiments.TABLES.items()},
    }
    of_tasks = {name: _training_options(name) for name in TASKS}
    first, *others = of_tasks.values()
    common = {flag: kind for flag, kind in first.items() if all(one.get(flag) == kind for one in others)}
    return {
        "summaries": cli.summaries(),
        "commands": {"train": common} | {name: _options(parser_of(command)) for name, command in commands.items()},
        "tasks": {
            name: {flag: kind for flag, kind in options.items() if flag not in common}
            for name, options in of_tasks.items()
        },
    }


def _training_options(task: str) -> Options:
    made_from = training.parser_options(RunConfig.default(TASKS[task]()))
    parser = parser_of(**made_from)
    options = _options(parser)
    for action in parser._actions:
        kind = str(action.metavar).removeprefix("{None}|")
        allowed = _allowed(made_from["default"], action.dest, kind) if kind in KINDS else None
        if allowed is not None:
            options[action.option_strings[0]] += f"; {allowed}"
    return options


def _allowed(options: Any, path: str, kind: str) -> str | None:
    """What a number in a dataclass below others may be, in the words that refuse one that is far too low."""
    *parents, name = path.replace("-", "_").split(".")
    try:
        dataclasses.replace(functools.reduce(getattr, parents, options), **{name: KINDS[kind](-1e9)})
    except UserError as mistake:
        found = re.fullmatch(rf"{name} must be (a (?:whole|finite) number .*); got \S+\.", str(mistake))
        return found and found[1]
    return None


def _options(parser: Any) -> Options:
    return {
        flag: "" if action.nargs == 0 else str(action.metavar)
        for action in parser._actions
        if action.dest != "help"
        for flag in action.option_strings
    }


def parser_of(*arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to list a parser's options
        return tyro.extras.get_parser(*arguments, **options)


def main() -> None:
    """Write the file."""
    sab_cli.TABLE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
