"""What the estimators share: their options, and the training of a network with them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import numpy
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from sab.config import SABConfig
from sab.errors import check_float
from sab.estimators.network import make_layer
from sab.estimators.training import Epoch, Schedule, choose_device, seeded, train
from sab.layers import SABLayer


class SABEstimator(BaseEstimator):
    """The options of all estimators, and their training."""

    n_features_in_: int
    """Columns of a table, or channels of the series, that `fit` was called with."""
    network_: nn.Module
    """The trained network, on the CPU."""
    history_: list[Epoch]
    """The losses of each epoch."""

    def __init__(
        self,
        *,
        cell: Literal["lstm", "gru", "rnn"] = "lstm",
        hidden_size: int = 64,
        num_layers: int = 1,
        dropout: float = 0.0,
        memory: SABConfig | None = None,
        learning_rate: float = 3e-3,
        batch_size: int = 16,
        max_epochs: int = 200,
        patience: int = 50,
        validation_fraction: float = 0.2,
        random_state: Any = None,
        device: Any = "auto",
        verbose: bool = False,
    ):
        self.cell = cell
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.dropout = dropout
        self.memory = memory
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def _train(
        self,
        channels: int,
        make: Callable[[SABLayer, float], nn.Module],
        loss_of: Callable[[nn.Module, Tensor], Tensor],
        rows: Callable[[float], tuple[Tensor, Tensor]],
        rows_in_epoch: int | None = None,
    ) -> None:
        """Make the network from a layer and the dropout, and train it.

        `loss_of` gives the mean loss of some rows, whose network is on `self._device()`; `rows` gives those to train on
        and those to validate on, from the fraction of the latter.
        """
        schedule = Schedule(
            self.learning_rate,
            self.batch_size,
            self.max_epochs,
            self.patience,
            self.validation_fraction,
            self.verbose,
        )
        device = self._device()
        dropout = check_float("dropout", self.dropout, minimum=0, below=1)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with seeded(seed, device):
            layer = make_layer(channels, self.cell, self.hidden_size, self.num_layers, dropout, self.memory)
            network = make(layer, dropout).to(device)
            training, validation = rows(schedule.validation_fraction)
            self.history_ = train(
                network, lambda some: loss_of(network, some), training, validation, schedule, rows_in_epoch
            )
        self.network_ = network.cpu()  # where every machine can load it

    def _checked(self, *data: Any, **options: Any) -> Any:
        """What scikit-learn makes of a table, or a table and targets; it also notes or compares the columns."""
        return validate_data(self, *data, dtype=numpy.float64, **options)

    def _device(self) -> torch.device:
        return choose_device(self.device)

    def _network(self) -> tuple[nn.Module, Tensor]:
        """A copy of the trained network to predict with, and an empty tensor that is of its type and on its device.

        On a CPU it computes in float64: then a prediction does not depend on which others are made with it. In float32
        the sums of batches of different sizes differ, which can even turn a near tie of what the memory selects.
        """
        device = self._device()
        like = torch.empty(0, device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        return deepcopy(self.network_).to(like), like

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags
