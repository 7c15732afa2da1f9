"""The definition: a plain loop over the steps of the specification; autograd does the backward.

Every other backend is right when it equals this one, gradients included. Rows of a batch may differ in length and in
the steps they have seen; what that decides (cuts, keeps, ends) is a mask over rows, held on the CPU.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.config import SABConfig
from sab.errors import UserValueError
from sab.ops import blocks, forgetting, schedule
from sab.ops.types import Ends, LayerMemory, LayerResult, LayerState, LayerWeights, fresh_state
from sab.parts.cells import NORM_EPSILON, linear
from sab.parts.registry import CELLS, INCORPORATIONS, SCORERS, WEIGHTINGS
from sab.parts.scorers import ScorerWeights, turn
from sab.state import Attention


def run(
    x: Tensor,
    lengths: Tensor | None,
    state: LayerState | None,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> LayerResult:
    """Run x [T, B, input_size] from `state`, None being a fresh one; row b ends after lengths[b] steps, or T."""
    if state is None:
        state = fresh_state(x, weights, cell_name, config)
    h, c, microstates, keys, numbers, steps, _, reads = state
    x_gates = linear(x, weights.w_ih, weights.b_ih, weights.norm_ih).to(h.dtype)
    outputs, attended = [], []
    for t, x_gates_t in enumerate(x_gates.unbind(0)):
        seen = steps + t
        goes_on = torch.ones_like(seen, dtype=torch.bool) if lengths is None else t < lengths

        h_in, c_in = h, c
        if config.k_trunc is not None:
            cut = schedule.cuts(seen, config.k_trunc)
            h_in = _where_rows(cut, h.detach(), h)
            c_in = None if c is None else _where_rows(cut, c.detach(), c)

        h_new, c_new, read = step(x_gates_t, h_in, c_in, seen, microstates, keys, numbers, weights, cell_name, config)

        if reads is not None:
            reads = _where_rows(goes_on, forgetting.count(reads, numbers, read.numbers), reads)
        keep = goes_on & schedule.keeps(seen, config.k_att)
        if config.k_top > 0 and keep.any():
            newest = schedule.next_number(seen, config.k_att)
            microstate = _where_rows(keep, h_new, torch.zeros_like(h_new))
            key = key_of(microstate, torch.where(keep, newest, -1).to(h.device), weights.scorer, config)
            microstates = torch.cat([microstates, microstate.unsqueeze(1)], dim=1)
            keys = torch.cat([keys, key.unsqueeze(1)], dim=1)
            numbers, reads, stay = forgetting.keep(numbers, reads, newest, keep, config)
            if stay is not None:
                microstates, keys = (_at(tensor, stay) for tensor in (microstates, keys))

        outputs.append(_where_rows(goes_on, h_new, torch.zeros_like(h_new)))
        attended.append(read if goes_on.all() else _blank_rows(~goes_on, read))
        h = _where_rows(goes_on, h_new, h)
        c = None if c is None or c_new is None else _where_rows(goes_on, c_new, c)

    attention = Attention(
        torch.stack([read.numbers for read in attended]),
        torch.stack([read.weights for read in attended]),
        torch.stack([read.summary for read in attended]),
    )
    memory = LayerMemory(microstates, keys, numbers, reads)
    if numbers is state.numbers:  # nothing was kept: what the caller passed in is theirs to change
        memory = LayerMemory(*(None if tensor is None else tensor.clone() for tensor in memory))  # pyright: ignore
    ends = Ends(h, c)
    return LayerResult(torch.stack(outputs), lambda: ends, lambda: memory, lambda: attention)


def step(
    x_gates: Tensor,
    h: Tensor,
    c: Tensor | None,
    seen: Tensor,
    microstates: Tensor,
    keys: Tensor,
    numbers: Tensor,
    weights: LayerWeights,
    cell_name: str,
    config: SABConfig,
) -> tuple[Tensor, Tensor | None, Attention]:
    """One step after `seen` ones, from the input's part of the gates: the new h and c, and what was read."""
    cell_step = CELLS[cell_name].step
    if weights.norm_c_weight is not None:
        cell_step = partial(cell_step, read=partial(_normed_c, weights))
    h_factor = h if weights.h_mask is None else h * weights.h_mask
    h_gates = linear(h_factor, weights.w_hh, weights.b_hh, weights.norm_hh).to(h.dtype)
    h_new, c_new = cell_step(x_gates, h_gates, h, c)
    read = _read(h_new, seen, microstates, keys, numbers, weights.scorer, config)
    if config.k_top > 0 and microstates.shape[1] > 0:
        incorporated = (
            INCORPORATIONS[config.incorporate]
            .apply(h_new, read.summary, weights.incorporate_weight, weights.incorporate_bias)
            .to(h.dtype)
        )
        has_read = (numbers >= 0).any(1, keepdim=True)  # the macrostate of a row may be empty
        h_new = torch.where(has_read, incorporated, h_new)
    return h_new, c_new, read


def _normed_c(weights: LayerWeights, c: Tensor) -> Tensor:
    return F.layer_norm(c, c.shape[-1:], weights.norm_c_weight, weights.norm_c_bias, NORM_EPSILON).to(c.dtype)


