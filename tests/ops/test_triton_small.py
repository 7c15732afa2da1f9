"""The Triton kernels for small hidden sizes, in Triton's interpreter, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import DOUBLE, make_layer, randn, randomize, run, weighted_sum

pytest.importorskip("triton")
from sab.ops.triton import around, engine, small
from sab.ops.triton.launch import INTERPRETED

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 must be set before triton is imported"),
    # Sigmoids of large negative numbers: exp overflows to infinity, whose inverse is 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def results(
    layer: Any, x: Tensor, hx: Any = None, lengths: Tensor | None = None, exact: bool = True
) -> dict[str, Tensor]:
    """Everything that a call gives, and the gradient of everything."""
    x = x.clone().requires_grad_()
    output, state, attention = run(layer, x, hx, lengths=lengths, return_attention=True)
    keys = state.keys.masked_fill(state.numbers.unsqueeze(-1) < 0, 0.0)  # those of no microstate are free
    given = {"output": output, "h": state.h, "keys": keys, "microstates": state.microstates}
    given |= {"weights": attention.weights, "summary": attention.summary}
    if state.c is not None:
        given["c"] = state.c
    parameters = dict(layer.named_parameters())
    total = weighted_sum(
        [tensor.to(DOUBLE) for name, tensor in given.items() if tensor.numel() > 0 and name != "weights"]
    )
    if exact:
        total = total + weighted_sum([attention.weights.to(DOUBLE)])
    gradients = torch.autograd.grad(total, [x, *parameters.values()], allow_unused=True, materialize_grads=True)
    given["numbers"] = attention.numbers
    return given | {f"d{name}": gradient for name, gradient in zip(["x", *parameters], gradients, strict=True)}


def compare(
    cell: str, n: int, steps: int, batch: int, ends: bool = False, first: int = 0, lengths: Tensor | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """The kernels and the reference in float64, with the same weights."""
    theirs, ours = (
        randomize(make_layer(cell, 2, n, backend=name, **options), scale=0.4) for name in ("reference", "triton")
    )
    x = randn(steps, batch, 2)
    if ends:
        lengths = torch.randint(1, steps + 1, (batch,))
        lengths[0] = steps  # else the reference has no slot where no row has a microstate
    hx = theirs(randn(first, batch, 2, seed=5))[1].detach() if first > 0 else None
    expected, got = results(theirs, x, hx, lengths), results(ours, x, hx, lengths)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_keys_after_the_end_of_a_row_have_no_gradient() -> None:
    """Nobody writes them, and a gradient that comes in through the state is scaled by what they are."""
    compare("lstm", 4, 9, 3, lengths=torch.tensor([9, 1, 4]), k_top=9, k_att=2, k_trunc=3)


@pytest.mark.parametrize(
    ("cell", "inputs", "ends", "options"),
    [
        ("lstm", 40, True, {}),
        ("gru", 3, False, {"bias": False}),
        ("rnn_tanh", 33, False, {"incorporate": "add", "scorer": "dot"}),
        ("gru", 5, True, {"scorer": "mlp", "attention_size": 7}),
    ],
)
def test_a_gradient_of_the_output_alone(
    cell: str, inputs: int, ends: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop begins with it, and one kernel makes the gradients of all parameters, of several parts here."""
    monkeypatch.setattr(around, "ROWS", 1)
    monkeypatch.setattr(around, "PROGRAMS", 24)
    made: list[Any] = []
    kind = around.LanesGradients
    monkeypatch.setattr(around, "LanesGradients", lambda *given: made.append(kind(*given)) or made[-1])
    found = []
    for name in ("reference", "triton"):
        layer = randomize(make_layer(cell, inputs, 5, backend=name, k_top=3, k_att=2, k_trunc=3, **options), scale=0.4)
        first = randn(1, 3, 5, seed=3).requires_grad_()
        x = randn(7, 3, inputs).requires_grad_()
        lengths = torch.tensor([7, 1, 4]) if ends else None
        output = run(layer, x, (first, first) if cell == "lstm" else first, lengths=lengths)[0]
        leaves = [x, first, *layer.parameters()]
        found.append([output, *torch.autograd.grad((output * randn(*output.shape, seed=9)).sum(), leaves)])
    assert len(made) == 1
    names = ["output", "x", "first", *dict(layer.named_parameters())]
    for name, expected, got in zip(names, *found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_of_some_parameters_are_made_one_by_one() -> None:
    layer = randomize(make_layer("lstm", 3, 5, backend="triton", k_top=3), scale=0.4)
    theirs = make_layer("lstm", 3, 5, backend="reference", k_top=3)
    theirs.load_state_dict(layer.state_dict())
    x = randn(9, 4, 3)
    got, expected = (
        torch.autograd.grad(one(x)[0].sum(), [one.attn_w_query_l0, one.bias_hh_l0]) for one in (layer, theirs)
    )
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "cell, scorer, weighting, incorporate, n, d, steps, batch, k_top, k_att, k_trunc, first, ends".split(", "),
    [
        ("lstm", "mlp", "softmax", "add", 17, 5, 6, 2, 3, 1, 2, 0, True),
        ("lstm", "dot", "relu", "add_bounded", 16, 20, 5, 1, 3, 2, None, 7, False),
        ("lstm", "affine", "softmax", "add", 5, None, 6, 2, 2, 1, 3, 0, False),
        ("lstm", "affine_tanh", "softmax_sink", "concat", 20, None, 4, 2, 5, 1, 3, 3, True),
        ("gru", "affine", "relu_norm", "add", 33, None, 5, 1, 3, 1, 3, 1, False),
        ("gru", "mlp", "relu_norm", "concat", 7, 5, 5, 2, 9, 1, None, 12, True),
        ("gru", "dot", "softmax_sink", "add", 18, 9, 4, 1, 1, 1, 1, 2, False),
        ("rnn_tanh", "mlp", "relu", "add_bounded", 12, 12, 5, 2, 4, 1, 2, 5, False),
        ("rnn_tanh", "affine", "softmax", "concat", 9, None, 4, 3, 17, 1, 5, 20, True),
        ("rnn_relu", "dot", "relu_norm", "add", 8, 8, 4, 2, 3, 1, 2, 2, True),
        ("rnn_relu", "affine_tanh", "relu", "add_bounded", 11, None, 1, 1, 2, 1, None, 4, False),
        ("lstm", "mlp", "softmax", "add", 21, 5, 4, 2, 0, 1, 2, 0, True),
    ],
)  # fmt: skip
def test_equals_the_reference_with_every_gradient(
    cell: str, scorer: str, weighting: str, incorporate: str, n: int, d: int | None, steps: int, batch: int,
    k_top: int, k_att: int, k_trunc: int | None, first: int, ends: bool,
) -> None:  # fmt: skip
    options = {"k_top": k_top, "k_att": k_att, "k_trunc": k_trunc, "scorer": scorer, "weighting": weighting}
    compare(cell, n, steps, batch, ends, first, incorporate=incorporate, attention_size=d, **options)


