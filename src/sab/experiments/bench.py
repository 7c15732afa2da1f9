"""The benchmark: a layer and `torch.nn.LSTM` of the same size, side by side in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from sab import SABLSTM
from sab.errors import Mistake, check_choice
from sab.training.files import write_text
from sab.training.run import provenance


@dataclass(frozen=True)
class Case:
    """What is measured: forward alone, and forward with backward, of one layer in float32."""

    hidden_size: int
    batch_size: int
    steps: int
    k_top: int = 10
    k_att: int = 2
    k_trunc: int = 10
    input_size: int = 10


CASES = {"F": Case(128, 64, 120), "G": Case(1000, 32, 100)}
"""Sizes of the paper's synthetic tasks (F) and of its language models (G)."""
SCORERS = ("affine", "dot", "mlp")


def bench(cases: list[str], backends: list[str], seconds: float, progress: Callable[[str], None]) -> Iterator[dict]:
    """One record for each case, scorer and backend, each timed for about `seconds`, and nn.LSTM again beside each."""
    for name in cases:
        case = CASES[check_choice("cases", name, CASES)]
        x = torch.randn(case.steps, case.batch_size, case.input_size)
        for scorer in SCORERS:
            for backend in backends:
                options = {"k_top": case.k_top, "k_att": case.k_att, "k_trunc": case.k_trunc, "scorer": scorer}
                progress(f"case {name}, {scorer}, {backend}")
                ours = SABLSTM(case.input_size, case.hidden_size, backend=backend, **options)
                record: dict[str, Any] = {"case": name, **asdict(case), "scorer": scorer, "backend": backend}
                try:
                    record["ours"] = _times(ours, x, seconds)
                except Mistake as mistake:
                    record["unsupported"] = str(mistake)
                else:
                    record["nn.LSTM"] = _times(nn.LSTM(case.input_size, case.hidden_size), x, seconds)
                    record["ratio"] = {key: record["ours"][key] / record["nn.LSTM"][key] for key in record["ours"]}
                yield {**record, "threads": torch.get_num_threads(), **provenance(x.device)}


def _times(layer: nn.Module, x: Tensor, seconds: float) -> dict[str, float]:
    """Median milliseconds of a forward without gradients, and of a forward with its backward."""

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad()
        layer(x)[0].backward(gradient)

    gradient = torch.randn_like(layer(x)[0])
    return {"forward": _median(forward, seconds), "forward+backward": _median(both, seconds)}


def _median(function: Callable[[], None], seconds: float) -> float:
    function()
    function()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds * 1e3:
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def table(records: list[dict[str, Any]]) -> Table:
    """The records as people read them."""
    made = Table(title="milliseconds: ours / torch.nn.LSTM with full backpropagation = ratio")
    for column in ("case", "scorer", "backend", "forward + backward", "forward"):
        made.add_column(column, justify="left" if column in ("case", "scorer", "backend") else "right")
    for record in records:
        cells = [record["case"], record["scorer"], record["backend"]]
        for key in ("forward+backward", "forward"):
            if "ratio" in record:
                cells.append(f"{record['ours'][key]:.1f} / {record['nn.LSTM'][key]:.1f} = {record['ratio'][key]:.2f}")
            else:
                cells.append("not supported")
        made.add_row(*cells)
    return made


def save(records: list[dict[str, Any]], path: Path) -> None:
    """The records as JSON lines."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
