"""What else of a balancer's job keeps a state: samplers and learning rates, each as long as something needs it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any


class Dependents:
    """They are numbered as they are made, which is the same on all ranks. Which of them live is not: ranks may be rid
    of what nothing needs at other times, and who joins has made nothing of what others have made while they trained.

    Attributes:
        made: how many there have been; ranks that come together go on from the same number.
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
        """The objects that are still alive, by type and number."""
        living = {number: each() for number, each in self._all.items()}
        return {f"{type(one).__name__}.{number}": one for number, one in living.items() if one is not None}

    def unknown(self, state: Mapping[str, Any]) -> list[str]:
        """The names in `state` of what does not live here."""
        return sorted(state.keys() - self.named.keys())

    def state_dict(self) -> dict[str, Any]:
        """The states of those that live."""
        return {name: one.state_dict() for name, one in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Those that live and are in `state` go on from it. One that was made since then stays what it is."""
        for name, one in self.named.items():
            if name in state:
                one.load_state_dict(state[name])
