"""An oracle for the layers: the mathematics in the plainest form, one row and one step at a time.

It is written from the text of the specification and shares nothing with the library but the names of the parameters:
no batching, no masks, no cached keys; the macrostate is a list, and a cut of the chain is a `detach`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, pi, sin, sqrt
from typing import Any

import torch
from torch import Tensor

Parameters = dict[str, Tensor]
Score = Callable[[Tensor, int, Tensor], Tensor]


@dataclass
class RowTrace:
    """What one row did in one layer and one direction."""

    outputs: list[Tensor] = field(default_factory=list)
    numbers: list[list[int]] = field(default_factory=list)
    """For each step the selected microstates' numbers, highest score first."""
    weights: list[list[Tensor]] = field(default_factory=list)
    summaries: list[Tensor] = field(default_factory=list)
    microstates: list[Tensor] = field(default_factory=list)
    """Those that are not forgotten, oldest first."""
    kept: list[int] = field(default_factory=list)
    """Their numbers."""
    reads: dict[int, int] = field(default_factory=dict)
    """By the number of a microstate how often it was read, discounted."""
    h: Tensor = field(default_factory=lambda: torch.empty(0))
    c: Tensor = field(default_factory=lambda: torch.empty(0))


def run_row(xs: list[Tensor], h: Tensor, c: Tensor, p: Parameters, cell: str, options: Any) -> RowTrace:
    """Run one row; `options` has the fields of a SABConfig."""
    trace = RowTrace()
    for t, x in enumerate(xs, start=1):
        if options.k_trunc is not None and t > 1 and (t - 1) % options.k_trunc == 0:
            h, c = h.detach(), c.detach()
        h, c = _cell(cell, x, h, c, p)

        numbers, weights, summary = _read(t, h, trace.microstates, trace.kept, p, options)
        if numbers:
            h = _incorporate(h, summary, p, options.incorporate)

        for number in numbers:
            trace.reads[number] += 2**24
        if t % options.k_att == 0:
            _keep(trace, t // options.k_att - 1, h, options)
        trace.outputs.append(h)
        trace.numbers.append(numbers)
        trace.weights.append(weights)
        trace.summaries.append(summary)
    trace.h, trace.c = h, c
    return trace


def _keep(trace: RowTrace, number: int, h: Tensor, options: Any) -> None:
    """Add a microstate, and forget one where there are more than max_memory."""
    most = options.max_memory
    if most is not None:
        power = 1
        while power < most:
            power *= 2
        trace.reads = {one: count - count // power for one, count in trace.reads.items()}
    older = list(trace.kept)
    trace.reads[number] = 2**24
    trace.kept.append(number)
    trace.microstates.append(h)
    if most is None or len(trace.kept) <= most:
        return
    if options.forget == "recent":
        place = 0
    elif options.forget == "most_read":
        place = min(range(most), key=lambda i: (trace.reads[older[i]], i))
    else:
        place = min(drawn(number), most)
    trace.kept.pop(place)
    trace.microstates.pop(place)


def drawn(number: int, seed: int = 0x5AB) -> int:
    """SplitMix64's output number `number`, as its authors write it, modulo number + 1."""
    state = seed
    for _ in range(number + 1):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = state
    z = (z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z // 2**27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z // 2**31)) % (number + 1)


def _cell(cell: str, x: Tensor, h: Tensor, c: Tensor, p: Parameters) -> tuple[Tensor, Tensor]:
    n = len(h)
    from_x, from_h = p["weight_ih"] @ x, p["weight_hh"] @ h
    if "norm_ih" in p:
        from_x, from_h = p["norm_ih"] * _normed(from_x), p["norm_hh"] * _normed(from_h)
    if "bias_ih" in p:
        from_x, from_h = from_x + p["bias_ih"], from_h + p["bias_hh"]

    def gate(k: int) -> slice:
        return slice(k * n, (k + 1) * n)

    if cell == "lstm":
        i = torch.sigmoid(from_x[gate(0)] + from_h[gate(0)])
        f = torch.sigmoid(from_x[gate(1)] + from_h[gate(1)])
        g = torch.tanh(from_x[gate(2)] + from_h[gate(2)])
        o = torch.sigmoid(from_x[gate(3)] + from_h[gate(3)])
        c = f * c + i * g
        read = p["norm_c_weight"] * _normed(c) + p["norm_c_bias"] if "norm_c_weight" in p else c
        return o * torch.tanh(read), c
    if cell == "gru":
        r = torch.sigmoid(from_x[gate(0)] + from_h[gate(0)])
        z = torch.sigmoid(from_x[gate(1)] + from_h[gate(1)])
        candidate = torch.tanh(from_x[gate(2)] + r * from_h[gate(2)])
        return (1 - z) * candidate + z * h, c
    assert cell in ("rnn_tanh", "rnn_relu")
    return torch.tanh(from_x + from_h) if cell == "rnn_tanh" else torch.relu(from_x + from_h), c


def _read(
    t: int, h: Tensor, memory: list[Tensor], kept: list[int], p: Parameters, options: Any
) -> tuple[list[int], list[Tensor], Tensor]:
    """Numbers and weights of the microstates that step t selects, and the summary."""
    k = min(options.k_top, len(memory))
    if k == 0:
        return [], [], torch.zeros_like(h)
    score = _scorer(options.scorer, p, t, options.k_att)
    scores = [score(m, number, h) for number, m in zip(kept, memory, strict=True)]
    found = _of_read_blocks(t, h, memory, kept, p, options)
    ranking = sorted(found, key=lambda i: (-scores[i].item(), i))
    selected = ranking[:k]
    numbers = [kept[i] for i in selected]
    if options.forward == "sparse":
        weights = _weigh([scores[i] for i in selected], options.weighting)
        summary = _sum([w * memory[i] for w, i in zip(weights, selected, strict=True)])
        return numbers, weights, summary
    for i in ranking[k:]:
        scores[i] = scores[i].detach()
    weights = _weigh(scores, options.weighting)
    read = [m if i in selected else m.detach() for i, m in enumerate(memory)]
    return numbers, [weights[i] for i in selected], _sum([w * m for w, m in zip(weights, read, strict=True)])


def _of_read_blocks(t: int, h: Tensor, memory: list[Tensor], kept: list[int], p: Parameters, options: Any) -> list[int]:
    """The places of what step t may select: all microstates or, with two levels, those of the best blocks."""
    everything = list(range(len(memory)))
    if options.memory == "flat":
        return everything
    size = options.block_size
    while 4 * (2 * size) ** 2 <= len(memory):
        size *= 2
    blocks = [everything[first : first + size] for first in range(0, len(memory), size)]
    query, keys = p["attn_w_query"] @ h, [p["attn_w_memory"] @ m for m in memory]
    if options.scorer == "cosine":
        query = _aged(p["attn_v"] * _unit(query + p["attn_bias"]), t - 1)
        keys = [_aged(_unit(key), (i + 1) * options.k_att - 1) for key, i in zip(keys, kept, strict=True)]

    numbers = [key.tolist() for key in keys]

    def bound(block: list[int]) -> float:
        return sum(max(q * numbers[place][entry] for place in block) for entry, q in enumerate(query.tolist()))

    order = sorted(range(len(blocks) - 1), key=lambda j: (-bound(blocks[j]), j))
    return sorted(place for j in [*order[: options.blocks], len(blocks) - 1] for place in blocks[j])


def _scorer(scorer: Any, p: Parameters, t: int, k_att: int) -> Score:
    if not isinstance(scorer, str):
        return lambda m, i, h: scorer(m[None, None], h[None])[0, 0]

    def bias(i: int) -> Tensor | float:
        return p["attn_bias"][i] if "attn_bias" in p and i < len(p["attn_bias"]) else 0.0

    w_m, w_q = p["attn_w_memory"], p["attn_w_query"]
    scores: dict[str, Score] = {
        "affine": lambda m, i, h: (w_m * m).sum() + (w_q * h).sum() + bias(i),
        "affine_tanh": lambda m, i, h: (w_m * torch.tanh(m)).sum() + (w_q * torch.tanh(h)).sum() + bias(i),
        "mlp": lambda m, i, h: (p["attn_v"] * torch.tanh(w_m @ m + w_q @ h + p["attn_bias"])).sum(),
        "dot": lambda m, i, h: ((w_m @ m) * (w_q @ h)).sum() / sqrt(len(w_m)),
        "cosine": lambda m, i, h: (
            sqrt(len(w_m))
            * (_unit(w_m @ m) * _aged(p["attn_v"] * _unit(w_q @ h + p["attn_bias"]), t - (i + 1) * k_att)).sum()
        ),
    }
    return scores[scorer]


def _normed(x: Tensor) -> Tensor:
    mean = x.sum() / len(x)
    return (x - mean) / (((x - mean) ** 2).sum() / len(x) + 1e-5).sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / ((x * x).sum() + 1e-5 * len(x)).sqrt()


def _aged(query: Tensor, age: int) -> Tensor:
    """The query for a microstate that was kept `age` steps ago: the first half of its pairs turned."""
    entries, pairs = list(query), len(query) // 4
    for pair in range(pairs):
        rate = round(2**32 / (2 * pi) * 0.01 ** (pair / pairs)) / 2**32 * 2 * pi
        even, odd = entries[2 * pair : 2 * pair + 2]
        entries[2 * pair] = even * cos(rate * age) - odd * sin(rate * age)
        entries[2 * pair + 1] = even * sin(rate * age) + odd * cos(rate * age)
    return torch.stack(entries)


def _weigh(scores: list[Tensor], weighting: str) -> list[Tensor]:
    """Weights of scores; for the relu kinds the last score is the lowest."""
    if weighting in ("relu", "relu_norm"):
        weights = [torch.relu(a - scores[-1]) for a in scores]
        total = _sum(weights) + 1e-7
        return weights if weighting == "relu" else [w / total for w in weights]
    exponentials = [torch.exp(a) for a in scores]
    total = _sum(exponentials) + (1 if weighting == "softmax_sink" else 0)
    return [e / total for e in exponentials]


def _incorporate(h: Tensor, summary: Tensor, p: Parameters, incorporate: str) -> Tensor:
    if incorporate in ("concat", "gate"):
        mapped = p["incorporate_weight"] @ torch.cat([h, summary]) + p["incorporate_bias"]
        if incorporate == "concat":
            return mapped
        share = 1 / (1 + torch.exp(-mapped))
        return (1 - share) * h + share * summary
    return h + (torch.tanh(summary) if incorporate == "add_bounded" else summary)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


@dataclass
class Result:
    """What a whole layer gives, padded as the library pads; the first dimension of all but output is layers."""

    output: Tensor
    h: Tensor
    c: Tensor
    numbers: Tensor
    weights: Tensor
    summary: Tensor
    microstates: list[list[Tensor]]
    """For each layer and direction, and then for each row, its microstates [S, n]."""


def run(layer: Any, x: Tensor, lengths: list[int], h0: Tensor, c0: Tensor) -> Result:
    """Run a library layer's parameters and options over x [T, B, input_size], row by row."""
    steps, batch, _ = x.shape
    inputs = [[x[t, b] for t in range(lengths[b])] for b in range(batch)]
    traces: list[list[RowTrace]] = []
    for depth in range(layer.num_layers):
        directed = []
        for suffix in ["", "_reverse"] if layer.bidirectional else [""]:
            end = f"_l{depth}{suffix}"
            p = {name.removesuffix(end): q for name, q in layer.named_parameters() if name.endswith(end)}
            index, way = len(traces), -1 if suffix else 1
            rows = [
                run_row(inputs[b][::way], h0[index, b], c0[index, b], p, layer.cell, layer.config) for b in range(batch)
            ]
            for row in rows:  # put back in the input's order
                for name in ("outputs", "numbers", "weights", "summaries"):
                    setattr(row, name, getattr(row, name)[::way])
            traces.append(rows)
            directed.append(rows)
        inputs = [
            [torch.cat([rows[b].outputs[t] for rows in directed]) for t in range(lengths[b])] for b in range(batch)
        ]
    return _pad(traces, inputs, steps, layer.config.k_top)


def _pad(traces: list[list[RowTrace]], outputs: list[list[Tensor]], steps: int, k_top: int) -> Result:
    def stack(function: Callable[[RowTrace], Tensor]) -> Tensor:
        return torch.stack([torch.stack([function(row) for row in rows]) for rows in traces])

    def over_time(sequence: list[Tensor]) -> Tensor:
        return torch.stack(sequence + [torch.zeros_like(sequence[0])] * (steps - len(sequence)))

    def numbers(row: RowTrace) -> Tensor:
        ended = row.numbers + [[]] * (steps - len(row.numbers))
        padded = [line + [-1] * (k_top - len(line)) for line in ended]
        return torch.tensor(padded, dtype=torch.int64).view(steps, k_top)

    def weights(row: RowTrace) -> Tensor:
        zero = row.h.new_zeros(())
        lines = [torch.stack([*line, *[zero] * (k_top - len(line) + 1)])[:k_top] for line in row.weights]
        return over_time(lines)

    def microstates(row: RowTrace) -> Tensor:
        return torch.stack(row.microstates) if row.microstates else row.h.new_zeros(0, len(row.h))

    return Result(
        output=torch.stack([over_time(row) for row in outputs], dim=1),
        h=stack(lambda row: row.h),
        c=stack(lambda row: row.c),
        numbers=stack(numbers).transpose(1, 2),
        weights=stack(weights).transpose(1, 2),
        summary=stack(lambda row: over_time(row.summaries)).transpose(1, 2),
        microstates=[[microstates(row) for row in rows] for rows in traces],
    )
