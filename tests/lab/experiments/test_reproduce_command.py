"""`sab reproduce` end to end, with tables of rows that take a fraction of a second."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from sab.lab import cli
from sab.lab.experiments import progress, records, tables
from sab.lab.experiments.recipe import OURS
from sab.lab.experiments.settings import PAPERS
from sab.lab.experiments.tables import Row
from sab.lab.tasks import Copying

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small_tables(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "ROWS", {row.id: row for row in rows})


def run(*arguments: str) -> int:
    try:
        return cli.main(["reproduce", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def mistake(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err.removeprefix("sab: ").rstrip("\n")


def test_all_tables(capsys: Capture) -> None:
    assert run("--seeds", "0,1") == 0
    told = capsys.readouterr().out
    assert "[8/8] " in told
    assert told.endswith("All 8 runs are at their end; their records are in results.\n")
    assert sorted(path.name for path in Path("results").iterdir()) == ["adding.jsonl", "copying.jsonl"]
    assert len(records.load("copying", Path("results"))) == 6
    assert run("--seeds", "0,1") == 0
    assert capsys.readouterr().out == "All 8 runs are at their end; their records are in results.\n"


def test_some_rows_into_other_folders() -> None:
    options = ["--out", "other/runs", "--results", "other/results", "--iterations", "3", "--device", "cpu"]
    assert run("copying", "--rows", "*-ours,*-tbptt-*", "--seeds", "4", *options, "--together", "2") == 0
    found = records.load("copying", Path("other/results"))
    assert sorted((one["row"], one["seed"], one["iterations"]) for one in found) == [
        ("copying-2-sab-4-2-ours", 4, 3),
        ("copying-4-tbptt-2", 4, 3),
    ]
    assert not Path("results").exists()


def test_list_and_status_train_nothing(capsys: Capture) -> None:
    assert run("--list") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["row", "seeds", "iterations", "the", "paper's", "values"]
    assert [line.split()[0] for line in lines] == list(tables.ROWS)
    assert all("not in the paper" in line for line in lines)
    assert run("adding", "--status") == 0
    told = capsys.readouterr().out
    assert re.search(r"^adding-3-bptt seed 0 +left +0/6$", told, flags=re.MULTILINE)
    assert told.startswith("Other rows: 0 of 1 have all their seeds, 3 runs are left\n3 runs: 3 left\nrun ")
    assert not Path("runs").exists()
    assert run("adding", "--seeds", "0") == 0
    capsys.readouterr()
    assert run("adding", "--status") == 0
    told = capsys.readouterr().out
    assert "mean squared error" in told
    assert told.startswith("Other rows: 0 of 1 have all their seeds, 2 runs are left\n3 runs: 1 ended, 2 left\nrun ")


def test_status_begins_with_the_papers_rows(rows: list[Row], capsys: Capture) -> None:
    papers = {"paper": {"mse": "0.1"}, "seeds": 1}
    tables.ROWS = {row.id: replace(row, **papers) if row.task == "adding" else row for row in rows}
    assert run("adding", "--rows", "adding-*") == 0
    assert capsys.readouterr().out.endswith("All 1 runs are at their end; their records are in results.\n")
    assert run("--status") == 0
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first == "Rows of the paper: 1 of 1 have all their seeds, 0 runs are left"
    assert second == "Other rows: 0 of 3 have all their seeds, 9 runs are left"
    assert third == "10 runs: 9 left, 1 ended"


def test_the_papers_rows_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.undo()
    assert run("--list", "--paper") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 45
    assert not any("not in the paper" in line for line in lines)
    assert not any("as-written" in line or "as-released" in line for line in lines)
    assert run("--list", "mnist", "--paper", "--rows", "mnist-sab-*") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        f"mnist-sab-{ks}-ours" for ks in ("14-5", "14-10", "10-10")
    ]
    told = mistake(capsys, "--list", "mnist", "--paper", "--rows", "mnist-permuted-*")
    assert told.startswith("--rows must match at least one of mnist-bptt, mnist-sab-14-5-ours, ")


def test_time_over_tells_how_to_go_on_with_the_papers_rows(rows: list[Row], capsys: Capture) -> None:
    tables.ROWS = {row.id: replace(row, paper={"accuracy_last10": "1"}) for row in rows}
    assert run("copying", "--minutes", "1e-9", "--seeds", "0", "--paper") == 0
    told = capsys.readouterr().out
    assert "2 of 2 runs are not at their end" in told
    assert told.endswith(" --paper\n")


def test_time_over_tells_how_to_go_on(capsys: Capture) -> None:
    assert run("copying", "--minutes", "1e-9", "--seeds", "0,1", "--out", "my runs") == 0
    told = capsys.readouterr().out
    assert "6 of 6 runs are not at their end, the first of them copying-2-sab-4-2-ours seed 0.\n" in told
    command = "sab reproduce copying --seeds 0,1 --minutes 1e-09 --out 'my runs' --results results --device auto"
    assert told.endswith(f"Go on with: {command}\n")


class PressCtrlC(progress.RunProgress):
    def iteration(self, step: int, loss: float) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(progress, "RunProgress", PressCtrlC)
    assert run("copying") == 130
    assert "Go on with: sab reproduce copying --out " in capsys.readouterr().out


def test_a_failure_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the device is on fire\nand more")

    monkeypatch.setattr(Copying, "loss", fails)
    assert run("--seeds", "0", "--rows", "*-tbptt-*,adding-*") == 1
    told = capsys.readouterr()
    assert told.err == (
        "sab: copying-4-tbptt-2 seed 0 failed: RuntimeError: the device is on fire "
        "(more in runs/reproduce/copying-4-tbptt-2/seed0.error.txt)\n"
    )
    assert "1 of 2 runs are not at their end" in told.out


@pytest.fixture
def small_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables' own rows, with models and batches that take little time."""
    monkeypatch.undo()
    for settings_of in (PAPERS, OURS):
        for task, setting in settings_of.items():
            monkeypatch.setitem(settings_of, task, replace(setting, hidden_size=8, batch_size=16))


