"""Locks between processes that share a folder; where the system has none (Windows), nothing is locked."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until no other process has locked the folder, and locks it; does nothing where the system has no locks.

    A file in the folder is locked, not the folder itself: network drives support locks of files alone.
    """
    lock = Lock(folder / ".lock")
    lock.take(waits=True)
    try:
        yield
    finally:
        lock.remove()


class Lock:
    """A file that one process holds locked until it releases it or ends, however it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.is_supported = True
        """Whether the system supports locks where the file is; known once the lock was taken."""
        self._descriptor: int | None = None

    def take(self, waits: bool = False) -> bool:
        """Locks the file; whether that succeeded, which it always does with `waits`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self._descriptor = self._open()
            if not self._lock(self._descriptor, waits):
                self.release()
                return False
            if self._is_in_place():
                return True
            self.release()  # the process before this one removed the file meanwhile

    def write(self, text: str) -> None:
        """Replaces the text of the locked file."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Unlocks the file, which stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Unlocks and removes the file."""
        if self._descriptor is not None and self._is_in_place():
            with suppress(OSError):  # unlocked, it does no harm
                self.path.unlink()
        self.release()

    def _open(self) -> int:
        """Opens the file; makes it where there is none, or where a link is in its place, which might lead elsewhere."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.lstat().st_mode):
                self.path.unlink()
        return os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)

    def _lock(self, descriptor: int, waits: bool) -> bool:
        if fcntl is None:
            self.is_supported = False
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            self.is_supported = False
        return True

    def _is_in_place(self) -> bool:
        """Whether the locked file is still the one at the path."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False
