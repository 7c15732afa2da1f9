"""The command `sab`, before torch is imported: help, the version and most mistakes get their answer at once.

All else is handed to `sab.lab.cli`. What options there are is in `options.json`, which `make options` writes from the
commands themselves; it serves to refuse, never to accept: what passes here is parsed by the command.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sab_cli import sentences
from sab_cli.exits import DONE, OUTPUT_CLOSED, USER_ERROR
from sab_cli.wrapping import columns, listed, print_mistake, wrapped

TABLE = Path(__file__).parent / "options.json"
LONGEST_WORD = 100
"""Longer words, and those that no terminal shows, are left to the command."""


class Answer(NamedTuple):
    """What is printed, and the exit status; a mistake goes to stderr."""

    text: str
    status: int
    is_mistake: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, by default that of the process; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    found = answer(arguments)
    if found is not None:
        try:
            text = found.text
            text = wrapped(text, columns(sys.stderr)) if found.is_mistake else text
            print(text, file=sys.stderr if found.is_mistake else sys.stdout, flush=True)
        except OSError as error:
            return print_output_error(error)
        return found.status
    try:
        from sab.lab.cli import main as run
    except ModuleNotFoundError as error:
        from sab.lab.doctor import without_extras

        return without_extras(arguments, error)
    return run(arguments)


def answer(arguments: Sequence[str]) -> Answer | None:
    """The answer to a command line that needs nothing but the table, or None."""
    if not all(word.isprintable() and len(word) <= LONGEST_WORD for word in arguments):
        return None
    if list(arguments) == ["--version"]:
        return Answer(f"sab {_version()}", DONE)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if not arguments or arguments[0] in ("-h", "--help"):
        return Answer(usage(table["summaries"]), DONE if arguments else USER_ERROR)
    sentence = _mistake(table, arguments)
    return None if sentence is None else Answer(f"sab: {sentence}", USER_ERROR, is_mistake=True)


def print_output_error(error: OSError) -> int:
    """Prints why stdout failed, as on a full disk; nothing where its reader has gone, as `head` does."""
    try:
        print(flush=True)  # if it is stdout that failed, it fails again
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        if isinstance(error, BrokenPipeError):
            return OUTPUT_CLOSED
        print_mistake(f"stdout must be a place that can be written to; it is not: {error.strerror}.")
        return USER_ERROR
    raise error


def usage(summaries: Mapping[str, str]) -> str:
    """The help on all commands, each with a sentence."""
    width = columns()
    lines = listed(dict(summaries), width, "  ")
    end = wrapped("`sab COMMAND --help` shows a command's options, `sab --version` the version.", width)
    return "\n".join(["usage: sab COMMAND [OPTIONS]\n", *lines, f"\n{end}"])


def _version() -> str:
    """The version, read from the library without importing it."""
    spec = importlib.util.find_spec("sab")
    assert spec is not None
    assert spec.origin is not None
    found = re.search(r'^__version__ = "(.*)"$', Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def _mistake(table: dict[str, Any], arguments: Sequence[str]) -> str | None:
    """The sentence about the first mistake that the table shows, or None."""
    name, *rest = arguments
    if name not in table["summaries"]:
        return sentences.not_a_choice("command", table["summaries"], repr(name))
    commands = table["commands"]
    if name == "train":
        if rest and rest[0] not in (*table["tasks"], "-h", "--help"):
            return sentences.not_a_choice("TASK", table["tasks"], repr(rest[0]))
        options = commands[name] | table["tasks"][rest[0]] if rest and rest[0] in table["tasks"] else None
    elif rest and f"{name} {rest[0]}" in commands:
        options = commands[f"{name} {rest[0]}"]
    else:
        return _in_options(commands[name], rest) if name in commands else None
    return None if options is None else _in_options(options, rest[1:])


def _in_options(options: Mapping[str, str], words: Sequence[str]) -> str | None:
    """The sentence about the first option that a command does not have, or about its value."""
    if "-h" in words or "--help" in words:
        return None
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not flag.startswith("--") or flag == "--":
            return None  # such as -o and -1: the command parses them
        if flag not in options:
            return sentences.not_an_option(flag, options)
        kind, _, allowed = options[flag].partition("; ")
        if kind == "":
            continue
        if not equals:
            value = next(rest, None)
            if value is None:
                return sentences.no_value(flag)
        if value == "" or value.startswith("--"):
            return None
        sentence = sentences.wrong_value(flag, kind, allowed, value)
        if sentence is not None:
            return sentence
    return None
