"""The compiled half of the CPU backend: built once for each machine, by its own compiler, and cached.

Without a compiler, or with `SAB_NATIVE=0`, there is no library and the reference backend does the work.
`SAB_CPU_ARCH` in the environment names another processor to compile for, in the words of the compiler's `-march`
(`x86-64`, `x86-64-v3`); the default is `native`, the processor of this machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from sab.ops.cpu.arguments import Arguments, Step
from sab.parts import registry

logger = logging.getLogger("sab")

FOLDER = Path(__file__).parent
"""Where the source is: loop.cpp and the headers that it includes."""
ARCHITECTURE = os.environ.get("SAB_CPU_ARCH") or "native"
FLAGS = ["-std=c++17", "-O3", f"-march={ARCHITECTURE}", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")
THREADING = ("-fopenmp", "-fopenmp-simd")
"""With threads, or where the compiler has no OpenMP library without them."""


class LibraryUnavailable(RuntimeError):
    """Why there is no compiled library on this machine, in a sentence."""


class Library:
    """The compiled functions and the names of the parts that they have."""

    def __init__(self, path: Path):
        self.functions = ctypes.CDLL(str(path))
        for find_size, structure in (("sab_arguments_size", Arguments), ("sab_step_size", Step)):
            found = getattr(self.functions, find_size)
            found.restype = ctypes.c_int64
            size, expected = found(), ctypes.sizeof(structure)
            if size != expected:
                raise LibraryUnavailable(
                    f"the compiled loops take arguments of {size} bytes, not {expected}: "
                    "loop.cpp and arguments.py differ"
                )
        self.functions.sab_parts.restype = ctypes.c_char_p
        self.parts: dict[str, dict[str, int]] = {}
        """For each kind the names of its parts, with the indices that the compiled loops take."""
        for kind in registry.PARTS:
            names = self.functions.sab_parts(kind.encode()).decode().split()
            self.parts[kind] = {name: index for index, name in enumerate(names)}

    def index(self, kind: str, name: str) -> int:
        """The index of a part, or -1 where the library does not have it."""
        return self.parts[kind].get(name, -1)


def library() -> Library:
    """The compiled library; builds it at the first call on a machine."""
    found = _find()
    if isinstance(found, str):
        raise LibraryUnavailable(found)
    return found


@torch.compiler.assume_constant_result
def unavailable() -> str | None:
    """Why `library` cannot be had, or None where it can."""
    found = _find()
    return found if isinstance(found, str) else None


def compiler() -> str | None:
    """The C++ compiler of this machine, or None where there is none."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@functools.cache
def _find() -> Library | str:
    """The library, or why there is none: tried once in a process, since a failing compiler takes its time."""
    if os.environ.get("SAB_NATIVE") == "0":
        return "SAB_NATIVE=0 turns the compiled CPU backend off"
    try:
        return _load()
    except (LibraryUnavailable, OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        logger.warning("there is no compiled CPU backend, so the slower reference does its work: %s", error)
        return str(error)


def _load() -> Library:
    found = compiler()
    if found is None:
        raise LibraryUnavailable("no C++ compiler (c++, g++ or clang++) is on the PATH")
    path = _cache_folder() / f"recurrence-{_fingerprint(found)}.so"
    if not path.exists():
        _build(found, path)
    return Library(path)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "sab"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _fingerprint(compiler: str) -> str:
    """Names what the library depends on: its sources, the compiler and the processor, since homes are shared."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    cpuinfo = Path("/proc/cpuinfo")
    features = ""
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    name = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]):
        name.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    name.update("\0".join([" ".join(FLAGS), version, platform.machine(), features]).encode())
    return name.hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    logger.warning("compiling the CPU kernels, once on this machine, which takes some seconds")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "built.so"
        errors = ""
        for threading in THREADING:
            command = [compiler, *FLAGS, threading, "-shared", "-fPIC", str(FOLDER / "loop.cpp"), "-o", str(built)]
            errors = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            if built.exists():
                break
        else:
            first = (errors.strip().splitlines() or ["no message"])[0]
            raise LibraryUnavailable(f"the CPU kernels did not compile with {compiler}: {first}")
        os.replace(built, path)
    logger.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - started, path)
