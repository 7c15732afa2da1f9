"""`sab::recurrence` as PyTorch sees it: registered rightly, compiled whole, without a wait for the device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sab
from sab.ops import arguments, dispatch, engines, precision
from sab.ops import plan as plans
from sab.ops.buffers import Buffers, Edges, Outside, Prepared, Work
from sab.ops.cpu import engine as cpu
from sab.ops.cpu import loader
from sab.ops.preparation import input_gates
from tests.comparing import distances_of_scores, selects_surely
from tests.ops.cases import (
    BACKENDS,
    BOUNDS,
    DOUBLE,
    assert_close,
    cases,
    gradients,
    make_layer,
    randn,
    randomize,
    run,
    runs_fast,
    weighted_sum,
)

FAST = [name for name in BACKENDS if name != "reference"]
needs_library = pytest.mark.skipif(loader.unavailable() is not None, reason=loader.unavailable() or "")


@dataclasses.dataclass
class Call:
    """Arguments of the operation."""

    cell: str = "lstm"
    scorer: str = "mlp"
    weighting: str = "softmax"
    forward: str = "sparse"
    incorporate: str = "add"
    k_top: int = 2
    first_slots: int = 0
    bias: bool = True
    layer_norm: bool = False
    dropout: bool = False
    max_memory: int = 0
    forget: str = "recent"
    block_size: int = 0
    lengths: list[int] | None = None
    needs: bool = True
    """Whether gradients are needed."""

    fresh: bool = False
    """Whether there is no initial state."""

    def arguments(self) -> tuple[Any, ...]:
        steps, batch, n, input_size, k_att = 7, 3, 4, 2, 2
        gates = {"lstm": 4, "gru": 3}.get(self.cell, 1) * n
        is_affine = self.scorer.startswith("affine")
        d = 0 if self.k_top == 0 else 1 if is_affine else 5
        scorer: list[Tensor | None] = [None] * 4
        if self.k_top > 0 and is_affine:
            scorer = [self.new(n), self.new(n), self.new(6), None]
        elif self.k_top > 0:
            has_bias = self.scorer == "mlp"
            scorer = [
                self.new(d, n),
                self.new(d, n),
                self.new(d) if has_bias else None,
                self.new(d) if has_bias else None,
            ]
        norms: list[Tensor | None] = [None] * 4
        if self.layer_norm:
            of_c = [self.new(n), self.new(n)] if self.cell == "lstm" else [None, None]
            norms = [self.new(gates), self.new(gates), *of_c]
        is_concat = self.k_top > 0 and self.incorporate == "concat"
        return (
            self.new(steps, batch, input_size),
            None if self.lengths is None else torch.tensor(self.lengths),
            None if self.fresh else self.new(batch, n),
            None if self.fresh or self.cell != "lstm" else self.new(batch, n),
            None if self.fresh else self.new(batch, self.first_slots, n),
            None if self.fresh else self.new(batch, self.first_slots, d),
            torch.ones(batch, self.first_slots, dtype=torch.int64) if self.forget == "most_read" else None,
            self.new(gates, input_size),
            self.new(gates, n),
            self.new(gates) if self.bias else None,
            self.new(gates) if self.bias else None,
            *scorer,
            self.new(n, 2 * n) if is_concat else None,
            self.new(n) if is_concat else None,
            *norms,
            torch.rand(batch, n, dtype=DOUBLE).round() * 2 if self.dropout else None,
            "cpu",
            self.cell,
            self.scorer,
            self.weighting,
            self.forward,
            self.incorporate,
            self.k_top,
            k_att,
            3,
            self.layer_norm,
            self.max_memory,
            self.forget,
            self.block_size,
            2 if self.block_size > 0 else 0,
            self.first_slots * k_att + 1 if self.first_slots > 0 else 0,
            DOUBLE,
            False,
            self.needs,
        )

    def new(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=DOUBLE, requires_grad=self.needs)


CALLS = [
    Call(),
    Call(cell="gru", scorer="affine", weighting="relu_norm", incorporate="concat", first_slots=2),
    Call(cell="rnn_tanh", scorer="dot", lengths=[7, 3, 5], incorporate="add_bounded"),
    Call(cell="rnn_relu", scorer="affine_tanh", weighting="softmax_sink", forward="dense", bias=False),
    Call(k_top=0),
    Call(needs=False, first_slots=1),
    Call(fresh=True),
    Call(cell="gru", scorer="affine", incorporate="concat", fresh=True, lengths=[7, 3, 5]),
    Call(layer_norm=True, dropout=True),
    Call(cell="gru", layer_norm=True, lengths=[7, 3, 5], k_top=0),
    Call(cell="rnn_tanh", layer_norm=True, bias=False, needs=False),
    Call(max_memory=2, forget="most_read", first_slots=1),
    Call(scorer="dot", block_size=1, first_slots=1),
]


@needs_library
@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_it_is_registered_rightly(call: Call) -> None:
    """Its schema, its fake and autograd implementations, and all of it under the compiler with shapes that vary."""
    torch.library.opcheck(torch.ops.sab.recurrence.default, call.arguments())


@needs_library
@pytest.mark.parametrize(
    "call",
    [
        Call(cell="gru", scorer="mlp", incorporate="concat", first_slots=2, needs=False),
        Call(layer_norm=True, dropout=True, needs=False),
        Call(max_memory=2, forget="reservoir", needs=False),
    ],
    ids=str,
)
def test_its_backward_is_registered_rightly(call: Call) -> None:
    flat = call.arguments()
    outputs = torch.ops.sab.recurrence(*flat[:-1], True)
    given, initial, parameters, options, _ = arguments.split(flat, arguments.FORWARD)
    found = dict(zip(arguments.result_names(options), outputs, strict=False))
    outside = [torch.randn_like(found[name]) if name in found else None for name in Outside._fields]
    needs = [tensor is not None for tensor in (*given, *initial, *parameters)]
    needs[arguments.INPUTS.index("h_mask")] = False  # it is drawn, not learned
    backward = (*outside, *given, *parameters, outputs[1:], *options, needs)
    torch.library.opcheck(torch.ops.sab.recurrence_backward.default, backward)


@pytest.mark.usefixtures("poisoned")
def test_fresh_memory_is_poisoned() -> None:
    assert torch.zeros(1).new_empty(3).isnan().all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", FAST)
@given(case=cases(backend="reference", max_memory=BOUNDS), pieces=st.integers(1, 3))
@settings(max_examples=60 if FAST == ["cpu"] else 6)  # interpreted kernels take their time
def test_backends_equal_the_reference_in_outputs_and_every_gradient(backend: str, case: Any, pieces: int) -> None:
    case.lengths[0] = case.steps  # else the reference has no slot where no row has a microstate
    if backend == "triton":
        case.options |= {"forward": "sparse", "max_memory": None, "forget": "recent"}
    results = []
    for name in ("reference", backend):
        layer = case.layer()
        layer.config = dataclasses.replace(layer.config, backend=name)
        x = case.x().requires_grad_()
        shape = (len(layer._suffixes), case.batch, case.sizes[1])
        given_state = [randn(*shape, seed=seed).requires_grad_() for seed in (3, 4)[: 2 if case.cell == "lstm" else 1]]
        state: Any = tuple(given_state) if case.cell == "lstm" else given_state[0]
        seen: list[Tensor] = []
        numbers: list[Tensor] = []
        for piece in range(pieces):
            # Lengths only at the end: rows that have seen different numbers of steps are the reference's alone.
            lengths = case.lengths if piece == pieces - 1 else None
            with distances_of_scores() as distances:
                output, state, attention = run(layer, x, state, lengths=lengths, return_attention=True)
            assume(distances.certain())
            keys = state.keys.masked_fill(state.numbers.unsqueeze(-1) < 0, 0.0)  # those of no microstate are free
            seen += [output, *state, state.microstates, keys, attention.weights, attention.summary]
            numbers += [attention.numbers, state.numbers, state.steps, *([] if state.reads is None else [state.reads])]
        leaves = [x, *given_state, *layer.parameters()]
        results.append((seen + gradients(seen, leaves), numbers))
    (expected, expected_numbers), (actual, actual_numbers) = results
    for one, other in zip(actual_numbers, expected_numbers, strict=True):
        assert torch.equal(one, other)
    for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, f"tensor {place}", tolerance=1e-9)


@needs_library
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {}),
        ("gru", {"layer_norm": True}),
        ("gru", {"k_top": 0, "bias": False}),
        ("rnn_tanh", {"scorer": "affine", "incorporate": "concat", "max_microstates": 9}),
        ("lstm", {"scorer": "mlp", "forward": "dense", "layer_norm": True}),
        ("gru", {"max_memory": 3, "forget": "most_read"}),
        ("lstm", {"recompute": True, "bidirectional": True}),
    ],
)
def test_steps_after_the_end_of_rows_that_a_thread_has(
    shared: bool, cell: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest rows lie together: most groups of rows end before the others, and all before the last step."""
    steps, batch = 9, 40
    lengths = torch.linspace(steps - 1, 1, batch).long()
    monkeypatch.setattr(cpu, "shares_products", lambda *_: shared)
    results: list[list[Tensor]] = []
    for backend in ("reference", "cpu"):
        given = {"k_att": 2, "k_trunc": 3, "k_top": 2, **options, "backend": backend}
        given["recompute"] = backend == "cpu" and options.get("recompute", False)
        layer = randomize(make_layer(cell, 3, 5, **given))
        x = randn(steps, batch, 3).requires_grad_()
        output, state = layer(x, lengths=lengths)
        seen = [output, *state, *([state.state.microstates] if cell != "lstm" else [state.microstates])]
        results.append(seen + gradients(seen, [x, *layer.parameters()]))
    for place, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, f"tensor {place}", tolerance=1e-9)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {"scorer": "mlp", "k_top": 2, "incorporate": "concat"}),
        ("gru", {"scorer": "affine_tanh", "k_top": 3, "weighting": "relu_norm", "max_microstates": 2}),
        ("rnn_tanh", {"scorer": "dot", "k_top": 1, "weighting": "softmax_sink", "incorporate": "add_bounded"}),
        ("lstm", {"k_top": 0}),
        ("lstm", {"k_top": 2, "layer_norm": True}),
        ("gru", {"k_top": 0, "layer_norm": True, "bias": False}),
    ],
)
def test_a_fresh_state_is_one_of_zeros(backend: str, steps: int, cell: str, options: dict[str, Any]) -> None:
    """Without lengths, so that nothing but the loops fills the buffers; two steps are too few to read."""
    results = []
    for name in ("reference", backend):
        layer = randomize(make_layer(cell, 3, 4, k_att=2, k_trunc=3, backend=name, **options))
        x = randn(steps, 3, 3).requires_grad_()
        output, state, attention = run(layer, x, return_attention=True)
        zeros = torch.zeros_like(state.h)
        assert selects_surely(layer, x)
        assert_close(layer(x, (zeros, zeros) if cell == "lstm" else zeros)[0], output)
        alone = gradients([output], [x, *layer.parameters()])
        seen = [output, *state, state.microstates, state.keys, attention.weights, attention.summary]
        results.append([*seen, *alone, *gradients(seen, [x, *layer.parameters()]), attention.numbers])
    for place, (one, other) in enumerate(zip(*results, strict=True)):
        assert_close(one, other, f"tensor {place}", tolerance=1e-9)


