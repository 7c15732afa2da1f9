"""Atomic writing of files: neither a reader nor a crash sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sab.errors import UserValueError


@contextmanager
def writing(path: Path, option: str | None = None) -> Iterator[None]:
    """Turns an OSError while writing below `path`, which the user chose by `option`, into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        start = f"{option} {str(path)!r}" if option else repr(str(path))
        raise UserValueError(f"{start} must be a place that can be written to; it is not: {reason}.", option) from error


@contextmanager
def replacing(path: Path, option: str | None = None) -> Iterator[Path]:
    """Yields a temporary path in the same folder; what is written there replaces `path` in one move."""
    temporary = temporary_of(path)
    with writing(path, option):
        try:
            temporary.unlink(missing_ok=True)  # a link there would lead elsewhere
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(f".{path.name}.tmp")


def write_text(path: Path, text: str, option: str | None = None) -> None:
    """Writes a whole file in one move."""
    with replacing(path, option) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