@pytest.mark.usefixtures("small_settings", "tiny_data")
def test_without_data_one_sentence_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAB_DATA", "nowhere")
    get = "get it with: sab data get"
    told = f"--data-dir must hold ptb; 'ptb.train.txt' is not in 'nowhere/ptb': {get} ptb."
    assert mistake(capsys, "ptb") == told
    assert mistake(capsys, "ptb", "--data-dir", "there") == told.replace("nowhere", "there")
    assert not any(tmp_path.iterdir())
    rows = "mnist-*,adding-200-bptt"
    assert run("mnist", "adding", "--rows", rows, "--seeds", "0", "--minutes", "1e-9", "--data-dir", "there") == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("sab: mnist failed: data_dir must hold mnist; ")
    assert shown.err.count("\n") == 1
    assert "--device auto --data-dir there\n" in shown.out


def test_mistakes_are_one_sentence(capsys: Capture) -> None:
    assert mistake(capsys, "mnist") == "TASK must be one of copying, adding; got 'mnist'."
    ids = ", ".join(row.id for row in tables.ROWS.values() if row.task == "copying")
    assert mistake(capsys, "copying", "--rows", "x*") == f"--rows must match at least one of {ids}; got 'x*'."
    assert mistake(capsys, "--seeds", "0,a").startswith("--seeds must be different whole numbers")
    assert mistake(capsys, "--minutes", "0").startswith("--minutes must be a finite number above 0")
    assert mistake(capsys, "--minutes", "soon").startswith("--minutes must be a number, or None")
    assert mistake(capsys, "--together", "0").startswith("--together must be a whole number of at least 1")
    assert mistake(capsys, "--iterations", "-1").startswith("--iterations must be a whole number of at least 1")
    assert mistake(capsys, "--nonsense", "1").startswith("--nonsense is no option of this command")
    Path("file").write_text("")
    assert mistake(capsys, "--out", "file").startswith("--out 'file' must be a place that can be written to")
    assert mistake(capsys, "--results", "file").startswith("--results 'file' must be a place that can be written to")
