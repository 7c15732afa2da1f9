"""The command line end to end, in this process where that is enough and in one of its own where it is not."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sab
import sab_cli
from sab.config import SABConfig
from sab.extras import install_command
from sab.lab import cli
from sab.lab.commands import training
from sab.lab.data.store import folders
from sab.lab.experiments import demo as demo_module
from sab.lab.experiments.demo import RECIPE, demo
from sab.lab.models import ModelConfig
from sab.lab.tasks import TASKS, Adding, Copying
from sab.lab.training import Run, trainer
from sab.lab.training.run import Result
from sab.ops import dispatch

TINY = ["--hidden-size", "6", "--k-top", "2", "--k-trunc", "4", "--batch-size", "3"]
TINY += ["--iterations", "6", "--eval-every", "3", "--eval-batches", "1", "--threads", "1"]
SEEDS = "--seeds must be different whole numbers of at least 0 with commas between them"
COPYING = ["train", "copying", "--length", "2", *TINY]
Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("tiny_data")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str | Path) -> int:
    """The exit status of a command."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # tyro's own way out, for --help and for what it cannot parse
        return int(stop.code or 0)


def mistake(capsys: Capture, *arguments: str | Path) -> str:
    """The one sentence that a wrong command gets."""
    capsys.readouterr()
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("sab: ")
    assert told.err.count("\n") == 1
    assert "Traceback" not in told.err
    return told.err.removeprefix("sab: ").rstrip("\n")


def assert_found_early(arguments: list[str], told: str) -> None:
    """What is refused before torch is imported is refused in the same words."""
    early = sab_cli.answer(arguments)
    assert early is None or early == (f"sab: {told}", 2, True)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(sab.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "sab", *arguments], env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def trained(capsys: Capture) -> Path:
    assert run(*COPYING, "--out", "trained") == 0
    capsys.readouterr()
    return Path("trained")


def test_help_and_version(capsys: Capture) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"sab {sab.__version__}\n"
    assert run("--help") == 0
    told = capsys.readouterr().out
    assert all(f"  {command} " in told for command in cli.COMMANDS)
    assert run() == 2
    assert capsys.readouterr().out == told
    assert run("train", "--help") == 0
    assert f"TASK is one of {', '.join(TASKS)};" in capsys.readouterr().out
    for command in cli.COMMANDS.keys() - {"train"}:
        assert run(command, "--help") == 0
        assert f"usage: sab {command}" in capsys.readouterr().out


def test_options_reach_the_run() -> None:
    options = "--cell gru --scorer dot --forward dense --clip None --memory-lr 0.25 --readout hidden+summary --out run"
    assert run(*COPYING, *options.split()) == 0
    config = Run.open(Path("run")).config
    assert (config.model.cell, config.model.memory.forward, config.training.clip) == ("gru", "dense", None)
    assert (config.model.readout, config.training.memory_lr) == ("hidden+summary", 0.25)


def test_tasks(capsys: Capture) -> None:
    assert run("tasks") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("method", ["sab", "tbptt", "bptt", "torch"])
def test_train_every_task_by_every_method(task: str, method: str, capsys: Capture) -> None:
    has_length = "length" in TASKS[task]().options()
    assert run("train", task, *(["--length", "30"] if has_length else []), *TINY, "--method", method) == 0
    (out,) = Path("runs").iterdir()
    assert out.name.startswith(f"{task}-3" if has_length else task)
    assert f"{method}-lstm6-seed0" in out.name
    told = capsys.readouterr().out
    assert "Finished all 6 iterations." in told
    assert f"sab plot {out}" in told
    assert json.loads((out / "result.json").read_text())["status"] == "finished"


def test_eval(trained: Path, capsys: Capture) -> None:
    assert run("eval", trained) == 0
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split()[:2] for line in lines)
    stored = json.loads((trained / "result.json").read_text())["metrics"]
    assert {name: float(value) for name, value in told.items()} == pytest.approx(stored, rel=1e-5)
    assert lines[0].endswith(f"  # accuracy on the last 10: {stored['accuracy_last10']:.1%}")
    assert run("eval", trained, "--split", "valid", "--batches", "3", "--device", "cpu") == 0
    assert capsys.readouterr().out.splitlines()[1] != f"cross_entropy_last10 {told['cross_entropy_last10']}"
    assert run("eval", trained, "--length", "9") == 0
    assert "accuracy_last10" in capsys.readouterr().out


def test_eval_of_what_reads_no_files(trained: Path, capsys: Capture) -> None:
    told = mistake(capsys, "eval", trained, "--data-dir", ".")
    assert told == "--data-dir must not be given for task copying, which reads no files."


