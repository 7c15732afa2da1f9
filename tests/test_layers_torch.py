"""Without memory the layers are `torch.nn`'s: outputs, states and gradients, in every form of input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import sab
from sab.config import NEUTRAL_GATE
from tests.ops.cases import (
    BACKENDS,
    CELLS,
    PLAIN,
    assert_close,
    both,
    gradients,
    make_layer,
    make_torch,
    randn,
    randomize,
)


def form(cell: str, h: Tensor, c: Tensor) -> Any:
    """`torch.nn`'s form of an initial state."""
    return (h, c) if cell == "lstm" else h


def run(layer: Any, x: Any, hx: Any) -> list[Tensor]:
    """Output and states, whatever the layer's form of them."""
    output, state = layer(x, hx)
    states = [state] if isinstance(state, Tensor) else list(state)
    return [output.data if isinstance(output, PackedSequence) else output, *states]


def compare(theirs: Any, ours: Any, x: Any, hx: Any = None, leaves: tuple[Tensor, ...] = ()) -> None:
    """The same outputs, states and gradients of two layers whose parameters have the same names."""
    names = list(dict(theirs.named_parameters()))
    expected, actual = run(theirs, x, hx), run(ours, x, hx)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "output or state")
    wanted = gradients(expected, [*leaves, *(theirs.get_parameter(name) for name in names)])
    got = gradients(actual, [*leaves, *(ours.get_parameter(name) for name in names)])
    for name, one, other in zip([*(["input or state"] * len(leaves)), *names], got, wanted, strict=True):
        assert_close(one, other, f"gradient of {name}")