class Compiled:
    """A layer and its compiled twin, whose results must be equal."""

    def __init__(self, cell: str, compiler: str, **options: Any):
        torch._dynamo.reset()
        self.layer = randomize(make_layer(cell, 3, 5, 2, **options))
        self.compiled: Any = torch.compile(self.layer, fullgraph=True, backend=compiler)

    def check(self, hx: Any = None, **options: Any) -> Any:
        x = randn(9, 4, 3).requires_grad_()
        found = []
        for layer in (self.layer, self.compiled):
            output, state = run(layer, x, hx, **options)
            outputs = [output, *state, state.microstates, state.keys]
            leaves = [x, *self.layer.parameters()]
            found.append([*outputs, *torch.autograd.grad(weighted_sum(outputs), leaves)])
        for actual, expected in zip(*found, strict=True):
            assert_close(actual, expected)
        with torch.no_grad():
            inferred, state = self.compiled(x, hx, **options)
        assert_close(inferred, found[0][0])
        return state


def initial(layer: Any) -> Any:
    h = randn(len(layer._suffixes), 4, 5, seed=5)
    return (h, h + 1) if layer.cell == "lstm" else h


@needs_library
@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {"k_top": 3}),
        ("gru", {"k_top": 3, "scorer": "affine", "max_microstates": 7, "bidirectional": True}),
        ("rnn_tanh", {"k_top": 20, "scorer": "dot", "incorporate": "concat"}),
        ("lstm", {"k_top": 0}),
        ("lstm", {"k_top": 3, "layer_norm": True}),
        ("gru", {"k_top": 3, "layer_norm": True, "bidirectional": True}),
        ("lstm", {"k_top": 2, "max_memory": 2, "forget": "most_read"}),
    ],
)
def test_the_whole_layer_compiles_into_one_graph(cell: str, options: dict[str, Any]) -> None:
    twins = Compiled(cell, "aot_eager", **options)
    twins.check()
    twins.check(initial(twins.layer))


