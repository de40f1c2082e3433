"""The loaders, samplers and learning-rate rules made with a balancer, whose states elastic jobs save with its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any


class StatefulParts:
    """Numbers the loaders, samplers and learning-rate rules that are made with one balancer, and saves their states.

    All ranks make these objects in the same order, so that a number means the same object on all of them. Which objects
    are alive may differ: Python frees unused ones at different times, and a rank that joins an elastic job has none of
    those that the others have made while they trained.

    Attributes:
        made: how many have been made, which is the last number given. After an elastic reset the job's state sets it
            to the largest of all ranks, so that all number alike from there on.
    """

    def __init__(self) -> None:
        self.made = 0
        self._all: dict[int, weakref.ref[Any]] = {}

    def add(self, one: Any) -> None:
        """Gives the object `one` the next number, and keeps a weak reference: a script may make a loader per epoch."""
        self.made += 1
        self._all = {number: each for number, each in self._all.items() if each() is not None}
        self._all[self.made] = weakref.ref(one)

    @property
    def named(self) -> dict[str, Any]:
        """The objects that are still alive, by names such as "BalancedBatchSampler.1": type and number."""
        living = {number: each() for number, each in self._all.items()}
        return {f"{type(one).__name__}.{number}": one for number, one in living.items() if one is not None}

    def unknown(self, state: Mapping[str, Any]) -> list[str]:
        """Returns the names in `state` for which no object is alive on this rank, sorted."""
        return sorted(state.keys() - self.named.keys())

    def state_dict(self) -> dict[str, Any]:
        """Returns the `state_dict()` of each object that is alive, by name."""
        return {name: one.state_dict() for name, one in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads its state into each object that is alive and named in `state`. Objects made since the state was saved
        stay as they are."""
        for name, one in self.named.items():
            if name in state:
                one.load_state_dict(state[name])

    def own_state_dict(self) -> dict[str, Any]:
        """Returns what is this rank's own of each object that is alive, by name: the place in a stream of its own."""
        return {name: one.own_state_dict() for name, one in self.named.items() if hasattr(one, "own_state_dict")}

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `own_state_dict` returned on the rank of this number in a job of as many ranks."""
        for name, one in self.named.items():
            if name in state:
                one.load_own_state_dict(state[name])