@pytest.mark.parametrize("given_hx", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_layers", "bidirectional"), [(1, False), (1, True), (3, False), (2, True)])
@pytest.mark.parametrize("cell", CELLS)
def test_without_memory_equals_torch(
    cell: str, num_layers: int, bidirectional: bool, bias: bool, batch_first: bool, given_hx: bool
) -> None:
    theirs, ours = both(cell, 3, 4, num_layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    x = randn(2, 6, 3).requires_grad_()
    batch, rows = 2 if batch_first else 6, num_layers * (1 + bidirectional)
    h, c = randn(rows, batch, 4, seed=2).requires_grad_(), randn(rows, batch, 4, seed=3).requires_grad_()
    compare(theirs, ours, x, form(cell, h, c) if given_hx else None, (x, h, c))


@pytest.mark.parametrize("given_hx", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_without_memory_equals_torch_unbatched(cell: str, bidirectional: bool, given_hx: bool) -> None:
    theirs, ours = both(cell, 3, 4, 2, bidirectional=bidirectional)
    x, rows = randn(6, 3).requires_grad_(), 2 * (1 + bidirectional)
    h, c = randn(rows, 4, seed=2).requires_grad_(), randn(rows, 4, seed=3).requires_grad_()
    compare(theirs, ours, x, form(cell, h, c) if given_hx else None, (x, h, c))


@pytest.mark.parametrize("lengths", [[6, 4, 4, 1], [2, 6, 1, 5], [6, 6, 6, 6], [3, 3, 2, 1]])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_without_memory_equals_torch_packed(cell: str, bidirectional: bool, lengths: list[int]) -> None:
    theirs, ours = both(cell, 3, 4, 2, bidirectional=bidirectional, batch_first=True)
    x, rows = randn(4, 6, 3).requires_grad_(), 2 * (1 + bidirectional)
    h, c = randn(rows, 4, 4, seed=2).requires_grad_(), randn(rows, 4, 4, seed=3).requires_grad_()
    for enforce_sorted in [False, True] if lengths == sorted(lengths, reverse=True) else [False]:
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=enforce_sorted)
        compare(theirs, ours, packed, form(cell, h, c), (x, h, c))
        compare(theirs, ours, packed, None, (x,))
        output, expected = ours(packed)[0], theirs(packed)[0]
        assert torch.equal(output.batch_sizes, expected.batch_sizes)
        for name in ("sorted_indices", "unsorted_indices"):
            one, other = getattr(output, name), getattr(expected, name)
            assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("k_trunc", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("cell", CELLS)
def test_without_memory_and_with_a_cut_is_truncated_backpropagation(cell: str, k_trunc: int) -> None:
    theirs = randomize(make_torch(cell, 3, 4))
    ours = make_layer(cell, 3, 4, k_top=0, k_trunc=k_trunc)
    ours.load_state_dict(theirs.state_dict())
    x = randn(7, 2, 3).requires_grad_()
    outputs, state = [], None
    for chunk in x.split(k_trunc):
        output, state = theirs(chunk, state)
        state = tuple(part.detach() for part in state) if cell == "lstm" else state.detach()
        outputs.append(output)
    expected, actual = torch.cat(outputs), ours(x)[0]
    assert_close(actual, expected)
    wanted = gradients([expected], [x, *theirs.parameters()])
    for one, other in zip(gradients([actual], [x, *ours.parameters()]), wanted, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("num_layers", "bidirectional", "bias"), [(1, False, True), (2, True, True), (2, False, False)]
)
@pytest.mark.parametrize("cell", CELLS)
def test_the_same_seed_gives_the_same_cell(cell: str, num_layers: int, bidirectional: bool, bias: bool) -> None:
    options: dict[str, Any] = {"bidirectional": bidirectional, "bias": bias, "dtype": torch.float32}
    torch.manual_seed(3)
    theirs = make_torch(cell, 3, 4, num_layers, **options)
    for memory in ({}, {"scorer": "affine", "max_microstates": 3}, {"incorporate": "concat"}, PLAIN):
        torch.manual_seed(3)
        ours = make_layer(cell, 3, 4, num_layers, input_start="torch", **options, **memory)
        for name, parameter in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), parameter), name


@pytest.mark.parametrize("cell", CELLS)
def test_from_torch_and_to_torch(cell: str) -> None:
    torch_options: dict[str, Any] = {"batch_first": True, "bidirectional": True, "bias": False, "dropout": 0.25}
    theirs = randomize(make_torch(cell, 3, 4, 2, **torch_options)).eval()
    cls: Any = type(make_layer(cell, 1, 1))
    ours = cls.from_torch(theirs, **PLAIN)
    assert ours.cell == cell
    assert not ours.training
    compare(theirs, ours, randn(2, 5, 3))
    back = ours.to_torch()
    assert type(back) is type(theirs)
    assert repr(back) == repr(theirs)
    assert not back.training
    assert all(torch.equal(back.get_parameter(name), p) for name, p in theirs.named_parameters())
    with torch.no_grad():
        back.weight_hh_l0.zero_()
    assert ours.weight_hh_l0.any(), "no memory is shared"


def test_from_torch_keeps_the_cell_and_takes_the_options_of_the_memory() -> None:
    theirs: Any = nn.GRU(3, 4, dtype=torch.float32)
    ours = sab.SABGRU.from_torch(theirs, k_top=3, k_trunc=None, scorer="dot", attention_size=2)
    options = {"k_top": 3, "k_trunc": None, "scorer": "dot", "attention_size": 2}
    assert ours.config == sab.SABConfig(**options, initial_gate=NEUTRAL_GATE)
    assert ours.get_parameter("attn_w_query_l0").shape == (2, 4)
    assert ours.get_parameter("weight_hh_l0").dtype == torch.float32
    assert torch.equal(ours.get_parameter("weight_hh_l0"), theirs.weight_hh_l0)
    assert torch.equal(ours.to_torch().get_parameter("weight_hh_l0"), theirs.weight_hh_l0)


def test_from_torch_refuses_what_it_cannot_take() -> None:
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.LSTM; got GRU"):
        sab.SABLSTM.from_torch(nn.GRU(3, 4))
    with pytest.raises(ValueError, match="module must have proj_size 0; got 2"):
        sab.SABLSTM.from_torch(nn.LSTM(3, 4, proj_size=2))
    with pytest.raises(ValueError, match="k_trunc"):
        sab.SABLSTM.from_torch(nn.LSTM(3, 4), k_trunc=0)


def test_positional_arguments_are_in_the_order_of_torch() -> None:
    ours: Any
    for ours, theirs in (
        (sab.SABLSTM(3, 4, 2, False, True, 0.5, True), nn.LSTM(3, 4, 2, False, True, 0.5, True)),
        (sab.SABGRU(3, 4, 2, False, True, 0.5, True), nn.GRU(3, 4, 2, False, True, 0.5, True)),
        (sab.SABRNN(3, 4, 2, "relu", False, True, 0.5, True), nn.RNN(3, 4, 2, "relu", False, True, 0.5, True)),
    ):
        for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"):
            assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("memory", [{}, {"k_top": 2, "k_att": 1}])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_of_no_rows(cell: str, backend: str, memory: Any, batch_first: bool) -> None:
    options: Any = {"bidirectional": True, "batch_first": batch_first}
    theirs, ours = make_torch(cell, 3, 4, 2, **options), make_layer(cell, 3, 4, 2, backend=backend, **memory, **options)
    x = randn(0, 5, 3) if batch_first else randn(5, 0, 3)
    found = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        output, state = layer(leaf)
        output, state = layer(leaf, state)
        states = state if isinstance(state, tuple | sab.SABState) else (state,)
        torch.stack([tensor.sum() for tensor in (output, *states)]).sum().backward()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())
        assert leaf.grad is not None
        found.append([output.shape, *(tensor.shape for tensor in states), leaf.grad.shape])
    assert found[0] == found[1]
    output, _, attention = ours(x, lengths=[], return_attention=True)
    assert attention.weights.shape[:-1] == (4, *output.shape[:-1])


def test_rows_may_come_to_an_end() -> None:
    layer = make_layer("lstm", 3, 4, k_top=2, k_att=1)
    state = layer(randn(5, 2, 3))[1].select([])
    output, end = layer(randn(5, 0, 3), state)
    assert output.shape == (5, 0, 4)
    assert end.h.shape == (1, 0, 4)
