"""The tensors that the loops over time read and write, as every backend lays them out.

Time comes first in every buffer except `keys`. T steps, B rows, hidden size n, key size d; F microstates exist before
the first step and S after the last. `sab.ops.precision` defines the compute type; without a mention a buffer is of the
state type. The last two columns are the contents before and after the forward loop.

| buffer | exists | shape | before | after |
|---|---|---|---|---|
| store | always | [F + 1 + T, B, n] | F microstates, the initial h | also the T hidden states |
| c | `Cell.has_c` | [T + 1, B, n] | the initial c | also the T cell states |
| gates | always | [T, B, G], compute type | the input's part | activated |
| hidden_new | `Cell.splits_gates` | [T, B, n], compute type | | h_gates of the last gate |
| h_hat | always | [T, B, n] | | provisional hidden states |
| query | without `Scorer.query_cancels` | [T, B, d] | | what is scored against the keys |
| keys | k_top > 0 | [B, S, d], compute type | those of the first F slots | all |
| weights | k_top > 0 | [T, B, k_top] | | of the selected, otherwise 0 |
| selected | k_top > 0 | [T, B, k_top], int32 | | slots, otherwise -1 |
| norms | `Weighting.saves_norm` | [T, B] | | the divisor of the weights |
| summary | k_top > 0 | [T, B, n] | | what was read, otherwise 0 |
| mapped | `Incorporation.saves_map` | [T + 1, B, n], compute type | | the map; its last row is free |
| key_scale | `Scorer.normalises` | [B, S] | | 1 / the length of W_m m, from slot F on |
| query_scale | `Scorer.normalises` | [T, B] | | 1 / the length of `query` |
| scores | `Scorer.normalises` | [T, B, k_top] | | of the selected, otherwise 0 |
| lengths | rows differ in length | [B], int64 | number of steps of each row | |
| packed | the backend packs | its own | the weights | |
| x_normed, h_normed | `layer_norm` | [T, B, G] | | the products W_ih x and W_hh h, normalised, without gain |
| x_scale, h_scale | `layer_norm` | [T, B] | | what the differences from their means were multiplied with |
| live | `max_memory` | [B, N], int32 | | the slots of what is not forgotten, oldest first, otherwise -1 |
| reads | `most_read` | [B, N], int64 | counts of the first F slots, otherwise 0 | those of `live` |

Where the backend makes the gates in its loop (`Prepared.inputs`), `gates` is empty before it. Where no backward comes,
all buffers that only a backward reads have a single step in the place of T.

A microstate is not copied: slot s is row s of `store` for the first F slots, then the row of the hidden state that was
kept (`schedule.kept_row`). What a bounded macrostate forgot keeps its slot: it is not in `live`, which has min(N, S)
places with N = max_memory. Past its end a row is 0 in every buffer and has selected nothing. Where the scorer
normalises, `keys` have length 1 and `query` is W_q ĥ as it is. With layer norm the input's part in `gates` is W_ih x
alone, and the loops normalise it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sab import torch_private
from sab.ops.plan import Plan
from sab.ops.precision import contiguous, state_type
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS, WEIGHTINGS


class Weights(NamedTuple):
    """The parameters of a layer that the loops read, unchanged; None where there is none."""

    w_hh: Tensor
    b_hh: Tensor | None
    """Already added to the gates, unless the cell splits them."""
    w_memory: Tensor | None
    w_query: Tensor | None
    scorer_bias: Tensor | None
    v: Tensor | None
    w_incorporate: Tensor | None
    b_incorporate: Tensor | None
    norm_ih: Tensor | None = None
    norm_hh: Tensor | None = None
    norm_c_weight: Tensor | None = None
    norm_c_bias: Tensor | None = None
    h_mask: Tensor | None = None
    """Of recurrent dropout, [B, n]."""
    b_ih: Tensor | None = None
    """With layer norm alone; already added to the gates elsewhere."""

    @property
    def common(self) -> tuple[Tensor | None, ...]:
        """Those that the loops of every backend read: without layer norm and recurrent dropout."""
        return self[:8]


class Inputs(NamedTuple):
    """What the input's part of the gates is made from, in the compute type and contiguous."""

    x: Tensor
    w_ih: Tensor
    b_ih: Tensor | None
    """None with layer norm too, where biases come after it."""


