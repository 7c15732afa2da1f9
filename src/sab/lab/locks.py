"""Locks between processes that share a folder; where the system has none (Windows), nobody waits for anybody."""

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
    """Waits until no other process has the folder; where the system has no locks there, nobody waits.

    It is a file that is locked, and not the folder itself: network drives pass on locks of files alone.
    """
    lock = Lock(folder / ".lock")
    lock.take(waits=True)
    try:
        yield
    finally:
        lock.remove()


class Lock:
    """A file that one process has, until it lets it go or ends, however it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.is_certain = True
        """Whether the system knows of locks where the file is; it says so when the lock is taken."""
        self._descriptor: int | None = None

    def take(self, waits: bool = False) -> bool:
        """Whether it could be had, which it can in the end by one that waits."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self._descriptor = self._open()
            if not self._lock(self._descriptor, waits):
                self.release()
                return False
            if self._is_in_place():
                return True
            self.release()  # whoever had it removed the file meanwhile

    def write(self, text: str) -> None:
        """Makes the file, which must have been taken, hold a text."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Lets it go; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Lets it go, and the file with it."""
        if self._descriptor is not None and self._is_in_place():
            with suppress(OSError):  # it locks nobody out once it was let go
                self.path.unlink()
        self.release()

    def _open(self) -> int:
        """The file, made where there is none or one that is no plain file: a link would lead elsewhere."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.lstat().st_mode):
                self.path.unlink()
        return os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)

    def _lock(self, descriptor: int, waits: bool) -> bool:
        if fcntl is None:
            self.is_certain = False
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            self.is_certain = False
        return True

    def _is_in_place(self) -> bool:
        """Whether the file that was taken is the one that others find."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False
