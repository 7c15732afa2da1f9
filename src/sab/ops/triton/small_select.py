# type: ignore
"""The selection of the k_top best microstates, by each warp for itself."""

import triton
import triton.language as tl

from sab.ops.triton.forgetting import next_best, slot_at
from sab.ops.triton.functions import from_sortable, sortable


@triton.jit
def load_keys(keys, live, first, used, d: tl.constexpr, P: tl.constexpr):
    """Keys of 32 places from `first` on, [32, P]; 0 past those in use. Without a list `live` places are slots."""
    place = first + tl.arange(0, 32)
    slot = slot_at(live, place, place < used, "plain")
    column = tl.arange(0, P)
    mask = (place < used)[:, None] & (column < d)[None, :]
    return tl.load(keys + slot[:, None] * d + column[None, :], mask=mask, other=0)


@triton.jit
def score_keys(key, query, v, d: tl.constexpr, TERMS: tl.constexpr, MATH: tl.constexpr):
    """The scores of keys [32, P]. Half precision will do for tanh where MATH is "approximate": there are very many."""
    TERM_MATH: tl.constexpr = "halves" if MATH == "approximate" else MATH
    P: tl.constexpr = query.shape[0]
    terms = TERMS(key.to(query.dtype), query[None, :], v[None, :], TERM_MATH)
    if d < P:  # of zeros a scorer may make anything
        terms = tl.where((tl.arange(0, P) < d)[None, :], terms, 0.0)
    return tl.sum(terms, 1)


@triton.jit
def carried_line(values, part, LINES: tl.constexpr):
    """Columns 32 part to 32 part + 31 of values [P / 16, 32 LINES]."""
    if LINES == 1:
        return values
    else:
        is_part = (tl.arange(0, LINES) == part)[None, :, None]
        return tl.sum(tl.where(is_part, values.reshape(values.shape[0], LINES, 32), 0), 1)


@triton.jit
def sorted_pair(x, y):
    return tl.maximum(x, y), tl.minimum(x, y)