class Prepared(NamedTuple):
    """What an engine makes before its forward loop."""

    gates: Tensor
    """The buffer; the input's part, or empty where the loop makes that."""
    packed: Tensor | None = None
    """The buffer; None where the engine does not pack."""
    inputs: Inputs | None = None
    """Where the loop makes the input's part of the gates, what from."""


class Edges(NamedTuple):
    """What a forward loop begins with, and where its output goes."""

    h: Tensor | None
    """[B, n]; None for zeros."""
    c: Tensor | None
    """[B, n]; None for zeros, and for a cell without it."""
    output: Tensor
    """The hidden states in the layer's type, [T, B, n]: no part of `store`, so that whoever changes them in place
    changes neither the state nor what the backward reads."""


class Buffers(NamedTuple):
    """What the forward loop reads and writes; see the table above."""

    store: Tensor
    c: Tensor | None
    gates: Tensor
    hidden_new: Tensor | None
    h_hat: Tensor
    query: Tensor | None
    keys: Tensor | None
    weights: Tensor | None
    selected: Tensor | None
    norms: Tensor | None
    summary: Tensor | None
    mapped: Tensor | None
    key_scale: Tensor | None
    query_scale: Tensor | None
    scores: Tensor | None
    lengths: Tensor | None = None
    packed: Tensor | None = None
    x_normed: Tensor | None = None
    x_scale: Tensor | None = None
    h_normed: Tensor | None = None
    h_scale: Tensor | None = None
    live: Tensor | None = None
    reads: Tensor | None = None

    @property
    def written(self) -> tuple[Tensor | None, ...]:
        """Those that the loops of every backend write, in their order: all before `lengths`."""
        return self[:15]


class Work(NamedTuple):
    """The gradients that the backward loop reads and writes; of the state type where no other is stated."""

    dstore: Tensor | None
    """Of `store`; from outside before the loop, whole after it. None after the loop where it is not read."""
    dc: Tensor | None
    """Of the initial c, [B, n]."""
    dcells: Tensor | None
    """From outside, of c after each step, [T, B, n]; None for zeros."""
    dgates: Tensor
    """Of the sums before activation, [T * B, G], compute type; with layer norm, of W_ih x. It may be the memory of
    `gates`."""
    dhidden: Tensor
    """Of h_gates, as `dgates`, and the same tensor unless the cell splits them; with layer norm its own, of W_hh h.
    Without layer norm it may be of the last gate alone, [T * B, n], where those of the others are in `dgates`."""
    dquery: Tensor | None
    """Of the query, [T * B, d], compute type."""
    dkeys: Tensor | None
    """Of `keys`; from outside before the loop, whole after it. Where the scorer normalises, from slot F on of W_m m,
    before as well as after."""
    dsummary: Tensor | None
    """From outside, of `summary`; None for zeros."""
    dweights: Tensor | None
    """From outside, of `weights`; None for zeros."""
    dincorporated: Tensor | None
    """Of the result of an incorporation with weights, [T * B, n], compute type; only the steps that read are filled. It
    may be `mapped[1:]`, so that the gradient of a step lies where the map of the next one was: several programs read a
    step's map while each writes its part of the gradient."""
    dv: Tensor | None
    """Of the scorer's v, [B, d]."""
    dnorm_ih: Tensor | None = None
    """With layer norm: of the gains and the biases, a row for each of the batch, [B, G], those of c [B, n]."""
    dnorm_hh: Tensor | None = None
    db_ih: Tensor | None = None
    """Of the biases also where an engine sums them up."""
    db_hh: Tensor | None = None
    """None unless the cell splits the gates: then it is db_ih."""
    dnorm_c_weight: Tensor | None = None
    dnorm_c_bias: Tensor | None = None
    doutput: Tensor | None = None
    """Of the output, [T, B, n], in its own type, where the loop begins with it: then nothing else comes from outside
    for `store` and `keys`, and `dstore` and `dkeys` are empty before the loop. Elsewhere None: `dstore` has it."""

    @property
    def sums(self) -> tuple[Tensor | None, ...]:
        """Those that the loops add to from 0 on, besides `dstore` and `dkeys`."""
        return self.dc, self.dv, *self[11:17]

    @property
    def common(self) -> tuple[Tensor | None, ...]:
        """Those that the loops of every backend take, in their order: without those of layer norm."""
        return self[:11]


