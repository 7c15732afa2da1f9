"""One process at a time on the folder of a run."""

from __future__ import annotations

import datetime
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from sab.errors import UserValueError
from sab.lab.files import writing
from sab.lab.locks import Lock
from sab.lab.stored import as_dataclass, read_json

NAME = ".lock"
"""The file in the run's folder that tells who is training it; it is gone when nobody is, unless that was killed."""


@dataclass(frozen=True)
class Holder:
    """A process that trains a run."""

    host: str
    pid: int
    since: str

    @classmethod
    def here(cls) -> Holder:
        """This process, from now on."""
        return cls(socket.gethostname(), os.getpid(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def may_live(self) -> bool:
        """Whether it has not ended, as far as this machine can tell."""
        if self.host != socket.gethostname():
            return True
        if os.name != "posix":  # where to ask would be to end it
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True


class RunLock:
    """The folder of a run, while this process has it.

    The system tells whether another one has it, and forgets one that was killed. Where it has no locks, as on some
    network drives, what the file says counts: a process that has ended on this machine has it no more.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = Lock(folder / NAME)

    @property
    def exists(self) -> bool:
        """Whether some process has the folder, or had it when it was killed."""
        return self._lock.path.exists()

    def take(self) -> None:
        """Has the folder from here on; where another process has it, that is a mistake that names it."""
        with writing(self._folder, "out"):
            is_free = self._lock.take()
            holder = self._read()
            if is_free and not self._lock.is_certain and holder is not None and holder.may_live:
                self._lock.release()
                is_free = False
            if not is_free:
                self._refuse(holder)
            self._lock.write(json.dumps(asdict(Holder.here())) + "\n")

    def release(self) -> None:
        """Lets others have it."""
        self._lock.remove()

    def _read(self) -> Holder | None:
        """Who says to have the folder; nobody where that is just being written."""
        try:
            return as_dataclass(Holder, read_json(self._lock.path))
        except (OSError, ValueError):
            return None

    def _refuse(self, holder: Holder | None) -> None:
        who = "another process" if holder is None else f"process {holder.pid} on {holder.host}, since {holder.since},"
        advice = "" if self._lock.is_certain else f"; if that has ended, remove {NAME} there"
        wanted = f"out {str(self._folder)!r} must be a run that nobody else is training"
        raise UserValueError(f"{wanted}; {who} is{advice}.", "out")
