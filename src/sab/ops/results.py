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
from sab.ops.types import Ends, LayerMemory
from sab.state import Attention


class Pass(NamedTuple):
    """A pass that has run. The tensors come as arguments, so that a state keeps alive only what it is made from."""

    steps: int
    batch: int
    config: SABConfig
    first_numbers: Tensor | None
    """The numbers of the slots before it, [B, F], a copy; None where there were none."""
    seen: int
    """How many steps came before it."""
    lengths: Tensor | None
    """On the device."""
    dtype: torch.dtype
    """The layer's type."""

    @property
    def first_slots(self) -> int:
        return 0 if self.first_numbers is None else self.first_numbers.shape[1]

    def ends(self, store: Tensor, c: Tensor | None) -> Ends:
        """The states after the last step: copies, no part of `store`."""
        if self.lengths is None:
            return Ends(store[-1].to(self.dtype, copy=True), None if c is None else c[-1].to(self.dtype, copy=True))
        row = torch.arange(self.batch, device=store.device)
        h = store[self.first_slots + self.lengths, row].to(self.dtype)
        return Ends(h, None if c is None else c[self.lengths, row].to(self.dtype))

    def memory(
        self, store: Tensor, keys: Tensor | None, live: Tensor | None = None, reads: Tensor | None = None
    ) -> LayerMemory:
        """The memory after the last step. It holds no part of `store`."""
        if self.config.k_top == 0 or keys is None:
            nothing = store.new_zeros(self.batch, 0, store.shape[-1], dtype=self.dtype)
            return LayerMemory(nothing, nothing[..., :0], nothing[..., 0].long())
        numbers, late = self._numbers(store.device)
        if live is not None:
            return self._remembered(store, keys, numbers, live, reads)
        first_slots, k_att = self.first_slots, self.config.k_att
        first = schedule.kept_row(first_slots, self.seen, first_slots, k_att)
        microstates = torch.cat([store[:first_slots], store[first::k_att]]).transpose(0, 1).to(self.dtype)
        if late is not None:
            numbers, keys = numbers.masked_fill(late, -1), keys.masked_fill(late.unsqueeze(-1), 0.0)
        return LayerMemory(microstates, keys.to(self.dtype), numbers)

    def _remembered(
        self, store: Tensor, keys: Tensor, numbers: Tensor, live: Tensor, reads: Tensor | None
    ) -> LayerMemory:
        """The memory of a bounded macrostate: of all slots those that are `live`, [B, N]."""
        unused, slots, first_slots = live < 0, live.clamp(min=0).long(), self.first_slots
        place = torch.where(
            slots < first_slots, slots, schedule.kept_row(slots, self.seen, first_slots, self.config.k_att)
        )
        rows = torch.arange(self.batch, device=store.device).unsqueeze(1)
        microstates, keys = (
            tensor.masked_fill(unused.unsqueeze(-1), 0.0).to(self.dtype)
            for tensor in (store[place, rows], keys[rows, slots])
        )
        counts = None if reads is None else reads.clone()
        return LayerMemory(microstates, keys, numbers.gather(1, slots).masked_fill(unused, -1), counts)

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
        if self.lengths is not None:
            late = schedule.kept_at(numbers, k_att) - self.seen > self.lengths.unsqueeze(1)
            late = F.pad(late, (self.first_slots, 0))
        if self.first_numbers is not None:
            numbers = torch.cat([self.first_numbers, numbers], dim=1)
        return numbers, late
