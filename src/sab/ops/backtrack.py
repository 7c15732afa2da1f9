"""One layer over one row, a step at a time, and its gradient an edge at a time.

`sab.ops.reference` defines what a step computes. Here each step runs alone, from tensors without a graph. So autograd
returns separately what flows from a step to the hidden state before it and to each microstate that it read. Many
gradients, one for each path, go through a step together, as the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.config import SABConfig
from sab.ops import forgetting, reference, schedule
from sab.ops.types import LayerState, LayerWeights, fresh_state
from sab.state import Attention


class Skip(NamedTuple):
    """One hop of the gradient through the memory; steps are counted from 1."""

    step: int
    """The step that read."""
    kept_at: int
    """The step whose hidden state is the microstate that it read."""


Skips = tuple[Skip, ...]


class Layer(NamedTuple):
    """What a layer computes with."""

    weights: LayerWeights
    cell: str
    config: SABConfig


class Replay(NamedTuple):
    """A layer run over one row."""

    layer: Layer
    x: Tensor
    """[T, input_size]."""
    h: Tensor
    """Hidden states before the first step and after each, [T + 1, n]."""
    c: Tensor | None
    """Cell states of an LSTM, as h."""
    slots: list[list[int]]
    """For each step the numbers of the microstates that its result may depend on."""
    numbers: Tensor
    """Numbers of the selected microstates, highest score first, [T, k]; -1 where fewer were."""
    weights: Tensor
    """Their weights, [T, k]."""


class Arriving(NamedTuple):
    """A target's gradient at the results of a layer for one row."""

    h: Tensor
    """At the hidden states, [T, n]."""
    c: Tensor | None
    """At the last cell state of an LSTM, [n]."""
    weights: Tensor
    """At the weights by the microstate's number, [T, microstates + 1]; the last column is 0."""
    summary: Tensor
    """At the summaries, [T, n]."""


class Ended(NamedTuple):
    """A path at its end."""

    skips: Skips
    gradient: Tensor
    """What it brings there, [n]."""
    norm: float


class Backtracked(NamedTuple):
    """How a gradient came back to the hidden states, [T, n] each, and on to the inputs."""

    chain: Tensor
    skip: Tensor
    paths: list[Ended]
    """The largest paths, largest first."""
    rest: Tensor
    """What the other paths bring."""
    x: Tensor
    """[T, input_size]."""


class _Bundle(NamedTuple):
    """Gradients of several paths at one step."""

    paths: list[Skips]
    gradients: Tensor
    """[2 + paths, size of the state]: of the path without a skip, of the sum of minor paths, and of each path."""


_APART = 2
"""Rows of a bundle before those of its paths."""


@torch.no_grad()
def replay(x: Tensor, numbers: Tensor, layer: Layer) -> Replay:
    """Run x [T, input_size] with the selections that were made, `numbers` [T, k]."""
    config, layer = layer.config, layer._replace(config=layer.config.unbounded())
    start = fresh_state(x.unsqueeze(1), layer.weights, layer.cell, config)
    h = start.h.new_zeros(len(x) + 1, start.h.shape[-1])
    c = None if start.c is None else torch.zeros_like(h)
    # With these a step's result depends on more than the microstates that it selected.
    sees_all = config.forward == "dense" or callable(config.scorer)
    kept = _macrostates(numbers, config) if sees_all else []
    reads: list[Attention] = []
    slots: list[list[int]] = []
    for t, selected in enumerate(numbers.tolist()):
        slots.append(kept[t] if sees_all else [number for number in selected if number >= 0])
        now = slice(t, t + 1)
        microstates = _microstates(h, slots[t], config).unsqueeze(0)
        h_t, c_t, read = _step(layer, t, x[now], h[now], None if c is None else c[now], microstates, slots[t])
        h[t + 1] = h_t
        if c is not None and c_t is not None:
            c[t + 1] = c_t
        reads.append(read)
    selected_then = (torch.cat([read.numbers for read in reads]), torch.cat([read.weights for read in reads]))
    return Replay(layer, x, h, c, slots, *selected_then)


