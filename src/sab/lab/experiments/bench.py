"""The benchmark: a layer with its default memory and `torch.nn`'s layer of the same cell, side by side in one run.

A record is what one row of the table was measured to be; `benchmarks/README.md` says what is in it.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import gc
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from sab import SABGRU, SABLSTM, SABRNN, SABConfig, SABLSTMCell
from sab.errors import UserValueError
from sab.lab.experiments.timing import (
    BOTH,
    FORWARD,
    STREAM,
    Call,
    Contender,
    OverSequence,
    OverStream,
    capture,
    time_in_turn,
)
from sab.lab.files import write_text
from sab.lab.training.run import provenance
from sab.layers import SABLayer
from sab.ops import precision
from sab.ops.cpu import loader

SCHEMA = 2
"""Changes when records can no longer be compared with older ones."""
DEFAULT = "default"
"""In the place of a scorer: the layer's default memory. Another scorer is measured with incorporate `add`."""
MEMORY = 1.3
"""How many times the memory of torch.nn's layer in the same precision a training step may take at most."""
LAYERS: dict[str, tuple[Callable[..., Any], type[nn.Module]]] = {
    "lstm": (SABLSTM, nn.LSTM),
    "gru": (SABGRU, nn.GRU),
    "tanh": (SABRNN, nn.RNN),
}
"""Our layer and torch.nn's, by cell."""
LARGEST_SMALL = 128
"""The largest hidden size at which one program of a GPU takes a row through all the steps (`sab.ops.triton.engine`)."""
STEPPERS: dict[str, Callable[..., Any]] = {"layer": SABLSTM, "cell": SABLSTMCell}
"""What takes the steps of a stream, on our side."""
Limits = dict[str, dict[str, float | None]]
"""By the way of calling, `eager` or `graph`, then by pass: what is measured, and at most how many times torch.nn's time
it is to take; None sets no target."""


@dataclass(frozen=True)
class Case:
    """A row of the table: sizes, what is called, and what it may cost compared with torch.nn on the device it is for.

    The input's width, which no target names, is the one that torch.nn does best with: cuDNN's kernels like what its
    hidden state has, while on the CPU a narrow input leaves both layers nothing but the recurrence.
    """

    case: str
    """Stable name; never change it."""
    device: str
    limits: Limits = field(hash=False)
    hidden_size: int = 128
    batch_size: int = 64
    steps: int = 320
    """Of the longest sequence."""
    cell: str = "lstm"
    num_layers: int = 1
    bidirectional: bool = False
    shortest: int | None = None
    """Steps of the shortest sequence of a PackedSequence; None: all are as long, in a tensor."""
    stream: str | None = None
    """`layer` or `cell`, which takes the sequence step by step without gradients; None: all steps are one call."""
    scorer: str = DEFAULT
    input_size: int | None = None
    """None: as wide as the hidden state."""
    quick: bool = False
    """Whether sizes were cut down, so that the numbers mean nothing."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Of our side: `float32`, on a GPU with TF32 as PyTorch is set to, and `bfloat16`, by autocast."""
        has_both = self.device == "cuda" or (self.stream is None and loader.has_bfloat16())
        return ("float32", "bfloat16") if has_both else ("float32",)

    def kernels(self, chosen: str) -> tuple[Any, ...]:
        """What a case needs compiled in a precision; where it is equal, the same kernels run."""
        batch = None if self.hidden_size <= LARGEST_SMALL else self.batch_size  # it decides the tiles of large sizes
        return self.cell, self.hidden_size, batch, self.scorer, self.shortest is None, chosen


def _eager(most: float, forward: float | None = None) -> Limits:
    passes: dict[str, float | None] = {BOTH: most}
    return {"eager": passes if forward is None else {**passes, FORWARD: forward}}


