"""The choice of backend: `auto` always finds one, an explicit one that cannot says why."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import pytest
import torch

import sab
from sab.errors import SlowBackendWarning, UserError
from sab.ops import dispatch
from sab.ops.cpu import loader
from tests.ops.cases import BACKENDS, assert_close, make_layer, randn, randomize, runs_fast, warns_slow

needs_library = pytest.mark.skipif(loader.unavailable() is not None, reason=loader.unavailable() or "")


def call(backend: str, what: str) -> Any:
    """Run a call that only the reference is sure to support."""
    options: dict[str, Any] = {"k_top": 2, "k_att": 1, "backend": backend}
    if what == "a callable":
        options["scorer"] = lambda microstates, h: microstates.sum(-1)
    if what == "bfloat16":
        options["dtype"] = torch.bfloat16
    layer = randomize(make_layer("lstm", 2, 3, **options))
    x = randn(5, 2, 2).to(next(layer.parameters()).dtype)
    if what == "ragged":
        return layer(x, make_state(layer, x))[0]
    if what == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return layer.float()(x.float())[0]
    return layer(x)[0]


def make_state(layer: Any, x: torch.Tensor) -> sab.SABState:
    """The state after rows of different length, whichever backend the layer is bound to."""
    twin = make_layer("lstm", 2, 3, k_top=2, k_att=1, backend="reference")
    twin.load_state_dict(layer.state_dict())
    return twin(x, lengths=[5, 2])[1]


SPECIAL = ["a callable", "ragged", "bfloat16", "autocast"]


@needs_library
def test_auto_equals_the_reference_where_no_other_backend_may_and_says_so_once() -> None:
    with warns_slow("callable as the scorer"):
        output = call("auto", "a callable")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowBackendWarning)
        assert torch.equal(call("auto", "a callable"), output)
        dispatch._warned.clear()
        assert torch.equal(call("reference", "a callable"), output)


def test_the_warning_is_at_the_line_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer inside of a module, too; and it says what a C++ compiler is good for."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    loader._find.cache_clear()
    model = torch.nn.Sequential(make_layer("lstm", 2, 3))
    try:
        with warns_slow("no C\\+\\+ compiler .* is on the PATH; one makes it fast") as caught:
            model(randn(5, 2, 2))
    finally:
        loader._find.cache_clear()
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "model(randn(5, 2, 2))"
    assert "backend='reference' asks for it without this warning" in str(warning.message)


def test_where_the_warning_is_an_error_every_call_raises_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowBackendWarning)
        dispatch._warned.clear()
        for _ in range(2):
            with pytest.raises(SlowBackendWarning):
                call("auto", "a callable")


def test_asking_for_the_backend_warns_of_nothing() -> None:
    layer = make_layer("lstm", 2, 3, k_top=2, k_att=1, scorer=lambda microstates, h: microstates.sum(-1))
    with runs_fast():
        assert layer.backend_for(randn(5, 2, 2)) == "reference"


def test_a_compiler_that_traces_is_not_disturbed_by_a_warning() -> None:
    torch.compiler.reset()
    layer = make_layer("lstm", 2, 3, k_top=2, scorer=lambda microstates, h: microstates.sum(-1))
    with runs_fast(), torch.no_grad():
        torch.compile(layer, backend="eager")(randn(5, 2, 2))


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_an_explicit_backend_computes_or_says_why_not(backend: str, what: str) -> None:
    try:
        output = call(backend, what)
    except UserError as mistake:
        sentence, option = str(mistake), mistake.option
    else:
        assert_close(output, call("reference", what), tolerance=1e-2)
        return
    assert option == "backend"
    assert sentence.startswith("backend must be ")
    assert repr(backend) in sentence


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_backends_agree_on_a_long_sequence(backend: str, dtype: torch.dtype) -> None:
    """Sizes that no other test has: many rows, odd widths, hundreds of steps."""
    layer = make_layer("lstm", 5, 37, k_top=7, k_att=3, k_trunc=9, attention_size=19, scorer="mlp",
                       incorporate="add_bounded", dtype=dtype, backend="reference")  # fmt: skip
    other = make_layer("lstm", 5, 37, k_top=7, k_att=3, k_trunc=9, attention_size=19, scorer="mlp",
                       incorporate="add_bounded", dtype=dtype, backend=backend)  # fmt: skip
    other.load_state_dict(layer.state_dict())
    x = randn(120, 9, 5).to(dtype)
    try:
        actual = other(x)[0]
    except UserError as mistake:
        pytest.skip(str(mistake))
    expected = layer(x)[0]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    assert_close(actual, expected, tolerance=tolerance)
    actual.square().sum().backward()
    expected.square().sum().backward()
    for (name, p), q in zip(layer.named_parameters(), other.parameters(), strict=True):
        error = (q.grad - p.grad).norm() / p.grad.norm()
        assert error < tolerance, name


def test_a_layer_tells_which_backend_a_call_takes() -> None:
    layer, x = make_layer("lstm", 2, 3, k_top=2, k_att=1), randn(5, 2, 2)
    assert layer.backend_for(x) == layer.backend_for(x[:, 0]) == layer.backend_for(x, layer(x)[1])
    assert layer.backend_for(x) in BACKENDS
    assert layer.backend_for(x, make_state(layer, x)) == layer.backend_for(x)
    assert make_layer("lstm", 2, 3, backend="reference").backend_for(x) == "reference"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler looks at it
def test_torch_compile_does_not_unroll_the_reference() -> None:
    torch._dynamo.reset()
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        sizes.append(len(graph.graph.nodes))
        return graph

    layer, x = make_layer("lstm", 3, 4, backend="reference"), randn(60, 2, 3)
    compiled: Any = torch.compile(layer, backend=backend)
    assert_close(compiled(x)[0], layer(x)[0])
    assert sizes
    assert max(sizes) < len(x)
