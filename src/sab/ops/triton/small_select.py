# type: ignore
"""The selection of the k_top best microstates, by each warp for itself."""

import triton
import triton.language as tl

from sab.ops.triton.functions import from_sortable, sortable


@triton.jit
def load_keys(keys, first, used, d: tl.constexpr, P: tl.constexpr):
    """Keys of 32 slots from `first` on, [32, P]; 0 past those in use."""
    slot = first + tl.arange(0, 32)
    column = tl.arange(0, P)
    mask = (slot < used)[:, None] & (column < d)[None, :]
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
    keys, ahead, used, query, v, place,
    K: tl.constexpr, d: tl.constexpr, TERMS: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The K best of the first `used` keys, highest first: scores and slots [P / 16, KC]; `ahead` has the first keys.

    Each warp looks at eight lines of 32 candidates at a time, the first KC / 32 of which are the best of those before.
    A score's lowest eight bits, which approximate scores can spare, give way to the candidate's position: so one
    comparison decides who is first and, among equals, who is older, and candidates are found again. Each thread sorts
    its eight; then the best of all is K times the best of the 32 threads' first ones.
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
            ahead = load_keys(keys, first + 32, used, d, P)
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
    keys, used, query, v, place,
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
            score = score_keys(load_keys(keys, first, used, d, P), query, v, d, TERMS, MATH)
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


# Selection by tensor cores
#
# The products of 64 keys with a query are matrix products, eight keys a warp, whose other factor is the query, 16 times
# below itself. The order of the columns is free as long as it is the same in both factors, so each thread takes what it
# can read at once: 32 of a key's 128 numbers, in four pieces of 16 bytes.

LOAD = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $17, 0; "
    + " ".join(f"mov.b32 ${i}, 0;" for i in range(16))
    + " ".join(f"@p ld.global.v4.b32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [$16+{16 * i}];" for i in range(0, 16, 4))
    + " }"
)
LOAD_OPERANDS = tl.constexpr(",".join(["=&r"] * 16 + ["l", "r"]))
MULTIPLY = tl.constexpr(
    "{ .reg .f32 a, b; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 a, 0f00000000; mov.f32 b, 0f00000000; "
    + " ".join(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, a, b}, "
        f"{{${10 + i}, ${10 + i}, ${11 + i}, ${11 + i}}}, {{${2 + i}, ${3 + i}}}, {{$0, $1, a, b}};"
        for i in range(0, 8, 2)
    )
    + " }"
)
MULTIPLY_OPERANDS = tl.constexpr(",".join(["=&f"] * 2 + ["r"] * 16))


@triton.jit
def load_fragments(keys, first, used, NB: tl.constexpr, MATH: tl.constexpr):
    """Keys of 64 slots from `first` on, 0 past those in use, as factors of products: a tuple of 16 [P / 16, 32].

    Where MATH is "plain", there are no such products, and these are the keys as they are, [P / 16, 8, 128].
    """
    if MATH == "plain":
        slot = first + tl.arange(0, NB)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
        return tl.load(keys + slot * 128 + tl.arange(0, 128)[None, None, :], mask=slot < used, other=0)
    else:
        lane = tl.arange(0, 32)[None, :]
        slot = first + tl.arange(0, NB)[:, None] * 8 + lane // 4
        pointer = (keys + slot * 128 + lane % 4 * 8).to(tl.int64)
        is_used = (slot < used).to(tl.int32)
        return tl.inline_asm_elementwise(
            LOAD, LOAD_OPERANDS, [pointer, is_used], dtype=(tl.int32,) * 16, is_pure=False, pack=1
        )


