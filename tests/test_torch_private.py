"""Private names of torch are in one file."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sab"
ALLOWED = SOURCE / "torch_private.py"
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != ALLOWED)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(source: str) -> list[str]:
    """Names below `torch` with a private part, imported or looked up."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *others = name.split(".")
            if first == "torch" and all(part.isidentifier() for part in others) and any(map(is_private, others)):
                found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_file_has_one(path: Path) -> None:
    assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._is_tracing()",
        "import torch._dynamo",
        "from torch._C import DispatchKey",
        "from torch.utils import _python_dispatch",
        "x = torch.nn.functional._pad",
    ],
)
def test_the_search_finds_them(source: str) -> None:
    assert private_names(source)


def test_the_search_passes_public_names() -> None:
    assert private_names(ALLOWED.read_text())
    assert private_names("torch.__version__; torch.nn.Linear(1, 2)._apply; self._C; from torch import nn") == []


def test_the_version_of_torch_has_an_upper_bound() -> None:
    project = SOURCE.parents[1] / "pyproject.toml"
    dependencies = tomllib.loads(project.read_text())["project"]["dependencies"]
    (torch,) = (one for one in dependencies if one.startswith("torch"))
    assert "<" in torch
