"""Online credit against exact RTRL, and that against backpropagation, on tiny layers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sab.lab.rivals.online import CREDITS, OnlineLayer, Steps, dni
from tests.ops.cases import CELLS, assert_close, make_layer, make_torch, randn, randomize

T, ROWS, INPUT, N = 6, 2, 2, 3
X, OF_HIDDEN = randn(T, ROWS, INPUT), randn(T, ROWS, N, seed=2)


def make_online(method: str, cell: str, window: int | None = None, scale: float = 0.6) -> OnlineLayer:
    layer = randomize(OnlineLayer(method, cell, INPUT, N, window).double(), scale=scale)
    if cell == "rnn_relu":
        layer.bias_ih_l0.data += 1.0  # so that units are active
    return layer


def initial(cell: str) -> Any:
    h, c = 0.5 * randn(1, ROWS, N, seed=3), randn(1, ROWS, N, seed=4)
    return (h, c) if cell == "lstm" else h


def plain(layer: OnlineLayer) -> dict[str, Tensor]:
    """The weights of a layer that `torch.nn`'s has too."""
    return {name: value for name, value in layer.state_dict().items() if "synthesiser" not in name}


def found(layer: OnlineLayer, cell: str) -> dict[str, Tensor]:
    """The layer's gradients."""
    layer.zero_grad()
    (layer(X, initial(cell))[0] * OF_HIDDEN).sum().backward()
    return {name: value.grad for name, value in layer.named_parameters() if value.grad is not None}


def backpropagated(layer: OnlineLayer, other: Any, cell: str) -> dict[str, Tensor]:
    """The gradients of another layer with the same weights, by autograd."""
    other.load_state_dict(plain(layer))
    (other(X, initial(cell))[0] * OF_HIDDEN).sum().backward()
    return {name: value.grad for name, value in other.named_parameters()}


def steps_of(layer: OnlineLayer, x: Tensor) -> Steps:
    with torch.no_grad():
        states = layer.run(x, x.new_zeros(x.shape[1], 2 if layer.weight_ih_l0.shape[0] == 4 * N else 1, N))
        return layer.steps(x, states)


