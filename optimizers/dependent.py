"""What else of a balancer's job keeps a state: samplers and learning rates, each as long as something needs it."""

from __future__ import annotations

import weakref
from typing import Any


class Dependents:
    """They are numbered as they are made, which is the same on all ranks. Which of them live is not: ranks may be rid
    of what nothing needs at other times.

    Attributes:
        made: how many there have been.
    """

    def __init__(self) -> None:
        self.made = 0
        self._all: dict[int, weakref.ref[Any]] = {}

    def add(self, one: Any) -> None:
        """Gives `one` the next number. It is not kept alive: a script may make a loader for each epoch."""
        self.made += 1
        self._all = {number: each for number, each in self._all.items() if each() is not None}
        self._all[self.made] = weakref.ref(one)

    @property
    def named(self) -> dict[str, Any]:
        """Those that live, by their kinds and numbers."""
        living = {number: each() for number, each in self._all.items()}
        return {f"{type(one).__name__}.{number}": one for number, one in living.items() if one is not None}