def _gpu(case: str, eager: float, graph: float | None = None, forward: float | None = None, **sizes: Any) -> Case:
    limits = _eager(eager, forward)
    return Case(case, "cuda", limits if graph is None else {**limits, "graph": {BOTH: graph}}, **sizes)


def _cpu(case: str, limits: Limits, **sizes: Any) -> Case:
    return Case(case, "cpu", limits, input_size=10, **sizes)


_H: Limits = {"eager": {BOTH: 1.1, FORWARD: None}}
CASES = {
    one.case: one
    for one in (
        _gpu("A", 1.3, 1.5, 1.2),
        _gpu("B", 1.3, 1.5, steps=784),
        _gpu("C", 0.9, 1.3, 1.2, hidden_size=1000, steps=180),
        _gpu("D", 0.9, 1.3, hidden_size=1000, batch_size=32, steps=100),
        *(_gpu(f"n-{n}", 1.3, 1.6, hidden_size=n) for n in (32, 64, 200, 256, 512)),
        _gpu("n-650", 1.3, 1.6, hidden_size=650, batch_size=20, steps=35),
        _gpu("n-1500", 1.3, 1.6, hidden_size=1500),
        _gpu("GRU", 1.5, cell="gru"),
        _gpu("tanh", 2.0, cell="tanh"),
        *(_gpu(f"B-{batch}", 1.5, batch_size=batch) for batch in (1, 8, 512)),
        _gpu("packed", 1.3, num_layers=2, bidirectional=True, shortest=50),
        _gpu("E-4000-affine", 1.5, steps=4000, scorer="affine"),
        _gpu("E-20000-affine", 2.0, steps=20000, scorer="affine"),
        _gpu("E-4000", 1.5, steps=4000),
        _gpu("E-20000", 2.0, steps=20000),
        _cpu("F", _eager(1.1, 1.3), steps=120),
        _cpu("F-GRU", _eager(1.1), steps=120, cell="gru"),
        _cpu("G", _eager(1.1), hidden_size=1000, batch_size=32, steps=100),
        *(_cpu(f"H-{steps}", _H, hidden_size=64, batch_size=32, steps=steps) for steps in (200, 1000, 3000)),
        *(_cpu(f"stream-{one}", {"eager": {STREAM: 1.5}}, batch_size=1, steps=100, stream=one) for one in STEPPERS),
    )
}
"""Every row has default options; the scorer `affine`, whose memory is of constant size, has rows of its own in E."""


def cases(patterns: str | None, device: torch.device, quick: bool = False) -> list[Case]:
    """The cases whose names match one of the patterns, as file names do, in the order of the table.

    None means those of the device, or with `quick` all: they are cut down so that any device has the time for them.
    """
    if patterns is None:
        names = {name for name, case in CASES.items() if quick or case.device == device.type}
    else:
        names: set[str] = set()
        for pattern in (pattern.strip() for pattern in patterns.split(",")):
            matching = fnmatch.filter(CASES, pattern)
            if not matching:
                raise UserValueError(f"cases must match at least one of {', '.join(CASES)}; got {pattern!r}.", "cases")
            names.update(matching)
    chosen = [case for name, case in CASES.items() if name in names]
    return [_shrunk(case) for case in chosen] if quick else chosen


def _shrunk(case: Case) -> Case:
    shortest = None if case.shortest is None else 4
    sizes = {"hidden_size": min(case.hidden_size, 16), "batch_size": min(case.batch_size, 4)}
    return replace(case, **sizes, steps=12, shortest=shortest, input_size=8, quick=True)


