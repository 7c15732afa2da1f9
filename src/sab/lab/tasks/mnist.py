"""Pixel by pixel MNIST: which digit was it?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sab.errors import UserValueError, check_bool
from sab.lab import data
from sab.lab.data.formats import read_idx
from sab.lab.tasks.base import Headline, Split
from sab.lab.tasks.images import ImageTask

PIXELS = 28 * 28
DIGITS = 10


@dataclass(frozen=True)
class MNIST(ImageTask):
    """The 784 pixels of a digit, one a step in the order of scan lines, from 0 to 1; the last step predicts it."""

    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "classify a digit from its 784 pixels, one a step; judged by accuracy (chance: 11.35%)"
    headline: ClassVar[Headline] = Headline(
        metric="accuracy",
        label="accuracy",
        short="accuracy",
        higher_is_better=True,
        solved=0.97,
        chance=0.1135,  # the share of the commonest digit in the test images
        spec=".1%",
    )
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = DIGITS
    recipe: ClassVar[Mapping[str, Any]] = {
        "k_trunc": 14,
        "k_top": 10,
        "k_att": 14,
        "iterations": 78_100,
        "eval_every": 781,
        "eval_batches": None,
        "checkpoint_every": 781,  # 100 epochs
    }

    permuted: bool = False
    """Whether the pixels of all images come in one other, fixed order."""

    def __post_init__(self) -> None:
        check_bool("permuted", self.permuted)

    @property
    def dataset(self) -> str:
        return "mnist"

    @property
    def title(self) -> str:
        return "permuted mnist" if self.permuted else "mnist"

    @property
    def steps(self) -> int:
        return PIXELS

    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        contents = data.load(self.dataset, self.data_dir)
        train_count, valid_count, test_count = data.DATASETS[self.dataset].counts
        images, labels = (read_idx(content) for content in (contents[2:] if split == "test" else contents[:2]))
        total = test_count if split == "test" else train_count + valid_count
        if images.shape != (total, 28, 28) or labels.shape != (total,) or labels.max() >= DIGITS:
            raise UserValueError(f"the {split} files of mnist must hold {total} images of 28 by 28; they do not.")
        rows = {"train": slice(train_count), "valid": slice(train_count, None), "test": slice(None)}[split]
        pixels = images.reshape(total, PIXELS)[rows]
        chosen = pixels[:, permutation()] if self.permuted else pixels.copy()
        return torch.from_numpy(chosen).unsqueeze(-1), torch.from_numpy(labels[rows].copy())


def permutation() -> np.ndarray:
    """The order of the pixels in permuted MNIST; it comes from a hash, so that no library's version changes it."""
    return np.array(
        sorted(range(PIXELS), key=lambda pixel: hashlib.sha256(f"permuted mnist {pixel}".encode()).digest())
    )
