"""The operation `sab::recurrence`: one layer in one direction over a sequence, as one node of PyTorch's graphs.

What does not depend on the device is here: the buffers, the input's part of the gates before the loop over time, the
weights' gradients after it, each a single matrix product. The two loops over time are an engine's: a module with
`forward(plan, weights, buffers)` and `backward(plan, weights, buffers, work)` that fill what they are given.

Time comes first in every buffer but `keys`. The compute type is that of products; the state type is the same but for
bfloat16, where sums over many steps are kept in float32.

| buffer | shape | before the forward loop | after it |
|---|---|---|---|
| store | [F + 1 + T, B, n] | F microstates, then the initial h | and the T hidden states |
| c | [T + 1, B, n], or 0 without c | the initial c | and the T cell states |
| gates | [T, B, G] compute type | the input's part | activated |
| hidden_new | [T, B, n] compute type, or 0 but for the GRU | | W_hn h + b_hn |
| h_hat | [T, B, n] | | provisional hidden states |
| query | [T, B, d], d = 0 for the affine scorers | | what is scored against the keys |
| keys | [B, S, d] compute type | those of the first F slots | all |
| weights | [T, B, k_top] | 0 | of the selected |
| selected | [T, B, k_top] int32 | -1 | slots |
| norms | [T, B] | | divisor of relu_norm |
| summary | [T, B, n] | 0 | what was read |
| lengths | [B] int64 on the device, or None | where rows end | |

A microstate is not copied: that of slot s is row s of `store` for the first F slots, and else the row of the hidden
state it is. Past its end a row is 0 in every buffer, and has selected nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.config import DEFAULT_SCORER, SABConfig
from sab.ops.types import LayerResult, LayerState, LayerWeights
from sab.scorers import ScorerWeights
from sab.state import Attention

ENGINES = {"cpu": "sab.ops.cpu", "triton": "sab.ops.triton.engine"}
"""The modules that run the loops over time, by name."""
TYPES = (torch.float32, torch.float64, torch.bfloat16)
"""What the operation computes in; an engine may do without some."""
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
        return self.config.k_top > 0 and self.config.scorer in ("affine", "affine_tanh")

    @property
    def first_kept(self) -> int:
        """The first step, from 0, whose hidden state is kept."""
        return self.config.k_att - 1 - self.seen % self.config.k_att

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
    """What the loops need of a layer's parameters, in the compute type, contiguous; None where there is none."""

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
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def compute_type(x: Tensor, state: LayerState) -> torch.dtype:
    """The type of the products: the layer's, or autocast's."""
    dtype, device = state.h.dtype, x.device.type
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


def unsupported(x: Tensor, state: LayerState, weights: LayerWeights) -> str | None:
    """Why no engine can run a configuration, or None where one may."""
    compute = compute_type(x, state)
    if compute not in TYPES:
        return f"it does not compute in {compute}"
    own = [weight for weight in (*weights, *weights.scorer) if isinstance(weight, Tensor)]
    if any(weight.dtype != state.h.dtype or weight.device != x.device for weight in own):
        return "the parameters differ from the input in type or device"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "function transforms are active"
    if state.seen is None:
        return "the rows of the state have seen different numbers of steps"
    return None