@needs_library
@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
def test_it_compiles_with_the_state_of_an_earlier_call() -> None:
    """A few times over for growing states, then never again."""
    twins = Compiled("lstm", "aot_eager", k_top=3)
    state = twins.check()
    for _ in range(3):
        state = twins.check(state)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            state = twins.check(state)
    assert state.steps.tolist() == [63] * 4


@needs_library
@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
def test_it_compiles_with_lengths() -> None:
    Compiled("gru", "aot_eager", k_top=3).check(lengths=torch.tensor([9, 4, 1, 7]))


@needs_library
@pytest.mark.filterwarnings("ignore")  # of the compiler's own parts
def test_it_compiles_with_inductor() -> None:
    """Without Inductor's cache: it may hold code for an instruction set that ATEN_CPU_CAPABILITY has switched off."""
    with torch.compiler.config.patch(force_disable_caches=True):  # pyright: ignore[reportAttributeAccessIssue]
        twins = Compiled("lstm", "inductor", k_top=3)
        twins.check(initial(twins.layer))


@pytest.mark.parametrize("backend", FAST)
def test_a_second_derivative_tells_of_the_reference(backend: str) -> None:
    layer = make_layer("lstm", 3, 4, k_top=2, backend=backend)
    x = randn(7, 2, 3).requires_grad_()
    (first,) = torch.autograd.grad(layer(x)[0].square().sum(), [x], create_graph=True)
    assert first.requires_grad
    with pytest.raises(RuntimeError, match="backend='reference' has second derivatives"):
        torch.autograd.grad(first.square().sum(), [x])