def bench(
    chosen: Sequence[Case],
    device: torch.device,
    seconds: float,
    deadline: float | None = None,
    jobs: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A record for each case, as soon as it is measured; none for those whose turn comes after the deadline.

    `deadline` is a time of `time.monotonic`; `jobs` processes compile the kernels of all cases before the first is
    measured. A case that fails has `error` in its record.
    """
    about = about_this_machine(device)
    if jobs > 0 and device.type == "cuda":
        progress("compilation")
        compile_ahead(chosen, device, jobs, deadline)
    for case in chosen:
        if deadline is not None and time.monotonic() >= deadline:
            return
        progress(f"case {case.case}")
        started = time.monotonic()
        record: dict[str, Any] = {"schema": SCHEMA, "kind": "required", **_described(case, device)}
        try:
            record |= measure(case, device, seconds)
        except Exception as error:
            record["error"] = _one_line(error)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        yield {**record, **about, "wall_seconds": time.monotonic() - started, "date": date}
        _clean_up(device)


def _described(case: Case, device: torch.device) -> dict[str, Any]:
    """The part of a record that says what is measured; what a case may cost is said of its own device and sizes."""
    entries = asdict(case)
    limits: Limits = entries.pop("limits")
    del entries["device"]
    is_judged = device.type == case.device and not case.quick
    targets = {way: {one: most for one, most in passes.items() if most is not None} for way, passes in limits.items()}
    entries |= {"input_size": case.input_size or case.hidden_size, "precisions": list(case.precisions)}
    entries |= {"k_top": SABConfig.k_top, "k_att": SABConfig.k_att, "k_trunc": SABConfig.k_trunc}
    return {**entries, "targets": targets if is_judged else {}}


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    """The part of a record that is measured."""
    contenders = {**ours(case, device), **theirs(case, device)}
    first = {name: contender.first_call() for name, contender in contenders.items()}
    is_own = case.device == device.type  # on another device the memory has no target either
    measured: dict[str, Any] = {
        "backend": ", ".join(dict.fromkeys(_backend(contenders[OURS.format(one)]) for one in case.precisions)),
        "types": {name: contender.type for name, contender in contenders.items()},
        "first_call_seconds": first,
        "memory": {name: contender.peak_memory() if is_own else None for name, contender in contenders.items()},
        "milliseconds": {name: {} for name in contenders},
    }
    for way, passes in case.limits.items():
        if way == "graph" and device.type != "cuda":
            continue
        for chosen in passes:
            for contender in contenders.values():
                contender.layer.train(chosen == BOTH)
            eager = {name: contender.calls()[chosen] for name, contender in contenders.items()}
            calls = eager if way == "eager" else _captured(eager, measured)
            for name, times in (time_in_turn(calls, device, seconds) if calls else {}).items():
                measured["milliseconds"][name].setdefault(way, {})[chosen] = times
            del calls
    return measured | compared(measured["milliseconds"], measured["memory"])


# The two sides

OURS = "ours {}"
"""The name of ours in a record, by precision."""


def ours(case: Case, device: torch.device, precisions: Sequence[str] | None = None) -> dict[str, Contender]:
    """Our layer in each precision, or in those given."""
    memory = {} if case.scorer == DEFAULT else {"scorer": case.scorer, "incorporate": "add"}
    layer_class = STEPPERS[case.stream] if case.stream else LAYERS[case.cell][0]
    return {
        OURS.format(one): _contender(case, device, layer_class, one, as_layer=case.stream != "cell", **memory)
        for one in precisions or case.precisions
    }


def theirs(case: Case, device: torch.device) -> dict[str, Contender]:
    """torch.nn's layer of the same cell in each precision; its cell takes the steps of a stream."""
    layer_class = nn.LSTMCell if case.stream else LAYERS[case.cell][1]
    names = {"float32": "float32", "bfloat16": "autocast"}
    return {
        f"nn.{layer_class.__name__} {names[one]}": _contender(case, device, layer_class, one, as_layer=False)
        for one in case.precisions
    }


def _contender(
    case: Case, device: torch.device, layer_class: Callable[..., nn.Module], chosen: str, as_layer: bool, **memory: Any
) -> Contender:
    torch.manual_seed(0)
    input_size = case.input_size or case.hidden_size
    x = torch.randn(case.steps, case.batch_size, input_size, device=device)
    sizes = {"num_layers": case.num_layers, "bidirectional": case.bidirectional} if case.stream is None else {}
    layer = layer_class(input_size, case.hidden_size, **sizes, **memory, device=device)
    if case.stream is not None:
        return OverStream(layer, x, chosen, as_layer)
    return OverSequence(layer, _packed(x, case.shortest) if case.shortest is not None else x, chosen)


def _packed(x: torch.Tensor, shortest: int) -> PackedSequence:
    """The sequences as a PackedSequence, the longest first, their lengths evenly spread."""
    lengths = torch.linspace(x.shape[0], shortest, x.shape[1]).long()
    return pack_padded_sequence(x, lengths)


def _backend(contender: Contender) -> str:
    """What computed our side: on a configuration that the fast ones lack it is the reference."""
    layer = contender.layer
    assert isinstance(layer, SABLayer)
    with contender.autocast():
        return layer.backend_for(contender.example())


def _captured(calls: dict[str, Call], measured: dict[str, Any]) -> dict[str, Call]:
    """The calls as replays of CUDA graphs; why one could not be captured is noted."""
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            replays[name] = capture(call)
        except Exception as error:
            measured.setdefault("graph_errors", {})[name] = _one_line(error)
    return replays


def compared(milliseconds: dict[str, Any], memory: dict[str, int | None]) -> dict[str, Any]:
    """The ratios: of our fastest to torch.nn's fastest, and of the memory in each precision."""
    ratio: dict[str, dict[str, float]] = {}
    is_ours = OURS.format("")
    ways = {way: passes for times in milliseconds.values() for way, passes in times.items()}
    for way, passes in ways.items():
        for chosen in passes:
            best = [
                min((times[way][chosen]["median"] for times in side if chosen in times.get(way, {})), default=None)
                for side in (
                    [times for name, times in milliseconds.items() if name.startswith(is_ours)],
                    [times for name, times in milliseconds.items() if not name.startswith(is_ours)],
                )
            ]
            if best[0] is not None and best[1] is not None:
                ratio.setdefault(way, {})[chosen] = best[0] / best[1]
    pairs = zip(
        [name for name in memory if name.startswith(is_ours)],
        [name for name in memory if not name.startswith(is_ours)],
        strict=True,
    )
    memory_ratio = {
        mine.removeprefix(is_ours): taken / other
        for mine, its in pairs
        if (taken := memory[mine]) is not None and (other := memory[its])
    }
    return {"ratio": ratio, "memory_ratio": memory_ratio}


# Other processes

LONGEST = 120.0
"""Seconds after which compilation in another process is given up."""


def compile_ahead(chosen: Iterable[Case], device: torch.device, jobs: int, deadline: float | None) -> None:
    """Has other processes call every case's layer once in each precision, so that Triton's cache holds its kernels."""
    firsts: dict[tuple[Any, ...], tuple[Case, str]] = {}
    for case in chosen:
        for one in case.precisions:
            firsts.setdefault(case.kernels(one), (case, one))
    # Half of the time may go into it; what is not compiled by then is compiled when its case is measured.
    until = time.monotonic() + LONGEST if deadline is None else (time.monotonic() + deadline) / 2

    def compile_one(asked: tuple[Case, str]) -> None:
        request = json.dumps({"case": asdict(asked[0]), "precision": asked[1], "device": device.type})
        command = [sys.executable, "-m", "sab.lab.experiments.bench", request]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=max(until - time.monotonic(), 0.0))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, firsts.values()))


def main(request: str) -> None:
    """Calls our side of one case in one precision, which compiles what it needs."""
    asked = json.loads(request)
    for contender in ours(Case(**asked["case"]), torch.device(asked["device"]), [asked["precision"]]).values():
        contender.first_call()


# Records


def about_this_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on besides the case."""
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
        with contextlib.suppress(RuntimeError):  # a case may have left the device unusable: the next ones will tell
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
