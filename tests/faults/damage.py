"""Hypothesis strategies for damaged and hostile inputs, made from good ones."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Iterator, Sequence
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


@st.composite
def damaged(draw: Callable[..., Any], good: Sequence[bytes]) -> bytes:
    """One of some good contents with up to four places replaced, removed, repeated, cut off or spliced."""
    content = bytearray(draw(st.sampled_from(good)))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        head = draw(st.sampled_from((64, len(content))))
        start = draw(st.integers(0, min(head, len(content))))
        end = start + draw(st.sampled_from((0, 1, 2, 4, 8, 16, 64, 512, len(content))))
        number = draw(st.sampled_from(EDGES))
        code, other = draw(st.sampled_from("BHIQ")), draw(st.sampled_from(good))
        packed = struct.pack(draw(st.sampled_from("<>")) + code, number % 2 ** (8 * struct.calcsize("<" + code)))
        flipped = bytes(one ^ 1 << draw(st.integers(0, 7)) for one in content[start : start + 1])
        replacement = draw(
            st.sampled_from((b"", str(number).encode(), bytes(content[start:end]) * 20, other[end:]))
            | st.sampled_from((packed, flipped))
            | st.binary(max_size=40)
        )
        same_size = start + len(replacement)
        content[start : draw(st.sampled_from((same_size, end, start)))] = replacement
    return bytes(content)


@st.composite
def damaged_value(draw: Callable[..., Any], good: Any) -> Any:
    """A good JSON value with up to four entries replaced, removed, renamed, repeated, scaled or nested."""
    holder = [copy.deepcopy(good)]
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        where, key = draw(st.sampled_from(list(_entries(holder))))
        how, value = draw(st.integers(0, 9)), where[key]
        if how < 6:
            where[key] = copy.deepcopy(draw(st.sampled_from(VALUES) | st.integers() | st.floats() | st.text()))
        elif how == 6 and isinstance(where, dict):
            del where[key]
        elif how == 7 and isinstance(where, dict):
            where[draw(st.sampled_from((*where, *NAMES)))] = value
        elif how == 8 and isinstance(value, int | float):
            where[key] = value * draw(st.sampled_from((-1, 2, 1000, 10**15)))
        else:
            for _ in range(draw(st.sampled_from((1, 49, 52, 200, 800)))):
                where[key] = [where[key]]
    return holder[0]


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or dictionary in a value with every place in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _entries(value[key])


@st.composite
def damaged_json(draw: Callable[..., Any], good: Any) -> bytes:
    """The same as text, which is damaged now and then too."""
    text = json.dumps(draw(damaged_value(good)), ensure_ascii=draw(st.booleans()))
    content = text.encode("utf-8", "surrogatepass")
    return draw(damaged([content])) if draw(st.integers(0, 4)) == 0 else content


@st.composite
def damaged_lines(draw: Callable[..., Any], good: Sequence[Any]) -> bytes:
    """Lines of JSON with a damaged one among them."""
    place = draw(st.integers(0, len(good) - 1))
    lines = [draw(damaged_json(one)) if at == place else json.dumps(one).encode() for at, one in enumerate(good)]
    return b"".join(line + b"\n" for line in lines)


@st.composite
def damaged_tensors(draw: Callable[..., Any], content: bytes) -> bytes:
    """A damaged safetensors file; half of the time an entry of its head is wrong, and the head's length is right."""
    if draw(st.booleans()):
        return draw(damaged([content]))
    size = int.from_bytes(content[:8], "little")
    head = draw(damaged_json(json.loads(content[8 : 8 + size])))
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + content[8 + size :]
