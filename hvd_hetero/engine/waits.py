"""The record of one rank's submitted operations and present waits, kept by `Watch` and told to ranks that ask."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from .port import base_name

STEPS = 128  # how many step lengths are kept
NAMES = 4096  # how many names of operations are kept at most


@dataclass
class Wait:
    """A wait of this rank for an operation of some global ranks."""

    operation: str
    ranks: tuple[int, ...]
    began: float  # `time.monotonic`
    lasted_s: float = 0.0  # length so far, counted by the watchdog; excludes time in which this process was stopped
    report_at_s: float | None = None  # the length at which it is reported next; None: not determined yet
    check_deadlock_at_s: float = 0.0  # the length at which to look next for a deadlock, which is reported earlier
    told: bool = False  # whether the missing ranks were told to end
    # For a wait of a framework's graph: whether the graph still runs, and what to call if it has ended by a failure.
    lasts: Callable[[], bool] = lambda: True
    broken: Callable[[], None] = lambda: None

    def begin_anew(self) -> None:
        """Counts the length of the wait from 0 again: no rank is missing so far."""
        self.lasted_s, self.report_at_s, self.told = 0.0, None, False

    def let_go(self) -> None:
        """Drops the references to the framework's graph, because the watchdog may still hold this object afterwards."""
        self.lasts, self.broken = (lambda: True), (lambda: None)


class Waits:
    """The operations that this rank has submitted, and its waits for some of them.

    Attributes:
        step_s: seconds from the start of a wait for an operation to the start of the next wait for the same one, the
            last `STEPS` of them: usually the length of a training step.
    """

    def __init__(self) -> None:
        self._submitted: dict[str, deque[Callable[[], bool]]] = {}  # by name, for each submission: is it complete?
        self.step_s: deque[float] = deque(maxlen=STEPS)
        # How often each operation was submitted since the ranks met. None: there were more than `NAMES` names. Dropping
        # some would restart their counts, at another time on each rank, and a missing rank would seem to have come.
        self._times: dict[str, int] | None = {}
        self._waits: dict[Hashable, Wait] = {}  # by thread, or by operation for waits of graphs
        self._began: dict[str, float] = {}
        self._outside = time.monotonic()  # when this rank's last wait ended

    def now(self) -> list[Wait]:
        """The present waits of all threads and of the framework's graph."""
        return list(self._waits.values())

    @property
    def since(self) -> float:
        """The time (`time.monotonic`) at which the oldest present wait began; if there is none, at which the last one
        ended."""
        waits = self.now()
        return min(wait.began for wait in waits) if waits else self._outside

    def forget(self) -> None:
        """Forgets all operations, step lengths and waits of graphs; is called after each initialisation of Horovod."""
        self._submitted.clear()
        self._times = {}
        self.step_s.clear()
        self._began.clear()
        for wait in self.now():
            self._waits.pop(wait.operation, None)
            wait.let_go()

    @property
    def submitted(self) -> list[str]:
        """The names of the submitted operations that are not complete. A complete one that this rank has not waited for
        yet is left out: other ranks may be in the next operation of the same name."""
        return [name for name, times in list(self._submitted.items()) if not all(over() for over in list(times))]

    def submit(self, operation: str, over: Callable[[], bool] = lambda: False) -> None:
        """Notes that this rank has submitted an operation. `over()` returns whether the operation is complete, as far
        as its handle tells."""
        self._submitted.setdefault(operation, deque()).append(over)
        if (counts := self._times) is not None:
            counts[operation] = counts.get(operation, 0) + 1
            if len(counts) > NAMES:
                self._times = None

    def times(self, operation: str) -> int:
        """How often this rank has submitted an operation of this name since the ranks met; 0 if that is not known.

        A rank that asks compares it with its own count: if they are equal, this rank is not missing, even if the
        operation is complete here and not yet there.
        """
        return (self._times or {}).get(operation, 0)  # read once: another thread may end the counting

    def end(self, operation: str) -> None:
        """Notes that the oldest submission of an operation has ended on this rank, with a result or an error."""
        times = self._submitted.get(operation, deque())
        if len(times) > 1:
            times.popleft()
        else:
            self._submitted.pop(operation, None)

    @contextlib.contextmanager
    def of_thread(self, operation: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """A context in which the calling thread waits for an operation of these global ranks. May be nested."""
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        self._waits[thread] = self._begin(operation, ranks)
        try:
            yield
        finally:
            self._outside = time.monotonic()
            if outer is None:
                del self._waits[thread]
            else:
                self._waits[thread] = outer

    def begin_graph_wait(
        self, operation: str, ranks: tuple[int, ...], *, lasts: Callable[[], bool], broken: Callable[[], None]
    ) -> None:
        """Notes that a framework's graph begins to wait for an operation: see `Watch.begin_graph_wait`."""
        wait = self._begin(operation, ranks)
        wait.lasts, wait.broken = lasts, broken
        self._waits[operation] = wait

    def end_graph_wait(self, operation: str) -> None:
        """Notes that the wait of `begin_graph_wait` has ended, and the operation with it."""
        self._outside = time.monotonic()
        if (wait := self._waits.pop(operation, None)) is not None:
            wait.let_go()
            self.end(operation)

    def _begin(self, operation: str, ranks: tuple[int, ...]) -> Wait:
        now = time.monotonic()
        name = base_name(operation)
        last = self._began.get(name)
        if last is not None:
            self.step_s.append(now - last)
        elif len(self._began) >= NAMES:
            self._began.clear()
        self._began[name] = now
        return Wait(operation, ranks, now)