@triton.jit
def fragments(query, NB: tl.constexpr, MATH: tl.constexpr):
    """A query [128] in bfloat16, as the other factor of these products."""
    if MATH == "plain":
        return query
    else:
        first, second = tl.split(query.to(tl.bfloat16).to(tl.int16, bitcast=True).reshape(64, 2))
        pairs = (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
        pairs = pairs.reshape(4, 4, 4).permute(1, 0, 2).reshape(1, 1, 4, 2, 2, 2, 2)
        parts = (tl.broadcast_to(pairs, (NB, 8, 4, 2, 2, 2, 2)),)
        for _ in tl.static_range(4):  # each splits the last index, so the parts come in the order of its bits
            evens = ()
            odds = ()
            for i in tl.static_range(len(parts)):
                even, odd = tl.split(parts[i])
                evens = evens + (even,)
                odds = odds + (odd,)
            parts = evens + odds
        found = ()
        for i in tl.static_range(16):
            found = found + (parts[i].reshape(NB, 32),)
        return found


@triton.jit
def multiply(keys, query):
    """The scores of two of the eight keys of a warp, by thread: those of number 2 (lane % 4) and the next."""
    return tl.inline_asm_elementwise(
        MULTIPLY, MULTIPLY_OPERANDS, keys + query, dtype=(tl.float32, tl.float32), is_pure=False, pack=1
    )


@triton.jit
def score_fragments(keys, query, MATH: tl.constexpr):
    """The scores of the eight keys of each warp, [P / 16, 32]: a lane has that of number 2 (lane % 4) + lane // 16."""
    if MATH == "plain":
        score = tl.sum(keys.to(query.dtype) * query[None, None, :], 2)
        lane = tl.arange(0, 32)[None, :] + tl.zeros((score.shape[0], 1), tl.int32)
        return tl.gather(score, lane % 4 * 2 + lane // 16, 1)
    else:
        x0, x1 = multiply(keys[:8], query[:8])
        y0, y1 = multiply(keys[8:], query[8:])
        return tl.where(tl.arange(0, 32)[None, :] < 16, x0 + y0, x1 + y1)


@triton.jit
def select_by_products(keys, ahead, used, query, place, K: tl.constexpr, MATH: tl.constexpr):
    """As `select`, for a query and the first 64 keys as factors of products.

    A thread comes to the same two keys as seven others; two of these keep them, one each, and the others those of
    other 64 keys. So 256 are looked at in a round, and positions take nine bits.
    """
    NB: tl.constexpr = place.shape[0]
    LOWEST: tl.constexpr = -2147483648
    lane = tl.arange(0, 32)[None, :]
    own = tl.arange(0, NB)[:, None] * 8 + lane % 4 * 2 + lane // 16
    best = tl.full((NB, 32), LOWEST, tl.int32)
    slots = tl.full((NB, 32), -1, tl.int32)
    for start in range(0, used, 256):
        end = tl.minimum(used, start + 256)
        line = tl.full((NB, 32), LOWEST, tl.int32)
        for first in range(start, end, 64):
            score = score_fragments(ahead, query, MATH)
            ahead = load_fragments(keys, first + 64, used, NB, MATH)
            slot = first + own
            number = (sortable(score) & ~511) | (447 - (slot - start))  # 511 less the position, from 64 on
            line = tl.where((lane // 4 % 4 == (first - start) // 64) & (slot < end), number, line)
        # Every warp needs all of them: they are exchanged at once.
        joined = line.reshape(1, 32, 2, 2, 2)
        joined = tl.broadcast_to(joined, (NB, 32, 2, 2, 2))
        x, y = tl.split(joined)
        x0, x1 = tl.split(x)
        y0, y1 = tl.split(y)
        c0, c1 = tl.split(x0)
        c2, c3 = tl.split(x1)
        c4, c5 = tl.split(y0)
        c6, c7 = tl.split(y1)
        c0, c1, c2, c3, c4, c5, c6, c7 = sorted_eight(c0, c1, c2, c3, c4, c5, c6, c7)
        carried = tl.where(slots >= 0, best | (511 - place), LOWEST)
        found = tl.full((NB, 32), LOWEST, tl.int32)
        for i in range(tl.minimum(K, end)):
            highest = tl.max(tl.maximum(c0, carried), 1)[:, None]
            found = tl.where(place == i, highest, found)
            carried = tl.where(carried == highest, LOWEST, carried)
            c0, c1, c2, c3, c4, c5, c6, c7 = without(highest, c0, c1, c2, c3, c4, c5, c6, c7)
        position = 511 - (found & 511)
        before = tl.gather(slots, tl.minimum(position, 31), 1)
        slots = tl.where(position < 64, before, start + position - 64)
        slots = tl.where(found != LOWEST, slots, -1)
        best = tl.where(found != LOWEST, found & ~511, LOWEST)
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
