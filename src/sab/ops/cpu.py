"""The CPU backend: the whole sequence in one autograd node, forward and hand-written backward in compiled loops.

The input's map, before the loop, and all weight gradients, after it, are single matrix products; inside the loop each
thread takes its own rows of the batch through all the steps (see `native/recurrence.cpp`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sab.config import SABConfig
from sab.ops import native
from sab.ops.types import LayerResult, LayerState, LayerWeights
from sab.scorers import ScorerWeights
from sab.state import Attention

# The order of the enumerations in recurrence.cpp.
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
SCORERS = ("affine", "affine_tanh", "mlp", "dot")
WEIGHTINGS = ("relu", "relu_norm", "softmax", "softmax_sink")
INCORPORATIONS = ("add", "concat", "add_bounded")

LARGEST_OWN_WEIGHTS = 1 << 20
"""Bytes of recurrent weights above which threads share each product: larger ones leave the cache of a core."""


def unsupported(x: Tensor, state: LayerState, weights: LayerWeights, cell_name: str, config: SABConfig) -> str | None:
    """Why this backend cannot run a configuration, or None where it can."""
    if x.device.type != "cpu":
        return f"the input is on {x.device.type}"
    if x.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return "it computes in float32 and float64 without autocast"
    own = [weight for weight in (*weights, *weights.scorer) if isinstance(weight, Tensor)]
    if any(weight.dtype != x.dtype or weight.device != x.device for weight in own):
        return "the parameters differ from the input in type or device"
    if torch._C._are_functorch_transforms_active():
        return "function transforms are active"
    if cell_name not in CELLS or config.weighting not in WEIGHTINGS or config.incorporate not in INCORPORATIONS:
        return "it does not have this cell, weighting or incorporation"
    if config.k_top > 0 and config.scorer not in SCORERS:
        return "it does not have this scorer"
    if not bool((state.steps == state.steps[0]).all()) or bool((state.numbers < 0).any()):
        return "the rows of the state have seen different numbers of steps"
    return native.unavailable()


def run(
    x: Tensor, lengths: Tensor | None, state: LayerState, weights: LayerWeights, cell_name: str, config: SABConfig
) -> LayerResult:
    """As `reference.run`; all rows must have seen the same number of steps."""
    seen = int(state.steps[0])
    plan = _Plan(cell_name, config, seen)
    scorer = weights.scorer
    hidden, cells, new_keys, slots, attended, summary = _Recurrence.apply(
        plan,
        lengths,
        x,
        state.h,
        state.c,
        state.microstates,
        state.keys,
        weights.w_ih,
        weights.w_hh,
        weights.b_ih,
        weights.b_hh,
        *(scorer if config.k_top > 0 else ScorerWeights()),
        weights.incorporate_weight,
        weights.incorporate_bias,
    )
    first_kept, steps = plan.first_kept, len(x)
    new_numbers = torch.arange(new_keys.shape[1], device="cpu") + seen // config.k_att
    new_numbers = new_numbers.expand(x.shape[1], -1)
    kept = hidden[first_kept :: config.k_att].transpose(0, 1) if config.k_top > 0 else hidden[:0].transpose(0, 1)
    numbers = torch.cat([state.numbers, new_numbers], dim=1)
    chosen = F.pad(numbers, (0, 1), value=-1).gather(1, slots.transpose(0, 1).flatten(1) % (numbers.shape[1] + 1))
    chosen = chosen.view(x.shape[1], steps, config.k_top).transpose(0, 1)
    h, c = hidden[-1].clone(), cells[-1].clone() if state.c is not None else None
    ended = torch.full_like(state.steps, steps)
    if lengths is not None:
        row, ended = torch.arange(x.shape[1], device="cpu"), lengths
        h, c = hidden[lengths - 1, row], cells[lengths - 1, row] if c is not None else None
        late = (new_numbers + 1) * config.k_att - seen > lengths.unsqueeze(1)
        numbers = torch.cat([state.numbers, new_numbers.masked_fill(late, -1)], dim=1)
        new_keys = new_keys.masked_fill(late.unsqueeze(-1), 0.0)
    microstates = torch.cat([state.microstates, kept], dim=1)
    keys = torch.cat([state.keys, new_keys], dim=1)
    end = LayerState(h, c, microstates, keys, numbers, state.steps + ended)
    return LayerResult(hidden, end, Attention(chosen, attended, summary))


@dataclass(frozen=True)
class _Plan:
    """What a pass does, besides its tensors."""

    cell: str
    config: SABConfig
    seen: int

    @property
    def first_kept(self) -> int:
        """The first step, from 0, whose hidden state is kept."""
        return self.config.k_att - 1 - self.seen % self.config.k_att

    def kept(self, steps: int) -> int:
        """How many hidden states are kept."""
        k_att = self.config.k_att
        return (self.seen + steps) // k_att - self.seen // k_att if self.config.k_top > 0 else 0


# The members of `Arguments` in recurrence.cpp, in their order.
SIZES = """
    steps batch n key_size first_slots slots k_top k_att k_trunc seen bias_size
    cell scorer weighting dense incorporation threads shared
