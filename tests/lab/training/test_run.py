from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sab.config import SABConfig
from sab.errors import UserError
from sab.lab.files import write_text
from sab.lab.models import ModelConfig
from sab.lab.tasks import TASKS, Adding, Copying
from sab.lab.training import Result, Run, RunConfig, TrainConfig
from sab.lab.training import run as run_module
from sab.lab.training.run import ONLY_AT_THE_START
from tests.lab.older import NEWER_OPTIONS

Train = Callable[..., Result]


RECORDED = json.loads(
    """
    {"task": {"name": "copying", "length": 100, "encoding": "onehot", "train_lengths": "grid"},
     "model": {"method": "sab", "cell": "lstm", "hidden_size": 128, "num_layers": 1, "input_scale": 8.0, "k_top": 5,
      "k_att": 2, "k_trunc": 5, "scorer": "mlp", "weighting": "softmax", "forward": "sparse", "incorporate": "add",
      "initial_summary": 1.0, "attention_size": null, "initial_score": 0.0, "max_microstates": null,
      "readout": "hidden", "backend": "auto"},
     "training": {"iterations": 3000, "batch_size": 64, "lr": 0.006, "memory_lr": 1.0, "lr_decay": 0.5, "clip": 0.1,
      "dropout": 0.0, "weight_decay": 0.0, "seed": 0, "device": "auto", "precision": "float32", "cuda_graph": true,
      "threads": null, "eval_every": 100, "eval_batches": 10, "checkpoint_every": 500, "checkpoint_minutes": null,
      "moments_every": null, "stop_at": null, "patience": null, "keep": "last", "on_nan": "stop"}}
    """
)
"""The configuration of a record in results/, as written before the options of the memory had a dataclass."""


def test_a_configuration_is_stored_as_it_always_was() -> None:
    config = RunConfig(
        Copying(length=100, train_lengths="grid"),
        ModelConfig(
            hidden_size=128,
            memory=SABConfig(k_top=5, k_trunc=5, scorer="mlp", incorporate="add", input_start="torch"),
        ),
        TrainConfig(iterations=3000, lr=6e-3, lr_decay=0.5, clip=0.1, eval_every=100),
        input_scale=8.0,
    )
    assert RunConfig.from_json(RECORDED) == config
    newer = {"input_start": "torch", **NEWER_OPTIONS}
    model = {name: value for name, value in RECORDED["model"].items() if name not in ONLY_AT_THE_START}
    assert config.to_json() == {**RECORDED, "model": {**model, **newer}}
    assert RunConfig.from_json(config.to_json()) == config
    assert config.difference(RunConfig.from_json(RECORDED)) is None
    assert config.difference(replace(config, input_scale=1.0)) == "input_scale"
    assert "input_scale" not in replace(config, input_scale=1.0).to_json()["model"]
    for wrong in (0, -1.0, "large"):
        with pytest.raises(UserError, match=r"^input_scale must be "):
            RunConfig.from_json({**RECORDED, "model": {**RECORDED["model"], "input_scale": wrong}})


