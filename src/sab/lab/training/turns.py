"""Runs that take turns, an iteration each; the next of a queue replaces one that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sab.lab.training.trainer import Trainer

PAUSE = 1e-4
"""Seconds between two looks for a device that is ready for an iteration."""


def by_turns(
    queue: Iterator[Trainer | None], together: int, is_over: Callable[[], bool]
) -> Iterator[tuple[Trainer, Exception | None]]:
    """Trains up to `together` begun trainers of the queue at a time, to their end; yields each after its turn.

    A trainer that has ended has its `result`, and the next of the queue replaces it. So it does where a turn failed;
    the error is yielded with the trainer. Once `is_over`, all end as interrupted, and the queue should open no more.
    The queue may give None where the next trainer needs more room than there is; it is asked again after a turn. A
    trainer whose device is still busy is passed over, so that a slow one does not delay the others.
    """
    active: list[Trainer] = []
    while True:
        while len(active) < together and (trainer := next(queue, None)) is not None:
            active.append(trainer)
        if not active:
            return
        ready = [trainer for trainer in active if is_over() or trainer.is_ready()]
        if not ready:
            time.sleep(PAUSE)
        for trainer in ready:
            error = None
            try:
                trainer.advance(is_over())
                if trainer.ending is not None:
                    trainer.finish()
            except Exception as caught:
                error = caught
            if error is not None or trainer.ending is not None:
                active.remove(trainer)
            yield trainer, error
