"""Runs that take turns: an iteration of each, and the next of a queue where one has come to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sab.lab.training.trainer import Trainer

PAUSE = 1e-4
"""Seconds after which one looks again whether a device has room for an iteration."""


def by_turns(
    queue: Iterator[Trainer | None], together: int, is_over: Callable[[], bool]
) -> Iterator[tuple[Trainer, Exception | None]]:
    """Brings up to `together` trainers of the queue, which have begun, to their end; yields each after its turn.

    One that has ended has its `result`, and the next of the queue takes its place; so it does where a turn failed,
    with the error beside the trainer. Once `is_over`, all end as interrupted; to open no further ones is the queue's
    part. Where it gives None, the next one needs more room than there is, and it is asked again after a turn. A trainer
    whose device still has enough to do is passed over, so that a slow one keeps no other waiting.
    """
    going: list[Trainer] = []
    while True:
        while len(going) < together and (trainer := next(queue, None)) is not None:
            going.append(trainer)
        if not going:
            return
        ready = [trainer for trainer in going if is_over() or trainer.is_ready()]
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
                going.remove(trainer)
            yield trainer, error
