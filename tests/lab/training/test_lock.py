"""Two processes and one folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sab.errors import UserError
from sab.lab import locks
from sab.lab.training import Result, Run, RunConfig
from sab.lab.training.lock import NAME, RunLock
from sab.lab.training.progress import Progress

Train = Callable[..., Result]


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def held_by(folder: Path, **entries: Any) -> None:
    folder.mkdir(exist_ok=True)
    known = {"host": socket.gethostname(), "pid": os.getpid(), "since": "2026-01-02T03:04:05+00:00"}
    (folder / NAME).write_text(json.dumps(known | entries))


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive whose system has no locks."""

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


def test_a_run_has_its_folder_until_it_ends(tmp_path: Path, run_training: Train) -> None:
    out = tmp_path / "run"
    tried: list[str] = []

    class Second(Progress):
        def iteration(self, step: int, loss: float) -> None:
            for resume in (False, True):
                with pytest.raises(UserError) as caught:
                    run_training(out, resume=resume)
                tried.append(str(caught.value))
            before = json.loads((out / NAME).read_text())
            assert (before["host"], before["pid"]) == (socket.gethostname(), os.getpid())

    assert run_training(out, progress=Second(), iterations=2).status == "finished"
    start = f"out {str(out)!r} must be a run that nobody else is training; process {os.getpid()} on "
    assert len(tried) == 4
    assert all(sentence.startswith(start + socket.gethostname() + ", since 2") for sentence in tried)
    assert not (out / NAME).exists()
    assert run_training(out, resume=True).iterations == 8


def test_what_was_killed_before_its_configuration_was_there_can_be_begun(tmp_path: Path, run_training: Train) -> None:
    held_by(tmp_path)
    (tmp_path / ".config.json.tmp").write_text("{")
    assert run_training(tmp_path).status == "finished"


def test_what_was_killed_before_its_first_checkpoint_can_be_resumed(
    tmp_path: Path, config: RunConfig, run_training: Train
) -> None:
    Run.create(tmp_path / "run", config)
    run_training(tmp_path / "run", resume=True)
    run_training(tmp_path / "whole")
    assert Run.open(tmp_path / "run").result().metrics == Run.open(tmp_path / "whole").result().metrics  # pyright: ignore
    Run.create(tmp_path / "lost", config)
    (tmp_path / "lost" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="must hold a checkpoint; there is none"):
        run_training(tmp_path / "lost", resume=True)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_file_counts(tmp_path: Path, gone: int) -> None:
    held_by(tmp_path)
    advice = r"; if that has ended, remove \.lock there\.$"
    with pytest.raises(UserError, match=f"; process {os.getpid()} on .*, since 2026-01-02T03:04:05.00:00, is{advice}"):
        RunLock(tmp_path).take()
    held_by(tmp_path, host="elsewhere", pid=gone)
    with pytest.raises(UserError, match=f"; process {gone} on elsewhere, since .*{advice}"):
        RunLock(tmp_path).take()
    held_by(tmp_path, pid=gone)
    lock = RunLock(tmp_path)
    lock.take()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3, "pid": "x"}'])
def test_a_lock_that_says_nothing(tmp_path: Path, text: str) -> None:
    first = RunLock(tmp_path)
    first.take()
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match=r"nobody else is training; another process is\.$"):
        RunLock(tmp_path).take()
    first.release()
    second = RunLock(tmp_path)
    second.take()
    second.release()


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has opened the file when the one before it removes it must not share the folder with a third."""
    flock = locks.fcntl.flock
    calls = 0

    def removed_first(descriptor: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / NAME).unlink()
        flock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", removed_first)
    second = RunLock(tmp_path)
    second.take()
    assert calls == 2
    with pytest.raises(UserError, match="nobody else is training"):
        RunLock(tmp_path).take()
    second.release()


def test_a_link_or_a_pipe_in_the_lock_s_place_makes_room_for_it(tmp_path: Path) -> None:
    """A folder from somebody else may hold a link to a file of one's own, which is not to be written over."""
    (tmp_path / "mine").write_text("years of work")
    for make in (lambda path: path.symlink_to(tmp_path / "mine"), os.mkfifo):
        make(tmp_path / NAME)
        lock = RunLock(tmp_path)
        lock.take()
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
        lock.release()
        assert not (tmp_path / NAME).is_symlink()
    assert (tmp_path / "mine").read_text() == "years of work"


def test_who_waits_for_a_folder_gets_it_after_the_one_before(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with locks.locked(tmp_path):
            order.append("second")

    thread = threading.Thread(target=second)
    with locks.locked(tmp_path):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("no_locks")
def test_where_there_are_no_locks_nobody_waits(tmp_path: Path) -> None:
    with locks.locked(tmp_path), locks.locked(tmp_path):
        pass
