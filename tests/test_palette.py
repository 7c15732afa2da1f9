"""One colour for a method or a kind of credit, and colours that can be seen."""

from __future__ import annotations

from itertools import combinations

import pytest

from sab import palette

BACKGROUNDS = {"light": "#ffffff", "dark": "#14181c"}


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", BACKGROUNDS)
def test_every_colour_is_seen_on_its_background(theme: str) -> None:
    low = {name: contrast(getattr(one, theme), BACKGROUNDS[theme]) for name, one in palette.named().items()}
    assert {name for name, value in low.items() if value < 3} == set()


@pytest.mark.parametrize("theme", BACKGROUNDS)
def test_no_two_methods_or_kinds_of_credit_have_one_colour(theme: str) -> None:
    colours = [getattr(one, theme) for one in (*palette.METHODS.values(), *palette.CREDIT.values(), palette.WRONG)]
    for one, other in combinations(colours, 2):
        parts = [(int(one[place : place + 2], 16), int(other[place : place + 2], 16)) for place in (1, 3, 5)]
        assert sum(abs(a - b) for a, b in parts) > 40, (one, other)
