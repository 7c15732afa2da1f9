"""Rows and tables whose runs take a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sab.lab.experiments.tables import Row
from sab.lab.training import RunConfig


@dataclass(frozen=True)
class TinyRow(Row):
    """A row in which everything but the method is small."""

    def config(self, seed: int, iterations: int | None = None, device: str = "auto") -> RunConfig:
        config = super().config(seed, 6 if iterations is None else iterations, device)
        training = replace(config.training, batch_size=3, eval_every=2, eval_batches=1, checkpoint_every=4, threads=1)
        training = replace(training, precision="float32")
        return replace(config, model=replace(config.model, hidden_size=6), training=training)


def tiny_rows() -> list[Row]:
    sab = TinyRow("copying", 2, "sab", 4, 2, reading="ours", other_lengths=(3, 5), moments=(1, 4, 9))
    written = replace(sab, reading="as written", other_lengths=(), moments=())
    return [sab, written, TinyRow("copying", 4, "tbptt", 2), TinyRow("adding", 3, "bptt")]


@contextmanager
def replaced(table: dict[str, Any], *problems: Any) -> Iterator[None]:
    """Has a table hold these problems alone; then those that it had, in their order."""
    before = dict(table)
    table.clear()
    table.update({problem.name: problem for problem in problems})
    try:
        yield
    finally:
        table.clear()
        table.update(before)


@pytest.fixture
def rows() -> list[Row]:
    return tiny_rows()
