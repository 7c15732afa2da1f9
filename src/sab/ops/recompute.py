"""Recomputation: a sequence is run span by span, and run again in the backward instead of keeping what its steps saved.

Kept are the states that spans begin with, the keys, and what each step selected; microstates are rows of the output.
In the backward a span is run once more from its first state, the last one first, and its backward loop follows. Of the
macrostate it is given only what its steps read: of all slots the selected ones, in their order, so that each step
selects the same again and the macrostate is never copied. The gradients of microstates and keys are summed up for the
whole sequence; when the turn of the span that made them comes, all later ones have added theirs.

A span that no gradient reaches is not run again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab import torch_private
from sab.config import SABConfig
from sab.errors import UserValueError
from sab.ops import operation, schedule
from sab.ops.arguments import INPUTS, Given, Initial, Options, Parameters, Results, split
from sab.ops.buffers import Outside, Room, fill
from sab.ops.plan import Plan
from sab.ops.precision import contiguous, state_type
from sab.ops.results import Pass
from sab.ops.types import Ends, LayerMemory, LayerResult, LayerState, LayerWeights
from sab.parts.registry import CELLS

SHORTEST, LONGEST, FEWEST = 64, 256, 8
"""A sequence is run in at least FEWEST spans, unless these would be shorter than SHORTEST steps, and in as many as it
takes for none to be longer than LONGEST: the memory of a backward is that of a span."""


class Span(NamedTuple):
    """Some steps of a sequence, one after another."""

    first: int
    steps: int
    slots: int
    """How many there are before its first step."""
    new: int
    """How many microstates it keeps."""

    @property
    def all(self) -> slice:
        """Its steps."""
        return slice(self.first, self.first + self.steps)

    def part(self, given: Given) -> Given:
        """Its steps alone."""
        lengths = None if given.lengths is None else (given.lengths - self.first).clamp(0, self.steps)
        return Given(given.x[self.all], lengths)

    def kept(self, store: Tensor, plan: Plan) -> Tensor:
        """The rows of its own buffer `store`, or of the gradient of that, with its microstates."""
        slots, k_att = len(store) - 1 - self.steps, plan.config.k_att
        return store[schedule.kept_row(slots, plan.seen + self.first, slots, k_att) :: k_att]


def spans_of(plan: Plan) -> list[Span]:
    """The spans that a pass is run in."""
    steps = plan.steps
    longest = min(LONGEST, max(SHORTEST, -(-steps // FEWEST)))
    found = []
    for first in range(0, steps, longest):
        last = min(steps, first + longest)
        slots = plan.slots_at(first)
        found.append(Span(first, last - first, slots, plan.slots_at(last) - slots))
    return found


def run(
    engine: str,
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """`operation.run`, and with `recompute` the same results where a backward may follow."""
    if not config.recompute:
        return operation.run(engine, x, lengths, state, weights, cell_name, config)
    call = operation.call_of(engine, x, lengths, state, weights, cell_name, config)
    if call.saves and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        raise UserValueError(
            "recompute must be False under torch.compile, whose graph keeps what the backward pass reads; got True.",
            "recompute",
        )
    if not call.saves or not call.is_plain or x.shape[0] == 0 or torch_private.are_transforms_active():
        return operation.run(engine, x, lengths, state, weights, cell_name, config)
    hidden, h, c, keys, live, reads = _record(call.options, config.offload, *call.tensors)
    first = call.initial.microstates
    if first is not None:
        first = first.clone()  # what the caller may change
    after = operation.pass_of(call, state, config)
    return LayerResult(
        hidden,
        partial(Ends, h, c),
        partial(_memory, after, hidden, hidden._version, first, keys, live, reads),
        _no_attention,
    )


def _memory(
    after: Pass,
    hidden: Tensor,
    version: int,
    first: Tensor | None,
    keys: Tensor | None,
    live: Tensor | None,
    reads: Tensor | None,
) -> LayerMemory:
    """The memory after the last step, whose microstates are rows of the output."""
    if hidden._version != version:
        raise UserValueError(
            "recompute must be False where the output is changed in place: the state's microstates are rows of it.",
            "recompute",
        )
    begin = hidden[:1] if first is None else torch.cat([first.transpose(0, 1), hidden[:1]])
    return after.memory(torch.cat([begin, hidden]), None if keys is None else keys.to(hidden.device), live, reads)


def _no_attention() -> Any:
    raise RuntimeError("a pass with recompute=True has kept no attention.")


class Macrostate(NamedTuple):
    """All microstates of a pass, by slot."""

    first: Tensor | None
    """Those before the first step, [B, F, n]."""
    rows: Tensor
    """Time-major, [.., B, n]: among others all those that were kept."""
    begin: int
    stride: int
    """Which rows: from `begin` on each `stride`-th."""

    @classmethod
    def of(cls, plan: Plan, initial: Initial, hidden: Tensor, own: Tensor | None) -> Macrostate:
        """That of a pass: rows of the output, or own ones where its type is narrower than the state type."""
        first = initial.microstates if plan.first_slots > 0 else None
        if first is not None:
            first = contiguous(first)
        return cls(first, hidden, plan.first_kept, plan.config.k_att) if own is None else cls(first, own, 0, 1)

    def take(self, slots: Tensor) -> Tensor:
        """The microstates of slots [B, U]: [B, U, n]."""
        first_slots = 0 if self.first is None else self.first.shape[1]
        if self.first is not None and len(self.rows) <= self.begin:  # none was kept
            return _take(self.first, slots)
        row = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        at = self.begin + (slots - first_slots).clamp(min=0) * self.stride
        found = self.rows.flatten(0, 1).index_select(0, (at * len(slots) + row).flatten()).view(*slots.shape, -1)
        if self.first is None:
            return found
        before = _take(self.first, slots.clamp(max=first_slots - 1)).to(found.dtype)
        return torch.where((slots < first_slots).unsqueeze(-1), before, found)


class Kept(NamedTuple):
    """What the first run leaves for the second; None where a configuration does not have it."""

    hidden: Tensor
    """The output."""
    h: Tensor
    """Before each span, [spans, B, n]."""
    c: Tensor | None
    keys: Tensor | None
    """Of all slots, [B, S, d]."""
    selected: Tensor | None
    """Slots of the whole sequence, [T, B, k_top]; otherwise -1."""
    counts: Tensor | None
    """How many slots from before it a span reads at most in a row, [spans]; None where that is not asked."""
    own: Tensor | None
    """The microstates in the state type, where the output's is narrower, [S - F, B, n]."""


