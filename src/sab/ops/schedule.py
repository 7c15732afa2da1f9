"""Which steps keep their state and cut the chain, and where microstates lie: the schedule, written once for Python.

Plain arithmetic without branches, calls or annotations, so that the same functions serve whole numbers, tensors and
Triton kernels.
`seen` is how many steps a row has seen before the step in question. `ops/cpu/schedule.h` has the same in C++.
"""

from __future__ import annotations


def keeps(seen, k_att):
    """Whether the hidden state of a step is kept."""
    return (seen + 1) % k_att == 0


def cuts(seen, k_trunc):
    """Whether no gradient flows from a step along the chain to the one before."""
    return (seen > 0) & (seen % k_trunc == 0)


def slots_at(seen, first_seen, first_slots, k_att):
    """How many slots are in use when a step reads, if `first_slots` were in use after `first_seen` steps."""
    return first_slots + seen // k_att - first_seen // k_att


def first_kept(seen, k_att):
    """How many steps come before the first one whose state is kept, after `seen` steps."""
    return k_att - 1 - seen % k_att


def kept_row(slot, seen, first_slots, k_att):
    """The row of `store` with the microstate of a slot that is filled after `seen` steps, from `first_slots` on.

    `store` holds the first microstates, the hidden state that comes in, and the hidden state of every step.
    """
    return first_slots + k_att - seen % k_att + (slot - first_slots) * k_att
