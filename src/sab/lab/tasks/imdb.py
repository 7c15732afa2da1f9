"""Film reviews, byte by byte: good or bad?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sab.errors import UserValueError, check_int
from sab.lab import data
from sab.lab.data.formats import Unreadable
from sab.lab.data.rows import read_csv
from sab.lab.tasks.base import SPLITS, Headline, Split
from sab.lab.tasks.labelled import LabelledTask, accuracy_headline, labels_and_lengths, padded

COLUMNS = ("text", "label", "source")
SOURCE = "imdb"
"""The other reviews of the file are from Rotten Tomatoes."""
LABELS = ("0", "1")
COMPARED = 1000
"""Reviews that agree in so many bytes count as one."""
LONGEST = 13_704
"""How many bytes the longest review has."""


@dataclass(frozen=True)
class IMDB(LabelledTask):
    """The first bytes of a review, one a step; its last one predicts whether the review is good."""

    name: ClassVar[str] = "imdb"
    summary: ClassVar[str] = "tell good film reviews from bad by their first bytes; judged by accuracy (chance: 50%)"
    headline: ClassVar[Headline] = accuracy_headline(solved=0.85, chance=0.5)
    encoding = "onehot"
    input_size: ClassVar[int] = 256
    output_size: ClassVar[int] = len(LABELS)
    recipe: ClassVar[Mapping[str, Any]] = {
        "iterations": 3_100,  # 10 epochs
        "eval_every": 310,
        "eval_batches": None,
        "checkpoint_every": 310,
    }

    length: int = 1000
    """How many bytes of a review are seen at most."""

    def __post_init__(self) -> None:
        length = check_int("length", self.length, 1, maximum=LONGEST)
        object.__setattr__(self, "length", length)  # a plain int, for JSON

    @property
    def dataset(self) -> str:
        return "imdb"

    @property
    def steps(self) -> int:
        return self.length

    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        counts = data.DATASETS[self.dataset].counts
        reviews = self._reviews()
        if len(reviews) != sum(counts):
            problem = f"must hold {sum(counts)} different reviews; it holds {len(reviews)}"
            raise UserValueError(f"the file of {self.dataset} {problem}.")
        end = list(accumulate(counts))[SPLITS.index(split)]
        rows = slice(end - counts[SPLITS.index(split)], end)
        labels = [label for _, label in reviews[rows]]
        texts = [np.frombuffer(text[: self.length], np.uint8) for text, _ in reviews[rows]]
        return padded(texts, self.length, np.uint8), labels_and_lengths(labels, texts)

    def _reviews(self) -> list[tuple[bytes, int]]:
        """The different reviews with their labels, in the order of their hashes.

        A hash is that of the content, so that neither a library's version nor the order of the file changes the split.
        """
        (content,) = data.load(self.dataset, self.data_dir)
        try:
            rows = read_csv(content, COLUMNS)
        except Unreadable as trouble:
            name = data.DATASETS[self.dataset].files[0].name
            raise UserValueError(f"{name} must hold the reviews of {self.dataset}; {trouble}.") from trouble
        found: dict[bytes, tuple[bytes, int]] = {}
        for text, label, source in rows:
            if source != SOURCE:
                continue
            if label not in LABELS or not text:
                raise UserValueError(f"a review of {self.dataset} must have a text and a label 0 or 1; one has not.")
            content = text.encode()
            found.setdefault(hashlib.sha256(content[:COMPARED]).digest(), (content, LABELS.index(label)))
        return [found[digest] for digest in sorted(found)]

    def encode(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return inputs.t().long()
