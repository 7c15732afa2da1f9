"""A few of the inputs that `make fuzz` tries by the ten thousand, and what watches over them."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from sab.errors import UserValueError
from sab.lab import cli
from sab.lab.training import Run
from tests.faults.fuzz import COMMANDS, fuzz, fuzz_commands, fuzz_files
from tests.faults.fuzz_files import TARGETS, put_signed
from tests.faults.fuzz_mutations import mutated_bytes, mutated_json
from tests.faults.fuzz_watch import Forbidden, watching
from tools.fuzz import COMMAND_LINES, PAGE, RESULTS, page_part
from tools.fuzz import INPUTS as ALL_INPUTS

SOURCE = Path(cli.__file__).parents[1]
INPUTS = 150


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment and the folder that the command lines change are set back."""
    monkeypatch.chdir(tmp_path)
    for name in ("SAB_DATA", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.parametrize("target", list(TARGETS))
def test_hostile_files(target: str) -> None:
    tally = fuzz_files(target, range(INPUTS), seed=1)
    assert tally.bugs == []
    assert tally.inputs == tally.accepted + tally.mistakes == INPUTS
    assert tally.mistakes > INPUTS // 3


def test_random_command_lines() -> None:
    tally = fuzz_commands(range(60), seed=1)
    assert tally.bugs == []
    assert tally.accepted > 5
    assert tally.mistakes > 20


def test_what_was_kept_of_the_whole_campaign() -> None:
    found = {line["target"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}
    assert found.keys() == {*TARGETS, COMMANDS}
    for target, line in found.items():
        assert line["bugs"] == []
        assert line["inputs"] == line["accepted"] + line["mistakes"]
        assert line["inputs"] >= (COMMAND_LINES if target == COMMANDS else ALL_INPUTS)
    assert page_part(RESULTS) in PAGE.read_text(encoding="utf-8")


def test_the_campaign_finds_bugs() -> None:
    def attempt(random: Random) -> None:
        if random.random() < 0.5:
            raise UserValueError("no.")
        raise KeyError("a bug")

    tally = fuzz("bugs", attempt, range(100))
    assert len(tally.bugs) == 5
    assert "KeyError: 'a bug'" in tally.bugs[0]


def test_the_watch_sees_what_must_not_be_done(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.touch()
    (inside / "link").symlink_to(outside)
    with watching(inside):
        (inside / "file").write_text("")
        (inside / "folder").mkdir()
        outside.read_text()
        with pytest.raises(Forbidden, match="outside"):
            outside.write_text("")
        with pytest.raises(Forbidden, match="outside"):
            (inside / "link").open("a")
        with pytest.raises(Forbidden, match="outside"):
            (tmp_path / "folder").mkdir()
        with pytest.raises(Forbidden, match=r"os\.rename"):
            (inside / "file").rename(tmp_path / "file")
        with pytest.raises(Forbidden, match=r"pickle\.find_class"):
            pickle.loads(pickle.dumps(Path))
        with pytest.raises(Forbidden, match=r"os\.system"):
            os.system("true")
    outside.write_text("")


def test_mutations_depend_on_the_random_numbers_alone() -> None:
    made = [{mutated_bytes(Random(one), [b"abc" * 20]) for one in range(50)} for _ in range(2)]
    assert made[0] == made[1]
    assert len(made[0]) > 40
    assert mutated_json(Random(3), {"a": [1, 2]}) == mutated_json(Random(3), {"a": [1, 2]})


# No pickle


def test_no_source_unpickles() -> None:
    unpickles = re.compile(
        r"\b(pickle|shelve|dill|joblib|marshal)\b|torch\.load\b|np\.load\b|numpy\.load\b|\beval\(|\bexec\("
    )
    for path in SOURCE.rglob("*.py"):
        code = re.sub(r'""".*?"""|#[^\n]*|\.eval\(', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert unpickles.search(code) is None, path


def test_no_command_unpickles(
    monkeypatch: pytest.MonkeyPatch, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unpickle(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (np, "load")):
        monkeypatch.setattr(module, name, unpickle)
    train = (
        "train text8 --part prefix --length 60 --hidden-size 3 --batch-size 12 --eval-batches 1 --threads 1 --out run"
    )
    Path("text").write_text("the cat")
    lines = [f"{train} --iterations 2 --keep best", f"{train} --iterations 3 --keep best --resume"]
    lines += ["eval run --batches 1", "sample run --length 3", "score run text", "plot run", "info run"]
    lines += [f"data list --data-dir {tiny_data}", f"data get mnist --from {tiny_data} --data-dir data"]
    lines += ["reproduce copying --status", "reproduce --list", "tasks"]
    for line in lines:
        assert cli.main(line.split()) == 0, f"{line}: {capsys.readouterr().err}"


# What the fuzzing found


def test_a_configuration_cannot_ask_for_more_memory_than_the_files_have(
    tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "train copying --length 2 --hidden-size 3 --batch-size 2 --iterations 2 --eval-batches 1 --threads 1 --out run"
    )
    assert cli.main(line.split()) == 0
    changed = {"hidden_size": 200_000}
    for path in (Path("run/config.json"), *Path("run").glob("checkpoint/*/state.json")):
        contents = json.loads(path.read_text())
        contents.pop("digest", None)
        (contents if path.name == "config.json" else contents["config"])["model"] |= changed
        path.write_text(json.dumps(contents))
    capsys.readouterr()
    assert Run.open("run").config.model.hidden_size == 200_000
    assert cli.main(["eval", "run"]) == 2
    assert "must hold the tensors of this run's model" in capsys.readouterr().err


def test_a_run_cannot_say_where_data_are(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text('{"task": {"name": "mnist", "data_dir": "/somewhere"}, "model": {}, "training": {}}')
    assert cli.main(["info", "."]) == 2
    assert "data_dir is none of them" in capsys.readouterr().err


def test_no_link_in_a_run_leads_out_of_it(tiny_data: Path, tmp_path: Path) -> None:
    """A run from somebody else may hold links; what is written there takes their places."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    line = "train copying --length 4 --hidden-size 3 --k-att 1 --batch-size 2 --eval-batches 1 --threads 1 --out run"
    assert cli.main([*line.split(), "--iterations", "2", "--eval-every", "1"]) == 0
    kept = Path("run/metrics.jsonl").read_text()
    temporary = (".attention.png.tmp", ".metrics.jsonl.tmp", ".config.json.tmp", ".result.json.tmp")
    for name in ("attention.png", ".lock", *temporary):
        Path("run", name).symlink_to(outside)
    assert cli.main(["plot", "run"]) == 0
    outside.write_text(kept)
    Path("run/metrics.jsonl").unlink()
    Path("run/metrics.jsonl").symlink_to(outside)
    assert cli.main([*line.split(), "--iterations", "3", "--eval-every", "1", "--resume"]) == 0
    assert outside.read_text() == kept
    assert not any(path.is_symlink() for path in Path("run").iterdir())


def test_a_random_state_that_is_none_is_told_of(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "train copying --length 2 --hidden-size 3 --batch-size 2 --eval-batches 1 --threads 1 --out run --iterations"
    assert cli.main([*line.split(), "2"]) == 0
    for path in Path("run").glob("checkpoint/*/training.safetensors"):
        tensors = load_file(path)
        tensors["rng.cpu"][:] = 255
        put_signed(path, save(tensors))
    capsys.readouterr()
    assert cli.main([*line.split(), "3", "--resume"]) == 2
    assert "must hold a random state of torch" in capsys.readouterr().err
