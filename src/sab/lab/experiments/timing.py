"""Time and memory of layers' calls, several layers in turn, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PASSES = ("forward+backward", "forward")
FEWEST, FEWEST_SLOW, MOST = 7, 3, 1000
"""How often each call is timed at least, at least where that takes very long, and at most."""
Call = Callable[[], None]


class Contender:
    """A layer, its input, and its two passes as calls without arguments."""

    def __init__(self, layer: nn.Module, x: Tensor, precision: str = "float32"):
        self.layer = layer
        self.x = x
        self._lower = precision != "float32"
        self._gradient = x
        self.type = ""
        """The type of the output, known after the first call."""

    def first_call(self) -> float:
        """Seconds of the first call of both passes, in which whatever must be compiled is."""
        started = time.perf_counter()
        output = self._output()
        self._gradient = torch.randn_like(output) / 100
        self.type = str(output.dtype).removeprefix("torch.")
        output.backward(self._gradient)
        del output
        self.forward()
        _wait(self.x.device)
        return time.perf_counter() - started

    def calls(self) -> dict[str, Call]:
        """The passes by name."""
        return dict(zip(PASSES, (self.both, self.forward), strict=True))

    def both(self) -> None:
        """A forward and its backward."""
        self.layer.zero_grad()
        self._output().backward(self._gradient)

    def forward(self) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            self._output()

    def _output(self) -> Tensor:
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self._lower):
            return self.layer(self.x)[0]

    def peak_memory(self) -> int | None:
        """Bytes that a forward and its backward take at most on a GPU, gradients included; None elsewhere."""
        device = self.x.device
        if device.type != "cuda":
            return None
        self.layer.zero_grad()
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.both()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before


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
    while rounds < 2 or time.perf_counter() - begun < seconds / 4:  # clocks rise, caches fill
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
