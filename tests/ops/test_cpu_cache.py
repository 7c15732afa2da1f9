"""Where the compiled library comes from: the wheel, the cache if nobody else can have written it, or a compiler."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sab.errors import UserError
from sab.ops.cpu import build, engine, loader
from tests.ops.cases import assert_close, gradients, make_layer, randn, randomize

fcntl = pytest.importorskip("fcntl", reason="the system has no locks and no owners")
QUICK = ["-std=c++17", "-O0"]
COMPILER = build.compiler()

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no compiler")


def forget() -> None:
    """Forget the library of this process."""
    loader._find.cache_clear()
    engine.function.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of a machine that has built nothing yet, and builds in little time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PACKAGED", "none.so")
    monkeypatch.setattr(build, "FLAGS", QUICK)
    forget()
    yield tmp_path / "sab" / "cpu"
    forget()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the compiler makes, once for all tests."""
    path = tmp_path_factory.mktemp("compiled") / "recurrence.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", QUICK)
        build.build(str(COMPILER), path)
    return path


@pytest.fixture
def built(cache: Path, compiled: Path) -> Path:
    """The file of a library that was built by an earlier process."""
    cache.mkdir(parents=True, mode=0o700)
    path = cache / f"recurrence-{loader._fingerprint()}-{loader._version(str(COMPILER))}.so"
    shutil.copy(compiled, path)
    return path


