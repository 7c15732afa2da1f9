"""Random command lines, right and wrong ones, from the fields and the signatures that the command line is made from.

Each ends in a clean run of at most two iterations, or in one sentence on stderr with exit status 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import shutil
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest import mock

import tyro

from sab.config import SABConfig
from sab.errors import UserValueError
from sab.lab import cli
from sab.lab.commands import datasets
from sab.lab.data import DATASETS, store
from sab.lab.models import ModelConfig
from sab.lab.tasks import TASKS, StoredTask, stored
from sab.lab.training import TrainConfig
from tests.lab import tiny

DIVERGED = 1
TINY = {
    "iterations": 2,
    "hidden_size": 3,
    "batch_size": 2,
    "eval_every": 1,
    "eval_batches": 1,
    "threads": 1,
    "length": 2,
}
"""Options without which a run takes long, with what they are unless a line says otherwise."""
WITH_DATA = {"batch_size": 12, "length": 60}
"""The same for tasks with data, whose ends are evaluated in full."""
COSTLY = set("iterations eval_batches threads eval_every checkpoint_every batches num_layers characters".split())
"""Options of which a huge value is right, and takes long; `characters` is the length of what `sab sample` makes up."""
WRONG = (
    *("-1 0 1.5 1e3 x none None nan inf -inf 1e400 0x10 ٣ 1,2 true -- - --lr [] {} ../.. \x1b[31m \udcff".split(" ")),
    *("", " ", "a\nb", "a b", "9" * 30, "9" * 5000, "é" * 30, "x" * 300),
)
HUGE = (str(10**12), str(2**62), str(2**63 - 1))
PATHS = ("trained", "characters", "new", "new/deeper", "file", "trained/config.json", "missing", ".", "a b", "é", "-x")
SEEDS = ("0", "0,1", "1,1", "x", ",", "0,", "0, 1", "-1", "9" * 30, "", "0,x")
CASES = ("A", "Z", "", "A,,B", "quick")
TEXTS = ("the cat", "", "THE", "é", "a\nb", "\udcff")
UNCUT = 14
"""How many words of a line are never cut off, so that a run has few iterations of a small model."""
ENDLESS = ("live", "serve", "watch")
"""Commands that go on until somebody ends them."""
CHEAP: dict[str, Sequence[Sequence[str]]] = {
    "demo": [["--seed", "x"], ["--seed", "-1"], ["extra"]],
    "bench": [["--cases", "Z"], ["--seconds", "-1"], ["--minutes", "0"], ["--jobs", "x"], ["--compiled-steps", "0"]],
    "reproduce": [["--list"], ["--status"]],
    "doctor": [["extra"], ["--nothing"]],
    "report": [["missing"], ["file"], ["--nothing"]],
}
"""Commands that take long when nothing is wrong, and what each line of theirs has so that they do not."""


def command_lines(folder: Path) -> Callable[[Random], None]:
    """An attempt of a random command line, in a fresh copy of the same few files each time."""
    data, good = folder / "data", folder / "good"
    good.mkdir()
    tiny.write(data)
    os.environ |= {store.VARIABLE: str(data), "MPLCONFIGDIR": str(folder / "matplotlib")}
    datasets = tiny.datasets()
    with mock.patch.dict(DATASETS, datasets):
        stored.forget_examples()
        for name, task in (("trained", "copying"), ("characters", "text8")):
            options = TINY | (WITH_DATA if issubclass(TASKS[task], StoredTask) else {})
            status, told = _call(["train", task, *_words(options), "--out", str(good / name)])
            assert status == 0, told
    (good / "file").write_text("the cat sat")
    source = functools.cache(inspect.getsource)

    def attempt(random: Random) -> None:
        here = folder / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good, here)
        os.chdir(here)
        line = any_line(random)
        with mock.patch.dict(DATASETS, datasets), mock.patch("inspect.getsource", source):  # most of the time it takes
            try:
                status, told = _call(line)
            except BaseException as bug:
                bug.add_note(f"The line was {line}.")
                raise
        _judge(line, status, told)

    return attempt


def _call(line: Sequence[str]) -> tuple[int, str]:
    """The exit status of a command line, and what it told on stderr."""
    out, err = _Strict(), _Strict()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(list(line))
        except SystemExit as stop:  # for --help
            status = int(stop.code or 0)
    return status, err.text()


class _Strict(io.TextIOWrapper):
    """A stream that takes what a terminal takes: UTF-8."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


def _judge(line: Sequence[str], status: int, told: str) -> None:
    """That a line ended as it should; one that was refused raises its sentence."""
    if status == 0 or (status == DIVERGED and line[0] == "train" and not told):
        return
    is_help = not line and not told
    sentence = told.removeprefix("sab: ").removesuffix("\n")
    is_sentence = told.startswith("sab: ") and sentence.isprintable() and sentence.endswith((".", "?"))
    assert status == 2, f"status {status} of {line}: {told}"
    assert is_help or is_sentence, f"no sentence of {line}: {told!r}"
    raise UserValueError(sentence or "a command is missing.")


