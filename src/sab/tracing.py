"""Which past moments a decision was credited to: what each step read, and what gradient reached each hidden state.

A module runs as usual. Then `sab.ops.backtrack` takes the gradient of a target back through its layer step by step, so
that what came along the chain and what came over each skip are separate; their sum is autograd's gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sab.cells import SABCell
from sab.errors import UserTypeError, UserValueError, check_int
from sab.layers import SABLayer
from sab.ops import schedule
from sab.ops.backtrack import Arriving, Backtracked, Layer, Replay, Skip, backtrack, replay
from sab.state import Attention, SABHidden, SABState


@dataclass(frozen=True, eq=False, repr=False)
class Path:
    """One way of the gradient: along the chain to the first skip, over it, along the chain to the next, and so on, up
    to the microstate that the last skip leads to."""

    skips: tuple[Skip, ...]
    """The skips, that of the latest step first."""
    gradient: Tensor
    """What reaches that microstate over these very skips, [n]."""
    norm: float
    """Its norm."""
    share: float
    """The norm as a part of the sum of the norms of all paths and of the rest of each step."""

    def __repr__(self) -> str:
        hops = ", ".join(f"{skip.step} read {skip.kept_at}" for skip in self.skips)
        return f"Path({hops}; norm {self.norm:.3g}, share {self.share:.1%})"


class Credit(NamedTuple):
    """Norms of the gradients that arrive at the hidden state of each step, [T]; norms of parts do not add up."""

    total: Tensor
    direct: Tensor
    chain: Tensor
    skip: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """What each step of one sequence read, and how a target's gradient came back to its hidden states.

    Row t - 1 of every tensor is about step t, steps being counted from 1. All tensors are on the CPU.
    """

    value: float
    """The target's value."""
    target_step: int | None
    """The step whose output is the target; None where the target is something else."""
    k_att: int
    """Microstate i is the hidden state of step (i + 1) * k_att."""
    k_trunc: int | None
    """The chain is cut before each step t > 1 with (t - 1) % k_trunc == 0; None: nowhere."""
    numbers: Tensor
    """Numbers of the microstates that each step selected, highest score first, [T, k]; -1 where fewer were."""
    weights: Tensor
    """Their weights, [T, k]; 0 where fewer were selected."""
    direct: Tensor
    """The gradient that comes to each hidden state from where the target reads it, [T, n]; in a stack, also from the
    layer above."""
    chain: Tensor
    """The gradient that comes from the next step's cell, [T, n]; 0 where the chain is cut."""
    skip: Tensor
    """The gradient that comes from the later steps that read it as a microstate, [T, n]."""
    paths: tuple[Path, ...]
    """The paths with the largest norms, largest first."""
    rest: Tensor
    """What all other paths bring, [T, n]: `skip` is this and the gradients of the paths that end at the step."""

    def __repr__(self) -> str:
        target = "" if self.target_step is None else f" at step {self.target_step}"
        shown = "".join(f"\n  {path}" for path in self.paths[:3])
        return f"Trace of {len(self.numbers)} steps, target {self.value:.4g}{target}, {len(self.paths)} paths:{shown}"

    @property
    def total(self) -> Tensor:
        """The whole gradient of the target at each hidden state, [T, n]."""
        return self.direct + self.chain + self.skip

    @property
    def credit(self) -> Credit:
        """How much gradient arrived at each step, and how much of it in which way."""
        parts = (self.total, self.direct, self.chain, self.skip)
        return Credit(*(torch.linalg.vector_norm(part, dim=-1) for part in parts))

    @property
    def kept_at(self) -> Tensor:
        """The steps whose hidden states each step selected, as `numbers`, [T, k]; 0 where fewer were."""
        return schedule.kept_at(self.numbers, self.k_att)


def trace(
    module: nn.Module,
    x: Any,
    target_step: int | None = None,
    target_unit: int | None = None,
    *,
    target: Callable[[Any], Tensor] | None = None,
    row: int = 0,
    layer: int = -1,
    max_hops: int | None = None,
    max_paths: int = 64,
) -> Trace:
    """Trace what each step of a sequence read, and to which past moments an output is credited.

    `module` is one of the SAB layers, or a model that has one and calls it once, on a fresh sequence. It is run on `x`
    as when it is evaluated, without dropout; nothing of it changes, its parameters' gradients included.

    The target is an entry of the output at `target_step`, counted from 1, None being the last: entry `target_unit`, or
    the largest one where that is None, which is what a classifier decides for. A model with one output for a sequence
    has no `target_step`. Instead, `target` maps the outputs (the first entry of a tuple) to any scalar, such as a loss.

    `row` is the row of the batch, `layer` the layer of a stack. Paths of more than `max_hops` skips, and the smallest
    ones where a step has more than `max_paths`, are not separate: they are followed together, as the rest.
    """
    traced = find_layer(module)
    layers = traced.num_layers
    layer = check_int("layer", layer, -layers, maximum=layers - 1) % layers
    max_hops = check_int("max_hops", max_hops, 1, optional=True)
    max_paths = check_int("max_paths", max_paths, 1)
    device = traced.weight_hh_l0.device.type
    with _evaluating(module), torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        call, outputs = _record(module, traced, x.clone() if isinstance(x, Tensor) and x.is_inference() else x)
        call.check_row(row)
        if target is None:
            value, target_step = _entry(outputs, call, row, target_step, target_unit)
        else:
            value = _target_value(target, outputs, target_step, target_unit)
        arriving = call.gradients(value, row)
        replays = _replays(call, row)
        for index in reversed(range(layer + 1, layers)):
            above = backtrack(replays[index], arriving[index], None, 0).x
            arriving[index - 1] = arriving[index - 1]._replace(h=arriving[index - 1].h + above)
        found = backtrack(replays[layer], arriving[layer], max_hops, max_paths)
    return _trace_of(replays[layer], arriving[layer].h, found, value.item(), target_step)


