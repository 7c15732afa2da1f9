"""CIFAR-10: its official binary files, and the same made from a package that has the images as PNG."""

from __future__ import annotations

import json

import numpy as np

from sab.lab.data.formats import Unreadable, read_png

PIXELS = 32 * 32
CLASSES = 10
IN_A_FILE = 10_000
"""How many images a file holds."""
RECORD = 1 + 3 * PIXELS
"""How many bytes an image has: its class, then all its red, green and blue values, each along scan lines."""


def read_batch(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The images [N, PIXELS, 3] and the labels [N] of a binary file."""
    if len(content) % RECORD:
        raise Unreadable(f"its {len(content):,} bytes are no images of {RECORD:,} bytes each")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    labels = records[:, 0]
    if labels.max(initial=0) >= CLASSES:
        raise Unreadable(f"it has a label of {labels.max()}, and {CLASSES - 1} is the last class")
    return records[:, 1:].reshape(-1, 3, PIXELS).transpose(0, 2, 1), labels


def batch_from_png(image: bytes, labels: bytes, first: int, count: int = IN_A_FILE) -> bytes:
    """A binary file from a PNG image of one picture a line and a JSON list of labels, from number `first` on."""
    pixels = read_png(image, PIXELS, count)
    try:
        listed = json.loads(labels)
    except (ValueError, RecursionError) as error:
        raise Unreadable("its list of labels is no JSON") from error
    chosen = listed[first : first + count] if isinstance(listed, list) else []
    if len(chosen) != count or not all(type(label) is int and 0 <= label < CLASSES for label in chosen):
        raise Unreadable(f"its list of labels has no {count:,} classes from number {first:,} on")
    planes = pixels.transpose(0, 2, 1).reshape(count, 3 * PIXELS)
    return np.concatenate([np.array(chosen, np.uint8)[:, None], planes], axis=1).tobytes()