def test_a_folder_that_holds_anything_is_refused(tmp_path: Path, config: RunConfig, run_training: Train) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"^out '.*' already holds files, and no run; choose another folder"):
        run_training(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    Run.create(tmp_path / "run", config)
    with pytest.raises(ValueError, match=r"^out '.*' already holds a run; resume it .* or choose another folder"):
        run_training(tmp_path / "run")


def test_an_empty_folder_is_welcome(tmp_path: Path, run_training: Train) -> None:
    assert run_training(tmp_path).status == "finished"


def test_an_unwritable_place_is_named(tmp_path: Path, run_training: Train) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^out '.*' must be a folder; it is a file"):
        run_training(tmp_path / "file")
    for out in (tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ValueError, match=r"^out '.*' must be a place that can be written to; it is not: "):
            run_training(out)


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ValueError, match=r"result.json' must be a place that can be written to; it is not: No space"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("length", lambda config: replace(config, task=Copying(length=3))),
        ("task", lambda config: replace(config, task=Adding(length=4))),
        ("k_top", lambda config: replace(config, model=config.model.with_options(k_top=3))),
        ("k_trunc", lambda config: replace(config, model=config.model.with_options(k_trunc=None))),
        ("lr", lambda config: replace(config, training=replace(config.training, lr=0.5))),
        ("eval_every", lambda config: replace(config, training=replace(config.training, eval_every=5))),
        ("iterations", lambda config: replace(config, training=replace(config.training, iterations=7))),
        ("patience", lambda config: replace(config, training=replace(config.training, patience=3))),
        ("memory_lr", lambda config: replace(config, training=replace(config.training, memory_lr=0.5))),
        ("keep", lambda config: replace(config, training=replace(config.training, keep="best"))),
    ],
)
def test_resuming_with_another_configuration_names_the_option(
    tmp_path: Path, config: RunConfig, option: str, change: Callable[[RunConfig], RunConfig]
) -> None:
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(ValueError, match=f"^{option} must be .* to resume '.*'; got ") as caught:
        run.check_resumable(change(config))
    assert caught.value.option == option  # pyright: ignore[reportAttributeAccessIssue]


def test_resuming_may_change_what_computes_nothing(tmp_path: Path, config: RunConfig) -> None:
    run = Run.create(tmp_path / "run", config)
    run.check_resumable(
        replace(
            config,
            training=replace(config.training, iterations=99, threads=7, checkpoint_every=50, checkpoint_minutes=5.0),
        )
    )
    run.check_resumable(replace(config, training=replace(config.training, device="cuda", cuda_graph=False)))


def test_a_baseline_has_no_memory_to_have_options_of(config: RunConfig) -> None:
    memory: dict[str, Any] = {
        "k_top": 7,
        "k_att": 3,
        "scorer": "affine",
        "weighting": "softmax_sink",
        "forward": "dense",
    }
    memory |= {"incorporate": "concat", "attention_size": 3, "max_microstates": 4, "readout": "hidden+summary"}
    others = [config.model.with_options(**memory), config.model.with_options(initial_gate=0.1)]
    for method in ("bptt", "tbptt", "torch", "sab"):
        one = replace(config, model=replace(config.model, method=method))
        for model in others:
            training = replace(config.training, memory_lr=0.5)
            other = replace(config, model=replace(model, method=method), training=training)
            assert (one.difference(other) is None) == (method != "sab")
            assert (one.effective() == other.effective()) == (method != "sab")
        for option, value in (("hidden_size", 7), ("cell", "gru"), ("k_trunc", 3)):
            if method == "torch" and option == "k_trunc":
                continue  # it makes no difference there
            assert one.difference(replace(one, model=one.model.with_options(**{option: value}))) == option


def test_the_size_of_keys_that_an_older_run_did_not_store_is_the_hidden_size(config: RunConfig) -> None:
    wide = replace(config, model=replace(config.model, hidden_size=200))
    stored = wide.to_json()
    assert stored["model"]["attention_size"] == 128, "what None stands for now"
    again = RunConfig.from_json(stored)
    assert again.difference(wide) is None
    assert wide.difference(again) is None
    stored["model"]["attention_size"] = None
    older = RunConfig.from_json(stored)
    assert older.difference(wide) == "attention_size"
    keys = dict(older.build_model(torch.device("cpu")).named_parameters())["layers.attn_w_memory_l0"]
    assert keys.shape == (200, 200)


