"""Making damaged and hostile inputs from good ones; what comes depends on the random numbers alone."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

EDGES = (0, 1, 2, 7, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e299, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("a None nan 0 sab auto ../../outside /etc/passwd %s{0} <script> \x1b[2J \x00 \ud800 \u202e".split(" ")),
    *("", " ", "a\nb", "é" * 40, "x" * 5000),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1] * 300),
)


def mutated_bytes(random: Random, good: Sequence[bytes]) -> bytes:
    """One of some good contents with a few things wrong; now and then nothing but noise."""
    if random.random() < 0.03:
        return random.randbytes(random.randrange(200))
    content = bytearray(random.choice(good))
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        random.choice(_BYTE_MUTATIONS)(random, content, good)
    return bytes(content)


def _flip_bits(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _set_number(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    """An edge of some integer type, anywhere, but most of all in the head."""
    size, code = random.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
    packed = struct.pack(random.choice("<>") + code, random.choice(EDGES) % 2 ** (8 * size))
    within = min(len(content), 64) if random.random() < 0.5 else len(content)
    if within >= size:
        place = random.randrange(within - size + 1)
        content[place : place + size] = packed


def _set_digits(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    """Another number where one is written out."""
    digits = [place for place, one in enumerate(content) if 48 <= one < 58]
    if digits:
        place = random.choice(digits)
        content[place : place + random.randrange(1, 4)] = str(random.choice(EDGES)).encode()


def _cut(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    if content:
        del content[random.randrange(len(content)) :]


def _remove(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    start, end = _slice(random, content)
    del content[start:end]


def _repeat(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    start, end = _slice(random, content)
    content[start:start] = content[start:end] * random.choice((1, 1, 2, 20))


def _insert(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    start, _ = _slice(random, content)
    content[start:start] = random.choice(
        (b"\x00", b"\xff", b"\n", b'"', b"[", b"{", random.randbytes(4))
    ) * random.choice((1, 3, 40))


def _splice(random: Random, content: bytearray, good: Sequence[bytes]) -> None:
    other = random.choice(good)
    content[random.randrange(len(content) + 1) :] = other[random.randrange(len(other) + 1) :]


_BYTE_MUTATIONS = (
    *(_flip_bits, _flip_bits, _set_number, _set_number),
    *(_set_digits, _cut, _remove, _repeat, _insert, _splice),
)


def _slice(random: Random, content: bytearray) -> tuple[int, int]:
    start = random.randrange(len(content) + 1)
    return start, min(start + random.choice((1, 4, 16, 64, 512)), len(content))


def mutated_json(random: Random, good: Any) -> bytes:
    """A good value with a few entries wrong, as text; now and then the text has something wrong besides."""
    value = mutated_value(random, good)
    try:
        text = json.dumps(value, ensure_ascii=random.random() < 0.9)
    except RecursionError:
        text = "[" * 10**5
    content = text.encode("utf-8", "surrogatepass")
    return mutated_bytes(random, [content]) if random.random() < 0.2 else content


def mutated_value(random: Random, good: Any) -> Any:
    """The same as a value."""
    holder = [copy.deepcopy(good)]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _change_entry(random, *_any_place(random, holder))
    return holder[0]


def _any_place(random: Random, holder: list[Any]) -> tuple[Any, Any]:
    """A list or dictionary somewhere in a value, and the place of one of its entries."""
    where, key = holder, 0
    while True:
        inside = where[key]
        keys = (
            list(inside) if isinstance(inside, dict) else list(range(len(inside))) if isinstance(inside, list) else []
        )
        if not keys or random.random() < 0.15:
            return where, key
        where, key = inside, random.choice(keys)


def _change_entry(random: Random, where: Any, key: Any) -> None:
    kind = random.random()
    if kind < 0.6:
        where[key] = copy.deepcopy(random.choice(VALUES))
    elif kind < 0.61:
        where[key] = _nested(random)
    elif kind < 0.8 and isinstance(where[key], int | float):
        where[key] = where[key] * random.choice((-1, 2, 1000, 10**15))
    elif isinstance(where, dict):
        if kind < 0.9:
            del where[key]
        else:
            name = random.choice((*where, "data_dir", "device", "", "a\nb", "\ud800", "__class__", "self"))
            where[name] = where[key]
    else:
        where[key] = [where[key], where[key]]


def _nested(random: Random) -> Any:
    value: Any = 1
    for _ in range(random.choice((3, 49, 52, 200, 800))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value
