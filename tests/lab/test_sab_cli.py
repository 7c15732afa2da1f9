"""The command `sab` before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sab
import sab_cli
from sab.lab import cli
from sab_cli import sentences
from tools import options

SOURCE = Path(sab.__file__).parents[1]
ALONE = """
import sys
import sab_cli
status = sab_cli.main(sys.argv[1:])
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "sab", "tyro", "rich"}
assert not loaded, loaded
sys.exit(status)
"""


def process(*arguments: str, code: str = ALONE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("", 2, "usage: sab COMMAND [OPTIONS]"),
        ("--help", 0, "usage: sab COMMAND [OPTIONS]"),
        ("--version", 0, f"sab {sab.__version__}"),
        ("knit", 2, f"sab: command must be one of {', '.join(cli.COMMANDS)}; got 'knit'."),
        ("train knitting", 2, "sab: TASK must be one of copying, "),
        ("train copying --lenght 3", 2, "sab: --lenght is no option of this command; did you mean --length?"),
        ("train copying --length ten", 2, "sab: --length must be a whole number; got 'ten'."),
        ("train copying --k_top=-1", 2, "sab: --k-top must be a whole number of at least 0; got -1."),
        ("train adding --lr nan", 2, "sab: --lr must be a finite number above 0 and at most 1e+30; got nan."),
        ("train copying --keep worst", 2, "sab: --keep must be one of last, best; got 'worst'."),
        ("eval run --batches", 2, "sab: --batches must be given a value; got none."),
        ("plot attention run --step 3", 2, "sab: --step is no option of this command."),
        ("reproduce drop-in --together x", 2, "sab: --together must be a whole number, or None; got 'x'."),
        ("data get ptb --form x", 2, "sab: --form is no option of this command; did you mean --from?"),
    ],
)
def test_answers_without_torch(line: str, status: int, told: str) -> None:
    done = process(*line.split())
    assert done.returncode == status, done.stderr
    assert (done.stdout + done.stderr).startswith(told)
    assert (done.stderr if told.startswith(("usage", f"sab {sab.__version__}")) else done.stdout) == ""


@pytest.mark.parametrize(
    "line",
    [
        "train copying --length 3 --k-trunc none --no-resume --scorer=mlp",
        "train copying --help",
        "train --help",
        "train copying --lenght 3 --help",
        "train",
        "eval run --split valid",
        "eval run --device --split",
        "data",
        "info --backends",
        "plot run -o picture.png",
        "sample run --prompt --length",
        "sample run --temperature -1",
        "doctor --out -",
        "tasks --\x1b[31m",
        f"train copying --length {'9' * 5000}",
    ],
)
def test_all_else_is_left_to_the_command(line: str) -> None:
    assert sab_cli.answer(line.split(" ")) is None


def test_the_table_is_that_of_the_commands() -> None:
    assert json.loads(sab_cli.TABLE.read_text()) == json.loads(json.dumps(options.table())), "run `make options`"


def test_the_command_is_this_one() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"sab": "sab_cli:main"}
    assert f"src/{sab_cli.__name__}" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_what_runs_is_the_laboratorys_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert sab_cli.main(["tasks"]) == 0
    assert capsys.readouterr().out.startswith("copying ")


@pytest.mark.parametrize(
    ("stdout", "status", "told"),
    [
        ("os.open(os.devnull, os.O_RDONLY)", 2, "sab: stdout must be a place that can be written to; it is not: "),
        ("reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)", 141, ""),
    ],
)
def test_help_that_cannot_be_written(stdout: str, status: int, told: str) -> None:
    done = process(code=f"import os, sys, sab_cli; os.close(1); {stdout}; sys.exit(sab_cli.main(['--help']))")
    assert done.returncode == status
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == (told != "")


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        ("a whole number of at least 1, or None", ["1", "7"], ["0", "-3"]),
        ("a finite number above 0 and below 1", ["0.5"], ["0", "1", "nan"]),
        ("a finite number of at least 0 and at most 1e+30", ["0", "1e30"], ["-1e-9", "2e30", "inf"]),
    ],
)
def test_ranges_in_words(allowed: str, inside: list[str], outside: list[str]) -> None:
    kind = "INT" if "whole" in allowed else "FLOAT"
    for value in inside:
        assert sentences.wrong_value("--x", kind, allowed, value) is None
    for value in outside:
        told = sentences.wrong_value("--x", kind, allowed, value)
        assert told is not None
        assert told.startswith(f"--x must be {allowed}; got ")
