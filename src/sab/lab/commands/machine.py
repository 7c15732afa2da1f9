"""What is here: `sab info`, `doctor` and `tasks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from sab.errors import UserValueError
from sab.lab import doctor as diagnosis
from sab.lab.tasks import TASKS
from sab.lab.training import Run
from sab.lab.training.progress import show, show_metric, show_seconds
from sab_cli.exits import DONE
from sab_cli.wrapping import columns, listed


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
    options = {name: show(value) for name, value in opened.config.options().items()}
    diagnosis.show(_outcome(opened) | {"": ""} | options | {"seed": str(opened.config.training.seed)})
    return DONE


def _outcome(run: Run) -> dict[str, str]:
    """What came out of a run so far."""
    result, evaluations = run.result(), run.evaluations()
    facts = {"status": "not at its end"}
    if result is not None:
        facts = {"status": result.status, "ended": result.message}
        for split, metrics in {"test": result.metrics, "valid": result.valid}.items():
            facts |= {f"{split} {metric}": show_metric(metric, value) for metric, value in metrics.items()}
        facts |= {"solved_at": show(result.solved_at), "best_at": show(result.best_at)}
        facts |= {"wall_time": show_seconds(result.wall_time), "trained_on": result.device}
        facts["commit"] = show(result.commit)
    if evaluations:
        last = evaluations[-1]
        facts["last evaluation"] = f"iteration {last['step']:,}"
        facts |= {f"last valid {metric}": show_metric(metric, value) for metric, value in last["metrics"].items()}
    return facts


def doctor(out: Path = diagnosis.RUNS, data_dir: Path | None = None) -> int:
    """Look at what is installed here, and whether it works.

    Args:
        out: Folder that runs are to be kept below.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    return diagnosis.main(out, data_dir)


def tasks() -> int:
    """List the tasks."""
    print("\n".join(listed({name: task.summary for name, task in TASKS.items()}, columns())))
    return DONE