class Outside(NamedTuple):
    """The gradients of the results, from outside; None for zeros. Those of c are of the states after each step."""

    hidden: Tensor | None
    store: Tensor | None
    c: Tensor | None
    keys: Tensor | None
    weights: Tensor | None
    summary: Tensor | None


class Room(NamedTuple):
    """Where a pass reads and writes its macrostate, in buffers that are there before it."""

    store: Tensor
    """Filled up to the first step's row."""
    keys: Tensor
    """Filled for the first slots; it has room for those of later passes."""


def allocate(
    plan: Plan, gates: Tensor, packed: Tensor | None, lengths: Tensor | None, room: Room | None = None
) -> Buffers:
    """The buffers around the gates; only their shapes are set.

    Where the gates have a single step, so have all buffers that only a backward reads.
    """
    steps, batch, n, k_top, saved = plan.steps, plan.batch, plan.n, plan.config.k_top, gates.shape[0]
    compute = gates.dtype
    kept = state_type(compute)
    new = gates.new_empty
    like = torch.empty_like  # takes half as long
    store = new((plan.first_slots + 1 + steps, batch, n), dtype=kept) if room is None else room.store
    h_hat = new((saved, batch, n), dtype=kept)
    cell = CELLS[plan.cell]
    c = None
    if cell.has_c:
        c = like(store) if plan.first_slots == 0 else new((steps + 1, batch, n), dtype=kept)
    hidden_new = new((saved, batch, n), dtype=compute) if cell.splits_gates else None
    others: Any = {}
    if plan.config.layer_norm:
        others = {name: new((steps, *gates.shape[1:]), dtype=kept) for name in ("x_normed", "h_normed")}
        others |= {name: new((steps, batch), dtype=kept) for name in ("x_scale", "h_scale")}
    if k_top == 0:
        found = {"store": store, "c": c, "gates": gates, "hidden_new": hidden_new, "h_hat": h_hat}
        return Buffers._make(map((found | {"lengths": lengths, "packed": packed} | others).get, Buffers._fields))
    scorer = SCORERS[str(plan.config.scorer)]
    normalises = scorer.normalises
    query = None
    if not scorer.query_cancels:
        query = like(h_hat) if plan.key_size == n else new((saved, batch, plan.key_size), dtype=kept)
    weights = new((steps, batch, k_top), dtype=kept)
    if plan.config.forgets:
        others["live"] = new((batch, plan.places), dtype=torch.int32)
    if plan.config.counts_reads:
        others["reads"] = new((batch, plan.places), dtype=torch.int64)
    return Buffers(
        store=store,
        c=c,
        gates=gates,
        hidden_new=hidden_new,
        h_hat=h_hat,
        query=query,
        keys=new((batch, plan.slots, plan.key_size), dtype=compute) if room is None else room.keys,
        weights=weights,
        selected=like(weights, dtype=torch.int32),
        norms=new((saved, batch), dtype=kept) if WEIGHTINGS[plan.config.weighting].saves_norm else None,
        summary=new((steps, batch, n), dtype=kept),
        mapped=new((saved + 1, batch, n)) if INCORPORATIONS[plan.config.incorporate].saves_map else None,
        key_scale=new((batch, plan.slots), dtype=kept) if normalises else None,
        query_scale=new((saved, batch), dtype=kept) if normalises else None,
        scores=new((saved, batch, k_top), dtype=kept) if normalises else None,
        lengths=lengths,
        packed=packed,
        **others,
    )


