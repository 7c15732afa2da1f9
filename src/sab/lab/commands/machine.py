"""What is here: `sab info`, `doctor`, `tasks` and `warm-up`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from sab.config import DEFAULT_SCORER, IncorporationName, SABConfig, ScorerName, WeightingName
from sab.errors import UserValueError, check_int
from sab.lab import doctor as diagnosis
from sab.lab.models import LAYERS, CellName
from sab.lab.tasks import TASKS
from sab.lab.training import Run
from sab.lab.training.progress import METRICS, show, show_metric, show_seconds
from sab.ops import dispatch
from sab_cli.exits import DONE
from sab_cli.wrapping import columns, listed


def info(
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None,
    backends: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Show a run's outcome, progress and options, or the backends of this machine.

    Args:
        run: Folder of the run.
        backends: Show which backends can be used here, or why not, and which one `auto` takes.
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
    facts = {"status": "unfinished"}
    if result is not None:
        facts = {"status": result.status, "ended": result.message}
        for split, metrics in {"test": result.metrics, "valid": result.valid}.items():
            facts |= _named(split, metrics)
        facts["solved"] = "never" if result.solved_at is None else f"at iteration {result.solved_at:,}"
        if result.best_at is not None:
            facts["weights kept"] = f"those of iteration {result.best_at:,}"
        facts |= {"time": show_seconds(result.wall_time), "trained on": result.device}
        if result.commit is not None:
            facts["commit"] = result.commit
    if evaluations:
        last = evaluations[-1]
        facts["last evaluation"] = f"iteration {last['step']:,}"
        facts |= _named("last valid", last["metrics"])
    return facts


def _named(split: str, metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Metrics by names for people."""
    names = METRICS | {one: one.replace("_", " ") for one in METRICS if one.startswith("bits")}  # short ones
    return {f"{split} {names.get(metric, metric)}": show_metric(metric, value) for metric, value in metrics.items()}


def doctor(out: Path = diagnosis.RUNS, data_dir: Path | None = None) -> int:
    """Check the installation: versions, devices, backends, data sets and folders.

    Args:
        out: Folder in which runs are kept.
        data_dir: Folder of the data sets; None means SAB_DATA or, without one, the user's cache.
    """
    return diagnosis.main(out, data_dir)


def tasks() -> int:
    """List the tasks."""
    print("\n".join(listed({name: task.summary for name, task in TASKS.items()}, columns())))
    return DONE


def warm_up(
    cell: CellName = "lstm",
    hidden_size: int = 128,
    batch_size: int = 64,
    precision: Literal["float32", "bfloat16", "autocast"] = "float32",
    lengths: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    k_top: int = SABConfig.k_top,
    scorer: ScorerName = DEFAULT_SCORER,
    weighting: WeightingName = SABConfig.weighting,
    incorporate: IncorporationName = SABConfig.incorporate,
    attention_size: int | None = SABConfig.attention_size,
) -> int:
    """Compile the GPU kernels of a layer ahead, so that its first call does not wait for them.

    Neither the input's size, the number of layers nor the length of sequences matters to the kernels. Above a hidden
    size of 128 the batch size does.

    Args:
        cell: The recurrent cell.
        hidden_size: Size n of the hidden state.
        batch_size: How many sequences a call has.
        precision: The type of the layer, or float32 under torch.autocast with bfloat16.
        lengths: For sequences of different lengths: with lengths, or in a PackedSequence.
        k_top: How many microstates a step may select.
        scorer: How relevant a microstate is.
        weighting: How the selected scores become weights.
        incorporate: How the summary enters the hidden state.
        attention_size: Size d of the keys; None means hidden_size, but at most 128.
    """
    n, batch = check_int("hidden_size", hidden_size, 1), check_int("batch_size", batch_size, 1)
    memory = SABConfig(k_top, scorer=scorer, weighting=weighting, incorporate=incorporate, backend="triton")
    memory = replace(memory, attention_size=attention_size)
    device = _gpu()
    from sab.ops.triton import launch  # triton takes a while to import

    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    layer = LAYERS[cell](n, n, **vars(memory), device=device, dtype=dtype)
    steps = max(memory.k_top * memory.k_att, 2)  # in a shorter call fewer could be selected
    x = torch.zeros(steps, batch, n, device=device, dtype=dtype)
    before, started = len(launch.first_launches()), time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        output, _ = layer(x, lengths=torch.full((batch,), steps) if lengths else None)
    output.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    made, seconds = len(launch.first_launches()) - before, time.perf_counter() - started
    sizes = f"hidden size {n}, batches of {batch}, {precision}{', with lengths' if lengths else ''}"
    print(f"Ready: {made} kernels of {type(layer).__name__} ({sizes}) in {seconds:.1f} s.")
    print(f"Triton keeps them in {launch.cache_folder()}; what was there already took no compilation.")
    return DONE


def _gpu() -> torch.device:
    """The device that kernels are compiled for."""
    if not torch.cuda.is_available():
        raise UserValueError(
            "warm-up must run where torch finds an NVIDIA GPU, whose kernels it compiles; it finds none here."
        )
    reason = dispatch.triton_unavailable()
    if reason is not None:
        raise UserValueError(f"warm-up must run where Triton compiles the kernels; it cannot here: {reason}.")
    return torch.device("cuda")
