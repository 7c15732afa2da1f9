"""What came of the faults, in results.jsonl: a line for each kind, written where FAULTS_RESULTS names the file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sab.lab.files import write_text
from sab.lab.locks import locked
from sab.lab.training.run import provenance

Record = Callable[..., None]


@pytest.fixture
def record() -> Record:
    """Keeps what came of a kind of fault, in the place of what did before."""
    started = time.monotonic()

    def keep(fault: str, times: int, outcome: str, **more: Any) -> None:
        named = os.environ.get("FAULTS_RESULTS")
        if named is None:
            return
        path, found = Path(named), provenance(torch.device("cpu"))
        line = {"fault": fault, "times": times, "outcome": outcome, **more}
        line["seconds"] = round(time.monotonic() - started, 1)
        line |= {"commit": found.commit, "versions": found.versions, "machine": platform.platform()}
        line["cores"] = os.cpu_count()
        line["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with locked(path.parent):
            known = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
            lines = [*(one for one in known if one["fault"] != fault), line]
            lines.sort(key=lambda one: one["fault"])
            write_text(path, "".join(json.dumps(one) + "\n" for one in lines))

    return keep
