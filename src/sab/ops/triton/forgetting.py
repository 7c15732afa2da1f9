# type: ignore
"""What a row of a bounded macrostate holds: the rules of `sab.ops.forgetting`, by one program.

A row's list has the slots of what is not forgotten, oldest first, so its places are in the order of age. Keys stay in
their slots, and a step scores those of the list. With `recent` these are the latest slots, which lie side by side: then
there is no list while steps run, and it is written at the end.

`thread` is a tensor of different numbers from 0 on. Where a tensor has a number for each thread, it is [warps, 32];
elsewhere MATH is "plain".
"""

import triton
import triton.language as tl

from sab.ops import forgetting
from sab.ops.triton.access import get, put
from sab.ops.triton.lanes import get_shared, lanes_of, put_shared, warps_of

READ = tl.constexpr(forgetting.READ)
SEED = tl.constexpr(forgetting.SEED)
LARGEST = tl.constexpr(2**31 - 1)
"""No place, and no slot."""


@triton.jit
def write_list(live, oldest, remembered, places, thread, MATH: tl.constexpr):
    """Write a list with room for `places`: `remembered` slots from the oldest on, then -1."""
    for first in range(0, places, thread.numel):
        place = first + thread
        put(live + place, tl.where(place < remembered, oldest + place, -1), place < places, MATH)


@triton.jit
def slot_at(live, place, mask, MATH: tl.constexpr):
    """The slots at places of a list, where the mask is; without a list a place is a slot."""
    if live is None:
        return place
    else:
        return get(live + place, mask, "", MATH)


@triton.jit
def as_slots(live, oldest, place, MATH: tl.constexpr):
    """The slots of selected places, -1 where a place is; without a list the first place is the oldest slot's."""
    return tl.where(place >= 0, oldest + slot_at(live, place, place >= 0, MATH), -1)


@triton.jit
def places_of(live, remembered, discount, slot, MATH: tl.constexpr):
    """The places of slots in a list of at most 2^discount, by halving; -1 where a slot is."""
    place = 0 * slot
    for i in range(discount):
        later = place + (1 << (discount - 1 - i))
        inside = (slot >= 0) & (later < remembered)
        place = tl.where(inside & (get(live + later, inside, "", MATH) <= slot), later, place)
    return tl.where(slot >= 0, place, -1)


@triton.jit
def count_reads(reads, place, mask, MATH: tl.constexpr):
    """Count a read of each of these places, where the mask is."""
    inside = mask & (place >= 0)
    put(reads + place, get(reads + place, inside, "", MATH) + READ, inside, MATH)


@triton.jit
def drawn(number):
    """`sab.ops.forgetting.drawn`."""
    count = tl.cast(number, tl.uint64) + 1
    bits = count * 0x9E3779B97F4A7C15 + SEED
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return ((bits ^ (bits >> 31)) % count).to(tl.int64)


@triton.jit
def lowest_of(x):
    """The lowest whole number of each warp."""
    return tl.inline_asm_elementwise("redux.sync.min.s32 $0, $1, -1;", "=r,r", [x], tl.int32, is_pure=False, pack=1)


@triton.jit
def first_of_warp(high, low, place):
    """The least of each warp's triples, compared number by number."""
    lowest_high = lowest_of(high)
    is_least = high == lowest_high
    lowest_low = lowest_of(tl.where(is_least, low, LARGEST))
    is_least = is_least & (low == lowest_low)
    return lowest_high, lowest_low, lowest_of(tl.where(is_least, place, LARGEST))


@triton.jit
def place_of_lowest(count, place, box, MATH: tl.constexpr):
    """The place of the lowest count of all threads; of equal ones the first. Takes a barrier."""
    if MATH == "plain":
        return tl.min(tl.where(count == tl.min(count), place, LARGEST))
    else:
        NB: tl.constexpr = count.shape[0]
        # The lower half, unsigned, as a signed number in the same order.
        low = count.to(tl.int32) ^ (-LARGEST - 1)
        high, low, place = first_of_warp((count >> 32).to(tl.int32), low, place)
        at = box + warps_of(NB) * 16
        put_shared(at, high)
        put_shared(at + 4, low)
        put_shared(at + 8, place)
        tl.debug_barrier()
        found = get_shared(box + lanes_of(NB) % NB * 16, 1, 16)
        return first_of_warp(found[0], found[1], found[2])[2]


