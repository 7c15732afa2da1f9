"""`sab reproduce rivals` end to end, with a table of runs that take a fraction of a second, and the table's sizes."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matplotlib.figure import Figure

from sab.lab import cli
from sab.lab.experiments import costs, rivals
from sab.lab.experiments.rivals import CONTENDERS, MOST_DIFFERENT, PROBLEMS, Problem, RivalRow
from sab.lab.experiments.selection import RATES, SELECTION_SEED, count_parameters
from sab.lab.models import SequenceModel
from sab.lab.rivals import ONLINE, RIVALS
from sab.lab.tasks import Copying
from sab.lab.training import RunConfig
from sab.lab.training.evaluation import predict_on
from tests.lab.experiments.conftest import replaced
from tests.lab.report.made_up import rival_cost as cost
from tests.lab.report.made_up import rival_record as made
from tools.groups import SELECTION_NOTE, SELECTION_SIGN
from tools.pages import ROOT, with_part
from tools.rivals import LENGTH, TIME, figures, overview, page_part

Capture = pytest.CaptureFixture[str]
FULL = dict(PROBLEMS)
SIZES: dict[str, Any] = {"hidden_size": 6, "batch_size": 3, "eval_every": 2, "seeds": 1}
COPYING = Problem(
    "copying-2",
    "copying",
    4,
    {"length": 2},
    contenders=("sab", "lstm", "lru"),
    other_lengths=(3, 5),
    streams=True,
    **SIZES,
)
ONLINE_COPYING = Problem("copying-1", "copying", 4, {"length": 1}, contenders=("uoro",), is_matched=False, **SIZES)
RESULTS = Path("results")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with replaced(PROBLEMS, COPYING, ONLINE_COPYING):
        yield


def run(*arguments: str) -> int:
    try:
        return cli.main(["reproduce", "rivals", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def config_of(problem: Problem, name: str, rate: float = 2e-3) -> RunConfig:
    return RivalRow(problem, CONTENDERS[name], rate).config(0)


# The table


def test_the_table_has_every_rival() -> None:
    used = {name for problem in FULL.values() for name in problem.contenders}
    assert used == CONTENDERS.keys()
    assert {CONTENDERS[name].options["method"] for name in used} >= RIVALS.keys() - {"rtrl"}
    matched = [problem.name for problem in FULL.values() if problem.is_matched]
    assert matched == ["copying-300", "recall-200", "adding-400", "mnist", "ptb"]
    assert FULL["copying-300"].other_lengths[-1] == 5_000
    assert (FULL["recall-200"].options["pairs"], FULL["recall-200"].other_lengths[-1]) == (16, 2_000)
    online = [problem for problem in FULL.values() if not problem.is_matched]
    assert {(problem.name, problem.hidden_size) for problem in online} == {
        ("copying-20", 32),
        ("copying-50", 32),
        ("adding-100", 32),
    }
    assert all(set(problem.contenders) >= {"sab_small", "tbptt_small", *ONLINE} - {"rtrl"} for problem in online)


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name in FULL["mnist"].contenders])
def test_parameters_are_those_of_the_lstm(name: str) -> None:
    package = CONTENDERS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, extra `rivals`")
    for problem in FULL.values():
        if problem.is_matched:
            wanted, found = (count_parameters(config_of(problem, one)) for one in ("lstm", name))
            assert abs(found / wanted - 1) <= MOST_DIFFERENT, (problem.name, found, wanted)


def test_all_are_trained_alike() -> None:
    for problem in FULL.values():
        names = [name for name in problem.contenders if CONTENDERS[name].package is None]
        configs = [config_of(problem, name) for name in names]
        assert all((one.training, one.task) == (configs[0].training, configs[0].task) for one in configs)
        training = configs[0].training
        assert (training.clip, training.lr_decay, training.weight_decay, training.precision) == (
            1.0,
            None,
            0.0,
            "float32",
        )
        if not problem.is_matched:
            assert {one.model.hidden_size for one in configs} == {32}
            assert {one.model.cell for one in configs} == {"gru"}


def test_full_self_attention_reads_every_earlier_state_and_cuts_nothing() -> None:
    """Also at more steps than in training."""
    config = config_of(COPYING, "self_attention")
    model = SequenceModel(config.model, encoding="vector", input_size=2, output_size=2, steps=config.task.steps)
    x = torch.randn(9, 1, 2, requires_grad=True)
    outputs, state = model(x)
    outputs[-1].sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(-1) > 0).all()
    assert state.microstates.shape[2] == 9
    with torch.no_grad():
        changed = model.layers.weight_hh_l0 * 0  # only the memory is left to remember by
        model.layers.weight_hh_l0.copy_(changed)
        other = x.detach().clone()
        other[0] += 1
        assert (model(other)[0][-1] - model(x)[0][-1]).abs().max() > 1e-6


# Runs and records


def test_the_whole_table_its_records_and_its_page(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--commit", "abc", "--threads", "1", "--together", "2") == 0
    assert capsys.readouterr().out.endswith(
        "All 16 runs are at their end; their records are in results/rivals.jsonl.\n"
    )
    known = {(record["row"], record["seed"]): record for record in rivals.load(RESULTS)}
    assert len(known) == 4 * (3 + 1)
    for problem in (COPYING, ONLINE_COPYING):
        for name in problem.contenders:
            selected = {rate: known[f"{problem.name}-{name}-{rate:g}", SELECTION_SEED] for rate in RATES}
            best = max(RATES, key=lambda rate: (selected[rate]["valid"]["accuracy_last10"], -rate))
            reported = [key for key in known if key[0].startswith(f"{problem.name}-{name}-") and key[1] < 1000]
            assert sorted(reported) == [(f"{problem.name}-{name}-{best:g}", 0)]
            record = known[reported[0]]
            assert (record["contender"], record["commit"], record["is_finite"]) == (name, "abc", True)
            assert record["parameters"] == count_parameters(config_of(problem, name))
            assert [*record["other_lengths"]] == [str(length) for length in problem.other_lengths]
    with monkeypatch.context() as patch:
        patch.setattr(Copying, "loss", lambda *_: pytest.fail("trained again"))
        assert run() == 0
    capsys.readouterr()
    assert run("copying-2", "--methods", "lstm", "--list") == 0
    assert capsys.readouterr().out.count("  recorded\n") == 4
    page = page_part(rivals.load(RESULTS), [])
    assert "another configuration" not in page
    for words in ("### Copying, T = 2", "| LRU | ", "| UORO | ", "T = 5 |", "images/rivals-length.png"):
        assert words in page
    assert "rivals-time.png" not in page, "without costs there are no times"
    whole = with_part((ROOT / "docs" / "rivals.md").read_text(), "rivals", page)
    assert whole.startswith("# Rivals")


def test_costs(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LENGTH", 60)
    monkeypatch.setattr(costs, "PIECE", 25)
    few = ["--costs", "--seconds", "1e-3", "--device", "cpu", "--threads", "1"]
    assert run("copying-2", *few, "--minutes", "1e-9") == 0
    assert capsys.readouterr().out == "3 methods are left. The same command goes on.\n"
    assert run(*few) == 0
    assert capsys.readouterr().out.endswith("All are measured; their records are in results/rivals-costs.jsonl.\n")
    known = {(one["problem"], one["contender"]): one for one in costs.load(RESULTS)}
    assert known.keys() == {(p.name, name) for p in (COPYING, ONLINE_COPYING) for name in p.contenders}
    for (problem, name), record in known.items():
        assert record["update_milliseconds"] > 0
        assert record["threads"] == 1
        assert record["train_bytes"] > 16 * record["parameters"], "weights, gradients, two moments, and more"
        assert record["parameters"] == count_parameters(config_of(PROBLEMS[problem], name))
        assert (record["stream"] is None) == (problem == "copying-1")
    streams = {name: known["copying-2", name]["stream"] for name in COPYING.contenders}
    assert {name: (stream["kind"], stream["steps"]) for name, stream in streams.items()} == {
        "sab": ("grows", 60),
        "lstm": ("constant", 60),
        "lru": ("constant", 60),
    }
    n = config_of(COPYING, "lstm").model.hidden_size
    assert streams["lstm"]["bytes"] == 2 * 4 * n
    n = config_of(COPYING, "sab").model.hidden_size
    assert streams["sab"]["bytes"] == 2 * 4 * n + 30 * (2 * 4 * n + 8)
    before = (RESULTS / "rivals-costs.jsonl").read_bytes()
    assert run(*few) == 0
    assert (RESULTS / "rivals-costs.jsonl").read_bytes() == before, "nothing is measured twice"
    page = page_part([], costs.load(RESULTS))
    assert "| grows with the stream |" in page
    assert "| does not grow |" in page


def test_the_state_of_a_stream_is_that_of_its_steps() -> None:
    """The costs are taken from the state that single steps would have led to."""
    for name in COPYING.contenders:
        config = config_of(COPYING, name)
        model = config.build_model(CPU).eval()
        inputs = config.task.batch(0, 0, 1, "test")[0]
        with torch.no_grad():
            state: Any = model.first_state()
            for t in range(30):
                state = predict_on(model, inputs[t % len(inputs)].unsqueeze(0), state, config.training)[1]
            whole = costs._read(model, config, inputs, model.first_state(), 30)
        assert costs.state_bytes(whole) == costs.state_bytes(state)


# The page


def test_an_empty_page_says_that_nothing_was_run() -> None:
    page = page_part([], [])
    assert page.endswith("No method has been trained yet.")
    assert "| SAB, LSTM | not run |" in page
    assert "| SAB, LSTM | not run |" in overview([])
    assert "![" not in page
    assert figures([], []) == {}


def test_the_page_reports_the_chosen_rate_and_no_selection_run_where_other_seeds_were_run() -> None:
    chosen = [made(COPYING, "lstm", 2e-3, seed, 0.5, value) for seed, value in ((0, 0.5), (1, 1.0))]
    others = [
        made(COPYING, "lstm", rate, SELECTION_SEED, valid, 0.1)
        for rate, valid in zip(RATES, (0.1, 0.9, 0.2), strict=True)
    ]
    records = [*chosen, *others, made(COPYING, "lstm", 8e-3, 0, 1.0, 0.9)]
    page = page_part(records, [cost("copying-2", "lstm")])
    (line,) = [line for line in page.splitlines() if line.startswith("| LSTM | 75.0%") and "2.50" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["LSTM", "75.0%", "50.0%", "1/2", "75.0%", "0.002", "9", "2.50", "3.0"]
    assert "| LSTM | 75.0% (2) |" in overview(records)
    assert SELECTION_SIGN not in page
    assert " *ms an update* and *MiB in training* are those on cpu, torch threads: 1." in page


def test_a_selection_run_stands_with_a_sign_where_no_other_seed_was_run() -> None:
    tried = [
        made(COPYING, "lstm", rate, SELECTION_SEED, valid, valid - 0.25)
        for rate, valid in zip(RATES, (0.25, 1.0, 0.5), strict=True)
    ]
    for records, sign, cells in (
        (tried, SELECTION_SIGN, "75.0% § | – | – | 75.0% | 0.002 | 9 | not run | not run"),
        ([*tried, made(COPYING, "lstm", 2e-3, 0, 0.5, 0.5)], "", "50.0% | 50.0% | 0/1 | 50.0% | 0.002 | 9 | not run"),
        (tried[1:], "", "not run | – | – | – | – | – | not run"),  # the rate is not chosen yet
    ):
        page = page_part(records, [])
        assert f"| LSTM | {cells} |" in page
        drawn = figures(records, [])
        assert page.count(SELECTION_NOTE) == (2 if sign else 0), "under the figures and under the table"
        labels = [str(line.get_label()) for figure in drawn.values() for line in figure.axes[0].lines]
        assert labels == ([] if records == tried[1:] else [f"LSTM {sign}".strip(), "chance"])


def test_figures() -> None:
    records = [made(COPYING, name, 2e-3, seed, 0.5, 0.5) for name in ("sab", "lru") for seed in (0, SELECTION_SEED)]
    records[0]["metrics"] = {"accuracy_last10": 0.75}
    drawn = figures(records, [cost("copying-2", "sab"), cost("copying-2", "lru", 5.0)])
    assert drawn.keys() == {TIME, LENGTH}

    def lines(figure: Figure) -> dict[str, list[tuple[float, float]]]:
        (axes,) = figure.axes
        found = {str(line.get_label()): line for line in axes.lines}
        return {
            name: [(x, y) for x, y in numpy.asarray(line.get_xydata())]
            for name, line in found.items()
            if name != "chance"
        }

    assert lines(drawn[TIME]) == {"SAB, LSTM": [(0.01, 0.75)], "LRU": [(0.02, 0.5)]}
    assert lines(drawn[LENGTH])["SAB, LSTM"] == [(2, 0.75), (3, 0.5), (5, 0.5)]


def test_a_caption_names_the_panels_that_are_drawn_and_the_device_of_the_costs() -> None:
    longer = replace(COPYING, name="copying-4", options={"length": 4}, streams=False)
    with replaced(PROBLEMS, COPYING, longer, ONLINE_COPYING):
        records = [made(one, "lru", 2e-3, seed, 0.5, 0.5) for one in (COPYING, longer) for seed in (0, SELECTION_SEED)]
        page = page_part(records, [cost("copying-2", "lru"), cost("copying-1", "uoro", device="cuda (GPU)")])
    (time, length) = re.findall(r"!\[(.*)\]", page)
    assert time.endswith("(updates times the cost of one on cpu, torch threads: 1): Copying, T = 2")
    assert length.endswith(": Copying, T = 2; Copying, T = 4")


# Mistakes


def test_mistakes_are_one_sentence(capsys: Capture) -> None:
    def mistake(*arguments: str) -> str:
        capsys.readouterr()
        assert run(*arguments) == 2
        return capsys.readouterr().err.removeprefix("sab: ").rstrip("\n")

    assert mistake("knitting") == "TASK must be one of copying-2, copying-1; got 'knitting'."
    assert mistake("--methods", "sab,bptt").startswith("--methods must be one of sab, sab_gru, lstm, ")
    assert mistake("--costs", "--seconds", "0").startswith("--seconds must be")
    RESULTS.mkdir()
    line = replace_entry(made(COPYING, "lstm", 2e-3, 0, 0.5, 0.5), "contender", 3)
    (RESULTS / "rivals.jsonl").write_text(json.dumps(line) + "\n")
    assert "line 1 is no record of the rivals' table" in mistake()
    (RESULTS / "rivals-costs.jsonl").write_text(json.dumps(cost("copying-2", "lstm", stream={"kind": "x"})) + "\n")
    assert "line 1 is no record of costs" in mistake("--costs", "--device", "cpu")


def replace_entry(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**record, name: value}


def test_a_missing_package_is_one_sentence(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    rivals.matched_size.cache_clear()
    with replaced(PROBLEMS, replace(COPYING, contenders=("mamba",))):
        assert run() == 2
    assert capsys.readouterr().err.startswith("sab: mambapy is missing; install the extra 'rivals': ")
