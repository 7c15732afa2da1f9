"""Compiles the loops: for this machine when they are first needed, or for every machine of a kind, for a wheel.

Python's own library is all that this file needs, since `hatch_build.py` loads it where torch is not installed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the sources are: loop.cpp and the headers that it includes; and the library of a wheel that has one."""
PACKAGED = "recurrence.so"
ARCHITECTURE = os.environ.get("SAB_CPU_ARCH") or "native"
IS_X86 = platform.machine() in ("x86_64", "AMD64")
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", *(["-mprefer-vector-width=512"] * IS_X86)]
FLAGS = [*COMMON, f"-march={ARCHITECTURE}"]
THREADING = ("-fopenmp", "-fopenmp-simd")
"""With threads, or where the compiler has no OpenMP library without them."""
VARIANTS = {"cooperlake": "_v4b", "x86-64-v4": "_v4", "x86-64-v3": "_v3", "x86-64": "_v1"}
"""The processors that the library of an x86-64 wheel has loops for, best first, with the ends of their names there.

The first is any that multiplies bfloat16 in vectors of 512 bits.
"""


class BuildError(RuntimeError):
    """Why the loops were not compiled, in a sentence."""


def compiler() -> str | None:
    """The C++ compiler of this machine, or None where there is none."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build(compiler: str, path: Path) -> None:
    """Compile the loops for the processor of `ARCHITECTURE` into `path`, which appears there whole."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "built.so"
        _compile(compiler, [*FLAGS, "-shared"], "loop.cpp", built)
        built.chmod(0o700)  # whatever the umask allows to others
        os.replace(built, path)


def build_portable(compiler: str, path: Path) -> None:
    """Compile the loops for all machines of this kind, for a wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if IS_X86 and sys.platform == "linux":
            objects = [_variant(compiler, march, end, folder) for march, end in VARIANTS.items()]
            objects.append(folder / "variants.o")
            _compile(compiler, [*COMMON, "-c"], "variants.cpp", objects[-1])
        else:
            objects = [folder / "loop.o"]
            _compile(compiler, [*COMMON, "-c"], "loop.cpp", objects[0])
        # OpenMP's functions are those that torch has loaded: two copies of that library would compete for the cores.
        elsewhere = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        _run([compiler, "-shared", *elsewhere, *map(str, objects), "-o", str(path)])


def _variant(compiler: str, march: str, end: str, folder: Path) -> Path:
    """The loops for one processor as an object file, whose functions have another end of their names.

    All else becomes local: the linker would merge what the variants instantiate of the standard library's templates,
    and an old processor would run the instructions of a new one.
    """
    compiled, whole = folder / f"loop{end}.o", folder / f"whole{end}.o"
    # Unique symbols, those of static variables in templates, cannot be made local.
    _compile(compiler, [*COMMON, f"-march={march}", "-fno-gnu-unique", "-c"], "loop.cpp", compiled)
    _run(["ld", "-r", "--force-group-allocation", str(compiled), "-o", str(whole)])
    names = [line.split()[-1] for line in _run(["nm", "--defined-only", "--extern-only", str(whole)]).splitlines()]
    exported = [name for name in names if name.startswith("sab_")]
    _run(["objcopy", *(f"--keep-global-symbol={name}" for name in exported), str(whole)])
    _run(["objcopy", *(f"--redefine-sym={name}={name}{end}" for name in exported), str(whole)])
    return whole


def _compile(compiler: str, flags: list[str], source: str, made: Path) -> None:
    """Compile a source file with threads or, where that fails, without."""
    *first, last = (
        [compiler, *flags, threading, "-fPIC", str(FOLDER / source), "-o", str(made)] for threading in THREADING
    )
    for command in first:
        with contextlib.suppress(BuildError):
            _run(command)
            return
    _run(last)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise BuildError(f"the CPU kernels did not compile with {command[0]}: {first}")
    return done.stdout
