"""The checks behind every option: what passes comes back as a plain number, what does not gets one sentence."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sab.errors import (
    LONGEST_SENTENCE,
    UserError,
    UserTypeError,
    UserValueError,
    check_bool,
    check_choice,
    check_float,
    check_int,
)


@given(st.integers(-5, 5), st.integers(-5, 5))
def test_check_int_takes_what_is_large_enough(value: int, minimum: int) -> None:
    if value >= minimum:
        assert check_int("k", value, minimum) == value
    else:
        with pytest.raises(ValueError, match=rf"^k must be a whole number of at least {minimum}; got {value}\.$"):
            check_int("k", value, minimum)


@pytest.mark.parametrize("value", [np.int32(3), np.uint8(3), torch.tensor(3), 3])
def test_check_int_gives_a_plain_int(value: Any) -> None:
    assert type(check_int("k", value, 1)) is int


@pytest.mark.parametrize("value", [True, False, 3.0, "3", [3], b"3", Fraction(3), torch.ones(2), np.float64(3), None])
def test_check_int_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^k must be a whole number of at least 1; got ") as caught:
        check_int("k", value, 1)
    assert repr(value) in str(caught.value)


def test_check_int_allows_none_where_it_is_optional() -> None:
    assert check_int("k", None, 1, optional=True) is None
    with pytest.raises(ValueError, match=r"^k must be a whole number of at least 1, or None; got 0\.$"):
        check_int("k", 0, 1, optional=True)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_check_float_gives_a_plain_float(value: Any) -> None:
    assert type(check_float("p", value, minimum=0, maximum=1)) is float


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, -math.inf, pytest.param(10**400, id="huge")])
def test_check_float_refuses_what_is_out_of_bounds(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^p must be a finite number of at least 0 and at most 1; got ") as caught:
        check_float("p", value, minimum=0, maximum=1)
    assert isinstance(caught.value, UserError)


def test_check_float_names_each_bound() -> None:
    with pytest.raises(ValueError, match=r"^lr must be a finite number above 0; got 0\.$"):
        check_float("lr", 0, above=0)
    with pytest.raises(ValueError, match=r"^lr must be a finite number; got nan\.$"):
        check_float("lr", math.nan)
    assert check_float("lr", -3) == -3.0


@pytest.mark.parametrize("value", ["0.5", None, True, [0.5], 1j, np.zeros(3), torch.zeros(3)])
def test_check_float_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^p must be a finite number at most 1; got ") as caught:
        check_float("p", value, maximum=1)
    assert isinstance(caught.value, UserError)


def test_check_bool() -> None:
    assert check_bool("flag", True) is True
    assert check_bool("flag", False) is False
    for value in (0, 1, None, "yes", np.bool_(True)):
        with pytest.raises(TypeError, match=r"^flag must be True or False; got "):
            check_bool("flag", value)


def test_check_choice() -> None:
    assert check_choice("cell", "gru", ("lstm", "gru")) == "gru"
    assert check_choice("cell", "gru", {"lstm": 1, "gru": 2}) == "gru"
    with pytest.raises(ValueError, match=r"^cell must be one of lstm, gru; got 'GRU'\.$"):
        check_choice("cell", "GRU", ("lstm", "gru"))
    with pytest.raises(TypeError, match=r"^cell must be one of lstm, gru, or a callable; got \['gru'\]\.$"):
        check_choice("cell", ["gru"], ("lstm", "gru"), also=", or a callable")


@pytest.mark.parametrize(("kind", "base"), [(UserValueError, ValueError), (UserTypeError, TypeError)])
def test_mistakes_are_ordinary_errors(kind: type[UserError], base: type[Exception]) -> None:
    error = kind("k must be 1; got 2.", "k")
    assert isinstance(error, base)
    assert isinstance(error, UserError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.option) == ("k must be 1; got 2.", "k")
    assert kind("no option").option is None


def test_a_mistake_is_one_line_of_some_length() -> None:
    assert str(UserValueError("a\nb \x1b[2J \ud800 é")) == r"a\nb \x1b[2J \ud800 é"
    assert len(str(UserValueError("x" * 10**6))) < LONGEST_SENTENCE + 10
