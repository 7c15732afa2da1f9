"""What `recompute=True` saves and costs: the generated part of docs/performance.md, from benchmarks/recompute.jsonl.

`python -m tools.recompute measure OUT.jsonl [SECONDS]` measures it on this machine, in at most about so many seconds.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sab

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "recompute.jsonl"
WAYS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "recompute": {"recompute": True},
    "recompute, offload": {"recompute": True, "offload": True},
}


class Case(NamedTuple):
    """What is trained on."""

    steps: int
    n: int
    batch: int
    inputs: int
    max_memory: int | None = None


CASES = {
    "cpu": (Case(2_000, 64, 8, 8), Case(20_000, 64, 8, 8), Case(100_000, 128, 8, 8)),
    "cuda": (
        Case(2_000, 128, 64, 128),
        Case(20_000, 128, 64, 128),
        Case(100_000, 128, 64, 128, max_memory=512),  # without a bound, scoring all keys takes minutes there
    ),
}
"""What is measured on each kind of device."""
LONG = 20_000
"""A call of more steps is timed once; on a GPU one of as many, too."""


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        measure(Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 600.0)
        return
    from tools.pages import replace_part

    replace_part(PAGE, "recompute", page_part(RECORDS.read_text(encoding="utf-8")))


def measure(out: Path, seconds: float) -> None:
    """Append a record for each measurement, those that need more time than is left excepted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline, is_gpu = time.monotonic() + seconds, device.type == "cuda"
    if not is_gpu:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if is_gpu else "1 CPU thread"
    about: dict[str, Any] = {"device": name, "torch": torch.__version__}

    def write(record: dict[str, Any]) -> None:
        line = json.dumps(about | {"date": datetime.now(UTC).isoformat(timespec="seconds")} | record)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    for n in (128, 256) if is_gpu else (64,):
        for exact in (True, False) if is_gpu else (True,):
            write({"what": "gradients", "exact": exact} | gradients(device, n, exact))
    for case in CASES[device.type]:
        for way, options in WAYS.items():
            if options.get("offload") and not is_gpu:
                continue
            if time.monotonic() > deadline:
                write({"what": "left out for lack of time", "steps": case.steps, "way": way})
                continue
            layer = _layer(device, case.inputs, case.n, max_memory=case.max_memory, **options)
            _train(layer, torch.randn(600, case.batch, case.inputs, device=device))  # compiles
            own = {"way": way, "steps": case.steps, "max_memory": case.max_memory, "n": case.n, "batch": case.batch}
            write({"what": "training", **own, **training(layer, case, device)})


def _layer(device: torch.device, inputs: int, n: int, **options: Any) -> sab.SABLSTM:
    torch.manual_seed(0)
    return sab.SABLSTM(inputs, n, device=device, **options)


def _train(layer: sab.SABLSTM, x: torch.Tensor) -> None:
    output, _ = layer(x)
    output.sum().backward()


def training(layer: sab.SABLSTM, case: Case, device: torch.device) -> dict[str, Any]:
    """Seconds of forward and backward, the least of three where they are short, and the peak above the input.

    On the CPU these are seconds of its one thread, which other programs make no longer.
    """
    x = torch.randn(case.steps, case.batch, case.inputs, device=device)
    is_gpu = device.type == "cuda"
    clock, seconds, peak, allocated = time.perf_counter if is_gpu else time.process_time, [], 0, 0
    for _ in range(3 if case.steps < LONG or (case.steps == LONG and not is_gpu) else 1):
        layer.zero_grad()
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        started = clock()
        _train(layer, x)
        if is_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - allocated
        seconds.append(clock() - started)
    if not is_gpu:
        from sab.lab.experiments.timing import peak_on_cpu

        layer.zero_grad()
        peak = peak_on_cpu(lambda: _train(layer, x))
    return {"seconds": min(seconds), "peak": peak, "output": case.steps * case.batch * case.n * 4}


def gradients(device: torch.device, n: int, exact: bool) -> dict[str, Any]:
    """How far outputs and gradients with and without recomputation differ, relative to each one's largest entry."""
    steps, batch = 2000, 8
    setting: Any = torch.backends.cudnn.rnn  # pyright: ignore[reportAttributeAccessIssue]
    before, setting.fp32_precision = setting.fp32_precision, "ieee" if exact else "tf32"
    x = torch.randn(steps, batch, 16, generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for options in ({}, {"recompute": True}, {"recompute": True, "offload": True}):
        layer = _layer(device, 16, n, **options)
        output, _ = layer(x)
        output.square().sum().backward()
        found.append([output.detach(), *(one.grad for one in layer.parameters() if one.grad is not None)])
    setting.fp32_precision = before
    difference = max(
        ((one - other).abs().max() / one.abs().max().clamp(min=1e-30)).item()
        for again in found[1:]
        for one, other in zip(found[0], again, strict=True)
    )
    return {"n": n, "batch": batch, "steps": steps, "difference": difference}


def page_part(records: str) -> str:
    """The table, and how far gradients differ."""
    from tools.pages import markdown

    found = [json.loads(line) for line in records.splitlines()]
    names = ("device", "n", "batch", "steps", "max_memory", "way")
    runs = {tuple(one.get(name) for name in names): one for one in found if one["what"] == "training"}
    rows = []
    for (device, n, batch, steps, bound, way), one in runs.items():
        base = runs.get((device, n, batch, steps, bound, "all kept"))
        own, ratios = one["peak"] - one["output"], ("–", "–", "–")
        if base is not None and base is not one:
            ratios = (
                f"{own / (base['peak'] - base['output']):.3f}",
                f"{one['peak'] / base['peak']:.3f}",
                f"{one['seconds'] / base['seconds']:.2f}",
            )
        sizes = f"{n}", f"{batch}", f"{steps:,}", "–" if bound is None else f"{bound}"
        rows.append((device, *sizes, way, f"{own / 1e9:.2f}", f"{one['seconds']:.2f}", *ratios))
    header = (
        "where",
        "n",
        "B",
        "T",
        "bound",
        "way",
        "own, GB",
        "seconds",
        "own, ratio",
        "with output, ratio",
        "time, ratio",
    )
    compared = [one for one in found if one["what"] == "gradients" and one["exact"]]
    worst = max(one["difference"] for one in compared)
    notes = (
        "`own` is the peak of a training step above the input, the output and the parameters, `bound` the layer's "
        "`max_memory`.\n"
        f"In full float32, over 2,000 steps, outputs and gradients differ by at most {worst:.1g} of each one's largest "
        "entry."
    )
    return f"{markdown(header, rows)}\n\n{notes}"


if __name__ == "__main__":
    main()
