"""The cells against `torch.nn`'s own cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sab.parts.registry import CELLS
from tests.ops.cases import DOUBLE, assert_close, gradients, randn

TORCH_CELLS: dict[str, Any] = {
    "lstm": lambda: nn.LSTMCell(3, 4, dtype=DOUBLE),
    "gru": lambda: nn.GRUCell(3, 4, dtype=DOUBLE),
    "rnn_tanh": lambda: nn.RNNCell(3, 4, dtype=DOUBLE),
    "rnn_relu": lambda: nn.RNNCell(3, 4, nonlinearity="relu", dtype=DOUBLE),
}


def step(name: str, module: Any, x: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x_gates = F.linear(x, module.weight_ih, module.bias_ih)
    h_gates = F.linear(h, module.weight_hh, module.bias_hh)
    return CELLS[name].step(x_gates, h_gates, h, c)


@pytest.mark.parametrize("name", CELLS)
def test_a_step_equals_torch(name: str) -> None:
    module = TORCH_CELLS[name]()
    x, h, c = (3 * randn(5, size, seed=size).requires_grad_() for size in (3, 4, 4))
    has_c = CELLS[name].has_c
    assert module.weight_hh.shape[0] == CELLS[name].gates * 4
    expected = list(module(x, (h, c))) if has_c else [module(x, h)]
    actual = [part for part in step(name, module, x, h, c if has_c else None) if part is not None]
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    leaves = [x, h, c, *module.parameters()]
    for one, other in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("value", [1e4, -1e4])
@pytest.mark.parametrize("name", CELLS)
def test_large_preactivations(name: str, value: float, dtype: torch.dtype) -> None:
    gates = torch.full((2, CELLS[name].gates * 4), value, dtype=dtype, requires_grad=True)
    h = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    output, _ = CELLS[name].step(gates, gates, h, h if CELLS[name].has_c else None)
    assert output.isfinite().all()
    for gradient in gradients([output], [gates, h]):
        assert gradient.isfinite().all()
