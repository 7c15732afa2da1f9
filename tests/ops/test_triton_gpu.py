"""The Triton kernels on a GPU, in float32 and in what it rounds to, against the reference in float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import make_layer, randn, randomize
from tests.ops.test_triton_small import results

pytestmark = pytest.mark.gpu

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


def test_a_state_goes_on_from_the_cpu() -> None:
    theirs, ours = layers("lstm", 48, k_top=30, k_att=1, k_trunc=5)
    x, more = randn(9, 3, 3), randn(8, 3, 3, seed=2)
    expected = results(theirs, more, theirs(x)[1].detach())
    state = theirs(x)[1].detach().to(torch.float32).to("cuda")
    for name, tensor in results(ours, more.float().cuda(), state).items():
        if tensor.is_floating_point():
            assert_near(tensor, expected[name], PRECISIONS["tf32"], name)


def assert_near(got: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    assert got.isfinite().all(), name
    largest = expected.abs().max().item()
    largest = largest if largest > 1e-9 else 1.0  # 0 but for rounding, as the query's gradient in `affine`
    assert (got.cpu().double() - expected).abs().max().item() <= tolerance * largest, name