def errors(output: Tensor, exact: list[Tensor], layer: Any, x: Tensor) -> list[float]:
    """The relative errors of an output and of all gradients of its sum of squares."""
    found = [output, *torch.autograd.grad(output.double().square().sum(), [x, *layer.parameters()])]
    return [((one.double() - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]


@needs_library
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_lower_precision_on_the_cpu_runs_in_the_loops(cell: str, lower: torch.dtype, is_autocast: bool) -> None:
    """With at most twice the reference's error. What goes in and comes out is of the layer's own type."""
    options: dict[str, Any] = {"k_top": 40, "k_att": 1}  # all are selected, whatever rounding does to their scores
    wide = randomize(make_layer(cell, 3, 8, **options, backend="reference"), scale=0.3)
    dtype = torch.float32 if is_autocast else lower
    layers = [make_layer(cell, 3, 8, **options, dtype=dtype, backend=backend) for backend in ("auto", "reference")]
    for layer in layers:
        layer.load_state_dict(wide.state_dict())
    wide.load_state_dict(layers[0].state_dict())  # rounded
    x = randn(30, 4, 3).to(dtype).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    exact = [wide(exact_x)[0]]
    exact += torch.autograd.grad(exact[0].square().sum(), [exact_x, *wide.parameters()])
    found = []
    with runs_fast(), torch.autocast("cpu", lower, enabled=is_autocast):
        for layer in layers:
            output, state = layer(x)
            found.append(errors(output, exact, layer, x))
            assert output.dtype == dtype
            assert (state if cell == "lstm" else state.state).microstates.dtype == dtype
            assert layer(x.to(lower), state)[0].dtype == dtype
        assert layers[0].backend_for(x) == layers[0].backend_for(x.to(lower)) == "cpu"
    rounding = torch.finfo(lower).eps
    for ours, theirs in zip(*found, strict=True):
        assert ours <= 2 * theirs + rounding, (found, rounding)


class Widened:
    """An engine for bfloat16: the CPU's, on float32 copies of what is in bfloat16."""

    @staticmethod
    def unsupported(*_: Any) -> None:
        return None

    SUMS_BIASES = False
    LAST_GATE_ALONE = True
    can_round = staticmethod(lambda: False)
    pack = staticmethod(cpu.pack)
    overwrites = staticmethod(lambda plan: ())  # all that is widened is a copy
    begins_with_output = staticmethod(cpu.begins_with_output)
    gradients = staticmethod(cpu.gradients)

    @staticmethod
    def prepare(plan: Any, given: Any, parameters: Any, options: Any, saves: bool) -> Prepared:
        return Prepared(input_gates(given, parameters, options))

    @staticmethod
    def forward(plan: Any, weights: Any, buffers: Buffers, edges: Edges, inputs: Any) -> None:
        Widened.check(plan, buffers)
        with widened(buffers) as wide:
            cpu.forward(plan, widen(weights), wide, edges)

    @staticmethod
    def backward(plan: Any, weights: Any, buffers: Buffers, work: Work) -> None:
        with widened(buffers) as wide, widened(work) as wide_work:
            cpu.backward(plan, widen(weights), wide, wide_work)

    @staticmethod
    def check(plan: Any, buffers: Buffers) -> None:
        """What is summed over many steps is in float32, what enters products in bfloat16."""
        types = {name: tensor.dtype for name, tensor in buffers._asdict().items() if tensor is not None}
        narrow = {name for name, dtype in types.items() if dtype == torch.bfloat16}
        assert narrow == {"gates", "keys"} | ({"hidden_new"} if plan.cell == "gru" else set())
        assert types["selected"] == torch.int32


def widen(weights: Any) -> Any:
    """The weights rounded as products of bfloat16 have them, in float32."""
    return type(weights)(*(weight if weight is None else weight.bfloat16().float() for weight in weights))


@contextlib.contextmanager
def widened(tensors: Any) -> Iterator[Any]:
    """Buffers or work in float32; what is one tensor there stays one."""
    wide = {id(tensor): tensor.float() for tensor in tensors if tensor is not None and tensor.dtype == torch.bfloat16}
    yield type(tensors)(*(wide.get(id(tensor), tensor) for tensor in tensors))
    for tensor in tensors:
        if id(tensor) in wide:
            tensor.copy_(wide[id(tensor)])


@needs_library
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("scorer", ["mlp", "affine_tanh"])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_bfloat16_is_as_exact_as_its_rounding(
    cell: str, scorer: str, is_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the layer or of autocast; what goes in and comes out is of the layer's own type."""
    monkeypatch.setattr(precision, "compute_type", lambda *arguments: torch.bfloat16)  # as on a GPU
    monkeypatch.setitem(engines._imported, "cpu", Widened)
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", dispatch.BACKENDS["cpu"]._replace(unsupported=Widened.unsupported))
    dtype = torch.float32 if is_autocast else torch.bfloat16
    options = {"k_top": 2, "scorer": scorer, "incorporate": "concat", "max_microstates": 3}
    layer = randomize(make_layer(cell, 3, 6, **options, dtype=dtype, backend="cpu"), scale=0.3)
    exact = make_layer(cell, 3, 6, **options, backend="reference")
    exact.load_state_dict(layer.state_dict())
    x = randn(9, 4, 3).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        output, state, attention = run(layer, x, return_attention=True)
        piece, _ = layer(x, state)
    wide = x.detach().double().requires_grad_()
    expected, expected_state = exact(wide)
    for tensor in (output, *state, state.microstates, state.keys, attention.weights, attention.summary, piece):
        assert tensor.dtype == dtype
    error = (torch.cat([output, piece]).double() - torch.cat([expected, exact(wide, expected_state)[0]])).abs().max()
    assert error < 0.05
    actual = torch.autograd.grad(output.double().square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [wide, *exact.parameters()])
    for one, other in zip(actual, wanted, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() < 0.05 * other.norm() + 1e-5


class Crossings(TorchDispatchMode):
    """Notes what is brought from the CPU to the device `meta`, which stands for any other."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        given = [arg for arg in args if isinstance(arg, Tensor)]
        made = result if isinstance(result, tuple | list) else [result]
        devices = {tensor.device.type for tensor in made if isinstance(tensor, Tensor)}
        if "meta" in devices and any(tensor.device.type == "cpu" and tensor.dim() > 0 for tensor in given):
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_nothing_waits_for_the_device_or_is_copied_to_it(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the device `meta` have no values: whoever asks for one fails."""

    def unsupported(x: Tensor, state: Any, weights: Any, *_: Any) -> str | None:
        return plans.unsupported(x, state, weights)

    monkeypatch.setitem(dispatch.BACKENDS, "triton", dispatch.BACKENDS["triton"]._replace(unsupported=unsupported))
    monkeypatch.setitem(engines._imported, "triton", Widened)  # Triton need not be there
    layer = make_layer(cell, 3, 4, 2, k_top=2, bidirectional=True, device="meta", backend="triton")
    x = torch.empty(7, 2, 3, device="meta", dtype=DOUBLE, requires_grad=True)
    with Crossings() as crossings:
        output, state, attention = run(layer, x, return_attention=True)
        output.sum().backward()
        layer(x, state.detach())[0].sum().backward()
        layer(x, layer.compact(state.detach().select(slice(0, 2))))
    assert output.shape == (7, 2, 8)
    assert attention.numbers.shape == (4, 7, 2, 2)
    assert layer.weight_hh_l0.grad.shape == layer.weight_hh_l0.shape
    assert crossings.found == []


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("carries", [False, True])
def test_a_second_backward_tells_what_torch_tells(recompute: bool, carries: bool) -> None:
    """Also after a state that was carried on without `detach`."""
    layer = sab.SABLSTM(3, 4, recompute=recompute)
    output, state = layer(torch.randn(12, 2, 3))
    output.sum().backward()
    if carries:
        output, _ = layer(torch.randn(12, 2, 3), state)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        output.sum().backward()


def test_what_all_rows_have_seen_is_known_as_long_as_it_holds() -> None:
    layer = make_layer("lstm", 3, 4, k_top=2)
    x = randn(5, 3, 3)
    state = layer(x)[1]
    assert state._seen == 5
    assert layer(x, state)[1]._seen == 10
    for same in (state.detach(), state.to(torch.float32), state.select([2, 0]), layer.compact(state)):
        assert same._seen == 5
    assert layer(x, lengths=[5, 5, 5])[1]._seen == 5
    assert layer(x, lengths=[5, 4, 5])[1]._seen is None
    assert dataclasses.replace(state, steps=state.steps + 1)._seen is None
    assert layer(x[:, 0])[1]._seen == 5


def test_weights_with_the_negative_bit() -> None:
    """As a parametrization can give them: torch has put off to negate them."""
    layer, x = randomize(make_layer("lstm", 3, 4, k_top=2, k_att=1, max_microstates=3)), randn(6, 2, 3)
    leaves = [parameter.detach().requires_grad_() for parameter in layer.parameters()]
    negate_later: Any = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]
    negative = [negate_later(-leaf) for leaf in leaves]
    assert all(weight.is_neg() and weight.is_contiguous() for weight in negative)
    given = dict(zip(dict(layer.named_parameters()), negative, strict=True))
    output, state = torch.func.functional_call(layer, given, (x,))
    expected, expected_state = layer(x)
    assert_close(output, expected)
    assert_close(state.keys, expected_state.keys)
    for one, other in zip(gradients([output], leaves), gradients([expected], list(layer.parameters())), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("weight_hh_l0", (16, 3)), ("bias_hh_l0", (7,)), ("attn_w_query_l0", (3, 4)), ("attn_v_l0", (2,)),
     ("attn_bias_l0", (3,)), ("incorporate_weight_l0", (4, 7)), ("incorporate_bias_l0", (1,)),
     ("norm_ih_l0", (4,)), ("norm_hh_l0", (1,)), ("norm_c_weight_l0", (3,)), ("norm_c_bias_l0", (5,))],
)  # fmt: skip
def test_weights_of_another_size_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """`functional_call` takes any; the compiled loops would read past their ends."""
    layer, x = make_layer("lstm", 3, 4, k_top=2, k_att=1, backend="cpu", layer_norm=True), randn(6, 2, 3)
    with pytest.raises((ValueError, RuntimeError), match=r"must be of shape|size"):
        torch.func.functional_call(layer, {name: torch.zeros(shape, dtype=DOUBLE)}, (x,))


def test_the_operation_by_itself_refuses_what_does_not_fit() -> None:
    call = Call(scorer="mlp", first_slots=2, lengths=[7, 3, 5])
    flat = call.arguments()
    names = [*arguments.INPUTS, *arguments.Options._fields]
    torch.ops.sab.recurrence.default(*flat)
    wrong: dict[str, Any] = {
        "seen": 2**62,
        "lengths": torch.tensor([[7, 0], [3, 0], [5, 0]])[:, 0],
        "microstates": randn(3, 1, 5),
        "keys": randn(3, 2, 1),
        "h": randn(1, 5),
        "rounds": True,
    }
    for name, value in wrong.items():
        place = names.index(name)
        with pytest.raises((ValueError, RuntimeError), match=name):
            torch.ops.sab.recurrence.default(*flat[:place], value, *flat[place + 1 :])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own forward mode
@pytest.mark.parametrize("scorer", ["cosine", "mlp", "affine"])
def test_forward_mode_gradients_are_those_of_backward_mode(scorer: str) -> None:
    layer = randomize(make_layer("lstm", 3, 4, k_top=2, k_att=1, k_trunc=3, scorer=scorer)).requires_grad_(False)
    x, tangent = randn(8, 2, 3), randn(8, 2, 3, seed=5)
    weights = randn(8, 2, 4, seed=6)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((layer(leaf)[0] * weights).sum(), leaf)
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))[0])
        assert output.tangent is not None
        assert_close((output.tangent * weights).sum(), (gradient * tangent).sum())
        layer.config = dataclasses.replace(layer.config, backend="cpu")
        with pytest.raises(ValueError, match="'cpu' does not: it has no forward-mode derivatives"):
            layer(x)
    layer.config = dataclasses.replace(layer.config, backend="auto")
    by_func: Any = torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))
    assert_close(by_func[1], output.tangent)


