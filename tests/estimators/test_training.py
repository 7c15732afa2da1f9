"""The training of an estimator: which weights are kept, and which rows are for what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn", reason="needs the extra `sklearn`")

from sab.estimators.training import Schedule, split, train


def test_the_best_weights_are_kept() -> None:
    network, seen = nn.Linear(1, 1), []
    validation = iter([3.0, 1.0, 2.0, 1.5, 0.5])

    def loss_of(rows: Tensor) -> Tensor:
        if network.training:
            return network(torch.ones(len(rows), 1)).sum()
        seen.append(network.weight.item())
        return torch.tensor(next(validation))

    rows = torch.arange(4)
    history = train(network, loss_of, rows, rows, Schedule(0.1, 4, 10, 2, 0.5, False))
    assert [epoch.validation for epoch in history] == [3.0, 1.0, 2.0, 1.5]
    assert len(set(seen)) == 4
    assert network.weight.item() == seen[1]
    assert not network.training


def test_without_validation_the_training_loss_decides() -> None:
    network = nn.Linear(1, 1)
    rows = torch.arange(4)
    history = train(
        network,
        lambda some: network(torch.ones(len(some), 1)).square().sum(),
        rows,
        rows[:0],
        Schedule(0.1, 2, 5, 5, 0, False),
    )
    assert len(history) == 5
    assert {epoch.validation for epoch in history} == {None}


def test_an_epoch_may_draw_some_of_the_rows() -> None:
    network, drawn = nn.Linear(1, 1), []

    def loss_of(rows: Tensor) -> Tensor:
        drawn.extend(rows.tolist())
        return network(torch.ones(len(rows), 1)).sum()

    rows = torch.arange(50)
    train(network, loss_of, rows, rows[:0], Schedule(0.1, 4, 20, 20, 0, False), rows_in_epoch=6)
    assert len(drawn) == 120
    assert len(set(drawn)) > 40


def test_every_class_is_in_both_parts() -> None:
    groups = torch.tensor([0] * 20 + [1] * 10 + [2])
    training, validation = split(groups, 0.2)
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(31))
    assert groups[validation].bincount(minlength=3).tolist() == [4, 2, 0]
    assert len(split(groups, 0.0)[1]) == 0
    assert groups[split(groups, 0.99)[0]].unique().tolist() == [0, 1, 2]
