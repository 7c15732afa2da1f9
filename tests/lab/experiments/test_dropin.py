"""`sab reproduce drop-in` end to end, with a table of runs that take a fraction of a second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.config import SABConfig
from sab.lab import cli
from sab.lab.experiments import dropin
from sab.lab.experiments.dropin import METHODS, PROBLEMS, DropInRow, Part, Problem
from sab.lab.experiments.selection import RATES, SELECTION_SEED, best_rate
from sab.lab.models import Method
from sab.lab.tasks import TASKS, Copying
from sab.lab.training import Run
from tests.lab.experiments.conftest import replaced
from tests.lab.report.made_up import drop_in_record as made
from tests.lab.training.runs import spoil_loss
from tools.dropin import page_part
from tools.pages import ROOT, with_part

pytestmark = pytest.mark.usefixtures("tiny_data")
Capture = pytest.CaptureFixture[str]
FULL = dict(PROBLEMS)
SIZES: dict[str, Any] = {"hidden_size": 6, "batch_size": 3, "eval_every": 2, "seeds": 2}
COPYING = Problem("copying-2", "copying", 4, {"length": 2}, cells=("lstm", "gru"), **SIZES)
TEXT = Problem("ptb", "ptb", 4, {"length": 12}, cells=("gru",), **SIZES)
RESULTS = Path("results")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with replaced(PROBLEMS, COPYING, TEXT):
        yield


def run(*arguments: str) -> int:
    try:
        return cli.main(["reproduce", "drop-in", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def mistake(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err.removeprefix("sab: ").rstrip("\n")


def found() -> dict[tuple[str, int], dict[str, Any]]:
    return {(record["row"], record["seed"]): record for record in dropin.load(RESULTS)}


# The table


def test_all_methods_are_trained_alike_and_sab_has_default_options() -> None:
    assert set(FULL) >= {"copying-100", "adding-200", "recall-200", "copying-300", "adding-400", "mnist", "ptb"}
    for problem in FULL.values():
        assert problem.task in TASKS
        configs = [DropInRow(problem, "gru", method, 2e-3).config(7) for method in METHODS]
        for method, config in zip(METHODS, configs, strict=True):
            assert config.training == configs[0].training
            assert config.task == configs[0].task
            assert config.model == replace(configs[0].model, method=method)
            assert config.model.memory == SABConfig()
            assert (config.input_scale, config.model.readout) == (1.0, "hidden")
        training = configs[0].training
        assert (training.lr, training.clip, training.lr_decay, training.on_nan) == (2e-3, 1.0, None, "stop")
        assert (training.memory_lr, training.weight_decay, training.precision) == (1.0, 0.0, "float32")
        assert training.keep == ("best" if problem.is_real else "last")
        assert getattr(configs[0].task, "train_lengths", "fixed") == "fixed"


def test_the_number_of_runs() -> None:
    with replaced(PROBLEMS, *FULL.values()):
        fixed, chosen = Part(("copying-*", "adding-*", "recall-*")).units()
        assert (len(fixed), len(chosen)) == (3 * 3 * 3 * 3 * 3 + 2 * 3 * 3, 0)
        fixed, chosen = Part(("mnist",)).units()
    assert (len(fixed), len(chosen)) == (2 * 3 * 3, 2 * 3 * 3)
    assert {unit.seed for unit in fixed} == {SELECTION_SEED}
    assert {(unit.rate, unit.seed) for unit in chosen} == {(None, 0), (None, 1), (None, 2)}


@pytest.mark.parametrize("processes", [1, 5, 16])
def test_slices_make_up_the_whole(processes: int) -> None:
    parts = [Part(slice=f"{number}/{processes}").units() for number in range(1, processes + 1)]
    for kind in (0, 1):
        labels = [unit.label for part in parts for unit in part[kind]]
        assert len(labels) == len(set(labels))
        assert set(labels) == {unit.label for unit in Part().units()[kind]}
        assert max(len(part[kind]) for part in parts) - min(len(part[kind]) for part in parts) <= 1


# Runs and records


def test_the_whole_table_its_records_and_its_page(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--cells", "gru", "--commit", "abc", "--together", "3", "--threads", "1") == 0
    told = capsys.readouterr().out
    assert told.endswith("All 33 runs are at their end; their records are in results/dropin.jsonl.\n")
    known = found()
    assert len(known) == 3 * 3 * 2 + 3 * 3 + 3 * 2
    record = known["copying-2-gru-torch_start-0.008", 1]
    row = DropInRow(COPYING, "gru", "torch_start", 8e-3)
    stored = Run.open(Path("runs/drop-in") / row.id / "seed1")
    result = stored.result()
    assert result is not None
    assert record["config"] == replace(row.config(1), training=stored.config.training).to_json()
    names = ("status", "iterations", "metrics", "valid", "solved_at", "wall_time", "device", "versions")
    assert {name: record[name] for name in names} == {name: getattr(result, name) for name in names}
    assert (record["problem"], record["cell"], record["method"]) == ("copying-2", "gru", "torch_start")
    assert (record["rate"], record["commit"], record["is_finite"], record["epochs"]) == (8e-3, "abc", True, None)
    assert record["parameters"] == sum(weight.numel() for weight in row.config(1).build_model(CPU).parameters())
    assert record["best"] == max(line["metrics"]["accuracy_last10"] or 0.0 for line in stored.evaluations())
    for method in METHODS:
        selected = {rate: known[f"ptb-gru-{method}-{rate:g}", SELECTION_SEED] for rate in RATES}
        best = min(RATES, key=lambda rate: selected[rate]["valid"]["bits_per_character"])
        reported = [(row, seed) for row, seed in known if row.startswith(f"ptb-gru-{method}-0") and seed < 1000]
        assert sorted(reported) == [(f"ptb-gru-{method}-{best:g}", seed) for seed in (0, 1)]
        assert known[reported[0]]["best_at"] in (2, 4)
        assert known[reported[0]]["epochs"] > 0
    before = Path("results/dropin.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Copying, "loss", lambda *_: pytest.fail("trained again"))
        assert run("--cells", "gru") == 0
        assert run("--cells", "gru", "--out", "elsewhere") == 0, "nor where the runs are not"
    assert Path("results/dropin.jsonl").read_bytes() == before
    page = page_part(dropin.load(RESULTS))
    for words in ("### Copying, T = 2", "### Penn Treebank", "| gru | our start |", "torch.nn 0 of 11", "sab 0.1"):
        assert words in page
    assert "another configuration" not in page
    assert max(len(line.split("|")) for line in page.splitlines()) <= 11, "few columns"
    whole = with_part((ROOT / "docs" / "drop-in.md").read_text(), "drop-in", page)
    assert whole.startswith("# The drop-in table")


def test_a_part_of_the_table() -> None:
    options = ["--cells", "gru", "--methods", "torch,sab", "--rates", "5e-4,2e-3", "--seeds", "3", "--iterations", "1"]
    assert run("copying-*", *options, "--out", "o", "--results", "r") == 0
    kept = dropin.load(Path("r"))
    assert sorted((one["row"], one["seed"], one["iterations"]) for one in kept) == [
        (f"copying-2-gru-{method}-{rate}", 3, 1) for method in ("sab", "torch") for rate in ("0.0005", "0.002")
    ]
    assert not RESULTS.exists()
    assert "4 records were made with another configuration" in page_part(kept)


def test_a_short_trial_is_replaced_by_the_whole_run() -> None:
    few = ["copying-2", "--cells", "gru", "--methods", "sab", "--rates", "2e-3", "--seeds", "0"]
    assert run(*few, "--iterations", "2") == 0
    assert run(*few) == 0
    assert [one["iterations"] for one in dropin.load(RESULTS)] == [4]
    assert run(*few, "--iterations", "2", "--out", "other") == 0
    assert [one["iterations"] for one in dropin.load(RESULTS)] == [4], "a longer run keeps its record"


def test_time_over_and_on(capsys: Capture) -> None:
    few = ["copying-2", "--cells", "lstm", "--methods", "torch", "--seeds", "0", "--rates", "2e-3"]
    assert run(*few, "--minutes", "1e-9") == 0
    told = capsys.readouterr().out
    assert "1 of 1 runs are not at their end, the first of them copying-2-lstm-torch-0.002 seed 0.\n" in told
    assert told.endswith("The same command goes on.\n")
    assert run("copying-2", "--list", *few[1:]) == 0
    assert capsys.readouterr().out == "copying-2-lstm-torch-0.002 seed 0  left\n"
    assert run(*few) == 0
    capsys.readouterr()
    assert run("copying-2", "--list", *few[1:]) == 0
    assert capsys.readouterr().out == "copying-2-lstm-torch-0.002 seed 0  recorded\n"


def test_a_run_goes_on_where_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["copying-2", "--cells", "lstm", "--methods", "torch", "--seeds", "0", "--rates", "2e-3"]
    assert run(*few, "--out", "whole", "--results", "whole") == 0
    with monkeypatch.context() as patch:
        late = count()
        patch.setattr("sab.lab.experiments.reproduce.Plan.is_late", lambda _: next(late) > 4)
        assert run(*few) == 0
    assert found() == {}
    stopped = Run.open(Path("runs/drop-in/copying-2-lstm-torch-0.002/seed0")).evaluations()
    assert run(*few) == 0
    (record,), (whole,) = dropin.load(RESULTS), dropin.load(Path("whole"))
    assert len(stopped) < len(whole["history"])
    assert (record["metrics"], record["history"]) == (whole["metrics"], whole["history"])


def test_processes_share_the_table_and_joined_files_are_one(capsys: Capture) -> None:
    for number in (1, 2, 3):
        assert run("ptb", "--methods", "torch", "--slice", f"{number}/3", "--results", f"r{number}") == 0
    told = capsys.readouterr().out
    assert "1 of them wait for selection runs that are not recorded yet.\n" in told
    RESULTS.mkdir()
    joined = "".join(Path(f"r{number}/dropin.jsonl").read_text() for number in (1, 2, 3))
    Path("results/dropin.jsonl").write_text(joined + joined.splitlines()[0] + "\n")
    assert len(dropin.load(RESULTS)) == 3, "a run counts once"
    for number in (1, 2, 3):
        assert run("ptb", "--methods", "torch", "--slice", f"{number}/3") == 0
    assert sorted(seed for _, seed in found()) == [0, 1, 1000, 1000, 1000]


def test_a_slice_may_be_empty(capsys: Capture) -> None:
    few = ["copying-2", "--cells", "lstm", "--methods", "torch", "--seeds", "0", "--rates", "2e-3"]
    assert run(*few, "--slice", "2/2") == 0
    assert capsys.readouterr().out.startswith("All 0 runs are at their end")


def test_a_run_that_is_not_finite_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    few = ["copying-2", "--cells", "gru", "--methods", "sab", "--rates", "2e-3"]
    with monkeypatch.context() as patch:
        spoil_loss(patch, call=3)
        assert run(*few, "--seeds", "0") == 0
    assert "diverged: the loss of iteration 3 is nan" in capsys.readouterr().out
    assert run(*few, "--seeds", "1") == 0
    record = found()["copying-2-gru-sab-0.002", 0]
    assert (record["status"], record["iterations"], record["is_finite"]) == ("diverged", 2, False)
    assert "the loss of iteration 3 is nan" in record["message"]
    assert found()["copying-2-gru-sab-0.002", 1]["is_finite"]
    page = page_part(dropin.load(RESULTS))
    assert "–, –, 0/2, 1 not finite" in page
    assert "SAB 1 of 2" in page
    assert run(*few, "--seeds", "0") == 0
    assert found()["copying-2-gru-sab-0.002", 0]["status"] == "diverged", "it is not tried again"


# The choice of the rate


def test_the_rate_is_chosen_by_validation_data_alone() -> None:
    selected = {
        5e-4: made(TEXT, 5e-4, SELECTION_SEED, valid=3.0, test=1.0),
        2e-3: made(TEXT, 2e-3, SELECTION_SEED, valid=2.0, test=9.0),
        8e-3: made(TEXT, 8e-3, SELECTION_SEED, valid=2.5, test=2.0),
    }
    assert best_rate(selected, TEXT) == 2e-3
    selected[2e-3]["valid"] = {"bits_per_character": None}
    assert best_rate(selected, TEXT) == 8e-3
    selected[8e-3] |= {"status": "diverged", "best_at": None}
    assert best_rate(selected, TEXT) == 5e-4
    found = zip(RATES, (0.1, 0.9, 0.9), strict=True)
    accuracy = {rate: made(COPYING, rate, SELECTION_SEED, valid, 0.0) for rate, valid in found}
    assert best_rate(accuracy, COPYING) == 2e-3, "higher is better, and the lowest of equals is taken"


def test_the_page_reports_the_chosen_rate_and_never_the_selection_seed() -> None:
    chosen = [made(TEXT, 2e-3, seed, valid=2.0, test=value) for seed, value in ((0, 1.5), (1, 1.7))]
    others = [made(TEXT, rate, SELECTION_SEED, valid, 0.5) for rate, valid in zip(RATES, (3.0, 2.0, 2.5), strict=True)]
    page = page_part([*chosen, *others, made(TEXT, 8e-3, 0, valid=1.0, test=0.1)])
    (line,) = [line for line in page.splitlines() if line.startswith("| gru | SAB |")]
    assert [cell.strip() for cell in line.split("|")[3:6]] == ["1.600", "1.700", "0.002"]
    assert "| Penn Treebank | gru | not run | not run | 1.600 | – |" in page


def test_a_median_that_is_not_finite_is_worse_than_any_number() -> None:
    def page(torchs: float | None, ours: float | None) -> str:
        values: dict[Method, float | None] = {"torch": torchs, "sab": ours}
        chosen = [made(TEXT, 2e-3, SELECTION_SEED, method=name, valid=1.0, test=2.0) for name in values]
        return page_part(
            [*chosen, *(made(TEXT, 2e-3, 0, method=name, valid=1.0, test=value) for name, value in values.items())]
        )

    assert "| gru | not finite | not run | 1.500 | yes |" in page(None, 1.5)
    assert "| gru | 1.500 | not run | not finite | no |" in page(1.5, None)
    assert "| gru | not finite | not run | not finite | equal |" in page(None, None)


def test_an_empty_page() -> None:
    assert page_part(dropin.load(RESULTS)) == "Nothing has been run yet."


# Mistakes


def test_mistakes_are_one_sentence(capsys: Capture) -> None:
    assert mistake(capsys, "knitting") == "TASK must be one of copying-2, ptb; got 'knitting'."
    assert mistake(capsys, "--cells", "lstm,LSTM") == "--cells must be one of lstm, gru, rnn_tanh; got 'LSTM'."
    assert mistake(capsys, "--methods", "bptt") == "--methods must be one of torch, torch_start, sab; got 'bptt'."
    assert mistake(capsys, "--rates", "1e-3") == "--rates must be of 0.0005, 0.002, 0.008; got 0.001."
    assert mistake(capsys, "--rates", "fast") == "--rates must be numbers with commas between them; got 'fast'."
    assert mistake(capsys, "--seeds", "1000").startswith("--seeds must not have 1000, the seed of the selection runs")
    for wrong in ("0/3", "4/3", "1", "1/0", "a/b"):
        assert mistake(capsys, "--slice", wrong).startswith("--slice must be i/n with i from 1 to n")
    assert mistake(capsys, "--iterations", "0").startswith("--iterations must be a whole number of at least 1")
    assert mistake(capsys, "ptb", "--cells", "lstm") == "TASK must have a run in this part of the table; none has."
    RESULTS.mkdir()
    line = made(COPYING, 2e-3, 0, 0.5, 0.5)
    del line["parameters"]
    (RESULTS / "dropin.jsonl").write_text(json.dumps(line) + "\n")
    assert "line 1 is no record of the drop-in table" in mistake(capsys)
