"""A call of the runner on a local Ray cluster, in a process that a test can send signals to.

Usage: python -m tests.lab.experiments.on_ray ITERATIONS ROW...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from sab.lab.experiments.cluster import reproduce_on_ray
from sab.lab.experiments.tables import Row
from tests.lab.experiments.conftest import tiny_rows


def main(iterations: str, *numbers: str) -> None:
    rows: list[Row] = [tiny_rows()[int(number)] for number in numbers]
    options = None, int(iterations), "cpu"
    outcome = reproduce_on_ray(rows, [0], Path("runs"), Path("results"), *options, console=Console(width=200))
    left = [job.label for job in outcome.left]
    told = {"failed": outcome.failed, "left": left, "was_interrupted": outcome.was_interrupted}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
