"""CIFAR-10: the official binary files, or the same made from PNG images and lists of labels."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import struct
import urllib.request
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sab.errors import UserError
from sab.lab import data
from sab.lab.data import DATASETS, DataFile, store
from sab.lab.data.cifar10 import batch_from_png, read_batch
from sab.lab.data.formats import Unreadable, read_png
from sab.lab.data.sources import OtherForm
from tests.lab import tiny
from tests.lab.data.test_formats import tar

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 3), np.uint8)


@pytest.mark.parametrize("filters", [[0], [1], [2], [3], [4], [4, 3, 2, 1, 0]], ids=str)
def test_an_image_with_any_filter(filters: list[int]) -> None:
    content = tiny.png(PIXELS, filters)
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(content))), PIXELS, "the test's own encoder is right")
    np.testing.assert_array_equal(read_png(content, 9, 12), PIXELS)


def test_an_image_as_another_library_writes_it() -> None:
    smooth = np.add.outer(np.arange(60), np.arange(40)).astype(np.uint8)[..., None] * np.array([1, 2, 3], np.uint8)
    made = io.BytesIO()
    Image.fromarray(smooth).save(made, "PNG")
    np.testing.assert_array_equal(read_png(made.getvalue(), 40, 60), smooth)


def with_pixels(unpacked: bytes, header: bytes | None = None) -> bytes:
    """A PNG file of 9 by 12 pixels whose lines are these."""
    header = struct.pack(">IIBBBBB", 9, 12, 8, 2, 0, 0, 0) if header is None else header
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(unpacked)))
    made = (struct.pack(">I", len(part)) + kind + part + bytes(4) for kind, part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


LINES = bytes(12 * 28)
GOOD = with_pixels(LINES)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GIF89a", "it does not begin like a PNG file"),
        (GOOD[:8], "it is no PNG image of 9 by 12 pixels with 8 bits for red, green and blue"),
        (GOOD[:-9], "it is cut short"),
        (GOOD + b"IDAT", "it is cut short"),
        (with_pixels(LINES, struct.pack(">IIBBBBB", 9, 13, 8, 2, 0, 0, 0)), "it is no PNG image of 9 by 12 pixels"),
        (with_pixels(LINES, struct.pack(">IIBBBBB", 9, 12, 16, 2, 0, 0, 0)), "it is no PNG image of 9 by 12 pixels"),
        (with_pixels(LINES, struct.pack(">IIBBBBB", 9, 12, 8, 2, 0, 0, 1)), "it is no PNG image of 9 by 12 pixels"),
        (with_pixels(LINES[:-1]), "its pixels take less than 336 bytes"),
        (with_pixels(bytes(10**7)), "its pixels take more than 336 bytes"),
        (GOOD.replace(zlib.compress(LINES)[:4], b"????"), "its pixels cannot be unpacked"),
        (with_pixels(b"\5" + LINES[1:]), "a line of it has filter 5, and 4 is the last"),
    ],
)
def test_what_is_no_such_image(content: bytes, reason: str) -> None:
    assert not read_png(GOOD, 9, 12).any()
    with pytest.raises(Unreadable, match=reason):
        read_png(content, 9, 12)


def photographs(count: int, seed: int) -> tuple[bytes, bytes, list[int]]:
    """A binary file, and the same as an image and a list of labels."""
    content = tiny.photographs(count, seed)
    images, labels = read_batch(content)
    return content, tiny.png(images, [1, 4, 0]), labels.tolist()


def test_the_same_bytes_from_either_form() -> None:
    content, image, labels = photographs(5, 1)
    images, read = read_batch(content)
    assert images.shape == (5, 1024, 3)
    assert images[3, 40].tolist() == [content[3 * 3073 + 1 + channel * 1024 + 40] for channel in range(3)]
    assert read.tolist() == labels == list(content[::3073])
    assert batch_from_png(image, json.dumps([7, 7, *labels, 7]).encode(), first=2, count=5) == content


@pytest.mark.parametrize(
    "listed", [b"[1, 2", b"[" * 10**5, b"7", b"{}", b"[1, 2, 3, 4]", b"[1, 2, 3, 4, 10]", b"[1, 2, 3, 4, true]"]
)
def test_what_is_no_list_of_labels(listed: bytes) -> None:
    _, image, _ = photographs(5, 1)
    with pytest.raises(Unreadable, match=r"^its list of labels "):
        batch_from_png(image, listed, first=0, count=5)


def test_a_file_that_is_no_images() -> None:
    with pytest.raises(Unreadable, match="its 3,074 bytes are no images of 3,073 bytes each"):
        read_batch(bytes(3074))
    with pytest.raises(Unreadable, match="it has a label of 10, and 9 is the last class"):
        read_batch(b"\n" * 3073)


# From the user's folder or archive, and from the public source

COUNTS = {"data_batch_1": 4, "data_batch_2": 3, "test_batch": 3}
FILES = [f"{name}.bin" for name in COUNTS]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a small package; CIFAR-10 is a data set of its size."""
    inside: dict[str, bytes] = {}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    files: list[DataFile] = []
    for seed, (name, count) in enumerate(COUNTS.items()):
        content, image, own = photographs(count, seed)
        split = "test" if name.startswith("test") else "train"
        make = functools.partial(batch_from_png, first=len(labels[split]), count=count)
        form = OtherForm((f"{name}.png", f"{split}_lables.json"), 10**5, make)
        sha256 = hashlib.sha256(content).hexdigest()
        files.append(DataFile(f"{name}.bin", len(content), sha256, other_form=form))
        inside[f"{name}.png"] = image
        inside[f"{name}.bin"] = content
        labels[split] += own
    inside |= {f"{split}_lables.json": json.dumps(own).encode() for split, own in labels.items()}
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], files=tuple(files)))
    return inside