def run(
    engine: str,
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """As `reference.run`, with the loops of an engine; all rows must have seen the same number of steps."""
    seen = state.seen
    assert seen is not None
    scorer = weights.scorer if config.k_top > 0 else ScorerWeights()
    tensors = (x, state.h, state.c, state.microstates, state.keys, *weights[:4], *scorer, *weights[5:])
    saves = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    device_lengths = None if lengths is None else lengths.to(x.device, non_blocking=True)
    result = torch.ops.sab.recurrence(
        x,
        device_lengths,
        *tensors[1:],
        engine,
        cell_name,
        config.scorer if isinstance(config.scorer, str) else DEFAULT_SCORER,  # a callable: there is no memory
        config.weighting,
        config.forward,
        config.incorporate,
        config.k_top,
        config.k_att,
        config.k_trunc or 0,
        seen,
        compute_type(x, state),
        saves,
    )
    hidden, cells, keys, attended, selected, summary = result[:6]
    dtype, (steps, batch) = state.h.dtype, x.shape[:2]
    keys, attended, summary = keys.to(dtype), attended.to(dtype), summary.to(dtype)
    first_slots, slots = state.numbers.shape[1], keys.shape[1]
    first_number = seen // config.k_att
    numbers = torch.arange(first_number, first_number + slots - first_slots, device=x.device)
    numbers = numbers.expand(batch, -1).contiguous()
    late = None
    if device_lengths is not None:
        late = F.pad((numbers + 1) * config.k_att - seen > device_lengths.unsqueeze(1), (first_slots, 0))
    if first_slots > 0:
        numbers = torch.cat([state.numbers, numbers], dim=1)
        slot = selected.transpose(0, 1).flatten(1).long() % (slots + 1)
        chosen = F.pad(numbers, (0, 1), value=-1).gather(1, slot)
        chosen = chosen.view(batch, steps, config.k_top).transpose(0, 1)
    else:
        chosen = selected.long()
        if first_number > 0:
            chosen = torch.where(chosen < 0, -1, chosen + first_number)
    microstates = state.microstates
    if slots > first_slots:
        kept = hidden[config.k_att - 1 - seen % config.k_att :: config.k_att].transpose(0, 1)
        microstates = torch.cat([microstates, kept], dim=1)
    if lengths is None or device_lengths is None or late is None:
        h, c = hidden[-1].clone(), None if state.c is None else cells[-1].to(dtype, copy=True)
        ended = state.steps + steps
    else:
        row = torch.arange(batch, device=x.device)
        h = hidden[device_lengths - 1, row]
        c = None if state.c is None else cells[device_lengths, row].to(dtype)
        numbers, keys = numbers.masked_fill(late, -1), keys.masked_fill(late.unsqueeze(-1), 0.0)
        ended = state.steps + lengths
    end = LayerState(h, c, microstates, keys, numbers, ended)
    return LayerResult(hidden, end, Attention(chosen, attended, summary))


_PARAMETERS = """Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh,
    Tensor? w_memory, Tensor? w_query, Tensor? scorer_bias, Tensor? v, Tensor? w_incorporate, Tensor? b_incorporate"""
_OPTIONS = """str engine, str cell, str scorer, str weighting, str forward, str incorporate,
    int k_top, int k_att, int k_trunc, SymInt seen, ScalarType compute"""
_OUTPUTS = (
    "hidden",
    "c",
    "keys",
    "weights",
    "selected",
    "summary",
    "store",
    "gates",
    "hidden_new",
    "h_hat",
    "query",
    "norms",
)
"""What the operation gives: what is seen outside first, then what the backward needs besides, empty without one."""
_SEEN = 6
_INPUTS = 16
"""How many of the operation's arguments are tensors."""
_BUFFERS = _OUTPUTS[1:]
_B_IH = 8
"""Where the bias of the input's part comes among the tensors."""

# `saves` tells whether a backward may follow; without it there is no gradient and nothing is kept for one.
_library = torch.library.Library("sab", "DEF")
_library.define(
    f"recurrence(Tensor x, Tensor? lengths, Tensor h, Tensor? c, Tensor microstates, Tensor keys, {_PARAMETERS}, "
    f"{_OPTIONS}, bool saves) -> ({', '.join(f'Tensor {name}' for name in _OUTPUTS)})"
)
_library.define(
    "recurrence_backward(Tensor? d_hidden, Tensor? d_c, Tensor? d_keys, Tensor? d_weights, Tensor? d_summary, "
    f"Tensor x, Tensor? lengths, {_PARAMETERS}, {', '.join(f'Tensor {name}' for name in _BUFFERS)}, "
    f"{_OPTIONS}, bool[] needs) -> Tensor[]"
)


def _forward(
    x: Tensor,
    lengths: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    microstates: Tensor,
    keys: Tensor,
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
) -> tuple[Tensor, ...]:
    config = _config(scorer, weighting, forward, incorporate, k_top, k_att, k_trunc)
    buffers: dict[str, Any] = _allocate(x, h, c, microstates, keys, config, cell, seen, compute)
    first_slots, slots = microstates.shape[1], buffers["keys"].shape[1]
    plan = Plan(cell, config, seen, len(x), x.shape[1], h.shape[-1], keys.shape[-1], first_slots, slots)
    weights = _cast(compute, w_hh, b_hh, w_memory, w_query, scorer_bias, v, w_incorporate, b_incorporate)
    with _products(x, compute):
        # The GRU's reset gate acts on its hidden bias, so only there the two biases do not simply add up.
        bias = b_ih if b_ih is None or b_hh is None or cell == "gru" else b_ih + b_hh
        bias = None if bias is None else bias.to(compute)
        buffers["gates"] = F.linear(x.to(compute).contiguous(), w_ih.to(compute), bias)
        store = buffers["store"]
        if first_slots > 0:
            store[:first_slots] = microstates.transpose(0, 1)
            buffers["keys"][:, :first_slots] = keys
        store[first_slots] = h
        if c is not None:
            buffers["c"][0] = c
        buffers["weights"].zero_()
        buffers["selected"].fill_(-1)
        buffers["summary"].zero_()
        # What no loop writes is not left to chance: the same inputs give the same outputs to the last bit.
        buffers["norms"].zero_()
        if first_slots == 0:
            buffers["query"][: plan.first_kept + 1].zero_()
        engine_named(engine).forward(plan, weights, buffers | {"lengths": lengths})
    return _outputs(buffers, h, first_slots, saves)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    x, _, h, c, microstates, keys, w_ih = arguments[:7]
    _, cell, scorer, weighting, forward, incorporate, k_top, k_att, k_trunc, seen, compute, saves = arguments[_INPUTS:]
    config = _config(scorer, weighting, forward, incorporate, k_top, k_att, k_trunc)
    buffers = _allocate(x, h, c, microstates, keys, config, cell, seen, compute)
    buffers["gates"] = x.new_empty(*x.shape[:2], w_ih.shape[0], dtype=compute)
    return _outputs(buffers, h, microstates.shape[1], saves)


def _allocate(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    microstates: Tensor,
    keys: Tensor,
    config: SABConfig,
    cell: str,
    seen: int,
    compute: torch.dtype,
) -> dict[str, Tensor]:
    """The buffers but for the gates, which a product makes; only their shapes are set."""
    (steps, batch), n, key_size = x.shape[:2], h.shape[-1], keys.shape[-1]
    first_slots, k_top, k_att = microstates.shape[1], config.k_top, config.k_att
    slots = first_slots + ((seen + steps) // k_att - seen // k_att if k_top > 0 else 0)
    is_affine = k_top > 0 and config.scorer in ("affine", "affine_tanh")
    kept = state_type(compute)
    new = x.new_empty
    return {
        "store": new(first_slots + 1 + steps, batch, n, dtype=kept),
        "c": new(0 if c is None else steps + 1, batch, n, dtype=kept),
        "hidden_new": new(steps if cell == "gru" else 0, batch, n, dtype=compute),
        "h_hat": new(steps, batch, n, dtype=kept),
        "query": new(steps, batch, 0 if is_affine else key_size, dtype=kept),
        "keys": new(batch, slots, key_size, dtype=compute),
        "weights": new(steps, batch, k_top, dtype=kept),
        "selected": new(steps, batch, k_top, dtype=torch.int32),
        "norms": new(steps, batch, dtype=kept),
        "summary": new(steps, batch, n, dtype=kept),
    }


def _outputs(buffers: dict[str, Tensor], h: Tensor, first_slots: int, saves: bool) -> tuple[Tensor, ...]:
    """The operation's outputs, none of which may share memory with another."""
    # A copy, so that whoever changes the output in place does not change what the backward reads.
    hidden = buffers["store"][first_slots + 1 :].to(h.dtype, copy=saves)
    seen = (buffers[name] for name in _OUTPUTS[1:_SEEN])
    saved = (buffers[name] if saves else h.new_empty(0) for name in _OUTPUTS[_SEEN:])
    return hidden, *seen, *saved


def _backward(
    d_hidden: Tensor | None,
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
    *rest: Any,
) -> list[Tensor]:
    buffers: dict[str, Any] = dict(zip(_BUFFERS, rest, strict=False))
    engine, cell, scorer, weighting, forward, incorporate, *numbers, seen, compute, needs = rest[len(_BUFFERS) :]
    config = _config(scorer, weighting, forward, incorporate, *numbers)
    store, keys, h_hat, gates = (buffers[name] for name in ("store", "keys", "h_hat", "gates"))
    steps, batch, n = h_hat.shape
    first_slots = len(store) - 1 - steps
    plan = Plan(cell, config, seen, steps, batch, n, keys.shape[-1], first_slots, keys.shape[1])
    weights = _cast(compute, w_hh, b_hh, w_memory, w_query, scorer_bias, v, w_incorporate, b_incorporate)
    kept = store.dtype
    skips = engine == "triton"  # its kernels leave out what is not there
    dstore = torch.empty_like(store)
    dstore[: first_slots + 1].zero_()
    _fill(dstore[first_slots + 1 :], d_hidden)
    dgates = torch.empty_like(gates)
    work: dict[str, Any] = {
        "dstore": dstore,
        "dc": torch.zeros_like(h_hat[0]),
        "dcells": None if d_c is None or cell != "lstm" else d_c[1:].to(kept).contiguous(),
        "dgates": dgates,
        "dhidden": torch.empty_like(dgates) if cell == "gru" else dgates,
        "dquery": h_hat.new_zeros(steps, batch, plan.key_size),
        "dkeys": _fill(torch.empty_like(keys, dtype=kept), d_keys),
        "dsummary": None if skips and d_summary is None else _fill(torch.empty_like(h_hat), d_summary),
        "dweights": None if skips and d_weights is None else _fill(torch.empty_like(buffers["weights"]), d_weights),
        "dincorporated": None if w_incorporate is None else torch.zeros_like(h_hat),
        "dv": None if v is None else h_hat.new_zeros(batch, plan.key_size),
    }
    with _products(x, compute):
        engine_named(engine).backward(plan, weights, buffers | {"lengths": lengths}, work)
        return _gradients(plan, x, w_ih, scorer_bias, buffers, work, compute, w_hh.dtype, needs)


def _gradients(
    plan: Plan,
    x: Tensor,
    w_ih: Tensor,
    scorer_bias: Tensor | None,
    buffers: dict[str, Tensor],
    work: dict[str, Tensor],
    compute: torch.dtype,
    dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients that are needed, from what the loop has left, in the order of the operation's arguments."""
    config, first_slots, steps = plan.config, plan.first_slots, plan.steps
    dstore, dkeys, dgates, dhidden = (work[name] for name in ("dstore", "dkeys", "dgates", "dhidden"))
    dquery, dincorporated = work["dquery"], work["dincorporated"]
    store, h_hat = buffers["store"], buffers["h_hat"]
    gradients: list[Tensor] = []

    def outer(left: Tensor, right: Tensor) -> Tensor:
        """Sum over steps and rows of the outer products: [T, B, p] and [T, B, q] to [p, q]."""
        return _product(left.to(compute).flatten(0, 1).t(), right.to(compute).flatten(0, 1), dtype)

    def total(gradient: Tensor) -> Tensor:
        return gradient.sum((0, 1), dtype=store.dtype).to(dtype)

    def b_hh() -> Tensor:
        return gradients[-1].clone() if dhidden is dgates and needs[_B_IH] else total(dhidden)

    def seen(states: Tensor) -> Tensor:
        return torch.tanh(states) if config.scorer == "affine_tanh" else states

    def w_memory() -> Tensor:
        microstates = store[first_slots + 1 + plan.first_kept :: config.k_att]
        gradient = outer(dkeys[:, first_slots:].transpose(0, 1), seen(microstates))
        return gradient.squeeze(0) if plan.is_affine else gradient

    def w_query() -> Tensor:
        gradient = outer(dquery, seen(h_hat))
        return gradient.squeeze(0) if plan.is_affine else gradient

    def bias() -> Tensor:
        if not plan.is_affine or scorer_bias is None:
            return total(dquery)
        return _at_numbers(dkeys[:, first_slots:], plan, scorer_bias)

    formulas: tuple[Any, ...] = (
        lambda: (dgates @ w_ih.to(compute)).to(x.dtype),
        None,
        lambda: dstore[first_slots].to(dtype, copy=True),
        lambda: work["dc"].to(dtype),
        lambda: dstore[:first_slots].transpose(0, 1).clone(memory_format=torch.contiguous_format).to(dtype),
        lambda: dkeys[:, :first_slots].clone(memory_format=torch.contiguous_format).to(dtype),
        lambda: outer(dgates, x),
        lambda: outer(dhidden, store[first_slots : first_slots + steps]),
        lambda: total(dgates),
        b_hh,
        w_memory,
        w_query,
        bias,
        lambda: work["dv"].sum(0).to(dtype),
        lambda: torch.cat([outer(dincorporated, part) for part in (h_hat, buffers["summary"])], dim=1),
        lambda: total(dincorporated),
    )
    for formula, needed in zip(formulas, needs, strict=True):
        if needed:
            gradients.append(formula())
    return gradients


def _fake_backward(*arguments: Any) -> list[Tensor]:
    from_outside, initial = 5, 4  # gradients that come in; tensors of the initial state, which do not
    first_buffer = from_outside + _INPUTS - initial
    x, lengths, *parameters = arguments[from_outside:first_buffer]
    buffers = dict(zip(_BUFFERS, arguments[first_buffer:], strict=False))
    needs = arguments[-1]
    steps, batch, n = buffers["h_hat"].shape
    first_slots, key_size = buffers["store"].shape[0] - 1 - steps, buffers["keys"].shape[-1]
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
    return [gradient.new_empty(gradient.shape) for gradient, needed in zip(like, needs, strict=True) if needed]


def _at_numbers(dkeys: Tensor, plan: Plan, bias: Tensor) -> Tensor:
    """The gradient of the affine scorers' bias from those of the new keys [B, S, 1]: b_i belongs to microstate i."""
    first = plan.seen // plan.config.k_att
    by_number = dkeys.sum((0, 2))[: max(len(bias) - first, 0)]
    gradient = bias.new_zeros(len(bias))
    gradient[first : first + len(by_number)] = by_number
    return gradient


def _fill(buffer: Tensor, gradient: Tensor | None) -> Tensor:
    """The buffer with the gradient in it, zeros where there is none."""
    return buffer.zero_() if gradient is None else buffer.copy_(gradient)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, rounded to dtype once."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left.to(dtype) @ right.to(dtype)) if dtype == torch.float32 else (left @ right).to(dtype)


_AS_IT_IS = contextlib.nullcontext()


def _products(x: Tensor, compute: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Products are of the type of their factors, whatever autocast says, and in TF32 where cuDNN's RNNs would be."""
    if x.is_cuda and compute == torch.float32:
        return _tf32(allow_tf32())
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x.device.type) else _AS_IT_IS


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """The setting of matrix products outside cuDNN; there is none for a single product."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if (before == "tf32") == allowed:
        yield
        return
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


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


def _cast(compute: torch.dtype, *weights: Tensor | None) -> Weights:
    return Weights(*(None if weight is None else weight.to(compute).contiguous() for weight in weights))  # pyright: ignore


class _Recurrence(torch.autograd.Function):
    """The operation as a node of autograd's graph.

    By hand, as `torch.library.register_autograd` takes longer for every call than many an operation itself.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        outputs = _below_autograd(torch.ops.sab.recurrence.default, keyset, *tensors, *options)
        x, lengths, _, _, _, _, *parameters = tensors
        ctx.options = options[:-1]
        ctx.save_for_backward(x, lengths, *parameters, *outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs[_OUTPUTS.index("selected")], *outputs[_SEEN:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_hidden, d_c, d_keys, d_weights, _, d_summary = gradients[:_SEEN]
        outside, needs = (d_hidden, d_c, d_keys, d_weights, d_summary), ctx.needs_input_grad[2:]
        found = iter(torch.ops.sab.recurrence_backward(*outside, *ctx.saved_tensors, *ctx.options, needs))
        return (None, None, *(next(found) if needed else None for needed in needs))


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
        return _Recurrence.apply(keyset, arguments[_INPUTS:], *arguments[:_INPUTS])
    return _below_autograd(torch.ops.sab.recurrence.default, keyset, *arguments)


def _autograd_backward(keyset: Any, *arguments: Any) -> Any:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        return list(_RecurrenceBackward.apply(keyset, *arguments))
    return _below_autograd(torch.ops.sab.recurrence_backward.default, keyset, *arguments)


for _key in ("CPU", "CUDA"):
    _library.impl("recurrence", _forward, _key)
    _library.impl("recurrence_backward", _backward, _key)
_library.impl("recurrence", _autograd, "Autograd", with_keyset=True)
_library.impl("recurrence_backward", _autograd_backward, "Autograd", with_keyset=True)
torch.library.register_fake("sab::recurrence", _fake_forward, lib=_library)
torch.library.register_fake("sab::recurrence_backward", _fake_backward, lib=_library)