def find_layer(module: Any, name: str = "module", purpose: str = "be traced") -> SABLayer[Any]:
    """The SAB layer of a module; `name` is what a sentence calls the module, `purpose` what it needs the layer for."""
    if not isinstance(module, nn.Module):
        raise UserTypeError(f"{name} must be a torch.nn.Module; got {type(module).__name__}.", name)
    layers = [one for one in module.modules() if isinstance(one, SABLayer) and not isinstance(one, SABCell)]
    if len(layers) != 1:
        raise UserValueError(f"{name} must be or have one SAB layer, which may be a stack; got {len(layers)}.", name)
    if any(parameter.is_inference() for parameter in module.parameters()):
        raise UserValueError(
            f"{name} must have been made outside of torch.inference_mode to {purpose}; its parameters were not.", name
        )
    if layers[0].bidirectional:
        raise UserValueError(f"{name} must have a layer of one direction to {purpose}; its is bidirectional.", name)
    return layers[0]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Every part of it in the mode of evaluation, and after that in its own again."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@dataclass(frozen=True, eq=False)
class _Call:
    """A layer's call inside of its module; what it gave was handed on as the leaves of a new graph."""

    layer: SABLayer
    input: Tensor
    output: Tensor
    state: SABState
    attention: Attention

    @property
    def is_batched(self) -> bool:
        return self.input.dim() == 3

    @property
    def rows(self) -> int:
        return self.input.shape[0 if self.layer.batch_first else 1] if self.is_batched else 1

    @property
    def steps(self) -> int:
        return len(self.of_row(self.input, 0))

    @property
    def untraced(self) -> tuple[Tensor, Tensor]:
        """What a module could read as well; credit is not followed from there."""
        return self.state.microstates, self.state.keys

    def check_row(self, row: int) -> None:
        check_int("row", row, 0, maximum=self.rows - 1)

    def of_row(self, tensor: Tensor, row: int) -> Tensor:
        """The row of a tensor [..., T, B, size] in the layer's own order, as [..., T, size]."""
        return tensor.select(-3 if self.layer.batch_first else -2, row) if self.is_batched else tensor

    def of_each_layer(self, tensor: Tensor, row: int) -> Tensor:
        """The row of a tensor of the attention, as [layers, T, size]."""
        of_row = self.of_row(tensor, row)
        return of_row if self.layer.num_layers > 1 else of_row.unsqueeze(0)

    def gradients(self, value: Tensor, row: int) -> list[Arriving]:
        """The gradient of a value at what each layer gave for a row."""
        h, c, attention = self.state.h, self.state.c, self.attention
        leaves = [self.output, attention.weights, attention.summary, *self.untraced, h, *([] if c is None else [c])]
        arrived = torch.autograd.grad(value, leaves, materialize_grads=True)
        to_output, to_weights, to_summary, to_microstates, to_keys, *to_state = arrived
        if to_microstates.any() or to_keys.any():
            raise UserValueError(
                "module must read its layer's output, h, c or attention to be traced; it reads microstates.", "module"
            )
        to_h, *to_c = (tensor.select(1, row) if self.is_batched else tensor for tensor in to_state)
        numbers = self.of_each_layer(attention.numbers, row)
        to_weights = self.of_each_layer(to_weights, row).masked_fill(numbers < 0, 0.0)
        microstates = schedule.next_number(self.steps, self.layer.config.k_att)
        by_number = to_weights.new_zeros(*to_weights.shape[:2], microstates + 1)
        by_number.scatter_add_(-1, torch.where(numbers < 0, microstates, numbers), to_weights)
        summaries = self.of_each_layer(to_summary, row)
        hidden = torch.zeros_like(summaries)
        hidden[-1] = self.of_row(to_output, row)
        hidden[:, -1] += to_h
        return [
            Arriving(hidden[index], to_c[0][index] if to_c else None, by_number[index], summaries[index])
            for index in range(self.layer.num_layers)
        ]


