"""Parses a command's arguments, and turns mistakes in them into sentences."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from sab.errors import UserError, UserValueError
from sab.lab.training.loop import check_seeds
from sab_cli import sentences
from sab_cli.wrapping import columns, wrapped

POSITIONAL = ("run", "runs", "task", "name", "file")
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
RunFolders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
HELP_WIDTH, TEXT_COLUMN = 80, 22
"""Columns of a help text that goes to no terminal, and the one that the texts of the options begin in."""
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
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured), contextlib.redirect_stdout(shown), _help_in_one_column():
            return tyro.cli(what, args=arguments, **options)
    except SystemExit as stop:
        if shown.getvalue():
            print(in_paragraphs(shown.getvalue(), columns() or HELP_WIDTH), end="")
        # tyro has put a dataclass's own complaint into a box and into its own words; the sentence itself is clearer.
        cause = stop.__context__
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        if not stop.code:
            raise
        raise UserValueError(_sentence(captured.getvalue())) from None


@contextlib.contextmanager
def _help_in_one_column() -> Iterator[None]:
    """Lets tyro write its help in one column, whatever the terminal: it is wrapped again."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def in_paragraphs(help_text: str, width: int) -> str:
    """tyro's help as it is where there is no terminal, but with every text one paragraph that is wrapped at words: tyro
    wraps no text above the options, and keeps some of the line breaks that docstrings have in the code."""
    made: list[str] = []
    flag, text, section = "", "", ""

    def flush() -> None:
        nonlocal flag, text
        if flag and len(flag) + 2 < TEXT_COLUMN:
            made.append(wrapped(f"  {flag:{TEXT_COLUMN - 2}}{text}", width, TEXT_COLUMN))
        elif flag:
            # A long list of choices is wrapped behind its commas.
            shown = wrapped(f"  {flag}".replace(",", ", "), width, 6).replace(", ", ",")
            made.extend([shown, wrapped(" " * TEXT_COLUMN + text, width, TEXT_COLUMN)])
        elif text:
            made.append(wrapped(text, width))
        flag, text = "", ""

    help_text = help_text.replace(" (default: )", "")  # of a list that is empty
    for line in re.sub(r"\x1b\[[0-9;]*m", "", help_text).splitlines():
        indent, content = len(line) - len(line.lstrip()), line.strip()
        begins_option = indent == 2 and (content.startswith("-") or section.startswith("positional"))
        if not content and (made or text):
            flush()
            made += [""] if made[-1] else []
        elif re.fullmatch("-{10,}", content):  # a rule below a title
            flush()
        elif indent == 1:
            flush()
            section = content
            made.append(f"{content}:")
        elif begins_option:
            flush()
            flag, _, text = (part.strip() for part in content.partition("  "))
        elif flag.count("{") > flag.count("}"):  # tyro wraps a long list of choices
            rest, _, text = content.partition(" ")
            flag += rest
        else:
            is_within_word = re.search(r"\d,$", text) and content[0].isdecimal()  # tyro wraps after a comma
            text = f"{text}{'' if is_within_word else ' '}{content}".strip()
    flush()
    return "\n".join(made).rstrip() + "\n"


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
    missing = re.search(r"Missing (?:from [\w -]+: |value for argument ')([\w-]+)", text)
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