@triton.jit
def forgotten(reads, remembered, most, discount, number, thread, box, FORGET: tl.constexpr, MATH: tl.constexpr):
    """The place in a list that the microstate of this number, just kept, takes away; `most` is its own.

    It is `remembered`, the first that is free, where there is one. Counts of reads are discounted on the way.
    """
    if FORGET == "most_read":
        lowest = tl.full(thread.shape, 2**63 - 1, tl.int64)
        gone = tl.full(thread.shape, LARGEST, tl.int32)
        tl.debug_barrier()  # other threads have counted reads
        for first in range(0, remembered, thread.numel):
            place = first + thread
            inside = place < remembered
            count = get(reads + place, inside, "", MATH)
            count -= count >> discount
            if MATH == "plain":
                tl.debug_barrier()  # several threads may have the same count: all load it before one writes over it
            put(reads + place, count, inside, MATH)
            is_lower = inside & (count < lowest)
            lowest = tl.where(is_lower, count, lowest)
            gone = tl.where(is_lower, place, gone)
        gone = place_of_lowest(lowest, gone, box, MATH)
    else:
        gone = tl.minimum(drawn(number), most).to(tl.int32)
    return tl.where(remembered < most, remembered, gone)


@triton.jit
def lost_of(live, gone, remembered, most, slot):
    """The slot that is forgotten with the place `gone`, a single number: `slot` where it is the new one, or -1."""
    old = tl.load(live + gone, mask=gone < remembered, other=-1)
    return tl.where(gone < most, old, slot)


@triton.jit
def renew(live, reads, gone, remembered, most, slot, thread, FORGET: tl.constexpr, MATH: tl.constexpr):
    """Take the place `gone` out of a list, and add a slot at its end, unless it is that slot's own."""
    last = tl.minimum(remembered, most - 1)
    tl.debug_barrier()  # what moves was discounted by other threads, and they have read the list
    for first in range(0, last, thread.numel):
        place = first + thread
        moves = (place >= gone) & (place < last)
        later = get(live + place + 1, moves, "", MATH)
        if FORGET == "most_read":
            later_reads = get(reads + place + 1, moves, "", MATH)
        tl.debug_barrier()
        put(live + place, later, moves, MATH)
        if FORGET == "most_read":
            put(reads + place, later_reads, moves, MATH)
    is_new = thread == tl.where(gone <= last, 0, -1)
    at = last + 0 * thread
    put(live + at, 0 * thread + slot, is_new, MATH)
    if FORGET == "most_read":
        put(reads + at, 0 * thread + READ, is_new, MATH)


@triton.jit
def next_best(keys, live, oldest, count, key, slot, thread, DTYPE: tl.constexpr):
    """Of the keys of the first `count` places, which are single numbers, the best after a given one: key and slot.

    Keys are ordered from the highest on, and by age where they are equal. The slot is -1 if there is none.
    """
    best = tl.full(thread.shape, float("-inf"), DTYPE)
    best_slot = tl.full(thread.shape, LARGEST, tl.int32)
    for first in range(0, count, thread.numel):
        place = first + thread
        own = oldest + slot_at(live, place, place < count, "plain")
        own_key = tl.load(keys + own, mask=place < count, other=0).to(DTYPE)
        is_after = (own_key < key) | ((own_key == key) & (own > slot))
        is_better = (own_key > best) | (best_slot == LARGEST)  # those of a thread come by age
        is_taken = (place < count) & is_after & is_better
        best = tl.where(is_taken, own_key, best)
        best_slot = tl.where(is_taken, own, best_slot)
    highest = tl.max(best)
    found = tl.min(tl.where(best == highest, best_slot, LARGEST))
    return highest, tl.where(found == LARGEST, -1, found)
