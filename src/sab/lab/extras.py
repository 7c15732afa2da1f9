"""The packages that only some commands need, and the extra that installs each."""

from __future__ import annotations

EXTRAS = {
    "tyro": "train",
    "rich": "train",
    "safetensors": "train",
    "tensorboard": "train",
    "matplotlib": "report",
    "ray": "ray",
}
"""By the name that a package is imported by."""


def missing(package: str) -> str:
    """The sentence that tells what to do about one that is not there."""
    extra = EXTRAS[package]
    return f"{package} is missing; install the extra {extra!r}: pip install '.[{extra}]' in the repository"
