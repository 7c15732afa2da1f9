"""The runner: what it records, what it skips, how it goes on, and what one failure does to the others."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sab.errors import UserError
from sab.lab.data import DATASETS
from sab.lab.experiments import progress, records
from sab.lab.experiments import reproduce as runner
from sab.lab.experiments.reproduce import Outcome, coverage, jobs_of, reproduce, standings
from sab.lab.experiments.tables import Row, find
from sab.lab.locks import Lock
from sab.lab.tasks import PTB, Copying
from sab.lab.training import Run, RunConfig, train, trainer, updates
from tests.lab.experiments.conftest import TinyRow
from tests.lab.report.made_up import record

CLOCK = ("wall_time", "date", "together")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(rows: list[Row], seeds: Any = (0, 1), **options: Any) -> Outcome:
    console = options.pop("console", Console(file=io.StringIO(), width=200))
    out, results = (options.pop(name, Path(usual)) for name, usual in (("out", "runs"), ("results", "results")))
    return reproduce(rows, seeds, out, results, **options, console=console)


def lines(task: str = "copying") -> dict[tuple[str, int], dict[str, Any]]:
    return {(record["row"], record["seed"]): record for record in records.load(task, Path("results"))}


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in CLOCK}


def let_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Makes every look at the runner's clock take so long."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += seconds
        return now

    monkeypatch.setattr(runner.time, "monotonic", look)


def test_a_record_has_all_that_a_number_depends_on(rows: list[Row]) -> None:
    outcome = call(rows, commit="abc")
    assert (outcome.failed, outcome.left, outcome.was_interrupted) == ({}, [], False)
    assert len(outcome.recorded) == 8
    assert sorted(path.name for path in Path("results").iterdir()) == ["adding.jsonl", "copying.jsonl"]
    for row in rows:
        for seed in (0, 1):
            record = lines(row.task)[row.id, seed]
            run = Run.open(Path("runs") / row.id / f"seed{seed}")
            result = run.result()
            assert result is not None
            assert record["config"] == row.config(seed).to_json()
            names = ("status", "iterations", "metrics", "valid", "best_at", "device", "versions")
            assert {name: record[name] for name in names} == {name: getattr(result, name) for name in names}
            assert record["valid"].keys() == record["metrics"].keys()
            assert (record["data"], record["epochs"], record["best_at"]) == (row.task, None, None)
            assert record["commit"] == "abc"
            assert [point["step"] for point in record["history"]] == [2, 4, 6]
            assert record["history"][-1].keys() == {"step", "loss", "metrics", "grad_norm", "grad_norm_max"}
            assert record["together"] == 1


def test_a_run_is_the_one_that_is_made_alone_however_many_take_turns(rows: list[Row]) -> None:
    call(rows[:3], together=4)
    for row in rows[:3]:
        config = row.config(1)
        train(config.task, config.model, config.training, Path("alone") / row.id)
        alone, among = (Run.open(path) for path in (Path("alone") / row.id, Path("runs") / row.id / "seed1"))
        assert [line["metrics"] for line in alone.evaluations()] == [line["metrics"] for line in among.evaluations()]
        assert lines()[row.id, 1]["metrics"] == json.loads((alone.path / "result.json").read_text())["metrics"]
    assert sorted(record["together"] for record in lines().values()) == [2, 2, 4, 4, 4, 4]


def test_records_of_older_versions_are_those_of_their_runs(rows: list[Row]) -> None:
    """An option that came later is not in them and has its default."""
    call(rows[:1], seeds=[0], commit="old")
    path = Path("results/copying.jsonl")
    (record,) = map(json.loads, path.read_text().splitlines())
    del record["config"]["training"]["memory_lr"]
    path.write_text(json.dumps(record) + "\n")
    before = path.read_bytes()
    assert call(rows[:1], seeds=[0], commit="new").recorded == []
    assert path.read_bytes() == before
    record["config"]["training"]["memory_lr"] = 0.5
    path.write_text(json.dumps(record) + "\n")
    assert len(call(rows[:1], seeds=[0], commit="new").recorded) == 1, "a record of another run"


def test_what_has_ended_is_skipped(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    call(rows[:2])
    before = Path("results/copying.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Copying, "loss", lambda *_: pytest.fail("trained again"))
        assert call(rows[:2]).recorded == []
        assert Path("results/copying.jsonl").read_bytes() == before
        Path("results/copying.jsonl").unlink()
        assert len(call(rows[:2]).recorded) == 4, "a record that is missing is made from the run"
    assert {key: timeless(record) for key, record in lines().items()} == {
        (record["row"], record["seed"]): timeless(record) for record in map(json.loads, before.splitlines())
    }


def test_time_over_and_on_gives_the_same_numbers(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    call(rows[:3])
    whole = lines()
    Path("results/copying.jsonl").unlink()
    Path("runs").rename("whole")
    count = 0
    while True:
        with monkeypatch.context() as patch:
            let_pass(patch, 1.0)
            outcome = call(rows[:3], minutes=0.4, together=2)
        count += 1
        assert outcome.failed == {}
        if not outcome.left:
            break
        assert count < 30
        states = {standing.state for standing in standings(outcome.left, Path("results"))}
        assert states <= {"left", "under way", "unrecorded", "ended"}
    assert count > 3
    assert {key: timeless(record) for key, record in lines().items()} == {
        key: timeless(record) for key, record in whole.items()
    }


def test_one_seed_comes_after_the_other(rows: list[Row]) -> None:
    outcome = call(rows[:3], seeds=(3, 0))
    assert [record["seed"] for record in outcome.recorded] == [3, 3, 3, 0, 0, 0]
    assert outcome.recorded[0]["row"] == rows[2].id, "the longest first"
    Path("runs").rename("old")
    outcome = call(rows[:3], seeds=(3, 0), minutes=9)
    assert [record["row"] for record in outcome.recorded[:3]] == [row.id for row in rows[:3]], "the shortest first"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_and_the_next_call_goes_on(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Send(progress.RunProgress):
        def iteration(self, step: int, loss: float) -> None:
            if step == 3:
                signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(progress, "RunProgress", Send)
        outcome = call(rows[:2], seeds=[0], together=2)
    assert outcome.was_interrupted
    assert (outcome.recorded, len(outcome.left)) == ([], 2)
    assert [standing.iterations for standing in standings(outcome.left, Path("results"))] == [3, 2]
    outcome = call(rows[:2], seeds=[0], together=2)
    assert not outcome.was_interrupted
    assert [record["status"] for record in outcome.recorded] == ["finished", "finished"]


def test_updates_that_nobody_looks_at_as_on_a_gpu(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of a moment is that of its iteration although nobody has looked at its loss yet."""
    rows = [replace(rows[0], moments=(3, 5))]
    call(rows, seeds=[0])
    host = lines()[rows[0].id, 0]
    Path("runs").rename("host")

    def build(self: trainer.Trainer) -> updates.DeviceUpdates:
        return updates.DeviceUpdates(self.config, self.model, self.optimizer, self.state, None, None)

    monkeypatch.setattr(trainer.Trainer, "_build_updates", build)
    monkeypatch.setattr(trainer, "build_optimizer", updates.build_capturable_optimizer)
    monkeypatch.setattr(updates, "SECONDS_UNREAD", math.inf)
    call(rows, seeds=[0])
    device = lines()[rows[0].id, 0]
    assert list(device["attention"]["moments"]) == ["3", "5"]
    for moment in ("3", "5"):
        ours, theirs = (
            torch.tensor([[weight or 0.0 for weight in line] for line in one["attention"]["moments"][moment]])
            for one in (device, host)
        )
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_what_was_killed_before_its_first_checkpoint_begins_anew(rows: list[Row]) -> None:
    job = jobs_of(rows[:1], [0], Path("runs"))[0]
    Run.create(job.folder, job.config)
    assert not call(rows[:1], seeds=[0]).left


