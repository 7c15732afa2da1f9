"""Recurrent rivals that need no package: an LSTM or GRU with chrono initialisation, and the linear recurrent unit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sab.lab.rivals.base import Backbone, Parts, Sizes

SMALLEST_MODULUS, LARGEST_MODULUS = 0.9, 0.999
"""Between these the eigenvalues of a linear recurrent unit start."""


def chrono(sizes: Sizes) -> nn.Module:
    """`torch.nn`'s LSTM or GRU whose units start with memories of 1 to `steps` steps (Tallec and Ollivier, 2018, arXiv
    1804.11188): the gate that keeps has a bias of log(u), u uniform in [1, steps - 1], an LSTM's input gate -log(u)."""
    n = sizes.hidden_size
    type_ = {"lstm": nn.LSTM, "gru": nn.GRU}[sizes.cell]
    layers = type_(sizes.input_size, n, sizes.num_layers)
    with torch.no_grad():
        for number in range(sizes.num_layers):
            of_input, of_hidden = (getattr(layers, f"bias_{kind}_l{number}") for kind in ("ih", "hh"))
            keeps = torch.empty(n, device=of_input.device).uniform_(1, max(sizes.steps - 1, 1)).log()
            of_input[n : 2 * n] = keeps  # the second gate keeps, in both cells
            of_hidden[n : 2 * n] = 0
            if sizes.cell == "lstm":
                of_input[:n] = -keeps
                of_hidden[:n] = 0
    return layers


class LRU(Backbone):
    """Linear recurrent units with gated linear units between them (Orvieto et al., 2023, arXiv 2303.06349)."""

    def __init__(self, sizes: Sizes):
        n = sizes.hidden_size
        blocks = [
            nn.ModuleList([nn.RMSNorm(n), LinearRecurrence(n), nn.Linear(n, 2 * n)]) for _ in range(sizes.num_layers)
        ]
        super().__init__(sizes, nn.ModuleList(blocks), nn.RMSNorm(n))

    def whole(self, x: Tensor) -> Tensor:
        return self.stream(x, None)[0]

    def stream(self, x: Tensor, parts: Parts | None) -> tuple[Tensor, Parts]:
        ends: list[Tensor] = []
        blocks: Any = self.blocks
        for number, (norm, recurrence, mix) in enumerate(blocks):
            y, end = recurrence(norm(x), None if parts is None else parts[number])
            x = x + nn.functional.glu(mix(nn.functional.gelu(y)))
            ends.append(end)
        return x, tuple(ends)


class LinearRecurrence(nn.Module):
    """`s_t = λ ⊙ s_{t-1} + γ ⊙ B x_t`, `y_t = Re(C s_t) + D ⊙ x_t` with complex s and λ inside the unit circle.

    A complex number is a pair in the last dimension, for optimizers and files that know real ones alone.
    """

    def __init__(self, size: int):
        super().__init__()
        squares = torch.empty(size).uniform_(SMALLEST_MODULUS**2, LARGEST_MODULUS**2)
        self.log_decay = nn.Parameter((-0.5 * squares.log()).log())
        self.log_angle = nn.Parameter((2 * math.pi * torch.rand(size).clamp(min=1e-4)).log())
        self.log_gain = nn.Parameter(0.5 * (1 - squares).log())
        self.into = nn.Parameter(torch.randn(size, size, 2) * (2 * size) ** -0.5)
        self.out = nn.Parameter(torch.randn(size, size, 2) * size**-0.5)
        self.skip = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, n] and the state [B, n, 2] after them."""
        with torch.autocast(x.device.type, enabled=False):  # there are no complex numbers of bfloat16
            x = x.to(self.into.dtype)
            decay = torch.exp(-self.log_decay.exp())
            eigenvalues = torch.polar(decay, self.log_angle.exp())
            values = self.log_gain.exp() * (x.to(eigenvalues.dtype) @ torch.view_as_complex(self.into).t())
            if state is not None:
                first = values[:, :1] + eigenvalues * torch.view_as_complex(state).unsqueeze(1)
                values = torch.cat([first, values[:, 1:]], 1)
            states = scan(eigenvalues, values)
            y = (states @ torch.view_as_complex(self.out).t()).real + self.skip * x
            return y, torch.view_as_real(states[:, -1])


def scan(factor: Tensor, values: Tensor) -> Tensor:
    """`s_t = factor ⊙ s_{t-1} + values_t` for values [B, T, n], with as many passes as T has binary digits."""
    distance = 1
    while distance < values.shape[1]:
        values = torch.cat([values[:, :distance], values[:, distance:] + factor * values[:, :-distance]], 1)
        factor, distance = factor * factor, 2 * distance
    return values
