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
"""The extra of each package, by the name that it is imported by."""


def missing(package: str) -> str:
    """The sentence about a missing package and how to install it."""
    extra = EXTRAS[package]
    return f"{package} is missing; install the extra {extra!r}: pip install '.[{extra}]' in the repository"
