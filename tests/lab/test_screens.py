"""What the terminal shows at 80 and at 140 columns, compared with stored screens; nothing is wider.

`SAB_STORE_SCREENS=1 pytest tests/lab/test_screens.py` stores them anew: look at what changed before it is committed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

import sab_cli
from sab.lab import cli
from sab.lab.experiments.progress import show_line
from sab_cli import wrapping

HERE = Path(__file__).parent
SCREENS = HERE / "screens"
COMMANDS = {
    "usage": ["--help"],
    "tasks": ["tasks"],
    "train": ["train", "--help"],
    "train-copying": ["train", "copying", "--help"],
    "eval": ["eval", "--help"],
    "plot": ["plot", "--help"],
    "bench": ["bench", "--help"],
    "reproduce": ["reproduce", "--help"],
    "list": ["reproduce", "adding", "--list"],
    "status": ["reproduce", "adding", "--status", "--rows", "adding-200-*", "--seeds", "0"],
    "data": ["data", "list", "--data-dir", "nowhere"],
    "info": ["info", str(HERE / "training" / "older_run")],
    "mistake": ["train", "nosuch"],
    "mistake-of-a-command": ["eval", "nowhere", "--max-memory", "2", "--batches", "1"],
}


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("name", COMMANDS)
def test_screens(
    name: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with contextlib.suppress(SystemExit):  # of a help
        cli.main(COMMANDS[name])
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    stored = SCREENS / f"{name}-{columns}.txt"
    if os.environ.get("SAB_STORE_SCREENS"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(shown, encoding="utf-8")
    assert shown == stored.read_text(encoding="utf-8")
    assert [line for line in shown.splitlines() if len(line) > columns] == []


def test_words_are_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = "a/very/long/path/" * 8
    assert wrapping.wrapped(f"the run is in {path} and more", 40).split("\n") == ["the run is in", path, "and more"]
    assert wrapping.wrapped("as it is, however long", None) == "as it is, however long"
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapping.columns() is None, "what is captured is no terminal"
    assert sab_cli.main(["train", "nosuch"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("columns", [80, 140])
def test_lines_of_a_benchmark_are_wrapped_at_words_on_a_terminal(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "A  n=16 T=12  default float32, reference: eager 56.6 ms / nn.LSTM 44.9 ms = 1.26; reference 295 ms, 5.2"
    show_line(Console(width=columns, force_terminal=True, color_system=None), line)
    show_line(Console(width=columns, force_terminal=False), line)
    *wrapped, whole = capsys.readouterr().out.splitlines()
    assert whole == line
    assert all(len(one) <= columns for one in wrapped)
    assert re.sub(r"\s+", " ", " ".join(wrapped)).split() == line.split()