class Found(NamedTuple):
    """The results of the first run, or their gradients."""

    hidden: Tensor | None
    h: Tensor | None
    """After each row's last step, as c."""
    c: Tensor | None
    keys: Tensor | None
    live: Tensor | None
    reads: Tensor | None


class InPlace:
    """The macrostate of the first run where a step may select any slot: in one buffer for all spans.

    Its microstates come first, then a span's hidden states, from which the new ones move to the others' end.
    """

    def __init__(self, plan: Plan, initial: Initial, keys: Tensor, longest: int, dtype: torch.dtype):
        self.plan, self.keys = plan, keys
        self.store = keys.new_empty((plan.slots + 1 + longest, plan.batch, plan.n), dtype=dtype)
        if initial.microstates is not None:
            self.store[: plan.first_slots] = initial.microstates.transpose(0, 1)

    def before(self, span: Span, h: Tensor | None, c: Tensor | None) -> tuple[Initial, Room | None]:
        """What a span begins with."""
        return Initial(h, c), Room(self.store[: span.slots + 1 + span.steps], self.keys)

    def after(self, span: Span, found: Results) -> Tensor:
        """Take over what a span kept; what it selected, by slots of the whole sequence."""
        assert found.selected is not None
        if span.new > 0:
            self.store[span.slots : span.slots + span.new] = span.kept(found.store, self.plan).clone()
        return found.selected


