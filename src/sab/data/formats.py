"""Reading files that somebody else packed: .gz, .xz, .zip, .tar and plain ones, and IDX arrays.

Nothing is ever unpacked onto the disk, so no name inside an archive can point anywhere, and nobody reads more bytes
than the caller expects, so that no archive can be a bomb.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import lzma
import math
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

PACKED = (".gz", ".xz")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")
MOST_MEMORY = 256 * 2**20
"""What an .xz file may ask for to be unpacked; the strongest setting of the tool makes 65 MiB of it."""
MOST_IN_AN_ARCHIVE = 4 * 2**30
"""How many bytes an archive may say that it holds before it is taken for a bomb."""
CHUNK = 2**20
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Unreadable(Exception):
    """A file is not what its name says, or holds more than it may; the message says which, as part of a sentence."""


def is_archive(path: Path) -> bool:
    """Whether a file may hold several others, by its name."""
    return path.name.lower().endswith(ARCHIVES)


def plain_name(name: str) -> str:
    """The name of a file once it is unpacked."""
    for suffix in PACKED:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def read(path: Path, most: int) -> bytes:
    """The content of a file, unpacked where its name ends in .gz or .xz; of at most `most` bytes."""
    try:
        with path.open("rb") as stream:
            return _unpack(path.name, stream, most)
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror or error}") from error


def read_from_archive(path: Path, names: Iterable[str], most: int) -> bytes | None:
    """The file of one of these names in an archive, wherever in it, unpacked itself; None where there is none."""
    wanted = set(names)
    with _telling_of_archives(), contextlib.closing(_members(path)) as members:
        for name, stream in members:
            if plain_name(name) in wanted:
                with stream() as opened:
                    return _unpack(name, opened, most)
    return None


def names_in_archive(path: Path) -> set[str]:
    """The names of the files in an archive as they are once unpacked, without their folders."""
    with _telling_of_archives():
        return {plain_name(name) for name, _ in _members(path)}


@contextlib.contextmanager
def _telling_of_archives() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise Unreadable(f"it is not a whole archive: {error}") from error
    except (NotImplementedError, RuntimeError) as error:  # zipfile's words for a method it lacks and for a password
        raise Unreadable(f"it cannot be unpacked here: {error}") from error


def _members(path: Path) -> Generator[tuple[str, Callable[[], IO[bytes]]], None, None]:
    """The files in an archive, by the last part of their names, and how each is opened; no links, no folders."""
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    yield _last_part(entry.filename), functools.partial(packed.open, entry)
        return
    total = 0
    with tarfile.open(path) as packed:
        for entry in packed:
            total += entry.size  # to come to the next one is to unpack this one
            if total > MOST_IN_AN_ARCHIVE:
                raise Unreadable(f"it holds more than {MOST_IN_AN_ARCHIVE:,} bytes")
            if entry.isfile():
                yield _last_part(entry.name), functools.partial(_open_in_tar, packed, entry)


def _open_in_tar(packed: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    stream = packed.extractfile(entry)
    assert stream is not None  # it is a file
    return stream


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2]


def _unpack(name: str, stream: IO[bytes], most: int) -> bytes:
    suffix = name.lower()[-3:]
    try:
        if suffix == ".gz":
            content = gzip.GzipFile(fileobj=stream).read(most + 1)
        elif suffix == ".xz":
            content = _unpack_xz(stream, most + 1)
        else:
            content = stream.read(most + 1)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise Unreadable(f"it is cut short or no {suffix} file: {error}") from error
    if len(content) > most:
        raise Unreadable(f"it holds more than {most:,} bytes")
    return content


def _unpack_xz(stream: IO[bytes], most: int) -> bytes:
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
    content = bytearray()
    while not decoder.eof and len(content) < most:
        packed = stream.read(CHUNK) if decoder.needs_input else b""
        if decoder.needs_input and not packed:
            raise EOFError("its end is missing")
        content += decoder.decompress(packed, most - len(content))
    return bytes(content)


def read_idx(content: bytes) -> np.ndarray:
    """The array in an IDX file, whose size must be what its head says."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise Unreadable("it does not begin like an IDX file")
    dtype, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise Unreadable("it ends within its head")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) != start + math.prod(shape) * dtype.itemsize:
        told = " by ".join(map(str, shape))
        raise Unreadable(f"its head tells of {told} values, and {len(content) - start:,} bytes follow")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)
