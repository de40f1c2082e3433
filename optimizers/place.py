"""Stable names (places) by which objects find their state again after a checkpoint or an elastic reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar


class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


T = TypeVar("T", bound=Stateful)


class Place:
    """The place of one optimizer among those of a balancer: always the same object, while its name may become another.

    Args:
        name: as it is now.
    """

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """The place's present name, which is the same on all ranks."""
        return self._name()


class Places(Generic[T]):
    """What keeps something, for the exchanges of one balancer on one rank: by their kind, and of each kind in the order
    in which they are made.

    An optimizer makes its exchange as it is made itself, a tape only when it is used. So what has something to take in
    and is nobody's yet waits in its place, until somebody takes that.

    Args:
        make: a new one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._taken: dict[str, list[T | None]] = {}  # None: nobody's yet, while others are made anew
        self._waiting: dict[str, T] = {}

    @property
    def named(self) -> dict[str, T]:
        """All objects by the names of their places, also those that nobody has taken yet."""
        taken = {f"{kind} {index}": one for kind, ones in self._taken.items() for index, one in enumerate(ones) if one}
        return {**taken, **self._waiting}

    def take(self, kind: str, place: int | None = None) -> T:
        """Takes the object in a place of this kind (default: the first that is free); a new one if none waits there.
        """
        taken = self._taken.setdefault(kind, [])
        if place is None:
            place = next((index for index, one in enumerate(taken) if one is None), len(taken))
        taken += [None] * (place + 1 - len(taken))
        taken[place] = mine = self._waiting.pop(f"{kind} {place}", None) or self._make()
        return mine

    def place_of(self, one: T) -> tuple[str, int]:
        """The kind of an object, and its index among those of this kind."""
        return next((kind, taken.index(one)) for kind, taken in self._taken.items() if one in taken)

    def succeed(self, one: T, before: T) -> None:
        """Gives one the place of another that was taken before; of several such, it keeps the first."""
        for taken in self._taken.values():
            if before in taken and one in taken and taken.index(before) < taken.index(one):
                taken.remove(one)
                taken[taken.index(before)] = one

    def remove(self, one: T) -> None:
        """Says that nobody needs this one any longer."""
        for taken in self._taken.values():
            if one in taken:
                taken.remove(one)

    def expect(self, names: Iterable[str]) -> dict[str, T]:
        """`named`, with one in each of these places; in others none waits any longer."""
        self._waiting.clear()
        taken = self.named
        self._waiting.update({name: self._make() for name in names if name not in taken})
        return self.named

    def state_dict(self) -> dict[str, Any]:
        """The states by the names of their places, also what nobody has taken yet."""
        return {name: one.state_dict() for name, one in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; what has none begins anew."""
        for name, one in self.expect(state).items():
            one.load_state_dict(state.get(name, {}))
