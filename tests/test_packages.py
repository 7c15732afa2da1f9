"""What is uploaded: the source distribution and the wheels, built as a release builds them."""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="needs the extra `dev`")

from hatch_build import absolute_links
from sab.ops.cpu import build

ROOT = Path(__file__).parents[1]
NAME = "sab_torch"


def make(target: str, folder: Path, source: Path = ROOT, **environment: str) -> Path:
    """Build a package; its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env=os.environ | environment)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(make("sdist", folder / "built")) as archive:
        archive.extractall(folder, filter="data")
    (found,) = folder.glob(f"{NAME}-*")
    return found


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from it."""
    return make("wheel", tmp_path_factory.mktemp("wheel"), unpacked, SAB_BUILD_LIBRARY="0")


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_the_source_distribution_has_what_its_tests_need(unpacked: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    lacking = {path for path in listed.splitlines() if (ROOT / path).exists() and not (unpacked / path).exists()}
    assert lacking <= {".gitignore"}
    assert (unpacked / "tests" / "conftest.py").is_file()


def test_the_pure_wheel_has_both_packages_and_the_sources_of_the_library(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"sab/ops/cpu/{path.name}" for path in build.FOLDER.iterdir() if path.suffix in (".cpp", ".h")}
    assert {"sab/__init__.py", "sab/py.typed", "sab_cli/__init__.py", "sab_cli/options.json"} | sources <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"sab", "sab_cli"}
    assert not any(name.endswith(".so") for name in names)


def test_metadata(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Name"] == "sab-torch"
    assert found.get_all("Project-URL")
    assert found["Description-Content-Type"] == "text/markdown"
    extras = set(found.get_all("Provides-Extra") or [])
    required = [line for line in found.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {re.split(r"[<>=]", line)[0] for line in required} == {"torch", "numpy"}
    assert {"train", "report", "ray", "examples"} <= extras


def test_the_readme_on_an_index_has_no_link_into_the_repository(wheel: Path) -> None:
    text = str(metadata(wheel).get_payload())
    assert text.startswith("# sab")
    targets = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)", text)
    targets = ["".join(one) for one in targets]
    assert targets
    assert [one for one in targets if not re.match(r"https://|#", one)] == []


def test_links_are_made_absolute_from_the_repository() -> None:
    text = "See [the page](docs/a.md#part), [the paper](https://arxiv.org), [below](#x) and ![a picture](docs/b.png)."
    image = '<img src="docs/b.png" width="400" alt="A picture">'
    assert absolute_links(image, "https://host/sab") == image.replace("docs", "https://host/sab/raw/main/docs")
    assert absolute_links(image, None) == ""
    assert absolute_links(text, "https://host/sab") == (
        "See [the page](https://host/sab/blob/main/docs/a.md#part), [the paper](https://arxiv.org), [below](#x) and "
        "![a picture](https://host/sab/raw/main/docs/b.png)."
    )
    assert absolute_links(text, None) == "See the page, [the paper](https://arxiv.org), [below](#x) and ."


@pytest.mark.skipif(build.compiler() is None, reason="there is no compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the name is that of Linux")
def test_a_wheel_with_the_library_says_for_which_system(unpacked: Path, tmp_path: Path) -> None:
    source = unpacked / "src" / "sab" / "ops" / "cpu" / "build.py"
    code = source.read_text()
    source.write_text(code.replace('"-O3"', '"-O0"'))  # in a tenth of the time
    try:
        made = make("wheel", tmp_path, unpacked, SAB_BUILD_LIBRARY="1")
    finally:
        source.write_text(code)
    assert re.fullmatch(rf"{NAME}-[\d.]+-py3-none-linux_(x86_64|aarch64)\.whl", made.name)
    with zipfile.ZipFile(made) as archive:
        library = archive.read(f"sab/ops/cpu/{build.PACKAGED}")
        (wheel_file,) = (one for one in archive.namelist() if one.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(wheel_file).decode()
    assert library.startswith(b"\x7fELF")


def test_cibuildwheel_asks_for_the_library_on_every_system() -> None:
    options: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    for section in (options, options["macos"]):
        assert section["environment"]["SAB_BUILD_LIBRARY"] == "1"
    assert (ROOT / options["test-command"].removeprefix("python {project}/")).is_file()