@pytest.fixture
def builds(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is built from now on."""
    made: list[Path] = []

    def noted(compiler: str, path: Path) -> None:
        made.append(path)
        path.unlink(missing_ok=True)
        shutil.copy(compiled, path)

    monkeypatch.setattr(build, "build", noted)
    return made


def test_it_is_built_once_and_found_again(built: Path, builds: list[Path]) -> None:
    assert loader.library().origin == f"compiled with {COMPILER}"
    assert builds == []


def test_what_is_built_is_this_users_alone(cache: Path) -> None:
    umask = os.umask(0o002)  # as many systems have it, where every user has a group of their own
    try:
        assert loader.unavailable() is None
    finally:
        os.umask(umask)
    (path,) = cache.glob("*.so")
    assert not cache.stat().st_mode & 0o022
    assert not path.stat().st_mode & 0o022


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_file_that_others_can_write_is_built_anew(
    mode: int, built: Path, builds: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    built.chmod(mode)
    assert loader.unavailable() is None
    assert builds == [built]
    assert built.stat().st_mode & 0o777 == 0o700
    assert f"the CPU kernels in the cache are not used: '{built}' can be written to by other users" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(
    mode: int, built: Path, builds: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    built.parent.chmod(mode)
    built.write_bytes(b"hostile")
    assert loader.unavailable() is None
    (private,) = builds
    assert private.parent != built.parent
    assert not private.parent.exists(), "nothing is left behind"
    assert built.read_bytes() == b"hostile"
    assert f"for this process alone: '{built.parent}' can be written to by other users" in caplog.text


def test_nothing_is_loaded_that_belongs_to_another_user(
    built: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    assert loader.unavailable() is None
    assert [path.parent for path in builds] != [built.parent]
    assert f"'{built.parent}' belongs to another user" in caplog.text
    assert loader._cached(built, "") is None
    assert f"'{built}' belongs to another user" in caplog.text
    assert not built.exists()


def test_a_wrong_cache_without_a_compiler_is_the_reason_for_the_reference(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.parent.chmod(0o777)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = f"'{built.parent}' can be written to by other users (chmod go-w changes that)"
    assert loader.unavailable() == f"{reason}, and no C++ compiler is on the PATH"
    with pytest.raises(UserError, match="'cpu' does not: "):
        make_layer("lstm", 3, 4, backend="cpu")(randn(5, 2, 3))
    assert make_layer("lstm", 3, 4)(randn(5, 2, 3))[0].isfinite().all()


@pytest.mark.parametrize("content", ["truncated", "another library"])
def test_a_file_that_is_no_such_library_is_built_anew(
    content: str, built: Path, builds: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = built.read_bytes()[:100]
    if content == "truncated":
        told = "cannot be loaded: "
        built.write_bytes(start)
    else:
        told = "lacks the function sab_arguments_size"
        (tmp_path / "empty.cpp").write_text("int nothing;\n")
        built.unlink()
        subprocess.run([str(COMPILER), "-shared", "-fPIC", tmp_path / "empty.cpp", "-o", built], check=True)
    built.chmod(0o700)
    assert loader.unavailable() is None
    assert builds == [built]
    assert caplog.text.count(told) == 1


def test_a_library_in_the_cache_needs_no_compiler(
    built: Path, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert loader.library().origin == "compiled earlier"
    assert builds == []
    forget()
    monkeypatch.setattr(build, "FLAGS", [*QUICK, "-DOTHER"])
    assert (loader.unavailable() or "").startswith("no C++ compiler (c++, g++ or clang++) is on the PATH")


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    (programs / "c++").write_text(
        f'#!/bin/sh\ncase "$*" in *loop.cpp*) echo "$$" >> {log}; sleep 2;; esac\nexec {COMPILER} "$@"\n'
    )
    (programs / "c++").chmod(0o700)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}"}
    code = "from sab.ops.cpu import build, loader; build.PACKAGED = 'none.so'; build.FLAGS = ['-std=c++17', '-O0']; "
    code += "assert loader.unavailable() is None, loader.unavailable()"
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert len(log.read_text().split()) == 1
    assert len(list((tmp_path / "sab" / "cpu").glob("*.so"))) == 1


def test_a_lock_that_is_held_too_long_is_passed_over(
    cache: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(loader, "LONGEST_WAIT", 0.1)
    with open(cache / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert loader.unavailable() is None
    assert len(builds) == 1


# The library of a wheel


needs_binutils = pytest.mark.skipif(
    not build.IS_X86 or sys.platform != "linux" or shutil.which("objcopy") is None,
    reason="such a library is made on Linux x86-64",
)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that a wheel has, not optimised."""
    path = tmp_path_factory.mktemp("wheel") / "recurrence.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "COMMON", QUICK)
        build.build_portable(str(COMPILER), path)
    return path


@pytest.fixture
def packaged(portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation from a wheel with a library, on a machine without a compiler."""
    path = tmp_path / "sources" / build.PACKAGED
    shutil.copytree(build.FOLDER, path.parent, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(portable, path)
    monkeypatch.setattr(build, "FOLDER", path.parent)
    monkeypatch.delenv("SAB_CPU_ARCH", raising=False)
    monkeypatch.setattr(build, "ARCHITECTURE", "native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    forget()
    yield path
    forget()


def runnable() -> list[str]:
    """The variants whose instructions this machine has, best first."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.is_file() else []
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    needed = {"cooperlake": {*v4, "avx512_bf16", "avx512_vnni"}, "x86-64-v4": v4, "x86-64-v3": {"avx2", "fma"}}
    return [name for name in build.VARIANTS if needed.get(name, set()) <= set(flags)]


@needs_binutils
def test_the_wheels_library_takes_the_best_loops_of_this_processor(packaged: Path, tmp_path: Path) -> None:
    assert loader.library().origin == f"compiled in the wheel for {runnable()[0]}"
    assert not (tmp_path / "cache").exists()
    assert make_layer("lstm", 3, 4).backend_for(randn(5, 2, 3)) == "cpu"


@needs_binutils
@pytest.mark.parametrize("variant", build.VARIANTS)
def test_every_variant_computes_what_the_reference_does(
    variant: str, packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant not in runnable():
        pytest.skip("this processor lacks the instructions")
    monkeypatch.setattr(build, "ARCHITECTURE", variant)
    assert loader.library().origin.endswith(f" for {variant}")
    options = {"k_top": 2, "k_att": 2, "k_trunc": 3, "incorporate": "concat"}
    found = []
    for backend in ("cpu", "reference"):
        layer = randomize(make_layer("lstm", 3, 17, **options, backend=backend))
        x = randn(9, 2, 3).requires_grad_()
        output = layer(x)[0]
        found.append([output, *gradients([output], [x, *layer.parameters()])])
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)
    assert loader.has_bfloat16() == (variant == "cooperlake")


@needs_binutils
def test_variants_share_no_code(portable: Path) -> None:
    """What the linker merged would be code of one variant that the others run."""
    listed = subprocess.run(["nm", "--defined-only", portable], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-2:] for line in listed.splitlines()]
    shared = [name for kind, name in symbols if kind in "TWVBDRu" and not name.startswith(("sab_", "_init", "_fini"))]
    assert shared == []
    ends = tuple(build.VARIANTS.values())
    exported = {name for kind, name in symbols if kind == "T" and name.startswith("sab_")}
    assert {name for name in exported if not name.endswith(ends)} == {"sab_variant"}
    assert {f"{name}{end}" for name in loader.SYMBOLS for end in ends} <= exported


@needs_binutils
def test_another_processor_than_the_wheels_is_compiled_for(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAB_CPU_ARCH", "native")
    assert (loader.unavailable() or "").startswith("no C++ compiler (c++, g++ or clang++) is on the PATH")


def test_a_wheels_library_that_cannot_be_loaded_is_passed_over(
    cache: Path, builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.so").write_bytes(b"for another system")
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "broken.so")
    monkeypatch.delenv("SAB_CPU_ARCH", raising=False)
    caplog.set_level(logging.WARNING)
    assert loader.unavailable() is None
    assert [path.parent for path in builds] == [cache]
    assert "the CPU kernels of the wheel are not used: " in caplog.text