def test_more_iterations_are_refused_where_the_learning_rate_falls_over_them(tmp_path: Path, config: RunConfig) -> None:
    falling = replace(config, training=replace(config.training, lr_decay=0.5))
    run = Run.create(tmp_path / "run", falling)
    run.check_resumable(falling)
    with pytest.raises(ValueError, match=r"^iterations must be 8 to resume '.*', whose learning rate falls .*; got 99"):
        run.check_resumable(replace(falling, training=replace(falling.training, iterations=99)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not one: JSONDecodeError"),
        ("[]", "not one: TypeError"),
        ("{}", "not one: KeyError 'task'"),
        (
            '{"task": {"name": "knitting"}}',
            f"not one: task must be one of {', '.join(TASKS)}; got 'knitting'",
        ),
        ('{"task": {"name": "adding", "width": 3}}', "not one: TypeError .*width"),
        ('{"task": {"name": "adding"}, "model": {"k_top": -1}}', "not one: k_top must be"),
        (
            '{"task": {"name": "adding"}, "model": {"memory": {}}}',
            "not one: memory must be one of flat, hierarchical; got {}",
        ),
        ('{"task": {"name": "adding"}, "model": 3}', "not one: TypeError"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^run '.*' must be the folder of a run; its config.json is {reason}"):
        Run.open(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        Run.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"it holds no config\.json"):
        Run.open(tmp_path / "empty")


def test_default_folder_tells_what_is_in_it(config: RunConfig) -> None:
    assert config.default_out() == Path("runs/copying-2-sab-lstm6-seed0")


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_module._commit() is None


def test_numpy_numbers_survive_json(config: RunConfig) -> None:
    given = RunConfig(
        Copying(length=np.int64(2)),  # pyright: ignore[reportArgumentType]
        replace(config.model, hidden_size=np.int32(6)),
        replace(config.training, lr=np.float32(0.5), seed=np.int64(0)),
    )
    assert RunConfig.from_json(json.loads(json.dumps(given.to_json()))) == given


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("metrics.jsonl", "oops\n", r"Expecting value.*"),
        ("metrics.jsonl", "3\n", "line 1 is none"),
        ("metrics.jsonl", "{}\n", "line 1 is none"),
        ("metrics.jsonl", '{"step": 3, "loss": 1.0, "metrics": {}}\n', "line 1 has no accuracy_last10"),
        ("result.json", "{", "it is not JSON"),
        ("result.json", '{"status": "finished"}', "it has other entries than one"),
        ("result.json", "wall_time", "its wall_time is 'long'"),
        ("result.json", "valid", "its valid is 'long'"),
        ("result.json", "best_at", "its best_at is 'long'"),
        ("result.json", "colour", "it has other entries than one"),
    ],
)
def test_files_of_another_kind_are_told_in_plain_words(
    tmp_path: Path, run_training: Train, name: str, text: str, reason: str
) -> None:
    run_training(tmp_path / "run")
    path = tmp_path / "run" / name
    is_entry = text.isidentifier()
    path.write_text(json.dumps({**json.loads(path.read_text()), text: "long"}) if is_entry else text)
    run = Run.open(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=f"{reason}\\.$"):
        run.evaluations() if name == "metrics.jsonl" else run.result()
    with pytest.raises(TypeError, match=r"^run must be a path; got 3\.$"):
        Run.open(3)  # pyright: ignore[reportArgumentType]


def test_files_of_older_versions_are_read_with_the_defaults(tmp_path: Path, run_training: Train) -> None:
    out = tmp_path / "run"
    result = run_training(out)
    newest, newer = max((out / "checkpoint").iterdir()), ["on_nan", "checkpoint_minutes", "memory_lr"]
    for path, below, names in (
        (out / "config.json", ["training"], [*newer, "patience", "keep"]),
        (out / "result.json", [], ["valid", "best_at"]),
        (newest / "state.json", ["config", "training"], [*newer, "patience", "keep"]),
        (newest / "state.json", ["state"], ["best", "best_at", "since_best", "skipped", "rollbacks", "lr_factor"]),
        (newest / "state.json", [], ["digest"]),
    ):
        contents = json.loads(path.read_text())
        entries = reduce(getitem, below, contents)
        for name in names:
            del entries[name]
        path.write_text(json.dumps(contents))
    assert Run.open(out).result() == replace(result, valid={})
    assert run_training(out, resume=True) == replace(result, valid={})
    longer = run_training(out, resume=True, iterations=11)
    assert (longer.status, longer.iterations, longer.best_at) == ("finished", 11, None)
    assert longer.valid.keys() == longer.metrics.keys()
