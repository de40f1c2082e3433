"""Callbacks that do not keep their objects alive, among them those of an elastic reset: see `Engine.on_reset_end`."""

from __future__ import annotations

import contextlib
import gc
import json
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Key = tuple[int, int]
Found = Callable[[], Callable[..., Any] | None]


def weakly(method: Callable[..., Any]) -> Found:
    """A function that returns the bound `method`, or None once its object was garbage-collected.

    `weakref.WeakMethod` watches the method's function as well. It prints an error if that dies with the object, as with
    a distributed optimizer, whose class is made for it, while another thread collects the garbage.
    """
    found, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]
    return lambda: None if (owner := found()) is None else types.MethodType(function, owner)


class WeakMethods:
    """Bound methods, held by weak references, in the order in which they were first added.

    A method whose object was garbage-collected is skipped.
    """

    def __init__(self) -> None:
        self._methods: list[Found] = []

    def add(self, method: Callable[..., Any]) -> None:
        """Adds a bound method; has no effect if it was added before."""
        self._methods = [each for each in self._methods if each() is not None]
        if all(each() != method for each in self._methods):
            self._methods.append(weakly(method))

    def call(self, **arguments: Any) -> None:
        """Calls all methods whose objects are alive, with these arguments. Objects that are garbage and not collected
        yet may be among them, on some ranks alone."""
        for method in self._living():
            method(**arguments)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Calls all methods whose objects are alive, and enters the context managers that they return."""
        with contextlib.ExitStack() as stack:
            for method in self._living():
                stack.enter_context(method())
            yield

    def _living(self) -> Iterator[Callable[..., Any]]:
        for reference in list(self._methods):
            if (method := reference()) is not None:
                yield method


class Rebuilds:
    """The `rebuild` methods of `Engine.on_reset_end`, which all ranks call in the same order after an elastic reset.

    The methods make collective calls, so all ranks have to agree on which to call. They may differ: an object that is
    no longer used may still be alive on some ranks, as garbage or because a thread of the framework refers to it. And a
    rank that joins has made the objects that the script makes before `train` (the function given to
    `hvd.elastic.run`), but not those of an earlier call of `train` that was broken off. So each rank numbers its
    objects in the order of their making, and the ranks exchange the numbers (`Key`) of those that are alive.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Key | None, Found]] = []
        self._round = 0  # calls of `agree` so far in the job; the same on all ranks
        self._during = 0  # the value of `_round` when the present call of `train` began; 0 before the first call
        self._number = 0  # objects made by all ranks since then; (_during, _number) is the key of the next one

    def add(self, rebuild: Callable[[], None], *, by_all: bool) -> None:
        """Adds a bound method; has no effect if it was added before.

        Args:
            by_all: whether all ranks make the method's object, so that they must agree on calling it. False for an
                object of some ranks, as on a process set; that is called on each rank where it is alive.
        """
        if any(each() == rebuild for _, each in self._made):
            return
        self._made = [(key, each) for key, each in self._made if each() is not None]
        self._made.append(((self._during, self._number) if by_all else None, weakly(rebuild)))
        self._number += by_all

    def begin_train(self) -> None:
        """Notes that a call of `train` begins: objects that are added from here on were made in it."""
        self._during, self._number = self._round, 0

    def agree(self, gathered: Callable[[str], Sequence[str]]) -> list[Callable[[], None]]:
        """Returns the methods to call after an elastic reset, the same on all ranks; forgets all others.

        These are the methods whose objects are alive on every rank that was in the job before. If a rank has joined,
        the objects made within `train` are left out, because the new rank has not made them. A collective call.

        Args:
            gathered: an all-gather of text: takes this rank's and returns those of all ranks.

        Returns:
            Bound methods, which keep their objects alive.
        """
        if self._made:  # none at the first initialisation, and to look through all objects takes tenths of a second
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
