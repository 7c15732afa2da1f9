"""The operation `sab::recurrence`: one layer in one direction over a sequence, as one node of PyTorch's graphs.

What does not depend on the device is here: the buffers, the input's part of the gates before the loop over time, the
weights' gradients after it, each a single matrix product. The two loops over time are an engine's: a module with
`forward(plan, weights, buffers)` and `backward(plan, weights, buffers, work)` that fill what they are given, and
`pack(plan, weights, compute)`, which gives the weights as both loops read them, or None, and `overwrites_gates(plan)`,
whether the backward loop may find `dgates` in the place of `gates`. For small sizes a call's time
is that of its small operations on tensors, not of the loops, so none is made that can be spared: what few look at is
made when it is asked for, and only engines that need it fill buffers before their loops.

Time comes first in every buffer but `keys`. The compute type is that of products; the state type is the same but for
bfloat16, where sums over many steps are kept in float32.

| buffer | where there is one | shape | before the forward loop | after it |
|---|---|---|---|---|
| store | always | [F + 1 + T, B, n] | F microstates, then the initial h | and the T hidden states |
| c | LSTM | [T + 1, B, n] | the initial c | and the T cell states |
| gates | always | [T, B, G] compute type | the input's part | activated |
| hidden_new | GRU | [T, B, n] compute type | | W_hn h + b_hn |
| h_hat | always | [T, B, n] | | provisional hidden states |
| query | mlp, dot | [T, B, d] | | what is scored against the keys |
| keys | k_top > 0 | [B, S, d] compute type | those of the first F slots | all |
| weights | k_top > 0 | [T, B, k_top] | | of the selected, else 0 |
| selected | k_top > 0 | [T, B, k_top] int32 | | slots, else -1 |
| norms | relu_norm | [T, B] | | divisor of relu_norm |
| summary | k_top > 0 | [T, B, n] | | what was read, else 0 |
| packed | where the engine packs | its own | the weights | |
| lengths | where rows end early | [B] int64 on the device | where rows end | |

A microstate is not copied: that of slot s is row s of `store` for the first F slots, and else the row of the hidden
state it is. Past its end a row is 0 in every buffer, and has selected nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.config import DEFAULT_SCORER, SABConfig
from sab.ops.types import LayerResult, LayerState, LayerWeights
from sab.parts.scorers import ScorerWeights
from sab.state import Attention

ENGINES = {"cpu": "sab.ops.cpu.engine", "triton": "sab.ops.triton.engine"}
"""The modules that run the loops over time, by name."""
AFFINE = ("affine", "affine_tanh")
"""The scorers whose keys are numbers, and decide alone what is selected."""
TYPES = (torch.float32, torch.float64, torch.bfloat16)
"""What the operation computes in; an engine may do without some."""
_DEVICES = ("cuda", "cpu")
_engines: dict[str, Any] = {}


@dataclass(frozen=True)
class Plan:
    """What a pass does, besides its tensors."""

    cell: str
    config: SABConfig
    seen: int
    """How many steps all rows have seen before."""
    steps: int
    batch: int
    n: int
    key_size: int
    first_slots: int
    """How many microstates there are before the first step."""
    slots: int
    """How many there are after the last."""

    @property
    def is_affine(self) -> bool:
        """Whether keys are numbers, and decide alone what is selected."""
        return self.config.k_top > 0 and self.config.scorer in AFFINE

    @property
    def first_kept(self) -> int:
        """The first step, from 0, whose hidden state is kept."""
        return self.config.k_att - 1 - self.seen % self.config.k_att

    @property
    def first_read(self) -> int:
        """The first step, from 0, that has something to read; it may lie past the last."""
        return 0 if self.first_slots > 0 or self.config.k_top == 0 else self.first_kept + 1

    def keeps(self, t: int) -> bool:
        """Whether the hidden state of step t is kept."""
        return self.config.k_top > 0 and (self.seen + t + 1) % self.config.k_att == 0

    def cut_before(self, t: int) -> bool:
        """Whether no gradient flows from step t along the chain to the one before."""
        seen, k_trunc = self.seen + t, self.config.k_trunc
        return k_trunc is not None and seen > 0 and seen % k_trunc == 0

    def slots_at(self, t: int) -> int:
        """How many slots are in use when step t reads."""
        k_att = self.config.k_att
        return self.first_slots + (self.seen + t) // k_att - self.seen // k_att if self.config.k_top > 0 else 0


class Weights(NamedTuple):
    """What the loops need of a layer's parameters, as they are; None where there is none."""

    w_hh: Tensor
    b_hh: Tensor | None
    """Already in the gates but for the GRU."""
    w_memory: Tensor | None
    w_query: Tensor | None
    scorer_bias: Tensor | None
    v: Tensor | None
    w_incorporate: Tensor | None
    b_incorporate: Tensor | None


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device; the device `meta` has none."""
    return (device in _DEVICES or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)


def compute_type(x: Tensor, weights: LayerWeights) -> torch.dtype:
    """The type of the products: the layer's, or autocast's."""
    dtype, device = weights.w_hh.dtype, x.device.type
    if dtype != torch.float64 and is_autocast(device):
        return torch.get_autocast_dtype(device)
    return dtype


def state_type(compute: torch.dtype) -> torch.dtype:
    """The type of what is summed over many steps."""
    return torch.float32 if compute == torch.bfloat16 else compute


def allow_tf32() -> bool:
    """Whether CUDA may round the factors of float32 products to TF32: what PyTorch is set to for cuDNN's own RNNs.

    The older `torch.backends.cudnn.allow_tf32` sets this as well, but raises when read after the newer setting.
    """
    return torch.backends.cudnn.rnn.fp32_precision == "tf32"  # pyright: ignore[reportAttributeAccessIssue]


def unsupported(x: Tensor, state: LayerState | None, weights: LayerWeights) -> str | None:
    """Why no engine can run a configuration, or None where one may."""
    compute = compute_type(x, weights)
    if compute not in TYPES:
        return f"it does not compute in {compute}"
    dtype, device = weights.w_hh.dtype, x.device
    for weight in (*weights, *weights.scorer):
        if isinstance(weight, Tensor) and (weight.dtype != dtype or weight.device != device):
            return "the parameters differ from the input in type or device"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "function transforms are active"
    if state is not None and state.seen is None:
        return "the rows of the state have seen different numbers of steps"
    return None


def run(
    engine: str,
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """As `reference.run`, with the loops of an engine; all rows must have seen the same number of steps."""
    seen = 0 if state is None else state.seen
    assert seen is not None
    scorer = weights.scorer if config.k_top > 0 else ScorerWeights()
    tensors = (x, *(_FRESH if state is None else state[:4]), *weights[:4], *scorer, *weights[5:])
    saves = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    scorer_name = config.scorer if isinstance(config.scorer, str) else DEFAULT_SCORER  # a callable: there is no memory
    device_lengths = None if lengths is None else lengths.to(x.device, non_blocking=True)
    tensors: tuple[Any, ...] = (x, device_lengths, *tensors[1:])
    options = (
        engine,
        cell_name,
        scorer_name,
        config.weighting,
        config.forward,
        config.incorporate,
        config.k_top,
        config.k_att,
        config.k_trunc or 0,
        seen,
        compute_type(x, weights),
        saves,
    )
    if not _is_plain(tensors):
        outputs = torch.ops.sab.recurrence.default(*tensors, *options)
    elif saves:
        outputs = _Recurrence.apply(None, options, *tensors)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            outputs = _forward(*tensors, *options)  # pyright: ignore[reportCallIssue]
    hidden, store, *others = outputs
    c = others.pop(0) if cell_name == "lstm" else None
    keys, attended, selected, summary = others[:4] if config.k_top > 0 else (None, None, None, None)
    after = _After(x.shape[0], x.shape[1], config, state, seen, lengths, device_lengths, weights.w_hh.dtype)
    return LayerResult(
        hidden, partial(after.state, store, c, keys), partial(after.attention, store, selected, attended, summary)
    )


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd would see a call of the operation.

    Then what it does can be called directly: for so many arguments each way through PyTorch's dispatcher takes longer
    than many an operation itself.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return tensors[0].device.type in _DEVICES


class _After(NamedTuple):
    """What the operation leaves, as the layers show it."""

    steps: int
    batch: int
    config: SABConfig
    before: LayerState | None
    seen: int
    lengths: Tensor | None
    device_lengths: Tensor | None
    dtype: torch.dtype

    @property
    def first_slots(self) -> int:
        return 0 if self.before is None else self.before.numbers.shape[1]

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The numbers of all slots [B, S], and which of them come after their row's end."""
        k_att, seen, late = self.config.k_att, self.seen, None
        last = (seen + self.steps) // k_att if self.config.k_top > 0 else seen // k_att
        numbers = torch.arange(seen // k_att, last, device=device).expand(self.batch, -1).contiguous()
        if self.device_lengths is not None:
            late = F.pad((numbers + 1) * k_att - seen > self.device_lengths.unsqueeze(1), (self.first_slots, 0))
        if self.before is not None and self.first_slots > 0:
            numbers = torch.cat([self.before.numbers, numbers], dim=1)
        return numbers, late

    def state(self, store: Tensor, c: Tensor | None, keys: Tensor | None) -> LayerState:
        """The state after the last step. It holds no part of `store`, only copies."""
        before, first_slots, seen, k_att = self.before, self.first_slots, self.seen, self.config.k_att
        numbers, late = self.numbers(store.device)
        if keys is None:
            keys = store.new_zeros(self.batch, 0, 0)  # there is no memory
        keys = keys.to(self.dtype)
        first_kept = first_slots + k_att - seen % k_att if self.config.k_top > 0 else len(store)
        microstates = [store[first_kept::k_att].transpose(0, 1).to(self.dtype)]
        if before is not None and first_slots > 0:
            microstates.insert(0, before.microstates)
        steps = torch.zeros(self.batch, dtype=torch.int64, device="cpu") if before is None else before.steps
        if self.lengths is None or self.device_lengths is None or late is None:
            h, c = (None if states is None else states[-1].to(self.dtype, copy=True) for states in (store, c))
            steps = steps + self.steps
        else:
            row = torch.arange(self.batch, device=store.device)
            h = store[first_slots + self.device_lengths, row].to(self.dtype)
            c = None if c is None else c[self.device_lengths, row].to(self.dtype)
            numbers, keys = numbers.masked_fill(late, -1), keys.masked_fill(late.unsqueeze(-1), 0.0)
            steps = steps + self.lengths
        assert h is not None
        return LayerState(h, c, torch.cat(microstates, dim=1), keys, numbers, steps)

    def attention(
        self, store: Tensor, selected: Tensor | None, weights: Tensor | None, summary: Tensor | None
    ) -> Attention:
        """What each step selected, by number."""
        if selected is None or weights is None or summary is None:
            nothing = store.new_zeros(self.steps, self.batch, 0, dtype=self.dtype)
            return Attention(nothing.long(), nothing, store.new_zeros(self.steps, *store.shape[1:], dtype=self.dtype))
        first_number = self.seen // self.config.k_att
        if self.first_slots > 0:
            numbers, _ = self.numbers(store.device)
            slot = selected.transpose(0, 1).flatten(1).long() % (numbers.shape[1] + 1)
            chosen = F.pad(numbers, (0, 1), value=-1).gather(1, slot)
            chosen = chosen.view(self.batch, self.steps, self.config.k_top).transpose(0, 1)
        else:
            chosen = selected.long()
            if first_number > 0:
                chosen = torch.where(chosen < 0, -1, chosen + first_number)
        return Attention(chosen, weights.to(self.dtype), summary.to(self.dtype))


_PARAMETERS = """Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh,
    Tensor? w_memory, Tensor? w_query, Tensor? scorer_bias, Tensor? v, Tensor? w_incorporate, Tensor? b_incorporate"""
_OPTIONS = """str engine, str cell, str scorer, str weighting, str forward, str incorporate,
    int k_top, int k_att, int k_trunc, SymInt seen, ScalarType compute"""
_FRESH = (None, None, None, None)
"""The initial state where there is none: zeros and an empty memory."""
_INPUTS = 16
"""How many of the operation's arguments are tensors."""
_PLAIN = (torch.nn.Parameter, type(None), Tensor)
"""The types of arguments that are nothing but tensors."""
_H, _MICROSTATES, _B_IH = 2, 4, 8
"""Where these come among them."""
_GRADIENTS = ("hidden", "store", "c", "keys", "weights", "summary")
"""The outputs that have gradients; those of c are, like those of `store`, of the states after each step."""


@lru_cache(maxsize=256)
def _outputs(cell: str, scorer: str, weighting: str, k_top: int, saves: bool) -> tuple[str, ...]:
    """What the operation gives: what is seen outside first, then what the backward needs besides.

    `packed` comes last, as only some engines have it.
    """
    has_memory = k_top > 0
    seen = {"hidden": True, "store": True, "c": cell == "lstm"}
    seen |= dict.fromkeys(("keys", "weights", "selected", "summary"), has_memory)
    saved = {
        "gates": True,
        "hidden_new": cell == "gru",
        "h_hat": True,
        "query": has_memory and scorer not in AFFINE,
        "norms": has_memory and weighting == "relu_norm",
        "packed": True,
    }
    return tuple(name for name, is_there in (seen | (saved if saves else {})).items() if is_there)


# `saves` tells whether a backward may follow; without it there is no gradient and nothing is kept for one.
_library = torch.library.Library("sab", "DEF")
_library.define(
    f"recurrence(Tensor x, Tensor? lengths, Tensor? h, Tensor? c, Tensor? microstates, Tensor? keys, {_PARAMETERS}, "
    f"{_OPTIONS}, bool saves) -> Tensor[]"
)
_library.define(
    f"recurrence_backward({', '.join(f'Tensor? d_{name}' for name in _GRADIENTS)}, "
    f"Tensor x, Tensor? lengths, {_PARAMETERS}, Tensor[] buffers, {_OPTIONS}, bool[] needs) -> Tensor[]"
)


def _forward(
    x: Tensor,
    lengths: Tensor | None,
    h: Tensor | None,
    c: Tensor | None,
    microstates: Tensor | None,
    keys: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_memory: Tensor | None,
    w_query: Tensor | None,
    scorer_bias: Tensor | None,
    v: Tensor | None,
    w_incorporate: Tensor | None,
    b_incorporate: Tensor | None,
    engine: str,
    cell: str,
    scorer: str,
    weighting: str,
    forward: str,
    incorporate: str,
    k_top: int,
    k_att: int,
    k_trunc: int,
    seen: int,
    compute: torch.dtype,
    saves: bool,
) -> list[Tensor]:
    config = _config(scorer, weighting, forward, incorporate, k_top, k_att, k_trunc)
    plan = _plan(x, microstates, w_hh, w_memory, cell, config, seen)
    weights = Weights(w_hh, b_hh, w_memory, w_query, scorer_bias, v, w_incorporate, b_incorporate)
    loops = engine_named(engine)
    first_slots = plan.first_slots
    with _products(x, compute):
        buffers = _allocate(x, plan, compute)
        # The GRU's reset gate acts on its hidden bias, so only there the two biases do not simply add up.
        bias = b_ih if b_ih is None or b_hh is None or cell == "gru" else b_ih + b_hh
        bias = None if bias is None else _as(bias, compute)
        buffers["gates"] = F.linear(contiguous(_as(x, compute)), _as(w_ih, compute), bias)
        store = buffers["store"]
        if first_slots > 0:
            store[:first_slots] = microstates.transpose(0, 1)  # pyright: ignore[reportOptionalMemberAccess]
            buffers["keys"][:, :first_slots] = keys
        _set(store[first_slots], h)
        if cell == "lstm":
            _set(buffers["c"][0], c)
        packed = loops.pack(plan, weights, compute)
        if packed is not None:
            buffers["packed"] = packed
        if lengths is not None:
            buffers["lengths"] = lengths
        loops.forward(plan, weights, buffers)
        # A copy, so that whoever changes the output in place changes neither the state nor what the backward reads.
        buffers["hidden"] = store[first_slots + 1 :].to(w_hh.dtype, copy=True)
    return [buffers[name] for name in _outputs(cell, scorer, weighting, k_top, saves) if name in buffers]


def _fake_forward(*arguments: Any) -> list[Tensor]:
    x, _, _, _, microstates, _, w_ih, w_hh, _, b_hh, w_memory, *others = arguments[:_INPUTS]
    engine, cell, scorer, weighting, forward, incorporate, *numbers, seen, compute, saves = arguments[_INPUTS:]
    config = _config(scorer, weighting, forward, incorporate, *numbers)
    plan = _plan(x, microstates, w_hh, w_memory, cell, config, seen)
    buffers = _allocate(x, plan, compute)
    buffers["gates"] = x.new_empty(*x.shape[:2], w_ih.shape[0], dtype=compute)
    buffers["hidden"] = x.new_empty(plan.steps, plan.batch, plan.n, dtype=w_hh.dtype)
    packed = engine_named(engine).pack(plan, Weights(w_hh, b_hh, w_memory, *others), compute)
    if packed is not None:
        buffers["packed"] = packed
    return [buffers[name] for name in _outputs(cell, scorer, weighting, config.k_top, saves) if name in buffers]


def _plan(
    x: Tensor,
    microstates: Tensor | None,
    w_hh: Tensor,
    w_memory: Tensor | None,
    cell: str,
    config: SABConfig,
    seen: int,
) -> Plan:
    (steps, batch, _), k_att = x.shape, config.k_att
    key_size = 0 if w_memory is None else w_memory.shape[0] if w_memory.dim() == 2 else 1
    first_slots = 0 if microstates is None else microstates.shape[1]
    slots = first_slots + ((seen + steps) // k_att - seen // k_att if config.k_top > 0 else 0)
    return Plan(cell, config, seen, steps, batch, w_hh.shape[1], key_size, first_slots, slots)


def _allocate(x: Tensor, plan: Plan, compute: torch.dtype) -> dict[str, Any]:
    """The buffers but for the gates, which a product makes; only their shapes are set."""
    steps, batch, n, k_top = plan.steps, plan.batch, plan.n, plan.config.k_top
    kept = state_type(compute)
    new = x.new_empty
    buffers = {
        "store": new((plan.first_slots + 1 + steps, batch, n), dtype=kept),
        "h_hat": new((steps, batch, n), dtype=kept),
    }
    if plan.cell == "lstm":
        buffers["c"] = new((steps + 1, batch, n), dtype=kept)
    if plan.cell == "gru":
        buffers["hidden_new"] = new((steps, batch, n), dtype=compute)
    if k_top > 0:
        buffers["keys"] = new((batch, plan.slots, plan.key_size), dtype=compute)
        buffers["weights"] = new((steps, batch, k_top), dtype=kept)
        buffers["selected"] = new((steps, batch, k_top), dtype=torch.int32)
        buffers["summary"] = new((steps, batch, n), dtype=kept)
        if not plan.is_affine:
            buffers["query"] = new((steps, batch, plan.key_size), dtype=kept)
        if plan.config.weighting == "relu_norm":
            buffers["norms"] = new((steps, batch), dtype=kept)
    return buffers


def blank(plan: Plan, buffers: dict[str, Any]) -> None:
    """Make the buffers say that nothing was read, for a forward loop that leaves out the steps without a read."""
    if plan.config.k_top == 0:
        return
    buffers["weights"].zero_()
    buffers["selected"].fill_(-1)
    buffers["summary"].zero_()
    # What no loop writes is not left to chance: the same inputs give the same outputs to the last bit.
    if "norms" in buffers:
        buffers["norms"].zero_()
    if "query" in buffers:
        buffers["query"][: plan.first_read].zero_()


def blank_work(work: dict[str, Any], names: tuple[str, ...] = ("dc", "dquery", "dincorporated", "dv")) -> None:
    """As `blank`, for a backward loop that leaves steps out, or adds to what it is given."""
    for name in names:
        if work[name] is not None:
            work[name].zero_()


def _backward(
    d_hidden: Tensor | None,
    d_store: Tensor | None,
    d_c: Tensor | None,
    d_keys: Tensor | None,
    d_weights: Tensor | None,
    d_summary: Tensor | None,
    x: Tensor,
    lengths: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_memory: Tensor | None,
    w_query: Tensor | None,
    scorer_bias: Tensor | None,
    v: Tensor | None,
    w_incorporate: Tensor | None,
    b_incorporate: Tensor | None,
    saved: list[Tensor],
    engine: str,
    cell: str,
    scorer: str,
    weighting: str,
    forward: str,
    incorporate: str,
    k_top: int,
    k_att: int,
    k_trunc: int,
    seen: int,
    compute: torch.dtype,
    needs: list[bool],
    is_last: bool = False,
) -> list[Tensor]:
    """is_last: nobody reads the buffers again."""
    config = _config(scorer, weighting, forward, incorporate, k_top, k_att, k_trunc)
    buffers: dict[str, Any] = dict(zip(_outputs(cell, scorer, weighting, k_top, True)[1:], saved, strict=False))
    store, keys, h_hat, gates = buffers["store"], buffers.get("keys"), buffers["h_hat"], buffers["gates"]
    steps, batch, n = h_hat.shape
    first_slots, kept = len(store) - 1 - steps, store.dtype
    key_size, slots = (0, 0) if keys is None else (keys.shape[2], keys.shape[1])
    plan = Plan(cell, config, seen, steps, batch, n, key_size, first_slots, slots)
    weights = Weights(w_hh, b_hh, w_memory, w_query, scorer_bias, v, w_incorporate, b_incorporate)
    if d_store is None:
        dstore = torch.empty_like(store)
        if needs[_H] or needs[_MICROSTATES]:
            dstore[: first_slots + 1].zero_()
        _set(dstore[first_slots + 1 :], d_hidden)
    else:
        dstore = d_store.clone(memory_format=torch.contiguous_format)
        if d_hidden is not None:
            dstore[first_slots + 1 :] += d_hidden
    loops = engine_named(engine)
    overwrites = is_last and loops.overwrites_gates(plan)
    dgates = gates.view(steps * batch, -1) if overwrites else gates.new_empty((steps * batch, gates.shape[2]))
    work: dict[str, Any] = {
        "dstore": dstore,
        "dc": h_hat.new_empty((batch, n)) if cell == "lstm" else None,
        "dcells": None if d_c is None else contiguous(d_c[1:]),
        "dgates": dgates,
        "dhidden": torch.empty_like(dgates) if cell == "gru" else dgates,
        "dquery": None if keys is None else gates.new_empty((steps * batch, key_size)),
        "dkeys": None,
        "dsummary": None if d_summary is None else contiguous(d_summary),
        "dweights": None if d_weights is None else contiguous(d_weights),
        "dincorporated": None if w_incorporate is None else h_hat.new_empty((steps * batch, n)),
        "dv": None if v is None else h_hat.new_empty((batch, key_size)),
    }
    if keys is not None:
        d_keys = torch.zeros_like(keys, dtype=kept) if d_keys is None else d_keys.to(kept, copy=True)
        work["dkeys"] = contiguous(d_keys)
    if lengths is not None:
        buffers["lengths"] = lengths
    with _products(x, compute):
        loops.backward(plan, weights, buffers, work)
        if not (needs[_H] or needs[_MICROSTATES]):
            work["dstore"] = dstore = None  # the products to come need memory of their own
        return _gradients(plan, x, w_ih, scorer_bias, buffers, work, compute, w_hh.dtype, needs)


def _gradients(
    plan: Plan,
    x: Tensor,
    w_ih: Tensor,
    scorer_bias: Tensor | None,
    buffers: dict[str, Any],
    work: dict[str, Any],
    compute: torch.dtype,
    dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that are needed, from what the loop has left, in the order of the operation's arguments."""
    config, first_slots, steps, batch = plan.config, plan.first_slots, plan.steps, plan.batch
    dstore, dkeys, dgates, dhidden = (work[name] for name in ("dstore", "dkeys", "dgates", "dhidden"))
    store, h_hat = buffers["store"], buffers["h_hat"]
    gradients: list[Tensor] = []
    # Steps without a read have no gradient in these, and no loop says so.
    first = min(plan.first_read, steps)
    h_read = h_hat[first:] if first > 0 else h_hat
    dquery = work["dquery"][first * batch :] if first > 0 else work["dquery"]
    dgates_t = dgates.t()

    def outer(left_t: Tensor, right: Tensor) -> Tensor:
        """Sum over steps and rows of the outer products: [p, T * B] and [T, B, q] to [p, q]."""
        return _product(_as(left_t, compute), _rows(right, compute), dtype)

    def total(gradient: Tensor) -> Tensor:
        return _as(gradient.sum(0, dtype=store.dtype), dtype)

    def b_hh() -> Tensor:
        return gradients[-1].clone() if dhidden is dgates and needs[_B_IH] else total(dhidden)

    def seen(states: Tensor) -> Tensor:
        return torch.tanh(states) if config.scorer == "affine_tanh" else states

    def first_dkeys() -> Tensor:
        if dkeys is None:
            return store.new_zeros((batch, 0, 0), dtype=dtype)
        return dkeys[:, :first_slots].clone(memory_format=torch.contiguous_format).to(dtype)

    def new_dkeys() -> Tensor:
        return dkeys[:, first_slots:] if first_slots > 0 else dkeys

    def w_memory() -> Tensor:
        microstates = store[first_slots + 1 + plan.first_kept :: config.k_att]
        gradient = outer(_rows(new_dkeys().transpose(0, 1), compute).t(), seen(microstates))
        return gradient.squeeze(0) if plan.is_affine else gradient

    def w_query() -> Tensor:
        gradient = outer(dquery.t(), seen(h_read))
        return gradient.squeeze(0) if plan.is_affine else gradient

    def bias() -> Tensor:
        if not plan.is_affine or scorer_bias is None:
            return total(dquery)
        return _at_numbers(new_dkeys(), plan, scorer_bias)

    def dincorporated() -> Tensor:
        return work["dincorporated"][first * batch :]

    def w_incorporate() -> Tensor:
        left_t = dincorporated().t()
        return torch.cat([outer(left_t, h_read), outer(left_t, buffers["summary"][first:])], dim=1)

    formulas: tuple[Any, ...] = (
        lambda: _product(dgates, _as(w_ih, compute), x.dtype).view(x.shape),
        None,
        lambda: dstore[first_slots].to(dtype, copy=True),
        lambda: _as(work["dc"], dtype),
        lambda: dstore[:first_slots].transpose(0, 1).clone(memory_format=torch.contiguous_format).to(dtype),
        first_dkeys,
        lambda: outer(dgates_t, x),
        lambda: outer(dgates_t if dhidden is dgates else dhidden.t(), store[first_slots : first_slots + steps]),
        lambda: total(dgates),
        b_hh,
        w_memory,
        w_query,
        bias,
        lambda: _as(work["dv"].sum(0), dtype),
        w_incorporate,
        lambda: total(dincorporated()),
    )
    for formula, needed in zip(formulas, needs, strict=True):
        if needed:
            gradients.append(formula())
    return gradients


def _fake_backward(*arguments: Any) -> list[Tensor]:
    first, last = len(_GRADIENTS), len(_GRADIENTS) + _INPUTS - len(_FRESH)
    x, lengths, *parameters = arguments[first:last]
    saved, _, cell, scorer, weighting, _, _, k_top = arguments[last : last + 8]
    buffers = dict(zip(_outputs(cell, scorer, weighting, k_top, True)[1:], saved, strict=False))
    steps, batch, n = buffers["h_hat"].shape
    first_slots, key_size = buffers["store"].shape[0] - 1 - steps, buffers["keys"].shape[-1] if k_top > 0 else 0
    new = parameters[0].new_empty
    like = (
        x,
        lengths,
        new(batch, n),
        new(batch, n),
        new(batch, first_slots, n),
        new(batch, first_slots, key_size),
        *parameters,
    )
    return [gradient.new_empty(gradient.shape) for gradient, needed in zip(like, arguments[-1], strict=True) if needed]


def _at_numbers(dkeys: Tensor, plan: Plan, bias: Tensor) -> Tensor:
    """The gradient of the affine scorers' bias from those of the new keys [B, S, 1]: b_i belongs to microstate i."""
    first = plan.seen // plan.config.k_att
    by_number = dkeys.sum((0, 2))[: max(len(bias) - first, 0)]
    gradient = bias.new_zeros(len(bias))
    gradient[first : first + len(by_number)] = by_number
    return gradient


def _set(buffer: Tensor, values: Tensor | None) -> None:
    """Put the values into the buffer, zeros where there are none."""
    if values is None:
        buffer.zero_()
    else:
        buffer.copy_(values)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `tensor.to(dtype)`, which takes its time even where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, B, p] as [T * B, p] of a type, with no more than one copy."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype, memory_format=torch.contiguous_format)
    return tensor.flatten(0, 1)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, rounded to dtype once."""
    if left.dtype == dtype:
        return torch.mm(left, right)
    if left.is_cuda and dtype == torch.float32 and left.shape[1] > 0:
        return torch.mm(left, right, out_dtype=dtype)
    return (left.to(dtype) @ right.to(dtype)) if dtype == torch.float32 else (left @ right).to(dtype)


_keeps_graph: Any = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: True)
"""Whether the graph can be gone through backward once more after this time."""
_has_hooks: Any = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", lambda ignore_tracing: True
)
"""What packs and unpacks saved tensors, or None."""
_AS_IT_IS = contextlib.nullcontext()
_AUTOCAST = {
    "cuda": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
    "cpu": torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
}


def _products(x: Tensor, compute: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Products are of the type of their factors, whatever autocast says, and in TF32 where cuDNN's RNNs would be."""
    if x.is_cuda and compute == torch.float32:
        return _tf32(allow_tf32() and x.shape[1] > 1)  # PyTorch rounds nothing in products of a single row
    device = x.device.type
    if not is_autocast(device):
        return _AS_IT_IS
    if device in _AUTOCAST:
        return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST[device])  # a tenth of what torch.autocast takes to say so
    return torch.autocast(device, enabled=False)


class _tf32(contextlib.AbstractContextManager[None]):
    """The setting of matrix products outside cuDNN; there is none for a single product."""

    def __init__(self, allowed: bool):
        self.allowed = allowed

    def __enter__(self) -> None:
        matmul: Any = torch.backends.cuda.matmul
        self.before = matmul.fp32_precision
        self.differs = (self.before == "tf32") != self.allowed
        if self.differs:
            matmul.fp32_precision = "tf32" if self.allowed else "ieee"

    def __exit__(self, *_: object) -> None:
        if self.differs:
            torch.backends.cuda.matmul.fp32_precision = self.before  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache(maxsize=256)
def _config(
    scorer: str, weighting: str, forward: str, incorporate: str, k_top: int, k_att: int, k_trunc: int
) -> SABConfig:
    return SABConfig(k_top, k_att, k_trunc or None, scorer, weighting, forward, incorporate)


def engine_named(name: str) -> Any:
    """The module of an engine, imported when it is first asked for."""
    if name not in _engines:
        _engines[name] = importlib.import_module(ENGINES[name])
    return _engines[name]


def cast(weights: Weights, compute: torch.dtype) -> Weights:
    """The weights in the compute type, contiguous."""
    return Weights(*(None if weight is None else contiguous(_as(weight, compute)) for weight in weights))  # pyright: ignore


class _Recurrence(torch.autograd.Function):
    """The operation as a node of autograd's graph; without a keyset the dispatcher is passed by.

    By hand, as `torch.library.register_autograd` takes longer for every call than many an operation itself.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        if keyset is None:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = _forward(*tensors, *options)  # pyright: ignore[reportArgumentType]
        else:
            outputs = _below_autograd(torch.ops.sab.recurrence.default, keyset, *tensors, *options)
        _, cell, scorer, weighting, _, _, k_top, *_ = options
        ctx.names = _outputs(cell, scorer, weighting, k_top, True)
        ctx.options = options[:-1]
        ctx.is_shared = _has_hooks(True) is not None  # whoever packs what is saved may keep it
        ctx.is_used_up = False
        ctx.save_for_backward(*tensors[:2], *tensors[2 + len(_FRESH) :], *outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(output for name, output in zip(ctx.names, outputs, strict=False) if name not in _GRADIENTS)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.is_used_up:
            raise RuntimeError("an earlier backward stopped half-way and used up what was saved: run forward again.")
        given = dict(zip(ctx.names, gradients, strict=False))
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        inputs = _INPUTS - len(_FRESH)
        arguments: tuple[Any, ...] = (*map(given.get, _GRADIENTS), *saved[:inputs], saved[inputs:], *ctx.options, needs)
        if torch.is_grad_enabled() or not _is_plain((*saved, *gradients)):
            found = torch.ops.sab.recurrence_backward.default(*arguments)
        else:
            # What a CUDA graph records may be replayed any number of times.
            is_captured = saved[0].is_cuda and torch.cuda.is_current_stream_capturing()
            ctx.is_used_up = not (_keeps_graph() or ctx.is_shared or is_captured)
            with torch._C._AutoDispatchBelowAutograd():
                found = _backward(*arguments, is_last=ctx.is_used_up)
        rest = iter(found)
        return (None, None, *[next(rest) if needed else None for needed in needs])


class _RecurrenceBackward(torch.autograd.Function):
    """The operation's backward as a node of the graph that `create_graph=True` makes."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_below_autograd(torch.ops.sab.recurrence_backward.default, keyset, *arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("only the layer's backend='reference' has second derivatives; this gradient was another's.")


def _below_autograd(op: Any, keyset: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _autograd(keyset: Any, *arguments: Any) -> Any:
    *_, saves = arguments
    if saves and torch.is_grad_enabled():
        return list(_Recurrence.apply(keyset, arguments[_INPUTS:], *arguments[:_INPUTS]))
    return _below_autograd(torch.ops.sab.recurrence.default, keyset, *arguments)


def _autograd_backward(keyset: Any, *arguments: Any) -> Any:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        return list(_RecurrenceBackward.apply(keyset, *arguments))
    return _below_autograd(torch.ops.sab.recurrence_backward.default, keyset, *arguments)


for _device in _DEVICES:
    _library.impl("recurrence", _forward, _device.upper())
    _library.impl("recurrence_backward", _backward, _device.upper())
_library.impl("recurrence", _autograd, "Autograd", with_keyset=True)
_library.impl("recurrence_backward", _autograd_backward, "Autograd", with_keyset=True)
torch.library.register_fake("sab::recurrence", _fake_forward, lib=_library)
torch.library.register_fake("sab::recurrence_backward", _fake_backward, lib=_library)
