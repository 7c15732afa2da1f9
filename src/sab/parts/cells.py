"""The recurrent cells, with `torch.nn`'s equations, gate order and parameter shapes.

A cell sees two linear maps, made before it is called: `x_gates` = W_ih x + b_ih and `h_gates` = W_hh h + b_hh.
So the input's map of a whole sequence is one matrix product outside the loop over time. With layer norm both products
are normalised before their bias is added (`linear`). Each cell is written as the reference computes it and, below that,
as the Triton kernels do; `ops/cpu/cells.h` has it in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.parts.pointwise import pointwise, sigmoid, tanh, tl

Step = Callable[..., tuple[Tensor, Tensor | None]]
NORM_EPSILON = 1e-5
"""What layer norm adds to a variance."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None) -> Tensor:
    """W x + b [..., G]; with a gain [G], the layer norm of W x in the place of W x."""
    if gain is None:
        return F.linear(x, weight, bias)
    return F.layer_norm(F.linear(x, weight), gain.shape, gain, bias, NORM_EPSILON)


class CellFunctions(NamedTuple):
    """A cell in Triton, for one unit or many; tuples hold a tensor for each gate."""

    forward: Callable[..., Any]
    """(x_gates, h_gates, h, c, MATH) -> (provisional hidden state, c, activated gates)."""
    backward: Callable[..., Any]
    """(gradients of the provisional hidden state and of c; activated gates; h, c and c after the step; the last gate's
    h_gates; MATH) -> (gradients of x_gates, of h_gates, of h besides h_gates, of c).

    What a cell does not have comes as any tensor and is not looked at: c without `has_c`, h and the last gate's h_gates
    without `splits_gates`. Without `splits_gates` the gradients of x_gates and h_gates are the same, that of h is 0.
    """


class Cell(NamedTuple):
    """A cell's equations and the shapes that follow from them."""

    gates: int
    """Rows of the weights, in multiples of the hidden size."""
    has_c: bool
    """Whether it carries a cell state c besides the hidden state h."""
    step: Step
    """(x_gates, h_gates, h, c) -> (provisional hidden state, c); with `normalises_c` there may be a fifth argument."""
    splits_gates: bool = False
    """Whether x_gates and h_gates do not enter as their sum alone, as in the GRU: then b_hh cannot be added to the
    input's part beforehand, the two have gradients of their own, and the last gate's h_gates are saved. Only such a
    cell may use h itself."""
    is_bounded: bool = False
    """Whether its provisional hidden state is within [-1, 1] for every input where h is, layer norm or not."""
    normalises_c: bool = False
    """Whether layer norm is also for the cell state: then `step` takes, as `read`, a map of c to the layer
    norm that the hidden state is made from. c itself is carried on as it is."""
    triton: CellFunctions | None = None
    """None: the Triton backend refuses the cell."""
    cpp: str | None = None
    """Name of its struct in `ops/cpu/cells.h`; None: the CPU backend refuses the cell."""


# LSTM


def lstm(
    x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None, read: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    assert c is not None
    i, f, g, o = (x_gates + h_gates).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c if read is None else read(c)), c


@pointwise
def lstm_forward(x, p, h, c, MATH):
    i = sigmoid(x[0] + p[0], MATH)
    f = sigmoid(x[1] + p[1], MATH)
    g = tanh(x[2] + p[2], MATH)
    o = sigmoid(x[3] + p[3], MATH)
    c = f * c + i * g
    return o * tanh(c, MATH), c, (i, f, g, o)


@pointwise
def lstm_backward(dh_hat, dc, gates, h, c, c_new, last, MATH):
    i, f, g, o = gates
    bounded = tanh(c_new, MATH)
    dc += dh_hat * o * (1 - bounded * bounded)
    di = dc * g * i * (1 - i)
    df = dc * c * f * (1 - f)
    dg = dc * i * (1 - g * g)
    do = dh_hat * bounded * o * (1 - o)
    dgates = (di, df, dg, do)
    return dgates, dgates, 0.0 * dh_hat, dc * f


# GRU


def gru(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x_r, x_z, x_n = x_gates.chunk(3, dim=-1)
    h_r, h_z, h_n = h_gates.chunk(3, dim=-1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return n + z * (h - n), None


@pointwise
def gru_forward(x, p, h, c, MATH):
    r = sigmoid(x[0] + p[0], MATH)
    z = sigmoid(x[1] + p[1], MATH)
    n = tanh(x[2] + r * p[2], MATH)
    return n + z * (h - n), c, (r, z, n)


@pointwise
def gru_backward(dh_hat, dc, gates, h, c, c_new, last, MATH):
    r, z, n = gates
    dn = dh_hat * (1 - z) * (1 - n * n)
    dr = dn * last * r * (1 - r)
    dz = dh_hat * (h - n) * z * (1 - z)
    return (dr, dz, dn), (dr, dz, dn * r), dh_hat * z, dc


# Vanilla


def rnn_tanh(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.tanh(x_gates + h_gates), None


@pointwise
def rnn_tanh_forward(x, p, h, c, MATH):
    h_hat = tanh(x[0] + p[0], MATH)
    return h_hat, c, (h_hat,)


@pointwise
def rnn_tanh_backward(dh_hat, dc, gates, h, c, c_new, last, MATH):
    dgates = (dh_hat * (1 - gates[0] * gates[0]),)
    return dgates, dgates, 0.0 * dh_hat, dc


def rnn_relu(x_gates: Tensor, h_gates: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.relu(x_gates + h_gates), None


@pointwise
def rnn_relu_forward(x, p, h, c, MATH):
    h_hat = tl.maximum(x[0] + p[0], 0.0)
    return h_hat, c, (h_hat,)


@pointwise
def rnn_relu_backward(dh_hat, dc, gates, h, c, c_new, last, MATH):
    dgates = (tl.where(gates[0] > 0, dh_hat, 0.0),)
    return dgates, dgates, 0.0 * dh_hat, dc


LSTM = Cell(
    *(4, True, lstm),
    is_bounded=True,
    normalises_c=True,
    triton=CellFunctions(lstm_forward, lstm_backward),
    cpp="lstm",
)
GRU = Cell(
    3, False, gru, splits_gates=True, is_bounded=True, triton=CellFunctions(gru_forward, gru_backward), cpp="gru"
)
TANH = Cell(
    1, False, rnn_tanh, is_bounded=True, triton=CellFunctions(rnn_tanh_forward, rnn_tanh_backward), cpp="rnn_tanh"
)
RELU = Cell(1, False, rnn_relu, triton=CellFunctions(rnn_relu_forward, rnn_relu_backward), cpp="rnn_relu")
