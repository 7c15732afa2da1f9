"""Mistakes of the caller: one sentence that names the option, what it may be and what was given.

`UserValueError` is a `ValueError`, `UserTypeError` a `TypeError`, so that Python code catches what it expects to;
the command line catches `UserError` alone, so that a bug in this library still shows its traceback.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, overload

LARGEST_INT = 2**63 - 1
"""What torch's and the kernels' integers hold."""

LONGEST_SENTENCE = 4000
"""Of a longer one the middle is left out."""


class UserError(Exception):
    """A mistake of the caller. `option` is the name of what was wrong, if one option was."""

    def __init__(self, sentence: str, option: str | None = None):
        if len(sentence) > LONGEST_SENTENCE:
            sentence = f"{sentence[: LONGEST_SENTENCE // 2]} … {sentence[-LONGEST_SENTENCE // 2 :]}"
        super().__init__(printable(sentence))
        self.option = option


def printable(given: object) -> str:
    """Anything as text in one line that any terminal and any file shows as it is, such as the name of a folder: control
    characters, those that turn the direction and what is no character are escaped."""
    text = str(given)
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class UserValueError(UserError, ValueError):
    """The value is of the right type but not one of those that are allowed."""


class UserTypeError(UserError, TypeError):
    """The value is of the wrong type."""


class SlowBackendWarning(UserWarning):
    """A layer with `backend="auto"` runs on the slow reference, since no fast backend supports the call."""


@overload
def check_int(option: str, value: Any, minimum: int, *, maximum: int | None = None) -> int: ...
@overload
def check_int(option: str, value: Any, minimum: int, optional: bool, maximum: int | None = None) -> int | None: ...
def check_int(option: str, value: Any, minimum: int, optional: bool = False, maximum: int | None = None) -> int | None:
    """`value` as an int of at least `minimum` and at most `maximum` (or what 64 bits hold), or None where allowed."""
    if value is None and optional:
        return None
    largest = LARGEST_INT if maximum is None else maximum
    allowed = f"a whole number of at least {minimum}" + (", or None" if optional else "")
    if isinstance(value, bool):
        raise UserTypeError(f"{option} must be {allowed}; got {value!r}.", option)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UserTypeError(f"{option} must be {allowed}; got {value!r}.", option) from None
    if number > largest:
        raise UserValueError(f"{option} must be {allowed}, and at most {largest}; got {value!r}.", option)
    if number < minimum:
        raise UserValueError(f"{option} must be {allowed}; got {value!r}.", option)
    return number


def check_float(
    option: str,
    value: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """`value` as a finite float with minimum <= value <= maximum and above < value < below, where these are given."""
    bounds = [f"of at least {minimum:g}"] if minimum is not None else []
    bounds += [f"above {above:g}"] if above is not None else []
    bounds += [f"at most {maximum:g}"] if maximum is not None else []
    bounds += [f"below {below:g}"] if below is not None else []
    allowed = f"a finite number {' and '.join(bounds)}".strip()
    wrong_type = UserTypeError(f"{option} must be {allowed}; got {value!r}.", option)
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise wrong_type
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # an array, and not a number
        raise wrong_type from None
    too_low = (minimum is not None and number < minimum) or (above is not None and number <= above)
    too_high = (maximum is not None and number > maximum) or (below is not None and number >= below)
    if not math.isfinite(number) or too_low or too_high:
        raise UserValueError(f"{option} must be {allowed}; got {value!r}.", option)
    return number


def check_bool(option: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise UserTypeError(f"{option} must be True or False; got {value!r}.", option)
    return value


def check_choice(option: str, value: Any, allowed: Iterable[str], also: str = "") -> str:
    """`value`, which must be one of the names `allowed`; `also` ends the sentence's list of what may be given."""
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return value
    sentence = f"{option} must be one of {', '.join(names)}{also}; got {value!r}."
    raise (UserValueError if isinstance(value, str) else UserTypeError)(sentence, option)
