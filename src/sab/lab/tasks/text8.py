"""text8: Wikipedia in 27 symbols, or the part of it that can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, get_args

from sab.errors import UserValueError, check_choice
from sab.lab import data
from sab.lab.tasks.base import SPLITS, Headline, Split
from sab.lab.tasks.characters import CharacterTask, bits_headline

Part = Literal["full", "prefix"]


@dataclass(frozen=True)
class Text8(CharacterTask):
    """90 million characters of text8 to train on, 5 and 5 million to judge by; of its prefix the first 64 million."""

    name: ClassVar[str] = "text8"
    summary: ClassVar[str] = "predict the next character of text8; judged by bits per character (without context: 4.12)"
    headline: ClassVar[Headline] = bits_headline(solved=1.56, chance=4.12)
    symbols: ClassVar[str] = " abcdefghijklmnopqrstuvwxyz"
    start: ClassVar[str] = " "
    input_size: ClassVar[int] = len(symbols)
    output_size: ClassVar[int] = len(symbols)
    recipe: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1000,
        "k_trunc": 5,
        "k_top": 5,
        "k_att": 5,
        "batch_size": 64,
        "iterations": 234_360,  # 30 epochs
        "eval_every": 7812,
        "eval_batches": None,
        "checkpoint_every": 1000,
    }

    length: int = 180
    """How many characters a sequence has."""
    part: Part = "full"
    """Which part of text8: all 100 million characters, or (prefix) the first 74,090,640 with a split of their own;
    every figure from those is labelled `text8 prefix`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("part", self.part, get_args(Part))

    @property
    def dataset(self) -> str:
        return "text8" if self.part == "full" else "text8 prefix"

    def text(self, split: Split) -> bytes:
        if self.part == "full" and not data.has("text8", self.data_dir) and data.has("text8 prefix", self.data_dir):
            where = str(data.folder_of(self.data_dir))
            raise UserValueError(
                f"part must be prefix where {where!r} holds the text8 prefix alone; got 'full'.", "part"
            )
        (text,) = data.load(self.dataset, self.data_dir)
        place = SPLITS.index(split)
        ends = [0, *accumulate(data.DATASETS[self.dataset].counts)]
        return text[ends[place] : ends[place + 1]]
