"""Checks of numbers that a user passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


def check_whole(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    """Raises ValueError, naming the argument, unless `value` is an integer >= `least`, or None if `optional`."""
    if value is None and optional:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        wanted = f"an integer of at least {least}{' or None' if optional else ''}"
        raise ValueError(f"{name}: expected {wanted}. Received: {value!r}.")


def number_of(name: str, value: Any) -> float:
    """A number, or the one element of an array or tensor, as a float. Raises TypeError, naming the argument, for
    anything else, as an array of several."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and math.prod(getattr(value, "shape", (0,))) == 1:
            raise  # an error of the device, which comes to light where it is waited for
        of = f"a {type(value).__name__} of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise TypeError(f"{name}: expected a number, or an array of one element. Received: {of}.") from error


def check_integer(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is an integer."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer. Received: {value!r}.")


def check_divisor(name: str, value: Any) -> None:
    """Raises ValueError, naming the argument, unless `value` is a finite number other than 0."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or value == 0:
        raise ValueError(f"{name}: expected a finite number other than 0. Received: {value!r}.")


def check_state(state: Any, *names: str, of: str) -> None:
    """Raises for what is no state that an object's `state_dict()` gave.

    Args:
        names: the entries that it has to have.
        of: what the object is, for the error.

    Raises:
        TypeError: `state` is no dict.
        ValueError: it has other entries.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected what state_dict() of {of} returned. Received: {state!r}.")
    if missing := [name for name in names if name not in state]:
        received = f"a dict with {', '.join(map(repr, state))}" if state else "an empty dict"
        raise ValueError(
            f"state: expected what state_dict() of {of} returned, with {', '.join(map(repr, missing))}. Received: "
            f"{received}."
        )
