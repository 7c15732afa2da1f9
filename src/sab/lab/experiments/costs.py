"""What the contenders of the rivals' table cost: an update of training, and a step of streaming inference.

Each is measured alone on the device. A record is a JSON line in results/rivals-costs.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sab.lab.experiments import records
from sab.lab.experiments.records import Record
from sab.lab.experiments.reproduce import deadline_after, make_folders, reading_from
from sab.lab.experiments.rivals import Part, RivalRow
from sab.lab.experiments.selection import count_parameters
from sab.lab.experiments.timing import peak_on_cpu, time_in_turn
from sab.lab.files import write_text, writing
from sab.lab.locks import locked
from sab.lab.models import SequenceModel
from sab.lab.rivals import RivalState
from sab.lab.stored import first_mismatch
from sab.lab.training import RunConfig, TrainConfig
from sab.lab.training.checkpoint import TrainingState
from sab.lab.training.evaluation import predict_on
from sab.lab.training.run import provenance
from sab.lab.training.trainer import torch_settings
from sab.lab.training.updates import build_optimizer, build_updates
from sab.state import SABState

FILE = "rivals-costs"
MANY = 10**9
"""Iterations of the run that is measured: more than there will be."""
FIRST_UPDATES = 4
"""Updates before the clock starts: kernels compile, and on a GPU a CUDA graph is recorded."""
PIECE = 1_000
"""How many steps of a stream are read at once to get to its end."""
LENGTH = 100_000
"""After how many steps of a stream its cost is measured."""
STEPS = 50
"""How many steps of a stream are timed together: a single one would be that of a processor that has just slept."""
STREAM = {"kind": Literal["constant", "grows", "context"], "steps": int, "microseconds": float, "bytes": int}
"""The cost of a step of a stream. `kind`: the state is as large at every step, or grows; or there is none, and the
numbers are those of reading a context of `steps` steps as a whole."""
ENTRIES = {
    "problem": str,
    "contender": str,
    "hidden_size": int,
    "parameters": int,
    "update_milliseconds": float,
    "train_bytes": int,
    "stream": dict[str, Any] | None,
    "device": str,
    "threads": int,
    "versions": dict[str, str],
    "commit": str | None,
    "date": str,
}
"""The entries of a record. `train_bytes`: the most that an update takes; `threads`: those of torch on the CPU."""


def measure(
    row: RivalRow,
    device: torch.device,
    seconds: float,
    data_dir: Path | None = None,
    commit: str | None = None,
) -> Record:
    """The record of a contender's costs; `seconds` is about how long each measurement goes on."""
    config = reading_from(data_dir, row.config(0, MANY, device.type))
    model = config.build_model(device)
    milliseconds, bytes_taken = update_cost(config, model, device, seconds)
    stream = stream_cost(config, model, device, seconds, LENGTH) if row.problem.streams else None
    where = provenance(device)
    return {
        "problem": row.problem.name,
        **row.entries,
        "parameters": count_parameters(config),
        "update_milliseconds": milliseconds,
        "train_bytes": bytes_taken,
        "stream": stream,
        "device": where.device,
        "threads": torch.get_num_threads(),
        "versions": where.versions,
        "commit": commit or where.commit,
        "date": records.now(),
    }


def measure_part(
    part: Part,
    results: Path,
    device: torch.device,
    seconds: float,
    minutes: float | None,
    threads: int | None,
    data_dir: Path | None,
    commit: str | None,
) -> Iterator[tuple[str, Record | None]]:
    """Measures the contenders of a part that have no record of this device yet, and records them, until time is over.

    Yields the label of each, and its record or, where it is left, None.
    """
    settings = TrainConfig(threads=threads)
    deadline = deadline_after(minutes)
    make_folders(results)
    for row in part.rows():
        label = f"{row.problem.name}-{row.name}"
        known = find(load(results), row.problem.name, row.name, provenance(device).device)
        if known is not None and known["hidden_size"] == row.model().hidden_size:
            yield label, known
        elif time.monotonic() >= deadline:
            yield label, None
        else:
            with torch_settings(settings, device):
                torch.manual_seed(0)
                record = measure(row, device, seconds, data_dir, commit)
            save(record, results)
            yield label, record


