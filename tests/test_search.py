"""Streams that read through an index: exact where the index finds everything, and honest where it does not."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import sab
from sab.errors import UserError
from sab.ops.cpu import loader

LAYERS: list[Any] = [sab.SABLSTM, sab.SABGRU, sab.SABRNN]
STEPS = 300
needs_faiss = pytest.mark.usefixtures("_faiss")


@pytest.fixture
def _faiss() -> None:
    pytest.importorskip("faiss", reason="needs the extra `search`")
    if loader.unavailable() is not None:
        pytest.skip("no compiled CPU backend")


def _layer(cls: Any = sab.SABGRU, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(4, 12, **{"k_top": 3, "initial_gate": 0.5, **options}).eval()


def _x(steps: int = STEPS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(steps, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def _exact(layer: Any, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """The outputs and the state of an ordinary stream."""
    outputs = []
    with torch.no_grad():
        for one in x.split(1):
            output, state = layer(one, state)
            outputs.append(output)
    return torch.cat(outputs), state


def _stream(layer: Any, state: Any = None, **options: Any) -> sab.search.IndexedStream:
    """One with a small index that is searched exhaustively."""
    given = {"index": "IVF4,Flat", "parameters": "nprobe=4", "batch": 16, "train_after": 40, "check_every": 5}
    return sab.search.IndexedStream(layer, state, **{**given, **options})


@needs_faiss
@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("scorer", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_an_exhaustive_search_it_is_the_ordinary_stream(cls: Any, scorer: str, dtype: torch.dtype) -> None:
    layer, x = _layer(cls, scorer=scorer, dtype=dtype), _x(dtype=dtype)
    expected, state = _exact(layer, x)
    stream = _stream(layer)
    torch.testing.assert_close(stream.step(x), expected)
    assert stream.recall.share == 1.0
    assert stream.recall.steps > 30
    _assert_same_state(stream.state, state)


def _assert_same_state(actual: Any, expected: Any) -> None:
    one, other = (given if isinstance(given, sab.SABState) else given.state for given in (actual, expected))
    assert type(actual) is type(expected)
    for name in ("h", "c", "microstates", "keys", "numbers", "steps"):
        first, second = getattr(one, name), getattr(other, name)
        if second is not None:
            torch.testing.assert_close(first, second, msg=name)


@needs_faiss
@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("scorer", ["cosine", "dot"])
@pytest.mark.parametrize("before", [0, 7, 300])
def test_with_an_exhaustive_search_gradients_are_those_of_the_whole_memory(cls: Any, scorer: str, before: int) -> None:
    layer, x = _layer(cls, scorer=scorer, dtype=torch.float64), _x(before + 25, torch.float64)
    stream = _stream(layer)
    if before > 0:
        stream.step(x[:before])
    state = stream.state
    whole = (state if isinstance(state, sab.SABState) else state.state).clone()
    microstates = whole.microstates.clone().requires_grad_()
    parts = (microstates, whole.keys, whole.numbers, whole.steps)
    given, piece = sab.SABState(sab.state.plain(whole.h), whole.c, *parts), x[before:].clone().requires_grad_()
    weights = list(layer.parameters())
    expected = layer(piece, given)[0]
    wanted = torch.autograd.grad(expected.square().sum(), [*weights, piece, microstates], materialize_grads=True)

    output = stream.step(piece, gradients=True)
    torch.testing.assert_close(output, expected)
    read = stream.read
    assert read is not None
    assert before < 300 or len(read.numbers) < whole.numbers.shape[-1] / 2, "few of them can be read"
    found = torch.autograd.grad(output.square().sum(), [*weights, piece, read.microstates], materialize_grads=True)
    for one, other in zip(found[:-1], wanted[:-1], strict=True):
        torch.testing.assert_close(one, other)
    of_all = torch.zeros_like(microstates)
    of_all[0, read.numbers] = found[-1]
    torch.testing.assert_close(of_all, wanted[-1])
    _assert_same_state(stream.state, _exact(layer, x)[1])


@needs_faiss
@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients_of_a_batch_of_one(batch_first: bool) -> None:
    layer = _layer(batch_first=batch_first)
    x = _x(30).unsqueeze(0 if batch_first else 1)
    output = _stream(layer).step(x, gradients=True)
    torch.testing.assert_close(output, layer(x)[0])
    assert output.requires_grad
    assert not _stream(layer).step(x).requires_grad


@needs_faiss
@pytest.mark.parametrize("index", ["Flat", "HNSW16"])
def test_other_indices_of_faiss(index: str) -> None:
    layer, x = _layer(k_att=1), _x()
    parameters = "efSearch=400" if index == "HNSW16" else ""
    stream = _stream(layer, index=index, parameters=parameters)
    output = stream.step(x)
    assert stream.recall.share > 0.98
    if stream.recall.share == 1.0:
        torch.testing.assert_close(output, _exact(layer, x)[0])


@needs_faiss
def test_a_poor_search_is_seen_in_its_recall() -> None:
    layer, x = _layer(k_att=1), _x(600)
    stream = _stream(layer, index="IVF32,Flat", parameters="nprobe=1", train_after=200, check_every=1)
    assert stream.step(x).isfinite().all()
    assert 0 < stream.recall.share < 0.95
    with_more = _stream(layer, index="IVF32,Flat", parameters="nprobe=32", train_after=200, check_every=1)
    with_more.step(x)
    assert with_more.recall.share == 1.0


@needs_faiss
def test_checking_changes_nothing() -> None:
    layer, x = _layer(k_att=1), _x(400)
    options = {"index": "IVF16,Flat", "parameters": "nprobe=1", "train_after": 100}
    often, never = (_stream(layer, **options, check_every=every) for every in (1, 10**6))
    assert torch.equal(often.step(x), never.step(x))
    assert never.recall.steps == 0
    assert never.recall.share != never.recall.share  # NaN
    assert often.recall.steps > 200


@needs_faiss
def test_before_the_index_is_trained_steps_are_exact() -> None:
    layer, x = _layer(), _x()
    stream = _stream(layer, train_after=10**6)
    torch.testing.assert_close(stream.step(x), _exact(layer, x)[0])
    assert stream.recall.steps == 0


@needs_faiss
@pytest.mark.parametrize("cls", LAYERS)
def test_the_state_goes_there_and_back(cls: Any) -> None:
    layer, x = _layer(cls), _x()
    expected, _ = _exact(layer, x)
    first, state = _exact(layer, x[:100])
    stream = _stream(layer, state)
    second = stream.step(x[100:200])
    state = stream.state
    assert (state if isinstance(state, sab.SABState) else state.state).numbers.shape[-1] == 100
    third, _ = _exact(layer, x[200:], state)
    torch.testing.assert_close(torch.cat([first, second, third]), expected)
    torch.testing.assert_close(stream.step(x[200:]), expected[200:])  # it goes on, too
    with torch.no_grad():
        torch.testing.assert_close(layer(x[200:], state)[0], expected[200:])


@needs_faiss
def test_shapes_are_those_of_the_layer() -> None:
    layer, x = _layer(batch_first=True), _x(20)
    stream = _stream(layer)
    assert stream.step(x[:5]).shape == (5, 12)
    assert stream.step(x[5:].unsqueeze(0)).shape == (1, 15, 12)
    with torch.inference_mode():
        stream.step(x[:1])
    assert stream.step(x[:1]).requires_grad is False


@needs_faiss
def test_threads_that_share_the_products_of_a_large_layer() -> None:
    torch.manual_seed(0)
    layer, x = sab.SABGRU(4, 600, k_top=3, attention_size=8).eval(), _x(120)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.testing.assert_close(_stream(layer).step(x), _exact(layer, x)[0])
    finally:
        torch.set_num_threads(threads)


@needs_faiss
def test_a_stream_that_is_dropped_is_freed_at_once() -> None:
    stream = _stream(_layer())
    stream.step(_x())
    held = weakref.ref(stream)
    del stream
    assert held() is None


@needs_faiss
def test_a_layer_that_changes_under_a_stream_is_refused() -> None:
    layer, x = _layer(), _x()
    stream = _stream(layer)
    stream.step(x[:200])
    layer.double()
    with pytest.raises(UserError, match=r"^layer must stay as it was when the stream began, torch.float32 on the CPU"):
        stream.step(x[200:201])
    layer.float()
    torch.testing.assert_close(stream.step(x[200:]), _exact(layer, x)[0][200:])


@needs_faiss
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"train_after": 100}, "train_after must be at least 1024, the number of lists of 'IVF1024,Flat'; got 100"),
        ({"parameters": "nprobe=0"}, "parameters must set nprobe to at least 1; got 'nprobe=0'"),
        ({"index": "IDMap,Flat", "parameters": ""}, "index must be one that numbers its entries itself; got 'IDMap,"),
    ],
)
def test_what_faiss_would_refuse_later_is_refused_at_once(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        sab.search.IndexedStream(_layer(), **options)


@needs_faiss
def test_an_error_inside_a_search_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = _layer(), _x()
    stream = _stream(layer)
    before = stream.step(x[:200])
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_search", lambda address: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.step(x[200:210])
    torch.testing.assert_close(torch.cat([before, stream.step(x[200:])]), _exact(layer, x)[0])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scorer": "mlp"}, "scorer must be 'cosine' or 'dot' for an index.*got 'mlp'"),
    ({"scorer": "affine"}, "'affine' needs no index: layer.compact"),
    ({"scorer": lambda m, h: m[..., 0], "backend": "reference"}, "scorer must be 'cosine' or 'dot'.*got 'function'"),
    ({"forward": "dense"}, "forward must be 'sparse'"),
    ({"max_memory": 7}, "max_memory must be None for an index; got 7"),
    ({"memory": "hierarchical"}, "memory must be 'flat' for an index; got 'hierarchical'"),
    ({"k_top": 0, "initial_gate": None}, "k_top must be at least 1"),
    ({"num_layers": 2}, "layer must have one layer of one direction for an index; got 2"),
    ({"layer_norm": True}, "layer must be one that the compiled CPU loops can run"),
]


@needs_faiss
@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_layers_that_an_index_cannot_serve(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        _stream(_layer(**options))


@needs_faiss
def test_other_mistakes_get_a_sentence() -> None:
    layer = _layer()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"index": "nonsense"}, "index must be what faiss.index_factory can make.*got 'nonsense'"),
        ({"index": 3}, "index must be a string for faiss; got int"),
        ({"parameters": "efSearch=5"}, "parameters must be those of an index 'IVF4,Flat'"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"check_every": 1.5}, "check_every must be a whole number"),
    ]
    for options, sentence in wrong:
        with pytest.raises(UserError, match=sentence):
            _stream(layer, **options)
    with pytest.raises(UserError, match=r"layer must be a SAB layer; got SABGRUCell; cell.to_layer\(\)"):
        _stream(sab.SABGRUCell(4, 12))
    with pytest.raises(UserError, match="layer must be a SAB layer; got GRU"):
        _stream(torch.nn.GRU(4, 12))
    with pytest.raises(UserError, match="layer must be in evaluation mode"):
        _stream(_layer(recurrent_dropout=0.5).train())
    stream = _stream(layer)
    with pytest.raises(UserError, match=r"input must be one sequence.*got a batch of 2"):
        stream.step(torch.zeros(3, 2, 4))
    with pytest.raises(UserError, match="NaN"):
        stream.step(torch.full((1, 4), torch.nan))
    with pytest.raises(UserError, match="hx must have"):
        _stream(layer, layer(torch.zeros(4, 2, 4))[1])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="faiss is missing; install the extra 'search'"):
        sab.search.IndexedStream(_layer())
