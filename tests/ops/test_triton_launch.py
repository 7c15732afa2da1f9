"""Launching kernels, with stand-ins for them."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from sab.ops.triton import launch as launching
from sab.ops.triton.launch import Constants, launch

STREAM = 77
BEFORE = (STREAM, "function", "metadata", None, None, None)
"""What a compiled kernel gets between the grid and the tensors."""


class Kernel:
    """A kernel of two tensors, a size and a constant; what it was launched with, compiled or not, is kept."""

    __name__ = "forward_kernel"
    arg_names = ("a", "b", "size", "FIRST", "SECOND")

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.compiling: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        outer = self

        class Compiled:
            function = "function"
            packed_metadata = "metadata"

            @staticmethod
            def run(*arguments: Any) -> None:
                outer.launched.append(arguments)

        def compile_and_run(*arguments: Any, **constants: Any) -> Any:
            time.sleep(self.seconds)
            self.compiling.append((grid, arguments, constants))
            return Compiled()

        return compile_and_run


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching.torch_private, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(launching, "_made", [])


def test_what_is_known_is_launched_with_addresses() -> None:
    kernel, a, b = Kernel(), torch.zeros(8), torch.zeros(8)
    constants = Constants({"SECOND": 2, "FIRST": 1, "num_warps": 4})
    launch(kernel, 3, [a, b], [7], constants)
    assert kernel.compiling == [((3,), (a, b, 7), constants.values)]
    assert kernel.launched == []
    launch(kernel, 5, [b, a], [9], constants)
    assert kernel.launched == [(5, 1, 1, *BEFORE, b.data_ptr(), a.data_ptr(), 9, 1, 2)]
    assert len(kernel.compiling) == len(launching.first_launches()) == 1


def test_other_types_constants_and_absent_tensors_are_others() -> None:
    kernel, a = Kernel(), torch.zeros(8)
    constants = Constants({"FIRST": 1, "SECOND": 2})
    launch(kernel, 1, [a, a], [1], constants)
    launch(kernel, 1, [a, None], [1], constants)
    launch(kernel, 1, [a, a.double()], [1], constants)
    launch(kernel, 1, [a, a], [1], Constants({"FIRST": 1, "SECOND": 3}))
    assert len(kernel.compiling) == 4
    launch(kernel, 1, [a, None], [1], constants)
    assert kernel.launched == [(1, 1, 1, *BEFORE, a.data_ptr(), None, 1, 1, 2)]


def test_a_profiler_sees_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, a, constants = Kernel(), torch.zeros(8), Constants({"FIRST": 1, "SECOND": 2})
    monkeypatch.setattr(launching.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    for _ in range(2):
        launch(kernel, 1, [a, a], [1], constants)
    assert len(kernel.compiling) == 2
    assert len(launching.first_launches()) == 1


def test_what_lies_elsewhere_is_left_to_triton() -> None:
    kernel, a = Kernel(), torch.zeros(9)
    constants = Constants({"FIRST": 1, "SECOND": 2})
    for _ in range(2):
        launch(kernel, 1, [a[:8], a[1:]], [1], constants)
    assert len(kernel.compiling) == 2
    assert constants.compiled == {}


def test_a_slow_first_launch_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(launching, "PATIENCE", 0.05)
    caplog.set_level(logging.INFO, "sab")
    constants, a = Constants({"FIRST": 1, "SECOND": 2}), torch.zeros(8)
    launch(Kernel(seconds=0.3), 1, [a, a], [1], constants)
    told, done = caplog.records
    assert told.levelno == logging.WARNING
    assert told.getMessage().startswith("compiling the forward kernel of a SAB layer for this GPU, once")
    assert done.getMessage() == f"compiled the forward kernel in {launching.first_launches()[0]:.1f} s"
    launch(Kernel(), 1, [a, a], [1], constants)
    assert len(caplog.records) == 2
