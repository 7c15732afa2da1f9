"""The compiled library: built, cached, done without; and what is special about the loops in it."""

from __future__ import annotations

import ctypes
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from sab.errors import UserError
from sab.ops.cpu import build, loader
from sab.ops.cpu import engine as cpu
from sab.ops.cpu.arguments import Arguments
from sab.parts import registry
from tests.ops.cases import (
    CELLS,
    INCORPORATIONS,
    SCORERS,
    assert_close,
    gradients,
    make_layer,
    randn,
    randomize,
    warns_slow,
)

needs_library = pytest.mark.skipif(loader.unavailable() is not None, reason=loader.unavailable() or "")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has built nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PACKAGED", "none.so")
    loader._find.cache_clear()
    yield
    loader._find.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library's sources, which the loader builds instead."""
    folder = tmp_path / "sources"
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(build, "FOLDER", folder)
    return folder


@pytest.mark.parametrize("name", sorted(path.name for path in build.FOLDER.iterdir() if path.suffix in (".h", ".cpp")))
def test_another_source_is_another_library(name: str, sources: Path) -> None:
    before = loader._fingerprint()
    (sources / name).write_text((sources / name).read_text() + "// changed\n")
    assert loader._fingerprint() != before


def test_another_processor_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loader._fingerprint()
    monkeypatch.setenv("SAB_CPU_ARCH", "i386")
    flags = runpy.run_path(build.__file__)["FLAGS"]
    assert "-march=i386" in flags
    monkeypatch.setattr(build, "FLAGS", flags)
    assert loader._fingerprint() != before


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("why", ["switched off", "no compiler", "no cache", "does not compile"])
def test_without_it_the_reference_does_the_work(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: Path
) -> None:
    layer = make_layer("lstm", 3, 4, backend="auto")
    x = randn(5, 2, 3)
    expected = layer(x)[0]
    if why == "switched off":
        monkeypatch.setenv("SAB_NATIVE", "0")
    elif why == "no compiler":  # nor a library that was built earlier
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    elif why == "no cache":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif shutil.which("c++") is None:
        pytest.skip("there is no compiler to fail")
    else:
        (sources / "cells.h").write_text("this is not C++\n")
    loader._find.cache_clear()
    assert loader.unavailable() is not None
    with warns_slow(re.escape(str(loader.unavailable()))):
        assert_close(layer(x)[0], expected)
    with pytest.raises(UserError, match=r"^backend must be auto or one that supports this.*; 'cpu' does not: "):
        make_layer("lstm", 3, 4, backend="cpu")(x)


@needs_library
@pytest.mark.parametrize("kind", registry.PARTS)
def test_every_struct_belongs_to_a_part(kind: str) -> None:
    """A name that is misspelt on one side would only make this backend refuse the part."""
    names = loader.library().functions.sab_parts(kind.encode()).decode().split()
    assert sorted(names) == sorted(part.cpp for part in registry.PARTS[kind].values())