@pytest.mark.parametrize("method", [*CREDITS, "dni"])
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_and_states_are_those_of_torch(cell: str, method: str) -> None:
    layer, theirs = make_online(method, cell), make_torch(cell, INPUT, N)
    theirs.load_state_dict(plain(layer))
    (ours, end), (expected, their_end) = layer(X, initial(cell)), theirs(X, initial(cell))
    assert_close(ours, expected)
    for one, other in zip(end, their_end, strict=True) if cell == "lstm" else [(end, their_end)]:
        assert_close(one, other)
    assert_close(layer(X)[0], theirs(X)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_rtrl_is_backpropagation_through_time(cell: str) -> None:
    layer = make_online("rtrl", cell)
    expected = backpropagated(layer, make_torch(cell, INPUT, N), cell)
    for name, gradient in found(layer, cell).items():
        assert_close(gradient, expected[name], name)


@pytest.mark.parametrize("cell", CELLS)
def test_snap1_is_rtrl_where_the_recurrence_is_diagonal_and_only_there(cell: str) -> None:
    exact, sparse = make_online("rtrl", cell), make_online("snap1", cell)
    for is_diagonal in (False, True):
        for layer in (exact, sparse):
            weight = layer.weight_hh_l0.data.unflatten(0, (-1, N))
            weight.mul_(torch.eye(N) if is_diagonal else 1.0)
        expected, ours = found(exact, cell), found(sparse, cell)
        if is_diagonal:
            for name, gradient in ours.items():
                assert_close(gradient, expected[name], name)
        else:
            assert (ours["weight_hh_l0"] - expected["weight_hh_l0"]).norm() > 0.01 * expected["weight_hh_l0"].norm()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("method", ["uoro", "nobacktrack"])
def test_the_rank_one_estimates_are_unbiased(method: str, cell: str) -> None:
    """The mean over many samples is within 5 standard errors of the exact gradient, in every coordinate."""
    samples, steps = 20_000, 4
    layer = make_online(method, cell)
    x, of_hidden = X[:steps, :1], OF_HIDDEN[:steps, :1]
    exact = CREDITS["rtrl"](steps_of(layer, x), of_hidden, None)[0][0]
    torch.manual_seed(0)
    many = steps_of(layer, x.expand(-1, samples, -1).contiguous())
    estimates, _ = CREDITS[method](many, of_hidden.expand(-1, samples, -1), None)
    errors = estimates.std(0) / samples**0.5
    assert ((estimates.mean(0) - exact).abs() <= 5 * errors + 1e-12).all()
    assert errors.norm() < 0.1 * exact.norm(), "so few samples prove nothing"
    (first, _, _) = dni(steps_of(layer, x), of_hidden, 1, torch.zeros_like)
    assert ((estimates.mean(0) - first[0]).abs() > 5 * errors).any(), "a truncated gradient is told apart"


@pytest.mark.parametrize("method", CREDITS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_in_pieces_has_the_gradient_of_the_whole(cell: str, method: str) -> None:
    layer = make_online(method, cell)
    steps, credit = steps_of(layer, X), CREDITS[method]
    torch.manual_seed(0)
    whole, end = credit(steps, OF_HIDDEN, None)
    torch.manual_seed(0)
    total, carried = torch.zeros_like(whole), None
    for first, last in ((0, 1), (1, 4), (4, T)):
        with torch.no_grad():
            piece = layer.steps(X[first:last], steps.states[first : last + 1])
        found, carried = credit(piece, OF_HIDDEN[first:last], carried)
        total += found
    assert_close(total, whole)
    assert carried is not None
    for one, other in zip(carried, end, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_windows_without_a_synthetic_gradient_are_truncated_backpropagation(cell: str, window: int) -> None:
    layer = make_online("dni", cell, window)
    assert layer.synthesiser is not None
    for parameter in layer.synthesiser.out.parameters():
        torch.nn.init.zeros_(parameter)
    expected = backpropagated(layer, make_layer(cell, INPUT, N, k_top=0, k_trunc=window), cell)
    ours = found(layer, cell)
    for name, gradient in expected.items():
        assert_close(ours[name], gradient, name)


@pytest.mark.parametrize("cell", CELLS)
def test_a_perfect_synthetic_gradient_makes_windows_full_backpropagation(cell: str) -> None:
    layer = make_online("dni", cell)
    steps = steps_of(layer, X)
    perfect: dict[int, Tensor] = {}
    gradient = torch.zeros_like(steps.states[0])
    for t in reversed(range(T)):
        gradient = steps.carry_back(t, gradient + steps.of_hidden(OF_HIDDEN[t]))
        perfect[t] = ROWS * gradient

    def synthesiser(state: Tensor) -> Tensor:
        (t,) = (t for t in range(T) if torch.equal(steps.states[t], state))
        return perfect[t]

    whole, none, _ = dni(steps, OF_HIDDEN, T, synthesiser)
    windows, seen, learned = dni(steps, OF_HIDDEN, 2, synthesiser)
    truncated, _, _ = dni(steps, OF_HIDDEN, 2, torch.zeros_like)
    assert len(none) == 0
    assert_close(whole, CREDITS["rtrl"](steps, OF_HIDDEN, None)[0])
    assert_close(windows, whole)
    assert (truncated - whole).norm() > 1e-3 * whole.norm()
    assert_close(seen, steps.states[[4, 2]])
    assert_close(learned, torch.stack([perfect[4], perfect[2]]), "what it finds is what it was given")


def test_the_synthesiser_learns_what_comes_later() -> None:
    """Trained alone on one sequence, it brings the gradient of windows close to that of the whole sequence."""
    n = 12
    layer, full = OnlineLayer("dni", "gru", INPUT, n, 2).double(), make_torch("gru", INPUT, n)
    randomize(layer, scale=0.4)
    full.load_state_dict(plain(layer))
    assert layer.synthesiser is not None
    optimizer = torch.optim.Adam(layer.synthesiser.parameters(), lr=1e-2)
    of_hidden = randn(T, ROWS, n)
    (full(X)[0] * of_hidden).sum().backward()
    distances: list[float] = []
    for _ in range(200):
        layer.zero_grad()
        (layer(X)[0] * of_hidden).sum().backward()
        assert layer.weight_hh_l0.grad is not None
        distances.append(float((layer.weight_hh_l0.grad - full.weight_hh_l0.grad).norm()))
        optimizer.step()
    assert distances[-1] < 0.2 * distances[0]


def test_the_estimates_vary_with_torchs_random_numbers_and_the_others_do_not() -> None:
    for method in (*CREDITS, "dni"):
        layer = make_online(method, "gru", 2)

        def seeded(seed: int, layer: OnlineLayer = layer) -> Tensor:
            torch.manual_seed(seed)
            return found(layer, "gru")["weight_hh_l0"]

        assert torch.equal(seeded(1), seeded(1))
        assert torch.equal(seeded(1), seeded(2)) == (method not in ("uoro", "nobacktrack")), method