@pytest.fixture
def characters(capsys: Capture) -> Path:
    """A run on ptb, evaluated on all of it."""
    assert run("train", "ptb", "--length", "20", *TINY, "--eval-batches", "None", "--out", "characters") == 0
    capsys.readouterr()
    return Path("characters")


def numbers(capsys: Capture) -> dict[str, float]:
    """What a command printed, by name."""
    return {line.split()[0]: float(line.split()[1]) for line in capsys.readouterr().out.splitlines()}


def test_eval_of_a_text_is_in_two_ways(characters: Path, capsys: Capture, tiny_data: Path) -> None:
    stored = json.loads((characters / "result.json").read_text())["metrics"]
    assert list(stored) == ["bits_per_character", "bits_per_character_carried"]
    assert run("eval", characters, "--split", "test", "--data-dir", tiny_data) == 0
    assert numbers(capsys) == pytest.approx(stored, rel=1e-5)
    assert run("eval", characters, "--streams", "1") == 0
    assert numbers(capsys)["bits_per_character_carried"] != stored["bits_per_character_carried"]
    assert run("eval", characters, "--batches", "2") == 0
    assert list(numbers(capsys)) == ["bits_per_character"]
    assert mistake(capsys, "eval", characters, "--streams", "0").startswith("--streams must be a whole number")
    assert mistake(capsys, "eval", characters, "--streams", "10000").startswith("--streams must be at most ")
    told = mistake(capsys, "eval", characters, "--max-memory", "2", "--batches", "1")
    assert told == "--max-memory must not be given together with --batches; got both."


def test_a_prefix_is_labelled_wherever_a_figure_comes_from_it(capsys: Capture, tiny_data: Path) -> None:
    options = ["train", "text8", "--length", "20", "--part", "prefix", *TINY]
    assert run(*options) == 0
    told = capsys.readouterr().out
    assert "text8 prefix sab: iterations 0 to 6" in told
    assert re.search(r"On unseen data: bits per character [0-9.]+ \(text8 prefix\)\.", told)
    (out,) = Path("runs").iterdir()
    assert out.name == "text8-20-prefix-sab-lstm6-seed0"
    assert run("eval", out) == 0
    assert all(line.endswith(", text8 prefix") for line in capsys.readouterr().out.splitlines())
    (Path("alone") / "text8").mkdir(parents=True)
    name = "text8.prefix74090640"
    (Path("alone") / "text8" / name).write_bytes((tiny_data / "text8" / name).read_bytes())
    told = mistake(capsys, "train", "text8", "--data-dir", "alone", *TINY)
    assert told == "--part must be prefix where 'alone' holds the text8 prefix alone; got 'full'."


