"""The benchmark: a layer and `torch.nn.LSTM` of the same size, side by side in one run.

A record is what one row of the table was measured to be; `benchmarks/README.md` says what is in it.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sab import SABLSTM
from sab.errors import check_choice
from sab.lab.experiments.timing import PASSES, Call, Contender, capture, time_in_turn
from sab.lab.files import write_text
from sab.lab.training.run import provenance
from sab.ops import dispatch, precision, reference

SCHEMA = 1
"""Changes when records can no longer be compared with older ones."""
REFERENCE, COMPILED = "reference", "compiled reference"
TORCH, TORCH_AUTOCAST = "nn.LSTM float32", "nn.LSTM autocast"
DEFAULT = "default"
"""In the place of a scorer: the layer's default memory. The others are measured with incorporate `add`."""
SPEEDUPS = {"cuda": 50.0, "cpu": 3.0}
"""How many times faster than the reference backend this layer is to be, on each type of device."""
MEMORY = 1.5
"""How many times nn.LSTM's memory a training step may take at most."""


@dataclass(frozen=True)
class Case:
    """Sizes that are measured, on the device they were chosen for with the target that was set for each scorer."""

    device: str
    hidden_sizes: tuple[int, ...]
    batch_size: int
    steps: tuple[int, ...]
    k_top: int
    k_att: int
    k_trunc: int
    targets: dict[str, float | None]
    """By scorer, or DEFAULT: forward and backward may take at most so many times as long as nn.LSTM's; None sets no
    target."""
    input_size: int | None = None
    """None: as wide as the hidden state."""
    beside: tuple[str, ...] = ()
    """What else is measured, for context."""


# The input's width, which no target names, is the one that nn.LSTM does best with: cuDNN's kernels like what its hidden
# state has, while on the CPU a narrow input leaves both layers nothing but the recurrence.
CASES = {
    "A": Case(
        "cuda",
        (128,),
        64,
        (320,),
        10,
        2,
        10,
        {DEFAULT: 1.3, "mlp": 1.5, "dot": 1.5, "affine": 1.2},
        beside=(REFERENCE, COMPILED),
    ),
    "B": Case("cuda", (128,), 64, (784,), 10, 10, 10, {DEFAULT: 1.3, "mlp": 1.5, "dot": 1.5, "affine": 1.5}),
    "C": Case("cuda", (1000,), 64, (180,), 5, 5, 5, {DEFAULT: 0.9, "mlp": 1.0, "dot": 1.0, "affine": 1.0}),
    "D": Case("cuda", (1000,), 32, (100,), 10, 2, 5, {DEFAULT: 0.9, "mlp": 1.0, "dot": 1.0, "affine": 1.0}),
    "E": Case("cuda", (128,), 64, (4000,), 10, 2, 10, {DEFAULT: 1.5, "affine": 1.2, "dot": 3.0}),
    "F": Case(
        "cpu",
        (128,),
        64,
        (120,),
        10,
        2,
        10,
        {DEFAULT: 1.1, "mlp": 1.0, "dot": 1.0, "affine": 1.0},
        input_size=10,
        beside=(REFERENCE,),
    ),
    "G": Case(
        "cpu", (1000,), 32, (100,), 10, 2, 10, {DEFAULT: 1.1, "mlp": 1.1, "dot": 1.1, "affine": 1.1}, input_size=10
    ),
    "H": Case("cpu", (64,), 32, (100, 200, 1000, 3000), 10, 2, 10, {DEFAULT: 1.1}, input_size=10),
    "T": Case(
        "cuda",
        (128,),
        64,
        (100, 320, 1000, 3200, 10000, 20000),
        10,
        2,
        10,
        {DEFAULT: None, "affine": None, "dot": None},
    ),
    "n": Case("cuda", (32, 64, 128, 200, 256, 512, 1000, 1500), 64, (100,), 10, 2, 10, {DEFAULT: None, "mlp": None}),
}
"""A to H have targets; T and n are sweeps over the steps and over the hidden size."""