@triton.jit
def sorted_eight(c0, c1, c2, c3, c4, c5, c6, c7):
    """Eight numbers, highest first, by Batcher's network."""
    c0, c1 = sorted_pair(c0, c1)
    c2, c3 = sorted_pair(c2, c3)
    c4, c5 = sorted_pair(c4, c5)
    c6, c7 = sorted_pair(c6, c7)
    c0, c2 = sorted_pair(c0, c2)
    c1, c3 = sorted_pair(c1, c3)
    c4, c6 = sorted_pair(c4, c6)
    c5, c7 = sorted_pair(c5, c7)
    c1, c2 = sorted_pair(c1, c2)
    c5, c6 = sorted_pair(c5, c6)
    c0, c4 = sorted_pair(c0, c4)
    c1, c5 = sorted_pair(c1, c5)
    c2, c6 = sorted_pair(c2, c6)
    c3, c7 = sorted_pair(c3, c7)
    c2, c4 = sorted_pair(c2, c4)
    c3, c5 = sorted_pair(c3, c5)
    c1, c2 = sorted_pair(c1, c2)
    c3, c4 = sorted_pair(c3, c4)
    c5, c6 = sorted_pair(c5, c6)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def without(first, c0, c1, c2, c3, c4, c5, c6, c7):
    """Eight numbers, highest first, without the first one where it is `first`."""
    LOWEST: tl.constexpr = -2147483648
    taken = c0 == first
    c0 = tl.where(taken, c1, c0)
    c1 = tl.where(taken, c2, c1)
    c2 = tl.where(taken, c3, c2)
    c3 = tl.where(taken, c4, c3)
    c4 = tl.where(taken, c5, c4)
    c5 = tl.where(taken, c6, c5)
    c6 = tl.where(taken, c7, c6)
    c7 = tl.where(taken, LOWEST, c7)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def select(
    keys, live, ahead, used, query, v, place,
    K: tl.constexpr, d: tl.constexpr, TERMS: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The K best of the first `used` keys, highest first: scores and slots [warps, KC]; `ahead` has the first keys.

    With a list `live` it is the keys of its slots, and what is found are places in it. Each warp looks at eight lines
    of 32 candidates at a time, the first KC / 32 of which are the best of those before. A score's lowest eight bits,
    which approximate scores can spare, give way to the candidate's position: so one comparison decides who is first
    and, among equals, who is older, and candidates are found again. Each thread sorts its eight; then the best of all
    is K times the best of the 32 threads' first ones.
    """
    NB: tl.constexpr = place.shape[0]
    KC: tl.constexpr = place.shape[1]
    P: tl.constexpr = query.shape[0]
    CARRIED: tl.constexpr = KC // 32
    LOWEST: tl.constexpr = -2147483648
    best = tl.full((NB, KC), LOWEST, tl.int32)
    slots = tl.full((NB, KC), -1, tl.int32)
    for start in range(0, used, (8 - CARRIED) * 32):
        c0 = tl.full((NB, 32), LOWEST, tl.int32)
        c1 = c0
        c2 = c0
        c3 = c0
        c4 = c0
        c5 = c0
        c6 = c0
        c7 = c0
        if start > 0:
            numbered = tl.where(slots >= 0, best | (255 - place), LOWEST)
            c0 = carried_line(numbered, 0, CARRIED)
            if CARRIED == 2:
                c1 = carried_line(numbered, 1, CARRIED)
        end = tl.minimum(used, start + (8 - CARRIED) * 32)
        for first in range(start, end, 32):
            score = score_keys(ahead, query, v, d, TERMS, MATH)
            ahead = load_keys(keys, live, first + 32, used, d, P)
            line = (first - start) // 32 + CARRIED
            lane = tl.arange(0, 32)
            number = (sortable(score) & ~255) | (255 - line * 32 - lane)
            number = tl.where(first + lane < end, number, LOWEST)[None, :]
            c1 = tl.where(line == 1, number, c1)
            c2 = tl.where(line == 2, number, c2)
            c3 = tl.where(line == 3, number, c3)
            c4 = tl.where(line == 4, number, c4)
            c5 = tl.where(line == 5, number, c5)
            c6 = tl.where(line == 6, number, c6)
            c7 = tl.where(line == 7, number, c7)
        c0, c1, c2, c3, c4, c5, c6, c7 = sorted_eight(c0, c1, c2, c3, c4, c5, c6, c7)
        found = tl.full((NB, KC), LOWEST, tl.int32)
        for i in range(tl.minimum(K, end)):
            highest = tl.max(c0, 1)[:, None]
            found = tl.where(place == i, highest, found)
            c0, c1, c2, c3, c4, c5, c6, c7 = without(highest, c0, c1, c2, c3, c4, c5, c6, c7)
        position = 255 - (found & 255)
        before = tl.gather(slots, tl.minimum(position, KC - 1), 1)
        slots = tl.where(position < KC, before, start + position - KC)
        slots = tl.where(found != LOWEST, slots, -1)
        best = tl.where(found != LOWEST, found & ~255, LOWEST)
    return from_sortable(best), slots


@triton.jit
def select_exactly(
    keys, live, used, query, v, place,
    K: tl.constexpr, d: tl.constexpr, TERMS: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As `select`, by two comparisons instead of packed numbers: the score first, the slot among equals then."""
    NB: tl.constexpr = place.shape[0]
    KC: tl.constexpr = place.shape[1]
    P: tl.constexpr = query.shape[0]
    CARRIED: tl.constexpr = KC // 32
    LOWEST: tl.constexpr = float("-inf") if DTYPE == tl.float64 else -2147483648
    NUMBER: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.int32
    line = tl.arange(0, 8)[:, None, None]
    best = tl.full((NB, KC), LOWEST, NUMBER)
    slots = tl.full((NB, KC), -1, tl.int32)
    for start in range(0, used, (8 - CARRIED) * 32):
        candidates = tl.full((8, NB, 32), LOWEST, NUMBER)
        numbers = start + (line - CARRIED) * 32 + tl.arange(0, 32)[None, None, :] + tl.zeros((8, NB, 32), tl.int32)
        for part in tl.static_range(CARRIED):
            candidates = tl.where(line == part, carried_line(best, part, CARRIED)[None], candidates)
            numbers = tl.where(line == part, carried_line(slots, part, CARRIED)[None], numbers)
        end = tl.minimum(used, start + (8 - CARRIED) * 32)
        for first in range(start, end, 32):
            score = score_keys(load_keys(keys, live, first, used, d, P), query, v, d, TERMS, MATH)
            number = tl.where(first + tl.arange(0, 32) < end, sortable(score), LOWEST)
            candidates = tl.where(line == (first - start) // 32 + CARRIED, number[None, None, :], candidates)
        for i in range(tl.minimum(K, end)):
            highest = tl.max(tl.max(candidates, 0), 1)
            equal = tl.where(candidates == highest[None, :, None], numbers, 2147483647)
            chosen = tl.min(tl.min(equal, 0), 1)
            candidates = tl.where(numbers == chosen[None, :, None], LOWEST, candidates)
            best = tl.where(place == i, highest[:, None], best)
            slots = tl.where(place == i, chosen[:, None], slots)
    return from_sortable(best), slots


@triton.jit
def insert(best, slots, score, slot, place, K: tl.constexpr):
    """The K best, highest first, with a newer candidate put in where it belongs: after those that it equals."""
    ahead = tl.sum(((slots >= 0) & (best >= score)).to(tl.int32), 1)[:, None]
    before = tl.maximum(place - 1, 0)
    new_best = tl.where(place == ahead, score, tl.gather(best, before, 1))
    new_slots = tl.where(place == ahead, slot, tl.gather(slots, before, 1))
    best = tl.where(place < ahead, best, new_best)
    slots = tl.where(place < ahead, slots, new_slots)
    return best, tl.where(place < K, slots, -1)


@triton.jit
def replaced(best, slots, lost, keys, live, oldest, count, thread, place, K: tl.constexpr):
    """The K best where one of them was forgotten: without it, and with the best of the others at the end.

    The others are among the first `count` places of the list `live`, or the slots from the oldest on.
    """
    KC: tl.constexpr = place.shape[1]
    moves = place >= tl.sum(tl.where(slots == lost, place, 0), 1)[:, None]
    after = tl.minimum(place + 1, KC - 1)
    best = tl.where(moves, tl.gather(best, after, 1), best)
    slots = tl.where(moves, tl.gather(slots, after, 1), slots)
    slots = tl.where(place < K - 1, slots, -1)
    is_last = place == tl.sum((slots >= 0).to(tl.int32), 1)[:, None] - 1
    slot = tl.max(tl.where(is_last, slots, -1))
    key = tl.where(slot >= 0, tl.max(tl.where(is_last, best, float("-inf"))), float("inf"))
    key, slot = next_best(keys, live, oldest, count, key, slot, thread, best.dtype)
    return insert(best, slots, key, slot, place, K)
