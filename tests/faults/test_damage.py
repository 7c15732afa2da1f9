"""Checkpoints that are damaged at random."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sab.lab.cli import main
from tests.faults.lives import contents, train
from tests.lab.training.runs import newest

OPTIONS = "--iterations 30 --eval-every 4 --checkpoint-every 9 --keep best".split()


def damage(folder: Path, random: Random) -> str:
    """Harms one file of a checkpoint."""
    path = random.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    place = random.randrange(len(data))
    how = random.choice(["flip", "cut", "blank", "remove"])
    if how == "flip":
        data[place] ^= 1 << random.randrange(8)
    elif how == "cut":
        del data[place:]
    elif how == "blank":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    path.unlink()
    if how != "remove":
        path.write_bytes(data)
    return how


def damage_and_resume(folder: Path, times: int, seed: int, capsys: Any, caplog: Any) -> None:
    assert main(train(folder / "whole", *OPTIONS)) == 0
    expected, random, out = contents(folder / "whole"), Random(seed), folder / "run"
    for _ in range(times):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "whole", out)
        before = {path.name: path.read_bytes() for path in newest(out).iterdir()}
        damage(newest(out), random)
        if before == {path.name: path.read_bytes() for path in newest(out).iterdir()}:  # it was blank before
            continue
        caplog.clear()
        assert main(train(out, *OPTIONS)) == 0
        (warning,) = caplog.messages
        assert warning.endswith("; the checkpoint step-00000027 is used instead.")
        assert contents(out) == expected
        capsys.readouterr()


def test_three_damages(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    damage_and_resume(tmp_path, 3, 0, capsys, caplog)


@pytest.mark.slow
def test_a_hundred_damages(tmp_path: Path, capsys: Any, caplog: Any) -> None:
    damage_and_resume(tmp_path, 100, 1, capsys, caplog)