@dataclass(frozen=True)
class Row:
    """What one record is about."""

    case: str
    kind: str
    """`required`, `context` or `sweep`."""
    hidden_size: int
    batch_size: int
    steps: int
    k_top: int
    k_att: int
    k_trunc: int
    input_size: int
    scorer: str
    """The scorer, or DEFAULT."""
    precision: str
    """`float32`, on a GPU with TF32 as PyTorch is set to, or `bfloat16`, by autocast."""
    beside: str | None = None
    """What is measured besides the layer and nn.LSTM."""
    quick: bool = False
    """Whether sizes were cut down, so that the numbers mean nothing."""
    target: float | None = None
    """At most so many times nn.LSTM's time; in a context row at least so many times faster than what is beside."""

    @property
    def label(self) -> str:
        """The row in a few words."""
        case = case_label(self.case, self.steps, self.hidden_size)
        return f"case {case}, {self.scorer}, {self.precision}" + (f", {self.beside}" if self.beside else "")

    @property
    def kernels(self) -> tuple[Any, ...]:
        """Rows in which this is equal run the same kernels."""
        return self.hidden_size, self.batch_size, self.k_top, self.scorer, self.precision


def case_label(name: str, steps: int, hidden_size: int) -> str:
    """A case's name, with the sizes that it varies."""
    case = CASES.get(name)
    if case is None:  # a record of an older version may be of another case
        return name
    label = f"{name}, T={steps}" if len(case.steps) > 1 else name
    return f"{label}, n={hidden_size}" if len(case.hidden_sizes) > 1 else label


def default_cases(device: torch.device) -> list[str]:
    """The cases that were chosen for a type of device."""
    return [name for name, case in CASES.items() if case.device == device.type]


def rows(names: Iterable[str], device: torch.device, compiled_steps: int = 32, quick: bool = False) -> list[Row]:
    """The rows of the named cases: those with a target first, then the context, then the sweeps."""
    made: list[Row] = []
    for name in names:
        case = CASES[check_choice("cases", name, CASES)]
        has_target = device.type == case.device and not quick
        both = device.type == "cuda" and any(case.targets.values())
        for n in case.hidden_sizes:
            for steps in case.steps:
                for scorer, target in case.targets.items():
                    row = Row(
                        name,
                        "required" if target is not None else "sweep",
                        n,
                        case.batch_size,
                        steps,
                        case.k_top,
                        case.k_att,
                        case.k_trunc,
                        case.input_size or n,
                        scorer,
                        "float32",
                        target=target if has_target else None,
                    )
                    made += [row, replace(row, precision="bfloat16")] if both else [row]
                    if REFERENCE in case.beside:
                        speedup = SPEEDUPS[device.type] if has_target else None
                        made.append(replace(row, kind="context", beside=REFERENCE, target=speedup))
        if COMPILED in case.beside:
            # A loop that compilation unrolls or breaks up takes minutes to compile at the case's own length.
            row = next(row for row in made if row.case == name)
            steps = min(compiled_steps, row.steps)
            made.append(replace(row, kind="context", beside=COMPILED, steps=steps, target=None))
    if quick:
        made = [_shrunk(row) for row in made]
    order = ("required", "context", "sweep")
    return sorted(dict.fromkeys(made), key=lambda row: (order.index(row.kind), row.beside == COMPILED))


def _shrunk(row: Row) -> Row:
    n = min(row.hidden_size, 16)
    steps, input_size = min(row.steps, 12), min(row.input_size, n)
    return replace(row, hidden_size=n, input_size=input_size, batch_size=4, steps=steps, quick=True)


