"""Folders that cannot be written to any more, or are gone: one sentence, and nothing lost."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lives import TINY, Life, contents, go_back_in_time, obey_permissions, train
from tests.lab.training.runs import newest

OPTIONS = "--hidden-size 64 --eval-every 10 --checkpoint-every 5 --keep best".split()
SMALL, LARGE = 40, 150
"""How many iterations the runs have."""
QUOTA = 20_000
"""Bytes that a file may have: fewer than those of the weights."""


def options(iterations: int) -> list[str]:
    return [*OPTIONS, "--iterations", str(iterations)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What the run of so many iterations comes to that nobody hinders."""
    folder, found = tmp_path_factory.mktemp("whole"), {}

    def make(iterations: int) -> dict[str, Any]:
        if iterations not in found:
            out = folder / str(iterations)
            assert Life(train(out, *options(iterations)), folder / "told").end() == 0
            found[iterations] = contents(out)
        return found[iterations]

    return make


def begin(out: Path, iterations: int, before: Callable[[], object] | None = None) -> Life:
    """A run that has made its first checkpoints."""
    life = Life(train(out, *options(iterations)), out.with_suffix(".told"), before)
    assert life.wait_for((out / "checkpoint" / "step-00000005").exists), life.told
    return life


def assert_told_in_a_sentence(life: Life, reason: str) -> None:
    assert life.end() == 2, life.told
    errors = [line for line in life.told if line.startswith("sab: ") or "Traceback" in line or "Error" in line]
    (sentence,) = errors
    assert sentence.endswith(f"; it is not: {reason}.")


def assert_resumed(out: Path, iterations: int, expected: dict[str, Any]) -> None:
    life = Life(train(out, *options(iterations)), out.with_suffix(".told"))
    assert life.end() == 0, life.told
    assert not any("is used instead" in line for line in life.told), "the checkpoint before was whole"
    assert contents(out) == expected


def set_writable(out: Path, is_writable: bool) -> None:
    for path in (*out.rglob("*"), out):
        path.chmod((0o755 if path.is_dir() else 0o644) if is_writable else (0o555 if path.is_dir() else 0o444))


def meet_quota(out: Path, iterations: int) -> None:
    life = begin(out, iterations)
    resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (QUOTA, QUOTA))
    assert life.end() == 2, life.told
    (sentence,) = [line for line in life.told if line.startswith("sab: ")]
    assert "must be a place that can be written to; it is not: " in sentence
    assert "File too large" in sentence
    assert not any("Traceback" in line for line in life.told)


def become_read_only(out: Path, iterations: int) -> None:
    life = begin(out, iterations, obey_permissions)
    set_writable(out, False)
    try:
        assert_told_in_a_sentence(life, "Permission denied")
    finally:
        set_writable(out, True)


HINDRANCES = {"a quota on the size of files": meet_quota, "a folder that becomes read-only": become_read_only}


@pytest.mark.parametrize("hinder", HINDRANCES.values(), ids=HINDRANCES)
def test_what_cannot_be_written(tmp_path: Path, whole: Any, hinder: Callable[[Path, int], None]) -> None:
    hinder(tmp_path / "run", LARGE)
    assert newest(tmp_path / "run").name >= "step-00000005"
    life = Life(["eval", str(tmp_path / "run")], tmp_path / "told")
    assert life.end() == 0, life.told
    assert_resumed(tmp_path / "run", LARGE, whole(LARGE))


def test_a_folder_that_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    life = begin(out, LARGE)
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)  # a file may have come while the first one went through
    assert life.end() == 2, life.told
    (sentence,) = [line for line in life.told if line.startswith("sab: ")]
    assert "must be a place that can be written to; it is not: " in sentence
    assert "No such file or directory" in sentence
    assert not any("Traceback" in line for line in life.told)
    assert not (out / "config.json").exists(), "nothing is made anew"
    assert not (out / "result.json").exists()


def test_a_clock_that_jumps_back(tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "run"
    arguments = [*train(out, *options(SMALL)), "--checkpoint-minutes", "0.001"]
    life = Life(arguments, out.with_suffix(".told"), go_back_in_time)
    assert life.end() == 0, life.told
    assert contents(out) == whole(SMALL)


@pytest.mark.parametrize("command", ["train", "eval", "info", "plot", "report"])
def test_a_folder_that_is_closed_to_this_user(tmp_path: Path, command: str) -> None:
    arguments = train(tmp_path / "theirs") if command == "train" else [command, str(tmp_path / "theirs")]
    (tmp_path / "theirs").mkdir(mode=0)
    life = Life(arguments, tmp_path / "told", obey_permissions)
    assert life.end() == 2
    (sentence,) = life.told
    assert sentence.startswith(f"sab: '{tmp_path / 'theirs'}")
    assert sentence.endswith(" must be there and open to you; it is not: Permission denied.")


def test_a_name_that_no_system_takes(tmp_path: Path) -> None:
    life = Life(["eval", "a" * 300], tmp_path / "told")
    assert life.end() == 2
    (sentence,) = life.told
    assert sentence.endswith("it is not: File name too long.")


# What is printed: into a file on a full disk, or to a reader that has gone away


def print_to_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def print_to_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


FULL_LOG = "sab: stdout must be a place that can be written to; it is not: No space left on device."


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
@pytest.mark.parametrize("arguments", [["tasks"], ["train", *TINY, "--iterations", "5"]], ids=lambda words: words[0])
def test_what_is_printed_into_a_full_file(tmp_path: Path, arguments: list[str]) -> None:
    out = [] if arguments == ["tasks"] else ["--out", str(tmp_path / "run")]
    life = Life([*arguments, *out], tmp_path / "told", print_to_a_full_disk)
    assert life.end() == 2
    assert life.told == [FULL_LOG]
    assert not (tmp_path / "run").exists()


def test_a_log_that_is_full_in_the_middle(tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "run"
    killed = Life(train(out, *options(SMALL)), tmp_path / "told")
    assert killed.wait_for((out / "checkpoint" / "step-00000005").exists)
    killed.kill()
    life = Life(train(out, *options(SMALL)), tmp_path / "told", print_to_a_full_disk)
    assert life.end() == 2
    assert life.told == [FULL_LOG]
    assert_resumed(out, SMALL, whole(SMALL))


def test_what_is_printed_to_nobody_ends_without_a_word(tmp_path: Path) -> None:
    for arguments in (["tasks"], train(tmp_path / "run", *options(SMALL))):
        life = Life(arguments, tmp_path / "told", print_to_nobody)
        assert life.end() == 141
        assert life.told == []