@needs_library
@pytest.mark.parametrize("wrong", [-1, 99])
@pytest.mark.parametrize("kind", list(registry.PARTS))
def test_an_index_outside_the_library_is_refused(kind: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library, layer = loader.library(), make_layer("lstm", 3, 4, k_top=2, backend="cpu")
    index = library.index
    monkeypatch.setattr(cpu, "_missing", lambda *names: None)
    monkeypatch.setattr(library, "index", lambda asked, name: wrong if asked == kind else index(asked, name))
    with pytest.raises(RuntimeError, match="a part or a precision is not in the library"):
        layer(randn(5, 2, 3))


@needs_library
def test_a_library_with_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shorter(ctypes.Structure):
        _fields_: ClassVar = Arguments._fields_[:-1]

    monkeypatch.setattr(loader, "Arguments", Shorter)
    loader._find.cache_clear()
    try:
        size = ctypes.sizeof(Arguments)
        assert loader.unavailable() == (
            f"the compiled loops take arguments of {size} bytes, not {size - 8}: loop.cpp and arguments.py differ"
        )
        assert make_layer("lstm", 3, 4)(randn(4, 2, 3))[0].isfinite().all()
    finally:
        loader._find.cache_clear()


@needs_library
@pytest.mark.parametrize("incorporate", INCORPORATIONS)
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("cell", CELLS)
def test_threads_that_share_products_give_the_same(
    cell: str, scorer: str, incorporate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do for large weights; here also with more threads than rows."""
    layer = randomize(make_layer(cell, 3, 7, k_top=2, k_trunc=3, scorer=scorer, incorporate=incorporate, backend="cpu"))
    x = randn(9, 2, 3).requires_grad_()
    leaves = [x, *layer.parameters()]
    output = layer(x)[0]
    expected = gradients([output], leaves)
    monkeypatch.setattr(cpu, "LARGEST_WITH_OWN_ROWS", 0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = layer(x)[0]
        assert_close(again, output)
        for actual, wanted in zip(gradients([again], leaves), expected, strict=True):
            assert_close(actual, wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("weights", "rows", "shares"),
    [(1 << 20, 1, False), (1 << 22, 24, False), (1 << 22, 23, True), (1 << 23, 24, False), (1 << 24, 1000, True)],
)
def test_products_are_shared_where_weights_are_large_or_rows_few(
    weights: int, rows: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert cpu.shares_products(weights, rows) == shares


@needs_library
@pytest.mark.parametrize("shares", [False, True])
def test_no_row_at_all(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer leaves out an empty batch by itself, but not inside of a transform."""
    monkeypatch.setattr(cpu, "shares_products", lambda *_: shares)
    layer = make_layer("lstm", 3, 8, backend="cpu")
    with torch.no_grad():
        assert torch.vmap(lambda x: layer(x)[0])(randn(2, 3, 0, 3)).shape == (2, 3, 0, 8)


@needs_library
@pytest.mark.parametrize("batch", [1, 2, 16, 33, 50])
def test_any_number_of_threads_gives_the_same(batch: int) -> None:
    """Each row is taken through all steps once, whoever takes it."""
    layer = randomize(make_layer("lstm", 3, 7, k_top=2, k_trunc=3, backend="cpu"))
    x = randn(5, batch, 3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(layer(x)[0])
    finally:
        torch.set_num_threads(before)
    for output in found[1:]:
        assert_close(output, found[0])


@needs_library
@pytest.mark.parametrize("size", [1, 5, 16, 47, 48, 49, 100])
@pytest.mark.parametrize("batch", [1, 7, 8, 9])
def test_odd_sizes_in_float32(size: int, batch: int) -> None:
    """Whole and partial panels and blocks of the matrix products; the error is that of float32."""
    options = {"k_top": 3, "k_att": 1, "k_trunc": 4, "incorporate": "concat"}
    exact = randomize(make_layer("lstm", 2, size, **options, backend="reference"), scale=1 / size**0.5)
    fast = make_layer("lstm", 2, size, **options, backend="cpu", dtype=torch.float32)
    fast.load_state_dict(exact.state_dict())
    x = randn(6, batch, 2)
    output, expected = fast(x.float())[0], exact(x)[0]
    assert_close(output.double(), expected, tolerance=2e-5)
    actuals = gradients([output.double()], [*fast.parameters()])
    for actual, wanted in zip(actuals, gradients([expected], [*exact.parameters()]), strict=True):
        assert (actual.double() - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6


@needs_library
def test_functions_in_float32_are_exact_to_rounding() -> None:
    """A plain tanh cell of one unit shows the library's own tanh."""
    layer = make_layer("rnn_tanh", 1, 1, bias=False, k_top=0, k_trunc=None, dtype=torch.float32, backend="cpu")
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1.0)
        layer.weight_hh_l0.zero_()
    x = torch.cat([torch.linspace(-12, 12, 20_001), torch.tensor([0.0, 1e-30, -1e-7, 1e4, -1e4, 3e38])])
    output = layer(x.view(1, -1, 1))[0].flatten().double()
    exact = torch.tanh(x.double())
    assert ((output - exact).abs() <= 4e-7 * exact.abs() + 1e-37).all()


@needs_library
def test_what_would_overflow_in_the_padding_spoils_no_gradient() -> None:
    """A row that has ended must not run on: its numbers grow there, and 0 times infinity is NaN."""
    layers = [make_layer("rnn_relu", 3, 4, k_top=2, weighting="relu", backend=name) for name in ("cpu", "reference")]
    x = randn(700, 2, 3)
    actuals = []
    for layer in layers:
        with torch.no_grad():
            for name, parameter in randomize(layer, seed=3).named_parameters():
                if name.startswith("weight_hh"):
                    parameter.copy_(3 * torch.eye(4))
                elif name.startswith("bias"):
                    parameter.fill_(0.1)
        output = layer(x, lengths=[5, 4])[0]
        actuals.append([output, *gradients([output], [*layer.parameters()])])
    for actual, wanted in zip(*actuals, strict=True):
        assert wanted.isfinite().all()
        assert_close(actual, wanted)


@needs_library
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("cell", CELLS)
def test_parameters_that_are_not_contiguous(cell: str, scorer: str) -> None:
    """As hypernetworks and parametrizations give them."""
    options = {"k_top": 2, "scorer": scorer, "max_microstates": 3, "incorporate": "concat"}
    layer = randomize(make_layer(cell, 3, 4, **options, backend="cpu"))
    x = randn(7, 2, 3)
    strided = {name: torch.stack([p.detach()] * 2, dim=-1)[..., 0] for name, p in layer.named_parameters()}
    assert not any(parameter.is_contiguous() for parameter in strided.values())
    assert_close(torch.func.functional_call(layer, strided, (x,))[0], layer(x)[0])


@needs_library
def test_a_parameter_of_another_type_is_not_misread() -> None:
    layer = make_layer("lstm", 3, 4, dtype=torch.float32, backend="cpu")
    layer.attn_v_l0 = torch.nn.Parameter(layer.attn_v_l0.double())
    with pytest.raises(UserError, match="'cpu' does not: the parameters differ from the input in type or device"):
        layer(torch.zeros(5, 2, 3))


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise loader.LibraryUnavailable("it does not compile")

    monkeypatch.setattr(loader, "_build", fail)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/true")
    layer = make_layer("lstm", 3, 4, 2)
    for _ in range(3):
        layer(randn(4, 2, 3))
    assert calls == [1]
    assert caplog.records == []  # a warning says it


@pytest.mark.usefixtures("fresh")
def test_a_user_without_a_home_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert loader.unavailable() is not None
    assert make_layer("lstm", 3, 4)(randn(4, 2, 3))[0].isfinite().all()
