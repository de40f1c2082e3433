"""What a user passes as a number."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_whole(name: str, value: Any, *, least: int) -> None:
    """Raises ValueError for anything but a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}. Received: {value!r}.")
