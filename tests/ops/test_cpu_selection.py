"""The CPU's selection by sketch: exactly the k_top highest scores, ties to the older slot, with few keys scored."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sab
from sab.ops.cpu import engine, loader
from tests.ops.cases import assert_close, make_layer, randn, randomize, run

pytestmark = pytest.mark.skipif(loader.unavailable() is not None, reason="needs the compiled loops")
TYPES = torch.float32, torch.float64


def select(keys: Tensor, query: Tensor, k_top: int, sketched: bool) -> tuple[list[float], list[int], int]:
    """What the compiled selection finds: scores, slots, and how many keys it scored."""
    k = min(k_top, len(keys))
    scores, slots = keys.new_empty(k_top), torch.empty(k_top, dtype=torch.int32)
    function = engine.function("select", keys.dtype)
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_bool] + [ctypes.c_void_p] * 2
    pointers = keys.contiguous().data_ptr(), query.data_ptr()
    scored = function(*pointers, *keys.shape, k_top, sketched, scores.data_ptr(), slots.data_ptr())
    return scores[:k].tolist(), slots[:k].tolist(), scored


def all_scores(keys: Tensor, query: Tensor) -> list[float]:
    """The scores of all keys, as the compiled product makes them: selected are as many as there are."""
    scores, slots, _ = select(keys, query, len(keys), sketched=False)
    by_slot = dict(zip(slots, scores, strict=True))
    return [by_slot[slot] for slot in range(len(keys))]


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


@st.composite
def memories(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Keys, a query and k_top: of length 1 or of any, all different, few different ones or all equal."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from(TYPES))
    used, d = draw(st.integers(1, 700) | st.integers(130, 700)), draw(st.integers(1, 200))
    different = draw(st.sampled_from([used, used, max(used // 9, 1), 2, 1]))
    keys = torch.randn(different, d, generator=generator, dtype=dtype)
    close = draw(st.sampled_from([1.0, 0.1, 0.001]))  # of keys that are nearly equal, rough scores tell little
    keys = (1 - close) * torch.randn(d, generator=generator, dtype=dtype) + close * keys
    if draw(st.booleans()):
        keys = unit(keys)
    if draw(st.booleans()):
        keys = keys * torch.randn(different, 1, generator=generator, dtype=dtype).mul(3).exp()
    keys = keys[torch.randint(different, (used,), generator=generator)] if different < used else keys
    query = torch.randn(d, generator=generator, dtype=dtype) * draw(st.sampled_from([1.0, 1e-12, 1e12, 0.0]))
    return keys, query, draw(st.integers(1, 40))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("of_keys", "of_query"), [(1e-20, 1e-22), (1e-24, 1.0), (1e-13, 1.0), (1.0, 1e-20)])
def test_keys_and_queries_whose_squares_vanish(of_keys: float, of_query: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        keys = of_keys * torch.randn(400, 16, generator=generator, dtype=dtype)
        query = of_query * torch.randn(16, generator=generator, dtype=dtype)
        assert select(keys, query, 5, sketched=True)[:2] == select(keys, query, 5, sketched=False)[:2]


@settings(max_examples=150, deadline=None)
@given(memory=memories(), sketched=st.booleans())
def test_the_selection_is_that_of_a_full_sort(memory: tuple[Tensor, Tensor, int], sketched: bool) -> None:
    keys, query, k_top = memory
    scores, slots, scored = select(keys, query, k_top, sketched)
    of_all = all_scores(keys, query)
    expected = sorted(range(len(keys)), key=lambda slot: (-of_all[slot], slot))[:k_top]
    assert slots == expected
    assert scores == [of_all[slot] for slot in expected]
    assert scored <= len(keys)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("where", ["key", "query"])
def test_numbers_that_are_not_finite_are_selected_as_without_a_sketch(
    where: str, value: float, dtype: torch.dtype
) -> None:
    keys, query = randn(300, 16).to(dtype), randn(16, seed=2).to(dtype)
    (keys[40] if where == "key" else query)[3] = value
    assert str(select(keys, query, 10, sketched=True)[:2]) == str(select(keys, query, 10, sketched=False)[:2])


@pytest.mark.parametrize(("d", "most"), [(64, 0.07), (128, 0.12)])
def test_few_keys_of_a_long_memory_are_scored(d: int, most: float) -> None:
    keys, query = unit(randn(1500, d).float()), randn(d, seed=3).float()
    keys = torch.cat([keys, unit(randn(1500, d, seed=4).float())])  # more than any processor's least number
    assert select(keys, query, 10, sketched=True)[2] <= most * len(keys)


OPTIONS: list[dict[str, Any]] = [{}, {"scorer": "dot"}, {"k_top": 20}, {"k_top": 3, "k_att": 1, "attention_size": 37}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_long_memory_equals_the_reference(options: dict[str, Any]) -> None:
    """Also where a row ends early, and after a state, whose keys have no sketch yet."""
    x, lengths = randn(330, 2, 3), torch.tensor([330, 301])
    found = []
    for backend in ("cpu", "reference"):
        layer = randomize(make_layer("gru", 3, 24, 1, backend=backend, **options), scale=0.5)
        with torch.no_grad():
            output, _, attention = run(layer, x, lengths=lengths, return_attention=True)
            state = run(layer, x[:310])[1]
            found.append([output, attention.numbers, attention.weights, run(layer, x[310:], state)[0]])
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, tolerance=1e-8)


def test_ties_go_to_the_oldest_of_a_long_memory() -> None:
    layer = sab.SABLSTM(3, 16, k_att=1, backend="cpu")
    with torch.no_grad():
        layer.get_parameter("attn_w_memory_l0").zero_()
        *_, attention = layer(torch.randn(300, 2, 3), return_attention=True)
    assert attention.numbers[-1].tolist() == [list(range(10))] * 2


def test_a_long_stream_equals_the_reference() -> None:
    """Single steps keep a sketch of the keys: through growing buffers, and without the oldest ones after `recent`."""
    layers = [randomize(make_layer("gru", 3, 24, 1, backend=name, k_att=1), scale=0.5) for name in ("cpu", "reference")]
    x = randn(360, 3, 3)
    with torch.no_grad():
        first, state = run(layers[1], x[:300])[:2]
        expected = torch.cat([first, run(layers[1], x[300:], state.recent(190))[0]])
        state, outputs = None, []
        for step in range(360):
            output, state = run(layers[0], x[step : step + 1], state)
            outputs.append(output)
            state = state.recent(190) if step == 299 else state
    assert_close(torch.cat(outputs), expected, tolerance=1e-8)
