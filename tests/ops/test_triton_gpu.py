"""The Triton kernels on a GPU, in float32 and in what it rounds to, against the reference in float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sab.config import FORGETS
from sab.ops import forgetting
from tests.ops.cases import make_layer, randn, randomize, run
from tests.ops.test_triton_small import results

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

CASES = [
    # for small hidden sizes
    ("lstm", "mlp", "softmax", "add", 128),
    ("lstm", "dot", "softmax_sink", "concat", 33),
    ("gru", "affine", "relu_norm", "add_bounded", 64),
    ("gru", "mlp", "softmax", "concat", 100),
    ("rnn_tanh", "affine_tanh", "relu", "add", 16),
    ("rnn_relu", "dot", "relu_norm", "add_bounded", 128),
    # for large ones
    ("lstm", "mlp", "softmax_sink", "add", 300),
    ("lstm", "affine", "softmax", "concat", 264),
    ("gru", "dot", "relu_norm", "add_bounded", 512),
    ("rnn_tanh", "mlp", "softmax", "concat", 300),
    # gated
    ("gru", "mlp", "softmax", "gate", 128),
    ("lstm", "dot", "softmax_sink", "gate", 300),
    # The default memory, in both loops.
    ("lstm", "cosine", "softmax", "gate", 128),
    ("gru", "cosine", "softmax", "gate", 100),
    ("rnn_tanh", "cosine", "softmax", "gate", 33),
    ("lstm", "cosine", "softmax", "gate", 300),
    ("gru", "cosine", "softmax_sink", "add_bounded", 512),
    ("rnn_tanh", "cosine", "softmax", "gate", 300),
]
PRECISIONS = {"ieee": 1e-3, "tf32": 0.03, "bfloat16": 0.15}
"""How far a tensor may be from the reference's, as a fraction of its largest number."""
CASES_IN_PRECISIONS = [
    (*case, precision)
    for case in CASES
    for precision in PRECISIONS
    # Where a ReLU's derivative jumps, rounding moves a gradient by any amount.
    if precision == "ieee" or "relu" not in case[0] + case[2]
]


def layers(cell: str, n: int, **options: Any) -> tuple[Any, Any]:
    """The reference and, with the same weights, the kernels."""
    theirs = randomize(make_layer(cell, 3, n, backend="reference", **options), scale=n**-0.5)
    ours = make_layer(cell, 3, n, backend="triton", dtype=torch.float32, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.cuda()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("cell", "scorer", "weighting", "incorporate", "n", "precision"), CASES_IN_PRECISIONS)
def test_equals_the_reference_with_every_gradient(
    cell: str, scorer: str, weighting: str, incorporate: str, n: int, precision: str, ends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee" if precision == "ieee" else "tf32")
    steps, batch, k_att = 21, 5, 2
    # As many are selected as there are, so that rounding changes none of them; but "ieee" has to select as well.
    k_top = 4 if precision == "ieee" else steps // k_att + 1
    options = {"k_top": k_top, "k_att": k_att, "k_trunc": 6, "attention_size": None if n < 200 else 64}
    theirs, ours = layers(cell, n, scorer=scorer, weighting=weighting, incorporate=incorporate, **options)
    x = randn(steps, batch, 3)
    lengths = torch.tensor([21, 1, 20, 7, 12]) if ends else None
    expected = results(theirs, x, lengths=lengths, exact=precision == "ieee")
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        got = results(ours, x.float().cuda(), lengths=lengths, exact=precision == "ieee")
    if precision == "ieee":
        assert torch.equal(got["numbers"].cpu(), expected["numbers"])
    for name, tensor in expected.items():
        # The order of weights is that of scores, which rounding may change.
        if tensor.is_floating_point() and tensor.numel() > 0 and (name != "weights" or precision == "ieee"):
            assert_near(got[name], tensor, PRECISIONS[precision], name)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("cell", "n", "inputs"), [("lstm", 128, 200), ("gru", 64, 30), ("rnn_tanh", 33, 7)])