class Listed:
    """The same where few of the slots can be selected: a bounded macrostate's, or the best where keys alone decide.

    A span begins with a copy of these.
    """

    def __init__(self, plan: Plan, initial: Initial, keys: Tensor, macrostate: Macrostate, lengths: Tensor | None):
        self.plan, self.keys, self.macrostate, self.lengths = plan, keys, macrostate, lengths
        self.slots = torch.arange(plan.first_slots, device=keys.device).expand(plan.batch, -1)
        self.live: Tensor | None = None
        self.reads = initial.reads
        self.lists: list[Tensor | None] = []
        """Slots and counts of reads before each span."""

    def before(self, span: Span, h: Tensor | None, c: Tensor | None) -> tuple[Initial, Room | None]:
        """What a span begins with."""
        k_top = self.plan.config.k_top
        if not self.plan.config.forgets and self.slots.shape[1] > k_top:
            scores = _take(self.keys, self.slots).squeeze(-1)
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k_top]
            self.slots = self.slots.gather(1, best.sort(dim=1).values)
        self.lists += [self.slots, self.reads]
        return listed(self.slots, self.reads, self.macrostate, self.keys, h, c), None

    def after(self, span: Span, found: Results) -> Tensor:
        """Take over what a span kept; what it selected, by slots of the whole sequence."""
        assert found.selected is not None
        assert found.keys is not None
        self.keys[:, span.slots : span.slots + span.new] = found.keys[:, self.slots.shape[1] :]
        newest = torch.arange(span.slots, span.slots + span.new, device=self.keys.device)
        slots = torch.cat([self.slots, newest.expand(self.plan.batch, -1)], dim=1)
        selected = _numbered(slots, found.selected.transpose(0, 1).flatten(1))
        self.slots = slots
        if found.live is not None:
            live = self._of_last(span, _numbered(slots, found.live), self.live, -1)
            self.live, self.slots = live, live.clamp(min=0)  # a row with fewer has ended
            self.reads = None if found.reads is None else self._of_last(span, found.reads, self.reads, 0)
        return selected.view(self.plan.batch, span.steps, -1).transpose(0, 1)

    def _of_last(self, span: Span, now: Tensor, before: Tensor | None, nothing: int) -> Tensor:
        """What a span left [B, N], and in rows that had ended what there was before it."""
        if self.lengths is None or before is None:
            return now
        before = F.pad(before, (0, now.shape[1] - before.shape[1]), value=nothing)
        return torch.where((self.lengths > span.first).unsqueeze(1), now, before)


def _numbered(slots: Tensor, chosen: Tensor) -> Tensor:
    """Of slots [B, S] those of these places [B, ..]; -1 where the place is."""
    last = slots.shape[1]
    return F.pad(slots, (0, 1), value=-1).gather(1, torch.where(chosen < 0, last, chosen).long())


def listed(
    slots: Tensor, reads: Tensor | None, macrostate: Macrostate, keys: Tensor, h: Tensor | None, c: Tensor | None
) -> Initial:
    """The state that has only these slots [B, U]."""
    if slots.shape[1] == 0:
        return Initial(h, c)
    return Initial(h, c, macrostate.take(slots), _take(keys, slots), reads)


def _place(of_slots: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, d] as [B * S, d], and the rows of that with slots [B, U]."""
    row = torch.arange(len(slots), device=of_slots.device).unsqueeze(1)
    return of_slots.view(-1, of_slots.shape[2]), (row * of_slots.shape[1] + slots.to(of_slots.device)).flatten()


def _take(of_slots: Tensor, slots: Tensor) -> Tensor:
    """Of [B, S, d] what belongs to slots [B, U], on their device: [B, U, d]."""
    rows, place = _place(of_slots, slots)
    return rows.index_select(0, place).view(*slots.shape, -1).to(slots.device)


def _add(sums: Tensor, slots: Tensor, values: Tensor) -> None:
    """Add values [B, U, d] to the slots [B, U] of sums [B, S, d]."""
    rows, place = _place(sums, slots)
    rows.index_add_(0, place, values.to(sums.device).flatten(0, 1))


def chosen(selected: Tensor, slots: int) -> Tensor:
    """Which of the first `slots` ones were selected [L, B, k] in some step, [B, slots]."""
    before = torch.where((selected >= 0) & (selected < slots), selected, slots).long()
    found = torch.zeros(selected.shape[1], slots + 1, dtype=torch.bool, device=selected.device)
    return found.scatter_(1, before.transpose(0, 1).flatten(1), True)[:, :slots]


def list_of(is_chosen: Tensor, size: int) -> Tensor:
    """The chosen slots of each row, in their order, [B, size]; filled up with others.

    What no step selected is not selected again, so any others will do.
    """
    others = ~is_chosen
    is_listed = is_chosen | (others & (others.cumsum(1) <= size - is_chosen.sum(1, keepdim=True)))
    place = torch.where(is_listed, is_listed.cumsum(1) - 1, size)
    found = place.new_zeros(len(place), size + 1)
    every = torch.arange(place.shape[1], device=place.device).expand(len(place), -1)
    return found.scatter_(1, place, every)[:, :size]


def _off_device(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the CPU; on the CPU, and in a CUDA graph, which cannot wait, the tensor itself."""
    if not tensor.is_cuda or torch.cuda.is_current_stream_capturing():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