def allocate_work(
    plan: Plan,
    weights: Weights,
    buffers: Buffers,
    outside: Outside,
    *,
    overwrites: Collection[str],
    wants_initial: bool,
    sums_biases: bool = False,
    last_gate_alone: bool = False,
    owns_outside: bool = False,
    begins_with_output: bool = False,
) -> Work:
    """What the backward loop needs, with the gradients from outside in their places.

    overwrites: the buffers whose memory their gradients take (`Engine.overwrites`). wants_initial: whether the
    gradients of the initial h and of the first microstates will be read. sums_biases: whether the loop sums up the
    gradients of the gates' biases. last_gate_alone: as `Engine.LAST_GATE_ALONE`.
    owns_outside: the loop may change those of `store` and `keys`, which are of the state type and contiguous.
    begins_with_output: the loop can begin with the output's gradient alone (`Work.doutput`).
    """
    steps, batch, n = plan.steps, plan.batch, plan.n
    gates, keys, new, dtype = buffers.gates, buffers.keys, buffers.h_hat.new_empty, buffers.h_hat.dtype
    doutput = None
    if begins_with_output and outside.hidden is not None and outside.store is None and outside.keys is None:
        doutput = contiguous(outside.hidden)
    dkeys = None
    if keys is not None:
        given = outside.keys
        if doutput is not None:
            dkeys = torch.empty_like(keys, dtype=dtype)
        elif given is None:
            dkeys = torch.zeros_like(keys, dtype=dtype)
        else:
            dkeys = given if owns_outside else contiguous(given.to(dtype, copy=True))
        if given is not None and buffers.key_scale is not None:
            _before_scaling(dkeys[:, plan.first_slots :], keys[:, plan.first_slots :], buffers.key_scale)

    def of_steps(name: str, buffer: Tensor) -> Tensor:
        return (buffer if name in overwrites else torch.empty_like(buffer)).view(steps * batch, -1)

    dgates = dhidden = of_steps("gates", gates)
    cell = CELLS[plan.cell]
    if plan.config.layer_norm or (cell.splits_gates and not last_gate_alone):
        dhidden = torch.empty_like(dgates)
    elif buffers.hidden_new is not None:
        dhidden = of_steps("hidden_new", buffers.hidden_new)
    dincorporated = None
    if buffers.mapped is not None and "mapped" in overwrites and batch * n * gates.itemsize % 16 == 0:
        dincorporated = buffers.mapped[1:].view(steps * batch, n)  # elsewhere kernels would be compiled anew for it
    elif weights.w_incorporate is not None:
        dincorporated = gates.new_empty((steps * batch, n))
    of_rows: Any = {}
    if plan.config.layer_norm or sums_biases:
        names = ("dnorm_ih", "dnorm_hh") if plan.config.layer_norm else ()
        names += ("db_ih", "db_hh") if cell.splits_gates else ("db_ih",)
        of_rows = {name: new((batch, gates.shape[2])) for name in names}
    if plan.config.layer_norm and cell.normalises_c:
        of_rows |= {name: new((batch, n)) for name in ("dnorm_c_weight", "dnorm_c_bias")}
    if doutput is not None:
        dstore = torch.empty_like(buffers.store)
    elif owns_outside:
        dstore = outside.store
    else:
        dstore = _outside_of_store(buffers.store, plan.first_slots + 1, outside, wants_initial)
    return Work(
        dstore=dstore,
        dc=new((batch, n)) if cell.has_c else None,
        dcells=None if outside.c is None else contiguous(outside.c[1:]),
        dgates=dgates,
        dhidden=dhidden,
        dquery=None if keys is None else gates.new_empty((steps * batch, plan.key_size)),
        dkeys=dkeys,
        dsummary=None if outside.summary is None else contiguous(outside.summary),
        dweights=None if outside.weights is None else contiguous(outside.weights),
        dincorporated=dincorporated,
        dv=None if weights.v is None else new((batch, plan.key_size)),
        doutput=doutput,
        **of_rows,
    )


