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
def score_of(
    keys, live, ahead, first, after, used, query, v, q_box,
    d: tl.constexpr, TERMS: tl.constexpr, HAS_V: tl.constexpr, BY_PRODUCTS: tl.constexpr,
    P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The scores of P keys from place `first` on, as sortable numbers without their nine lowest bits, which approximate
    scores can spare; and the tile from place `after` on, which is asked for meanwhile."""
    if BY_PRODUCTS:
        score = product(ahead, query, TYPE, P, MATH, BY_ROWS=True)
        ahead = load_tile(keys, live, after, used, P, MATH)
    else:
        score = score_tile(keys, live, first, used, query, v, q_box, d, TERMS, HAS_V, P, MATH, DTYPE)
    return sortable(score.to(tl.float32)) & ~511, ahead


@triton.jit
def best_of(c0, c1, c2, c3, c4, c5, c6, c7, best, slots, is_first, K: tl.constexpr, MATH: tl.constexpr):
    """The K best of each lane's eight candidates, highest first, and of those of before, which are older: the scores,
    and the positions, of which those of before have the first 32.

    A candidate is a score whose nine lowest bits have given way to 511 less its position: so one comparison decides who
    is first and, among equals, who is older. The best of all is K times the best of the lanes' first ones.
    """
    LOWEST: tl.constexpr = -2147483648
    lane = lanes_of(best.shape[0])
    low = tl.full(best.shape, LOWEST, tl.int32)
    c8 = low
    if not is_first:
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
    return tl.where(found != LOWEST, found & ~511, LOWEST), 511 - (found & 511), found != LOWEST


@triton.jit
def round_of(
    keys, live, ahead, start, after, used, query, v, q_box, length_box, box, best, slots, is_first,
    K: tl.constexpr, d: tl.constexpr, TERMS: tl.constexpr, HAS_V: tl.constexpr, BY_PRODUCTS: tl.constexpr,
    NORMALISES: tl.constexpr, P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The K best of those of before and of 256 keys from place `start` on, all of which are scored.

    The warps score the keys and tell each other the scores; each thread sorts its eight. With NORMALISES the square of
    the length of what lies in `length_box` is found on the way, where nothing waits for it. At the end the tile from
    place `after` on is asked for.
    """
    NB: tl.constexpr = P // 16
    LOWEST: tl.constexpr = -2147483648
    lane = lanes_of(NB)
    low = tl.full((NB, 32), LOWEST, tl.int32)
    end = tl.minimum(used, start + 256)
    lines = ()
    for _ in tl.static_range(8 // NB):
        lines = lines + (low,)
    for first in range(start, end, P):
        then = tl.where(first + P < end, first + P, after)
        score, ahead = score_of(
            keys, live, ahead, first, then, used, query, v, q_box, d, TERMS, HAS_V, BY_PRODUCTS, P, TYPE, MATH, DTYPE
        )  # fmt: skip
        slot = first + unit_of(NB)
        number = score | (511 - (32 + slot - start))
        tile = (first - start) // P  # a key's two lanes keep those of two tiles
        number = tl.where((lane // 2 % 2 == tile % 2) & (slot < end), number, low)
        kept = ()
        for i in tl.static_range(8 // NB):
            kept = kept + (tl.where((lane // 2 % 2 == tile % 2) & (tile // 2 == i), number, lines[i]),)
        lines = kept
    c0, c1, c2, c3, c4, c5, c6, c7 = candidates(box, lines, MATH)
    square = tl.zeros((NB, 32), tl.float32)
    if NORMALISES and (MATH != "plain"):
        square = square_of(length_box, P, MATH)
    best, position, exists = best_of(c0, c1, c2, c3, c4, c5, c6, c7, best, slots, is_first, K, MATH)
    before = shuffled(slots, tl.minimum(position, 31), MATH)
    slots = tl.where(exists, tl.where(position < 32, before, start + position - 32), -1)
    return ahead, best, slots, square


MANY = tl.constexpr(1024)
"""More keys than this are sifted."""
SIFTED = tl.constexpr(8)
"""How many tiles are sifted before the best of what is left are found."""
TOO_MANY = tl.constexpr(32)
"""More threads than any number of warps."""


@triton.constexpr_function
def entry_of(capacity):
    """Instructions by which a warp's lanes with a score above the least put it into a list of `capacity` places."""
    return (
        "{ .reg .pred p; .reg .b32 all, i, at, number; "
        "setp.gt.s32 p, $1, $2; setp.ne.and.b32 p, $3, 0, p; vote.sync.ballot.b32 all, p, -1; "
        "and.b32 i, all, $4; popc.b32 i, i; add.s32 i, i, $5; "
        "popc.b32 all, all; add.s32 $0, all, $5; "
        f"setp.lt.and.s32 p, i, {capacity}, p; "
        "shl.b32 at, i, 2; add.s32 at, at, $6; sub.s32 number, $7, i; or.b32 number, number, $1; "
        f"@p st.shared.b32 [at], number; @p st.shared.b32 [at+{BOX.value}], $8; }}"
    )


@triton.jit
def put_shared_where(mask, at, x):
    """Store a whole number of 32 bits of each thread that the mask is true for."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.b32 [$2], $3; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [mask.to(tl.int32), at, x],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def flag_of(size):
    """The address of a number in shared memory that `threads_with` uses, for the whole program; `size` is any number.

    It is no tensor, so that what lies there can decide where the program goes on.
    """
    return tl.inline_asm_elementwise(
        "{ .shared .align 4 .b8 flag[4]; mov.u32 $0, flag; }", "=r,r", [size], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def threads_with(mask, flag):
    """How many threads the mask is true for, as one number for the whole program; takes a barrier."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 count; setp.ne.b32 p, $1, 0; bar.red.popc.u32 count, 0, p; "
        "st.shared.b32 [$2], count; mov.u32 $0, 0; }",
        "=&r,r,r",
        [mask.to(tl.int32), flag + 0 * lanes_of(mask.shape[0])],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [flag], tl.int32, is_pure=False, pack=1)


@triton.jit
def own_tile(start, used, P: tl.constexpr):
    """Where `load_tile` begins if each warp takes neighbours of the next SIFTED * P keys, and how many tiles it is."""
    tiles = (tl.minimum(used - start, SIFTED * P) + P - 1) // P
    return start + warps_of(P // 16) * (16 * tiles - 16), tiles


@triton.jit
def sift(
    keys, ahead, start, after, used, least, query, v, q_box, lists, flag,
    d: tl.constexpr, TERMS: tl.constexpr, HAS_V: tl.constexpr, BY_PRODUCTS: tl.constexpr,
    P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The next SIFTED * P keys with a score above `least`, in a list of each warp; how many warps have any, or TOO_MANY
    and more if a list is too short.

    A warp's keys are neighbours, so one list after the other they are in the order of age.
    """
    NB: tl.constexpr = P // 16
    PLACES: tl.constexpr = 256 // NB
    lane = lanes_of(NB)
    warp = warps_of(NB)
    own_list = lists + warp * (4 * PLACES)
    before = (1 << lane) - 1
    older = tl.where(lane % 2 == 0, before & 0x11111111, before & 0x22222222 | 0x11111111)  # lanes with older keys
    count = tl.zeros((NB, 32), tl.int32)
    first, tiles = own_tile(start, used, P)
    for tile in range(tiles):
        if tile % 2 == 0:
            fetch_keys(keys, start + (SIFTED + tile) * P, used, d, NB)
        then = tl.where(tile + 1 < tiles, first + 16, after)
        score, ahead = score_of(
            keys, None, ahead, first, then, used, query, v, q_box, d, TERMS, HAS_V, BY_PRODUCTS, P, TYPE, MATH, DTYPE
        )  # fmt: skip
        slot = first + unit_of(NB)
        is_own = ((lane % 4 < 2) & (slot < used)).to(tl.int32)
        count = tl.inline_asm_elementwise(
            entry_of(PLACES),
            "=&r,r,r,r,r,r,r,r,r",
            [score, least, is_own, older, count, own_list, 479 - warp * PLACES, slot],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        first += 16
    for i in tl.static_range(PLACES // 32):
        place = lane + 32 * i
        put_shared_where(place >= count, own_list + place * 4, tl.full((NB, 32), -2147483648, tl.int32))
    return ahead, threads_with(((lane == 0) & (count > 0)) | (count > PLACES), flag)


@triton.jit
def first_scored(live, used, MATH: tl.constexpr):
    """The place of the first key that `select_lanes` scores."""
    if (MATH != "plain") and (live is None):
        return tl.where(used > MANY, used - 256, 0)
    else:
        return 0


@triton.jit
def select_lanes(
    keys, live, ahead, used, query, v, q_box, length_box, box, flag,
    K: tl.constexpr, d: tl.constexpr, TERMS: tl.constexpr, HAS_V: tl.constexpr, BY_PRODUCTS: tl.constexpr,
    NORMALISES: tl.constexpr, P: tl.constexpr, TYPE: tl.constexpr, MATH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The K best of the first `used` keys, highest first: scores and slots, of each warp for itself.

    With a list `live` it is the keys of its slots, and what is found are places in it. `ahead` is the tile from
    `first_scored` on.

    In a round the warps score 256 keys and tell each other the scores; each thread sorts its eight, and the best of all
    are found with those of the rounds before. Of many keys most are compared with one number alone, which is at most
    the K-th best score: at first that of the newest 256. What is left of SIFTED * P keys is a round; if it is more than
    a round takes, all of them are taken in rounds.

    With NORMALISES the square of the length of what lies in `length_box` is found on the way, where nothing waits for
    it; it is 0 if there is no key.
    """
    NB: tl.constexpr = P // 16
    SIFTS: tl.constexpr = (MATH != "plain") and (live is None)
    PIECE: tl.constexpr = SIFTED * P
    LOWEST: tl.constexpr = -2147483648
    best = tl.full((NB, 32), LOWEST, tl.int32)
    slots = tl.full((NB, 32), -1, tl.int32)
    square = tl.zeros((NB, 32), tl.float32)
    least = best
    start = 0
    if SIFTS:
        start = tl.where(used > MANY, -PIECE, 0)
    for piece in range(start, used, PIECE):
        found = TOO_MANY
        begin = piece
        end = tl.minimum(used, piece + PIECE)
        after = end
        lists = box
        if SIFTS:
            after += tl.zeros((NB, 32), tl.int32)
            if piece < 0:
                begin = used - 256
                end = used
            if used > MANY:
                after = own_tile(piece + PIECE, used, P)[0]
                if piece >= 0:
                    lists = box + (2 + piece // PIECE % 2 * 2) * BOX
                    ahead, found = sift(
                        keys, ahead, piece, after, used, least, query, v, q_box, lists, flag,
                        d, TERMS, HAS_V, BY_PRODUCTS, P, TYPE, MATH, DTYPE,
                    )  # fmt: skip
                    if BY_PRODUCTS and found >= TOO_MANY:
                        ahead = load_tile(keys, live, piece, used, P, MATH)
        for first in range(begin, tl.where(found >= TOO_MANY, end, begin), 256):
            if SIFTS:  # what does not lie in the cache takes longer than a round
                fetch_keys(keys, first + 512, used, d, NB)
            then = tl.where(first + 256 < end, first + 256, after)
            ahead, best, slots, square = round_of(
                keys, live, ahead, first, then, used, query, v, q_box, length_box, box + first // 256 % 2 * BOX,
                best, slots, first == 0,
                K, d, TERMS, HAS_V, BY_PRODUCTS, NORMALISES, P, TYPE, MATH, DTYPE,
            )  # fmt: skip
        if SIFTS:
            if (found > 0) & (found < TOO_MANY):
                c = get_shared(lists + lanes_of(NB) * 16, 2, 512)
                c0, c1, c2, c3, c4, c5, c6, c7 = sorted_eight(c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7])
                best, position, exists = best_of(c0, c1, c2, c3, c4, c5, c6, c7, best, slots, False, K, MATH)
                before = shuffled(slots, tl.minimum(position, 31), MATH)
                listed = get_shared_number(lists + BOX + tl.maximum(position - 32, 0) * 4).to(tl.int32, bitcast=True)
                slots = tl.where(exists, tl.where(position < 32, before, listed), -1)
            if used > MANY:
                least = tl.maximum(least, shuffled(best, K - 1, MATH))
                if piece < 0:  # an older one may be as good
                    least = tl.maximum(least, LOWEST + 512) - 512
                    best = tl.full((NB, 32), LOWEST, tl.int32)
                    slots = tl.full((NB, 32), -1, tl.int32)
    return from_sortable(best), slots, square
