"""When rank 0 looks for a better plan: so often that looks take no more than a small part of the time."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator

LOOK_EVERY = 4  # least number of steps between two looks of rank 0 at the speeds
LOOK_S = 1.2e-4  # seconds that a look takes for each rank, at the least; all ranks wait for rank 0 meanwhile
BUDGET = 0.005  # the part of the time that looks may take
EARLY_STEPS = 40  # in these first steps, rank 0 may look at every step, and looks may take `EARLY_BUDGET` of the time
EARLY_BUDGET = 0.05


class LookSchedule:
    """The global batch at which rank 0 next looks for a better plan.

    Args:
        size: number of ranks.
        clock: returns seconds; measures how long a look takes.
    """

    def __init__(self, size: int, *, clock: Callable[[], float]) -> None:
        self._size, self._clock = size, clock
        self._next = 0
        self._looks_s: deque[float] = deque([0.0, 0.0], maxlen=2)

    def is_due(self, step: int) -> bool:
        """Whether to look at global batch `step`."""
        return step >= self._next

    def put_off(self, step: int) -> None:
        """Sets the next look to global batch `step`."""
        self._next = step

    @contextlib.contextmanager
    def look(self, step: int, step_s: float) -> Iterator[None]:
        """A context in which rank 0 looks, at global batch `step`. The next look comes after a `pause`, unless it is
        put off."""
        self._next = step + self.pause(step, step_s)
        began = self._clock()
        yield
        self._looks_s.append(self._clock() - began)

    def pause(self, step: int, step_s: float) -> int:
        """The number of steps to the next look, such that looks take no more than `BUDGET` of the time (in the first
        steps, `EARLY_BUDGET`). `step_s`: seconds of a step; 0.0: not known."""
        least, budget = (1, EARLY_BUDGET) if step < EARLY_STEPS else (LOOK_EVERY, BUDGET)
        look_s = max(LOOK_S * self._size, min(self._looks_s))  # the shorter of two: one may have been interrupted
        return max(least, math.ceil(look_s / (budget * step_s))) if step_s else least