def _macrostates(selected: Tensor, config: SABConfig) -> list[list[int]]:
    """The numbers of the microstates that each step finds, where the steps selected these, [T, k]."""
    numbers = selected.new_zeros(1, 0)
    reads = torch.zeros_like(numbers) if config.counts_reads else None
    found: list[list[int]] = []
    for t, of_step in enumerate(selected):
        found.append(numbers[0].tolist())
        if reads is not None:
            reads = forgetting.count(reads, numbers, of_step.unsqueeze(0))
        if config.k_top > 0 and schedule.keeps(t, config.k_att):
            newest = torch.tensor([schedule.next_number(t, config.k_att)])
            numbers, reads, _ = forgetting.keep(numbers, reads, newest, newest >= 0, config)
    return found


def _microstates(h: Tensor, slots: Sequence[int], config: SABConfig) -> Tensor:
    """The microstates of these numbers, [slots, n], of the hidden states before the first step and after each."""
    return h[[schedule.kept_at(number, config.k_att) for number in slots]]


def _step(
    layer: Layer, seen: int, x: Tensor, h: Tensor, c: Tensor | None, microstates: Tensor, slots: Sequence[int]
) -> tuple[Tensor, Tensor | None, Attention]:
    """The step after `seen` ones, of rows that differ in nothing: x [B, input_size], microstates [B, slots, n]."""
    numbers = torch.tensor(slots, dtype=torch.int64, device=x.device).expand(microstates.shape[:2])
    keys = microstates[..., :0]
    if layer.config.k_top > 0:
        keys = reference.key_of(microstates, numbers, layer.weights.scorer, layer.config)
    state = LayerState(h, c, microstates, keys, numbers, torch.full((len(x),), seen, device="cpu"))
    result = reference.run(x.unsqueeze(0), None, state, *layer)
    end = result.ends()
    return end.h, end.c, result.attention().map(lambda tensor: tensor.squeeze(0))


def backtrack(run: Replay, arriving: Arriving, max_hops: int | None, max_paths: int) -> Backtracked:
    """Follow a gradient back through all steps, and separate up to `max_paths` paths of up to `max_hops` skips."""
    n, size = run.h.shape[-1], run.h.shape[-1] * (1 if run.c is None else 2)
    chain, skip, rest, x = (torch.zeros_like(like) for like in (run.h[1:], run.h[1:], run.h[1:], run.x))
    ended: list[Ended] = []
    nothing = _Bundle([], run.h.new_zeros(_APART, size))
    landing: dict[int, _Bundle] = {}
    front = _Bundle([], nothing.gradients.clone())
    if arriving.c is not None:
        front.gradients[0, n:] = arriving.c
    for t in reversed(range(len(run.x))):
        landed = landing.pop(t + 1, nothing)
        chain[t] = front.gradients[:, :n].sum(0)
        skip[t] = landed.gradients[:, :n].sum(0)
        rest[t] = landed.gradients[1, :n]
        ended = _list_largest([*ended, *_ended(landed, n)], rest, max_paths)
        front = _largest(_joined(front, landed), max_paths)
        front.gradients[0, :n] += arriving.h[t]

        state, skipped, to_x = _through(run, t, front.gradients, arriving)
        x[t] = to_x.sum(0)
        for place, number in enumerate(run.slots[t]):
            hop = Skip(t + 1, schedule.kept_at(number, run.layer.config.k_att))
            brought = _over(hop, front.paths, skipped[:, place], max_hops, size)
            landing[hop.kept_at] = _largest(_joined(landing.get(hop.kept_at, nothing), brought), max_paths)
        front = _Bundle(front.paths, state)
    return Backtracked(chain, skip, ended, rest, x)


