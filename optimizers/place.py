"""Stable names (places) by which optimizers find their state again after a checkpoint or an elastic reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar


class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


T = TypeVar("T", bound=Stateful)


class Place:
    """The place of one optimizer among those of a balancer. The object stays the same while its name may change, as
    when an earlier optimizer is removed.

    Args:
        name: returns the present name.
    """

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """The place's present name, which is the same on all ranks."""
        return self._name()


class Places(Generic[T]):
    """Objects with state, one for each optimizer and tape of one balancer on one rank, which take one each.

    The name of an object's place is "<kind> <index>": the kind of its owner, such as "optimizer", and the number of the
    owner among those of this kind, in the order in which they take their objects.

    An optimizer takes its object when it is made, but a tape only when it is used. So state may be loaded for an owner
    that is not there yet: the object is made, loaded, and kept in its place until its owner takes it.

    Args:
        make: returns a new object, without state.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._taken: dict[str, list[T | None]] = {}  # by kind and index; None: free, while others were taken again
        self._waiting: dict[str, T] = {}  # by name, those that nobody has taken yet

    @property
    def named(self) -> dict[str, T]:
        """All objects, by the names of their places. Includes those that nobody has taken yet."""
        taken = {f"{kind} {index}": one for kind, ones in self._taken.items() for index, one in enumerate(ones) if one}
        return {**taken, **self._waiting}

    def take(self, kind: str, index: int | None = None) -> T:
        """Returns the object in a place of this kind for a new owner; a new object if none is kept there.

        Args:
            index: the number of the place among those of this kind; None: the first that is free. If another owner has
                taken it, the object of that one moves behind all others.
        """
        taken = self._taken.setdefault(kind, [])
        if index is None:
            index = next((free for free, one in enumerate(taken) if one is None), len(taken))
        taken += [None] * (index + 1 - len(taken))
        if taken[index] is not None:
            taken.append(taken[index])
        taken[index] = mine = self._waiting.pop(f"{kind} {index}", None) or self._make()
        return mine

    def place_of(self, one: T) -> tuple[str, int]:
        """The kind and the index of a taken object.

        Raises:
            KeyError: nobody has taken it, or it was removed.
        """
        for kind, taken in self._taken.items():
            if one in taken:
                return kind, taken.index(one)
        raise KeyError(f"Expected an object that take() has returned and remove() has not removed. Received: {one!r}.")

    def succeed(self, one: T, before: T) -> None:
        """Moves `one` into the place of `before`, whose owner it replaces. If `one` has an earlier place already, from
        another owner that it replaces, it stays there."""
        for taken in self._taken.values():
            if before in taken and one in taken and taken.index(before) < taken.index(one):
                taken.remove(one)
                taken[taken.index(before)] = one

    def remove(self, one: T) -> None:
        """Removes a taken object. The objects after it, of its kind, move up by one place."""
        for taken in self._taken.values():
            if one in taken:
                taken.remove(one)

    def expect(self, names: Iterable[str]) -> dict[str, T]:
        """Makes objects for those of these places that have none, and drops objects that nobody has taken in others.

        Returns:
            `named`, afterwards.
        """
        self._waiting.clear()
        taken = self.named
        self._waiting.update({name: self._make() for name in names if name not in taken})
        return self.named

    def state_dict(self) -> dict[str, Any]:
        """The state of each object, by the name of its place. Includes objects that nobody has taken yet."""
        return {name: one.state_dict() for name, one in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of each place. A taken object that has none in `state` begins anew."""
        for name, one in self.expect(state).items():
            one.load_state_dict(state.get(name, {}))
