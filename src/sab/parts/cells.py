"""The recurrent cells, with `torch.nn`'s equations, gate order and parameter shapes.

A cell sees two linear maps, made before it is called: `x_gates` = W_ih x + b_ih and `h_gates` = W_hh h + b_hh.
So the input's map of a whole sequence is one matrix product outside the loop over time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class Cell(NamedTuple):
    """A cell's equations and the shapes that follow from them."""

    gates: int
    """Rows of the weights, in multiples of the hidden size."""
    has_c: bool
    """Whether it carries a cell state c besides the hidden state h."""
    step: Step
    """(x_gates, h_gates, h, c) -> (provisional hidden state, c)."""
    splits_gates: bool = False
    """Whether x_gates and h_gates do not enter as their sum alone, as in the GRU: then b_hh cannot be added to the
    input's part beforehand, the two have gradients of their own, and the last gate's h_gates are saved."""


def lstm(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    assert c is not None
    i, f, g, o = (x_gates + h_gates).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x_r, x_z, x_n = x_gates.chunk(3, dim=-1)
    h_r, h_z, h_n = h_gates.chunk(3, dim=-1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return n + z * (h - n), None


def rnn_tanh(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.tanh(x_gates + h_gates), None


def rnn_relu(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.relu(x_gates + h_gates), None


CELLS: dict[str, Cell] = {
    "lstm": Cell(4, True, lstm),
    "gru": Cell(3, False, gru, splits_gates=True),
    "rnn_tanh": Cell(1, False, rnn_tanh),
    "rnn_relu": Cell(1, False, rnn_relu),
}
