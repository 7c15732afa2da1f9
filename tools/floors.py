"""The least time that each case of the benchmark could take, computed from its sizes; docs/engine.md explains it."""

from __future__ import annotations

from typing import NamedTuple

from sab import SABConfig
from sab.lab.experiments.bench import DEFAULT, LARGEST_SMALL, Case

GATES = {"lstm": 4, "gru": 3, "tanh": 1}
OPERATIONS = 989e12
"""Of an H200's tensor cores in bfloat16, a second."""
BANDWIDTH = 4.8e12
"""Of an H200's memory, bytes a second."""
MULTIPROCESSORS, CLOCK, CACHE_WIDTH = 132, 1.98e9, 64
"""How many there are, their cycles a second, and the bytes that each reads from the second cache in a cycle."""
STEP = 1.8e-6
"""Seconds of a step in both directions at such sizes without a memory, measured: what waits for what in a step."""
MEETING = 0.7e-6
"""Seconds until all programs of a large kernel have met, measured."""
MEETINGS = 6
"""How often they meet in a step with the default memory: three times in each direction."""


class Floor(NamedTuple):
    """Seconds that a training step takes at least, for each of three reasons."""

    products: float
    memory: float
    chain: float

    @property
    def most(self) -> float:
        """The floor: none of the three can be undercut."""
        return max(self)


def multiply_adds(case: Case) -> float:
    """Of one row in one step of the forward, over those of torch.nn's layer: what the memory's weights add."""
    return _own(case) / _torchs(case)


def _torchs(case: Case) -> float:
    n = case.hidden_size
    return GATES[case.cell] * n * (n + (case.input_size or n))


def _memory_products(case: Case) -> float:
    """Query and keys, [d, n], and the gate, [n, 2n]; the affine scorer has vectors in the places of the first two."""
    n, keys = case.hidden_size, 1 + 1 / SABConfig.k_att
    return n * (_key_size(case) * keys + 2 * n) if case.scorer == DEFAULT else n * keys


def _key_size(case: Case) -> int:
    return SABConfig().key_size(case.hidden_size)


def _own(case: Case) -> float:
    return _torchs(case) + _memory_products(case)


def _keys(case: Case) -> float:
    """How many keys a step scores on average."""
    return case.steps / (2 * SABConfig.k_att) if case.scorer == DEFAULT else 0.0


def of_gpu(case: Case) -> Floor:
    """The floor of a training step on an H200, in bfloat16."""
    n, gates = case.hidden_size, GATES[case.cell] * case.hidden_size
    passes = case.num_layers * (2 if case.bidirectional else 1)
    mean = case.steps if case.shortest is None else (case.steps + case.shortest) / 2
    rows = case.batch_size * mean * passes
    # Three products for each weight, of which the input's lacks the gradient of the input; scores go forward alone.
    products = 3 * _own(case) - gates * (case.input_size or n) + _keys(case) * _key_size(case)
    # The gates eight times, states and gradients three times, the output twice and its gradient.
    numbers = 8 * gates + (9 if case.scorer == DEFAULT else 5) * 3 * n + 3 * n
    return Floor(2 * products * rows / OPERATIONS, 4 * numbers * rows / BANDWIDTH, passes * case.steps * _step(case))


def _step(case: Case) -> float:
    """Seconds of a step in both directions, which no other step overlaps."""
    n = case.hidden_size
    if n <= LARGEST_SMALL:
        return STEP + 2 * n * _keys(case) / (CACHE_WIDTH * CLOCK)  # keys of 2 bytes, each read once
    weights = 2 * (GATES[case.cell] * n * n + _memory_products(case))  # of 2 bytes, by all multiprocessors together
    return MEETINGS * MEETING + 2 * weights / (MULTIPROCESSORS * CACHE_WIDTH * CLOCK)
