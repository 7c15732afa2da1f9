"""What is here: `sab info`, `doctor` and `tasks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from sab.errors import UserValueError
from sab.lab import doctor as diagnosis
from sab.lab.tasks import TASKS
from sab.lab.training import Run
from sab.lab.training.progress import show_seconds
from sab_cli.exits import DONE


def info(
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None,
    backends: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Tell what a run is and how far it has come, or what computes on this machine.

    Args:
        run: Folder of the run.
        backends: Tell of each backend whether it can be used here, or why not, and which one `auto` takes.
    """
    if backends:
        diagnosis.show_backends()
        return DONE
    if run is None:
        raise UserValueError("run must be given a value, or --backends; got none.", "run")
    opened = Run.open(run)
    result, evaluations = opened.result(), opened.evaluations()
    facts = dict(opened.config.options())
    if result is not None:
        facts |= {"status": result.status, "ended": result.message, "solved_at": result.solved_at}
        facts["best_at"] = result.best_at
        facts |= {"wall_time": show_seconds(result.wall_time), "trained_on": result.device, "commit": result.commit}
        for split, metrics in {"valid": result.valid, "test": result.metrics}.items():
            facts |= {f"{split} {metric}": value for metric, value in metrics.items()}
    else:
        facts["status"] = "not at its end"
    if evaluations:
        facts["last evaluation"] = f"iteration {evaluations[-1]['step']}"
        facts |= {f"last valid {metric}": value for metric, value in evaluations[-1]["metrics"].items()}
    diagnosis.show(facts)
    return DONE


def doctor(out: Path = diagnosis.RUNS, data_dir: Path | None = None) -> int:
    """Look at what is installed here, and whether it works.

    Args:
        out: Folder that runs are to be kept below.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    return diagnosis.main(out, data_dir)


def tasks() -> int:
    """List the tasks."""
    for name, task in TASKS.items():
        print(f"{name:{max(map(len, TASKS))}}  {task.summary}")
    return DONE
