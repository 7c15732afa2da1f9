"""Watching what a process does while it reads something hostile, by Python's audit events."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.symlink": (1,), "os.link": (1,), "os.rename": (0, 1)}
CHANGES |= dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), (0,))
"""Events that change the disk, and which of their arguments are paths."""
NEVER = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn"}
NEVER |= {"subprocess.Popen", "socket.connect", "socket.bind"}
"""Events that no file may cause."""
LONGEST = 60
"""Seconds after which an input has taken too long."""
MOST_MEMORY = 2**30
"""Bytes that an input may take, on Linux, beyond those that the process has."""
_watched: list[tuple[tuple[Path, ...], frozenset[str]]] = []
_is_listening = False


class Forbidden(BaseException):
    """Something was done that must not be; no handler of the code under test catches it."""


@contextmanager
def watching(*folders: Path, also: frozenset[str] = frozenset()) -> Iterator[None]:
    """Raises `Forbidden` where something is written outside of these folders, unpickled, started or connected to, or
    takes too long; `also` names what else may happen. Memory is limited."""
    global _is_listening
    if not _is_listening:
        sys.addaudithook(_hear)  # which can never be taken back
        _is_listening = True
    limits, statm = resource.getrlimit(resource.RLIMIT_AS), Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(LONGEST)
    _watched.append((tuple(folder.resolve() for folder in folders), also))
    try:
        yield
    finally:
        _watched.pop()
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _ring(*_: Any) -> None:
    raise Forbidden(f"it took longer than {LONGEST} seconds")


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    folders, also = _watched[-1]
    paths = [arguments[place] for place in CHANGES.get(event, ())]
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
        paths = [arguments[0]]
    for path in paths:
        resolved = Path() if isinstance(path, int) else Path(os.path.realpath(os.fsdecode(path)))
        if resolved not in (Path(), Path(os.devnull)) and not any(map(resolved.is_relative_to, folders)):
            raise Forbidden(f"{event}: {str(resolved)!r} is outside of {[str(folder) for folder in folders]}")
    if event in NEVER - also:
        raise Forbidden(f"{event}: {arguments!r}"[:300])
