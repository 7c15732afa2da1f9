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

logger = logging.getLogger("sab")

SOURCE = Path(__file__).with_name("loop.cpp")
ARCHITECTURE = os.environ.get("SAB_CPU_ARCH") or "native"
FLAGS = ["-std=c++17", "-O3", f"-march={ARCHITECTURE}", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")
THREADING = ("-fopenmp", "-fopenmp-simd")
"""With threads, or where the compiler has no OpenMP library without them."""


class LibraryUnavailable(RuntimeError):
    """Why there is no compiled library on this machine, in a sentence."""


def library() -> ctypes.CDLL:
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
def _find() -> ctypes.CDLL | str:
    """The library, or why there is none: tried once in a process, since a failing compiler takes its time."""
    if os.environ.get("SAB_NATIVE") == "0":
        return "SAB_NATIVE=0 turns the compiled CPU backend off"
    try:
        return _load()
    except (LibraryUnavailable, OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        logger.warning("there is no compiled CPU backend, so the slower reference does its work: %s", error)
        return str(error)


def _load() -> ctypes.CDLL:
    found = compiler()
    if found is None:
        raise LibraryUnavailable("no C++ compiler (c++, g++ or clang++) is on the PATH")
    path = _cache_folder() / f"recurrence-{_fingerprint(found)}.so"
    if not path.exists():
        _build(found, path)
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "sab"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _fingerprint(compiler: str) -> str:
    """Names what the library depends on: its source, the compiler and the processor, since homes are shared."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    cpuinfo = Path("/proc/cpuinfo")
    features = ""
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    parts = [SOURCE.read_text(), " ".join(FLAGS), version, platform.machine(), features]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    logger.warning("compiling the CPU kernels, once on this machine, which takes some seconds")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "built.so"
        errors = ""
        for threading in THREADING:
            command = [compiler, *FLAGS, threading, "-shared", "-fPIC", str(SOURCE), "-o", str(built)]
            errors = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            if built.exists():
                break
        else:
            first = (errors.strip().splitlines() or ["no message"])[0]
            raise LibraryUnavailable(f"the CPU kernels did not compile with {compiler}: {first}")
        os.replace(built, path)
    logger.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - started, path)
