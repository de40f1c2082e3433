"""What a rank has added up of batches whose exchange is yet to come: over checkpoints, commits and other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Sums = Mapping[str, Any]  # see `PartialSums.state_dict`


class Begun(Protocol):
    """Counts the global batches since the last exchange, the same on all ranks."""

    begun: int


class _Nobody:
    begun = 0


class Adder(Protocol):
    """Adds up the gradients of some shapes."""

    def sums(self) -> dict[str, Any] | None:
        """A copy of what it has added up, on whatever buckets; None for nothing."""

    def load_sums(self, sums: Mapping[str, Any] | None) -> None:
        """Goes on from `sums()`; without "apart", the next batch decides whether it is of a step apart."""


class PartialSums:
    """Those of one optimizer on one rank, by the kind of its gradients.

    An adder that is put in another one's place, or is made only when training goes on, takes over what is there for its
    kind. What is there weighs by its loss terms, so that it counts rightly on whichever ranks there are.

    Args:
        weighing: of the optimizer's gradients; None: see `follow`.
    """

    def __init__(self, weighing: Begun | None = None) -> None:
        self._weighing: Begun = weighing or _Nobody()
        self._adders: dict[str, Adder] = {}
        self._waiting: dict[str, Any] = {}  # for adders that are yet to be made

    @property
    def begun(self) -> int:
        """The global batches since the last exchange."""
        return self._weighing.begun

    def follow(self, weighing: Begun) -> None:
        """Lets `weighing` count the batches from here on."""
        weighing.begun, self._weighing = self.begun, weighing

    def put(self, kind: str, adder: Adder) -> None:
        """Registers the object that adds up gradients of a kind, and gives it the sums that wait for it."""
        self._adders[kind] = adder
        adder.load_sums(self._waiting.pop(kind, None))

    def drop(self, kind: str) -> None:
        """Removes an adder with its sums."""
        self._adders.pop(kind, None)

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's sums, and how many batches they are of."""
        live = {kind: sums for kind, adder in self._adders.items() if (sums := adder.sums()) is not None}
        return {"begun": self.begun, "kinds": {**self._waiting, **live}}

    def load_state_dict(self, state: Sums) -> None:
        """Goes on from `state`, of this rank of as many; from nothing where it is empty. All ranks do, or none."""
        self._weighing.begun = state.get("begun", 0)
        self._waiting = dict(state.get("kinds", {}))
        for kind, adder in self._adders.items():
            adder.load_sums(self._waiting.pop(kind, None))

    def give_back(self, state: Sums, *, begun: int) -> None:
        """Goes on from `state` on whichever ranks there are, all of which say `begun`."""
        kinds = {
            kind: {key: value for key, value in sums.items() if key != "apart"}  # as those that join will see it
            for kind, sums in state.get("kinds", {}).items()
        }
        self.load_state_dict({"begun": begun, "kinds": kinds})