""".split()
POINTERS = """
    w_hidden w_hidden_back b_hidden w_query w_query_back w_memory w_memory_back
    scorer_bias v w_incorporate w_incorporate_back b_incorporate
    store c gates hidden_new h_hat query keys weights norms summary selected lengths
    hidden_gates joined dh chain dh_hat
    dstore dc dcells dgates dhidden dquery dkeys dsummary dweights dincorporated dv
""".split()


class _Arguments(ctypes.Structure):
    """`Arguments` of recurrence.cpp."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in SIZES] + [(name, ctypes.c_void_p) for name in POINTERS]

    def set(self, **values: Tensor | int | None) -> None:
        for name, value in values.items():
            setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


class _Recurrence(torch.autograd.Function):
    """(hidden states [T, B, n], cell states, new keys [B, S, d], selected slots, weights, summaries)."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        lengths: Tensor | None,
        x: Tensor,
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
    ) -> tuple[Tensor, ...]:
        config = plan.config
        # What is not packed is read as it lies in memory.
        b_hh, scorer_bias, v, b_incorporate = (_contiguous(weight) for weight in (b_hh, scorer_bias, v, b_incorporate))
        w_memory, w_query = _contiguous(w_memory), _contiguous(w_query)
        steps, batch, n = len(x), x.shape[1], h.shape[-1]
        first_slots = microstates.shape[1]
        slots = first_slots + plan.kept(steps)
        new = x.new_empty
        # The GRU's reset gate acts on its hidden bias, so only there the two biases do not simply add up.
        bias = b_ih if b_ih is None or b_hh is None or plan.cell == "gru" else b_ih + b_hh
        gates = F.linear(x.contiguous(), w_ih, bias)
        store = new(first_slots + 1 + steps, batch, n)
        store[:first_slots] = microstates.transpose(0, 1)
        store[first_slots] = h
        cells = new(steps + 1 if c is not None else 0, batch, n)
        if c is not None:
            cells[0] = c
        all_keys = new(batch, slots, keys.shape[-1])
        all_keys[:, :first_slots] = keys
        hidden_new = new(steps if plan.cell == "gru" else 0, batch, n)
        h_hat = new(steps, batch, n)
        is_affine = config.k_top > 0 and config.scorer in ("affine", "affine_tanh")
        query = new(steps, batch, 0 if is_affine else keys.shape[-1])
        selected = torch.full((steps, batch, config.k_top), -1, device="cpu")
        weights = x.new_zeros(steps, batch, config.k_top)
        norms = new(steps, batch)
        summary = x.new_zeros(steps, batch, n)
        arguments = _arguments(plan, steps, batch, n, keys.shape[-1], first_slots, slots, scorer_bias)
        bias_hidden = x.new_zeros(w_hh.shape[0]) if b_hh is None else b_hh
        packed = [_pack(w_hh, transposed=True)]
        arguments.set(w_hidden=packed[0], b_hidden=bias_hidden, scorer_bias=scorer_bias, v=v, lengths=lengths)
        if w_query is not None and w_memory is not None:
            packed += [w_query, w_memory] if is_affine else [_pack(w, transposed=True) for w in (w_query, w_memory)]
            arguments.set(w_query=packed[-2], w_memory=packed[-1])
        if w_incorporate is not None:
            packed.append(_pack(w_incorporate, transposed=True))
            arguments.set(w_incorporate=packed[-1], b_incorporate=b_incorporate)
        buffers = {
            "store": store,
            "c": cells,
            "gates": gates,
            "hidden_new": hidden_new,
            "h_hat": h_hat,
            "query": query,
            "keys": all_keys,
            "weights": weights,
            "norms": norms,
            "summary": summary,
            "selected": selected,
        }
        scratch = {"hidden_gates": new(batch, w_hh.shape[0])}
        if w_incorporate is not None:
            scratch["joined"] = new(batch, 2 * n)
        arguments.set(**buffers, **scratch)
        _run("forward", x.dtype, arguments, w_hh.nbytes)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.first_slots, ctx.names = plan, first_slots, tuple(buffers)
        parameters = (lengths, x, w_ih, w_hh, w_memory, w_query, scorer_bias, v, w_incorporate)
        ctx.biases = (b_ih is not None, b_hh is not None)
        ctx.save_for_backward(*parameters, *buffers.values())
        ctx.mark_non_differentiable(selected)
        # A copy, so that whoever changes the output in place does not change what the backward reads.
        hidden = store[first_slots + 1 :].clone()
        return hidden, cells[1:], all_keys[:, first_slots:], selected, weights, summary

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, config, first_slots = ctx.plan, ctx.plan.config, ctx.first_slots
        lengths, x, w_ih, w_hh, w_memory, w_query, scorer_bias, v, w_incorporate, *saved = ctx.saved_tensors
        buffers = dict(zip(ctx.names, saved, strict=True))
        store, keys, h_hat = buffers["store"], buffers["keys"], buffers["h_hat"]
        d_hidden, d_cells, d_new_keys, _, d_weights, d_summary = grad_outputs
        steps, batch, n = h_hat.shape
        key_size = keys.shape[-1]
        is_affine = w_memory is not None and w_memory.dim() == 1

        dstore, dkeys = torch.zeros_like(store), torch.zeros_like(keys)
        if d_hidden is not None:
            dstore[first_slots + 1 :] = d_hidden
        if d_new_keys is not None:
            dkeys[:, first_slots:] = d_new_keys
        dgates = torch.empty_like(buffers["gates"])
        work: dict[str, Any] = {
            "dstore": dstore,
            "dc": torch.zeros_like(h_hat[0]),
            "dcells": None if d_cells is None else d_cells.contiguous(),
            "dgates": dgates,
            "dhidden": torch.empty_like(dgates) if plan.cell == "gru" else dgates,
            "dquery": x.new_zeros(steps, batch, key_size),
            "dkeys": dkeys,
            "dsummary": _own(d_summary, buffers["summary"]),
            "dweights": _own(d_weights, buffers["weights"]),
            "dincorporated": None if w_incorporate is None else torch.zeros_like(h_hat),
            "dv": None if v is None else x.new_zeros(batch, key_size),
        }
        arguments = _arguments(plan, steps, batch, n, key_size, first_slots, keys.shape[1], scorer_bias)
        scratch = {name: torch.empty_like(h_hat[0]) for name in ("dh", "chain", "dh_hat")}
        if w_incorporate is not None:
            scratch["joined"] = x.new_empty(batch, 2 * n)
        arguments.set(**buffers, **work, **scratch, scorer_bias=scorer_bias, v=v, lengths=lengths)
        packed = [_pack(w_hh, transposed=False)]
        arguments.set(w_hidden_back=packed[0])
        if is_affine:
            arguments.set(w_query=w_query, w_memory=w_memory)
        elif w_memory is not None and w_query is not None:
            packed += [_pack(w_query, transposed=False), _pack(w_memory, transposed=False)]
            arguments.set(w_query_back=packed[-2], w_memory_back=packed[-1])
        if w_incorporate is not None:
            packed.append(_pack(w_incorporate, transposed=False))
            arguments.set(w_incorporate_back=packed[-1])
        _run("backward", x.dtype, arguments, w_hh.nbytes)

        dx = (dgates @ w_ih) if ctx.needs_input_grad[2] else None
        dw_ih, db_ih = _outer(dgates, x), dgates.sum((0, 1))
        h_in = store[first_slots : first_slots + steps]
        dhidden = work["dhidden"]
        dw_hh, db_hh = _outer(dhidden, h_in), db_ih if dhidden is dgates else dhidden.sum((0, 1))
        dw_memory = dw_query = dscorer_bias = dv = dw_incorporate = db_incorporate = None
        if w_memory is not None:
            microstates = store[first_slots + 1 + plan.first_kept :: config.k_att]
            dnew_keys, dquery = dkeys[:, first_slots:].transpose(0, 1), work["dquery"]
            if config.scorer == "affine_tanh":
                microstates, h_hat_seen = torch.tanh(microstates), torch.tanh(h_hat)
            else:
                h_hat_seen = h_hat
            dw_memory, dw_query = _outer(dnew_keys, microstates), _outer(dquery, h_hat_seen)
            if is_affine:
                dw_memory, dw_query = dw_memory[0], dw_query[0]
            if scorer_bias is not None:
                dscorer_bias = dquery.sum((0, 1)) if not is_affine else _at_numbers(dnew_keys, plan, scorer_bias)
            if v is not None:
                dv = work["dv"].sum(0)
        if w_incorporate is not None:
            dincorporated = work["dincorporated"]
            dw_incorporate = _outer(dincorporated, torch.cat([h_hat, buffers["summary"]], dim=-1))
            db_incorporate = dincorporated.sum((0, 1))
        return (
            None,
            None,
            dx,
            dstore[first_slots],
            work["dc"] if plan.cell == "lstm" else None,
            dstore[:first_slots].transpose(0, 1),
            dkeys[:, :first_slots],
            dw_ih,
            dw_hh,
            db_ih if ctx.biases[0] else None,
            db_hh if ctx.biases[1] else None,
            dw_memory,
            dw_query,
            dscorer_bias,
            dv,
            dw_incorporate,
            db_incorporate,
        )


def _arguments(
    plan: _Plan, steps: int, batch: int, n: int, key_size: int, first_slots: int, slots: int, bias: Tensor | None
) -> _Arguments:
    config = plan.config
    arguments = _Arguments()
    arguments.set(
        steps=steps,
        batch=batch,
        n=n,
        key_size=key_size,
        first_slots=first_slots,
        slots=slots,
        k_top=config.k_top,
        k_att=config.k_att,
        k_trunc=config.k_trunc or 0,
        seen=plan.seen,
        bias_size=0 if bias is None else len(bias),
        cell=CELLS.index(plan.cell),
        scorer=SCORERS.index(config.scorer) if config.scorer in SCORERS else 0,
        weighting=WEIGHTINGS.index(config.weighting),
        dense=config.forward == "dense",
        incorporation=INCORPORATIONS.index(config.incorporate),
    )
    return arguments


def _run(direction: str, dtype: torch.dtype, arguments: _Arguments, weights_bytes: int) -> None:
    """Run a pass on torch's number of threads."""
    arguments.set(threads=torch.get_num_threads(), shared=weights_bytes > LARGEST_OWN_WEIGHTS)
    _function(direction, dtype)(ctypes.byref(arguments))


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(native.library(), f"sab_{name}_{'float' if dtype == torch.float32 else 'double'}")
    function.restype = ctypes.c_int64 if name == "columns" else None
    if name in ("forward", "backward"):
        function.argtypes = [ctypes.c_void_p]
    elif name == "pack":
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p]
    return function


def _pack(weight: Tensor, transposed: bool) -> Tensor:
    """A weight [rows, columns] as the right factor of a product, or its transpose, in the compiled loops' panels."""
    weight = weight.detach().contiguous()
    inner, outer = weight.shape[::-1] if transposed else weight.shape
    columns = _function("columns", weight.dtype)()
    panels = -(-outer // columns)
    packed = weight.new_empty(panels * inner * columns)
    _function("pack", weight.dtype)(weight.data_ptr(), inner, outer, transposed, packed.data_ptr())
    return packed


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Sum over steps and rows of the outer products: [T, B, p] and [T, B, q] to [p, q]."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _own(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as memory that may be written to, zeros where there is none."""
    return torch.zeros_like(like) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)


def _at_numbers(dkeys: Tensor, plan: _Plan, bias: Tensor) -> Tensor:
    """The gradient of the affine scorers' bias from those of the new keys [S, B, 1]: b_i belongs to microstate i."""
    first = plan.seen // plan.config.k_att
    by_number = dkeys.sum((1, 2))[: max(len(bias) - first, 0)]
    gradient = torch.zeros_like(bias)
    gradient[first : first + len(by_number)] = by_number
    return gradient