def _ends(before: tuple[Any, Any], span: Span, lengths: Tensor | None, found: Results) -> tuple[Any, Any]:
    """The states after each row's last step in this span, or before."""
    if lengths is None:
        return found.store[-1], None if found.c is None else found.c[-1]
    row = torch.arange(len(lengths), device=lengths.device)
    at, slots = (lengths - span.first).clamp(0, span.steps), len(found.store) - 1 - span.steps
    ends = found.store[slots + at, row], None if found.c is None else found.c[at, row]
    if span.first == 0:
        return ends
    goes_on = (lengths > span.first).unsqueeze(1)
    h, c = (None if end is None else torch.where(goes_on, end, old) for end, old in zip(ends, before, strict=True))
    return h, c


def _run_first(
    given: Given, initial: Initial, parameters: Parameters, options: Options, offload: bool
) -> tuple[Found, Kept, list[Tensor | None]]:
    """Run all spans: the results, what is kept, and the lists that the spans of a bounded macrostate begin with."""
    plan = operation._plan(given, initial, parameters, options)
    config, spans = plan.config, spans_of(plan)
    kept_type, dtype, new = state_type(options.compute), parameters.w_hh.dtype, given.x.new_empty
    size = plan.batch, plan.n
    hidden = new((plan.steps, *size), dtype=dtype)
    starts = new((len(spans), *size), dtype=kept_type)
    cells = torch.empty_like(starts) if CELLS[plan.cell].has_c else None
    keys = selected = own = memory = None
    if config.k_top > 0:
        keys = new((plan.batch, plan.slots, plan.key_size), dtype=options.compute)
        if initial.keys is not None:
            keys[:, : plan.first_slots] = initial.keys
        selected = new((plan.steps, plan.batch, config.k_top), dtype=torch.int32)
        own = None if dtype == kept_type else new((plan.slots - plan.first_slots, *size), dtype=kept_type)
        if config.forgets or (plan.is_affine and config.forward == "sparse"):
            memory = Listed(plan, initial, keys, Macrostate.of(plan, initial, hidden, own), given.lengths)
        else:
            memory = InPlace(plan, initial, keys, spans[0].steps, kept_type)
    counts: list[Tensor] = []
    h, c, ends = initial.h, initial.c, (None, None)
    for number, span in enumerate(spans):
        fill(starts[number], h)
        if cells is not None:
            fill(cells[number], c)
        now, room = (Initial(h, c), None) if memory is None else memory.before(span, h, c)
        at = options._replace(seen=options.seen + span.first)
        outputs = operation._forward(span.part(given), now, parameters, at, False, room)
        found = Results.of(outputs, plan.cell, config)
        del outputs
        hidden[span.all] = found.hidden
        ends = _ends(ends, span, given.lengths, found)
        h, c = found.store[-1].clone(), None if found.c is None else found.c[-1].clone()
        if own is not None and span.new > 0:
            own[span.slots - plan.first_slots :][: span.new] = span.kept(found.store, plan)
        if memory is None or selected is None:
            continue
        selected[span.all] = memory.after(span, found)
        if _reads_selected(config):
            counts.append(chosen(selected[span.all], span.slots).sum(1).amax())
    h_end, c_end = (None if end is None else end.to(dtype, copy=True) for end in ends)
    live = reads = None
    lists: list[Tensor | None] = []
    if isinstance(memory, Listed) and config.forgets:
        live, reads, lists = memory.live, memory.reads, memory.lists
    if offload:
        keys, selected = (None if tensor is None else _off_device(tensor) for tensor in (keys, selected))
    kept = Kept(hidden, starts, cells, keys, selected, torch.stack(counts) if counts else None, own)
    return Found(hidden, h_end, c_end, keys, live, reads), kept, lists


def _reads_selected(config: SABConfig) -> bool:
    """Whether a span is run again with the slots that it selected: the others can make no difference."""
    return config.k_top > 0 and config.forward == "sparse" and not config.forgets


