"""What local strategies keep that is the same on all ranks, from one set of ranks or one process to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Strategy(Protocol):
    """One optimizer's, as long as the ranks are these."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def restart(self) -> None:
        """Keeps nothing."""


class Strategies:
    """The local strategies of the optimizers of one balancer, by the optimizers' numbers, with whose state theirs goes.

    A strategy is made anew where ranks have changed, and with Keras only when training goes on: what is there for its
    number waits for it.
    """

    def __init__(self) -> None:
        self._live: dict[str, Strategy] = {}
        self._waiting: dict[str, Any] = {}
        self._leader: Strategy | None = None

    def add(self, number: int, strategy: Strategy) -> None:
        """Goes on with `strategy` for the optimizer of this number."""
        key = str(number)  # as JSON has them
        self._live[key] = strategy
        if key in self._waiting:
            strategy.load_state_dict(self._waiting.pop(key))

    def remove(self, number: int) -> None:
        """Says that this optimizer has no part in what follows."""
        if (removed := self._live.pop(str(number), None)) is not None:
            self.ends(removed)

    def begins(self, strategy: Strategy) -> None:
        """Steps apart begin, which all ranks do together. The first to begin leads: its merges carry measurements and
        plans. Of two, each rank may hear first of another, and a plan would hold from another batch there."""
        self._leader = self._leader or strategy

    @property
    def lead(self) -> bool:
        """Whether the merges of one of them carry measurements and plans."""
        return self._leader is not None

    def leads(self, strategy: Strategy) -> bool:
        """Whether its merges carry measurements and plans."""
        return self._leader is strategy

    def ends(self, strategy: Strategy) -> None:
        """Steps apart are over, on all ranks."""
        if self._leader is strategy:
            self._leader = None

    def restart(self) -> None:
        """Says that strategies will be made anew."""
        self._waiting, self._live, self._leader = self.state_dict(), {}, None

    def state_dict(self) -> dict[str, Any]:
        """The states by number."""
        return {**self._waiting, **{key: strategy.state_dict() for key, strategy in self._live.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; what has none begins anew."""
        self._waiting = {key: one for key, one in state.items() if key not in self._live}
        for key, strategy in self._live.items():
            if key in state:
                strategy.load_state_dict(state[key])
            else:
                strategy.restart()
