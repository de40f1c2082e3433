"""Engines without Horovod: `SoloEngine` (one rank) and `World(n)` (n ranks as threads of this process).

`World` adds in rank order, so that its sums are the same in every run; that makes laws about more than two ranks
testable bit by bit. It works on anything that `numpy.asarray` sees without a copy: numpy arrays, CPU torch tensors.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from .callback import WeakMethods
from .port import CollectiveError, Op, checked_splits
from .thread_group import Call, ThreadGroup

T = TypeVar("T")


class _Pending:
    """One rank's handle of a `Call`.

    Args:
        mine: the array that the rank passed in.
        in_place: whether the result is `mine` itself; else it is a new array of the same kind (numpy or torch).
        around: the contexts to enter during a wait: see `Engine.during_waits`.
    """

    def __init__(
        self, group: ThreadGroup, call: Call, rank: int, name: str, mine: Any, in_place: bool, around: WeakMethods
    ) -> None:
        self.group, self.call, self.rank, self.name, self.mine, self.in_place = group, call, rank, name, mine, in_place
        self._around, self._over = around, False

    def done(self) -> bool:
        self._check()
        return self.call.ready.is_set()

    def _check(self) -> None:
        """Raises RuntimeError if the operation was waited for before: Horovod forgets its handle then as well."""
        if self._over:
            raise RuntimeError(f"{self.name!r}: expected an operation under way. Received: one that was waited for.")

    def wait(self) -> Any:
        self._check()
        self._over = True
        with self.group.waiting(self.call), self._around.entered():
            while not self.call.ready.wait(0.05):
                self.group.check(self.name, self.call.ready.is_set)
        if self.call.error is not None:
            raise CollectiveError(self.call.error)
        if self.in_place:
            return self.mine
        result = self.call.results[self.rank]
        return result if isinstance(self.mine, np.ndarray) else self.mine.new_tensor(result)


class LocalEngine:
    """A rank of a `ThreadGroup`; see the port for what each method does."""

    failure: tuple[type[Exception], ...] = (CollectiveError,)

    def __init__(
        self, group: ThreadGroup, rank: int, ranks: tuple[int, ...], around: WeakMethods | None = None
    ) -> None:
        self._group, self._rank, self._ranks = group, rank, ranks
        self._around = around or WeakMethods()  # the contexts around this rank's waits
        self._named = itertools.count(1)
        self._rebuilds, self._forgets = WeakMethods(), WeakMethods()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalEngine:
        """The engine itself: a copy of what refers to it, as of a callback, is on the same ranks."""
        return self

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def identity(self) -> int:
        return self._ranks[self._rank]

    @property
    def kind(self) -> int:
        return 0

    def quota_cores(self) -> float | None:
        return None  # a quota is for all ranks of this process together

    def crowding(self) -> float | None:
        return None

    def serving_s(self) -> float:
        return time.process_time()

    @property
    def spins(self) -> bool:
        return False

    def on_device(self, array: Any) -> bool:
        return False

    def unique(self, prefix: str) -> str:
        return f"{prefix}{next(self._named)}"

    def on_reset_end(self, rebuild: Callable[[], None]) -> None:
        self._rebuilds.add(rebuild)

    def on_reset_begin(self, forget: Callable[[], None]) -> None:
        self._forgets.add(forget)

    def during_waits(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._around.add(context)

    def hear_waits(self, hear: Callable[..., None]) -> None:
        """Does nothing, as there is no watchdog."""

    def wait_avoiding_deadlock(self, done: Callable[[], bool], *, name: str) -> bool:
        with self._group.waiting(self._group.calls.get(name)), self._around.entered():
            while not done():
                self._group.check(name, done)
                if any(self._rank not in call.arrays for call in list(self._group.waited_for)):
                    return done()  # they may be in the next operation because this one has just ended
                time.sleep(0.001)
            return True

    def wait_for(self, done: Callable[[], bool], *, name: str) -> None:
        with self._group.waiting(self._group.calls.get(name)), self._around.entered():
            while not done():
                self._group.check(name, done)
                time.sleep(0.001)

    def end_after(self, ranks: Sequence[int]) -> None:
        """Does nothing, as all ranks are in this process."""

    def rebuild(self) -> None:
        """Calls the methods of `on_reset_begin` and `on_reset_end`, as an elastic reset does; for tests."""
        self._forgets.call()
        self._named = itertools.count(1)
        gc.collect()  # the methods are collective: ranks have to call the same ones
        self._rebuilds.call()

    def _start(self, name: str, array: Any, signature: tuple[Any, ...], in_place: bool) -> _Pending:
        view = np.asarray(array)
        call = self._group.enter(self._rank, name, view, signature)
        return _Pending(self._group, call, self._rank, name, array, in_place, self._around)

    def allreduce_async(self, array: Any, *, name: str, op: Op = "sum") -> _Pending:
        return self._start(name, array, ("allreduce", op), self.size == 1)

    def allgather_async(self, array: Any, *, name: str) -> _Pending:
        return self._start(name, array, ("allgather",), False)

    def broadcast_async(self, array: Any, *, root: int, name: str) -> _Pending:
        return self._start(name, array, ("broadcast", root), True)

    def reducescatter_async(self, array: Any, *, name: str) -> _Pending:
        return self._start(name, array, ("reducescatter", "sum"), False)

    def alltoall_async(self, array: Any, *, splits: Sequence[int], name: str) -> _Pending:
        counts = checked_splits(splits, rows=len(array), size=self.size, name=name)
        return self._start(name, array, ("alltoall", tuple(counts)), False)

    def group(self, ranks: Sequence[int]) -> LocalEngine | None:
        chosen = tuple(ranks)
        if self._group.world is None:
            return self if chosen == (0,) else None
        shared = self._group.world.subgroup(tuple(self._ranks[rank] for rank in chosen))
        if self._rank not in chosen:
            return None
        ranks = tuple(self._ranks[rank] for rank in chosen)
        return LocalEngine(shared, chosen.index(self._rank), ranks, self._around)


class SoloEngine(LocalEngine):
    """The engine of one rank alone: every collective is the identity."""

    def __init__(self) -> None:
        super().__init__(ThreadGroup(1, None), 0, (0,))


class World:
    """`n` ranks as threads: `World(4).run(rank_program)` gives each its engine and returns their results.

    A rank that raises ends the run: ranks that wait for it get a `CollectiveError`, and `run` raises the first
    error that was not caused by another rank's.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size: expected at least 1 rank. Received: {size}.")
        self.size = size
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], ThreadGroup] = {}

    def subgroup(self, ranks: tuple[int, ...]) -> ThreadGroup:
        """Returns the `ThreadGroup` of these global ranks, the same object for all their threads."""
        with self._lock:
            return self._groups.setdefault(ranks, ThreadGroup(len(ranks), self))

    def run(
        self,
        program: Callable[[LocalEngine], T],
        *,
        timeout_s: float = 60.0,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[Any]:
        """Calls `program(engine)` in a thread for each rank, and returns the results by rank.

        Args:
            program: the program of a rank.
            timeout_s: the time limit for joining each thread, in seconds.
            errors: "raise": if ranks raised, raises the first error that no other rank caused. "return": the result of
                a rank that raised is its exception.

        Raises:
            TimeoutError: a rank did not end in time.
        """
        everyone = tuple(range(self.size))
        shared = self.subgroup(everyone)
        results: list[Any] = [None] * self.size

        def rank_main(rank: int) -> None:
            try:
                results[rank] = program(LocalEngine(shared, rank, everyone))
            except BaseException as error:  # handed to the caller below, never swallowed
                results[rank] = error
                self.failed.set()

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in everyone]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout_s)
            if thread.is_alive():
                raise TimeoutError(f"World({self.size}): rank {rank} did not end within {timeout_s} s.")
        if errors == "raise":
            raised = [result for result in results if isinstance(result, BaseException)]
            for error in sorted(raised, key=lambda error: isinstance(error, CollectiveError)):
                raise error
        return results
