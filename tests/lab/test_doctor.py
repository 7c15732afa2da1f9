"""`sab doctor` tells what is broken, one sentence each, whatever it is."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.extras import DISTRIBUTION, EXTRAS, PURPOSES, install_command
from sab.lab import cli, data, doctor
from sab.lab.doctor import Finding, examine
from sab.ops import dispatch
from sab.ops.cpu import build, loader

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def triton_is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and dispatch.triton_unavailable() is None


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(triton_is_interpreted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAB_DATA", "data")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which takes a while


@pytest.fixture
def without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported, which takes a while too."""
    monkeypatch.setattr(doctor, "_versions", lambda: iter(()))


def named(**options: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(**options)}


def test_everything_that_must_work_works(capsys: Capture) -> None:
    assert cli.main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert told.endswith("All required components work.\n")
    for what in (torch.__version__, *EXTRAS, "cpu", "reference on cpu", "ptb", "runs"):
        assert what in told
    assert "✗" not in told
    assert not any(Path().iterdir()), "nothing is left behind"


@pytest.mark.usefixtures("without_versions")
def test_backends_are_judged_by_the_reference(triton_is_interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if triton_is_interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = {finding.name: finding for finding in doctor._backends()}
    judged = {"reference on cpu", "cpu on cpu"} if loader.unavailable() is None else {"reference on cpu"}
    judged |= {"triton on cpu"} if triton_is_interpreted else set()
    assert judged <= found.keys()
    assert all("of the reference in float64" in found[name].message for name in judged)
    trial = doctor._trial

    def off(backend: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = trial(backend, device, dtype)
        if backend == "cpu":
            tensors[1] *= 1.01  # a gradient
        return tensors

    if "cpu on cpu" in judged:
        monkeypatch.setattr(doctor, "_trial", off)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        wrong = named()["cpu on cpu"]
        assert wrong.state == "broken"
        assert wrong.message.startswith("It differs from the reference in float64 by 1.0e-02 (compiled with ")


@pytest.mark.usefixtures("without_versions")
def test_a_backend_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    trial = doctor._trial

    def fails(backend: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        if dtype == torch.float32:
            raise RuntimeError("illegal instruction\nand a page more")
        return trial(backend, device, dtype)

    monkeypatch.setattr(doctor, "_trial", fails)
    assert doctor.main() == 1
    told = capsys.readouterr().out
    assert "It fails: RuntimeError: illegal instruction." in told
    assert "page more" not in told
    assert "reference on cpu" in told.splitlines()[-1]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PACKAGED", "none.so")
    loader._find.cache_clear()
    yield
    loader._find.cache_clear()


@pytest.mark.usefixtures("without_versions", "no_compiler")
def test_without_a_compiler_the_reference_does_the_work() -> None:
    (finding,) = (one for one in examine() if (one.about, one.name) == ("backends", "cpu"))
    assert finding.state == "lacking"
    assert "no C++ compiler (c++, g++ or clang++) is on the PATH" in finding.message
    assert doctor.main() == 0


@pytest.mark.usefixtures("without_versions")
def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader.unavailable()  # looked for once in a process, and so before its folder cannot be written to
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = named(out=tmp_path / "file" / "runs", data_dir=tmp_path / "file")
    assert (found["runs"].state, found["data"].state, found["CPU kernels"].state) == ("broken", "lacking", "lacking")
    consequences = {"runs": "no run can be kept", "data": "put nothing there", "CPU kernels": "compiled"}
    for name, consequence in consequences.items():
        assert "cannot be written to" in found[name].message
        assert consequence in found[name].message
        assert found[name].message.endswith(": Not a directory.")
    assert named(out=tmp_path / "new" / "runs")["runs"].message.endswith("GiB free, yet to be made")
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("without_versions", "tiny_data")
def test_data(tiny_folder: Path, tmp_path: Path) -> None:
    found = named(data_dir=tiny_folder)
    assert all(found[name].state == "works" for name in data.DATASETS)
    (tmp_path / "data" / "text8").mkdir(parents=True)
    (tmp_path / "data" / "text8" / "text8").write_bytes((tiny_folder / "text8" / "text8").read_bytes())
    (tmp_path / "data" / "ptb").mkdir()
    (tmp_path / "data" / "ptb" / "ptb.train.txt.xz").write_bytes(b"no archive")
    found = named(data_dir=tmp_path / "data")
    assert found["text8"].state == "works"
    assert "text8 prefix" not in found, "the whole is here"
    assert found["mnist"] == Finding("data", "mnist", "lacking", "not here: get it with: sab data get mnist.")
    assert found["ptb"].state == "broken"
    assert found["ptb"].message.startswith("incomplete: ")
    for name in ("ptb.valid.txt", "ptb.test.txt"):
        (tmp_path / "data" / "ptb" / name).write_bytes(b"")
    broken = named(data_dir=tmp_path / "data")["ptb"]
    assert broken.state == "broken"
    assert broken.message.startswith("broken: ptb.train.txt.xz: ")
    assert broken.message.endswith(": get it again with: sab data get ptb.")


@pytest.mark.usefixtures("without_versions")
def test_a_check_that_breaks_leaves_the_others(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(doctor.data, "folder_of", breaks)
    assert doctor.main() == 1
    told = capsys.readouterr().out
    assert "RuntimeError: Could not determine home directory." in told
    assert told.endswith("Broken: data, folders.\n")
    assert "reference on cpu" in told


def run_without(
    packages: Iterable[str], tmp_path: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`sab` in a process that cannot import some packages."""
    for package in packages:
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError({package!r}, name={package!r})\n")
    paths = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    return subprocess.run(
        [sys.executable, "-m", "sab", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def test_without_extras_it_tells_which_in_plain_lines(tmp_path: Path) -> None:
    lacking = [package for package in EXTRAS if package != "safetensors"]
    done = run_without(lacking, tmp_path, "doctor", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for package in lacking:
        extra = EXTRAS[package]
        advice = f"optional, for {PURPOSES[extra]}: {install_command(extra)}."
        assert f"-  versions: {package}: not installed; {advice}" in lines
    assert any(line.startswith("ok versions: safetensors: ") for line in lines)
    assert not any(line.startswith("!!") for line in lines)
    assert lines[-1] == "All required components work."


def test_backends_are_shown_without_extras(tmp_path: Path) -> None:
    done = run_without(EXTRAS, tmp_path, "info", "--backends")
    assert (done.returncode, done.stderr) == (0, "")
    assert "reference    usable: always, on every device" in done.stdout.splitlines()


def test_other_commands_name_the_extra(tmp_path: Path) -> None:
    done = run_without(EXTRAS, tmp_path, "tasks")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"sab: tyro is missing; install the extra 'train': {install_command('train')}\n"


def test_a_missing_module_that_is_no_package_of_an_extra_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        doctor.without_extras(["tasks"], ModuleNotFoundError("No module named 'torch'", name="torch"))


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("sab.lab.training", "safetensors"),
        ("sab.lab.experiments.demo", "rich"),
        ("sab.lab.experiments.cluster", "ray"),
        ("sab.lab.cli", "tyro"),
        ("sab.lab.report.figures", "matplotlib"),
        ("sab.plot", "matplotlib"),
    ],
)
def test_a_missing_package_is_one_sentence_from_python_too(module: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    sentence = f"{package} is missing; install the extra {EXTRAS[package]!r}: {install_command(EXTRAS[package])}"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'sab-torch[train]'"),
        ('{"url": "file:///a.whl", "archive_info": {}}', "pip install 'sab-torch[train]'"),
        ('{"url": "file:///a", "dir_info": {}}', "pip install '.[train]' in the repository"),
        ('{"url": "file:///a", "dir_info": {"editable": true}}', "pip install -e '.[train]' in the repository"),
        ("not installed", "pip install -e '.[train]' in the repository"),
    ],
)
def test_the_advice_fits_the_installation(origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return origin if name == "direct_url.json" else None

    def distribution(name: str) -> Installed:
        if origin == "not installed":
            raise importlib.metadata.PackageNotFoundError(name)
        assert name == "sab-torch"
        return Installed()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert install_command("train") == command


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    listed = project["optional-dependencies"]
    assert PURPOSES.keys() == set(EXTRAS.values())
    for package, extra in EXTRAS.items():
        distribution = {"sklearn": "scikit-learn"}.get(package, package.replace("_", "-"))
        assert any(one.startswith(distribution) for one in listed[extra])
    assert sum(len(listed[extra]) for extra in set(EXTRAS.values())) == len(EXTRAS)
