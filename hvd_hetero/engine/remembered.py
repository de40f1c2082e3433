"""Methods that are called as long as their objects live: see `Engine.remember`."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Key = tuple[int, int]


class Remembered:
    """Methods of objects that may go away meanwhile, in the order in which they were first added."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., Any]]] = []

    def add(self, method: Callable[..., Any]) -> None:
        """Remembers `method`, once however often it is added."""
        self._methods = [each for each in self._methods if each() is not None]
        if (reference := weakref.WeakMethod(method)) not in self._methods:
            self._methods.append(reference)

    def call(self, **arguments: Any) -> None:
        """Calls those whose objects live. What nothing holds any more is collected first: otherwise it would be called
        on those ranks alone that have not collected it yet."""
        gc.collect()
        for method in self._living():
            method(**arguments)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A context within all the context managers that the methods return."""
        with contextlib.ExitStack() as stack:
            for method in self._living():
                stack.enter_context(method())
            yield

    def _living(self) -> Iterator[Callable[..., Any]]:
        for reference in list(self._methods):
            if (method := reference()) is not None:
                yield method


class Rebuilds:
    """What ranks rebuild together when they have become others, in the order in which they made it.

    They have to agree on what that is. What nothing needs any more may live on for a while on some ranks: as garbage,
    or because a thread of the framework has not let go of it. And a rank that joins makes what the script makes before
    `train`, and nothing that a `train` has made which broke off. So ranks number what they make, and say what lives.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Key | None, weakref.WeakMethod[Callable[[], None]]]] = []
        self._round = 0  # how often ranks have come together; the same on all of them
        self._during = 0  # the round of the `train` under way; 0 before the first
        self._number = 0

    def add(self, rebuild: Callable[[], None], *, by_all: bool) -> None:
        """Remembers the method, once however often it is added. `by_all`: all ranks make its object."""
        reference = weakref.WeakMethod(rebuild)
        if any(each == reference for _, each in self._made):
            return
        self._made = [(key, each) for key, each in self._made if each() is not None]
        self._made.append(((self._during, self._number) if by_all else None, reference))
        self._number += by_all

    def enter(self) -> None:
        """`train` begins: what is made from here on is made by it."""
        self._during, self._number = self._round, 0

    def agree(self, gathered: Callable[[str], Sequence[str]]) -> list[Callable[[], None]]:
        """What to call for what lives on all ranks that were there; the rest is remembered no more.

        `gathered` returns what it is called with on each rank. What is returned holds its objects.
        """
        gc.collect()
        alive = [(key, reference, method) for key, reference in self._made if (method := reference()) is not None]
        mine = {"round": self._round, "made": [key for key, *_ in alive if key is not None]}
        said = list(map(json.loads, gathered(json.dumps(mine))))
        self._round = 1 + max(one["round"] for one in said)
        stayed = [one for one in said if one["round"]] or said
        joined = len(stayed) < len(said)
        common = set.intersection(*(set(map(tuple, one["made"])) for one in stayed))
        alive = [one for one in alive if one[0] is None or one[0] in common and not (joined and one[0][0])]
        self._made = [(key, reference) for key, reference, _ in alive]
        return [method for *_, method in alive]
