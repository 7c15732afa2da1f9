"""The compiled half of the CPU backend: that of the wheel, or built once for each machine, by its own compiler.

What is built is kept in the user's cache, and loaded from there only if nobody else can have written it. Without a
library and a compiler, or with `SAB_NATIVE=0`, the reference backend does the work. `SAB_CPU_ARCH` in the environment
names another processor, in the words of the compiler's `-march`: `native`, the processor of this machine, `x86-64`,
`x86-64-v3`. A wheel's library has the loops for some of them; for another one they are compiled.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sab import torch_private
from sab.ops.cpu import build
from sab.ops.cpu.arguments import Arguments, Step
from sab.parts import registry

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger("sab")

SYMBOLS = "sab_arguments_size sab_step_size sab_parts sab_has_bfloat16 sab_pack_bfloat16".split()
SYMBOLS += [
    f"sab_{name}_{kind}"
    for name in "columns pack outer forward backward step fewest_sketched sketch block_room blocks select".split()
    for kind in ("float", "double")
]
"""The functions that a library must have."""
PACKAGED = "compiled in the wheel"
"""Where a wheel's library comes from, in words."""
LONGEST_WAIT = 120.0
"""Seconds after which a process that waits for another one's compiler starts its own."""


class LibraryUnavailable(RuntimeError):
    """Why there is no compiled library on this machine, in a sentence."""


class WrongLibrary(LibraryUnavailable):
    """Why a file is not taken as the library; one that is built anew may be."""


class Functions:
    """The functions of a library by their names; the ends of names that tell processors apart are left out."""

    def __init__(self, library: ctypes.CDLL, end: str):
        self._library, self._end = library, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name + self._end)


class Library:
    """The compiled functions and the names of the parts that they have."""

    def __init__(self, path: Path, origin: str):
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise WrongLibrary(f"'{path}' cannot be loaded: {error}") from None
        variant = _variant(library)
        self.origin = origin if variant is None else f"{origin} for {variant}"
        """Where the library comes from, in words."""
        self.functions = Functions(library, "" if variant is None else build.VARIANTS[variant])
        lacking = next((name for name in SYMBOLS if not hasattr(self.functions, name)), None)
        if lacking is not None:
            _close(library)
            raise WrongLibrary(f"'{path}' lacks the function {lacking}")
        for find_size, structure in (("sab_arguments_size", Arguments), ("sab_step_size", Step)):
            found = getattr(self.functions, find_size)
            found.restype = ctypes.c_int64
            size, expected = found(), ctypes.sizeof(structure)
            if size != expected:
                raise LibraryUnavailable(
                    f"the compiled loops take arguments of {size} bytes, not {expected}: "
                    "loop.cpp and arguments.py differ"
                )
        self.functions.sab_has_bfloat16.restype = ctypes.c_bool
        self.has_bfloat16 = bool(self.functions.sab_has_bfloat16())
        """Whether products can round their factors to bfloat16."""
        self.functions.sab_parts.restype = ctypes.c_char_p
        self.parts: dict[str, dict[str, int]] = {}
        """For each kind the names of its parts, with the indices that the compiled loops take."""
        for kind in registry.PARTS:
            names = (self.functions.sab_parts(kind.encode()) or b"").decode().split()
            self.parts[kind] = {name: index for index, name in enumerate(names)}

    def index(self, kind: str, name: str) -> int:
        """The index of a part, or -1 where the library does not have it."""
        return self.parts[kind].get(name, -1)


def _variant(library: ctypes.CDLL) -> str | None:
    """For which of its processors a wheel's library is to compute; None where it was compiled for one alone."""
    if not hasattr(library, "sab_variant"):
        return None
    if build.ARCHITECTURE in build.VARIANTS:
        return build.ARCHITECTURE
    library.sab_variant.restype = ctypes.c_char_p
    best = library.sab_variant().decode()
    return next(name for name, end in build.VARIANTS.items() if end == best)


def _close(library: ctypes.CDLL) -> None:
    """Unload a library, so that another file of its name can be loaded."""
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [ctypes.c_void_p]
    close(library._handle)


def library() -> Library:
    """The compiled library; builds it at the first call on a machine."""
    found = _find()
    if isinstance(found, str):
        raise LibraryUnavailable(found)
    return found


@torch_private.constant_result
def unavailable() -> str | None:
    """Why `library` cannot be had, or None where it can."""
    found = _find()
    return found if isinstance(found, str) else None


