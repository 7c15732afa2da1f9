"""The operation `sab::recurrence`: one layer in one direction over a sequence, as one node of PyTorch's graphs.

Before the loop over time comes the input's part of the gates, after it the weights' gradients, each one matrix product.
An engine runs the two loops. For small sizes the time of a call is that of its small operations on tensors, so there
are as few as possible: engines fill buffers only where they must, and the state is made on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab import torch_private
from sab.config import DEFAULT_SCORER, SABConfig
from sab.ops import batching, precision
from sab.ops.arguments import (
    BACKWARD,
    FORWARD,
    INPUTS,
    Given,
    Initial,
    Options,
    Parameters,
    Results,
    pack_results,
    result_names,
    schema,
    split,
    unpack_buffers,
)
from sab.ops.buffers import Buffers, Edges, Outside, Room, allocate, allocate_work
from sab.ops.checks import as_they_lie, check_inputs, check_saved
from sab.ops.engines import engine_named
from sab.ops.gradients import SampleGradients
from sab.ops.plan import Plan, make_plan
from sab.ops.precision import contiguous
from sab.ops.results import Pass
from sab.ops.types import LayerResult, LayerState, LayerWeights
from sab.parts.scorers import ScorerWeights

_PLAIN = frozenset((torch.nn.Parameter, type(None), Tensor))
"""The types of arguments that are nothing but tensors."""
_FRESH = Initial()
NO_SECOND_DERIVATIVE = "only the layer's backend='reference' has second derivatives; this gradient was another's."

_library = torch.library.Library("sab", "DEF")
_library.define(f"recurrence({schema(FORWARD)}) -> Tensor[]")
_library.define(f"recurrence_backward({schema(BACKWARD)}) -> Tensor[]")


class Call(NamedTuple):
    """A call of a layer as the operation takes it."""

    given: Given
    initial: Initial
    parameters: Parameters
    options: Options
    is_plain: bool
    """Whether nothing but autograd would see the operation."""
    saves: bool
    """Whether a backward may follow."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.given, *self.initial, *self.parameters)


