"""The Triton kernels for large hidden sizes, in Triton's interpreter, against the compiled CPU loops."""

from __future__ import annotations

import inspect
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from sab.config import SABConfig
from sab.ops.buffers import Buffers, Weights, Work
from sab.ops.cpu import engine as cpu
from sab.ops.cpu import loader
from sab.ops.gradients import Gradients
from sab.ops.plan import Plan
from tests.ops.cases import make_layer, randn, randomize, run, weighted_sum

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

from sab.ops.triton import engine, large, large_backward, large_forward
from sab.parts import pointwise
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS
from sab.parts.scorers import unit

tanh = pointwise.compiled(pointwise.tanh)

pytestmark = [
    pytest.mark.skipif(not large.INTERPRETED, reason="TRITON_INTERPRET=1 must be set before triton is imported"),
    pytest.mark.skipif(loader.unavailable() is not None, reason="there is no CPU engine to compare with"),
    # Sigmoids of large negative numbers: exp overflows to infinity, whose inverse is 0. So does the series for a small
    # tanh where it is not small, and the series is not taken.
    pytest.mark.filterwarnings("ignore:overflow encountered in (exp|multiply):RuntimeWarning"),
]


@triton.jit
def tanh_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tanh(tl.load(x + at), "formula"))  # pyright: ignore[reportArgumentType]


HALVES = "gates hidden_new keys mapped dgates dhidden dincorporated".split()
"""The tensors of the compute type; the gradient of the query is one too, whose rounding is not looked at."""


def buffers_of(plan: Plan, lengths: Tensor | None, scale: float = 1.0) -> tuple[Weights, Buffers, Work]:
    """Random weights, buffers and gradients from outside, as the operation lays them out; NaN where nothing is yet."""
    config, steps, batch, n, d = plan.config, plan.steps, plan.batch, plan.n, plan.key_size
    first, kept, gates = plan.first_slots, plan.slots - plan.first_slots, CELLS[plan.cell].gates * plan.n
    scorer = SCORERS[str(config.scorer)]
    parameters, is_mapped = scorer.shapes(n, d, 2), config.k_top > 0 and INCORPORATIONS[config.incorporate].has_weights
    nan = float("nan")

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float64)

    side = (n,) if plan.is_affine else (d, n)
    has_memory = config.k_top > 0
    weights = Weights(
        new(gates, n) / n**0.5,
        new(gates) if plan.cell == "gru" else None,
        new(*side) / n**0.5 if has_memory else None,
        new(*side) / n**0.5 if has_memory else None,
        new(*parameters["bias"]) if has_memory and "bias" in parameters else None,
        new(d) if has_memory and "v" in parameters else None,
        new(n, 2 * n) / n**0.5 if is_mapped else None,
        new(n) if is_mapped else None,
    )
    alive = torch.ones(steps, batch, 1) if lengths is None else (torch.arange(steps)[:, None] < lengths).unsqueeze(-1)
    store, cells, keys = (
        filled(nan, first + 1 + steps, batch, n),
        filled(nan, steps + 1, batch, n),
        filled(nan, batch, plan.slots, d),
    )
    store[: first + 1], cells[0], keys[:, :first] = new(first + 1, batch, n), new(batch, n), new(batch, first, d)
    if scorer.normalises:
        keys[:, :first] = unit(keys[:, :first])
    buffers: dict[str, Any] = {
        "store": store,
        "c": cells if plan.cell == "lstm" else cells[:0],
        "gates": new(steps, batch, gates) * scale,
        "hidden_new": filled(nan, steps if plan.cell == "gru" else 0, batch, n),
        "h_hat": filled(nan, steps, batch, n),
        "query": filled(nan, steps, batch, 0 if plan.is_affine else d),
        "keys": keys,
        "weights": filled(0, steps, batch, config.k_top),
        "selected": torch.full((steps, batch, config.k_top), -1, dtype=torch.int32),
        "norms": filled(nan, steps, batch),
        "summary": filled(0, steps, batch, n),
        "mapped": filled(nan, steps, batch, n) if config.incorporate == "gate" else None,
        "key_scale": filled(nan, batch, plan.slots) if scorer.normalises else None,
        "query_scale": filled(nan, steps, batch) if scorer.normalises else None,
        "scores": filled(0, steps, batch, config.k_top) if scorer.normalises else None,
        "lengths": lengths,
        "live": torch.full((batch, plan.places), -9, dtype=torch.int32) if config.forgets else None,
        "reads": torch.zeros(batch, plan.places, dtype=torch.int64) if config.counts_reads else None,
    }
    dstore, dkeys = filled(0, *store.shape), filled(0, *keys.shape)
    dstore[first + 1 :], dkeys[:, first:] = new(steps, batch, n) * alive, new(batch, kept, d)
    if lengths is not None:
        dkeys[:, first:] *= (plan.first_kept + torch.arange(kept) * config.k_att < lengths[:, None]).unsqueeze(-1)
    dgates = filled(nan, steps, batch, gates)
    work: dict[str, Any] = {
        "dstore": dstore,
        "dc": filled(0, batch, n),
        "dcells": new(steps, batch, n) * alive if plan.cell == "lstm" else None,
        "dgates": dgates,
        "dhidden": dgates.clone() if plan.cell == "gru" else dgates,
        "dquery": filled(0, steps, batch, d),
        "dkeys": dkeys,
        "dsummary": new(steps, batch, n) * alive,
        "dweights": new(steps, batch, config.k_top) * alive,
        "dincorporated": filled(0, steps, batch, n) if is_mapped else None,
        "dv": filled(0, batch, d) if has_memory and "v" in parameters else None,
    }
    return weights, Buffers(**buffers), Work(**work)


