"""Signals as requests, so that an iteration is never cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
"""Ctrl-C, the request to end, the end of the terminal, and what a cluster's scheduler can be told to send before it
takes a machine away."""


class Interrupt:
    """While entered, the first of the signals sets `requested`.

    A Ctrl-C that follows acts as it did before; others that follow change nothing.
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
        """What a process that a signal ended tells its shell: 130 for Ctrl-C, 143 for the request to end."""
        return 128 + (signal.SIGINT if self.number is None else self.number)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # no other thread may handle signals
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # as nohup wants it
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