@pytest.fixture
def best(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on ptb that was best after 2 iterations, and stopped."""
    bits = iter((3.0, 4.0, 5.0))
    monkeypatch.setattr(trainer, "evaluate", lambda *_: {"bits_per_character": next(bits)})
    options = ["--eval-every", "2", "--iterations", "20", "--patience", "2", "--keep", "best"]
    assert run("train", "ptb", "--length", "20", *TINY, *options, "--out", "stopped") == 0
    return Path("stopped")


def test_a_run_that_stops_and_keeps_its_best_weights(best: Path, capsys: Capture) -> None:
    *progress, stopped, unseen, took, _, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"It took .* and did not solve the task; best on validation data: 3\.000 at iteration 2\.", took
    )
    assert [re.search(r"bits per character [\d.]+( \(.*?\))?", line)[0] for line in progress[1:]] == [  # pyright: ignore
        "bits per character 3.000",
        "bits per character 4.000 (best 3.000)",
        "bits per character 5.000 (best 3.000)",
    ]
    assert stopped == (
        "Stopped after 6 iterations: no better bits per character in 2 evaluations since iteration 2 (3.000)."
    )
    result = json.loads((best / "result.json").read_text())
    shown = f"{result['metrics']['bits_per_character']:.3f}"
    assert unseen == f"On unseen data, by the weights of iteration 2: bits per character {shown}."
    assert (result["status"], result["best_at"]) == ("stopped", 2)
    for split, metrics in (("test", "metrics"), ("valid", "valid")):
        assert run("eval", best, "--split", split) == 0
        told = capsys.readouterr().out
        assert all(line.endswith(", weights of iteration 2") for line in told.splitlines())
        assert {line.split()[0]: float(line.split()[1]) for line in told.splitlines()} == pytest.approx(
            result[metrics], rel=1e-5
        )
    assert run("info", best) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    told = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert lines[0].startswith("status "), "the outcome comes first"
    assert (told["status"], told["keep"], told["patience"], told["weights kept"]) == (
        *("stopped", "best", "2", "those of iteration 2"),
    )
    assert float(told["valid bits per character"]) == pytest.approx(result["valid"]["bits_per_character"], rel=1e-3)
    assert (told["last evaluation"], told["last valid bits per character"]) == ("iteration 6", "5")


def test_best_weights_where_a_run_is_used(best: Path, tiny_data: Path, capsys: Capture) -> None:
    for last in (best / "checkpoint").iterdir():
        shutil.rmtree(last)  # they are not needed
    capsys.readouterr()
    assert run("score", best, tiny_data / "ptb" / "ptb.test.txt.xz") == 0
    *figures, characters, skipped = capsys.readouterr().out.splitlines()
    assert all(line.endswith("  # weights of iteration 2") for line in figures)
    assert not any("#" in line for line in (characters, skipped))
    assert run("sample", best, "--length", "5") == 0
    assert run("plot", best) == 0
    (best / "best" / "step-00000002" / "model.safetensors").write_bytes(b"PK")
    for command in ("eval", "sample", "plot"):
        assert "must be as it was written; it is truncated or was altered" in mistake(capsys, command, best)
    shutil.rmtree(best / "best")
    told = mistake(capsys, "eval", best)
    assert told == "'stopped' must hold its best weights, those of iteration 2; they are not in 'best'."


def test_a_prefix_and_the_best_weights_are_told_together(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--length", "20", "--part", "prefix", "--keep", "best", "--eval-every", "6", "--seeds", "0"]
    assert run("train", "text8", *TINY, *options, "--out", "run") == 0
    told = capsys.readouterr().out
    assert re.search(r"On unseen data, by the weights of iteration 6: bits per .* \(text8 prefix\)\.", told)
    assert run("eval", "run/seed-0", "--batches", "1") == 0
    assert capsys.readouterr().out.endswith(", text8 prefix, weights of iteration 6\n")


def test_sample(characters: Path, capsys: Capture) -> None:
    assert run("sample", characters, "--prompt", "the cat", "--length", "30", "--temperature", "0.8") == 0
    text = capsys.readouterr().out
    assert text.startswith("the cat")
    assert len(text) == len("the cat") + 30 + 1
    assert run("sample", characters, "--prompt", "the cat", "--length", "30", "--temperature", "0.8") == 0
    assert capsys.readouterr().out == text
    assert run("sample", characters, "--prompt", "the cat", "--length", "30", "--seed", "1") == 0
    assert capsys.readouterr().out != text
    assert run("sample", characters, "--length", "5") == 0
    assert len(capsys.readouterr().out) == 6


def test_sample_mistakes(characters: Path, trained: Path, capsys: Capture) -> None:
    told = mistake(capsys, "sample", characters, "--prompt", "the Cat")
    assert told.startswith("--prompt must hold only characters that ptb has, ")
    assert told.endswith("; got 'C' as character 5.")
    assert mistake(capsys, "sample", characters, "--length", "0").startswith("--length must be a whole number")
    assert mistake(capsys, "sample", characters, "--temperature", "-1").startswith("--temperature must be a finite")
    assert mistake(capsys, "sample", trained) == (
        "RUN must be one on characters, as of ptb or text8; it is one of copying."
    )


def test_score(characters: Path, tiny_data: Path, capsys: Capture) -> None:
    assert run("score", characters, tiny_data / "ptb" / "ptb.test.txt.xz") == 0
    scored = numbers(capsys)
    assert run("eval", characters, "--streams", "1") == 0
    assert {name: scored[name] for name in list(scored)[:2]} == pytest.approx(numbers(capsys), rel=1e-5)
    assert scored["skipped"] == 0
    Path("mine.txt").write_text("the Größe of mat\n", encoding="utf-8")
    told = mistake(capsys, "score", characters, "mine.txt")
    assert told.startswith("FILE must hold only characters that ptb has, ")
    assert told.endswith("; got 'G' as character 5.")
    assert run("score", characters, "mine.txt", "--skip-unknown") == 0
    scored = numbers(capsys)
    assert (scored["characters"], scored["skipped"]) == (13, 3)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "FILE 'mine.txt' must be a text file; there is no such file."),
        (b"\xff\xfe", "FILE 'mine.txt' must be in UTF-8; byte 1 is not."),
        (b"a", "FILE must hold at least 2 characters of ptb; got 1."),
    ],
)
def test_score_mistakes(characters: Path, capsys: Capture, content: bytes | None, sentence: str) -> None:
    if content is not None:
        Path("mine.txt").write_bytes(content)
    assert mistake(capsys, "score", characters, "mine.txt") == sentence


def test_data_get_and_list(tiny_data: Path, capsys: Capture) -> None:
    assert run("data", "get", "--help") == 0
    assert "--from" in capsys.readouterr().out
    assert run("data", "list", "--data-dir", "here") == 0
    assert [line.split("  ")[-2].strip() for line in capsys.readouterr().out.splitlines()[1:]] == ["not here"] * 9
    for name in ("ptb", "text8", "mnist", "osuleaf", "plaid", "ecg", "imdb"):
        assert run("data", "get", name, "--from", tiny_data, "--data-dir", "here") == 0
        told = capsys.readouterr().out.splitlines()
        assert told[0].startswith(f"{name}: ")
        assert all(Path(line).is_file() for line in told[1:])
    assert run("data", "list", "--data-dir", "here") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "In here:"
    assert told[1].startswith("ptb           here, as its checksums say  (Penn Treebank")
    assert "not here" in told[3], "the prefix, as all of it is there"
    assert run("train", "mnist", *TINY, "--permuted", "--data-dir", "here", "--out", "run") == 0
    assert "permuted mnist sab" in capsys.readouterr().out
    assert "data_dir" not in Path("run/config.json").read_text(), "where data lie is no part of what is computed"


def test_series_of_different_lengths(capsys: Capture) -> None:
    assert run("train", "series", "--dataset", "plaid", *TINY, "--k-att", "50", "--eval-batches", "None") == 0
    (out,) = Path("runs").iterdir()
    assert out.name == "series-plaid-sab-lstm6-seed0"
    assert "On unseen data: accuracy " in capsys.readouterr().out
    stored = json.loads((out / "result.json").read_text())["metrics"]
    assert run("eval", out) == 0
    assert numbers(capsys)["accuracy"] == pytest.approx(stored["accuracy"], abs=1e-3)
    assert run("plot", out) == 0
    assert run("report", out, "-o", "page.html") == 0
    assert "plaid" in Path("page.html").read_text()
    assert mistake(capsys, "train", "series", "--dataset", "fish").startswith("--dataset must be ")


def test_plot(trained: Path, capsys: Capture) -> None:
    assert run("plot", trained) == 0
    names = [f"{name}.{kind}" for name in ("learning_curve", "attention") for kind in ("png", "pdf", "svg")]
    assert capsys.readouterr().out.splitlines() == [f"trained/{name}" for name in names]
    assert mistake(capsys, "plot", trained, "-o", "curve.png").startswith(
        "--out must be a folder for several pictures; "
    )
    assert run("plot", trained, "-o", "new/pictures") == 0
    assert sorted(path.name for path in Path("new/pictures").iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path("new/pictures").glob("*.png"))


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text here")
def test_a_folder_whose_name_no_encoding_has(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stdout", told)
    assert run("plot", trained, "--out", os.fsdecode(b"\xff")) == 0
    assert told.buffer.getvalue().splitlines()[0].startswith(rb"\udcff/")  # pyright: ignore[reportAttributeAccessIssue]
    assert any(Path(os.fsdecode(b"\xff")).iterdir())


def test_plot_of_each_kind(trained: Path, capsys: Capture) -> None:
    for kind in ("attention", "credit-paths", "learning-curve", "gradient-norms"):
        assert run("plot", kind, trained) == 0
        assert capsys.readouterr().out == f"trained/{kind}.png\n"
    records = Path(__file__).parents[2] / "benchmarks/results/h200.jsonl"
    assert run("plot", "scaling", records, "--out", "new/scaling.pdf") == 0
    assert Path("new/scaling.pdf").read_bytes().startswith(b"%PDF")
    assert run("plot", "credit-paths", trained, "--target-step", "14", "--target-unit", "2", "--row", "1") == 0
    capsys.readouterr()
    assert mistake(capsys, "plot", "credit-paths", trained, "--row", "99").startswith("--row must be a whole number of")
    assert mistake(capsys, "plot", "attention", trained, "-o", "a.gif").startswith("--out must end in one of .png, ")
    assert mistake(capsys, "plot", "learning-curve") == "RUNS must be at least one; got none."
    assert mistake(capsys, "plot", "scaling") == "FILE must be given at least once; got none."


def test_plot_of_a_baseline_has_no_attention(capsys: Capture) -> None:
    run(*COPYING, "--method", "tbptt", "--out", "run")
    assert run("plot", "run") == 0
    assert not Path("run/attention.png").exists()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_every_command_takes_a_run_with_torchs_own_layer(cell: str, capsys: Capture) -> None:
    of_torch = ["--method", "torch_start", "--cell", cell, "--keep", "best", "--out", "run"]
    assert run("train", "ptb", "--length", "12", *TINY, *of_torch) == 0
    capsys.readouterr()
    assert run("eval", "run", "--split", "test") == 0
    told = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    stored = json.loads(Path("run/result.json").read_text())["metrics"]
    assert {name: float(value) for name, value in told.items()} == pytest.approx(stored, rel=1e-5)
    assert "bits_per_character_carried" in told
    assert run("sample", "run", "--prompt", "the cat", "--length", "9") == 0
    assert run("train", "ptb", "--out", "run", "--resume", "--iterations", "8") == 0
    assert run("info", "run") == 0
    assert run("plot", "run") == 0
    assert not Path("run/attention.png").exists()
    assert "has none (k_top is 0)" in mistake(capsys, "plot", "attention", "run")
    assert "must be or have one SAB layer" in mistake(capsys, "plot", "credit-paths", "run")
    assert run("report", "run", "--out", "page.html") == 0
    assert "torch.nn, our start" in Path("page.html").read_text()


def test_info(trained: Path, capsys: Capture) -> None:
    assert run("info", trained) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    told = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert lines[0].split() == ["status", "finished"], "the outcome comes first"
    assert (told["task"], told["k_trunc"], told["status"]) == ("copying", "4", "finished")
    assert re.fullmatch(r"\d+\.\d%", told["test accuracy on the last 10"])
    (trained / "result.json").unlink()
    assert run("info", trained) == 0
    assert "unfinished" in capsys.readouterr().out


def test_info_on_backends(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("info", "--backends") == 0
    told = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(told)[:3] == list(dispatch.BACKENDS)
    assert told["reference"] == "usable: always, on every device"
    assert told["auto on cpu"] in ("cpu", "reference")
    monkeypatch.setattr("sab.ops.cpu.loader.unavailable", lambda: "there is no compiler")
    monkeypatch.setattr("sab.ops.dispatch.triton_unavailable", lambda: "triton is not installed")
    assert run("info", "--backends") == 0
    told = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["cpu"] == "not usable: there is no compiler"
    assert told["triton"] == "not usable: triton is not installed"
    assert told["auto on cpu"] == "reference"


def test_info_on_nothing_is_a_mistake(capsys: Capture) -> None:
    assert mistake(capsys, "info") == "RUN must be given a value, or --backends; got none."


def test_stop_at_ends_a_run_early(capsys: Capture) -> None:
    assert run(*COPYING, "--stop-at", "0", "--out", "run") == 0
    result = json.loads(Path("run/result.json").read_text())
    assert (result["status"], result["iterations"], result["solved_at"]) == ("solved", 3, 3)


def test_resume_needs_no_option_twice_and_may_raise_the_iterations(trained: Path, capsys: Capture) -> None:
    before = snapshot(trained)
    assert run("train", "copying", "--out", trained, "--resume") == 0
    assert snapshot(trained) == before
    assert run("train", "copying", "--out", trained, "--resume", "--iterations", "9") == 0
    config = Run.open(trained).config
    assert (config.training.iterations, config.task) == (9, Copying(length=2))
    assert json.loads((trained / "result.json").read_text())["iterations"] == 9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--k-top", "3"], "--k-top must be 2 to resume 'trained'; got 3."),
        (["--length", "4"], "--length must be 2 to resume 'trained'; got 4."),
        (["--batch-size", "64"], "--batch-size must be 3 to resume 'trained'; got 64."),
        (["--iterations", "5"], "--iterations must be at least 6 to resume 'trained'; got 5."),
    ],
)
def test_resuming_with_another_configuration(trained: Path, capsys: Capture, options: list[str], sentence: str) -> None:
    before = snapshot(trained)
    assert mistake(capsys, "train", "copying", "--out", "trained", "--resume", *options) == sentence
    assert snapshot(trained) == before


def test_resuming_another_task(trained: Path, capsys: Capture) -> None:
    told = mistake(capsys, "train", "adding", "--out", trained, "--resume")
    assert told == "TASK must be 'copying' to resume 'trained'; got 'adding'."


def test_nothing_is_overwritten(trained: Path, capsys: Capture) -> None:
    before = snapshot(trained)
    told = mistake(capsys, *COPYING, "--out", trained)
    assert told.startswith("--out 'trained' already holds a run; resume it (--resume")
    assert snapshot(trained) == before


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["knit"], f"command must be one of {', '.join(cli.COMMANDS)}; got 'knit'."),
        (["train"], f"TASK must be one of {', '.join(TASKS)}; got none."),
        (["train", "knitting"], f"TASK must be one of {', '.join(TASKS)}; got 'knitting'."),
        (["train", "--length", "3"], f"TASK must be one of {', '.join(TASKS)}; got '--length'."),
        (["train", "copying", "--eval-batches", "None"], "--eval-batches must be a whole number for task copying"),
        (["train", "ptb", "--data-dir", "no"], "--data-dir must hold ptb; 'ptb.train.txt' is not in 'no/ptb'"),
        (["train", "ptb", "--length", "100000"], "--length must be at most"),
        (["train", "ptb", "--batch-size", "100000"], "--batch-size must be at most"),
        (["train", "mnist", "--batch-size", "100000"], "--batch-size must be at most 40, the number of train"),
        (["sample", "nowhere"], "RUN 'nowhere' must be the folder of a run; there is no such folder."),
        (["score", "nowhere", "file"], "RUN 'nowhere' must be the folder of a run; there is no such folder."),
        (["data"], "data must be followed by get or list; got nothing."),
        (["data", "knit"], "data must be followed by get or list; got knit."),
        (
            ["data", "get", "knitting"],
            f"NAME must be one of {', '.join(folders())}; got 'knitting'.",
        ),
        (["data", "get", "ptb", "--from", "no", "--data-dir", "no"], "--from 'no' must be a folder or an archive;"),
        (["data", "get", "ptb", "--from", "file", "--data-dir", "no"], "--from 'file' must hold ptb.train.txt, "),
        (["train", "copying", "--length", "0"], "--length must be a whole number of at least 1; got 0."),
        (["train", "adding", "--length", "1"], "--length must be a whole number of at least 2; got 1."),
        (["train", "copying", "--k-trunc", "0"], "--k-trunc must be a whole number of at least 1, or None; got 0."),
        (["train", "copying", "--k-top", "-1"], "--k-top must be a whole number of at least 0; got -1."),
        (["train", "copying", "--lr", "0"], "--lr must be a finite number above 0 and at most 1e+30; got 0.0."),
        (["train", "copying", "--clip", "-1"], "--clip must be a finite number above 0; got -1.0."),
        (["plot", "atention", "run"], "KIND must be one of attention, credit-paths, "),
        (["reproduce", "--rows", "x*"], "--rows must match at least one of copying-100-bptt, "),
        (["train", "copying", "--keep", "worst"], "--keep must be one of last, best; got 'worst'."),
        (["train", "copying", "--seeds", "0,0"], f"{SEEDS}; got '0,0'."),
        (["train", "copying", "--seeds", "0,,1"], f"{SEEDS}; got '0,,1'."),
        (["train", "copying", "--seeds", ""], "--seeds must not be empty; got ''."),
        (["train", "copying", "--seeds", "9" * 20], "--seeds must be a whole number of at least 0, and at most"),
        (["train", "copying", "--seeds", "0,1", "--seed", "2"], "--seeds must not be given together with --seed"),
        (["train", "copying", "--seed=2", "--seeds=0,1"], "--seeds must not be given together with --seed; got both."),
        (["train", "copying", "--seeds", "0", "--out", "file"], "--out 'file/seed-0' must be a place that can be"),
        (["train", "copying", "--seeds", "0", "--out", "no", "--resume"], "--out 'no/seed-0' must be the folder of a"),
        (["train", "copying", "--method", "tbptt", "--k-trunc", "None"], "--k-trunc must be a whole number"),
        (["train", "copying", "--forward", "dense", "--weighting", "relu"], "--weighting must be one of softmax"),
        (["train", "copying", "--out", "file"], "--out 'file' must be a folder; it is a file."),
        (["train", "copying", "--out", "file/run"], "--out 'file/run' must be a place that can be written to"),
        (["train", "copying", "--out", "/proc/run"], "--out '/proc/run' must be a place that can be written to"),
        (["train", "copying", "--out", "nowhere", "--resume"], "--out 'nowhere' must be the folder of a run; there is"),
        (["eval", "nowhere"], "RUN 'nowhere' must be the folder of a run; there is no such folder."),
        (["plot", "."], "RUN '.' must be the folder of a run; it holds no config.json."),
        (["plot", "credit-path"], "RUN must be the folder of a run, or KIND one of attention, credit-paths, "),
        (["plot", "credit-paths"], "RUN must be given a value; got none."),
        (["info", "file"], "RUN 'file' must be the folder of a run; there is no such folder."),
        (["demo", "--seed", "-1"], "--seed must be a whole number of at least 0; got -1."),
        (["demo", "--out", "file"], "--out 'file' must be a folder; it is a file."),
    ],
)
def test_one_sentence_for_a_mistake(arguments: list[str], start: str, capsys: Capture) -> None:
    Path("file").write_text("precious")
    told = mistake(capsys, *arguments)
    assert told.startswith(start)
    assert_found_early(arguments, told)
    assert [path.name for path in Path().iterdir()] == ["file"], "nothing is left behind"
    assert Path("file").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "copying", "--scorer", "oracle"], ["--scorer", "oracle", "affine", "mlp", "dot"]),
        (["train", "copying", "--device", "abacus"], ["--device", "abacus", "auto", "cuda"]),
        (["train", "copying", "--length", "ten"], ["--length", "ten", "must be a whole number;"]),
        (["train", "copying", "--k-trunc", "1.5"], ["--k-trunc", "1.5", "must be a whole number, or None"]),
        (["train", "copying", "--lr", "fast"], ["--lr", "fast", "must be a number;"]),
        (["train", "copying", "--lenght", "3"], ["--lenght", "--length"]),
        (["train", "copying", "--length"], ["--length"]),
        (["eval"], ["RUN"]),
        (["eval", "run", "--split", "training"], ["--split", "training", "valid"]),
        (["tasks", "--all"], ["--all"]),
    ],
)
def test_what_cannot_be_parsed_names_option_value_and_choices(
    arguments: list[str], words: list[str], capsys: Capture
) -> None:
    told = mistake(capsys, *arguments)
    for word in words:
        assert word in told
    assert_found_early(arguments, told)
    assert not list(Path().iterdir())


def test_eval_mistakes(trained: Path, capsys: Capture) -> None:
    assert mistake(capsys, "eval", trained, "--batches", "0").startswith("--batches must be a whole number")
    assert mistake(capsys, "eval", trained, "--length", "0").startswith("--length must be a whole number")


def test_a_task_without_a_length(trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copying, "options", lambda self: {})
    assert mistake(capsys, "eval", trained, "--length", "5").startswith("--length must not be given for task copying")


def test_no_data_that_is_not_finite(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Adding.draw
    monkeypatch.setattr(Adding, "draw", lambda *arguments: tuple(x * float("nan") for x in draw(*arguments)))
    assert run("train", "adding", "--length", "3", *TINY, "--out", "run") == 2
    assert capsys.readouterr().err == "sab: inputs of task adding must be finite; train batch 0 is not.\n"


def test_divergence_is_told_and_is_no_success(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Copying.loss
    monkeypatch.setattr(Copying, "loss", lambda *arguments: loss(*arguments) * float("nan"))
    assert run(*COPYING, "--out", "run") == 1
    assert "The loss of iteration 1 is nan; the weights were left as they were" in capsys.readouterr().out
    assert json.loads(Path("run/result.json").read_text())["status"] == "diverged"


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(*arguments: Any) -> None:
        raise ValueError("not the user's mistake")

    monkeypatch.setattr(training, "train_model", buggy)
    with pytest.raises(ValueError, match="not the user's mistake"):
        run(*COPYING)


def test_missing_extras_are_named(trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    find = builtins.__import__

    def without_matplotlib(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith(("matplotlib", "sab.lab.report")):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return find(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert (
        mistake(capsys, "plot", trained)
        == f"matplotlib is missing; install the extra 'report': {install_command('report')}"
    )

    def without_anything(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("sab.lab.report"):
            raise ModuleNotFoundError("No module named 'sab.lab.report'", name="sab.lab.report")
        return find(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_anything)
    with pytest.raises(ModuleNotFoundError):
        run("plot", trained)


def test_a_missing_parser_is_named() -> None:
    code = "import sys, sab_cli; sys.modules['tyro'] = None; sys.exit(sab_cli.main(['tasks']))"
    environment = {**os.environ, "PYTHONPATH": str(Path(sab.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == f"sab: tyro is missing; install the extra 'train': {install_command('train')}\n"


def test_as_a_process() -> None:
    done = process("train", "copying", "--k-trunc", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sab: --k-trunc must be a whole number of at least 1, or None; got 0.\n"


def test_seeds_side_by_side(capsys: Capture) -> None:
    assert run(*COPYING, "--seeds", "0, 2", "--out", "my runs") == 0
    *_, first, second, took, where, following = capsys.readouterr().out.splitlines()
    assert first.startswith("Seed 0: finished all 6 iterations. On unseen data: accuracy on the last 10 ")
    assert second.startswith("Seed 2: finished all 6 iterations. On unseen data: ")
    assert re.fullmatch(r"It took .* in all; 0 of 2 runs solved the task\.", took)
    assert where == "The runs are in my runs."
    assert following == "Next: sab report 'my runs' (a page), sab plot 'my runs/seed-0' (pictures)."
    assert [Run.open(f"my runs/seed-{seed}").config.training.seed for seed in (0, 2)] == [0, 2]
    told = mistake(capsys, *COPYING, "--seeds", "0,1,2", "--out", "my runs", "--resume")
    assert told == (
        "--seeds must have runs to resume; there is none of 1 in 'my runs': train them with --seeds 1, "
        "without --resume."
    )
    assert run(*COPYING, "--seeds", "1", "--out", "my runs") == 0


def test_seeds_have_a_folder_of_their_own_by_default() -> None:
    assert run(*COPYING, "--seeds", "1,0") == 0
    assert sorted(map(str, Path("runs").glob("*/*"))) == [f"runs/copying-2-sab-lstm6/seed-{seed}" for seed in (0, 1)]


def test_a_seed_that_diverges_is_no_success(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Copying.loss
    monkeypatch.setattr(Copying, "loss", lambda *arguments: loss(*arguments) * float("nan"))
    assert run(*COPYING, "--seeds", "0,1", "--out", "run") == 1
    assert "Seed 1: the loss of iteration 1 is nan; " in capsys.readouterr().out


def test_ctrl_c_where_there_is_nothing_to_keep(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "open", interrupted)
    assert run("info", "run") == 130
    assert capsys.readouterr().err == "sab: interrupted.\n"


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    training = replace(RECIPE.training, iterations=6, batch_size=3, eval_every=3, eval_batches=1)
    recipe = replace(
        RECIPE, task=Copying(length=3), model=ModelConfig(hidden_size=6, memory=SABConfig(k_trunc=4)), training=training
    )
    monkeypatch.setattr(demo_module, "demo", partial(demo, recipe=recipe))


@pytest.mark.usefixtures("small_demo")
def test_demo(capsys: Capture) -> None:
    assert run("demo", "--seed", "3") == 0
    told = capsys.readouterr().out
    out = Path("runs/demo-seed3")
    assert sorted(path.name for path in out.iterdir()) == ["attention.png", "curves.png", "report.html", "sab", "tbptt"]
    assert told.endswith(f"Report page, to open in a browser: {out / 'report.html'}\n")
    assert "truncated BPTT" in (out / "report.html").read_text()
    assert all(str(out / name) in told for name in ("attention.png", "curves.png", "sab", "tbptt"))
    assert all(words in told for words in ("SAB", "truncated BPTT", "never", "chance", "12.5%"))
    runs = [Run.open(out / method) for method in ("sab", "tbptt")]
    assert [opened.config.model.method for opened in runs] == ["sab", "tbptt"]
    assert [opened.config.training.iterations for opened in runs] == [6, 6]
    assert [opened.config.training.seed for opened in runs] == [3, 3]

    trained = {path: content for path, content in snapshot(out).items() if path.suffix not in (".png", ".html")}
    assert run("demo", "--seed", "3") == 0, "a second time shows what is there"
    assert trained.items() <= snapshot(out).items()


@pytest.mark.usefixtures("small_demo")
def test_an_interrupted_demo_goes_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        stopped = Result("interrupted", "interrupted.", 1, None, {}, 0.0, "cpu", {}, None)
        patched.setattr(demo_module, "train", lambda *arguments, **options: stopped)
        assert run("demo", "--out", "my demo") == 130
    assert capsys.readouterr().out.endswith("Go on with: sab demo --out 'my demo' --seed 0\n")
    assert run("demo", "--out", "my demo") == 0


def test_a_demo_overwrites_nothing_foreign(trained: Path, capsys: Capture) -> None:
    before = snapshot(trained)
    told = mistake(capsys, "demo", "--out", trained)
    assert told.startswith("--out 'trained' must be a new or empty folder, or that of a demonstration; it holds ")
    assert snapshot(trained) == before


@pytest.mark.parametrize("size", ["--hidden-size", "--batch-size", "--length"])
def test_too_little_memory_is_told_and_leaves_nothing(size: str, capsys: Capture) -> None:
    assert run(*COPYING, size, "1000000000000", "--out", "run") == 2
    told = capsys.readouterr().err
    assert told.startswith("sab: there is not enough memory; make --hidden-size")
    assert told.count("\n") == 1
    assert not Path("run").exists()


def test_none_in_lower_case_and_nothing_at_all(capsys: Capture) -> None:
    assert run(*COPYING, "--clip", "none", "--out", "run") == 0
    assert Run.open("run").config.training.clip is None
    assert mistake(capsys, *COPYING, "--out", "") == "--out must not be empty; got ''."


def test_plot_of_sequences_that_keep_nothing(capsys: Capture) -> None:
    assert run("train", "adding", "--length", "4", *TINY, "--k-att", "4", "--out", "run") == 0
    capsys.readouterr()
    assert run("plot", "run") == 0
    assert "No attention map: " in capsys.readouterr().out
    assert Path("run/learning_curve.png").exists()
