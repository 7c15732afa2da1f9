"""The examples of docs/extending.md: every kind of part on every backend, C++ and Triton included."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.ops.cpu import build, engine, loader
from tests.ops.cases import assert_close, randn, registries_restored
from tests.ops.test_registry import layer_with, results

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
HEADERS = ("cells.h", "scorers.h", "weightings.h", "incorporations.h")
"""In the order of the page's examples."""
EXAMPLES = [("cell", "rnn_sine"), ("scorer", "nearness"), ("weighting", "each"), ("incorporation", "average")]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter


def code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The page's Python code was run, as a file, since Triton reads the source of its functions."""
    path = tmp_path_factory.mktemp("extending") / "parts_of_a_user.py"
    path.write_text("\n".join(code("python")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("parts_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    with registries_restored():
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the CPU backend with the page's C++ structs in the headers."""
    folder = tmp_path_factory.mktemp("cpu") / "source"
    shutil.copytree(build.FOLDER, folder)
    for name, struct in zip(HEADERS, code("cpp"), strict=True):
        header = (folder / name).read_text()
        added = re.search(r"struct (\w+) \{", struct)
        assert added is not None
        listed = re.sub(r"(?m)^using (\w+) = Parts<", rf"{struct}\nusing \1 = Parts<{added[1]}, ", header)
        assert listed != header
        (folder / name).write_text(listed)
    return folder


@pytest.fixture
def compiled(registered: None, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU backend is built from these sources, once, and loaded."""
    if loader.unavailable() is not None:
        pytest.skip(loader.unavailable() or "")
    with monkeypatch.context() as patch:
        patch.setattr(build, "FOLDER", sources)
        patch.setattr(build, "FLAGS", [flag.replace("-O3", "-O1") for flag in build.FLAGS])
        patch.setenv("XDG_CACHE_HOME", str(sources.parent))
        forget()
        yield
    forget()


def forget() -> None:
    """Forget the compiled library of this process."""
    loader._find.cache_clear()
    engine.function.cache_clear()


def compare(kind: str, name: str, backend: str, **options: Any) -> None:
    x = randn(7, 2, 3)
    expected = results(layer_with(kind, name, backend="reference", **options), x)
    for index, got in enumerate(results(layer_with(kind, name, backend=backend, **options), x)):
        assert_close(got, expected[index], f"{kind} {name}, tensor {index}", tolerance=1e-9)


@pytest.mark.parametrize(("kind", "name"), EXAMPLES)
@pytest.mark.usefixtures("registered")
def test_the_triton_functions_of_the_page(kind: str, name: str) -> None:
    pytest.importorskip("triton")
    compare(kind, name, "triton")
    if kind != "scorer":  # with an affine scorer a weighting sees the query too
        compare(kind, name, "triton", scorer="affine")


@pytest.mark.parametrize(("kind", "name"), EXAMPLES)
@pytest.mark.usefixtures("compiled")
def test_the_structs_of_the_page(kind: str, name: str) -> None:
    compare(kind, name, "cpu")
    compare(kind, name, "cpu", forward="dense")


@pytest.mark.usefixtures("registered")
def test_a_struct_that_the_library_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="'cpu' does not: it does not have the cell 'rnn_sine'"):
        layer_with("cell", "rnn_sine", backend="cpu")(torch.zeros(2, 1, 3, dtype=torch.float64))