def spoil(monkeypatch: pytest.MonkeyPatch, length: int, what: Any) -> None:
    """Makes the losses of the sequences of a length something else."""
    loss = Copying.loss

    def spoilt(self: Copying, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return what(loss(self, outputs, targets)) if self.length == length else loss(self, outputs, targets)

    monkeypatch.setattr(Copying, "loss", spoilt)


def test_a_run_that_diverges_is_a_result(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 4, lambda loss: loss * math.nan)
    outcome = call(rows[:3], seeds=[0])
    assert (outcome.failed, outcome.left) == ({}, [])
    record = lines()[rows[2].id, 0]
    assert (record["status"], record["iterations"]) == ("diverged", 0)
    assert record["message"].startswith("the loss of iteration 1 is nan")
    assert record["other_lengths"] == {}
    assert call(rows[:3], seeds=[0]).recorded == [], "it is not tried again"


def test_one_that_fails_leaves_the_others_to_go_on(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(loss: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nand a page of advice")

    with monkeypatch.context() as patch:
        spoil(patch, 4, fails)
        outcome = call(rows[:3], together=2)
    label = f"{rows[2].id} seed 0"
    assert list(outcome.failed) == [label, f"{rows[2].id} seed 1"]
    assert outcome.failed[label].startswith("OutOfMemoryError: CUDA out of memory. (more in ")
    assert "page of advice" in next(Path("runs").glob("*/seed0.error.txt")).read_text()
    assert [job.label for job in outcome.left] == list(outcome.failed)
    assert len(outcome.recorded) == 4
    assert call(rows[:3]).left == []


def test_the_attention_of_the_first_seed_is_kept(rows: list[Row]) -> None:
    call(rows[:1], iterations=5)
    assert "attention" not in lines()[rows[0].id, 1]
    attention = lines()[rows[0].id, 0]["attention"]
    assert (attention["first"], attention["k_att"]) == (12, 2)
    assert list(attention["moments"]) == ["1", "4"], "there is no ninth iteration"
    for weights in attention["moments"].values():
        assert len(weights) == 11
        assert all(sum(filter(None, line)) == pytest.approx(1.0, abs=1e-3) for line in weights)
    assert attention["moments"]["1"] != attention["moments"]["4"]


def test_other_lengths_are_tested_with_the_final_weights(rows: list[Row]) -> None:
    call(rows[:1], seeds=[0])
    record = lines()[rows[0].id, 0]
    run = Run.open(Path("runs") / rows[0].id / "seed0")
    model = runner.load_model(run, torch.device("cpu"))
    for length in (3, 5):
        expected = runner.evaluate(model, Copying(length), run.config.training, "test", runner.OTHER_LENGTH_BATCHES)
        assert record["other_lengths"][str(length)] == expected


def test_tests_that_time_did_not_allow_are_made_by_the_next_call(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(rows[0], moments=())
    over = False
    record = runner.Runner._record

    def late(self: Any, job: Any) -> None:
        nonlocal over
        over = True
        record(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_record", late)
        patch.setattr(runner.time, "monotonic", lambda: 1e9 if over else 0.0)
        outcome = call([row], seeds=[0], minutes=1)
    assert ([job.row for job in outcome.left], outcome.recorded) == ([row], [])
    assert call([row], seeds=[0]).recorded[0]["other_lengths"].keys() == {"3", "5"}


def test_a_run_of_another_configuration_is_refused(rows: list[Row]) -> None:
    call(rows[:1], seeds=[0])
    other = replace(rows[0], k_att=3)
    assert other.id == rows[0].id
    wanted = rf"^out 'runs/{rows[0].id}/seed0' must hold a run as the row now is; there k_att must be 2 to resume"
    with pytest.raises(UserError, match=wanted):
        call([other, rows[1]], seeds=[0])
    assert not (Path("runs") / rows[1].id).exists(), "nothing was begun"
    (standing,) = standings(jobs_of([other], [0], Path("runs")), Path("results"))
    assert standing.state == "of another configuration"


def test_a_newer_record_takes_the_place_of_an_older_one(rows: list[Row]) -> None:
    call(rows[:2])
    older = lines()
    Path("runs").rename("old")
    other = replace(rows[0], k_att=3)
    call([other], seeds=[0])
    newer = lines()
    assert newer.keys() == older.keys()
    assert len(Path("results/copying.jsonl").read_text().splitlines()) == 4
    changed = [key for key in newer if newer[key] != older[key]]
    assert changed == [(other.id, 0)]
    assert newer[other.id, 0]["config"]["model"]["k_att"] == 3
    record = newer[other.id, 0]
    records.save({**record, "iterations": 99}, Path("results"))
    assert [line["iterations"] for line in lines().values() if line["seed"] == 0] == [6, 99]


def test_a_record_of_a_longer_run_stays_unless_the_row_has_changed(tmp_path: Path) -> None:
    row = "copying-100-sab-5-5-ours"
    now = record(row)
    longer, shorter, otherwise = (json.loads(json.dumps(now)) for _ in range(3))
    longer["config"]["training"]["iterations"] += 1
    shorter["config"]["training"]["iterations"] -= 1
    otherwise["config"]["training"] |= {"lr": 0.5, "iterations": now["iterations"] + 1}
    other_memory = json.loads(json.dumps(longer))
    other_memory["config"]["model"] |= {"scorer": "mlp", "incorporate": "add", "input_scale": 8.0}
    for older, newer, is_saved in (
        (longer, now, False),  # the same, trained for longer
        (otherwise, shorter, False),  # no reason to lose a long one for what is less than the row asks for
        (otherwise, now, True),
        (other_memory, now, True),
        (shorter, now, True),
        (now, {**now, "date": "2030-01-02T03:04:05+00:00"}, True),
    ):
        records.save(older, tmp_path / "results")
        assert records.save(newer, tmp_path / "results") == is_saved
        assert lines()[row, 0] == (newer if is_saved else older)
        (tmp_path / "results" / "copying.jsonl").unlink()


def test_a_run_may_be_given_more_iterations(rows: list[Row]) -> None:
    call(rows[2:3], seeds=[0])
    assert call(rows[2:3], seeds=[0], iterations=8).recorded[0]["iterations"] == 8
    with pytest.raises(UserError, match="iterations must be at least 8"):
        call(rows[2:3], seeds=[0], iterations=6)


def test_at_most_forty_points_and_the_last_among_them() -> None:
    evaluations: Any = [
        {"step": step, "loss": 1.0, "metrics": {}, "grad_norm_max": float(step == 7), "grad_norm": step % 2}
        for step in range(1, 202)
    ]
    points = records.thinned(evaluations)
    assert all(0 < point["grad_norm"] < 1 for point in points), "a mean over those in between"
    assert len(points) <= 40
    assert points[-1]["step"] == 201
    assert max(point["grad_norm_max"] for point in points) == 1.0, "a spike is not lost"
    assert records.thinned([]) == []


@pytest.mark.parametrize("text", ["not JSON\n", "[]\n", '{"schema": 0}\n', '{"schema": 1, "row": "x"}\n'])
def test_a_file_that_is_none_of_records_is_told(text: str) -> None:
    Path("results").mkdir()
    Path("results/copying.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"^results 'results/copying\.jsonl' must be a file of JSON lines"):
        records.load("copying", Path("results"))


def test_at_least_one_row_and_seed(rows: list[Row]) -> None:
    with pytest.raises(UserError, match="rows must be at least one"):
        call([])
    with pytest.raises(UserError, match="seeds must be different whole numbers"):
        call(rows, seeds=[])
    assert not Path("runs").exists()


def test_lines_elsewhere_and_bars_on_a_terminal(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.0)
    told = io.StringIO()
    call(rows[:1], console=Console(file=told, width=200), seeds=[0])
    text = told.getvalue()
    assert f"{rows[0].id} seed 0: iterations 0 to 6 on cpu, into runs/" in text
    assert f"  {rows[0].id} seed 0: 5/6  accuracy" in text
    assert f"[1/1] {rows[0].id} seed 0: accuracy on the last 10" in text
    told = io.StringIO()
    call(rows[:2], console=Console(file=told, width=200, force_terminal=True), seeds=[0])
    text = told.getvalue()
    assert "runs" in text
    assert "1/2" in text
    assert f"[2/2] {rows[1].id} seed 0" in text


def test_standings(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    call(rows[:1], seeds=[0])
    call(rows[3:], seeds=[0])
    (Path("runs") / rows[3].id).rename("elsewhere")
    told = standings(jobs_of(rows, [0], Path("runs")), Path("results"))
    assert [standing.state for standing in told] == ["ended", "left", "left", "recorded"]
    assert [standing.iterations for standing in told] == [6, 0, 0, 6]
    assert told[0].summary.startswith("accuracy on the last 10")
    changed = replace(rows[3], overrides={"lr": 0.5})
    (standing,) = standings(jobs_of([changed], [0], Path("runs")), Path("results"))
    assert (standing.state, standing.iterations) == ("outdated", 6)


def test_a_row_has_the_seeds_that_it_needs(rows: list[Row]) -> None:
    chosen = [rows[2], replace(rows[3], seeds=1)]
    assert coverage(chosen, Path("results")) == (2, 0, 4)
    labels = [job.label for job in jobs_of(chosen, None, Path("runs"))]
    assert labels == [f"{rows[2].id} seed 0", f"{rows[3].id} seed 0", *(f"{rows[2].id} seed {seed}" for seed in (1, 2))]
    assert len(jobs_of(chosen, [0, 5], Path("runs"))) == 4, "seeds that are given are those of all"
    outcome = call(chosen, seeds=None)
    assert (len(outcome.recorded), outcome.left) == (4, [])
    assert coverage(chosen, Path("results")) == (2, 2, 0)
    changed = [replace(row, overrides={"lr": 0.5}) for row in chosen]
    assert coverage(changed, Path("results")) == (2, 0, 4), "records of another configuration do not count"
    assert coverage([replace(rows[2], seeds=5)], Path("results")) == (1, 0, 2)


def test_a_seed_that_a_row_does_not_need_is_not_one_of_those_it_lacks(rows: list[Row]) -> None:
    chosen = [replace(rows[2], seeds=2)]
    call(chosen, seeds=[0, 7])
    assert coverage(chosen, Path("results")) == (1, 0, 1)
    assert [job.seed for job in jobs_of(chosen, None, Path("runs")) if job.result() is None] == [1]


@pytest.fixture
def stored_rows(tiny_data: Path) -> list[Row]:
    sab = TinyRow("ptb", None, "sab", 4, 2, reading="ours")
    return [sab, TinyRow("text8", None, "tbptt", 4), TinyRow("mnist", None, "bptt", options={"permuted": True})]


def test_tasks_with_data(stored_rows: list[Row], rows: list[Row]) -> None:
    outcome = call([*stored_rows, rows[2]], seeds=[0], iterations=3)
    assert (outcome.failed, outcome.left) == ({}, [])
    found = {record["task"]: record for record in outcome.recorded}
    assert {task: record["data"] for task, record in found.items()} == {
        "ptb": "ptb",
        "text8": "text8",
        "mnist": "permuted mnist",
        "copying": "copying",
    }
    assert found["ptb"]["epochs"] == pytest.approx(3 / 1567)
    for task in ("ptb", "text8"):
        assert found[task]["valid"].keys() == found[task]["metrics"].keys()
        assert found[task]["metrics"].keys() == {"bits_per_character", "bits_per_character_carried"}
    assert found["mnist"]["best_at"] in (2, 3)
    points = {point["step"]: point["metrics"]["accuracy"] for point in found["mnist"]["history"]}
    assert points[found["mnist"]["best_at"]] == max(points.values())


def test_numbers_of_the_text8_prefix_are_called_so(stored_rows: list[Row], tiny_data: Path, tmp_path: Path) -> None:
    prefix = DATASETS["text8 prefix"].files[0].name
    (tmp_path / "data/text8").mkdir(parents=True)
    (tmp_path / "data/text8" / prefix).write_bytes((tiny_data / "text8" / prefix).read_bytes())
    told = io.StringIO()
    options: dict[str, Any] = {"seeds": [0], "iterations": 2, "data_dir": tmp_path / "data"}
    (record,) = call(stored_rows[1:2], **options, console=Console(file=told, width=200)).recorded
    assert record["data"] == "text8 prefix"
    assert record["config"]["task"]["part"] == "prefix"
    assert "(text8 prefix) by the weights of iteration 2, after 2 iterations" in told.getvalue()
    jobs = jobs_of(stored_rows[1:2], [0], Path("runs"), 2, data_dir=tmp_path / "data")
    (standing,) = standings(jobs, Path("results"))
    assert "(text8 prefix)" in standing.summary
    Path("runs").rename("elsewhere")
    (standing,) = standings(jobs, Path("results"))
    assert (standing.state, standing.summary.endswith(" (text8 prefix)")) == ("recorded", True)


def test_missing_data_are_told_once_and_the_others_go_on(stored_rows: list[Row], rows: list[Row]) -> None:
    empty = Path("empty")
    outcome = call([*stored_rows, *rows[2:]], data_dir=empty)
    assert outcome.failed.keys() == {"ptb", "text8", "mnist"}
    where = "'ptb.train.txt' is not in 'empty/ptb': get it with: sab data get ptb"
    assert outcome.failed["ptb"] == f"data_dir must hold ptb; {where}."
    assert [job.row.id for job in outcome.left if job.seed == 0] == [
        row.id for row in sorted(stored_rows, key=lambda row: -row.config(0).task.steps)
    ]
    assert len(outcome.recorded) == 4
    with pytest.raises(UserError, match=r"^data_dir must hold ptb; .*: sab data get ptb\.$"):
        call(stored_rows[:1], data_dir=empty, out=Path("none"))
    with pytest.raises(UserError, match=r"data_dir must hold mnist; .* data_dir must hold ptb; "):
        call([stored_rows[0], stored_rows[2]], data_dir=empty, out=Path("none"))
    assert not Path("none").exists()


def test_what_has_ended_needs_no_data(stored_rows: list[Row]) -> None:
    call(stored_rows[:1], seeds=[0], iterations=2)
    Path("results/ptb.jsonl").unlink()
    outcome = call(stored_rows[:2], seeds=[0], iterations=2, data_dir=Path("empty"))
    assert ([record["task"] for record in outcome.recorded], list(outcome.failed)) == (["ptb"], ["text8"])


class GettingWorse(TinyRow):
    def config(self, seed: int, iterations: int | None = None, device: str = "auto") -> RunConfig:
        config = super().config(seed, iterations, device)
        return replace(config, training=replace(config.training, lr=50.0, eval_every=1, patience=2))


@pytest.mark.usefixtures("tiny_data")
def test_a_run_that_was_stopped_is_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    row = GettingWorse("ptb", None, "tbptt", 4)
    (record,) = call([row], seeds=[0], iterations=40).recorded
    assert record["status"] == "stopped"
    assert record["iterations"] == record["best_at"] + 2 < 40
    monkeypatch.setattr(PTB, "loss", lambda *_: pytest.fail("trained again"))
    outcome = call([row], seeds=[0], iterations=40)
    assert (outcome.recorded, outcome.left) == ([], [])
    (standing,) = standings(jobs_of([row], [0], Path("runs"), 40), Path("results"))
    assert (standing.state, standing.iterations) == ("ended", record["iterations"])


def test_a_large_model_has_the_device_to_itself(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner.Job, "is_large", property(lambda job: job.row.method == "tbptt"))
        outcome = call(rows, together=3)
        assert (outcome.failed, outcome.left) == ({}, [])
        assert [record["row"] for record in outcome.recorded[::4]] == [rows[2].id] * 2, "large ones first"
        together = {(record["row"], record["seed"]): record["together"] for record in outcome.recorded}
        assert [together.pop((rows[2].id, seed)) for seed in (0, 1)] == [1, 1]
        assert set(together.values()) == {3}
        Path("runs").rename("before")
        outcome = call(rows, together=3, minutes=9)
        assert [record["row"] for record in outcome.recorded[3::4]] == [rows[2].id] * 2, "or last"
    sizes = {job.row.task: job.is_large for job in jobs_of(find(), [0], Path("runs"))}
    small = dict.fromkeys(("copying", "adding", "mnist", "cifar10"), False)
    assert sizes == {"ptb": True, "text8": True, **small}


def test_a_run_that_another_process_trains_is_passed_over(rows: list[Row]) -> None:
    (job,) = jobs_of(rows[:1], [0], Path("runs"))
    lock = Lock(job.folder.with_suffix(".lock"))
    assert lock.take()
    outcome = call(rows[:1], seeds=[0])
    assert ([one.label for one in outcome.left], outcome.failed) == ([job.label], {})
    assert not job.folder.exists()
    lock.release()
    assert call(rows[:1], seeds=[0]).left == []


SAVES = """
import sys, time
from pathlib import Path
from sab.lab.experiments import records
Path(sys.argv[1]).touch()
while not Path("go").exists():
    time.sleep(0.001)
for seed in range(40):
    config = {"training": {"iterations": 1}}
    record = {"schema": records.SCHEMA, "row": sys.argv[1], "seed": seed, "task": "copying", "config": config}
    record |= dict.fromkeys(("metrics", "versions"), {}) | dict.fromkeys(("status", "message", "device", "date"), "")
    record |= {"iterations": 1, "solved_at": None, "history": [], "wall_time": 1.0, "commit": None}
    records.save(record, Path("results"))
"""


def test_processes_that_record_at_once_lose_nothing() -> None:
    names = ("one", "other")
    both = [subprocess.Popen([sys.executable, "-c", SAVES, name]) for name in names]
    while not all(Path(name).exists() for name in names):
        assert all(process.poll() is None for process in both)
        time.sleep(0.01)
    Path("go").touch()
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    found = [json.loads(line) for line in Path("results/copying.jsonl").read_text().splitlines()]
    assert {(record["row"], record["seed"]) for record in found} == {
        (name, seed) for name in names for seed in range(40)
    }
