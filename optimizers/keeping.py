"""What codecs keep back of what one optimizer sends: over checkpoints, and from one set of ranks to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .place import Stateful

Kept = Mapping[str, tuple[Sequence[Any], float]]  # by kind: of each exchange what is not sent yet, and in which unit
GIVEN = "given"  # of a state: what was given back, and no exchange has taken yet


class Keeper(Stateful, Protocol):
    """An exchange, whose codecs may keep something back that is sent later, to whichever ranks."""

    def kept_back(self) -> Sequence[Any]: ...

    def give_back(self, kept: Sequence[Any], factor: float) -> bool: ...


@dataclass
class Count:
    """What a rank counts by itself: a number, or some, which are not changed in place."""

    value: Any

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class _Group:
    exchanges: Sequence[Keeper]
    unit: Callable[[], float]


def _unsent(group: _Group) -> tuple[Sequence[Any], float]:
    return [each.kept_back() for each in group.exchanges], group.unit()


class Keeping:
    """What the exchanges of one optimizer keep back on one rank.

    They come in groups of a kind: those of gradients, those of merges; and what is yet to be said with them. A group
    that is put in another one's place, as where ranks have changed, or that is made only when training goes on, takes
    over what is there for its kind. And what else a rank counts by itself is kept beside them, for checkpoints.

    Args:
        keeps: whether any codec keeps something back that is to be sent later. Others may have a state all the same.
        sayings: what rides in the next exchange, whichever that is.
    """

    def __init__(self, *, keeps: bool = True, sayings: Mapping[str, Stateful] | None = None) -> None:
        self.keeps = keeps
        self._groups: dict[str, _Group] = {}
        self._sayings: dict[str, Stateful] = dict(sayings or {})
        self._new: dict[str, Any] = {}  # states of exchanges and of what is counted, at the beginning
        self._states: dict[str, Any] = {}  # for groups that are yet to be made
        self._given: dict[str, tuple[Sequence[Any], float]] = {}
        self._said: dict[str, tuple[Sequence[Any], float]] = {}  # what `kept_back` returned last

    def put(self, kind: str, exchanges: Sequence[Keeper], unit: Callable[[], float]) -> None:
        """Says what a group's exchanges are, which are new, and in which unit they weigh: see `Weighing.unit`."""
        self._new[kind] = [exchange.state_dict() for exchange in exchanges]
        self._groups[kind] = _Group(exchanges, unit)
        self._take_in(kind)

    def drop(self, kind: str) -> None:
        """Removes a group with its residuals."""
        self._groups.pop(kind, None)
        self._new.pop(kind, None)

    def put_saying(self, kind: str, saying: Stateful) -> None:
        """Says what rides in the next exchange."""
        self._sayings[kind] = saying
        self._take_in(kind)

    def put_count(self, kind: str, count: Count) -> None:
        """Says what is counted on this rank, from now on: without a state it is as it is now."""
        self._new[kind] = [count.state_dict()]
        self.put_saying(kind, count)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's codecs keep from step to step: residuals, scales, factors; and what is yet to be said."""
        live = {kind: [each.state_dict() for each in parts] for kind, parts in self._parts.items()}
        return {**self._states, **live, **({GIVEN: dict(self._given)} if self._given else {})}

    @property
    def _parts(self) -> dict[str, Sequence[Stateful]]:
        groups = {kind: group.exchanges for kind, group in self._groups.items()}
        return {**{kind: [saying] for kind, saying in self._sayings.items()}, **groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, of this rank of as many; exchanges and counts without one begin anew. All ranks do, or
        none."""
        self._states = {**self._new, **state}
        self._given = dict(self._states.pop(GIVEN, {}))
        for kind in self._parts:
            self._take_in(kind)

    def kept_back(self) -> Kept:
        """What this rank's codecs have not sent yet. What that is of a state that waits is known, and in what was
        returned, once there are exchanges that take it."""
        if not self.keeps:
            return {}
        self._said = {**self._given, **{kind: _unsent(group) for kind, group in self._groups.items()}}
        return self._said

    def give_back(self, kept: Kept) -> None:
        """Sends what `kept_back` returned with the next sums, on whichever ranks there are."""
        self._given = dict(kept)
        for kind in self._groups:
            self._take_in(kind)

    def _take_in(self, kind: str) -> None:
        """Hands over what waits for this kind."""
        waits = kind in self._states
        for part, state in zip(self._parts[kind], self._states.pop(kind, ()), strict=False):
            part.load_state_dict(state)
        if (group := self._groups.get(kind)) is None:
            return
        if waits and self.keeps and kind not in self._said:
            self._said[kind] = _unsent(group)  # as it was then
        kept, unit = self._given.pop(kind, ((), 1.0))
        taken = [
            exchange.give_back(arrays, unit / group.unit())
            for exchange, arrays in zip(group.exchanges, kept, strict=False)
        ]
        if taken and not any(taken):  # of other buckets, such as there will be once gradients are seen to be sparse
            self._given[kind] = (kept, unit)