def call_of(
    engine: str,
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> Call:
    """The arguments of `run` as those of the operation."""
    seen = 0 if state is None else state.seen
    assert seen is not None
    device_lengths = None if lengths is None else lengths.to(x.device, non_blocking=True)
    given = Given(x, device_lengths)
    initial = _FRESH if state is None else Initial(*state[:4], state.reads if config.counts_reads else None)
    scorer = weights.scorer if config.k_top > 0 else ScorerWeights()
    parameters = Parameters(*weights[:4], *scorer, *weights[5:])
    compute = precision.compute_type(x, weights)
    options = Options(
        engine,
        cell_name,
        config.scorer if isinstance(config.scorer, str) else DEFAULT_SCORER,  # a callable: there is no memory
        config.weighting,
        config.forward,
        config.incorporate,
        config.k_top,
        config.k_att,
        config.k_trunc or 0,
        config.layer_norm,
        (config.max_memory or 0) if config.forgets else 0,
        config.forget,
        config.block_size if config.is_hierarchical else 0,
        config.blocks if config.is_hierarchical else 0,
        seen,
        compute,
        compute == torch.float32 and precision.may_round(x),
    )
    tensors = (*given, *initial, *parameters)
    is_plain = _is_plain(tensors)
    # A trace serves both modes: torch.jit.trace makes it in one and checks it in the other.
    has_grad = torch.is_grad_enabled() or (not is_plain and torch_private.is_jit_tracing())
    saves = has_grad and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return Call(given, initial, parameters, options, is_plain, saves)


def run(
    engine: str,
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """`reference.run` with the loops of an engine; all rows must have seen the same number of steps."""
    call = call_of(engine, x, lengths, state, weights, cell_name, config)
    given, initial, parameters, options, is_plain, saves = call
    tensors = call.tensors
    if torch_private.are_transforms_active():
        outputs = _Transformed.apply(options, *tensors)
    elif not is_plain:
        outputs = torch.ops.sab.recurrence.default(*tensors, *options, saves)
    elif saves:
        outputs = _record(None, options, *tensors)
    else:
        with torch_private.below_autograd():
            outputs = _forward(given, initial, parameters, options, saves)
    hidden, store, c, keys, *attended, live, reads = Results.of(outputs, cell_name, config)
    after = pass_of(call, state, config)
    return LayerResult(
        hidden,
        partial(after.ends, store, c),
        partial(after.memory, store, keys, live, reads),
        partial(after.attention, store, *attended),
    )


def pass_of(call: Call, state: LayerState | None, config: SABConfig) -> Pass:
    """What the state after a call is made by."""
    steps, batch, _ = call.given.x.shape
    first_numbers = state.numbers.clone() if state is not None and state.numbers.shape[1] > 0 else None
    dtype = call.parameters.w_hh.dtype
    return Pass(steps, batch, config, first_numbers, call.options.seen, call.given.lengths, dtype)


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd would see a call of the operation.

    Then its implementation is called directly: with so many arguments a way through PyTorch's dispatcher takes longer
    than many an operation itself.
    """
    if torch_private.is_observed():
        return False
    return _PLAIN.issuperset(map(type, tensors)) and tensors[0].device.type in precision.DEVICES


def _forward(
    given: Given,
    initial: Initial,
    parameters: Parameters,
    options: Options,
    saves: bool,
    room: Room | None = None,
) -> list[Tensor]:
    """The results. room: where the microstates and keys before the first step lie, in the place of the initial ones."""
    check_inputs(given, initial, parameters, options)
    given, parameters = as_they_lie(given), as_they_lie(parameters)
    x = given.x
    plan, weights = _plan(given, initial, parameters, options), parameters.of_loops()
    if room is not None:
        plan = plan._replace(first_slots=len(room.store) - 1 - plan.steps, slots=room.keys.shape[1])
    loops, first_slots = engine_named(options.engine), plan.first_slots
    with precision.products(x, options.compute):
        gates, packed, inputs = loops.prepare(plan, given, parameters, options, saves)
        buffers = allocate(plan, gates, packed, given.lengths, room)
        if first_slots > 0 and room is None:
            assert initial.microstates is not None
            assert initial.keys is not None
            assert buffers.keys is not None
            buffers.store[:first_slots] = initial.microstates.transpose(0, 1)
            buffers.keys[:, :first_slots] = initial.keys
        if buffers.reads is not None:
            buffers.reads.zero_()
            if initial.reads is not None:
                buffers.reads[:, :first_slots] = initial.reads
        hidden = gates.new_empty((plan.steps, plan.batch, plan.n), dtype=parameters.w_hh.dtype)
        loops.forward(plan, weights, buffers, Edges(initial.h, initial.c, hidden), inputs)
    return pack_results(hidden, buffers, options, saves)


def _plan(given: Given, initial: Initial, parameters: Parameters, options: Options) -> Plan:
    config, seen = options.config(), options.seen
    plan = make_plan(given.x, initial.microstates, parameters.w_hh, parameters.w_memory, options.cell, config, seen)
    return plan._replace(rounds=_rounds(options))


def _plan_of(buffers: Buffers, options: Options) -> Plan:
    """The plan of the pass that left these buffers."""
    (steps, batch, n), keys = buffers.h_hat.shape, buffers.keys
    slots, key_size = (0, 0) if keys is None else keys.shape[1:]
    first_slots = buffers.store.shape[0] - 1 - steps
    sizes = steps, batch, n, key_size, first_slots, slots
    return Plan(options.cell, options.config(), options.seen, *sizes, _rounds(options))


def _rounds(options: Options) -> bool:
    return options.rounds and engine_named(options.engine).can_round()


def _backward(
    outside: Outside,
    given: Given,
    parameters: Parameters,
    saved: Sequence[Tensor],
    options: Options,
    needs: Sequence[bool],
    *,
    is_last: bool = False,
    samples: int = 0,
    owns_outside: bool = False,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The gradients of the inputs that need one. is_last: what was saved is not read again.

    samples: how many of them the rows belong to, where each has gradients of the parameters of its own; otherwise 0.
    owns_outside: whether those of `store` and `keys` from outside, the hidden states' added, may be changed.
    dtype: the gradients' type, apart from that of x; None for the layer's.
    """
    given, parameters, outside = as_they_lie(given), as_they_lie(parameters), as_they_lie(outside)
    buffers = unpack_buffers(saved, given.lengths, options)
    plan, weights, loops = _plan_of(buffers, options), parameters.of_loops(), engine_named(options.engine)
    names = [name for name, needed in zip(INPUTS, needs, strict=True) if needed]
    wants_initial = "h" in names or "microstates" in names
    work = allocate_work(
        plan,
        weights,
        buffers,
        outside,
        overwrites=loops.overwrites(plan) if is_last else (),
        wants_initial=wants_initial,
        sums_biases=loops.SUMS_BIASES and ("b_ih" in names or "b_hh" in names),
        last_gate_alone=loops.LAST_GATE_ALONE,
        owns_outside=owns_outside,
        begins_with_output=loops.begins_with_output(buffers),
    )
    with precision.products(given.x, options.compute):
        loops.backward(plan, weights, buffers, work)
        if not wants_initial:
            work = work._replace(dstore=None)  # frees memory for the products to come
        if samples > 0:
            return SampleGradients(plan, given, parameters, buffers, work, samples).of(names)
        return loops.gradients(plan, given, parameters, buffers, work, names, dtype).of(names)


class _Recurrence(torch.autograd.Function):
    """The operation as a node of autograd's graph; without a keyset the call bypasses the dispatcher.

    By hand, since `torch.library.register_autograd` takes longer for every call than many an operation itself.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: Options, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        given, initial, parameters = split(tensors, (Given, Initial, Parameters))
        if keyset is None:
            with torch_private.below_autograd():
                outputs = _forward(given, initial, parameters, options, True)
        else:
            op = torch.ops.sab.recurrence.default
            outputs = torch_private.redispatch(op, keyset, *tensors, *options, True)
        # Whether others may see what is saved: who calls the operation itself has all its results.
        ctx.is_shared = keyset is not None or torch_private.has_saved_tensor_hooks()
        ctx.is_used_up = False
        _remember(ctx, options, given, parameters, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        outside, given, parameters, saved = _remembered(
            ctx, gradients
        )  # torch's error where a backward has run through
        if ctx.is_used_up:
            raise RuntimeError("an earlier backward stopped half-way and used up what was saved: run forward again.")
        needs = ctx.needs_input_grad[2:]
        if torch_private.are_transforms_active() or torch_private.are_batched(gradients):
            found = _transformed_backward(ctx.options, needs, outside, (*given, *parameters, *saved))
        elif torch.is_grad_enabled() or not _is_plain((*given, *parameters, *saved, *gradients)):
            op = torch.ops.sab.recurrence_backward.default
            found = op(*outside, *given, *parameters, saved, *ctx.options, needs)
        else:
            # What a CUDA graph records may be replayed any number of times.
            is_captured = given.x.is_cuda and torch.cuda.is_current_stream_capturing()
            ctx.is_used_up = not (torch_private.keeps_graph() or ctx.is_shared or is_captured)
            with torch_private.below_autograd():
                found = _backward(outside, given, parameters, saved, ctx.options, needs, is_last=ctx.is_used_up)
        return (None, None, *_spread(found, needs))


_record = torch_private.bare_apply(_Recurrence)


class _RecurrenceBackward(torch.autograd.Function):
    """The operation's backward as a node of the graph that `create_graph=True` makes."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(torch_private.redispatch(torch.ops.sab.recurrence_backward.default, keyset, *arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(NO_SECOND_DERIVATIVE)


class _Transformed(torch.autograd.Function):
    """The operation inside of `torch.func`'s transforms: grad, vmap and what is made of them.

    Outside of them `_Recurrence` is faster to call.
    """

    @staticmethod
    def forward(options: Options, *tensors: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch_private.below_autograd():
            given, initial, parameters = split(_all_contiguous(tensors), (Given, Initial, Parameters))
            return tuple(_forward(given, initial, parameters, options, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        options, *tensors = inputs
        given, _, parameters = split(tensors, (Given, Initial, Parameters))
        _remember(ctx, options, given, parameters, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        outside, given, parameters, saved = _remembered(ctx, gradients)
        needs = ctx.needs_input_grad[1:]
        found = _transformed_backward(ctx.options, needs, outside, (*given, *parameters, *saved))
        return (None, *_spread(found, needs))

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, *tensors: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return batching.forward(_Transformed.apply, info.batch_size, in_dims[1:], options, tensors)


class _TransformedBackward(torch.autograd.Function):
    """Its backward, of `_Recurrence` as well where gradients come in under `torch.vmap`."""

    @staticmethod
    def forward(options: Options, needs: tuple[bool, ...], samples: int, *tensors: Any) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch_private.below_autograd():
            flat = _all_contiguous(tensors)
            outside, given, parameters = split(flat, (Outside, Given, Parameters))
            saved = flat[len(outside) + len(given) + len(parameters) :]
            return tuple(_backward(outside, given, parameters, saved, options, needs, samples=samples))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, needs: tuple[bool, ...], samples: int, *tensors: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = _TransformedBackward.apply
        return batching.backward(run, info.batch_size, in_dims[3:], options, needs, samples, tensors)


def _all_contiguous(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, contiguous as the loops read them: what was mapped over may lie in any order, or be repeated."""
    return [None if tensor is None else contiguous(tensor) for tensor in tensors]


def _transformed_backward(
    options: Options, needs: Sequence[bool], outside: Outside, others: tuple[Tensor | None, ...]
) -> Sequence[Tensor]:
    apply = _TransformedBackward.apply
    if not torch_private.are_batched(outside):
        return apply(options, needs, 0, *outside, *others)  # pyright: ignore[reportReturnType]

    def rule(count: int, dims: list[int | None], gradients: list[Tensor | None]) -> Any:
        dims += [None] * len(others)
        return batching.backward(apply, count, dims, options, needs, 0, (*gradients, *others))

    return torch_private.map_batched(rule, outside)


def _remember(ctx: Any, options: Options, given: Given, parameters: Parameters, outputs: Sequence[Tensor]) -> None:
    """Save what the backward reads."""
    ctx.options = options
    ctx.save_for_backward(*given, *parameters, *outputs[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        *[output for name, output in zip(result_names(options), outputs, strict=False) if name not in Outside._fields]
    )


def _remembered(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Outside, Given, Parameters, Sequence[Tensor]]:
    """The gradients of the results, by name, and what was saved."""
    of_results = dict(zip(result_names(ctx.options), gradients, strict=False))
    tensors = ctx.saved_tensors
    given, parameters = split(tensors, (Given, Parameters))
    return Outside(*map(of_results.get, Outside._fields)), given, parameters, tensors[len(given) + len(parameters) :]


def _spread(found: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """A gradient or None for each input."""
    rest = iter(found)
    return [next(rest) if needed else None for needed in needs]


def _on_device(*arguments: Any) -> list[Tensor]:
    given, initial, parameters, options, purpose = split(arguments, FORWARD)
    return _forward(given, initial, parameters, options, purpose.saves)


def _on_device_backward(*arguments: Any) -> list[Tensor]:
    outside, given, parameters, saved, options, needs = split(arguments, BACKWARD)
    check_inputs(given, _FRESH, parameters, options)
    buffers = unpack_buffers(saved.buffers, given.lengths, options)
    check_saved(saved.buffers, _plan_of(buffers, options), options)
    return _backward(outside, given, parameters, saved.buffers, options, needs.needs)


def _autograd(keyset: Any, *arguments: Any) -> Any:
    *_, options, purpose = split(arguments, FORWARD)
    if torch_private.computes_tangents():
        raise RuntimeError("only the layer's backend='reference' has forward-mode gradients; this call was another's.")
    if purpose.saves and torch.is_grad_enabled():
        return list(_Recurrence.apply(keyset, options, *arguments[: len(INPUTS)]))
    return torch_private.redispatch(torch.ops.sab.recurrence.default, keyset, *arguments)


def _autograd_backward(keyset: Any, *arguments: Any) -> Any:
    if torch.is_grad_enabled() and torch_private.any_requires_grad(*arguments):
        return list(_RecurrenceBackward.apply(keyset, *arguments))
    return torch_private.redispatch(torch.ops.sab.recurrence_backward.default, keyset, *arguments)


def _fake(*arguments: Any) -> list[Tensor]:
    given, initial, parameters, options, purpose = split(arguments, FORWARD)
    x, compute, plan = given.x, options.compute, _plan(given, initial, parameters, options)
    gates = x.new_empty(*x.shape[:2], parameters.w_ih.shape[0], dtype=compute)
    packed = engine_named(options.engine).pack(plan, parameters.of_loops(), compute)
    hidden = x.new_empty(plan.steps, plan.batch, plan.n, dtype=parameters.w_hh.dtype)
    return pack_results(hidden, allocate(plan, gates, packed, given.lengths), options, purpose.saves)


def _fake_backward(*arguments: Any) -> list[Tensor]:
    _, given, parameters, saved, options, needs = split(arguments, BACKWARD)
    plan = _plan_of(unpack_buffers(saved.buffers, given.lengths, options), options)
    batch, n, first_slots, new = plan.batch, plan.n, plan.first_slots, parameters.w_ih.new_empty
    initial = Initial(
        h=new(batch, n),
        c=new(batch, n),
        microstates=new(batch, first_slots, n),
        keys=new(batch, first_slots, plan.key_size),
    )
    inputs: Any = (*given, *initial, *parameters)
    return [tensor.new_empty(tensor.shape) for tensor, needed in zip(inputs, needs.needs, strict=True) if needed]


for _device in precision.DEVICES:
    _library.impl("recurrence", _on_device, _device.upper())
    _library.impl("recurrence_backward", _on_device_backward, _device.upper())
_library.impl("recurrence", _autograd, "Autograd", with_keyset=True)
_library.impl("recurrence_backward", _autograd_backward, "Autograd", with_keyset=True)
torch.library.register_fake("sab::recurrence", _fake, lib=_library)
torch.library.register_fake("sab::recurrence_backward", _fake_backward, lib=_library)
