"""Watching what a process does while it reads something hostile: Python tells of every file that it opens, and more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.symlink": (1,),
    "os.link": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
}
"""What changes the disk, and which of its arguments are paths."""
NEVER = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
)
"""What no file may make anybody do."""


class Forbidden(BaseException):
    """Something was done that must not be; no handler of the code under test catches it."""


_allowed: list[tuple[Path, ...]] = []
_is_listening = False


@contextmanager
def watching(*folders: Path, also: tuple[str, ...] = ()) -> Iterator[None]:
    """Raises `Forbidden` at once where anything is written outside of these folders, unpickled, started or connected
    to; `also` names what else may happen."""
    global _is_listening
    if not _is_listening:
        sys.addaudithook(_hear)  # which can never be taken back
        _is_listening = True
    _allowed.append(tuple(folder.resolve() for folder in folders))
    _excused.append(also)
    try:
        yield
    finally:
        _allowed.pop()
        _excused.pop()


_excused: list[tuple[str, ...]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITES and not isinstance(path, int):
            _check(event, path)
    elif event in CHANGES:
        for place in CHANGES[event]:
            if not isinstance(arguments[place], int):
                _check(event, arguments[place])
    elif event in NEVER and event not in _excused[-1]:
        raise Forbidden(f"{event}: {arguments!r}"[:300])


def _check(event: str, path: Any) -> None:
    folders = _allowed[-1]
    resolved = Path(os.path.realpath(os.fsdecode(path)))
    if resolved != Path(os.devnull) and not any(resolved.is_relative_to(folder) for folder in folders):
        raise Forbidden(f"{event}: {str(resolved)!r} is outside of {[str(folder) for folder in folders]}")
