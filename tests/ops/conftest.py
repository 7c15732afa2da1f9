"""What the tests of the backends share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS refuses what `poisoned` switches on


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN and of the largest integers, so that what nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
