"""Reading untrusted files: .gz, .xz, .zip, .whl, .tar and plain ones, IDX arrays and PNG images.

Nothing is unpacked onto the disk, so no name inside an archive can point anywhere. At most the bytes that the caller
expects are read, in small parts, and the lists of members are bounded, so that no archive can be a bomb.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import lzma
import math
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PACKED = (".gz", ".xz")
ZIPS = (".zip", ".whl")
"""A wheel, a package of PyPI, is a .zip archive."""
ARCHIVES = (*ZIPS, ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")
MOST_MEMORY = 256 * 2**20
"""Most memory for unpacking an .xz file; the strongest setting of the tool needs 65 MiB."""
MOST_IN_AN_ARCHIVE = 4 * 2**30
"""Most bytes of an archive that are unpacked on the way to a file; a larger one counts as a bomb."""
MOST_MEMBERS = 10_000
"""Most files and folders in an archive."""
LARGEST_LIST = 2**22
"""Most bytes of a .zip archive's list of members."""
LARGEST_HEAD = 2**16
"""Most bytes of a .tar archive's header of one file."""
MOST_DIMENSIONS = 32
CHUNK = 2**20
_STREAM_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_ARCHIVE_ERRORS = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError),
    # The modules raise these for numbers and names that make no sense.
    *(ValueError, IndexError, OverflowError, struct.error),
)
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Unreadable(Exception):
    """A file is not of its kind, or holds too much; the message is part of a sentence."""


class Stream(Protocol):
    """An object that can be read part by part, from start to end."""

    def read(self, size: int, /) -> bytes: ...


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
    with _archive_errors(), contextlib.closing(_members(path)) as members:
        for name, stream in members:
            if plain_name(name) in wanted:
                return _unpack(name, stream(), most)
    return None


def names_in_archive(path: Path) -> set[str]:
    """The names of the files in an archive as they are once unpacked, without their folders."""
    with _archive_errors():
        return {plain_name(name) for name, _ in _members(path)}


@contextlib.contextmanager
def _archive_errors() -> Iterator[None]:
    try:
        yield
    except _ARCHIVE_ERRORS as error:
        raise Unreadable(f"it is not a whole archive: {error}") from error
    except RuntimeError as error:  # zipfile raises it for a password, and a kind of it for an unknown method
        raise Unreadable(f"it cannot be unpacked here: {error}") from error


Members = Generator[tuple[str, Callable[[], Stream]], None, None]


def _members(path: Path) -> Members:
    """The base names of the files in an archive, with functions that open them; no links, no folders."""
    found = _members_of_zip(path) if path.name.lower().endswith(ZIPS) else _members_of_tar(path)
    with contextlib.closing(found):
        yield from found


def _members_of_zip(path: Path) -> Members:
    with _BoundedFile(path) as file, zipfile.ZipFile(file) as packed:
        _check_count(len(packed.infolist()))
        for entry in packed.infolist():
            if not entry.is_dir():
                yield _base_name(entry.filename), functools.partial(_open_in_zip, packed, entry)


def _members_of_tar(path: Path) -> Members:
    with path.open("rb") as file:
        unpacked = _ForwardStream(_unpacked(path.name.lower().replace(".tgz", ".gz").replace(".txz", ".xz"), file))
        with tarfile.open(fileobj=unpacked, mode="r:") as packed:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for number, entry in enumerate(packed, start=1):
                _check_count(number)
                if entry.isreg() and not entry.issparse():
                    yield _base_name(entry.name), functools.partial(_Part, unpacked, entry.offset_data, entry.size)


def _check_count(count: int) -> None:
    if count > MOST_MEMBERS:
        raise Unreadable(f"it holds more than {MOST_MEMBERS:,} files and folders")