def test_gradients_of_the_output_alone_equal_the_references(
    cell: str, n: int, inputs: int, ends: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough for gradients of several parts; twice, with the same bits."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    steps, batch = 60, 20
    options = {"k_top": 31, "k_att": 2, "k_trunc": 6}  # all are selected
    theirs = randomize(make_layer(cell, inputs, n, backend="reference", **options), scale=n**-0.5)
    ours = make_layer(cell, inputs, n, backend="triton", dtype=torch.float32, **options)
    ours.load_state_dict(theirs.state_dict())
    ours.cuda()
    x, direction = randn(steps, batch, inputs), randn(steps, batch, n, seed=5)
    lengths = torch.arange(batch) * 3 + 3 if ends else None

    def gradients(layer: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16" and x.is_cuda):
            output = layer(x, lengths=lengths)[0]
        return list(torch.autograd.grad((output * direction.to(output)).sum(), [x, *layer.parameters()]))

    expected, got, again = gradients(theirs, x), *(gradients(ours, x.float().cuda()) for _ in range(2))
    for name, one, other, once_more in zip(["x", *dict(ours.named_parameters())], expected, got, again, strict=True):
        assert_near(other, one, PRECISIONS[precision], name)
        assert torch.equal(other, once_more), name


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@pytest.mark.parametrize(("cell", "n"), [("lstm", 128), ("lstm", 1000), ("gru", 300)])
def test_a_stream_in_pieces_equals_the_references(
    cell: str, n: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is carried from piece to piece with its latest microstates alone, as a text is read."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    theirs, ours = layers(cell, n, k_top=32, k_att=1)  # all are selected
    x, states = randn(200, 4, 3), (None, None)
    for piece in x.split(20):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            (expected, first), (got, second) = theirs(piece, states[0]), ours(piece.float().cuda(), states[1])
        assert_near(got, expected, PRECISIONS[precision], "output")
        states = tuple((one if cell == "lstm" else one.state).recent(10) for one in (first, second))


def test_a_state_goes_on_from_the_cpu() -> None:
    theirs, ours = layers("lstm", 48, k_top=30, k_att=1, k_trunc=5)
    x, more = randn(9, 3, 3), randn(8, 3, 3, seed=2)
    expected = results(theirs, more, theirs(x)[1].detach())
    state = theirs(x)[1].detach().to(torch.float32).to("cuda")
    for name, tensor in results(ours, more.float().cuda(), state).items():
        if tensor.is_floating_point():
            assert_near(tensor, expected[name], PRECISIONS["tf32"], name)


BOUNDED = [
    ("lstm", "cosine", 128),
    ("gru", "mlp", 33),
    ("rnn_tanh", "affine", 64),
    ("lstm", "cosine", 300),
    ("gru", "affine_tanh", 264),
]
"""Cells, scorers and hidden sizes for a bounded macrostate: each family of kernels, and both kinds of keys."""


@pytest.mark.parametrize(("precision", "ends"), [("ieee", True), ("tf32", False), ("bfloat16", True)])
@pytest.mark.parametrize("forget", FORGETS)
@pytest.mark.parametrize(("cell", "scorer", "n"), BOUNDED)
def test_a_bounded_macrostate_equals_the_reference_in_pieces(
    cell: str, scorer: str, n: int, forget: str, precision: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee" if precision == "ieee" else "tf32")
    # Where factors are rounded, all that is not forgotten is selected: so rounding changes neither that nor the counts.
    options = {"k_top": 2 if precision == "ieee" else 4, "k_att": 2, "k_trunc": 6, "max_memory": 4, "forget": forget}
    theirs, ours = layers(cell, n, scorer=scorer, attention_size=None if n < 200 else 64, **options)
    x, more = randn(7, 5, 3), randn(21, 5, 3, seed=2)
    lengths = torch.tensor([21, 1, 20, 7, 12]) if ends else None
    hx = run(theirs, x)[1].detach()
    expected, end = results(theirs, more, hx, lengths, precision == "ieee"), run(theirs, more, hx, lengths=lengths)[1]
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        hx, more = hx.to(torch.float32).to("cuda"), more.float().cuda()
        got, state = results(ours, more, hx, lengths, precision == "ieee"), run(ours, more, hx, lengths=lengths)[1]
    assert torch.equal(state.numbers.cpu(), end.numbers)
    if forget == "most_read":
        assert torch.equal(state.reads.cpu(), end.reads)
    if precision == "ieee":
        assert torch.equal(got["numbers"].cpu(), expected["numbers"])
    for name, tensor in expected.items():
        if tensor.is_floating_point() and tensor.numel() > 0 and (name != "weights" or precision == "ieee"):
            assert_near(got[name], tensor, PRECISIONS[precision], name)


@pytest.mark.parametrize("n", [32, 128, 136])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_list_forgets_by_the_rule(n: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists longer than the threads take at once. What is forgotten follows from what the kernel itself selected."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee" if precision == "ieee" else "tf32")
    layer = layers("gru", n, k_top=5, k_att=1, max_memory=300, forget="most_read")[1]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        _, state, attention = run(layer, randn(900, 2, 3).float().cuda(), return_attention=True)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    kept = forgetting.Kept(nothing, nothing, None)
    for step, selected in enumerate(attention.numbers.cpu()):
        assert (selected >= 0).sum(1).tolist() == [min(step, 5)] * 2
        is_held = (selected.unsqueeze(-1) == kept.numbers.unsqueeze(1)).any(-1)
        assert torch.equal(is_held, selected >= 0)
        assert kept.reads is not None
        reads = forgetting.count(kept.reads, kept.numbers, selected)
        newest, rows = torch.full((2,), step), torch.ones(2, dtype=torch.bool)
        kept = forgetting.keep(kept.numbers, reads, newest, rows, layer.config)
    assert torch.equal(state.numbers.cpu()[0], kept.numbers)
    assert kept.reads is not None
    assert torch.equal(state.reads.cpu()[0], kept.reads)


@pytest.mark.parametrize("n", [32, 128, 136])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_long_list_is_read_by_its_slots(n: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reservoir forgets depends on no score, so who is selected differs only where scores are close."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee" if precision == "ieee" else "tf32")
    theirs, ours = layers("gru", n, k_top=5, k_att=1, max_memory=270, forget="reservoir")
    with torch.no_grad():
        hx = run(theirs, randn(308, 2, 3))[1]
        _, end, expected = run(theirs, randn(60, 2, 3, seed=2), hx, return_attention=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            hx, x = hx.to(torch.float32).to("cuda"), randn(60, 2, 3, seed=2).float().cuda()
            _, state, got = run(ours, x, hx, return_attention=True)
    assert torch.equal(state.numbers.cpu(), end.numbers)
    shared = (got.numbers.cpu().unsqueeze(-1) == expected.numbers.unsqueeze(-2)).any(-1)
    assert shared.float().mean() > (0.98 if precision == "ieee" else 0.7)
    assert_near(state.microstates, end.microstates, PRECISIONS[precision], "microstates")


def assert_near(got: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    assert got.isfinite().all(), name
    largest = expected.abs().max().item()
    largest = largest if largest > 1e-9 else 1.0  # 0 but for rounding, as the query's gradient in `affine`
    assert (got.cpu().double() - expected).abs().max().item() <= tolerance * largest, name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("weighting", ["relu", "relu_norm"])
@pytest.mark.parametrize("n", [100, 300])
def test_the_lowest_of_the_selected_has_weight_zero(
    n: int, weighting: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its score less itself, which it is not where a product is subtracted before it is rounded."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee" if precision == "ieee" else "tf32")
    _, ours = layers("lstm", n, scorer="cosine", weighting=weighting, k_top=3, k_att=1, k_trunc=None)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        _, _, attention = ours(randn(9, 64, 3).float().cuda(), return_attention=True)
    is_read = attention.numbers >= 0
    lowest = attention.weights.masked_fill(~is_read, torch.inf).amin(-1)
    assert torch.equal(lowest[is_read.any(-1)], torch.zeros_like(lowest[is_read.any(-1)]))
