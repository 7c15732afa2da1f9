"""Random command lines, right and wrong, from the fields and the signatures that the command line is made from.

Each ends in a run of at most two iterations, or in one sentence on stderr with exit status 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import shutil
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sab_cli
from sab.config import SABConfig
from sab.lab import cli
from sab.lab.commands import datasets, experiments
from sab.lab.models import ModelConfig
from sab.lab.tasks import TASKS, StoredTask
from sab.lab.training import TrainConfig
from tests.faults.watch import watching

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
"""Options without which a run takes long, with their values unless a line sets them."""
WITH_DATA = {"batch_size": 12, "length": 60}
"""The same for tasks with data, whose ends are evaluated in full."""
COSTLY = set("iterations eval_batches threads eval_every checkpoint_every batches num_layers length".split())
"""Options of which a huge value is right, and takes long."""
WRONG = (
    *("-1 0 1.5 1e3 x none None nan inf -inf 1e400 0x10 ٣ 1,2 true -- - --lr [] {} ../.. \x1b[31m \udcff".split(" ")),
    *("", " ", "a\nb", "a b", "9" * 30, "9" * 5000, "é" * 30, "x" * 300),
)
HUGE = (str(10**12), str(2**62), str(2**63 - 1))
PATHS = ("trained", "characters", "new", "new/deeper", "file", "trained/config.json", "missing", ".", "a b", "é", "-x")
SEEDS = ("0", "0,1", "1,1", "x", ",", "0,", "0, 1", "-1", "9" * 30, "", "0,x")
TEXTS = ("the cat", "", "THE", "é", "a\nb", "\udcff", "A", "Z", "A,,B", "quick")
ODD = ([], ["--help"], ["--version"], ["tasks"], ["trian"], ["train"], ["data"], [""], ["--x"])
LAST = ("--help", "extra", "--nothing", "--lenght=3", "-q", *WRONG)
ENDLESS = ("live", "serve", "watch")
"""Commands that go on until somebody ends them."""
CHEAP: dict[str, Sequence[Sequence[str]]] = {
    "demo": [["--seed", "x"], ["--seed", "-1"], ["extra"]],
    "bench": [["--cases", "Z"], ["--seconds", "-1"], ["--minutes", "0"], ["--jobs", "x"]],
    "reproduce": [["--list"], ["--status"]],
    "reproduce drop-in": [["--list"]],
    "reproduce rivals": [["--list", "--methods", "sab,lstm"]],
    "doctor": [["extra"], ["--nothing"]],
    "report": [["missing"], ["file"], ["--nothing"]],
}
"""Commands that take long when nothing is wrong, and arguments for each so that they do not."""
POSITIONAL = {
    "run": ("trained", "trained", "characters", *PATHS),
    "file": ("file", *PATHS),
    "name": ("ptb", "text8", "mnist", "ecg", "PTB", ""),
    "tasks": ("copying", "adding", "mnist", "knitting"),
}
TRAIN_TASKS = ("copying", "adding") * 6 + (*TASKS, "Copying", "")
OTHERS = [name for name in cli.COMMANDS if name not in ("train", "tasks", *ENDLESS)]
OTHERS += ["eval", "info", "sample", "score", "data list", "data get", "reproduce drop-in", "reproduce rivals"]
Draw = typing.Callable[..., Any]


@st.composite
def lines(draw: Draw) -> list[str]:
    """A command line."""
    kind = draw(st.integers(0, 29))
    line = [*draw(st.sampled_from(ODD))] if kind == 0 else draw(_train_lines() if kind < 18 else _other_lines())
    if draw(st.integers(0, 19)) == 0:
        line.append(draw(st.sampled_from(LAST)))
    return [word for word in line if "\0" not in word]


@st.composite
def _train_lines(draw: Draw) -> list[str]:
    task = draw(st.sampled_from(TRAIN_TASKS))
    source = TASKS.get(task, TASKS["copying"])
    kinds = {name: kind for one in (source, ModelConfig, SABConfig, TrainConfig) for name, kind in _fields(one).items()}
    chosen = draw(st.lists(st.sampled_from([*kinds]), max_size=8, unique=True))
    base = dict(TINY)
    if issubclass(source, StoredTask):
        base |= WITH_DATA
        chosen = [name for name in chosen if name not in (*WITH_DATA, "backend")]
    words = _words({name: base[name] for name in base if name in kinds and name not in {*chosen} - {"iterations"}})
    for name in chosen:
        words += draw(_options(name, kinds[name]))
    if draw(st.booleans()):
        words += ["--out", draw(st.sampled_from(PATHS))]
    if draw(st.integers(0, 4)) == 0:
        words += ["--seeds", draw(st.sampled_from(SEEDS))]
    if draw(st.integers(0, 6)) == 0:
        words += ["--resume"]
    return ["train", task, *words]


@st.composite
def _other_lines(draw: Draw) -> list[str]:
    name = draw(st.sampled_from(OTHERS))
    of_two_words = {"data list": datasets.data_list, "data get": datasets.data_get}
    of_two_words |= {f"reproduce {name}": command for name, command in experiments.TABLES.items()}
    command = of_two_words.get(name) or cli.COMMANDS[name]
    words = name.split()
    kinds = {} if name == "data" else typing.get_type_hints(command, include_extras=True)
    kinds.pop("return", None)
    for option, kind in kinds.items():
        if tyro.conf.Positional in getattr(kind, "__metadata__", ()):
            words += [draw(st.sampled_from(POSITIONAL.get(option, PATHS)))] if draw(st.integers(0, 19)) else []
        elif option == "source":
            words += ["--from", draw(st.sampled_from(PATHS))]  # without it there would be a network
        elif option not in ("show_list", "status", "on", "address") and draw(st.integers(0, 3)) == 0:
            words += draw(_options(option, kind))
    return [*words, *draw(st.sampled_from(CHEAP.get(name, [[]])))]


def _fields(source: Any) -> dict[str, Any]:
    """The options of a dataclass with their types; `memory` holds further options."""
    hints = typing.get_type_hints(source)
    return {one.name: hints[one.name] for one in dataclasses.fields(source) if one.name != "memory"}


@st.composite
def _options(draw: Draw, name: str, kind: Any) -> list[str]:
    """An option with a value that is right, mostly, or none."""
    flag = f"--{name.replace('_', '-')}"
    if kind is bool or bool in typing.get_args(kind):
        return [draw(st.sampled_from((flag, flag, f"--no-{flag[2:]}", f"{flag}=x")))]
    how = draw(st.integers(0, 29))
    if how == 0:
        return [flag]
    if how < 3:
        value = draw(st.sampled_from(WRONG))
    elif how == 3 and name not in COSTLY:
        value = draw(st.sampled_from(HUGE))
    else:
        value = draw(_values(name, kind))
    return [f"{flag}={value}"] if how % 5 == 0 else [flag, value]


def _values(name: str, kind: Any) -> st.SearchStrategy[str]:
    """Values of a type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _values(name, parts[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_values(name, part) for part in parts])
    if name in ("iterations", "batches"):
        some = ("1", "2")
    elif origin is Literal:
        some = parts
    elif kind is int:
        some = ("0", "1", "1", "2", "3", "5")
    elif kind is float:
        some = ("0", "0.001", "0.5", "1", "2.5", "100", "1e-30", "1e30")
    else:
        some = {types.NoneType: ("None",), Path: PATHS}.get(kind) or (SEEDS if name == "seeds" else TEXTS)
    return st.sampled_from(some)


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _call(line: Sequence[str]) -> tuple[int, str]:
    """The exit status of a command line, and its stderr. The streams take what a terminal takes: UTF-8."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(list(line))
        except SystemExit as stop:  # for --help
            status = int(stop.code or 0)
    err.seek(0)
    return status, err.read()


def test_random_command_lines(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, here = tmp_path / "good", tmp_path / "here"
    good.mkdir()
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))  # most of a line's time
    for name, task in (("trained", "copying"), ("characters", "text8")):
        options = TINY | (WITH_DATA if issubclass(TASKS[task], StoredTask) else {})
        assert _call(["train", task, *_words(options), "--out", str(good / name)]) == (0, "")
    (good / "file").write_text("the cat sat")
    caches = [Path.home() / folder for folder in (".cache/sab", ".triton")]  # `sab doctor` tries to write there
    also = frozenset({"subprocess.Popen", "socket.bind"})  # for git, and Ray looks for IPv6
    statuses: list[int] = []

    @settings(max_examples=2 * settings().max_examples, phases=[Phase.generate])
    @given(lines())
    def attempt(line: list[str]) -> None:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(good, here)
        monkeypatch.chdir(here)
        with watching(tmp_path, *caches, also=also):
            status, err = _call(line)
        monkeypatch.chdir(tmp_path)
        statuses.append(status)
        early = sab_cli.answer(line)
        assert early is None or early.status == status, "the table refuses what the command takes"
        if status == 2 and line:
            assert err.startswith("sab: ")
            assert err.endswith((".\n", "?\n"))
            assert err[:-1].isprintable()
        elif line:
            assert status in ((0, DIVERGED) if line[0] == "train" else (0,))

    attempt()
    assert statuses.count(0) > len(statuses) / 12
    assert statuses.count(2) > len(statuses) / 3
