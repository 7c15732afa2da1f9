"""The direction of imports between the rooms of the package, imports inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "sab"
LIBRARY = {
    "errors": "",
    "extras": "",
    "files": "errors",
    "palette": "",
    "torch_private": "",
    "state": "errors torch_private",
    "parts": "errors state",
    "config": "errors parts",
    "inputs": "errors torch_private state config ops",
    "ops": "errors torch_private state parts config",
    "layers": "errors torch_private state parts config inputs ops",
    "cells": "errors state parts config inputs ops layers",
    "tracing": "errors state parts config inputs ops layers cells",
    "plot": "errors extras palette state config tracing",
    "estimators": "errors extras config layers tracing plot",
    "online": "errors files state parts config ops tracing",
    "export": "errors extras parts ops layers",
    "search": "errors extras state parts config inputs ops layers",
    "sab": "errors state config layers cells tracing plot export online search",
}
SHARED = "lab.files lab.locks lab.stored"
LAB = {
    "lab": "",
    "lab.files": "",
    "lab.locks": "lab.files",
    "lab.stored": "lab.files",
    "lab.data": SHARED,
    "lab.tasks": f"{SHARED} lab.data",
    "lab.rivals": "",
    "lab.models": f"{SHARED} lab.rivals",
    "lab.training": f"{SHARED} lab.data lab.tasks lab.models",
    "lab.experiments": f"{SHARED} lab.data lab.tasks lab.rivals lab.models lab.training",
    "lab.report": f"{SHARED} lab.data lab.tasks lab.rivals lab.models lab.training lab.experiments",
    "lab.doctor": f"{SHARED} lab.data",
    "lab.commands": f"{SHARED} lab.data lab.tasks lab.models lab.training lab.experiments lab.report lab.doctor",
    "lab.cli": "lab.commands lab.doctor",
}
"""What each room of the laboratory imports of it; besides it may import all of the library."""
ENTRY_POINT = "__main__"
ALLOWED = {room: set(rooms.split()) for room, rooms in LIBRARY.items()}
ALLOWED |= {room: {*rooms.split(), *LIBRARY} for room, rooms in LAB.items()} | {ENTRY_POINT: {"lab.cli"}}


def modules(source: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found: dict[str, Path] = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(code: str, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that some code imports, wherever in it; `import_module("…")` counts too."""
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        yield from (name for name in names if name.split(".")[0] in (PACKAGE, "tests", "tools"))


def room_of(module: str) -> str:
    """The room that a module belongs to: a package or a module below `sab` or `sab.lab`, or one of these two."""
    if module == PACKAGE:
        return PACKAGE
    first, *rest = module.removeprefix(f"{PACKAGE}.").split(".")
    return f"lab.{rest[0]}" if first == "lab" and rest else first


def imports(source: Path) -> dict[tuple[str, str], set[str]]:
    """Which rooms import which others, and the modules that do."""
    found: dict[tuple[str, str], set[str]] = {}
    known = modules(source)
    for module, path in known.items():
        for name in imported(path.read_text(encoding="utf-8"), known):
            edge = room_of(module), room_of(name)
            if edge[0] != edge[1]:
                found.setdefault(edge, set()).add(f"{module} imports {name}")
    return found


def wrong_imports(source: Path) -> list[str]:
    """The imports that the table does not allow."""
    edges = imports(source).items()
    return sorted(told for (room, other), each in edges if other not in ALLOWED.get(room, ()) for told in each)


def test_the_table_has_every_room_and_no_cycle() -> None:
    rooms = {room_of(module) for module in modules(SOURCE)}
    assert rooms <= ALLOWED.keys(), "give the new room its place in this test's table"
    assert set(TopologicalSorter(ALLOWED).static_order()) == ALLOWED.keys()


def test_every_room_imports_what_it_may() -> None:
    assert wrong_imports(SOURCE) == []
    library_of_the_lab = [told for (room, other), told in imports(SOURCE).items() if "lab" in other and room in LIBRARY]
    assert library_of_the_lab == []


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("sab/lab/experiments/demo.py", "def f():\n    from sab.lab.report import figures", "sab.lab.report.figures"),
        ("sab/plot/traces.py", "if TYPE_CHECKING:\n    import sab.lab.training.run", "sab.lab.training.run"),
        ("sab/layers.py", "from sab import lab", "sab.lab"),
        ("sab/__init__.py", 'importlib.import_module("sab.lab.models")', "sab.lab.models"),
        ("sab/parts/cells.py", "from sab.ops import reference", "sab.ops.reference"),
        ("sab/errors.py", "from tests.lab import tiny", "tests.lab"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, line: str, told: str) -> None:
    for path in modules(SOURCE).values():
        copy = tmp_path / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / module).write_text(line)
    (wrong,) = wrong_imports(tmp_path)
    assert wrong.endswith(f" imports {told}")


LOADED = """
import sys, numpy, torch
before = set(sys.modules)
import sab
new = set(sys.modules) - before
packages = {"tyro", "rich", "matplotlib", "triton", "safetensors", "tensorboard", "ray", "sympy", "sklearn"}
packages |= {"onnx", "onnxscript", "faiss"}
heavy = ("sab.lab", "sab.plot", "sab.estimators", "sab.export", "sab.search", "sab.ops.triton")
heavy += ("torch._dynamo", "torch._inductor")
bad = [name for name in new if name.split(".")[0] in packages or name.startswith(heavy)]
assert not bad, bad
torch.ops.sab.recurrence  # a program of torch.export needs it
for backend in ("auto", "reference"):
    sab.SABLSTM(2, 3, backend=backend)(torch.randn(4, 1, 2))[0].sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_importing_sab_loads_nothing_of_the_laboratory_nor_of_torchs_compiler() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True)
