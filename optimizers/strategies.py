"""Keeps the states of local strategies over checkpoints and elastic resets; these states are the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .place import Place


class Strategy(Protocol):
    """The local strategy of one optimizer (its rounds of local steps and merges). An elastic reset makes a new one."""

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this strategy can go on from `state`: it is of the same parameters, and of such an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def restart(self) -> None:
        """Resets this strategy to its initial state."""


class StrategyRegistry:
    """The local strategies of all optimizers of one balancer, by the optimizers' places (see `Places`).

    A strategy is made anew after an elastic reset, in Keras not before training continues. A state that is loaded
    earlier is kept for its place until then.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Place, Strategy]] = []
        self._waiting: dict[str, Any] = {}
        self._handed: dict[str, Any] = {}  # states of replaced optimizers' strategies, by the place of the successor
        self._leader: Strategy | None = None  # the strategy whose merges carry measurements and plans

    @property
    def _live(self) -> dict[str, Strategy]:
        return {place.name: strategy for place, strategy in self._made}

    def add(self, place: Place, strategy: Strategy) -> None:
        """Adds the strategy of the optimizer in this place, and loads the state that is kept for the place, if any."""
        self._made.append((place, strategy))
        handed = self._handed.pop(place.name, None)
        if place.name in self._waiting:
            strategy.load_state_dict(self._waiting.pop(place.name))
        elif handed is not None and strategy.fits(handed):
            strategy.load_state_dict(handed)

    def hand_over(self, place: Place, to: Place) -> None:
        """Says that the optimizer in the place `to` replaces the one in `place`. The strategy that is added for `to`
        next loads the present state, if it fits."""
        for mine, strategy in self._made:
            if mine is place:
                self._handed[to.name] = strategy.state_dict()

    def remove(self, place: Place) -> None:
        """Removes the strategy of the optimizer in this place, which trains no more."""
        for mine, strategy in self._made:
            if mine is place:
                self.ends(strategy)
        self._made = [each for each in self._made if each[0] is not place]

    @property
    def empty(self) -> bool:
        """Whether no optimizer has a local strategy now."""
        return not self._made

    def begins(self, strategy: Strategy) -> None:
        """Says that the local steps of `strategy` begin, on all ranks at once. The first strategy to begin leads: its
        merges carry the measurements and plans. They travel with one strategy only, since merges of two may end in a
        different order on each rank, and a new plan would then hold from different batches."""
        self._leader = self._leader or strategy

    @property
    def lead(self) -> bool:
        """Whether merges of any strategy carry the measurements and plans, in place of the exchanges of gradients."""
        return self._leader is not None

    def leads(self, strategy: Strategy) -> bool:
        """Whether the merges of `strategy` carry the measurements and plans."""
        return self._leader is strategy

    def ends(self, strategy: Strategy) -> None:
        """Says that the local steps of `strategy` are over, on all ranks."""
        if self._leader is strategy:
            self._leader = None

    def restart(self) -> None:
        """Forgets all strategies but keeps their states for the new ones; is called at an elastic reset."""
        self._waiting, self._made, self._handed, self._leader = self.state_dict(), [], {}, None

    def state_dict(self) -> dict[str, Any]:
        """The states of all strategies by the name of the place, also those kept for strategies to be made."""
        return {**self._waiting, **{key: strategy.state_dict() for key, strategy in self._live.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads `state`. Strategies without a state in it are reset; states without a strategy are kept for later."""
        live = self._live
        self._waiting = {key: one for key, one in state.items() if key not in live}
        for key, strategy in live.items():
            if key in state:
                strategy.load_state_dict(state[key])
            else:
                strategy.restart()
