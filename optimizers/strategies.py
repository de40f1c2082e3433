"""What local strategies keep that is the same on all ranks, from one set of ranks or one process to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .place import Place


class Strategy(Protocol):
    """The local strategy of one optimizer; it lives until an elastic reset."""

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is one of the same parameters."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def restart(self) -> None:
        """Begins anew, without state."""


class Strategies:
    """The local strategies of the optimizers of one balancer, by the optimizers' places (see `Places`).

    A strategy is made anew where ranks have changed, and with Keras only when training goes on: what is there for its
    place waits for it.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Place, Strategy]] = []
        self._waiting: dict[str, Any] = {}
        self._handed: dict[str, Any] = {}  # of optimizers that others have taken over
        self._leader: Strategy | None = None

    @property
    def _live(self) -> dict[str, Strategy]:
        return {place.name: strategy for place, strategy in self._made}

    def add(self, place: Place, strategy: Strategy) -> None:
        """Goes on with `strategy` for the optimizer in this place."""
        self._made.append((place, strategy))
        handed = self._handed.pop(place.name, None)
        if place.name in self._waiting:
            strategy.load_state_dict(self._waiting.pop(place.name))
        elif handed is not None and strategy.fits(handed):
            strategy.load_state_dict(handed)

    def hand_over(self, place: Place, to: Place) -> None:
        """Says that another optimizer, in this place, has taken over the one in that, and may go on with its state."""
        for mine, strategy in self._made:
            if mine is place:
                self._handed[to.name] = strategy.state_dict()

    def remove(self, place: Place) -> None:
        """Says that this optimizer has no part in what follows."""
        for mine, strategy in self._made:
            if mine is place:
                self.ends(strategy)
        self._made = [each for each in self._made if each[0] is not place]

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
        self._waiting, self._made, self._handed, self._leader = self.state_dict(), [], {}, None

    def state_dict(self) -> dict[str, Any]:
        """The states by place."""
        return {**self._waiting, **{key: strategy.state_dict() for key, strategy in self._live.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; what has none begins anew."""
        live = self._live
        self._waiting = {key: one for key, one in state.items() if key not in live}
        for key, strategy in live.items():
            if key in state:
                strategy.load_state_dict(state[key])
            else:
                strategy.restart()
