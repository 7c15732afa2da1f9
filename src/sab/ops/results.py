"""The state and the attention that a layer returns, made from what the operation leaves.

Few callers look at them, and for small sizes they take longer to make than the loop to run. So they are made on demand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sab.config import SABConfig
from sab.ops import schedule
from sab.ops.types import LayerState
from sab.state import Attention


class Pass(NamedTuple):
    """A pass that has run. The tensors come as arguments, so that a state keeps alive only what it is made from."""

    steps: int
    batch: int
    config: SABConfig
    before: LayerState | None
    seen: int
    """How many steps came before it."""
    lengths: Tensor | None
    """On the CPU."""
    device_lengths: Tensor | None
    dtype: torch.dtype
    """The layer's type."""

    @property
    def first_slots(self) -> int:
        return 0 if self.before is None else self.before.numbers.shape[1]

    def state(self, store: Tensor, c: Tensor | None, keys: Tensor | None) -> LayerState:
        """The state after the last step. It holds copies, no part of `store`."""
        before, first_slots, k_att = self.before, self.first_slots, self.config.k_att
        numbers, late = self._numbers(store.device)
        if keys is None:
            keys = store.new_zeros(self.batch, 0, 0)  # there is no memory
        keys = keys.to(self.dtype)
        has_memory = self.config.k_top > 0
        first = schedule.kept_row(first_slots, self.seen, first_slots, k_att) if has_memory else store.shape[0]
        microstates = [store[first::k_att].transpose(0, 1).to(self.dtype)]
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
        self, store: Tensor, weights: Tensor | None, selected: Tensor | None, summary: Tensor | None
    ) -> Attention:
        """What each step selected, by number."""
        if selected is None or weights is None or summary is None:
            nothing = store.new_zeros(self.steps, self.batch, 0, dtype=self.dtype)
            return Attention(nothing.long(), nothing, store.new_zeros(self.steps, *store.shape[1:], dtype=self.dtype))
        first_number = schedule.next_number(self.seen, self.config.k_att)
        if self.first_slots > 0:
            numbers, _ = self._numbers(store.device)
            slot = selected.transpose(0, 1).flatten(1).long() % (numbers.shape[1] + 1)
            chosen = F.pad(numbers, (0, 1), value=-1).gather(1, slot)
            chosen = chosen.view(self.batch, self.steps, self.config.k_top).transpose(0, 1)
        else:
            chosen = selected.long()
            if first_number > 0:
                chosen = torch.where(chosen < 0, -1, chosen + first_number)
        return Attention(chosen, weights.to(self.dtype), summary.to(self.dtype))

    def _numbers(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The numbers of all slots [B, S], and which of them come after their row's end."""
        k_att, late = self.config.k_att, None
        first = last = schedule.next_number(self.seen, k_att)
        if self.config.k_top > 0:
            last = schedule.next_number(self.seen + self.steps, k_att)
        numbers = torch.arange(first, last, device=device).expand(self.batch, -1).contiguous()
        if self.device_lengths is not None:
            late = schedule.kept_at(numbers, k_att) - self.seen > self.device_lengths.unsqueeze(1)
            late = F.pad(late, (self.first_slots, 0))
        if self.before is not None and self.first_slots > 0:
            numbers = torch.cat([self.before.numbers, numbers], dim=1)
        return numbers, late
