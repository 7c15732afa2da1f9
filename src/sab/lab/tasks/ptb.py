"""Penn Treebank, character by character."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sab.errors import UserValueError
from sab.lab import data
from sab.lab.tasks.base import SPLITS, Headline, Split
from sab.lab.tasks.characters import CharacterTask, bits_headline


@dataclass(frozen=True)
class PTB(CharacterTask):
    """Mikolov's Penn Treebank; words are `_` apart in his character version, which a blank stands for here."""

    name: ClassVar[str] = "ptb"
    summary: ClassVar[str] = (
        "predict the next character of Penn Treebank; judged by bits per character (without context: 4.34)"
    )
    headline: ClassVar[Headline] = bits_headline(solved=1.49, chance=4.34)
    symbols: ClassVar[str] = "\n #$&'*-./0123456789<>N\\abcdefghijklmnopqrstuvwxyz"
    start: ClassVar[str] = "\n"
    aliases: ClassVar[Mapping[str, str]] = {"_": " "}
    input_size: ClassVar[int] = len(symbols)
    output_size: ClassVar[int] = len(symbols)
    recipe: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1000,
        "k_trunc": 5,
        "k_top": 10,
        "k_att": 2,
        "lr": 2e-3,
        "batch_size": 32,
        "iterations": 156_700,  # 100 epochs
        "eval_every": 1567,
        "eval_batches": None,
        "checkpoint_every": 1567,
    }

    length: int = 100
    """How many characters a sequence has."""

    @property
    def dataset(self) -> str:
        return "ptb"

    def text(self, split: Split) -> bytes:
        place = SPLITS.index(split)
        prepared = self.prepare(data.load(self.dataset, self.data_dir)[place])
        expected = data.DATASETS[self.dataset].counts[place]
        if len(prepared) != expected:
            raise UserValueError(f"the {split} text of ptb must have {expected} characters; it has {len(prepared)}.")
        return prepared

    def prepare(self, text: bytes) -> bytes:
        """Lines without the blanks that Mikolov's word version has around them, their ends kept."""
        return text.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ")