def _before_scaling(dkeys: Tensor, keys: Tensor, key_scale: Tensor) -> None:
    """Turn the gradients of the last keys, which have length 1, into those of the products that they were made from.

    A key without a scale came after its row's end: nobody wrote it, and it has no gradient.
    """
    scale = key_scale[:, key_scale.shape[1] - keys.shape[1] :].unsqueeze(-1)
    keys = torch.where(scale > 0, keys, 0.0)
    along = (dkeys * keys).sum(-1, keepdim=True)
    dkeys.sub_(along * keys).mul_(scale)


def _outside_of_store(store: Tensor, first: int, outside: Outside, wants_initial: bool) -> Tensor:
    """The gradient of `store` from outside; the first step's hidden state is row `first`."""
    if outside.store is None:
        dstore = torch.empty_like(store)
        if wants_initial:
            dstore[:first].zero_()
        fill(dstore[first:], outside.hidden)
        return dstore
    dstore = outside.store.clone(memory_format=torch.contiguous_format)
    if outside.hidden is not None:
        dstore[first:] += outside.hidden
    return dstore


def fill(buffer: Tensor, values: Tensor | None) -> None:
    """Copy the values into the buffer, or zeros where there are none."""
    if values is None:
        buffer.zero_()
    else:
        buffer.copy_(values)


def begin(plan: Plan, buffers: Buffers, edges: Edges) -> None:
    """Put the state before the first step in its place."""
    first = buffers.store[plan.first_slots]
    if edges.h is None and edges.c is None:
        torch_private.zero_all([first] if buffers.c is None else [first, buffers.c[0]])
        return
    fill(first, edges.h)
    if buffers.c is not None:
        fill(buffers.c[0], edges.c)


def finish(plan: Plan, buffers: Buffers, edges: Edges) -> None:
    """Copy the hidden states to the output."""
    edges.output.copy_(buffers.store[plan.first_slots + 1 :])


def blank(plan: Plan, buffers: Buffers) -> None:
    """Fill the buffers as if nothing had been read, for a forward loop that skips the steps without a read."""
    if buffers.weights is None or buffers.selected is None or buffers.summary is None:
        return
    buffers.selected.fill_(-1)
    # What no loop writes is not left to chance: the same inputs give the same outputs to the last bit.
    query = None if buffers.query is None else buffers.query[: plan.first_read]
    zeros = (buffers.weights, buffers.summary, buffers.norms, buffers.key_scale, buffers.query_scale, buffers.scores)
    zeros = (*zeros, query)
    torch_private.zero_all([buffer for buffer in zeros if buffer is not None])


def blank_work(work: Work) -> None:
    """The same for a backward loop that skips steps, and what it adds to."""
    if work.dquery is not None:
        work.dquery.zero_()
    torch_private.zero_all([gradient for gradient in work.sums if gradient is not None])


def cast(weights: Weights, compute: torch.dtype) -> Weights:
    """The weights in the compute type, contiguous."""
    found = [None if weight is None else contiguous(weight) for weight in weights]
    others = [place for place, weight in enumerate(found) if weight is not None and weight.dtype != compute]
    if others:
        sources: Any = [found[place] for place in others]
        targets = [torch.empty_like(source, dtype=compute) for source in sources]
        torch_private.copy_all(targets, sources)
        for place, target in zip(others, targets, strict=True):
            found[place] = target
    return Weights(*found)  # pyright: ignore[reportArgumentType]


def gate_bias(b_ih: Tensor | None, b_hh: Tensor | None, cell: str) -> Tensor | None:
    """The bias of the gates that is the same for all steps: both, unless the cell splits the gates."""
    return b_ih if b_ih is None or b_hh is None or CELLS[cell].splits_gates else b_ih + b_hh
