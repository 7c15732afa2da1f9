"""The checks of `sab doctor`: what is installed, whether it works, and what is wrong, in one sentence each.

A check is a function that yields findings; an error that it raises is a finding too, so that one broken part does not
hide the others. Only torch and numpy are imported at the start, so that this works without any extra, with plain lines
where rich is missing. `without_extras` does what the command `sab` can do then.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sab import __version__
from sab.extras import EXTRAS, PURPOSES, explain, install_command
from sab.lab import data
from sab.layers import SABLSTM
from sab.ops import dispatch
from sab.ops.cpu import loader
from sab_cli.exits import DONE, USER_ERROR

State = Literal["works", "lacking", "broken"]
MARKS: dict[State, tuple[str, str, str]] = {
    "works": ("✓", "ok", "green"),
    "lacking": ("–", "-", "yellow"),
    "broken": ("✗", "!!", "bold red"),
}
"""How each state is shown: a mark, the same in ASCII, and a colour."""
RUNS = Path("runs")
ABSENT = "not here"
"""The store's message about a data set without any file."""
TOLERANCE = 5e-3
"""Largest relative difference of a backend from the reference; that is the rounding of TF32."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    about: str
    """Its group: versions, devices, backends, data, folders."""
    name: str
    state: State
    """Whether it works, is lacking but not needed, or is broken."""
    message: str
    """Its version or a description; a sentence where it does not work."""


def examine(out: Path = RUNS, data_dir: Path | None = None) -> Iterator[Finding]:
    """Yields all findings, each as soon as it is known."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "devices": _devices,
        "backends": _backends,
        "data": partial(_data, data_dir),
        "folders": partial(_folders, out, data_dir),
    }
    for about, check in checks.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield from check()
        except Exception as error:
            yield Finding(about, about, "broken", _sentence(error))


def main(out: Path = RUNS, data_dir: Path | None = None) -> int:
    """Shows all findings; returns 0 if all required components work, else 1."""
    findings = list(examine(out, data_dir))
    try:
        _show_table(findings)
    except ImportError:
        _show_lines(findings)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    verdict = f"Broken: {', '.join(broken)}." if broken else "All required components work."
    sys.stdout.write(f"{verdict}\n")
    return 1 if broken else 0


def without_extras(arguments: Sequence[str], error: ModuleNotFoundError) -> int:
    """What the command `sab` does if a package of an extra is missing: `doctor`, `info --backends`, or a sentence."""
    if list(arguments[:1]) == ["doctor"]:
        return main()
    if list(arguments) == ["info", "--backends"]:
        show_backends()
        return DONE
    sentence = explain(error)
    if sentence is None:
        raise error
    sys.stderr.write(f"sab: {sentence}\n")
    return USER_ERROR


def show_backends() -> None:
    """Show whether each backend can be used, and which one `auto` takes for the default layer on a kind of device."""
    facts = {name: f"{'usable' if usable else 'not usable'}: {why}" for name, (usable, why) in dispatch.here().items()}
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        taken = SABLSTM(128, 128, device=device).backend_for(torch.zeros(2, 1, 128, device=device))
        facts[f"auto on {device}"] = taken
    show(facts)


def show(facts: Mapping[str, Any]) -> None:
    """Write one fact a line, their values below each other."""
    width = max(map(len, facts))
    for fact, value in facts.items():
        sys.stdout.write(f"{fact:{width}}  {value}".rstrip() + "\n")


# Output


def _mark(state: State) -> str:
    mark, plain, _ = MARKS[state]
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return plain
    return mark


def _show_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.width = console.width if console.is_terminal else 120
    table = Table(show_header=False)
    about = ""
    for finding in findings:
        if finding.about != about:
            table.add_section()
        group, about = "" if finding.about == about else finding.about, finding.about
        mark = Text(_mark(finding.state), style=MARKS[finding.state][2])
        table.add_row(group, mark, Text(finding.name), Text(finding.message))
    console.print(table)


def _show_lines(findings: list[Finding]) -> None:
    for finding in findings:
        sys.stdout.write(f"{_mark(finding.state):2} {finding.about}: {finding.name}: {finding.message}\n")


def _sentence(error: Exception) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300] if first else type(error).__name__


# Checks


def _versions() -> Iterator[Finding]:
    for name, version in (
        ("python", platform.python_version()),
        ("sab", __version__),
        ("torch", torch.__version__),
        ("numpy", np.__version__),
    ):
        yield Finding("versions", name, "works", str(version))
    yield _package("triton", "triton is missing, so there are no kernels for NVIDIA GPUs.")
    for package, extra in EXTRAS.items():
        yield _package(package, f"not installed; optional, for {PURPOSES[extra]}: {install_command(extra)}.")