def test_the_operation_by_itself_has_no_forward_mode() -> None:
    flat = Call(scorer="mlp", needs=False).arguments()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        torch.ops.sab.recurrence.default(*flat)


@pytest.mark.parametrize("name", ["h", "c", "microstates", "keys", "numbers", "steps"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_is_changed_before_the_backward_pass(backend: str, name: str) -> None:
    """The compiled backends have copies of it; with the reference, torch sees where a number was needed."""
    layer, x = randomize(make_layer("lstm", 3, 4, k_top=2, k_att=1, backend=backend)), randn(6, 2, 3)
    before = layer(x)[1].detach()

    def found(change: bool) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (before.h, before.c, before.microstates, before.keys)]
        h, c, microstates, keys = (leaf * 1 for leaf in leaves)
        state = sab.SABState(h, c, microstates, keys, before.numbers.clone(), before.steps.clone())
        output, end = layer(x, state)
        if change:
            with torch.no_grad():
                getattr(state, name).fill_(1)
        return gradients([output, end.h, end.microstates], [*leaves, *layer.parameters()])

    expected = found(False)
    if backend == "reference" and name in ("h", "c", "microstates"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found(True)
    else:
        for one, other in zip(found(True), expected, strict=True):
            assert_close(one, other)


class TestTF32:
    """Whether float32 products may be rounded is PyTorch's setting for its own recurrent layers."""

    RNN: Any = torch.backends.cudnn.rnn  # pyright: ignore[reportAttributeAccessIssue]
    MATMUL: Any = torch.backends.cuda.matmul

    @pytest.fixture(autouse=True)
    def _restore(self) -> Iterator[None]:
        before = self.RNN.fp32_precision, self.MATMUL.fp32_precision
        yield
        torch.backends.cudnn.allow_tf32 = True
        self.RNN.fp32_precision, self.MATMUL.fp32_precision = before

    @pytest.mark.parametrize("allowed", [True, False])
    def test_the_newer_and_the_older_setting(self, allowed: bool) -> None:
        self.RNN.fp32_precision = "tf32" if allowed else "ieee"
        assert precision.allow_tf32() == allowed
        torch.backends.cudnn.allow_tf32 = not allowed
        assert precision.allow_tf32() != allowed

    @pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
    @pytest.mark.parametrize("allowed", [True, False])
    def test_products_outside_the_loop_have_it_too_and_it_is_put_back(self, before: str, allowed: bool) -> None:
        self.MATMUL.fp32_precision = before
        with precision.tf32(allowed):
            assert (self.MATMUL.fp32_precision == "tf32") == allowed
        assert self.MATMUL.fp32_precision == before
