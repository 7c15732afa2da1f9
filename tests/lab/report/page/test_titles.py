from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sab.lab.commands import training
from sab.lab.models import METHODS
from sab.lab.report.page import titles
from sab.lab.tasks import MNIST, Adding, Copying
from sab.lab.training import Run
from sab.lab.training.run import RunConfig


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (Copying(length=30, train_lengths="uniform"), {"cell": "gru", "k_trunc": 5, "lr": 4e-3, "lr_decay": 0.6}),
        (Adding(length=200), {"method": "tbptt", "clip": None, "seed": 3, "layer_norm": True}),
        (MNIST(permuted=True), {"hidden_size": 7, "cuda_graph": False, "keep": "last", "patience": 4}),
    ],
)
def test_the_command_makes_the_same_run(task: Any, options: dict[str, Any], tmp_path: Path) -> None:
    default = RunConfig.default(task)
    of_model = default.model.options().keys()
    model = default.model.with_options(**{name: value for name, value in options.items() if name in of_model})
    changed = {name: value for name, value in options.items() if name not in of_model}
    config = RunConfig(task, model, replace(default.training, **changed))
    made = titles.command(config, tmp_path / "a 'folder'")
    assert made is not None
    program, command, name, *arguments = shlex.split(made)
    assert (program, command, name) == ("sab", "train", task.name)
    parsed = training._parse_training(name, arguments, RunConfig.default(type(task)()))
    assert parsed.config == config
    assert parsed.folder == tmp_path / "a 'folder'"


def test_every_method_has_a_name() -> None:
    default = RunConfig.default(Copying())
    for method in METHODS:
        sizes = {"hidden_size": 8, "k_trunc": 5, "k_top": 0 if method in ("bptt", "tbptt") else 3}
        name = titles.model_name(replace(default, model=default.model.with_options(method=method, **sizes)))
        assert name.startswith(titles.METHODS[method])
    chrono = replace(default, model=default.model.with_options(method="chrono"))
    assert titles.model_name(chrono).startswith("chrono initialisation, LSTM 128")
    mamba = replace(default, model=default.model.with_options(method="mamba"))
    assert titles.model_name(mamba).startswith("Mamba, 128"), "it has no cell"


def test_an_option_that_is_none_any_more_has_no_command(trained: Run) -> None:
    assert titles.command(replace(trained.config, input_scale=2.0), Path("run")) is None


def test_titles_say_the_model_and_no_more_than_is_needed(trained: Run, forgetful: Run) -> None:
    made = titles.group_titles({"a/b": [trained], "c": [forgetful]})
    assert made == {"a/b": "SAB, LSTM 6, k_trunc 4, k_top 3", "c": "truncated BPTT, LSTM 6, k_trunc 4"}
    alike = titles.group_titles({"a/b": [trained], "c": [trained]})
    assert alike == {name: f"SAB, LSTM 6, k_trunc 4, k_top 3 ({name})" for name in ("a/b", "c")}
    other = Run(trained.path, replace(trained.config, task=MNIST()))
    both = titles.group_titles({"a": [trained], "b": [other]})
    assert [title.partition(": ")[0] for title in both.values()] == ["Copying, T = 3", "Pixel-by-pixel MNIST"]
