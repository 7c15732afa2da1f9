"""Streams through an index beside exact ones: the measurement and its table in docs/long-memory.md.

    python -m tools.search measure RUNS CASE    # adds records; RUNS has a run `copying-seed0` of tools.long_streams
    python -m tools.search                      # the table from the records

Microstates and keys are those of a layer that runs over random symbols; then some steps are timed with all of them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sab
from sab.lab.training.checkpoint import load_model
from sab.lab.training.run import Run, provenance
from sab.ops import reference
from sab.search import IndexedStream
from tools.long_streams import memory
from tools.pages import ROOT, markdown, replace_part

PAGE, RECORDS = ROOT / "docs" / "long-memory.md", ROOT / "benchmarks" / "search.jsonl"
SYMBOLS, PIECE, STEPS, CHECK_EVERY = 10, 1000, 300, 5
"""Symbols, steps in a call while a memory is made, timed steps, and how many of them are checked: one in so many."""
TRAINED, UNTRAINED = "GRU trained on copying", "GRU, untrained"
CASES = {
    "small": (
        TRAINED,
        64,
        100_000,
        [("IVF1024,Flat", "nprobe=16"), ("IVF1024,Flat", "nprobe=64"), ("HNSW32", "efSearch=64")],
    ),
    "large": (
        TRAINED,
        64,
        1_000_000,
        [("IVF1024,Flat", "nprobe=16"), ("IVF1024,Flat", "nprobe=64"), ("IVF4096,Flat", "nprobe=64")],
    ),
    "largest": (UNTRAINED, 16, 10_000_000, [("IVF4096,Flat", "nprobe=64")]),
}
"""Layer, its size n = d, microstates, and what they are searched with."""
TRAINED_ON = {"IVF1024,Flat": 50_000, "IVF4096,Flat": 200_000, "HNSW32": 1}
"""Keys that an index is trained on."""


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        torch.set_num_threads(1)
        importlib.import_module("faiss").omp_set_num_threads(1)
        for record in measured(Path(sys.argv[2]), *CASES[sys.argv[3]]):
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return
    replace_part(PAGE, "search", page_part(load()))


def layer_of(runs: Path, name: str, size: int) -> sab.SABGRU:
    """The layer of a case."""
    if name == TRAINED:
        return load_model(Run.open(runs / "copying-seed0"), torch.device("cpu")).layers.eval()
    torch.manual_seed(0)
    return sab.SABGRU(SYMBOLS, size).eval()


def inputs(generator: torch.Generator, steps: int) -> Tensor:
    """Random symbols, [steps, SYMBOLS]."""
    symbols = torch.randint(SYMBOLS, (steps,), generator=generator)
    return torch.nn.functional.one_hot(symbols, SYMBOLS).float()


@torch.no_grad()
def state_of(layer: sab.SABGRU, count: int) -> Any:
    """The state of a layer with so many microstates, which it made while it read the latest 256 of them."""
    generator, k_att = torch.Generator().manual_seed(1), layer.config.k_att
    reading = sab.SABGRU(layer.input_size, layer.hidden_size, max_memory=256).eval()
    reading.load_state_dict(layer.state_dict())
    weights, h = layer._weights(0), None
    kept, keys = torch.empty(count, layer.hidden_size), torch.empty(count, layer._key_size)
    numbers = torch.arange(count)
    for first in range(0, count, PIECE // k_att):
        output, h = reading(inputs(generator, PIECE), h)
        place = slice(first, first + PIECE // k_att)
        kept[place] = output[k_att - 1 :: k_att]
        keys[place] = reference.key_of(kept[place], numbers[place], weights.scorer, layer.config)
    assert h is not None
    parts = (kept.unsqueeze(0), keys.unsqueeze(0), numbers.unsqueeze(0), torch.tensor(count * k_att))
    return sab.SABState(h.as_subclass(Tensor), None, *parts)


@torch.no_grad()
def measured(
    runs: Path, name: str, size: int, count: int, searches: Sequence[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """The records of exact steps, of a step with its gradients, and of those through an index, from one memory."""
    layer = layer_of(runs, name, size)
    state, x = state_of(layer, count), inputs(torch.Generator().manual_seed(2), STEPS)
    case = {"layer": name, "size": size, "microstates": count}
    of = provenance(torch.device("cpu"))
    versions = {**of.versions, "faiss": importlib.metadata.version("faiss-cpu")}
    facts = {"device": of.device, "versions": versions, "commit": of.commit}
    before, exact = free_memory(), state
    times: list[float] = []
    for one in x[: STEPS // 10].split(1):
        began = time.process_time()
        _, exact = layer(one, exact)
        times.append(time.process_time() - began)
    taken = (memory() - before) / count
    yield {**case, "index": None, "us": fastest(times) * 1e6, "bytes": taken, **facts}
    del exact
    for which in ("weights", "microstates"):
        spent = fastest(learn(layer, state, x, which == "microstates"))
        yield {**case, "index": "gradients", "of": which, "us": spent * 1e6, **facts}
    for index, given in searches:
        before, began = free_memory(), time.process_time()
        options = {"index": index, "parameters": given, "train_after": TRAINED_ON[index]}
        stream = IndexedStream(layer, state, **options, check_every=CHECK_EVERY)
        built, taken = time.process_time() - began, (memory() - before) / count
        times = []
        for one in x.split(1):
            began = time.process_time()
            stream.step(one)
            times.append(time.process_time() - began)
        record = {**case, "index": index, "parameters": given, "us": fastest(times) * 1e6, "bytes": taken}
        record |= {"recall": stream.recall.share, "checked": stream.recall.steps, "build_us": built / count * 1e6}
        yield record | facts
        times = []
        for one in x[: STEPS // 3].split(1):
            began = time.process_time()
            with torch.enable_grad():
                stream.step(one, gradients=True).sum().backward()
            times.append(time.process_time() - began)
            layer.zero_grad(set_to_none=True)
        yield {**case, "index": index, "parameters": given, "of": "microstates", "us": fastest(times) * 1e6, **facts}
        del stream


def fastest(times: Sequence[float]) -> float:
    """What a tenth of the times stay below: other work of the machine disturbs the rest."""
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def free_memory() -> int:
    """Bytes of memory that this process has after it has given back what it does not use."""
    ctypes.CDLL(None).malloc_trim(0)
    return memory()


def learn(layer: sab.SABGRU, state: Any, x: Tensor, of_microstates: bool, times: int = 5) -> list[float]:
    """Seconds of a step forward and backward, with gradients of the weights and, if asked for, of all microstates."""
    found: list[float] = []
    with torch.enable_grad():
        for one in x[:times].split(1):
            microstates = state.microstates.clone().requires_grad_(of_microstates)
            parts = (state.keys, state.numbers, state.steps)
            given = sab.SABState(state.h.as_subclass(Tensor), None, microstates, *parts)
            began = time.process_time()
            layer(one, given)[0].sum().backward()
            found.append(time.process_time() - began)
            layer.zero_grad(set_to_none=True)
    return found


def load() -> list[dict[str, Any]]:
    """All records."""
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def page_part(records: Sequence[dict[str, Any]]) -> str:
    """The table."""
    rows: list[list[str]] = []
    for one in records:
        is_exact = one["index"] in (None, "gradients")
        how = "exact" if is_exact else f"`{one['index']}`, `{one['parameters']}`"
        if "of" in one:
            also = " and of the microstates" if one["of"] == "microstates" else ""
            how += f", forward and backward, gradients of the weights{also}"
        rows.append(
            [
                f"{one['microstates']:,}",
                f"{one['layer']}, n = d = {one['size']}",
                how,
                f"{one['us']:,.0f}",
                f"{one['recall']:.1%}".replace("%", " %") if "recall" in one else "",
                f"{one['bytes']:,.0f}" if "bytes" in one else "",
                f"{one['build_us']:.0f}" if "build_us" in one else "",
            ]
        )
    return markdown(
        ["microstates", "layer", "search", "µs a step", "recall", "bytes a microstate", "µs to add one"], rows
    )


if __name__ == "__main__":
    main()
