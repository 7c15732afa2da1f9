# type: ignore
"""The selection of the k_top best microstates for `lanes_forward`: P keys at a time, one a lane as units are."""

import triton
import triton.language as tl

from sab.ops.triton.access import get
from sab.ops.triton.forgetting import slot_at
from sab.ops.triton.functions import from_sortable, sortable
from sab.ops.triton.lanes import (
    BOX,
    get_four,
    get_shared,
    get_shared_number,
    lanes_of,
    outputs_of,
    product,
    put_shared,
    shuffled,
    swapped,
    total_of_lanes,
    unit_of,
    warps_of,
)
from sab.ops.triton.small_select import sorted_eight, sorted_pair


@triton.constexpr_function
def key_loads_of(count):
    """Instructions that load 16 bytes of every 64, `count` times of each of two rows."""
    first, second, both = (f"${8 * count + i}" for i in range(3))
    text = f"{{ .reg .pred p, q; setp.gt.s32 p, {both}, 0; setp.gt.s32 q, {both}, 8; "
    for c in range(count):
        for row, address, guard in ((0, first, "p"), (1, second, "q")):
            i = 8 * c + 4 * row
            text += f" @{guard} ld.global.v4.b32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [{address}+{64 * c}];"
    return text + " }"


@triton.jit
def load_tile(keys, live, first, used, P: tl.constexpr, MATH: tl.constexpr):
    """P keys of P numbers from place `first` on, anything past those in use, as a left operand of products."""
    NB: tl.constexpr = P // 16
    if MATH == "plain":
        place = first + unit_of(NB)[:, :, None]
        slot = slot_at(live, place, place < used, MATH)
        return tl.load(keys + slot * P + tl.arange(0, P)[None, None, :], mask=place < used, other=0)
    else:
        lane = lanes_of(NB)
        place = first + warps_of(NB) * 16 + lane // 4
        pointer = (keys + slot_at(live, place, place < used, MATH) * P + lane % 4 * 8).to(tl.int64)
        second = pointer + 16 * P
        if live is not None:
            slot = slot_at(live, place + 8, place + 8 < used, MATH)
            second = (keys + slot * P + lane % 4 * 8).to(tl.int64)
        return tl.inline_asm_elementwise(
            key_loads_of(P // 32),
            outputs_of(P // 4, "l", "l", "r"),
            [pointer, second, used - place],
            dtype=(tl.int32,) * (P // 4),
            is_pure=False,
            pack=1,
        )


@triton.jit
def score_tile(
    keys, live, first, used, query, v, box,
    d: tl.constexpr, TERMS: tl.constexpr, HAS_V: tl.constexpr, P: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The scores of P keys from place `first` on, by `unit_of`, for a query in a box, in float32.

    Half precision will do for tanh where MATH is "approximate": there are very many.
    """
    TERM_MATH: tl.constexpr = "halves" if MATH == "approximate" else MATH
    NB: tl.constexpr = P // 16
    lane = lanes_of(NB)
    place = first + warps_of(NB) * 16 + lane // 4
    if MATH == "plain":
        place = first + unit_of(NB)[:, :, None]
        column = tl.arange(0, P)[None, None, :]
        slot = slot_at(live, place, place < used, MATH)
        key = tl.load(keys + slot * d + column, mask=(place < used) & (column < d), other=0).to(DTYPE)
        v_row = tl.load(v + column, mask=column < d, other=0).to(DTYPE)
        terms = TERMS(key, query[None, None, :], v_row, TERM_MATH)
        return tl.sum(tl.where(column < d, terms, 0.0), 2)
    else:
        scores = ()
        for row in tl.static_range(2):
            own = place + 8 * row
            slot = slot_at(live, own, own < used, MATH)
            score = tl.zeros((NB, 32), tl.float32)
            for c in tl.static_range(P // 16):
                column = c // 2 * 32 + c % 2 * 4 + lane % 4 * 8
                key = get_four(keys + slot * d, column, own < used, d, DTYPE, MATH)
                q_four = get_shared(box + column * 4, 1, 16)
                for i in tl.static_range(4):
                    v_entry = score
                    if HAS_V:  # a parameter may lie anywhere, not only where four numbers can be loaded at once
                        v_entry = get(v + column + i, column + i < d, "", MATH).to(DTYPE)
                    term = TERMS(key[i], q_four[i].to(tl.float32, bitcast=True), v_entry, TERM_MATH)
                    if d < P:  # of zeros a scorer may make anything
                        term = tl.where(column + i < d, term, 0.0)
                    score += term
            score += swapped(score, 1, MATH)
            scores = scores + (score + swapped(score, 2, MATH),)
        return tl.where(lane % 2 == 0, scores[0], scores[1])


@triton.jit
def fetch_keys(keys, first, used, d: tl.constexpr, NB: tl.constexpr):
    """Asks for the 256 keys from slot `first` on to come into the second cache, and waits for none."""
    LINE: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
    own = (warps_of(NB) * 32 + lanes_of(NB)) * LINE
    for i in tl.static_range((256 * d + 32 * NB * LINE - 1) // (32 * NB * LINE)):
        at = first * d + own + i * (32 * NB * LINE)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [(keys + at).to(tl.int64), (at < used * d).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def highest_of(x, MATH: tl.constexpr):
    """The highest whole number of each warp."""
    if MATH == "plain":
        return tl.max(x, 1)[:, None] + tl.zeros(x.shape, tl.int32)
    else:
        return tl.inline_asm_elementwise("redux.sync.max.s32 $0, $1, -1;", "=r,r", [x], tl.int32, is_pure=False, pack=1)


@triton.jit
def candidates(box, lines, MATH: tl.constexpr):
    """256 numbers of all warps, eight for each lane, highest first; takes a barrier."""
    NB: tl.constexpr = lines[0].shape[0]
    lane = lanes_of(NB)
    if MATH == "plain":
        found = ()
        for i in tl.static_range(len(lines)):
            for warp in tl.static_range(NB):
                is_own = tl.arange(0, NB)[:, None] == warp
                one = tl.sum(tl.where(is_own, lines[i].to(tl.int64), 0), 0).to(tl.int32)
                found = found + (one[None, :] + tl.zeros((NB, 1), tl.int32),)
    else:
        for i in tl.static_range(len(lines)):
            put_shared(box + ((i * NB + warps_of(NB)) * 32 + lane) * 4, lines[i])
        tl.debug_barrier()
        found = get_shared(box + lane * 16, 2, 512)
    return sorted_eight(found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7])


@triton.jit
def square_of(box, P: tl.constexpr, MATH: tl.constexpr):
    """The square of the length of a vector of float32 in a box."""
    NB: tl.constexpr = P // 16
    lane = lanes_of(NB)
    square = tl.zeros((NB, 32), tl.float32)
    for i in tl.static_range(P // 32):
        part = get_shared_number(box + (lane + 32 * i) * 4)
        square += part * part
    return total_of_lanes(square, MATH)


@triton.jit
def select_lanes(
    keys, live, ahead, used, query, v, q_box, length_box, box,
    K: tl.constexpr, d: tl.constexpr, TERMS: tl.constexpr, HAS_V: tl.constexpr, BY_PRODUCTS: tl.constexpr,
    NORMALISES: tl.constexpr, P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The K best of the first `used` keys, highest first: scores and slots, of each warp for itself.

    With a list `live` it is the keys of its slots, and what is found are places in it. In a round the warps score 256
    keys and tell each other the scores. A score's lowest nine bits, which approximate scores can spare, give way to the
    candidate's position: so one comparison decides who is first and, among equals, who is older. Each thread sorts its
    eight; then the best of all is K times the best of the lanes' first ones. With NORMALISES the square of the length
    of what lies in `length_box` is found on the way, where nothing waits for it; it is 0 if there is no key.
    """
    NB: tl.constexpr = P // 16
    LOWEST: tl.constexpr = -2147483648
    lane = lanes_of(NB)
    own = unit_of(NB)
    best = tl.full((NB, 32), LOWEST, tl.int32)
    slots = tl.full((NB, 32), -1, tl.int32)
    square = tl.zeros((NB, 32), tl.float32)
    low = tl.full((NB, 32), LOWEST, tl.int32)
    for start in range(0, used, 256):
        end = tl.minimum(used, start + 256)
        if (MATH != "plain") and (live is None):  # what does not lie in the cache takes longer than a round
            fetch_keys(keys, start + 512, used, d, NB)
        lines = ()
        for _ in tl.static_range(8 // NB):
            lines = lines + (low,)
        for first in range(start, end, P):
            if BY_PRODUCTS:
                score = product(ahead, query, TYPE, P, MATH, BY_ROWS=True)
                ahead = load_tile(keys, live, first + P, used, P, MATH)
            else:
                score = score_tile(keys, live, first, used, query, v, q_box, d, TERMS, HAS_V, P, MATH, DTYPE)
            slot = first + own
            position = 32 + slot - start  # after those of the rounds before
            number = (sortable(score.to(tl.float32)) & ~511) | (511 - position)
            tile = (first - start) // P  # a key's two lanes keep those of two tiles
            number = tl.where((lane // 2 % 2 == tile % 2) & (slot < end), number, low)
            after = ()
            for i in tl.static_range(8 // NB):
                after = after + (tl.where((lane // 2 % 2 == tile % 2) & (tile // 2 == i), number, lines[i]),)
            lines = after
        c0, c1, c2, c3, c4, c5, c6, c7 = candidates(box + start // 256 % 2 * BOX, lines, MATH)
        if NORMALISES and (MATH != "plain"):
            square = square_of(length_box, P, MATH)
        c8 = low
        if start > 0:  # the best of the rounds before take their places
            carried = tl.where(slots >= 0, best | (511 - lane), LOWEST)
            c0, carried = sorted_pair(c0, carried)
            c1, carried = sorted_pair(c1, carried)
            c2, carried = sorted_pair(c2, carried)
            c3, carried = sorted_pair(c3, carried)
            c4, carried = sorted_pair(c4, carried)
            c5, carried = sorted_pair(c5, carried)
            c6, carried = sorted_pair(c6, carried)
            c7, c8 = sorted_pair(c7, carried)
        found = low
        for i in tl.static_range(K):
            highest = highest_of(c0, MATH)
            found = tl.where(lane == i, highest, found)
            taken = c0 == highest
            c0 = tl.where(taken, c1, c0)
            c1 = tl.where(taken, c2, c1)
            c2 = tl.where(taken, c3, c2)
            c3 = tl.where(taken, c4, c3)
            c4 = tl.where(taken, c5, c4)
            c5 = tl.where(taken, c6, c5)
            c6 = tl.where(taken, c7, c6)
            c7 = tl.where(taken, c8, c7)
            c8 = tl.where(taken, low, c8)
        position = 511 - (found & 511)
        before = shuffled(slots, tl.minimum(position, 31), MATH)
        slots = tl.where(position < 32, before, start + position - 32)
        slots = tl.where(found != LOWEST, slots, -1)
        best = tl.where(found != LOWEST, found & ~511, LOWEST)
    return from_sortable(best), slots, square