def _package(name: str, advice: str) -> Finding:
    """Whether a package can be imported, and its version."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return Finding("versions", name, "lacking", advice)
        return Finding("versions", name, "broken", f"{name} cannot be imported: {_sentence(error)}.")
    except Exception as error:
        return Finding("versions", name, "broken", f"{name} cannot be imported: {_sentence(error)}.")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "here"))
    return Finding("versions", name, "works", version)


def _devices() -> Iterator[Finding]:
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    yield Finding("devices", "cpu", "works", f"{platform.processor() or platform.machine()}, {cores}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if torch.version.cuda is None:
        yield Finding("devices", "cuda", "lacking", f"torch {torch.__version__} is built without CUDA.")
    elif not is_available:
        state = "broken" if caught else "lacking"  # without a driver torch warns of nothing
        why = str(caught[0].message).strip().splitlines()[0] if caught else "there is no device"
        yield Finding("devices", "cuda", state, f"torch is built for CUDA {torch.version.cuda}, but {why}.")
    for number in range(torch.cuda.device_count() if is_available else 0):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        description = f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
        yield Finding("devices", f"cuda:{number}", "works", description)


def _backends() -> Iterator[Finding]:
    """Compares a tiny layer, forward and backward, on each backend with the reference in float64."""
    expected = _trial("reference", "cpu", torch.float64)
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    places = {"reference": kinds, "cpu": ("cpu",), "triton": kinds[-1:]}
    for name, (usable, reason) in dispatch.here().items():
        if not usable:
            yield Finding("backends", name, "lacking", f"It cannot be used, so the reference does its work: {reason}.")
            continue
        for place in places[name]:
            yield _compare(name, place, reason, expected)


def _compare(name: str, place: str, description: str, expected: list[Tensor]) -> Finding:
    """Whether a backend on a device computes what is expected."""
    label = f"{name} on {place}"
    try:
        found = _trial(name, place, torch.float32)
    except Exception as error:
        return Finding("backends", label, "broken", f"It fails: {_sentence(error)}.")
    error = max(
        float((one - other).norm() / other.norm().clamp_min(1e-12)) for one, other in zip(found, expected, strict=True)
    )
    if not error <= TOLERANCE:
        sentence = f"It differs from the reference in float64 by {error:.1e} ({description})."
        return Finding("backends", label, "broken", sentence)
    return Finding("backends", label, "works", f"{description}; within {error:.0e} of the reference in float64")


def _trial(backend: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of a tiny layer, as float64 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = SABLSTM(3, 8, k_top=2, k_att=2, k_trunc=3, backend=backend).to(device, dtype)
        x = torch.randn(9, 2, 3).to(device, dtype).requires_grad_()
    output, _ = layer(x)
    output.square().sum().backward()
    gradients = [tensor.grad for tensor in (x, *layer.parameters())]
    return [tensor.detach().cpu().double() for tensor in (output, *gradients) if tensor is not None]


def _data(data_dir: Path | None) -> Iterator[Finding]:
    folder = data.folder_of(data_dir)
    states = {name: data.state_of(dataset, folder) for name, dataset in data.DATASETS.items()}
    have = {_folder_of(name) for name, (is_intact, _) in states.items() if is_intact}
    for name, (is_intact, message) in states.items():
        if is_intact:
            yield Finding("data", name, "works", message)
        elif message != ABSENT:
            yield Finding("data", name, "broken", f"{message}: get it again with: sab data get {_folder_of(name)}.")
        elif _folder_of(name) not in have:  # else another version of it is here
            yield Finding("data", name, "lacking", f"{message}: get it with: sab data get {_folder_of(name)}.")


def _folder_of(dataset: str) -> str:
    return data.DATASETS[dataset].folder


def _folders(out: Path, data_dir: Path | None) -> Iterator[Finding]:
    yield _folder("runs", out, "broken", "so no run can be kept there")
    yield _folder("data", data.folder_of(data_dir), "lacking", "so `sab data get` can put nothing there")
    yield _folder("CPU kernels", loader.cache_folder(), "lacking", "so they cannot be compiled")
    if importlib.util.find_spec("triton") is not None:
        home = Path(os.environ.get("TRITON_HOME") or Path.home())
        kernels = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
        yield _folder("GPU kernels", kernels, "lacking", "so they cannot be compiled")


def _folder(name: str, path: Path, state_without: State, consequence: str) -> Finding:
    """Whether a folder can be written to or, where there is none, be made; nothing is left there."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"sab")
            file.flush()
        free = shutil.disk_usage(existing).free / 2**30
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding("folders", name, state_without, f"{str(path)!r} cannot be written to, {consequence}: {reason}.")
    yet = "" if path.exists() else ", yet to be made"
    return Finding("folders", name, "works", f"{path}, {free:.1f} GiB free{yet}")
