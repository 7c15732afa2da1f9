"""Pixel by pixel CIFAR-10: what is on the photograph?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sab.errors import UserValueError
from sab.lab import data
from sab.lab.data.cifar10 import CLASSES, PIXELS, read_batch
from sab.lab.data.formats import Unreadable
from sab.lab.tasks.base import Headline, Split
from sab.lab.tasks.images import ImageTask
from sab.lab.tasks.labelled import accuracy_headline

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The classes, in the order of their numbers."""


@dataclass(frozen=True)
class CIFAR10(ImageTask):
    """The 1,024 pixels of a photograph in the order of scan lines, three numbers a step: red, green and blue."""

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "classify a picture from its 1,024 pixels, one a step; judged by accuracy (chance: 10%)"
    headline: ClassVar[Headline] = accuracy_headline(solved=0.7, chance=0.1)
    input_size: ClassVar[int] = 3
    output_size: ClassVar[int] = CLASSES
    recipe: ClassVar[Mapping[str, Any]] = {
        "k_trunc": 16,
        "k_top": 10,
        "k_att": 16,
        "iterations": 70_300,
        "eval_every": 703,
        "eval_batches": None,
        "checkpoint_every": 703,  # 100 epochs
    }

    @property
    def dataset(self) -> str:
        return "cifar10"

    @property
    def steps(self) -> int:
        return PIXELS

    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        *training, test = data.load(self.dataset, self.data_dir)
        try:
            read = [read_batch(content) for content in ([test] if split == "test" else training)]
        except Unreadable as trouble:
            raise UserValueError(f"the {split} files of cifar10 must hold its images; {trouble}.") from trouble
        images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
        train_count, valid_count, test_count = data.DATASETS[self.dataset].counts
        total = test_count if split == "test" else train_count + valid_count
        if len(images) != total:
            raise UserValueError(f"the {split} files of cifar10 must hold {total} images; they hold {len(images)}.")
        rows = {"train": slice(train_count), "valid": slice(train_count, None), "test": slice(None)}[split]
        return torch.from_numpy(np.ascontiguousarray(images[rows])), torch.from_numpy(labels[rows].copy())