@torch_private.constant_result
def has_bfloat16() -> bool:
    """Whether there is a library whose products can round their factors to bfloat16."""
    found = _find()
    return not isinstance(found, str) and found.has_bfloat16


@functools.cache
def _find() -> Library | str:
    """The library, or why there is none: tried once in a process, since a failing compiler takes its time."""
    if os.environ.get("SAB_NATIVE") == "0":
        return "SAB_NATIVE=0 turns the compiled CPU backend off"
    try:
        return _packaged() or _built()
    except (LibraryUnavailable, build.BuildError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return str(error)


def _packaged() -> Library | None:
    """The library that came with the wheel, if it came with one that suits."""
    path = build.FOLDER / build.PACKAGED
    if not path.is_file() or ("SAB_CPU_ARCH" in os.environ and build.ARCHITECTURE not in build.VARIANTS):
        return None
    try:
        return Library(path, PACKAGED)
    except LibraryUnavailable as error:
        logger.warning("the CPU kernels of the wheel are not used: %s", error)
        return None


def _built() -> Library:
    """The library that was built on this machine, or is built now."""
    compiler, folder = build.compiler(), _cache_folder()
    reason = _untrusted(folder)
    if reason is not None:
        if compiler is None:
            raise LibraryUnavailable(f"{reason}, and no C++ compiler is on the PATH")
        logger.warning("the CPU kernels are compiled for this process alone: %s", reason)
        with tempfile.TemporaryDirectory(prefix="sab-") as private:
            path = Path(private) / "recurrence.so"
            _build(compiler, path)
            return Library(path, f"compiled with {compiler}")
    if compiler is None:
        for path in sorted(folder.glob(f"recurrence-{_fingerprint()}-*.so"), key=lambda one: -one.stat().st_mtime):
            if (library := _cached(path, "compiled earlier")) is not None:
                return library
        raise LibraryUnavailable("no C++ compiler (c++, g++ or clang++) is on the PATH; one makes it fast")
    path = folder / f"recurrence-{_fingerprint()}-{_version(compiler)}.so"
    origin = f"compiled with {compiler}"
    library = _cached(path, origin)
    if library is None:
        with _locked(folder):
            library = _cached(path, origin)  # another process may have built it meanwhile
            if library is None:
                _build(compiler, path)
                library = Library(path, origin)
    return library


def _cached(path: Path, origin: str) -> Library | None:
    """The library in a file of the cache, or None where there is none or it is not to be trusted."""
    if not path.exists():
        return None
    try:
        reason = _untrusted(path)
        if reason is not None:
            raise WrongLibrary(reason)
        return Library(path, origin)
    except WrongLibrary as error:
        logger.warning("the CPU kernels in the cache are not used: %s", error)
        path.unlink()  # the folder is this user's own
        return None


def _untrusted(path: Path) -> str | None:
    """Why somebody else may have written a file or a folder, whose code would run here; None where nobody can have."""
    status = path.stat()
    if not hasattr(os, "geteuid"):  # Windows
        return None
    if status.st_uid != os.geteuid():
        return f"'{path}' belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"'{path}' can be written to by other users (chmod go-w changes that)"
    return None


def cache_folder() -> Path:
    """Where libraries are kept. It has no other files, so that nobody makes it with other permissions."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sab" / "cpu"


def _cache_folder() -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _fingerprint() -> str:
    """Names what the library depends on: its sources, the options and the processor, since homes are shared."""
    cpuinfo = Path("/proc/cpuinfo")
    features = ""
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    name = hashlib.sha256()
    for path in sorted([*build.FOLDER.glob("*.cpp"), *build.FOLDER.glob("*.h")]):
        name.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    name.update("\0".join([" ".join(build.FLAGS), platform.machine(), features]).encode())
    return name.hexdigest()[:16]


def _version(compiler: str) -> str:
    """Names the compiler, which is the other thing that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return hashlib.sha256(version.encode()).hexdigest()[:8]


def _build(compiler: str, path: Path) -> None:
    logger.warning("compiling the CPU kernels, once on this machine, which takes some seconds")
    started = time.perf_counter()
    build.build(compiler, path)
    logger.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - started, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time build; a lock ends with its process, and one that is held too long is passed over."""
    descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while not _take(descriptor) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Whether a lock was taken, or the system has none."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a drive without locks: whoever comes last replaces the file by an equal one
        return True
    return True