def bench(
    chosen: list[Row],
    device: torch.device,
    seconds: float,
    deadline: float | None = None,
    jobs: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A record for each row, as soon as it is measured; none for those whose turn comes after the deadline.

    `deadline` is a time of `time.monotonic`; `jobs` processes compile the kernels of all rows before the first is
    measured. A row that fails has `error` in its record.
    """
    about = about_this_machine(device)
    compile_seconds: dict[tuple[Any, ...], float] = {}
    if jobs > 0 and device.type == "cuda":
        progress("compilation")
        compile_seconds = _compile_ahead(chosen, device, jobs, deadline)
    for row in chosen:
        if deadline is not None and time.monotonic() >= deadline:
            return
        progress(row.label)
        started = time.monotonic()
        record: dict[str, Any] = {"schema": SCHEMA, **asdict(row)}
        try:
            if row.beside == COMPILED:
                limit = LONGEST if deadline is None else min(LONGEST, deadline - time.monotonic())
                record |= _in_another_process("measure", row, device, seconds, limit)
            else:
                record |= measure(row, device, seconds)
        except Exception as error:
            record["error"] = _one_line(error)
        if row.kernels in compile_seconds:
            record["compile_seconds"] = compile_seconds[row.kernels]
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        yield {**record, **about, "wall_seconds": time.monotonic() - started, "date": date}
        _clean_up(device)


def measure(row: Row, device: torch.device, seconds: float) -> dict[str, Any]:
    """The part of a record that is measured."""
    if row.beside == COMPILED:
        compiled = dispatch.BACKENDS[REFERENCE]._replace(run=torch.compile(reference.run))  # pyright: ignore[reportArgumentType]
        dispatch.BACKENDS[REFERENCE] = compiled
    contenders = _contenders(row, device)
    first = {name: contender.first_call() for name, contender in contenders.items()}
    measured: dict[str, Any] = {
        "backend": _backend(row, contenders["ours"]),
        "types": {name: contender.type for name, contender in contenders.items()},
        "compile_seconds": first["ours"],
        "memory": {name: contender.peak_memory() for name, contender in contenders.items()},
        "milliseconds": {name: {} for name in contenders},
    }
    if row.beside is not None:
        measured["compile_seconds_beside"] = first[row.beside]
    ways = ("eager", "graph") if device.type == "cuda" and row.beside is None else ("eager",)
    for chosen in PASSES:
        for contender in contenders.values():
            contender.layer.train(chosen != "forward")
        eager = {name: contender.calls()[chosen] for name, contender in contenders.items()}
        for way in ways:
            calls = eager if way == "eager" else _captured(eager, measured)
            for name, times in (time_in_turn(calls, device, seconds) if calls else {}).items():
                measured["milliseconds"][name].setdefault(way, {})[chosen] = times
            del calls
    return measured | _compared(row, measured)


def _contenders(row: Row, device: torch.device) -> dict[str, Contender]:
    torch.manual_seed(0)
    x = torch.randn(row.steps, row.batch_size, row.input_size, device=device)
    sizes = (row.input_size, row.hidden_size)
    memory: dict[str, Any] = {"k_top": row.k_top, "k_att": row.k_att, "k_trunc": row.k_trunc}
    memory |= {} if row.scorer == DEFAULT else {"scorer": row.scorer, "incorporate": "add"}
    contenders = {
        "ours": Contender(SABLSTM(*sizes, device=device, **memory), x, row.precision),
        TORCH: Contender(nn.LSTM(*sizes, device=device), x),
    }
    if device.type == "cuda" and row.kind == "required":
        contenders[TORCH_AUTOCAST] = Contender(nn.LSTM(*sizes, device=device), x, "bfloat16")
    if row.beside is not None:
        layer = SABLSTM(*sizes, device=device, backend=REFERENCE, **memory)
        contenders[row.beside] = Contender(layer, x, row.precision)
    return contenders


def _backend(row: Row, ours: Contender) -> str:
    """What computed our side: on a configuration that the fast ones lack it is the reference."""
    assert isinstance(ours.layer, SABLSTM)
    with torch.autocast(ours.x.device.type, torch.bfloat16, enabled=row.precision == "bfloat16"):
        return ours.layer.backend_for(ours.x)


def _captured(calls: dict[str, Call], measured: dict[str, Any]) -> dict[str, Call]:
    """The calls as replays of CUDA graphs; why one could not be captured is noted."""
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            replays[name] = capture(call)
        except Exception as error:
            measured.setdefault("graph_errors", {})[name] = _one_line(error)
    return replays


def _compared(row: Row, measured: dict[str, Any]) -> dict[str, Any]:
    """The ratios: to the fastest that nn.LSTM can, and to its memory in the same precision."""
    milliseconds, memory = measured["milliseconds"], measured["memory"]
    ratio: dict[str, dict[str, float]] = {}
    for way, passes in milliseconds["ours"].items():
        for chosen, ours in passes.items():
            torchs = [
                milliseconds[name][way][chosen]["median"]
                for name in (TORCH, TORCH_AUTOCAST)
                if chosen in milliseconds.get(name, {}).get(way, {})
            ]
            if torchs:
                ratio.setdefault(way, {})[chosen] = ours["median"] / min(torchs)
    compared: dict[str, Any] = {"ratio": ratio}
    same = TORCH_AUTOCAST if row.precision == "bfloat16" and TORCH_AUTOCAST in memory else TORCH
    if memory["ours"] is not None and memory[same]:
        compared["memory_ratio"] = memory["ours"] / memory[same]
    if row.beside is not None:
        times = {name: milliseconds[name]["eager"] for name in ("ours", row.beside)}
        compared["speedup"] = {
            chosen: times[row.beside][chosen]["median"] / times["ours"][chosen]["median"] for chosen in PASSES
        }
    return compared


# Other processes


def _compile_ahead(
    chosen: list[Row], device: torch.device, jobs: int, deadline: float | None
) -> dict[tuple[Any, ...], float]:
    """Has other processes call every row's layer once, so that Triton's cache holds its kernels: seconds of each."""
    firsts = {row.kernels: row for row in reversed(chosen)}  # of the rows with the same kernels the first
    ahead = [row for row in chosen if firsts[row.kernels] == row]
    # Half of the time may go into it; what is not compiled by then is compiled when its row is measured.
    until = time.monotonic() + LONGEST if deadline is None else (time.monotonic() + deadline) / 2

    def seconds_of(row: Row) -> float | None:
        return _in_another_process("compile", row, device, 0.0, until - time.monotonic()).get("compile_seconds")

    with ThreadPoolExecutor(jobs) as pool:
        taken = zip(ahead, pool.map(seconds_of, ahead), strict=True)
        return {row.kernels: seconds for row, seconds in taken if seconds is not None}


def _in_another_process(what: str, row: Row, device: torch.device, seconds: float, limit: float) -> dict[str, Any]:
    """The answer of `main` in another process, which is killed after `limit` seconds."""
    request = json.dumps({"what": what, "row": asdict(row), "device": device.type, "seconds": seconds})
    command = [sys.executable, "-m", "sab.lab.experiments.bench", request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit, 0.0))
    except subprocess.TimeoutExpired:
        return {"error": f"skipped: compilation of {row.steps} steps was not through after {max(limit, 0.0):.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"error": ([*done.stderr.splitlines()] or ["the process ended without a word"])[-1][:300]}
    return json.loads(lines[-1])


def main(request: str) -> None:
    """Prints the part of a record that `_in_another_process` requests."""
    asked = json.loads(request)
    row, device = Row(**asked["row"]), torch.device(asked["device"])
    if asked["what"] == "compile":
        measured = {"compile_seconds": _contenders(replace(row, beside=None), device)["ours"].first_call()}
    else:
        measured = measure(row, device, asked["seconds"])
    print(json.dumps(measured))  # noqa: T201 (the answer)


LONGEST = 120.0
"""Seconds after which compilation in another process is given up."""


# Records


def about_this_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on besides the row."""
    about = provenance(device)
    if importlib.util.find_spec("triton") is not None:
        about.versions["triton"] = importlib.import_module("triton").__version__
    if torch.version.cuda is not None:
        about.versions["cuda"] = torch.version.cuda
        about.versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        **about._asdict(),
        "threads": torch.get_num_threads(),
        "tf32": device.type == "cuda" and precision.allow_tf32(),
    }


def save(records: list[dict[str, Any]], path: Path) -> None:
    """The records as JSON lines, in one move."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records), "output")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _clean_up(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a row may have left the device unusable: the next ones will tell
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