def without(inside: dict[str, bytes], *endings: str) -> dict[str, bytes]:
    return {name: content for name, content in inside.items() if not name.endswith(endings)}


def loaded(folder: Path) -> list[bytes]:
    return list(data.load("cifar10", folder))


def write(folder: Path, inside: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in inside.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["folder", "package", "official"])
def test_from_either_form(package: dict[str, bytes], tmp_path: Path, kind: str) -> None:
    source = {
        "folder": lambda: write(tmp_path / "package", without(package, ".bin")),
        "package": lambda: tar(
            tmp_path / "a.tgz", {f"package/{name}": one for name, one in without(package, ".bin").items()}
        ),
        "official": lambda: tar(
            tmp_path / "cifar-10-binary.tar.gz", {f"bin/{name}": one for name, one in without(package, ".png").items()}
        ),
    }[kind]()
    _, paths = data.get("cifar10", tmp_path / "here", source)
    assert [path.name for path in paths] == FILES
    assert loaded(tmp_path / "here") == [package[name] for name in FILES]
    assert sorted(path.name for path in (tmp_path / "here" / "cifar10").iterdir()) == sorted(FILES)


def told(call: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_package_that_is_not_whole_or_another(package: dict[str, bytes], tmp_path: Path) -> None:
    here, images = tmp_path / "here", without(package, ".bin")
    source = write(tmp_path / "no-labels", without(images, ".json"))
    assert told(data.get, "cifar10", here, source) == f"from '{source}' must hold data_batch_1.bin too; it does not."
    source = write(tmp_path / "swapped", {**images, "data_batch_2.png": images["test_batch.png"]})
    sentence = told(data.get, "cifar10", here, source)
    assert sentence.startswith(
        f"from '{source}/data_batch_2.png' must hold data_batch_2.bin of cifar10; its SHA-256 is "
    )
    assert sentence.endswith(", so it was not used.")
    source = write(tmp_path / "large", {**images, "test_lables.json": bytes(10**6)})
    assert "test_batch.bin of cifar10; it holds more than 100,000 bytes" in told(data.get, "cifar10", here, source)
    source = write(tmp_path / "pickles", {"data_batch_1": b"", "test_batch": b""})
    assert told(data.get, "cifar10", here, source).endswith("; it holds none of them.")


def test_an_archive_of_several_files_is_downloaded_once(
    package: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tar(tmp_path / "cifar-10-binary.tar.gz", without(package, ".png"))
    urls = ((tmp_path / "nowhere.tar.gz").as_uri(), archive.as_uri())
    files = tuple(replace(file, urls=urls, archive_size=archive.stat().st_size) for file in DATASETS["cifar10"].files)
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], files=files))
    asked: list[str] = []

    def urlopen(request: Any, **options: Any) -> Any:
        asked.append(request.full_url)
        return urllib.request.urlopen(request, **options)

    monkeypatch.setattr(store, "urlopen", urlopen)
    data.get("cifar10", tmp_path / "here")
    assert loaded(tmp_path / "here") == [package[name] for name in FILES]
    assert asked.count(urls[1]) == 1
    assert sorted(path.name for path in (tmp_path / "here" / "cifar10").iterdir()) == sorted(FILES), "no remains"