def _ended(landed: _Bundle, n: int) -> list[Ended]:
    gradients = landed.gradients[_APART:, :n]
    return [Ended(*one) for one in zip(landed.paths, gradients.clone(), gradients.norm(dim=-1).tolist(), strict=True)]


def _list_largest(ended: list[Ended], rest: Tensor, count: int) -> list[Ended]:
    """The `count` largest paths, largest first; what smaller ones bring is added to the rest where they end."""
    ordered = sorted(ended, key=lambda path: path.norm, reverse=True)
    for path in ordered[count:]:
        rest[path.skips[-1].kept_at - 1] += path.gradient
    return ordered[:count]


def _through(run: Replay, t: int, gradients: Tensor, arriving: Arriving) -> tuple[Tensor, Tensor, Tensor]:
    """What gradients at the state after a step are before it, at the microstates it read, [B, slots, n], and at x.

    The first row also has what the target reads of the step's attention.
    """
    rows, n = len(gradients), run.h.shape[-1]
    before = [run.h[t]] if run.c is None else [run.h[t], run.c[t]]
    read = _microstates(run.h, run.slots[t], run.layer.config)
    leaves = [tensor.expand(rows, *tensor.shape).clone().requires_grad_() for tensor in (run.x[t], read, *before)]
    x, microstates, h, *c = leaves
    h_t, c_t, attention = _step(run.layer, t, x, h, c[0] if c else None, microstates, run.slots[t])
    of_weights, of_summary = (torch.zeros_like(tensor) for tensor in (attention.weights, attention.summary))
    of_weights[0] = arriving.weights[t, attention.numbers[0]]  # where nothing was selected, -1, the last column
    of_summary[0] = arriving.summary[t]
    given = [(h_t, gradients[:, :n]), (attention.weights, of_weights), (attention.summary, of_summary)]
    if c_t is not None:
        given.append((c_t, gradients[:, n:]))
    given = [(tensor, gradient) for tensor, gradient in given if tensor.requires_grad]
    outputs, weighted = zip(*given, strict=True)
    to_x, skipped, *state = torch.autograd.grad(outputs, leaves, weighted, materialize_grads=True)
    return torch.cat(state, dim=-1), skipped, to_x


def _over(hop: Skip, paths: Sequence[Skips], gradients: Tensor, max_hops: int | None, size: int) -> _Bundle:
    """What each path brings over one skip further, as gradients of a state whose c has none."""
    gradients = F.pad(gradients, (0, size - gradients.shape[-1]))
    longer = [(*path, hop) for path in ((), *paths)]
    rows = [0, *range(_APART, len(gradients))]
    is_long = torch.tensor([max_hops is not None and len(path) > max_hops for path in longer], device=gradients.device)
    separate = [path for path in longer if max_hops is None or len(path) <= max_hops]
    mixed = gradients[1] + gradients[rows][is_long].sum(0)
    heads = torch.stack([torch.zeros_like(mixed), mixed])
    return _Bundle(separate, torch.cat([heads, gradients[rows][~is_long]]))


def _joined(one: _Bundle, other: _Bundle) -> _Bundle:
    heads = one.gradients[:_APART] + other.gradients[:_APART]
    return _Bundle(one.paths + other.paths, torch.cat([heads, one.gradients[_APART:], other.gradients[_APART:]]))


def _largest(bundle: _Bundle, count: int) -> _Bundle:
    """The `count` largest paths, without those that bring nothing; smaller ones join the minor paths."""
    apart = bundle.gradients[_APART:]
    norms = apart.norm(dim=-1)
    order = norms.argsort(descending=True, stable=True)
    kept = order[:count][norms[order[:count]] != 0].sort().values
    heads = bundle.gradients[:_APART].clone()
    heads[1] += apart[order[count:]].sum(0)
    return _Bundle([bundle.paths[place] for place in kept.tolist()], torch.cat([heads, apart[kept]]))