class Backward:
    """The second run: of each span, the last one first, the forward and the backward loop."""

    def __init__(
        self,
        call: tuple[Given, Initial, Parameters, Options],
        kept: Kept,
        lists: list[Tensor | None],
        gradients: Found,
        names: list[str],
    ):
        self.given, self.initial, self.parameters, self.options = call
        self.kept, self.lists, self.outside = kept, lists, gradients
        self.plan = plan = operation._plan(*call)
        self.dtype = kept.h.dtype
        self.macrostate = Macrostate.of(plan, self.initial, kept.hidden, kept.own)
        self.spans = spans_of(plan)
        self.parts = [name for name in names if name not in Initial._fields]
        """Of what each span brings a gradient: x, and parameters."""
        self.dx = torch.empty_like(self.given.x) if "x" in names else None
        self.sums: dict[str, Tensor] = {}
        self.dh = kept.h.new_zeros(plan.batch, plan.n)
        """Of the state after the present span."""
        self.dc = None if kept.c is None else torch.zeros_like(self.dh)
        self.dmicrostates = self.dkeys = None
        if kept.keys is not None:
            home: Any = {"dtype": self.dtype, "device": kept.keys.device, "pin_memory": kept.keys.is_pinned()}
            self.dmicrostates = torch.zeros(plan.batch, plan.slots, plan.n, **home)
            self.dkeys = torch.zeros(kept.keys.shape, **home)
            if gradients.keys is not None:
                self.dkeys.copy_(gradients.keys)

    def run(self) -> dict[str, Tensor | None]:
        """The gradients, by the names of the inputs."""
        sizes, is_reached = self._look_ahead()
        for number in reversed(range(len(self.spans))):
            self._run_span(number, sizes[number], is_reached[number])
        first = self.plan.first_slots
        of_states: dict[str, Tensor | None] = {"h": self.dh, "c": self.dc}
        for name, sums in (("microstates", self.dmicrostates), ("keys", self.dkeys)):
            of_states[name] = None if sums is None else sums[:, :first].to(self.given.x.device)
        return {"x": self.dx} | of_states | self.sums

    def _look_ahead(self) -> tuple[list[int], list[bool]]:
        """For all spans how many slots each is given, and whether the output's gradient reaches it: asked at once,
        since a GPU is waited for."""
        spans, kept, config = self.spans, self.kept, self.plan.config
        if self.given.x.is_cuda and torch.cuda.is_current_stream_capturing():
            most = [min(span.slots, span.steps * config.k_top) for span in spans]
            return most, [True] * len(spans)
        sizes = [span.slots for span in spans] if kept.counts is None else kept.counts.tolist()
        if self.outside.hidden is None:
            return sizes, [False] * len(spans)
        reached = torch.stack([self.outside.hidden[span.all].any() for span in spans])
        return sizes, reached.tolist()

    def _run_span(self, number: int, size: int, is_reached: bool) -> None:
        span, kept = self.spans[number], self.kept
        slots = reads = None
        if kept.keys is not None:
            slots, reads = self._slots(number, span, size)
        outside = self._outside(span, 0 if slots is None else slots.shape[1])
        if not is_reached and not any(one is not None and bool(one.any()) for one in outside):
            self._stop(span)
            return
        now = Initial(kept.h[number], None if kept.c is None else kept.c[number])
        if slots is not None and kept.keys is not None:
            now = listed(slots, reads, self.macrostate, kept.keys, now.h, now.c)
        names = [*self.parts, "h", *(name for name in ("c", "microstates", "keys") if getattr(now, name) is not None)]
        at = self.options._replace(seen=self.options.seen + span.first)
        part = span.part(self.given)
        saved = operation._forward(part, now, self.parameters, at, True)[1:]
        del now  # copies
        needs = [name in names for name in INPUTS]
        how: Any = {"is_last": True, "owns_outside": True, "dtype": self.dtype}
        found = operation._backward(outside, part, self.parameters, saved, at, needs, **how)
        by_name = dict(zip([name for name in INPUTS if name in names], found, strict=True))
        self.dh, self.dc = by_name.pop("h"), by_name.pop("c", None)
        if slots is not None and "microstates" in by_name:
            assert self.dmicrostates is not None
            assert self.dkeys is not None
            _add(self.dmicrostates, slots, by_name.pop("microstates"))
            _add(self.dkeys, slots, by_name.pop("keys"))
        if self.dx is not None:
            self.dx[span.all] = by_name.pop("x")
        for name, gradient in by_name.items():
            if name in self.sums:
                self.sums[name] += gradient
            else:
                self.sums[name] = gradient

    def _slots(self, number: int, span: Span, size: int) -> tuple[Tensor, Tensor | None]:
        """The slots that a span is given, [B, U], and counts of their reads."""
        config, device = self.plan.config, self.given.x.device
        if config.forgets:
            slots, reads = self.lists[2 * number : 2 * number + 2]
            assert slots is not None
            return slots, reads
        if not _reads_selected(config):
            return torch.arange(span.slots, device=device).expand(self.plan.batch, -1), None
        assert self.kept.selected is not None
        selected = self.kept.selected[span.all].to(device)
        return list_of(chosen(selected, span.slots), size), None

    def _outside(self, span: Span, slots: int) -> Outside:
        """The gradients that come to a span from outside and from later ones; it begins with so many slots."""
        outside, size = self.outside, self.dh.shape
        dstore = self.dh.new_zeros(slots + 1 + span.steps, *size)
        dcells = None if self.dc is None else self.dc.new_zeros(1 + span.steps, *size)
        dkeys = None
        if outside.hidden is not None:
            dstore[slots + 1 :] = outside.hidden[span.all]
        if self.dkeys is not None and self.dmicrostates is not None:
            new = slice(span.slots, span.slots + span.new)
            dkeys = self.dkeys.new_zeros(len(self.dkeys), slots + span.new, self.dkeys.shape[2], device=self.dh.device)
            dkeys[:, slots:].copy_(self.dkeys[:, new])
            if span.new > 0:
                span.kept(dstore, self.plan).add_(self.dmicrostates[:, new].transpose(0, 1).to(self.dh.device))
        for later, end, into, first in ((self.dh, outside.h, dstore, slots), (self.dc, outside.c, dcells, 0)):
            if into is None or later is None:
                continue
            into[-1] += later
            if end is not None:
                self._add_end(span, into[first:], end)
        return Outside(None, dstore, dcells, dkeys, None, None)

    def _add_end(self, span: Span, into: Tensor, end: Tensor) -> None:
        """Add the gradient of the states after each row's last step, [B, n], to that of the states of a span."""
        lengths = self.given.lengths
        if lengths is None:
            if span.first + span.steps == self.plan.steps:
                into[-1] += end
            return
        at = (lengths - span.first).clamp(0, span.steps)
        is_here = (lengths > span.first) & (lengths <= span.first + span.steps)
        row = torch.arange(len(lengths), device=lengths.device)
        into[at, row] += torch.where(is_here.unsqueeze(1), end, 0.0)

    def _stop(self, span: Span) -> None:
        """What a span leaves that no gradient reaches."""
        self.dh.zero_()
        if self.dc is not None:
            self.dc.zero_()
        if self.dx is not None:
            self.dx[span.all] = 0


