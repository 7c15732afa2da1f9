"""The schedule of the memory: when a state is kept, when the chain is cut, how many slots there are and where they are.

Each function is one expression of arithmetic, without a branch and without a call, so the same source serves Python
numbers, tensors and Triton kernels. `seen` counts the steps before the one that is asked about, over all calls;
`first_seen` and `first_slots` are the counts before the first step of a call. Numbers are never negative.
"""

from __future__ import annotations

from typing import Any


def keeps(seen: Any, k_att: Any) -> Any:
    """Whether the hidden state after this step becomes a microstate."""
    return (seen + 1) % k_att == 0


def cuts(seen: Any, k_trunc: Any) -> Any:
    """Whether no gradient flows from this step along the chain to the one before."""
    return (seen > 0) & (seen % k_trunc == 0)


def next_number(seen: Any, k_att: Any) -> Any:
    """The number of the next microstate, which is how many have been kept before this step."""
    return seen // k_att


def kept_at(number: Any, k_att: Any) -> Any:
    """The step, counted from 1, whose hidden state is the microstate of this number."""
    return (number + 1) * k_att


def slots_at(seen: Any, first_seen: Any, first_slots: Any, k_att: Any) -> Any:
    """How many slots are in use when this step reads."""
    return first_slots + seen // k_att - first_seen // k_att


def first_kept(first_seen: Any, k_att: Any) -> Any:
    """The first step of a call, counted from 0, whose hidden state is kept; it may lie past the last."""
    return k_att - 1 - first_seen % k_att


def kept_row(slot: Any, first_seen: Any, first_slots: Any, k_att: Any) -> Any:
    """The row of `store` that holds the microstate of a slot from `first_slots` on.

    Before it come the microstates of the first slots, the initial state and the states that are not kept.
    """
    return first_slots + k_att - first_seen % k_att + (slot - first_slots) * k_att
