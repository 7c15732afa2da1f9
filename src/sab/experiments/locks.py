"""Locks between processes that share a folder; where the system has none (Windows), nobody waits for anybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until no other process has the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which gives it back


class Lock:
    """A file that one process has, until it lets it go or ends, however it ends."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Whether it could be had."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.release()
                return False
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
