"""Character language modelling: predict the next character of a text; measured in bits per character."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sab.errors import UserValueError, check_bool, check_int
from sab.lab.tasks.base import Headline, Split, generator_for
from sab.lab.tasks.stored import StoredTask

SHIFTS = 2**61
"""The first number that an epoch's shift is drawn with; those of batches and epochs are far below."""


def bits_headline(solved: float, chance: float) -> Headline:
    """The headline metric of a character task."""
    return Headline(
        metric="bits_per_character",
        label="bits per character",
        short="bpc",
        higher_is_better=False,
        solved=solved,
        chance=chance,
        spec=".3f",
    )


@dataclass(frozen=True)
class CharacterTask(StoredTask):
    """Sequences of a text, one after the other; each step predicts the next character."""

    symbols: ClassVar[str]
    """The known characters, in the order of their numbers."""
    start: ClassVar[str]
    """The character that is assumed before the start of a text."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other characters that users may write for known ones."""
    encoding: ClassVar[str] = "onehot"  # pyright: ignore[reportIncompatibleVariableOverride]

    length: int = 100
    """How many characters a sequence has."""
    shifted: bool = field(default=False, kw_only=True)
    """Whether the training sequences of an epoch begin some characters later in the text, as many for all of them and
    others in every epoch, fewer than a sequence has; the last one does not go beyond the text. Without it they are the
    same sequences in all epochs."""
    carried: int = field(default=1, kw_only=True)
    """How many training sequences in a row are read with the state carried from one to the next, memory included; then
    it begins empty again. The memory keeps as many microstates as a sequence has, and the text is read in order, in as
    many streams as a batch has sequences. With 1 every sequence begins empty, and their order is random."""

    def __post_init__(self) -> None:
        check_bool("shifted", self.shifted)
        for option in ("length", "carried"):
            object.__setattr__(self, option, check_int(option, getattr(self, option), 1))  # a plain int, for JSON

    @property
    def steps(self) -> int:
        return self.length

    @abstractmethod
    def text(self, split: Split) -> bytes:
        """The text of a split, as `prepare` leaves it."""

    def prepare(self, text: bytes) -> bytes:
        """A user's text in the form of the data set."""
        return text

    def encode(self, text: str, option: str, skip_unknown: bool = False) -> Tensor:
        """The numbers of a text's characters, uint8; an unknown one is an error in `option`, or is skipped."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        table = np.full(128, len(self.symbols), np.uint8)
        table[[ord(symbol) for symbol in self.symbols]] = np.arange(len(self.symbols))
        for alias, symbol in self.aliases.items():
            table[ord(alias)] = self.symbols.index(symbol)
        numbers = np.where(codes < len(table), table[np.minimum(codes, len(table) - 1)], len(self.symbols))
        unknown = numbers == len(self.symbols)
        if not skip_unknown and unknown.any():
            place = int(unknown.argmax())
            known = "".join(symbol for symbol in self.symbols if symbol.isprintable())
            raise UserValueError(
                f"{option} must hold only characters that {self.dataset} has, {known!r} and no other; "
                f"got {text[place]!r} as character {place + 1}.",
                option,
            )
        return torch.from_numpy(numbers[~unknown].astype(np.uint8))

    def decode(self, numbers: Any) -> str:
        """The text of some numbers."""
        return "".join(self.symbols[number] for number in numbers)

    def examples(self, split: Split) -> tuple[Tensor, Tensor]:
        characters = self.characters(split)
        count = (len(characters) - 1) // self.length
        if count == 0:
            raise UserValueError(
                f"length must be at most {len(characters) - 1}, what the {split} text of {self.dataset} allows; "
                f"got {self.length}.",
                "length",
            )
        inputs, targets = characters[: count * self.length], characters[1 : count * self.length + 1]
        return inputs.view(count, self.length), targets.view(count, self.length)

    def assemble(self, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return inputs.t().long(), targets.t().long()

    def send(self, seed: int, index: int, batch_size: int, split: Split, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The numbers of the batch's examples or, where they are shifted, the places in the text that they begin at."""
        count = self._check_batch_size(batch_size, split)
        epoch, place = divmod(index, count // batch_size)
        if self.carries_state and split == "train":
            rows = torch.arange(batch_size) * (count // batch_size) + place
        else:
            (rows,) = super().send(seed, index, batch_size, split, dtype)
        if not self._is_shifted(split):
            return (rows,)
        shift = torch.randint(self.length, (), generator=generator_for(seed, split, SHIFTS + epoch))
        return ((rows * self.length + shift).clamp_(max=(count - 1) * self.length),)  # the last ends with the text

    def receive(self, sent: tuple[Tensor, ...], split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self._is_shifted(split):
            return super().receive(sent, split, dtype)
        (starts,) = sent
        inputs, targets = self.examples_on(split, starts.device)
        places = starts + torch.arange(self.length, device=starts.device).unsqueeze(1)
        return inputs.flatten()[places].long(), targets.flatten()[places].long()

    @property
    def carries_state(self) -> bool:
        return self.carried > 1

    def continues(self, index: int, batch_size: int) -> bool:
        return index % self.batches_per_epoch(batch_size) % self.carried != 0

    def _is_shifted(self, split: Split) -> bool:
        return self.shifted and split == "train"

    def whole(
        self, split: Split, batch_size: int, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every character but the first is a target once; the last sequence may be shorter."""
        yield from self.sequences(self.characters(split).to(device), batch_size)

    def sequences(self, characters: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same of any text, [N]."""
        edge = (len(characters) - 1) // self.length * self.length
        inputs, targets = (tensor[:edge].view(-1, self.length).t() for tensor in (characters, characters[1:]))
        for start in range(0, inputs.shape[1], batch_size):
            rows = slice(start, start + batch_size)
            yield inputs[:, rows].long(), targets[:, rows].long()
        rest = characters[edge:].long().unsqueeze(1)
        if len(rest) > 1:
            yield rest[:-1], rest[1:]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"bits_per_character": self.loss(outputs, targets) / math.log(2)}

    def characters(self, split: Split) -> Tensor:
        """The numbers of the characters of a split, uint8."""
        table = np.full(256, len(self.symbols), np.uint8)
        table[list(self.symbols.encode())] = np.arange(len(self.symbols))
        numbers = table[np.frombuffer(self.text(split), np.uint8)]
        if numbers.max() >= len(self.symbols):
            raise UserValueError(f"the {split} text of {self.dataset} must hold its symbols alone; it does not.")
        return torch.from_numpy(numbers)