def update_cost(config: RunConfig, model: SequenceModel, device: torch.device, seconds: float) -> tuple[float, int]:
    """Milliseconds of an update as `sab train` makes it, batch included, and the bytes that it takes at most: weights,
    gradients, moments and activations."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with torch.cuda.stream(stream):  # None changes nothing
        state = TrainingState()
        updates = build_updates(config, model, build_optimizer(config.training, model, device), state, stream)
        made = 0

        def make(count: int) -> None:
            nonlocal made
            for _ in range(count):
                updates.make(made)
                made += 1
                if updates.wants_reading():
                    updates.read(state)
            updates.read(state)  # waits for the device

        try:
            peak = _peak_bytes(lambda: make(1), device) + weights
            make(FIRST_UPDATES - 1)
            started, first = time.perf_counter(), made
            while made - first < 3 or time.perf_counter() - started < seconds:
                make(max((made - first) // 4, 1))  # few waits
            milliseconds = 1e3 * (time.perf_counter() - started) / (made - first)
        finally:
            updates.close()
    return milliseconds, peak


def stream_cost(
    config: RunConfig, model: SequenceModel, device: torch.device, seconds: float, length: int
) -> dict[str, Any]:
    """The cost of a step of a stream of batch 1 after `length` steps, or of a context where a model cannot stream."""
    task, training = config.task, config.training
    inputs = task.batch(training.seed, 0, 1, "test", device, training.dtype)[0]
    model.eval()

    def timed(call: Callable[[], None]) -> float:
        return 1e3 * time_in_turn({"step": call}, device, seconds)["step"]["median"]

    with torch.no_grad():
        if not model.can_stream:
            peak = _peak_bytes(lambda: model(inputs), device)
            microseconds = timed(lambda: model(inputs) and None)
            return {"kind": "context", "steps": len(inputs), "microseconds": microseconds, "bytes": peak}
        state, grows = _fill(model, config, inputs, length)
        one = inputs[:1]

        def steps() -> None:
            nonlocal state
            for _ in range(STEPS):
                state = predict_on(model, one, state, training)[1]

        size = state_bytes(state)
        microseconds = timed(steps) / STEPS
    kind = "grows" if grows else "constant"
    return {"kind": kind, "steps": length, "microseconds": microseconds, "bytes": size}


def _fill(model: SequenceModel, config: RunConfig, inputs: Tensor, length: int) -> tuple[Any, bool]:
    """The state after `length` steps, and whether it grows: one that does not is as large after a few steps."""
    sizes: list[int] = []
    for steps in (1, 9):  # a convolution's window is filled by then
        short = _read(model, config, inputs, model.first_state(), steps)
        sizes.append(state_bytes(_read(model, config, inputs, short, 16)))
    grows = sizes[1] > sizes[0]
    return _read(model, config, inputs, model.first_state(), length if grows else 16), grows


def _read(model: SequenceModel, config: RunConfig, inputs: Tensor, state: Any, steps: int) -> Any:
    """The state after further steps, the inputs over and over."""
    again = inputs.repeat(-(-PIECE // len(inputs)), *[1] * (inputs.dim() - 1))
    for start in range(0, steps, PIECE):
        state = predict_on(model, again[: min(PIECE, steps - start)], state, config.training)[1]
    return state


def _peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes above those at its beginning that a call takes."""
    if device.type != "cuda":
        return peak_on_cpu(call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def state_bytes(state: SABState | RivalState) -> int:
    """How many bytes a state has that is carried from step to step."""
    if isinstance(state, RivalState):
        parts = state.parts or ()
    else:
        parts = (*state, state.microstates, state.keys, state.numbers)
    return sum(part.numel() * part.element_size() for part in parts)


# Records


def load(results: Path) -> list[Record]:
    """The records, none where there is no file."""
    path = records.path_of(FILE, results)
    found = records.read_lines(path)
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict) or not record.keys() >= ENTRIES.keys() or not _is_right(record):
            raise records.invalid_file(path, f"line {number} is no record of costs")
    return found


def _is_right(record: Record) -> bool:
    stream = record["stream"]
    if first_mismatch(record, ENTRIES) is not None:
        return False
    return stream is None or (stream.keys() >= STREAM.keys() and first_mismatch(stream, STREAM) is None)


def save(record: Record, results: Path) -> None:
    """Adds a record, in the place of an older one of the same contender and problem on the same device."""
    path = records.path_of(FILE, results)
    key = ("problem", "contender", "device")
    with writing(path, "results"), locked(results):
        others = [one for one in load(results) if any(one[name] != record[name] for name in key)]
        write_text(path, "".join(json.dumps(one, allow_nan=False) + "\n" for one in (*others, record)), "results")


def find(known: list[Record], problem: str, contender: str, device: str | None = None) -> Record | None:
    """The newest record of a contender on a problem, on a device or, where none is given, on a GPU rather than not."""
    found = [one for one in known if (one["problem"], one["contender"]) == (problem, contender)]
    found = [one for one in found if device in (None, one["device"])]
    return max(found, key=lambda one: (one["device"].startswith("cuda"), one["date"]), default=None)