@pytest.mark.parametrize(("cell", "scorer"), [("lstm", "cosine"), ("gru", "mlp"), ("rnn_tanh", "dot")])
def test_the_kernels_for_full_precision_equal_the_reference(
    cell: str, scorer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not those that the interpreter takes for float64 otherwise."""
    monkeypatch.setattr(small, "DOUBLE_IN_LANES", False)
    options = {"k_top": 3, "k_att": 1, "k_trunc": 2, "scorer": scorer, "incorporate": "gate"}
    compare(cell, 9, 4, 2, ends=True, first=2, **options)


@pytest.mark.parametrize("scorer", ["dot", "affine"])
@pytest.mark.parametrize("k_top", [9, 40])
def test_more_slots_than_are_looked_at_at_once(scorer: str, k_top: int) -> None:
    compare("rnn_tanh", 4, 2, 1, first=300, k_top=k_top, k_att=1, k_trunc=1, scorer=scorer, attention_size=3)


@pytest.mark.parametrize(
    ("cell", "scorer", "dtype"),
    [
        ("lstm", "mlp", torch.float32),
        ("lstm", "affine", torch.float32),
        ("gru", "dot", torch.float32),
        ("rnn_tanh", "mlp", torch.float32),
        ("lstm", "dot", torch.bfloat16),
        ("gru", "mlp", torch.bfloat16),
    ],
)
def test_tensor_cores_round_as_much_as_their_type(
    cell: str, scorer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products in half precision: weights held in registers, vectors brought into range, packed candidates."""
    options = {"k_top": 12, "k_att": 1, "k_trunc": 4, "scorer": scorer}  # all are selected, whatever their order
    theirs = randomize(make_layer(cell, 2, 24, backend="reference", **options), scale=0.2)
    ours = make_layer(cell, 2, 24, backend="triton", dtype=torch.float32, **options)
    ours.load_state_dict(theirs.state_dict())
    if dtype == torch.bfloat16:
        monkeypatch.setattr("sab.ops.precision.compute_type", lambda *arguments: torch.bfloat16)
    x = randn(12, 2, 2)
    expected, got = results(theirs, x, exact=False), results(ours, x.float(), exact=False)
    allowed = 5e-3 if dtype == torch.float32 else 8e-2
    for name, tensor in expected.items():
        if name in ("numbers", "weights") or tensor.norm() < 1e-3:
            continue  # what may change places, and what is there by rounding alone
        assert (got[name].to(DOUBLE) - tensor).norm() <= allowed * tensor.norm(), name


@pytest.mark.parametrize(("first", "k_top"), [(0, 10), (260, 10), (60, 40)])
def test_packed_candidates_are_the_exact_ones_where_scores_differ(first: int, k_top: int) -> None:
    options = {"k_top": k_top, "k_att": 1, "k_trunc": 1, "scorer": "dot", "attention_size": 3}
    theirs = randomize(make_layer("rnn_tanh", 2, 4, backend="reference", **options))
    ours = make_layer("rnn_tanh", 2, 4, backend="triton", dtype=torch.float32, **options)
    ours.load_state_dict(theirs.state_dict())
    hx = theirs(randn(first, 2, 2, seed=5))[1].detach() if first > 0 else None
    expected = theirs(randn(30, 2, 2), hx, return_attention=True)[2]
    got = ours(randn(30, 2, 2).float(), None if hx is None else hx.to(torch.float32), return_attention=True)[2]
    near = (got.weights.to(DOUBLE) - expected.weights).abs().amax(-1) < 2e-2
    assert near.float().mean() > 0.95  # two scores within rounding may change places


@pytest.mark.parametrize("first", [0, 63, 300])
def test_scores_by_products_select_as_the_reference(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"k_top": 10, "k_att": 1, "k_trunc": 1, "scorer": "dot", "attention_size": 128}
    theirs = randomize(make_layer("rnn_tanh", 2, 4, backend="reference", **options), scale=0.5)
    ours = make_layer("rnn_tanh", 2, 4, backend="triton", dtype=torch.float32, **options)
    ours.load_state_dict(theirs.state_dict())
    hx = theirs(randn(first, 1, 2, seed=5))[1].detach() if first > 0 else None
    monkeypatch.setattr("sab.ops.precision.compute_type", lambda *arguments: torch.bfloat16)
    x = randn(14, 1, 2)
    expected = theirs(x, hx, return_attention=True)[2]
    got = ours(x.float(), None if hx is None else hx.to(torch.float32), return_attention=True)[2]
    if first == 0:  # fewer than k_top at first: who is there is there, whatever the order
        assert torch.equal(got.numbers[:11].sort(-1).values, expected.numbers[:11].sort(-1).values)
    shared = (got.numbers.unsqueeze(-1) == expected.numbers.unsqueeze(-2)).any(-1)
    assert shared[expected.numbers >= 0].float().mean() > 0.9  # scores within rounding may change places
    dense = [
        torch.zeros(14, 1, first + 15, dtype=DOUBLE).scatter(-1, one.numbers + 1, one.weights.to(DOUBLE))
        for one in (got, expected)
    ]
    assert (dense[0] - dense[1]).abs().sum(-1).mean() / 2 < 0.1  # the share that goes to others


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_inputs_saturate_without_nan(dtype: torch.dtype) -> None:
    for cell in ("lstm", "gru", "rnn_tanh"):
        layer = make_layer(cell, 2, 6, backend="triton", k_top=3, k_att=1, dtype=dtype)
        assert all(
            bool(tensor.isfinite().all()) for tensor in results(layer, (randn(5, 2, 2) * 1e4).to(dtype)).values()
        )


def test_which_kernels_run_what() -> None:
    def reason(**options: Any) -> str | None:
        layer = make_layer("lstm", 2, 4, dtype=torch.float32, backend="triton", **options)
        return engine.unsupported(randn(3, 1, 2).float(), None, layer._weights(0), "lstm", layer.config)

    assert reason() is None
    assert reason(k_top=65) == "k_top is larger than 64"
    assert reason(forward="dense") == "it has the sparse forward only"
    assert reason(scorer=lambda microstates, h: microstates.sum(-1)) == "it does not take a callable as the scorer"
