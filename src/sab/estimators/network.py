"""The network of an estimator: a SAB layer and a readout of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields

import torch
from torch import Tensor, nn

from sab.config import SABConfig
from sab.errors import UserTypeError, check_choice
from sab.layers import SABGRU, SABLSTM, SABRNN, SABLayer

LAYERS: dict[str, type[SABLayer]] = {"lstm": SABLSTM, "gru": SABGRU, "rnn": SABRNN}


def make_layer(
    channels: int, cell: str, hidden_size: int, num_layers: int, dropout: float, memory: SABConfig | None
) -> SABLayer:
    """The layer of an estimator's options."""
    layer = LAYERS[check_choice("cell", cell, LAYERS)]
    if not isinstance(memory, SABConfig | None):
        raise UserTypeError(f"memory must be a SABConfig, or None; got {memory!r}.", "memory")
    # A scorer that is a module is trained with the layer, and what was passed to an estimator stays as it is.
    memory = deepcopy(memory) or SABConfig()
    options = {field.name: getattr(memory, field.name) for field in fields(memory)}
    between = dropout if num_layers > 1 else 0.0
    return layer(channels, hidden_size, num_layers, batch_first=True, dropout=between, **options)


class Reader(nn.Module):
    """Reads series to their ends; then gives its outputs, from the last hidden state and the mean of all of them."""

    def __init__(self, layer: SABLayer, outputs: int, dropout: float):
        super().__init__()
        self.layer = layer
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(2 * layer.hidden_size, outputs)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The outputs [B, outputs] for series [B, T, channels] of so many steps each, or of T steps."""
        hidden, _ = self.layer(x, lengths=lengths)
        if lengths is None:
            last, mean = hidden[:, -1], hidden.mean(1)
        else:
            at = (lengths - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[2])
            last, mean = hidden.gather(1, at).squeeze(1), hidden.sum(1) / lengths.unsqueeze(1)
        return self.out(self.dropout(torch.cat([last, mean], dim=-1)))


class Predictor(nn.Module):
    """Gives at each step the values of the next `horizon` steps, as differences from the value of that step."""

    def __init__(self, layer: SABLayer, horizon: int, dropout: float):
        super().__init__()
        self.layer = layer
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(layer.hidden_size, horizon * layer.input_size)

    def forward(self, x: Tensor) -> Tensor:
        """The differences [B, T, horizon * channels] for series [B, T, channels]."""
        hidden, _ = self.layer(x)
        return self.out(self.dropout(hidden))
