"""A bounded macrostate in the Triton kernels, in Triton's interpreter: against the reference, and rule by rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops import forgetting, operation, recompute, reference
from tests.ops.cases import DOUBLE, gradients, make_layer, randn, randomize, run

pytest.importorskip("triton")
import triton
import triton.language as tl

from sab.ops.triton import engine, small
from sab.ops.triton import forgetting as triton_forgetting
from sab.ops.triton.launch import INTERPRETED

kernels: Any = triton_forgetting

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 must be set before triton is imported"),
    # Sigmoids of large negative numbers: exp overflows to infinity, whose inverse is 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def take(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run float64 in the kernels of one of the three families."""
    monkeypatch.setattr(engine, "LARGEST_SMALL", 0 if family == "large" else 128)
    monkeypatch.setattr(small, "DOUBLE_IN_LANES", family == "lanes")


def pair(cell: str, n: int, **options: Any) -> tuple[Any, Any]:
    """The reference and the kernels with the same weights."""
    options = {"k_top": 1, "k_att": 1, "k_trunc": 2, "max_memory": 2, "attention_size": 4} | options
    theirs, ours = (randomize(make_layer(cell, 2, n, backend=name, **options)) for name in ("reference", "triton"))
    return theirs, ours


def in_pieces(layer: Any, lengths: Tensor | None) -> dict[str, Tensor]:
    """All that a layer gives for three steps and for three more, and the gradients of everything through both."""
    x, more = randn(3, 2, 2).requires_grad_(), randn(3, 2, 2, seed=3).requires_grad_()
    first, state, before = run(layer, x, return_attention=True)
    second, end, after = run(layer, more, state, lengths=lengths, return_attention=True)
    given = {"first": first, "second": second, "h": end.h, "microstates": end.microstates, "keys": end.keys}
    given |= {"weights": after.weights, "summary": after.summary}
    leaves = {"x": x, "more": more, **dict(layer.named_parameters())}
    found = zip(leaves, gradients(list(given.values()), list(leaves.values())), strict=True)
    given |= {f"d{name}": gradient for name, gradient in found}
    given |= {"before": before.numbers, "after": after.numbers, "numbers": end.numbers}
    return given if end.reads is None else given | {"reads": end.reads}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("family", "cell", "scorer", "forget", "k_top", "most", "k_att", "ends"),
    [
        ("lanes", "rnn_tanh", "cosine", "recent", 2, 3, 1, True),
        ("lanes", "rnn_tanh", "mlp", "most_read", 1, 2, 1, False),
        ("lanes", "gru", "cosine", "reservoir", 2, 3, 1, True),
        ("small", "lstm", "affine", "recent", 2, 3, 1, True),
        ("small", "gru", "affine_tanh", "most_read", 1, 2, 1, False),
        ("small", "rnn_tanh", "affine", "reservoir", 2, 3, 1, True),
        ("small", "rnn_tanh", "cosine", "most_read", 1, 2, 2, True),
        ("large", "lstm", "cosine", "recent", 2, 3, 1, False),
        ("large", "rnn_tanh", "cosine", "most_read", 2, 3, 1, True),
        ("large", "rnn_tanh", "cosine", "reservoir", 1, 2, 2, True),
        ("large", "rnn_tanh", "affine", "recent", 2, 3, 1, True),
        ("large", "rnn_tanh", "affine", "most_read", 1, 2, 1, True),
        ("large", "rnn_tanh", "affine", "reservoir", 2, 3, 1, False),
    ],
)
def test_equals_the_reference_in_pieces_with_every_gradient(
    family: str, cell: str, scorer: str, forget: str, k_top: int, most: int, k_att: int, ends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    take(family, monkeypatch)
    theirs, ours = pair(cell, 5, scorer=scorer, forget=forget, k_top=k_top, max_memory=most, k_att=k_att)
    lengths = torch.tensor([3, 1]) if ends else None
    assert_equal(in_pieces(ours, lengths), in_pieces(theirs, lengths))


@triton.jit
def draw_kernel(numbers, found, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(found + at, kernels.drawn(tl.load(numbers + at)))


def test_a_draw_is_that_of_the_rule() -> None:
    numbers = torch.cat([torch.arange(60), torch.tensor([10**6, 2**31 - 4, 2**31 - 3, 2**31 - 2])]).int()
    found = torch.empty(64, dtype=torch.int64)
    draw_kernel[(1,)](numbers, found, BLOCK=64)  # pyright: ignore[reportArgumentType]
    assert found.tolist() == [forgetting.drawn(number) for number in numbers.tolist()]


@triton.jit
def keep_kernel(live, reads, selected, remembered, most, discount, slot, number, FORGET: tl.constexpr):
    """A step that selects four slots and keeps a microstate."""
    thread = tl.arange(0, 16)
    if FORGET == "most_read":
        four = tl.arange(0, 4)
        place = kernels.places_of(live, remembered, discount, tl.load(selected + four), "plain")
        kernels.count_reads(reads, place, four >= 0, "plain")
    gone = kernels.forgotten(reads, remembered, most, discount, number, thread, None, FORGET, "plain")
    kernels.renew(live, reads, gone, remembered, most, slot, thread, FORGET, "plain")


@pytest.mark.parametrize("most", [1, 5, 37])
@pytest.mark.parametrize("forget", ["most_read", "reservoir"])
def test_a_list_forgets_as_the_rule(forget: str, most: int) -> None:
    """Past the bound, with lists longer than what the threads take at once and counts longer than 32 bits."""
    config, first = SABConfig(max_memory=most, forget=forget), most - 1
    numbers, reads = torch.arange(first).unsqueeze(0), None
    live, own_reads = torch.arange(most, dtype=torch.int32), None
    live[first:] = -1
    if forget == "most_read":
        own_reads = torch.zeros(most, dtype=torch.int64)
        own_reads[:first:2] = 1 << 40
        reads = own_reads[:first].unsqueeze(0).clone()
    generator = torch.Generator().manual_seed(most)
    for number in range(first, first + 30):
        chosen = torch.full((4,), -1, dtype=torch.int32)
        held = numbers[0, torch.randperm(numbers.shape[1], generator=generator)[:4]]
        chosen[: len(held)] = held
        if reads is not None:
            reads = forgetting.count(reads, numbers, chosen.unsqueeze(0).long())
        sizes = min(number, most), most, forgetting.shift(most), number, number
        keep_kernel[(1,)](live, own_reads, chosen, *sizes, FORGET=forget)  # pyright: ignore[reportArgumentType]
        numbers, reads, _ = forgetting.keep(numbers, reads, torch.tensor([number]), torch.tensor([True]), config)
        assert live[live >= 0].tolist() == numbers[0].tolist()
        if reads is not None and own_reads is not None:
            assert own_reads[: reads.shape[1]].tolist() == reads[0].tolist()


@pytest.mark.parametrize(
    ("forget", "dtype"), [("recent", torch.bfloat16), ("reservoir", torch.float32), ("reservoir", torch.bfloat16)]
)
def test_rounded_scores_are_those_of_what_is_not_forgotten(
    forget: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a round of candidates, one number a thread; in bfloat16 scored as a product. What these rules forget
    depends on no score, so rounding changes who is selected only where scores are close. The reservoir forgets old
    ones first here, after which nearly every place is another slot's."""
    options = {"k_top": 6, "k_att": 1, "k_trunc": 1, "max_memory": 270, "forget": forget, "scorer": "dot"}
    theirs = randomize(make_layer("rnn_tanh", 2, 4, attention_size=32, backend="reference", **options), scale=0.5)
    ours = make_layer("rnn_tanh", 2, 4, attention_size=32, backend="triton", dtype=torch.float32, **options)
    ours.load_state_dict(theirs.state_dict())
    if dtype == torch.bfloat16:
        monkeypatch.setattr("sab.ops.precision.compute_type", lambda *arguments: torch.bfloat16)
    with torch.no_grad():
        hx = theirs(randn(308, 1, 2, seed=5))[1].state
        _, end, expected = run(theirs, randn(3, 1, 2), hx, return_attention=True)
        _, state, got = run(ours, randn(3, 1, 2).float(), hx.to(torch.float32), return_attention=True)
    assert torch.equal(state.numbers, end.numbers)
    shared = (got.numbers.unsqueeze(-1) == expected.numbers.unsqueeze(-2)).any(-1)
    assert shared[1:].float().mean() > 0.8
    assert (state.keys.to(DOUBLE) - end.keys).abs().max() < 0.2


@pytest.mark.parametrize(("family", "scorer"), [("lanes", "dot"), ("small", "affine"), ("large", "dot")])
def test_a_bound_below_k_top(family: str, scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer selects no more than there can be; a call with open sizes may. The last of them is the threshold."""
    take(family, monkeypatch)
    layer = pair("rnn_tanh", 5, k_top=5, max_memory=2, scorer=scorer, weighting="relu", incorporate="add")[0]
    found = []
    for run_one in (reference.run, lambda *arguments: operation.run("triton", *arguments)):
        x = randn(4, 1, 2).requires_grad_()
        result = run_one(x, None, None, layer._weights(0), "rnn_tanh", layer.config)
        found.append([result.output, *gradients([result.output], [x, *layer.parameters()])])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_two_directions_with_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    take("small", monkeypatch)
    monkeypatch.setattr(recompute, "SHORTEST", 3)
    monkeypatch.setattr(recompute, "LONGEST", 3)
    options = {"scorer": "affine", "forget": "most_read", "max_memory": 2, "k_top": 1, "k_att": 1, "k_trunc": 3}
    found = []
    for others in ({"backend": "reference"}, {"backend": "triton", "recompute": True}):
        layer = randomize(make_layer("rnn_tanh", 2, 4, bidirectional=True, **options, **others))
        x = randn(5, 2, 2).requires_grad_()
        output, state = run(layer, x, lengths=[5, 2])
        seen = [output, state.h, state.microstates, state.keys]
        found.append([*seen, *gradients(seen, [x, *layer.parameters()]), state.numbers, state.reads])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