class _Recomputed(torch.autograd.Function):
    """The operation, span by span, as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, options: Options, offload: bool, *tensors: Tensor | None) -> Found:
        given, initial, parameters = split(tensors, (Given, Initial, Parameters))
        with torch_private.below_autograd():
            found, kept, lists = _run_first(given, initial, parameters, options, offload)
        ctx.options = options
        ctx.save_for_backward(*given, *initial, *parameters, *kept, *lists)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[one for one in (found.live, found.reads) if one is not None])
        return tuple(found)  # pyright: ignore[reportReturnType]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch_private.are_transforms_active() or torch_private.are_batched(gradients):
            raise UserValueError(
                "recompute must be False for several backwards at once (is_grads_batched).", "recompute"
            )
        saved, kinds = ctx.saved_tensors, (Given, Initial, Parameters, Kept)
        *call, kept = split(saved, kinds)
        lists = [*saved[sum(len(kind._fields) for kind in kinds) :]]
        names = [name for name, needed in zip(INPUTS, ctx.needs_input_grad[2:], strict=True) if needed]
        with torch.no_grad(), torch_private.below_autograd():
            found = Backward((*call, ctx.options), kept, lists, Found(*gradients), names).run()
            results = []
            for name, tensor in zip(INPUTS, saved, strict=False):
                gradient = found.get(name)
                if name in names:
                    gradient = torch.zeros_like(tensor) if gradient is None else gradient.to(tensor.dtype)
                results.append(gradient if name in names else None)
        if torch.is_grad_enabled():  # for a second derivative
            anchors = [one for one in (*gradients, *saved) if one is not None and one.requires_grad]
            results = _Once.apply(len(results), *results, *anchors)
        return (None, None, *results)


_record = torch_private.bare_apply(_Recomputed)


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(operation.NO_SECOND_DERIVATIVE)
