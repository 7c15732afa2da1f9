"""What watches over hostile inputs, that nothing is unpickled, and what damaged files have found."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from sab.lab import cli
from sab.lab.training import Run
from tests.faults.test_files import put_signed
from tests.faults.watch import Forbidden, watching

SOURCE = Path(cli.__file__).parents[1]
TRAIN = "train copying --length 4 --hidden-size 3 --k-att 1 --batch-size 2 --eval-batches 1 --eval-every 1".split()
TRAIN += "--threads 1 --out run --iterations".split()


@pytest.fixture(autouse=True)
def in_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


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
    assert cli.main([*TRAIN, "2"]) == 0
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
    assert cli.main([*TRAIN, "2"]) == 0
    kept = Path("run/metrics.jsonl").read_text()
    temporary = (".attention.png.tmp", ".metrics.jsonl.tmp", ".config.json.tmp", ".result.json.tmp")
    for name in ("attention.png", ".lock", *temporary):
        Path("run", name).symlink_to(outside)
    assert cli.main(["plot", "run"]) == 0
    outside.write_text(kept)
    Path("run/metrics.jsonl").unlink()
    Path("run/metrics.jsonl").symlink_to(outside)
    assert cli.main([*TRAIN, "3", "--resume"]) == 0
    assert outside.read_text() == kept
    assert not any(path.is_symlink() for path in Path("run").iterdir())


def test_a_random_state_that_is_none_is_told_of(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TRAIN, "2"]) == 0
    for path in Path("run").glob("checkpoint/*/training.safetensors"):
        tensors = load_file(path)
        tensors["rng.cpu"][:] = 255
        put_signed(path, save(tensors))
    capsys.readouterr()
    assert cli.main([*TRAIN, "3", "--resume"]) == 2
    assert "must hold a random state of torch" in capsys.readouterr().err
