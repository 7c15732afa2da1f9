"""Files that somebody else packed, among them some that mean no good."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sab.lab.data import formats
from sab.lab.data.formats import Unreadable
from tests.lab import tiny

TEXT = b" the cat sat \n" * 50


def tar(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        if link is not None:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            packed.addfile(entry)
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return path


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_plain_and_packed_files(tmp_path: Path, suffix: str, pack: Any) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(pack(TEXT))
    assert formats.plain_name(path.name) == "text"
    assert formats.read(path, len(TEXT)) == TEXT
    with pytest.raises(Unreadable, match="it holds more than 699 bytes"):
        formats.read(path, len(TEXT) - 1)
    if suffix:
        path.write_bytes(pack(TEXT)[:-9])
        with pytest.raises(Unreadable, match=f"it is cut short or no {suffix} file"):
            formats.read(path, len(TEXT))
        path.write_bytes(b"something else")
        with pytest.raises(Unreadable, match=f"it is cut short or no {suffix} file"):
            formats.read(path, len(TEXT))


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_bomb_is_not_unpacked(tmp_path: Path, suffix: str, pack: Any) -> None:
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(pack(bytes(5_000_000)))
    assert path.stat().st_size < 100_000
    with pytest.raises(Unreadable, match="it holds more than 1,000 bytes"):
        formats.read(path, 1000)


def test_an_xz_file_may_not_ask_for_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_MEMORY", 2**20)
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(TEXT, preset=9))
    with pytest.raises(Unreadable, match=r"[Mm]emory"):
        formats.read(path, len(TEXT))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="it cannot be read: No such file or directory"):
        formats.read(tmp_path / "none", 1)


@pytest.mark.parametrize("pack", [lambda path, members: zipped(path.with_suffix(".zip"), members), tar])
def test_archives_give_a_file_by_the_end_of_its_name_and_write_nothing(tmp_path: Path, pack: Any) -> None:
    inside = {"../../evil/a.txt": b"a", "/root/b.txt.gz": gzip.compress(b"bb"), "folder/c.txt": b"c" * 9}
    path = pack(tmp_path / "packed.tgz", inside)
    assert formats.is_archive(path)
    assert formats.names_in_archive(path) == {"a.txt", "b.txt", "c.txt"}
    assert formats.read_from_archive(path, ["a.txt"], 5) == b"a"
    assert formats.read_from_archive(path, ["x", "b.txt"], 5) == b"bb"
    assert formats.read_from_archive(path, ["d.txt"], 5) is None
    with pytest.raises(Unreadable, match="it holds more than 5 bytes"):
        formats.read_from_archive(path, ["c.txt"], 5)
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(Unreadable, match="it is not a whole archive"):
        formats.names_in_archive(path)


def test_links_in_an_archive_are_passed_over(tmp_path: Path) -> None:
    path = tar(tmp_path / "packed.tar.gz", {}, link="a.txt")
    assert formats.read_from_archive(path, ["a.txt"], 10**6) is None


def test_an_archive_of_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MOST_IN_AN_ARCHIVE", 10)
    path = tar(tmp_path / "packed.tar.gz", {"a": bytes(11), "b": b"b"})
    with pytest.raises(Unreadable, match="it holds more than 10 bytes"):
        formats.read_from_archive(path, ["b"], 10)


def test_a_password_is_told_of(tmp_path: Path) -> None:
    path = zipped(tmp_path / "packed.zip", {"a": b"a"})
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + offset] |= 1  # it says that it is encrypted
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=r"it cannot be unpacked here: .*password"):
        formats.read_from_archive(path, ["a"], 10)


def test_idx() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(formats.read_idx(tiny.idx(array)), array)
    assert formats.read_idx(bytes([0, 0, 0x0C, 1, 0, 0, 0, 1, 0, 0, 1, 2])).tolist() == [258]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it does not begin like an IDX file"),
        (b"\x1f\x8b\x08\x00", "it does not begin like an IDX file"),
        (b"\0\0\x07\x01\0\0\0\0", "it does not begin like an IDX file"),
        (b"\0\0\x08\x03\0\0\0\x01", "it ends within its head"),
        (tiny.idx(np.zeros((2, 3)))[:-1], "its head tells of 2 by 3 values, and 5 bytes follow"),
        (tiny.idx(np.zeros((2, 3))) + b"!", "its head tells of 2 by 3 values, and 7 bytes follow"),
        (b"\0\0\x08\x21" + b"\0\0\0\x01" * 33 + b"a", "its head tells of 33 dimensions, and 32 are the most"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "its head tells of 4294967295 by 4294967295 by 4294967295 values"),
    ],
)
def test_wrong_idx(content: bytes, told: str) -> None:
    with pytest.raises(Unreadable, match=told):
        formats.read_idx(content)


# Archives that would take much memory


def test_a_long_head_in_a_tar_archive_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "packed.tar"
    with tarfile.open(path, "w") as packed:
        entry = tarfile.TarInfo("a.txt")
        entry.pax_headers = {"comment": "x" * 2 * formats.LARGEST_HEAD}
        packed.addfile(entry)
    with pytest.raises(Unreadable, match="what it tells of a file has more than 65,536 bytes"):
        formats.names_in_archive(path)


def test_a_tar_archive_that_points_back_is_not_followed(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("a.txt")
    head = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\xff" * 10 + b"\xfc\x00"  # a size below zero
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    path = tmp_path / "packed.tar"
    path.write_bytes(bytes(head) * 3)
    with pytest.raises(Unreadable):
        formats.names_in_archive(path)


def test_an_archive_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = dict.fromkeys("abc", b"")
    paths = [tar(tmp_path / "packed.tar.gz", members), zipped(tmp_path / "packed.zip", members)]
    for path in paths:
        assert formats.names_in_archive(path) == {"a", "b", "c"}
        monkeypatch.setattr(formats, "MOST_MEMBERS", 2)
        with pytest.raises(Unreadable, match="it holds more than 2 files and folders"):
            formats.names_in_archive(path)
        monkeypatch.undo()


def test_a_long_list_in_a_zip_archive_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "packed.zip", dict.fromkeys(("x" * 200, "y" * 200), b""))
    assert len(formats.names_in_archive(path)) == 2
    monkeypatch.setattr(formats, "LARGEST_LIST", 400)
    with pytest.raises(Unreadable, match="its list of files has more than 400 bytes"):
        formats.names_in_archive(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_ways_to_pack_that_unpack_much_at_once_are_not_read(tmp_path: Path, method: int) -> None:
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("a", b"a")
    with pytest.raises(Unreadable, match="'a' in it is packed by method"):
        formats.read_from_archive(path, ["a"], 10)


def test_a_packed_tar_archive_may_not_ask_for_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "packed.tar.xz"
    with tarfile.open(path, "w:xz", preset=9) as packed:
        packed.addfile(tarfile.TarInfo("a"))
    assert formats.names_in_archive(path) == {"a"}
    monkeypatch.setattr(formats, "MOST_MEMORY", 2**20)
    with pytest.raises(Unreadable, match=r"[Mm]emory"):
        formats.names_in_archive(path)


def test_a_file_in_an_archive_that_is_cut_short(tmp_path: Path) -> None:
    whole = tar(tmp_path / "packed.tgz", {"a": b"a" * 2000})
    path = tmp_path / "packed.tar"
    path.write_bytes(gzip.decompress(whole.read_bytes())[:1500])
    with pytest.raises(Unreadable, match=r"cut short|unexpected end"):
        formats.read_from_archive(path, ["a"], 3000)
