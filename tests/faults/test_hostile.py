"""What watches over hostile inputs, that nothing is unpickled, and what damaged files have found."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # before a test replaces pickle.Unpickler, a class of which it makes another
from safetensors.torch import load_file, save

from sab.errors import printable
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
        r"\b(pickle|shelve|dill|joblib|marshal)\b|torch\.load\b(?!\(.*, weights_only=True\))"
        r"|np\.load\b|numpy\.load\b|\beval\(|\bexec\("
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


def alter(run: Path, **changed: Any) -> None:
    """Changes options of a run, in its checkpoints as well, as whoever makes a hostile one does."""
    for path in (run / "config.json", *run.glob("*/*/state.json")):
        contents = json.loads(path.read_text())
        contents.pop("digest", None)
        for part in (contents if path.name == "config.json" else contents["config"]).values():
            part |= {option: value for option, value in changed.items() if option in part}
        path.write_text(json.dumps(contents))


@pytest.fixture
def runs(tiny_data: Path) -> tuple[Path, Path]:
    """A run, and a copy of it that is to become hostile."""
    assert cli.main([*TRAIN, "2", "--moments-every", "1"]) == 0
    shutil.copytree("run", "other")
    return Path("run"), Path("other")


@pytest.mark.parametrize(
    ("option", "size"), [("length", 10**6), ("length", 2**62), ("batch_size", 2**63 - 1), ("k_top", 10**7)]
)
def test_no_size_in_a_configuration_keeps_a_figure_busy(
    option: str, size: int, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has the other run and, unless fewer sequences do, says why this one is not explored."""
    alter(runs[1], **{option: size})
    with watching(tmp_path):  # which has an alarm, and a bound on memory
        assert cli.main(["report", "run", "other"]) == 0
        statuses = [cli.main(["plot", kind, "other"]) for kind in ("attention", "credit-paths")]
    page = Path("report.html").read_text()
    assert "2 runs: results" in page
    is_bounded = option == "batch_size"  # of too many sequences there are fewer
    assert page.count('"about":') == 1 + is_bounded
    assert is_bounded or f"{size + 20 if option == 'length' else size:,}" in page
    assert statuses == ([0, 0] if is_bounded else [2, 2])
    errors = capsys.readouterr().err
    assert errors.count("\n") == statuses.count(2), errors
    assert "Traceback" not in errors


def test_weights_that_are_not_finite_do_not_deny_the_page(runs: tuple[Path, Path]) -> None:
    alter(runs[1], lr=0.5)  # else they are two seeds, of which one is explored
    for path in runs[1].glob("*/*/model.safetensors"):
        put_signed(path, save({name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(path).items()}))
    assert cli.main(["report", "other", "run"]) == 0
    page = Path("report.html").read_text()
    assert "2 runs: results" in page
    assert page.count('"about":') == 1
    assert "(other): not explored, ValueError" in page


def test_a_hostile_run_does_not_deny_the_page_for_others(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (runs[1] / "config.json").write_text("[]")
    capsys.readouterr()
    assert cli.main(["report", "run", "other"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("sab: left out: run 'other' must be the folder of a run; its config.json is not one")
    assert told.out == "report.html\n"
    assert "1 run: results" in Path("report.html").read_text()
    assert cli.main(["report", "other"]) == 2


@pytest.mark.parametrize("name", ["red\x1b[31m", "two\nlines", "turned\u202e", "no letter\udcff", r"$\frac$"])
def test_names_are_shown_escaped(
    name: str, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        runs[1].rename(name)
    except (OSError, UnicodeEncodeError):
        pytest.skip("the file system has no such name")
    # safetensors takes no path that is not UTF-8, so such a run is shown but not explored.
    lines = [["report", name], ["plot", "learning-curve", "run", name, "-o", f"{name}.png"]]
    lines += [] if "\udcff" in name else [["plot", name], [*TRAIN[:-3], "--out", name, "--resume", "--iterations", "3"]]
    for line in lines:
        capsys.readouterr()
        assert cli.main(line) == 0, line
        told = capsys.readouterr()
        shown = (told.out + told.err).replace("\n", "")
        assert shown.isprintable(), shown
        assert line[0] == "report" or printable(name) in shown
    page = Path("report.html").read_text(encoding="utf-8")
    assert printable(name) in page
    assert name == printable(name) or name not in page


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


@pytest.mark.parametrize("name", ["checkpoint", "moments", "best"])
def test_a_folder_that_is_a_link_is_not_written_to(
    name: str, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = [*TRAIN, "2", "--moments-every", "1", "--keep", "best"]
    assert cli.main(train) == 0
    Path("run", name).rename("outside")
    Path("run", name).symlink_to(tmp_path / "outside")
    held = sorted(tmp_path.joinpath("outside").rglob("*"))
    assert held
    assert cli.main(["eval", "run"]) == 0  # what is only read may be one
    capsys.readouterr()
    assert cli.main([*train[: len(TRAIN)], "5", *train[-4:], "--resume"]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"sab: 'run/{name}' must be a folder of the run to be written to; it is a link to ")
    assert sorted(tmp_path.joinpath("outside").rglob("*")) == held


def test_a_random_state_that_is_none_is_told_of(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TRAIN, "2"]) == 0
    for path in Path("run").glob("checkpoint/*/training.safetensors"):
        tensors = load_file(path)
        tensors["rng.cpu"][:] = 255
        put_signed(path, save(tensors))
    capsys.readouterr()
    assert cli.main([*TRAIN, "3", "--resume"]) == 2
    assert "must hold a random state of torch" in capsys.readouterr().err