def plan_of(cell: str, n: int, d: int, batch: int, steps: int, first: int, seen: int, config: SABConfig) -> Plan:
    kept = (seen + steps) // config.k_att - seen // config.k_att if config.k_top > 0 else 0
    first = first if config.k_top > 0 else 0
    key_size = 1 if config.scorer in ("affine", "affine_tanh") else d
    return Plan(cell, config, seen, steps, batch, n, key_size, first, first + kept)


def copied(tensors: Any, **types: torch.dtype) -> Any:
    """Copies of buffers or of work, all floating-point ones of the type `others`, but for those named."""
    others = types.get("others", torch.float64)
    own = {
        name: tensor.to(types.get(name, others), copy=True) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in tensors._asdict().items()
        if tensor is not None
    }
    if isinstance(tensors, Work) and tensors.dhidden is tensors.dgates:
        own["dhidden"] = own["dgates"]
    return tensors._replace(**own)


def run_on_cpu(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> Work:
    """Run both loops on the CPU, and return the work with the whole of `dhidden`, of which they leave the last gate."""
    cpu.run_forward(plan, weights, buffers)
    if work.dhidden is work.dgates:
        cpu.backward(plan, weights, buffers, work)
        return work
    last = torch.full((plan.steps, plan.batch, plan.n), torch.nan, dtype=work.dgates.dtype)
    cpu.backward(plan, weights, buffers, work._replace(dhidden=last))
    return work._replace(dhidden=torch.cat([work.dgates[..., : -plan.n], last], -1))


def compare(plan: Plan, lengths: Tensor | None, scale: float = 1.0) -> None:
    weights, buffers, work = buffers_of(plan, lengths, scale)
    own_buffers, own_work = copied(buffers), copied(work)
    work = run_on_cpu(plan, weights, buffers, work)
    large.forward(plan, weights, own_buffers)
    large.backward(plan, weights, own_buffers, own_work)
    unread = {"lengths", "dsummary", "dweights"} | ({"norms"} if plan.config.weighting != "relu_norm" else set())
    for name, tensor in {**buffers._asdict(), **work._asdict()}.items():
        if tensor is None or name in unread:
            continue
        own = {**own_buffers._asdict(), **own_work._asdict()}[name]
        if name == "key_scale":
            tensor, own = tensor[:, plan.first_slots :], own[:, plan.first_slots :]
        if name == "dstore":  # what is read of it; the rest is compared in what is made of it
            tensor, own = tensor[: plan.first_slots + 1], own[: plan.first_slots + 1]
        if name in ("query", "norms", "mapped", "query_scale"):  # a step without a read leaves anything there
            reads = torch.tensor([plan.slots_at(t) > 0 for t in range(plan.steps)])
            reads = reads[:, None] & (
                torch.ones(1, plan.batch, dtype=torch.bool)
                if lengths is None
                else torch.arange(plan.steps)[:, None] < lengths
            )
            tensor, own = tensor[reads], own[reads]
        torch.testing.assert_close(own, tensor, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "cell, scorer, weighting, incorporate, n, d, batch, k_top, k_att, k_trunc, first, seen, ends".split(", "),
    [
        ("lstm", "mlp", "softmax", "add", 33, 17, 3, 2, 1, 2, 0, 0, True),
        ("lstm", "dot", "relu", "add_bounded", 17, 40, 1, 3, 2, None, 3, 7, False),
        ("lstm", "affine_tanh", "softmax_sink", "concat", 20, 1, 2, 5, 1, 3, 2, 4, True),
        ("gru", "affine", "relu_norm", "add", 40, 1, 2, 3, 1, 3, 0, 1, False),
        ("gru", "mlp", "relu_norm", "concat", 7, 5, 3, 3, 2, None, 3, 0, True),
        ("gru", "dot", "softmax_sink", "add", 19, 9, 1, 1, 1, 1, 1, 0, False),
        ("rnn_tanh", "mlp", "relu", "add_bounded", 35, 33, 2, 4, 1, 2, 0, 6, False),
        ("rnn_tanh", "affine", "softmax", "concat", 18, 1, 3, 2, 2, 5, 70, 3, True),
        ("rnn_relu", "dot", "relu_norm", "add", 16, 16, 2, 3, 1, 2, 2, 2, True),
        ("rnn_relu", "affine_tanh", "relu", "add_bounded", 33, 1, 1, 2, 1, None, 1, 0, False),
        ("lstm", "mlp", "softmax", "add", 21, 5, 2, 0, 1, 2, 0, 4, True),
        ("lstm", "mlp", "softmax", "gate", 18, 9, 2, 3, 1, 3, 2, 1, True),
        ("gru", "affine", "relu_norm", "gate", 33, 1, 3, 2, 2, None, 0, 0, True),
        ("lstm", "cosine", "softmax", "gate", 18, 37, 3, 3, 1, 3, 2, 1, True),
        ("gru", "cosine", "relu_norm", "add", 33, 16, 2, 2, 1, None, 0, 0, False),
        ("gru", "cosine", "softmax_sink", "gate", 7, 5, 3, 9, 2, 2, 3, 3, True),
        ("rnn_tanh", "cosine", "softmax", "add", 20, 33, 1, 8, 1, 2, 0, 2, False),
        ("rnn_tanh", "cosine", "relu", "concat", 17, 40, 18, 2, 1, 2, 20, 5, True),
        ("lstm", "cosine", "softmax", "add_bounded", 16, 9, 2, 3, 3, None, 0, 0, True),
        ("lstm", "cosine", "softmax", "add", 16, 70, 2, 40, 1, None, 3, 123457, False),
        ("rnn_relu", "cosine", "relu", "add", 17, 3, 2, 2, 1, 3, 1, 1, True),
    ],
)  # fmt: skip
def test_all_that_the_loops_fill(
    cell: str, scorer: str, weighting: str, incorporate: str, n: int, d: int, batch: int, k_top: int, k_att: int,
    k_trunc: int | None, first: int, seen: int, ends: bool,
) -> None:  # fmt: skip
    config = SABConfig(k_top, k_att, k_trunc, scorer, weighting, incorporate=incorporate)
    lengths = torch.randint(1, 5, (batch,)) if ends else None
    compare(plan_of(cell, n, d, batch, 4, first, seen, config), lengths)


class Turns:
    """Runs the programs of a kernel one after another from meeting to meeting, each time in another order.

    What a program reads before a meeting and another one writes is then different from order to order.
    """

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self._turns = [threading.Semaphore(0) for _ in range(programs)]
        self._back = threading.Semaphore(0)
        self._own = threading.local()
        self._ended: list[int] = []
        self._errors: list[BaseException] = []

    def meet(self, counter: Any, goal: Any, programs: Any) -> Any:
        """In the place of the kernels' own."""
        self._back.release()
        self._turns[self._own.program].acquire()
        return goal + programs

    def launch(self, executor: Any, *arguments: Any, **options: Any) -> None:
        """In the place of the interpreter's, which would run each program to its end."""
        function, builder = executor.fn, interpreter.interpreter_builder
        names = inspect.signature(function).parameters
        given = inspect.signature(function).bind(*arguments, **{k: v for k, v in options.items() if k in names})
        values = {
            name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
            for name, value in given.arguments.items()
        }

        def run(program: int) -> None:
            self._own.program = program
            self._turns[program].acquire()
            try:
                builder.set_grid_idx(program, 0, 0)
                function(**values)
            except BaseException as error:
                self._errors.append(error)
            self._ended.append(program)
            self._back.release()

        builder.set_grid_dim(self.programs, 1, 1)
        self._ended.clear()
        scope = interpreter._patch_lang(function)
        try:
            for program in range(self.programs):
                threading.Thread(target=run, args=(program,), daemon=True).start()
            order = list(range(self.programs))
            while not self._ended:
                random.shuffle(order)
                for program in order:
                    self._turns[program].release()
                    self._back.acquire()
                assert not self._errors, self._errors
            assert len(self._ended) == self.programs, "some programs met more often than others"
        finally:
            scope.restore()


@pytest.mark.parametrize(
    ("cell", "scorer", "incorporate", "half", "forget"),
    [("lstm", "cosine", "gate", False, None), ("gru", "mlp", "concat", True, "most_read")],
)
def test_programs_may_run_in_any_order_between_meetings(
    cell: str, scorer: str, incorporate: str, half: bool, forget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(0)
    bound: dict[str, Any] = {} if forget is None else {"max_memory": 3, "forget": forget}
    config = SABConfig(2 if bound else 3, 1, 2, scorer, incorporate=incorporate, **bound)
    plan = plan_of(cell, 35, 37, 2, 4, 2, 0, config)
    weights, buffers, work = buffers_of(plan, torch.tensor([4, 3]))
    types: dict[str, Any] = {}
    if half:
        types = dict.fromkeys(HALVES, torch.float16)
        types["others"] = torch.float32
        weights = Weights(*(None if weight is None else weight.half() for weight in weights))  # pyright: ignore

    def run(overlaps: bool = False) -> dict[str, Any]:
        own_buffers, own_work = copied(buffers, **types), copied(work, **types)
        if overlaps:  # a step's gradient of the map lies where the next step's map was
            map_and_gradient = torch.cat([own_buffers.mapped, torch.full_like(own_buffers.mapped[:1], torch.nan)])
            own_buffers = own_buffers._replace(mapped=map_and_gradient[:-1])
            own_work = own_work._replace(dincorporated=map_and_gradient[1:])
        large.forward(plan, weights, own_buffers)
        large.backward(plan, weights, own_buffers, own_work)
        found = {**own_buffers._asdict(), **own_work._asdict()}
        if own_work.dincorporated is not None:  # only the steps that read are filled
            found["dincorporated"] = own_work.dincorporated[plan.first_read :]
        return {name: tensor for name, tensor in found.items() if name != "mapped"}

    expected = run()
    turns, launch = Turns(3), interpreter.GridExecutor.__call__
    monkeypatch.setattr(large_forward, "meet", turns.meet)
    monkeypatch.setattr(large_backward, "meet", turns.meet)
    monkeypatch.setattr(
        interpreter.GridExecutor,
        "__call__",
        lambda executor, *arguments, **options: (turns.launch if "counter" in executor.arg_names else launch)(
            executor, *arguments, **options
        ),
    )
    for name, tensor in run(overlaps=buffers.mapped is not None).items():
        if tensor is not None:
            torch.testing.assert_close(
                tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(("scorer", "incorporate"), [("cosine", "gate"), ("mlp", "concat")])
def test_many_first_microstates_have_no_values(scorer: str, incorporate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_values", None)
    config = SABConfig(3, 1, 2, scorer, incorporate=incorporate)
    compare(plan_of("lstm", 17, 9, 2, 2, 2 * large.MOST_FIRST + 1, 0, config), torch.tensor([2, 1]))


@pytest.mark.parametrize("scorer", ["dot", "cosine"])
def test_more_slots_than_are_merged_at_once(scorer: str) -> None:
    compare(plan_of("lstm", 16, 4, 2, 2, 150, 0, SABConfig(9, 1, 2, scorer)), None)


@pytest.mark.parametrize("scorer", ["mlp", "cosine"])
def test_one_step(scorer: str) -> None:
    compare(plan_of("gru", 17, 4, 1, 1, 0, 0, SABConfig(2, 1, 2, scorer)), None)


@pytest.mark.parametrize(("cell", "incorporate"), [("lstm", "gate"), ("gru", "add"), ("rnn_tanh", "gate")])
def test_keys_of_length_one_in_pieces(cell: str, incorporate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece's first keys come as they are, and their gradients go back to the piece before as they are."""
    monkeypatch.setattr(engine, "LARGEST_SMALL", 0)
    options = {"k_top": 3, "k_att": 2, "k_trunc": 3, "scorer": "cosine", "incorporate": incorporate}
    ours, theirs = (
        randomize(make_layer(cell, 2, 7, attention_size=18, backend=name, **options), scale=0.4)
        for name in ("triton", "reference")
    )
    x = randn(7, 2, 2).requires_grad_()

    def gradients(layer: Any, pieces: list[slice]) -> list[Tensor]:
        outputs: list[Tensor] = []
        state = None
        for piece in pieces:
            output, state = run(layer, x[piece], state)
            outputs.append(output)
        assert state is not None
        total = weighted_sum([torch.cat(outputs), state.keys])
        return [total, *torch.autograd.grad(total, [x, *layer.parameters()])]

    whole = gradients(theirs, [slice(0, 7)])
    for own, gradient in zip(gradients(ours, [slice(0, 3), slice(3, 4), slice(4, 7)]), whole, strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-9)


def test_large_inputs_saturate_without_nan() -> None:
    compare(plan_of("lstm", 16, 4, 1, 3, 0, 0, SABConfig(2, 1, 2, "mlp")), None, scale=1e4)


@pytest.mark.parametrize(
    ("cell", "scorer", "incorporate"),
    [("lstm", "mlp", "concat"), ("gru", "dot", "add"), ("lstm", "cosine", "gate"), ("gru", "cosine", "add")],
)
def test_half_precision_factors(cell: str, scorer: str, incorporate: str) -> None:
    """States in float32 and factors in half precision, which the interpreter has only as float16."""
    plan = plan_of(cell, 21, 10, 2, 4, 1, 0, SABConfig(9, 2, 3, scorer, incorporate=incorporate))
    weights, buffers, work = buffers_of(plan, None)
    halves = dict.fromkeys(HALVES, torch.float16)
    own_buffers, own_work = (copied(tensors, others=torch.float32, **halves) for tensors in (buffers, work))
    work = run_on_cpu(plan, weights, buffers, work)
    halved: list[Any] = [None if weight is None else weight.half() for weight in weights]
    large.forward(plan, Weights(*halved), own_buffers)
    large.backward(plan, Weights(*halved), own_buffers, own_work)
    for name in ("store", "keys", "dkeys", "dgates", "dquery"):
        whole = {**buffers._asdict(), **work._asdict()}[name]
        own = {**own_buffers._asdict(), **own_work._asdict()}[name].double()
        assert (own - whole).norm() < 5e-3 * whole.norm(), name


def nearest_tf32(values: Tensor) -> Tensor:
    return ((values.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@pytest.mark.parametrize("batch", [1, 2])
def test_tf32_rounds_factors_to_nearest_but_for_a_single_row(batch: int) -> None:
    """Tensor cores would cut them off, and PyTorch multiplies a single row in full."""
    plan = plan_of("rnn_relu", 40, 1, batch, 1, 0, 0, SABConfig(0, 1, None))
    weights, buffers, _ = buffers_of(plan, None)
    weights = Weights(weights.w_hh.float(), *weights[1:])
    own = copied(buffers, others=torch.float32)
    left, right = own.store[0].clone(), weights.w_hh
    gates = own.gates[0].double()
    if batch > 1:
        left, right = nearest_tf32(left), nearest_tf32(right)
    large.forward(plan, weights, own, tf32=True)
    expected = (gates + left.double() @ right.double().t()).clamp(min=0)
    torch.testing.assert_close(own.store[1].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "scorer", "incorporate"),
    [
        ("lstm", "mlp", "concat"),
        ("gru", "dot", "add"),
        ("rnn_tanh", "affine_tanh", "add_bounded"),
        ("gru", "cosine", "gate"),
    ],
)
def test_tf32_factors(cell: str, scorer: str, incorporate: str) -> None:
    """All that the loops leave has TF32's error where it is allowed, and float32's where it is not."""
    plan = plan_of(cell, 33, 20, 3, 4, 1, 0, SABConfig(9, 2, 3, scorer, "softmax_sink", incorporate=incorporate))
    weights, buffers, work = buffers_of(plan, torch.tensor([4, 3, 4]))

    def run(tf32: bool) -> dict[str, Any]:
        single: list[Any] = [None if weight is None else weight.float() for weight in weights]
        own_buffers, own_work = (copied(tensors, others=torch.float32) for tensors in (buffers, work))
        large.forward(plan, Weights(*single), own_buffers, tf32=tf32)
        large.backward(plan, Weights(*single), own_buffers, own_work, tf32=tf32)
        return {**own_buffers._asdict(), **own_work._asdict()}

    full, rounded = run(tf32=False), run(tf32=True)
    work = run_on_cpu(plan, weights, buffers, work)
    for name in ("store", "keys", "dkeys", "dgates", "dquery"):
        whole = {**buffers._asdict(), **work._asdict()}[name]
        assert (full[name].double() - whole).norm() < 1e-5 * whole.norm(), name
        assert 1e-5 < (rounded[name].double() - whole).norm() / whole.norm() < 2e-3, name


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 0.2, 0.3, 1.0, 10.0, 1e5])
def test_the_formula_for_tanh(scale: float) -> None:
    x = scale * torch.randn(256, dtype=torch.float64).float()
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, BLOCK=256)  # pyright: ignore[reportIndexIssue, reportArgumentType]
    torch.testing.assert_close(y.double(), torch.tanh(x.double()), rtol=6e-7, atol=0)


@pytest.mark.parametrize(
    ("cell", "scorer", "k_top"),
    [("lstm", "mlp", 2), ("gru", "affine", 2), ("lstm", "affine", 40), ("gru", "cosine", 2)],
)
def test_the_gates_are_written_over_only_when_nobody_reads_them_again(
    cell: str, scorer: str, k_top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LARGEST_SMALL", 0)
    overwritten = []

    def noted(plan: Plan, weights: Weights, buffers: Buffers, work: Work) -> None:
        overwritten.append(work.dgates.data_ptr() == buffers.gates.data_ptr())
        backward(plan, weights, buffers, work)

    backward = large.backward
    monkeypatch.setattr(large, "backward", noted)
    ours, theirs = (
        randomize(make_layer(cell, 2, 17, k_top=k_top, k_att=1, scorer=scorer, backend=name), scale=0.4)
        for name in ("triton", "reference")
    )
    x = randn(3, 2, 2).requires_grad_()
    expected = torch.autograd.grad(weighted_sum([theirs(x)[0]]), [x, *theirs.parameters()])
    total = weighted_sum([ours(x)[0]])
    for keeps in (True, True, False):
        found = torch.autograd.grad(total, [x, *ours.parameters()], retain_graph=keeps)
        for own, gradient in zip(found, expected, strict=True):
            torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-9)
    assert overwritten == [False, False, True]


def test_a_backward_that_failed_is_not_tried_again_on_what_it_has_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LARGEST_SMALL", 0)
    layer = randomize(make_layer("lstm", 2, 5, k_top=2, k_att=1, backend="triton"))
    total = layer(randn(3, 2, 2))[0].sum()  # which saves nothing that autograd would miss first

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Gradients, "of", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            total.backward()
    with pytest.raises(RuntimeError, match="run forward again"):
        total.backward()


def test_what_saved_tensor_hooks_keep_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LARGEST_SMALL", 0)
    layer = randomize(make_layer("lstm", 2, 5, k_top=2, k_att=1, backend="triton"))
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tensor, tensor.clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(randn(3, 2, 2))[0]
    output.sum().backward()
    assert kept
    for tensor, before in kept:  # bit by bit: memory that nothing wrote may hold NaN, which equals nothing
        assert torch.equal(*(one.flatten().view(torch.uint8) for one in (tensor, before)))
