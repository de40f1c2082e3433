"""Methods that are called as long as their objects live: see `Engine.remember`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any


class Remembered:
    """Methods of objects that may go away meanwhile, in the order in which they were first added."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        """Remembers `method`, once however often it is added."""
        self._methods = [each for each in self._methods if each() is not None]
        if (reference := weakref.WeakMethod(method)) not in self._methods:
            self._methods.append(reference)

    def call(self, **arguments: Any) -> None:
        """Calls those whose objects live. What nothing holds any more is collected first: otherwise it would be called
        on those ranks alone that have not collected it yet."""
        gc.collect()
        for reference in list(self._methods):
            if (method := reference()) is not None:
                method(**arguments)