def _read(
    h: Tensor,
    seen: Tensor,
    microstates: Tensor,
    keys: Tensor,
    numbers: Tensor,
    scorer: ScorerWeights,
    config: SABConfig,
) -> Attention:
    """Score, select, weigh and sum up the microstates for the provisional hidden state h of the step after `seen`."""
    batch, slots, _ = microstates.shape
    k = slots if slots < config.k_top else config.k_top  # not min(), which leaves a symbol open
    if k == 0:
        return Attention(
            numbers.new_full((batch, config.k_top), -1), h.new_zeros(batch, config.k_top), torch.zeros_like(h)
        )
    scores = _score(h, seen, microstates, keys, scorer, config)
    cancels = isinstance(config.scorer, str) and SCORERS[config.scorer].query_cancels
    among = _in_read_blocks(h, seen, microstates, keys, numbers, scorer, config) if config.is_hierarchical else numbers
    selected = _select(keys.squeeze(-1) if cancels else scores, among, k)
    valid = numbers.gather(1, selected) >= 0
    weigh = WEIGHTINGS[config.weighting].weigh
    if config.forward == "sparse":
        weights = weigh(scores.gather(1, selected), valid)
        read = microstates.gather(1, selected.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
        summary = (weights.unsqueeze(-1) * read).sum(1)
    else:
        has_gradient = torch.zeros_like(scores, dtype=torch.bool).scatter(1, selected, True)
        scores = torch.where(has_gradient, scores, scores.detach())
        read = torch.where(has_gradient.unsqueeze(-1), microstates, microstates.detach())
        all_weights = weigh(scores, numbers >= 0)
        summary = (all_weights.unsqueeze(-1) * read).sum(1)
        weights = all_weights.gather(1, selected)
    missing = config.k_top - k
    chosen = numbers.gather(1, selected).masked_fill(~valid, -1)
    return Attention(F.pad(chosen, (0, missing), value=-1), F.pad(weights, (0, missing)), summary)


def _select(scores: Tensor, numbers: Tensor, k: int) -> Tensor:
    """Slots of the k highest scores of each row, highest first; ties go to the older microstate."""
    scores = scores.detach().masked_fill(numbers < 0, -torch.inf)
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


def _in_read_blocks(
    h: Tensor,
    seen: Tensor,
    microstates: Tensor,
    keys: Tensor,
    numbers: Tensor,
    scorer: ScorerWeights,
    config: SABConfig,
) -> Tensor:
    """The numbers [B, S] with -1 for the microstates of blocks that the step does not read."""
    if numbers.shape[1] <= (config.blocks + 1) * config.block_size:
        return numbers
    with torch.no_grad():
        # Scores are linear in the keys: those of the unit vectors are what keys are multiplied with.
        units = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device).expand(len(keys), -1, -1)
        levels = blocks.score(_score(h, seen, microstates, units, scorer, config), keys, numbers, config.block_size)
        return levels.read(numbers, _select(levels.scores, levels.numbers, config.blocks))


def key_of(microstate: Tensor, number: Tensor, scorer: ScorerWeights, config: SABConfig) -> Tensor:
    """The keys [..., d] of microstates [..., n] by their numbers [...]."""
    if callable(config.scorer):
        return microstate[..., :0]  # a callable scores microstates themselves, nothing is cached
    key = SCORERS[config.scorer].key(scorer, microstate, number)
    if SCORERS[config.scorer].normalises:
        key = turn(key, schedule.kept_at(number, config.k_att) - 1)
    return key.to(microstate.dtype)


def _score(
    h: Tensor, seen: Tensor, microstates: Tensor, keys: Tensor, scorer: ScorerWeights, config: SABConfig
) -> Tensor:
    if callable(config.scorer):
        scores = config.scorer(microstates, h)
        given = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        if given != list(microstates.shape[:2]):
            raise UserValueError(
                f"scorer must map microstates {list(microstates.shape)} and h {list(h.shape)} to scores "
                f"{list(microstates.shape[:2])}; it gave {given}.",
                "scorer",
            )
        return scores.to(h.dtype)
    if SCORERS[config.scorer].normalises:  # to turn all keys back is to turn the query
        keys = turn(keys, -seen.to(keys.device).unsqueeze(-1))
    return SCORERS[config.scorer].score(scorer, keys, h).to(h.dtype)


def _at(tensor: Tensor, slots: Tensor) -> Tensor:
    """These slots of each row alone: [B, S, d] and [B, N] to [B, N, d]."""
    return tensor.gather(1, slots.unsqueeze(-1).expand(-1, -1, tensor.shape[-1]))


def _where_rows(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` in the rows of the mask, `no` in the others."""
    if mask.all():
        return yes
    if not mask.any():
        return no
    return torch.where(mask.to(yes.device).unsqueeze(-1), yes, no)


def _blank_rows(mask: Tensor, read: Attention) -> Attention:
    """The read as if the rows of the mask had selected nothing."""
    mask = mask.to(read.weights.device).unsqueeze(-1)
    return Attention(
        read.numbers.masked_fill(mask, -1), read.weights.masked_fill(mask, 0.0), read.summary.masked_fill(mask, 0.0)
    )