def _record(module: nn.Module, layer: SABLayer, x: Any) -> tuple[_Call, Any]:
    """Run the module; returns the call of its layer and its outputs."""
    calls: list[_Call] = []
    asked: list[bool] = []
    signature = inspect.signature(layer.forward)

    def before(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = signature.bind(*arguments, **options).arguments
        asked.append(given.get("return_attention", False))
        if len(asked) > 1:
            raise UserValueError("module must call its layer once to be traced; it does so more often.", "module")
        for name in ("hx", "lengths"):
            if given.get(name) is not None:
                raise UserValueError(f"module must call its layer without {name} to be traced; it gives one.", "module")
        if not isinstance(given["input"], Tensor):
            kind = type(given["input"]).__name__
            raise UserTypeError(f"module must call its layer with a tensor to be traced; got a {kind}.", "module")
        return arguments, {**options, "return_attention": True}

    def after(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments["input"]
        output, given_state, attention = result
        state = given_state.state if isinstance(given_state, SABHidden) else given_state
        handed_on = _Call(
            layer,
            given.detach(),
            _leaf(output),
            replace(
                state.detach(),
                h=_leaf(state.h),
                c=None if state.c is None else _leaf(state.c),
                microstates=_leaf(state.microstates),
                keys=_leaf(state.keys),
            ),
            Attention(attention.numbers, _leaf(attention.weights), _leaf(attention.summary)),
        )
        calls.append(handed_on)
        end = handed_on.state.h if isinstance(given_state, SABHidden) else handed_on.state
        return (handed_on.output, end, handed_on.attention)[: 3 if asked[0] else 2]

    hooks = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        outputs = module(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise UserValueError("module must call its layer once to be traced; it did not.", "module")
    return calls[0], outputs[0] if isinstance(outputs, tuple) else outputs


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _entry(
    outputs: Any, call: _Call, row: int, target_step: int | None, target_unit: int | None
) -> tuple[Tensor, int | None]:
    """The entry of the outputs that is the target, and its step where they have steps."""
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else None
    if shape is not None and shape[:-1] == list(call.output.shape[:-1]):
        target_step = check_int(
            "target_step", call.steps if target_step is None else target_step, 1, maximum=call.steps
        )
        entries = call.of_row(outputs, row)[target_step - 1]
    elif shape is not None and target_step is None and shape[:-1] == ([call.rows] if call.is_batched else []):
        entries = outputs[row] if call.is_batched else outputs
    else:
        wanted = f"{[*call.output.shape[:-1]]} and a size"
        given = type(outputs).__name__ if shape is None else shape
        raise UserValueError(
            f"target must be given where the outputs are not of shape {wanted}, the layer's own; got {given}.", "target"
        )
    if target_unit is None:
        return entries.max(), target_step
    return entries[check_int("target_unit", target_unit, 0, maximum=len(entries) - 1)], target_step


def _target_value(
    target: Callable[[Any], Tensor], outputs: Any, target_step: int | None, target_unit: int | None
) -> Tensor:
    if target_step is not None or target_unit is not None:
        raise UserValueError("target must be None where target_step or target_unit is given; got both.", "target")
    if not callable(target):
        raise UserTypeError(f"target must be a function of the outputs; got {type(target).__name__}.", "target")
    value = target(outputs)
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserValueError(f"target must give a tensor with one entry; got {given}.", "target")
    if not value.requires_grad:
        raise UserValueError("target must be made from the layer's outputs; what it gives has no gradient.", "target")
    return value


def _replays(call: _Call, row: int) -> list[Replay]:
    """Each layer of a stack run again over the row, with the selections that it made."""
    x, numbers = call.of_row(call.input, row), call.of_each_layer(call.attention.numbers, row)
    config = call.layer.config
    if isinstance(config.scorer, nn.Module):
        config = replace(config, scorer=call.layer.scorer)  # it may have been replaced
    # As many as there can be at most: a selection is padded to k_top.
    config = replace(config, k_top=min(config.k_top, schedule.next_number(call.steps, config.k_att)))
    made: list[Replay] = []
    for index, selected in enumerate(numbers):
        made.append(replay(x, selected, Layer(call.layer._weights(index), call.layer.cell, config)))
        x = made[-1].h[1:]
    return made


def _trace_of(run: Replay, direct: Tensor, found: Backtracked, value: float, target_step: int | None) -> Trace:
    everything = sum(path.norm for path in found.paths) + found.rest.norm(dim=-1).sum().item()
    paths = tuple(Path(skips, gradient.cpu(), norm, norm / everything) for skips, gradient, norm in found.paths)
    shown = (run.numbers, run.weights, direct, found.chain, found.skip, found.rest)
    config = run.layer.config
    numbers, weights, direct, chain, skip, rest = (tensor.cpu() for tensor in shown)
    return Trace(value, target_step, config.k_att, config.k_trunc, numbers, weights, direct, chain, skip, paths, rest)
