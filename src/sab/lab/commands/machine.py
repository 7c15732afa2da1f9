"""What is here: `sab info`, `doctor` and `tasks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from sab.errors import UserValueError
from sab.lab import doctor as diagnosis
from sab.lab.commands.exits import DONE
from sab.lab.tasks import TASKS
from sab.lab.training import Run
from sab.lab.training.progress import show_seconds


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
        _show(_backends())
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
    _show(facts)
    return DONE


def _show(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for fact, value in facts.items():
        print(f"{fact:{width}}  {value}")


def _backends() -> dict[str, str]:
    """Whether each backend can be used, and which one `auto` takes for the default layer on each kind of device."""
    import torch

    from sab.layers import SABLSTM
    from sab.ops import dispatch

    facts = {name: f"{'usable' if usable else 'not usable'}: {why}" for name, (usable, why) in dispatch.here().items()}
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        taken = SABLSTM(128, 128, device=device).backend_for(torch.zeros(2, 1, 128, device=device))
        facts[f"auto on {device}"] = taken
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
    for name, task in TASKS.items():
        print(f"{name:{max(map(len, TASKS))}}  {task.summary}")
    return DONE
