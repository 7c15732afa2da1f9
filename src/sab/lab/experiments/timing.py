"""Time and memory of layers' calls, several layers in turn, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.utils.rnn import PackedSequence

BOTH, FORWARD, STREAM = "forward+backward", "forward", "stream"
"""The passes: over a sequence with gradients and without, and step by step without."""
FEWEST, FEWEST_SLOW, MOST = 7, 3, 1000
"""How often each call is timed at least, at least where that takes very long, and at most."""
Call = Callable[[], None]


class Contender(ABC):
    """A layer with its input, whose passes are calls without arguments."""

    def __init__(self, layer: nn.Module, device: torch.device, precision: str):
        self.layer = layer
        self.device = device
        self._lower = precision != "float32"
        self.type = ""
        """The type of the output, known after the first call."""

    @abstractmethod
    def calls(self) -> dict[str, Call]:
        """The passes by name."""

    @abstractmethod
    def example(self) -> Tensor | PackedSequence:
        """What one call of the layer gets."""

    @abstractmethod
    def first_call(self) -> float:
        """Seconds of the first call of the main pass, in which whatever must be compiled is."""

    def peak_memory(self) -> int | None:
        """Bytes that a training step takes at most, gradients included; None where there is no such step."""
        return None

    def autocast(self) -> torch.autocast:
        """The context of a call in the contender's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._lower)


class OverSequence(Contender):
    """A layer whose call takes a whole sequence; the input needs no gradient."""

    def __init__(self, layer: nn.Module, x: Tensor | PackedSequence, precision: str = "float32"):
        super().__init__(layer, _tensor(x).device, precision)
        self.x = x
        self._gradient = _tensor(x)

    def example(self) -> Tensor | PackedSequence:
        return self.x

    def first_call(self) -> float:
        started = time.perf_counter()
        output = self._output()
        self._gradient = torch.randn_like(output) / 100
        self.type = str(output.dtype).removeprefix("torch.")
        output.backward(self._gradient)
        _wait(self.device)
        return time.perf_counter() - started

    def calls(self) -> dict[str, Call]:
        return {BOTH: self.both, FORWARD: self.forward}

    def both(self) -> None:
        """A forward and its backward."""
        self.layer.zero_grad()
        self._output().backward(self._gradient)

    def forward(self) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            self._output()

    def _output(self) -> Tensor:
        with self.autocast():
            return _tensor(self.layer(self.x)[0])

    def peak_memory(self) -> int | None:
        self.layer.zero_grad()
        if self.device.type != "cuda":
            return peak_on_cpu(self.both)
        _wait(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.both()
        _wait(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


class OverStream(Contender):
    """A layer or cell that is called for each step, without gradients; its memory begins empty with each pass.

    A layer is called with [1, B, input_size] and returns its output and its state, a cell with [B, input_size].
    """

    def __init__(self, layer: nn.Module, x: Tensor, precision: str = "float32", is_layer: bool = False):
        super().__init__(layer, x.device, precision)
        self._is_layer = is_layer
        self._steps = x.split(1) if is_layer else x.unbind()

    def example(self) -> Tensor:
        return self._steps[0]

    def first_call(self) -> float:
        started = time.perf_counter()
        self.layer.eval()
        self.stream()
        _wait(self.device)
        return time.perf_counter() - started

    def calls(self) -> dict[str, Call]:
        return {STREAM: self.stream}

    @torch.no_grad()
    def stream(self) -> None:
        """All steps, each with the state that the one before returned."""
        state: Any = None
        with self.autocast():
            for step in self._steps:
                state = self.layer(step, state)[1] if self._is_layer else self.layer(step, state)
        h, _ = state
        self.type = str(h.dtype).removeprefix("torch.")


def _tensor(x: Tensor | PackedSequence) -> Tensor:
    return x.data if isinstance(x, PackedSequence) else x


def peak_on_cpu(call: Call) -> int:
    """The most bytes above those at its beginning that a call has of torch's allocator."""
    with _without_stderr(), profiler.profile(use_cpu=True, profile_memory=True) as profile:
        call()
    events: list[Any] = profile.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(accumulate((change for _, change in sorted(changes)), initial=0))


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """A context in which nothing reaches the process's stderr, where some builds of the profiler write."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def capture(call: Call) -> Call:
    """The replay of a call from a CUDA graph: the same work on the device, without the host's part of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is made once for a stream is made here, outside the graph
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def time_in_turn(calls: Mapping[str, Call], device: torch.device, seconds: float) -> dict[str, dict[str, Any]]:
    """Milliseconds of each call, its median and minimum over about `seconds` in which all take turns.

    The device is idle when a call begins, and a call ends when the device is idle again.
    """
    clock = _cuda_milliseconds if device.type == "cuda" else _cpu_milliseconds
    begun, rounds = time.perf_counter(), 0
    while rounds < 1 or time.perf_counter() - begun < seconds / 4:  # clocks rise, caches fill
        for call in calls.values():
            clock(call)
        rounds += 1
    taken: dict[str, list[float]] = {name: [] for name in calls}
    begun, rounds = time.perf_counter(), 0
    while not _is_enough(rounds, time.perf_counter() - begun, seconds):
        for name, call in calls.items():
            taken[name].append(clock(call))
        rounds += 1
    return {
        name: {"median": statistics.median(times), "min": min(times), "repeats": len(times)}
        for name, times in taken.items()
    }


def _is_enough(rounds: int, elapsed: float, seconds: float) -> bool:
    if rounds >= MOST:
        return True
    return elapsed >= seconds and rounds >= (FEWEST_SLOW if elapsed >= max(8 * seconds, 1.0) else FEWEST)


def _cuda_milliseconds(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _cpu_milliseconds(call: Call) -> float:
    time.sleep(0.005)  # the last call's threads, which may belong to another library, stop waiting for work
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
