"""Hypothesis strategies for damaged and hostile inputs, made from good ones.

A strategy draws one seed, and Python's random numbers do the rest: a draw for every choice would be much slower.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

EDGES = (0, 1, 2, 7, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, *EDGES, -1, 10**7, 2**53 + 1, 2**64, -(2**63), 10**400),
    *(-0.0, 0.5, -1.5, 1e-320, 1e299, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("a None nan 0 sab auto ../../outside /etc/passwd %s{0} <script> \x1b[2J \x00 \ud800 \u202e".split(" ")),
    *("", " ", "a\nb", "é" * 40, "x" * 5000),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1] * 300),
)
NAMES = ("data_dir", "device", "", "a\nb", "\ud800", "__class__", "self")


def _bytes(random: Random, good: Sequence[bytes]) -> bytes:
    content = bytearray(random.choice(good))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        start = random.randrange(min(random.choice((64, len(content))), len(content)) + 1)
        end = start + random.choice((0, 1, 2, 4, 8, 16, 64, 512, len(content)))
        number, size = random.choice(EDGES), random.choice((1, 2, 4, 8))
        replacement = random.choice(
            (
                b"",
                str(number).encode(),
                bytes(content[start:end]) * random.choice((1, 20)),
                random.choice(good)[end:],
                (number % 256**size).to_bytes(size, random.choice(("little", "big"))),
                bytes(one ^ 1 << random.randrange(8) for one in content[start : start + 1]),
                random.randbytes(random.randrange(40)),
            )
        )
        content[start : random.choice((start + len(replacement), end, start))] = replacement
    return bytes(content)


def _value(random: Random, good: Any) -> Any:
    holder = [copy.deepcopy(good)]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        where, key = random.choice(list(_entries(holder)))
        how, value = random.randrange(10), where[key]
        if how < 6:
            where[key] = copy.deepcopy(random.choice(VALUES))
        elif how == 6 and isinstance(where, dict):
            del where[key]
        elif how == 7 and isinstance(where, dict):
            where[random.choice((*where, *NAMES))] = value
        elif how == 8 and isinstance(value, int | float):
            where[key] = value * random.choice((-1, 2, 1000, 10**15))
        else:
            for _ in range(random.choice((1, 1, 49, 52, 200))):
                where[key] = [where[key]]
    return holder[0]


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or dictionary in a value with every place in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _entries(value[key])


def _json(random: Random, good: Any) -> bytes:
    if random.random() < 0.01:
        return b"[" * 10**5
    content = json.dumps(_value(random, good), ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")
    return _bytes(random, [content]) if random.random() < 0.2 else content


def _lines(random: Random, good: Sequence[Any]) -> bytes:
    place = random.randrange(len(good))
    return b"".join(
        (_json(random, one) if at == place else json.dumps(one).encode()) + b"\n" for at, one in enumerate(good)
    )


def _tensors(random: Random, content: bytes) -> bytes:
    if random.random() < 0.5:
        return _bytes(random, [content])
    size = int.from_bytes(content[:8], "little")
    head = _json(random, json.loads(content[8 : 8 + size]))
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def _strategy(damage: Callable[[Random, Any], Any], good: Any) -> st.SearchStrategy[Any]:
    return st.randoms(use_true_random=True).map(lambda random: damage(random, good))


damaged = functools.partial(_strategy, _bytes)
"""One of some good contents with up to four places replaced, removed, repeated, cut off or spliced."""
damaged_value = functools.partial(_strategy, _value)
"""A good JSON value with up to four entries replaced, removed, renamed, scaled or nested."""
damaged_json = functools.partial(_strategy, _json)
"""The same as text, which is damaged now and then too."""
damaged_lines = functools.partial(_strategy, _lines)
"""Lines of JSON with a damaged one among them."""
damaged_tensors = functools.partial(_strategy, _tensors)
"""A damaged safetensors file; half of the time an entry of its head is wrong, and the head's length is right."""
