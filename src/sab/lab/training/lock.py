"""Lets one process at a time use the folder of a run."""

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
"""The file in the run's folder that names the process training it. A killed process leaves it behind, unlocked."""


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
    def may_be_running(self) -> bool:
        """Whether the process may still be running, as far as this machine can tell."""
        if self.host != socket.gethostname():
            return True
        if os.name != "posix":  # there os.kill would end it
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True


class RunLock:
    """The lock of a run's folder.

    The system releases the lock of a killed process. Where it supports no locks, as on some network drives, the file's
    text counts: the folder is locked while the process that it names may be running.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = Lock(folder / NAME)

    @property
    def exists(self) -> bool:
        """Whether a process uses the folder, or did when it was killed."""
        return self._lock.path.exists()

    def take(self) -> None:
        """Locks the folder; raises an error that names the other process where there is one."""
        with writing(self._folder, "out"):
            is_free = self._lock.take()
            holder = self._read()
            if is_free and not self._lock.is_supported and holder is not None and holder.may_be_running:
                self._lock.release()
                is_free = False
            if not is_free:
                self._refuse(holder)
            self._lock.write(json.dumps(asdict(Holder.here())) + "\n")

    def release(self) -> None:
        """Unlocks the folder."""
        self._lock.remove()

    def _read(self) -> Holder | None:
        """The process that the file names; None while the file is being written."""
        try:
            return as_dataclass(Holder, read_json(self._lock.path))
        except (OSError, ValueError):
            return None

    def _refuse(self, holder: Holder | None) -> None:
        who = "another process" if holder is None else f"process {holder.pid} on {holder.host}, since {holder.since},"
        advice = "" if self._lock.is_supported else f"; if that has ended, remove {NAME} there"
        wanted = f"out {str(self._folder)!r} must be a run that nobody else is training"
        raise UserValueError(f"{wanted}; {who} is{advice}.", "out")