def any_line(random: Random) -> list[str]:
    """A command line."""
    kind = random.random()
    if kind < 0.6:
        line = _train_line(random)
    elif kind < 0.97:
        line = _other_line(random)
    else:
        line = random.choice(([], ["--help"], ["--version"], ["tasks"], ["trian"], ["train"], ["data"], [""], ["--x"]))
    if random.random() < 0.05:
        line = [*line, random.choice(("--help", "extra", "--nothing", "--lenght=3", "-q", *WRONG))]
    if len(line) > UNCUT and random.random() < 0.03:
        line = line[: random.randrange(UNCUT, len(line))]
    return [word for word in line if "\0" not in word]


def _train_line(random: Random) -> list[str]:
    task = random.choice(("copying", "adding") * 6 + tuple(TASKS) + ("Copying", ""))
    sources = (TASKS.get(task, TASKS["copying"]), ModelConfig, SABConfig, TrainConfig)
    kinds = {name: kind for source in sources for name, kind in _fields(source).items()}
    chosen = random.sample([*kinds], random.choice((0, 1, 1, 2, 3, 5, 8)))
    tiny_options = TINY | (WITH_DATA if issubclass(sources[0], StoredTask) else {})
    if issubclass(sources[0], StoredTask):
        chosen = [name for name in chosen if name not in (*WITH_DATA, "backend")]
    base = {
        name: value for name, value in tiny_options.items() if name in kinds and name not in {*chosen} - {"iterations"}
    }
    words = _words(base)
    for name in chosen:
        words += _option(random, name, kinds[name])
    if random.random() < 0.5:
        words += ["--out", random.choice(PATHS)]
    if random.random() < 0.2:
        words += ["--seeds", random.choice(SEEDS)]
    if random.random() < 0.15:
        words += ["--resume"]
    return ["train", task, *words]


def _other_line(random: Random) -> list[str]:
    names = [name for name in cli.COMMANDS if name not in ("train", "tasks", *ENDLESS)]
    name = random.choice([*names, "eval", "info", "sample", "score", "data list", "data get"])
    if name == "plot" and random.random() < 0.8:  # which takes most of a second
        name = "eval"
    command = {"data list": datasets.data_list, "data get": datasets.data_get}.get(name) or cli.COMMANDS[name]
    words = name.split()
    kinds = {} if name == "data" else typing.get_type_hints(command, include_extras=True)
    kinds.pop("return", None)
    for option, kind in kinds.items():
        if tyro.conf.Positional in getattr(kind, "__metadata__", ()):
            words += _positional(random, option)
        elif option == "source":
            words += ["--from", random.choice(PATHS)]  # without it there would be a network
        elif random.random() < 0.25 and option not in ("show_list", "status", "on", "address"):
            words += _option(random, "characters" if (name, option) == ("sample", "length") else option, kind)
    return [*words, *random.choice(CHEAP.get(name, [[]]))]


def _positional(random: Random, option: str) -> list[str]:
    some = {
        "run": ("trained", "trained", "characters", *PATHS),
        "file": ("file", *PATHS),
        "name": ("ptb", "text8", "mnist", "PTB", ""),
        "tasks": ("copying", "adding", "mnist", "knitting"),
    }.get(option, PATHS)
    return [random.choice(some)] if random.random() < 0.95 else []


def _fields(source: Any) -> dict[str, Any]:
    """The options of a dataclass with their types; `memory` holds options of its own."""
    hints = typing.get_type_hints(source)
    return {one.name: hints[one.name] for one in dataclasses.fields(source) if one.name != "memory"}


def _option(random: Random, name: str, kind: Any) -> list[str]:
    """An option with a value that is right, mostly, or none."""
    flag = "--length" if name == "characters" else f"--{name.replace('_', '-')}"
    if kind is bool or bool in typing.get_args(kind):
        return [random.choice((flag, flag, f"--no-{flag[2:]}", f"{flag}=x"))]
    if random.random() < 0.02:
        return [flag]
    if random.random() < 0.07:
        value = random.choice(WRONG)
    elif random.random() < 0.03 and name not in COSTLY:
        value = random.choice(HUGE)
    else:
        value = _value(random, name, kind)
    return [f"{flag}={value}"] if random.random() < 0.2 else [flag, value]


def _value(random: Random, name: str, kind: Any) -> str:
    """A value of a type."""
    if name in ("iterations", "batches"):
        return random.choice(("1", "2"))
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _value(random, name, parts[0])
    if origin in (typing.Union, types.UnionType):
        return _value(random, name, random.choice(parts))
    if origin is Literal:
        return random.choice(parts)
    if kind is types.NoneType:
        return "None"
    if kind is int:
        return str(random.choice((0, 1, 1, 2, 3, 5)))
    if kind is float:
        return random.choice(("0", "0.001", "0.5", "1", "2.5", "100", "1e-30", "1e30"))
    if kind is Path:
        return random.choice(PATHS)
    return random.choice({"seeds": SEEDS, "cases": CASES}.get(name, TEXTS))


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
