"""Signals as requests, so that an iteration is never cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
"""Ctrl-C, the request to end, the end of the terminal, and the signal that a cluster's scheduler can send before it
takes a machine away."""


class Interrupt:
    """A context in which the first of the signals sets `requested`.

    A Ctrl-C after that acts as it did before; other signals after that change nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that came."""
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.number is not None

    @property
    def exit_status(self) -> int:
        """The exit status of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (signal.SIGINT if self.number is None else self.number)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # no other thread may handle signals
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # set by nohup
                self._previous[number] = signal.signal(number, self._request) or signal.SIG_DFL
        return self

    def __exit__(self, *exception: object) -> None:
        for number in list(self._previous):
            self._restore(number)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
        self._restore(signal.SIGINT)

    def _restore(self, number: int) -> None:
        if number in self._previous:
            signal.signal(number, self._previous.pop(number))
