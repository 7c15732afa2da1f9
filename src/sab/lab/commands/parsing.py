"""Parses a command's arguments, and turns mistakes in them into sentences."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from sab.errors import UserError, UserValueError
from sab.lab.training.loop import check_seeds
from sab_cli import sentences

POSITIONAL = ("run", "runs", "task", "name", "file")
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
RunFolders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
Picture = Annotated[Path | None, tyro.conf.arg(aliases=["-o"])]


def call(command: Callable[..., int], arguments: Sequence[str], called: str) -> int:
    """Parses a command's arguments by its signature and calls it."""

    @functools.wraps(command)  # parsed first and called later, since what is written to stderr meanwhile is tyro's
    def parsed(*positional: Any, **options: Any) -> Any:
        return functools.partial(command, *positional, **options)

    return parse(parsed, arguments, prog=called)()


def parse(what: Any, arguments: Sequence[str], **options: Any) -> Any:
    """What tyro makes of the arguments, with its boxes of several lines turned into one sentence."""
    captured = io.StringIO()
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument == "" and before.startswith("-"):
            raise UserValueError(f"{before} must not be empty; got ''.")
    # `none` after a flag; anywhere else it may be the name of a folder.
    pairs = zip(("", *arguments), arguments, strict=False)
    arguments = ["None" if one == "none" and before.startswith("-") else one for before, one in pairs]
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(what, args=arguments, **options)
    except SystemExit as stop:
        # tyro has put a dataclass's own complaint into a box and into its own words; the sentence itself is clearer.
        cause = stop.__context__
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        if not stop.code:
            raise
        raise UserValueError(_sentence(captured.getvalue())) from None


def _sentence(box: str) -> str:
    """The sentence in a box of tyro's."""
    # The first line is the title; where the output takes ASCII alone, the box has rules of hyphens and no sides.
    box = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[-─]{3,}", "─", line.strip("│╰╯ ")) for line in box.splitlines()[1:]]
    text = " ".join(" ".join(lines).split()).strip("─ ")
    text = re.split(r" ?─+ (?:For full|Argument helptext)", text)[0]
    flag = re.search(r"Error parsing (\S+): ", text)
    given = re.search(r"(?:from \[|(?:int|float)\b.*?: )('.*?')(?:\]|$)", text)
    if flag and given and re.search(r"\b(int|float)\b|INT|FLOAT", text):
        is_whole = re.search(r"int\(\)|\bINT\b", text) is not None
        return sentences.not_a_number(flag[1], is_whole, "{None}" in text, given[1])
    choice = re.search(r"invalid choice ('.*') for argument '(.*?)'\. Expected one of \((.*?),?\)", text)
    if choice:
        return sentences.not_a_choice(choice[2], choice[3].replace("'", "").split(", "), choice[1])
    meant = re.search(r"(?:Perhaps you meant|Arguments similar to \S+): (--?\S+)", text)
    unknown = re.search(r"Unrecognized options: (.*?)(?: ─|$)", text)
    if unknown:
        first = unknown[1].split(", ")[0].partition("=")[0]
        return sentences.not_an_option(first, [meant[1]] if meant else [])
    missing = re.search(r"Missing (?:from [\w ]+: |value for argument ')([\w-]+)", text)
    if missing:
        return sentences.no_value(missing[1])
    return re.sub(r" ?─+ ?", " ", text).rstrip(".") + "."


def parse_seeds(given: str) -> list[int]:
    """The seeds in a text such as 0,1,2."""
    parts = [part.strip() for part in given.split(",")]
    seeds = [int(part) for part in parts if re.fullmatch("[0-9]+", part)]
    if len(seeds) < len(parts) or len(set(seeds)) < len(seeds):
        allowed = "different whole numbers of at least 0 with commas between them"
        raise UserValueError(f"seeds must be {allowed}; got {given!r}.", "seeds")
    return check_seeds(seeds)


def parse_rates(given: str) -> tuple[float, ...]:
    """The learning rates in a text such as 5e-4,2e-3."""
    try:
        return tuple(float(part) for part in given.split(","))
    except ValueError:
        raise UserValueError(f"rates must be numbers with commas between them; got {given!r}.", "rates") from None


def with_flag(mistake: UserError) -> str:
    """The sentence, with the option spelled as it is on the command line."""
    sentence, option = str(mistake), mistake.option
    if option is None or option == "command":
        return sentence
    flag = option.upper() if option in POSITIONAL else "--" + option.replace("_", "-")
    return re.sub(rf"(?<![\w-]){re.escape(option)}(?![\w-])", flag, sentence, count=1)
