"""Training sequences that begin elsewhere in the text in every epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sab.errors import UserError
from sab.lab.tasks import PTB, CharacterTask, Text8

pytestmark = pytest.mark.usefixtures("tiny_data")
FLOAT = torch.float32
SIZE = 5
both = pytest.mark.parametrize(
    "task", [PTB(length=7, shifted=True), Text8(length=31, part="prefix", shifted=True)], ids=lambda task: task.name
)


def starts(task: CharacterTask, epoch: int, seed: int = 3) -> list[int]:
    """Where the sequences of an epoch begin, in their order."""
    batches = task.batches_per_epoch(SIZE)
    sent = [task.send(seed, epoch * batches + index, SIZE, "train", FLOAT) for index in range(batches)]
    return torch.cat([places for (places,) in sent]).tolist()


def shift_of(task: CharacterTask, epoch: int, seed: int) -> int:
    return min(starts(task, epoch, seed)) % task.length


@both
def test_an_epoch_has_a_shift_of_its_own(task: CharacterTask) -> None:
    last = (task.count("train") - 1) * task.length
    shifts = set()
    for epoch in range(6):
        found = starts(task, epoch)
        assert len(set(found)) == len(found)
        assert 0 <= min(found) <= max(found) <= last
        inside = [start for start in found if start < last]
        assert len(inside) >= len(found) - 1, "all but the one that ends with the text"
        (shift,) = {start % task.length for start in inside}
        shifts.add(shift)
        assert found == starts(task, epoch)
        assert found != starts(task, epoch, seed=4)
    assert len(shifts) > 3
    assert [shift_of(task, epoch, 3) for epoch in range(6)] != [shift_of(task, epoch, 4) for epoch in range(6)]


@both
@pytest.mark.parametrize("index", [0, 1, 40])
def test_a_batch_is_pieces_of_the_text(task: CharacterTask, index: int) -> None:
    text = task.characters("train").long()
    inputs, targets = task.batch(3, index, SIZE)
    (places,) = task.send(3, index, SIZE, "train", FLOAT)
    assert inputs.shape == targets.shape == (task.length, SIZE)
    for column, start in enumerate(places.tolist()):
        assert torch.equal(inputs[:, column], text[start : start + task.length])
        assert torch.equal(targets[:, column], text[start + 1 : start + task.length + 1])


@both
@pytest.mark.parametrize("split", ["valid", "test"])
def test_what_it_is_judged_by_stays_where_it_is(task: CharacterTask, split: str) -> None:
    plain = replace(task, shifted=False)
    for one, other in zip(task.batch(0, 1, 3, split), plain.batch(0, 1, 3, split), strict=True):  # pyright: ignore
        assert torch.equal(one, other)


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_the_order_is_that_of_plain_sequences(seed: int, epoch: int) -> None:
    """A shift of 0 gives what the task gives without it."""
    task = PTB(length=7, shifted=True)
    index = epoch * task.batches_per_epoch(SIZE)
    (places,) = task.send(seed, index, SIZE, "train", FLOAT)
    (rows,) = replace(task, shifted=False).send(seed, index, SIZE, "train", FLOAT)
    shift = min(places - rows * task.length).item()
    last = (task.count("train") - 1) * task.length
    assert 0 <= shift < task.length
    assert torch.equal(places, (rows * task.length + shift).clamp(max=last))


def test_it_is_a_switch_and_part_of_the_label() -> None:
    assert PTB(length=7, shifted=True).label == "ptb-7-shifted"
    assert PTB(length=7).label == "ptb-7"
    with pytest.raises(UserError, match="shifted must be"):
        PTB(shifted=1)  # pyright: ignore[reportArgumentType]
