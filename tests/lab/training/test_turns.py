"""Who has a turn when: with stand-ins for trainers, which the loop's own tests replace by real ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from sab.lab.training import turns
from sab.lab.training.trainer import Trainer
from sab.lab.training.turns import by_turns


class Stand:
    """Ends after so many turns; is ready in every `every`-th look only, and fails in turn number `fails`."""

    def __init__(self, turns: int, every: int = 1, fails: int | None = None):
        self.turns, self.every, self.fails = turns, every, fails
        self.ending: str | None = None
        self.result: str | None = None
        self.taken = self.looks = 0

    def is_ready(self) -> bool:
        self.looks += 1
        return self.looks % self.every == 0

    def advance(self, interrupted: bool) -> None:
        if self.taken == self.fails:
            raise RuntimeError("out of memory")
        if interrupted or self.taken == self.turns:
            self.ending = "interrupted" if interrupted else "finished"
        else:
            self.taken += 1

    def finish(self) -> None:
        self.result = self.ending


def play(queue: Any, together: int, is_over: Any = lambda: False) -> list[tuple[Stand, Exception | None]]:
    return cast(Any, list(by_turns(cast("Iterator[Trainer]", iter(queue)), together, is_over)))


def test_the_next_of_the_queue_takes_the_place_of_one_that_ended() -> None:
    stands = [Stand(1), Stand(4), Stand(2)]
    order = [stands.index(stand) for stand, _ in play(stands, 2)]
    assert order == [0, 1, 0, 1, 1, 2, 1, 2, 1, 2]
    assert [(stand.taken, stand.result) for stand in stands] == [(1, "finished"), (4, "finished"), (2, "finished")]


def test_the_queue_may_keep_one_back() -> None:
    first, large = Stand(2), Stand(1)

    def queue() -> Iterator[Stand | None]:
        yield first
        while first.result is None:
            yield None
        yield large

    order = ["large" if stand is large else "first" for stand, _ in play(queue(), 2)]
    assert order == ["first"] * 3 + ["large"] * 2
    assert large.result == "finished"


def test_a_slow_one_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(turns.time, "sleep", pauses.append)
    slow, fast = Stand(2, every=4), Stand(5)
    order = "".join("s" if stand is slow else "f" for stand, _ in play([slow, fast], 2))
    assert order == "fffsfffss"
    assert (slow.taken, fast.taken) == (2, 5)
    assert pauses, "nobody was ready"


def test_one_that_fails_leaves_the_others_to_go_on() -> None:
    bad, good, last = Stand(9, fails=1), Stand(2), Stand(1)
    played = play([bad, good, last], 2)
    assert [(stand, str(error)) for stand, error in played if error is not None] == [(bad, "out of memory")]
    assert (bad.result, good.result, last.result) == (None, "finished", "finished")
