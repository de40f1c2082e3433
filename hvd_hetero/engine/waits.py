"""What one rank takes part in, and what it waits for, as it notes it itself: what others are told who ask."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from .port import without_lane

STEPS = 128  # whose lengths are kept
NAMES = 4096  # of operations whose last start is kept


@dataclass
class Wait:
    """A wait for an operation of some global ranks."""

    operation: str
    ranks: tuple[int, ...]
    lasted_s: float = 0.0  # as looked at: time in which this process itself was stopped hardly counts
    due_s: float | None = None  # when the next word is due
    early_s: float = 0.0  # when to look next whether there is reason for one before that
    began: float = field(default_factory=time.monotonic)
    told: bool = False  # the missing ranks were told to end
    # Of a framework, which runs its program by itself: False where it has given up, without a word; and what to call.
    lasts: Callable[[], bool] = lambda: True
    broken: Callable[[], None] = lambda: None

    def begin_anew(self) -> None:
        """Nobody is missing so far."""
        self.lasted_s, self.due_s, self.told = 0.0, None, False

    def let_go(self) -> None:
        """Refers to nothing of the program's any more: whoever looks at waits may hold one that is over."""
        self.lasts, self.broken = (lambda: True), (lambda: None)


class Waits:
    """The operations that this rank takes part in, and its waits for some of them.

    Attributes:
        step_s: seconds from one wait for an operation to the next for the same, of the last ones.
    """

    def __init__(self) -> None:
        self._submitted: dict[str, deque[Callable[[], bool]]] = {}  # what tells of each time whether it is over
        self.step_s: deque[float] = deque(maxlen=STEPS)
        # How often each was submitted since the ranks met; None: there were too many names. Some of them would begin
        # anew, on each rank at another time, and who is missing would seem to have come.
        self._times: dict[str, int] | None = {}
        self._waits: dict[Hashable, Wait] = {}  # by thread, or by the operation that a framework waits for
        self._began: dict[str, float] = {}
        self._outside = time.monotonic()  # when this rank's last wait ended

    def now(self) -> list[Wait]:
        """The waits in progress."""
        return list(self._waits.values())

    @property
    def since(self) -> float:
        """When this rank's first wait began, or, where it waits for nothing, its last one ended."""
        waits = self.now()
        return min(wait.began for wait in waits) if waits else self._outside

    def forget(self) -> None:
        """Forgets the waits of the ranks before an elastic reset."""
        self._submitted.clear()
        self._times = {}
        self.step_s.clear()
        self._began.clear()
        for wait in self.now():
            self._waits.pop(wait.operation, None)
            wait.let_go()

    @property
    def submitted(self) -> list[str]:
        """The operations under way. One that is over, and that this rank has not waited for yet, is none: ranks may be
        in the next one of its name."""
        return [name for name, times in list(self._submitted.items()) if not all(over() for over in list(times))]

    def submit(self, operation: str, over: Callable[[], bool] = lambda: False) -> None:
        """This rank takes part in an operation; `over()` tells whether all have, as far as that can be seen."""
        self._submitted.setdefault(operation, deque()).append(over)
        if (counts := self._times) is not None:
            counts[operation] = counts.get(operation, 0) + 1
            if len(counts) > NAMES:
                self._times = None

    def times(self, operation: str) -> int:
        """How often this rank has submitted an operation of this name; 0 where that is not known. What is over for it
        already may not be for the others, to which the last bytes are on their way."""
        return (self._times or {}).get(operation, 0)  # read once: another thread may end the counting

    def end(self, operation: str) -> None:
        """The operation is over for this rank, well or not."""
        times = self._submitted.get(operation, deque())
        if len(times) > 1:
            times.popleft()
        else:
            self._submitted.pop(operation, None)

    @contextlib.contextmanager
    def of_thread(self, operation: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """While this thread waits for an operation."""
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

    def begin_aside(
        self, operation: str, ranks: tuple[int, ...], *, lasts: Callable[[], bool], broken: Callable[[], None]
    ) -> None:
        """A framework begins to wait for an operation."""
        wait = self._begin(operation, ranks)
        wait.lasts, wait.broken = lasts, broken
        self._waits[operation] = wait

    def end_aside(self, operation: str) -> None:
        """The framework waits no longer, and the operation is over."""
        self._outside = time.monotonic()
        if (wait := self._waits.pop(operation, None)) is not None:
            wait.let_go()
            self.end(operation)

    def _begin(self, operation: str, ranks: tuple[int, ...]) -> Wait:
        now = time.monotonic()
        turn = without_lane(operation)
        last = self._began.get(turn)
        if last is not None:
            self.step_s.append(now - last)
        elif len(self._began) >= NAMES:
            self._began.clear()
        self._began[turn] = now
        return Wait(operation, ranks, began=now)
