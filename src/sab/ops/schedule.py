"""The schedule of the memory: when a state is kept, when the chain is cut, how many slots there are and where they are.

Each function is one expression of arithmetic, without a branch and without a call, so the same source serves Python
numbers, tensors and Triton kernels; for these it has no annotations. `seen` counts the steps before the one that is
asked about, over all calls; `first_seen` and `first_slots` are the counts before the first step of a call. No number is
negative.
"""

from __future__ import annotations


def keeps(seen, k_att):
    """Whether the hidden state after this step becomes a microstate."""
    return (seen + 1) % k_att == 0


def cuts(seen, k_trunc):
    """Whether no gradient flows from this step along the chain to the one before."""
    return (seen > 0) & (seen % k_trunc == 0)


def next_number(seen, k_att):
    """The number of the next microstate, which is how many have been kept before this step."""
    return seen // k_att


def kept_at(number, k_att):
    """The step, counted from 1, whose hidden state is the microstate of this number."""
    return (number + 1) * k_att


def slots_at(seen, first_seen, first_slots, k_att):
    """How many slots are in use when this step reads."""
    return first_slots + seen // k_att - first_seen // k_att


def first_kept(first_seen, k_att):
    """The first step of a call, counted from 0, whose hidden state is kept; it may lie past the last."""
    return k_att - 1 - first_seen % k_att


def kept_row(slot, first_seen, first_slots, k_att):
    """The row of `store` that holds the microstate of a slot from `first_slots` on.

    Before it come the microstates of the first slots, the initial state and the states that are not kept.
    """
    return first_slots + k_att - first_seen % k_att + (slot - first_slots) * k_att