def _open_in_zip(packed: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Stream:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack much at once
        raise Unreadable(f"{entry.filename!r} in it is packed by method {entry.compress_type}, which is not read here")
    return packed.open(entry)


def _base_name(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2]


class _BoundedFile(io.FileIO):
    """A file of which at most LARGEST_LIST bytes are read at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > LARGEST_LIST:
            raise Unreadable(f"its list of files has more than {LARGEST_LIST:,} bytes")
        return super().read(wanted)


class _ForwardStream:
    """A stream for `tarfile` with bounded reads and no seeking backwards."""

    def __init__(self, stream: Stream):
        self._stream, self._place = stream, 0

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        if place < self._place:
            raise Unreadable("what it tells of a file points back")
        while self._place < place and self._take(min(CHUNK, place - self._place)):
            pass

    def read(self, size: int, /) -> bytes:
        if not 0 <= size <= LARGEST_HEAD:
            raise Unreadable(f"what it tells of a file has more than {LARGEST_HEAD:,} bytes")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        content = _read_up_to(self._stream, size)
        self._place += len(content)
        if self._place > MOST_IN_AN_ARCHIVE:
            raise Unreadable(f"it holds more than {MOST_IN_AN_ARCHIVE:,} bytes")
        return content


class _Part:
    """A file within a stream."""

    def __init__(self, stream: _ForwardStream, start: int, size: int):
        stream.seek(start)
        self._stream, self._left = stream, size

    def read(self, size: int, /) -> bytes:
        content = self._stream.read(min(size, self._left, LARGEST_HEAD))
        if not content and size and self._left:
            raise EOFError("its end is missing")
        self._left -= len(content)
        return content


class _Xz:
    """The unpacked content of an .xz file, with bounded memory."""

    def __init__(self, stream: Stream):
        self._stream, self._decoder = stream, lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)

    def read(self, size: int, /) -> bytes:
        while not self._decoder.eof:
            packed = self._stream.read(CHUNK) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not packed:
                raise EOFError("its end is missing")
            if content := self._decoder.decompress(packed, size):
                return content
        return b""


def _unpacked(name: str, stream: Any) -> Stream:
    """A stream, unpacked where its name ends in .gz or .xz."""
    if name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=stream)
    return _Xz(stream) if name.lower().endswith(".xz") else stream


def _unpack(name: str, stream: Stream, most: int) -> bytes:
    try:
        content = _read_up_to(_unpacked(name, stream), most + 1)
    except _STREAM_ERRORS as error:
        raise Unreadable(f"it is cut short or no {name.lower()[-3:]} file: {error}") from error
    if len(content) > most:
        raise Unreadable(f"it holds more than {most:,} bytes")
    return content


def _read_up_to(stream: Stream, most: int) -> bytes:
    """At most `most` bytes of a stream, read in parts: one large read would allocate memory for all of them."""
    content = bytearray()
    while len(content) < most and (part := stream.read(min(CHUNK, most - len(content)))):
        content += part
    return bytes(content)


def read_idx(content: bytes) -> np.ndarray:
    """The array in an IDX file, whose size must match its header."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise Unreadable("it does not begin like an IDX file")
    dtype, dimensions = np.dtype(_IDX_TYPES[content[2]]), content[3]
    if dimensions > MOST_DIMENSIONS:
        raise Unreadable(f"its head tells of {dimensions} dimensions, and {MOST_DIMENSIONS} are the most")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise Unreadable("it ends within its head")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) != start + math.prod(shape) * dtype.itemsize:
        sizes = " by ".join(map(str, shape))
        raise Unreadable(f"its head tells of {sizes} values, and {len(content) - start:,} bytes follow")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


PNG_START = b"\x89PNG\r\n\x1a\n"
_RGB = bytes([8, 2, 0, 0, 0])
"""The end of a PNG header: 8 bits a channel, red, green and blue, not interlaced."""


def read_png(content: bytes, width: int, height: int) -> np.ndarray:
    """The pixels [height, width, 3] of a PNG file of that size with 8 bits a channel.

    The checksums of its parts are not compared: the caller compares that of the pixels.
    """
    if not content.startswith(PNG_START):
        raise Unreadable("it does not begin like a PNG file")
    kind, header = next(_png_chunks(content), (b"", b""))
    if kind != b"IHDR" or header != struct.pack(">II", width, height) + _RGB:
        raise Unreadable(f"it is no PNG image of {width:,} by {height:,} pixels with 8 bits for red, green and blue")
    packed = b"".join(part for kind, part in _png_chunks(content) if kind == b"IDAT")
    size = height * (1 + 3 * width)
    try:
        unpacked = zlib.decompressobj().decompress(packed, size + 1)
    except zlib.error as error:
        raise Unreadable(f"its pixels cannot be unpacked: {error}") from error
    if len(unpacked) != size:
        raise Unreadable(f"its pixels take {'more' if len(unpacked) > size else 'less'} than {size:,} bytes")
    lines = np.frombuffer(unpacked, np.uint8).reshape(height, 1 + 3 * width)
    return _unfiltered(lines[:, 0], lines[:, 1:].reshape(height, width, 3))


def _png_chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The parts of a PNG file, each with its kind."""
    place = len(PNG_START)
    while place < len(content):
        if len(content) < place + 12:
            raise Unreadable("it is cut short")
        size = int.from_bytes(content[place : place + 4], "big")
        kind, part = content[place + 4 : place + 8], content[place + 8 : place + 8 + size]
        if len(part) < size:
            raise Unreadable("it is cut short")
        yield kind, part
        place += 12 + size


def _unfiltered(filters: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """The pixels of lines [height, width, 3] that are stored as differences; `filters` tell from what."""
    if filters.max(initial=0) > 4:
        raise Unreadable(f"a line of it has filter {filters.max()}, and 4 is the last")
    pixels = np.empty_like(lines)
    above = np.zeros_like(lines[0])
    for number, (kind, line) in enumerate(zip(filters.tolist(), lines, strict=True)):
        if kind < 3:
            pixels[number] = (line, np.cumsum(line, 0, np.uint8), line + above)[kind]
        else:
            pixels[number] = _from_neighbours(line, above, _average if kind == 3 else _paeth)
        above = pixels[number]
    return pixels


def _from_neighbours(line: np.ndarray, above: np.ndarray, predict: Callable[[int, int, int], int]) -> np.ndarray:
    """A line whose every pixel is stored as a difference from what its three neighbours predict."""
    made: list[list[int]] = []
    for differences, tops in zip(line.T.tolist(), above.T.tolist(), strict=True):
        channel: list[int] = []
        left = corner = 0
        for difference, top in zip(differences, tops, strict=True):
            left, corner = (difference + predict(left, top, corner)) % 256, top
            channel.append(left)
        made.append(channel)
    return np.array(made, np.uint8).T


def _average(left: int, top: int, corner: int) -> int:
    return (left + top) // 2


def _paeth(left: int, top: int, corner: int) -> int:
    """The neighbour that is closest to left + top - corner."""
    far_left, far_top, far_corner = abs(top - corner), abs(left - corner), abs(left + top - 2 * corner)
    if far_left <= far_top and far_left <= far_corner:
        return left
    return top if far_top <= far_corner else corner
