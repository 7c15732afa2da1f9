"""Triton functions of a user, in the interpreter: equal to the reference, or refused where no kernel takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sab.errors import UserValueError
from sab.parts import registry, weightings
from sab.parts.cells import TANH, Cell
from sab.parts.pointwise import pointwise, tl
from sab.parts.scorers import AFFINE, DOT, NumberFunctions, Scorer, ScorerWeights, VectorFunctions
from tests.ops.cases import assert_close, randn
from tests.ops.test_registry import layer_with, results

pytest.importorskip("triton")
from sab.ops.triton import engine


def shapes(n: int, d: int, max_microstates: int | None) -> dict[str, tuple[int, ...]]:
    return {"w_memory": (d, n), "w_query": (d, n)}


def bells(weights: ScorerWeights, keys: Tensor, h: Tensor) -> Tensor:
    assert weights.w_query is not None
    return torch.exp(-(keys - (h @ weights.w_query.t()).unsqueeze(-2)).square()).sum(-1)


@pointwise
def bells_query(product, bias, SCALE):
    return product


@pointwise
def bells_query_backward(dquery, SCALE):
    return dquery


@pointwise
def bells_terms(key, query, v, MATH):
    return tl.exp(-(key - query) * (key - query))


@pointwise
def bells_backward(dscore, key, query, v, MATH):
    slope = 2 * dscore * (key - query) * tl.exp(-(key - query) * (key - query))
    return -slope, slope, 0.0 * dscore


BELLS = Scorer(
    shapes,
    DOT.key,
    bells,
    triton=VectorFunctions(bells_query, bells_query_backward, bells_terms, bells_backward),
)


def compare(kind: str, name: str, **options: Any) -> None:
    x = randn(7, 2, 3)
    expected = results(layer_with(kind, name, backend="reference", **options), x)
    for index, got in enumerate(results(layer_with(kind, name, backend="triton", **options), x)):
        assert_close(got, expected[index], f"{kind} {name}, tensor {index}", tolerance=1e-9)


@pytest.mark.parametrize("largest_small", [128, 0], ids=["small", "large"])
def test_terms_that_are_not_zero_for_zeros(largest_small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loops hold keys of 5 entries in 16 places; those past the end do not count."""
    monkeypatch.setitem(registry.SCORERS, "bells", BELLS)
    monkeypatch.setattr(engine, "LARGEST_SMALL", largest_small)
    compare("scorer", "bells", weighting="softmax_sink")


def test_another_part_under_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one saves for the backward pass is not what the second one needs."""
    monkeypatch.setitem(registry.WEIGHTINGS, "mine", weightings.SOFTMAX)
    compare("weighting", "mine")
    monkeypatch.setitem(registry.WEIGHTINGS, "mine", weightings.RELU_NORM)
    compare("weighting", "mine")


KEYLESS = DOT._replace(shapes=lambda n, d, _: {"w_query": (n, n)}, key=lambda w, microstate, number: microstate)
"""A scorer without weights for its keys."""
REFUSED: list[tuple[str, Any, str]] = [
    ("cell", Cell(5, False, TANH.step, triton=TANH.triton), "it takes cells of at most 4 gates, and 'rnn_mine' has 5"),
    ("scorer", DOT._replace(triton=NumberFunctions()), "it does not have the scorer 'rnn_mine'"),
    ("scorer", AFFINE._replace(triton=DOT.triton), "it does not have the scorer 'rnn_mine'"),
    ("scorer", KEYLESS, r"it takes scorers with w_memory and w_query of shape \[d, n\]"),
    (
        "scorer",
        AFFINE._replace(shapes=lambda n, d, _: {"w_memory": (n,)}),
        r"it takes scorers with w_memory and w_query of shape \[n\]",
    ),
]


@pytest.mark.parametrize(("kind", "part", "reason"), REFUSED)
def test_what_no_kernel_takes_is_refused(kind: str, part: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = part._replace(triton=type(part.triton)(*part.triton))  # what it shares with another part is refused anyway
    monkeypatch.setitem(registry.PARTS[kind], "rnn_mine", own)
    layer = layer_with(kind, "rnn_mine", backend="triton")
    with pytest.raises(UserValueError, match=f"'triton' does not: {reason}"):
        layer(randn(7, 2, 3))


def test_a_scorer_without_weights_for_its_keys_is_refused_by_the_cpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCORERS, "dot", KEYLESS)
    layer = layer_with("scorer", "dot", backend="cpu")
    with pytest.raises(UserValueError, match="'cpu' does not: it takes scorers with w_memory and w_query"):
        layer(randn(7, 2, 3))
