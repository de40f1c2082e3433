"""Measuring compute alone: a stopwatch that runs while a rank computes and stands while it waits for others."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol


class Stopwatch(Protocol):
    """Marks moments. A mark may be a device event, whose time is known only later."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class WallClock:
    """A stopwatch of wall time, for ranks that compute where their Python runs."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class ComputeMeter:
    """Sums the seconds of the segments in which a rank computed."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._segments: list[tuple[Any, Any]] = []
        self._start: Any = None

    @property
    def running(self) -> bool:
        return self._start is not None

    def run(self) -> None:
        """A segment begins here; one that is open is forgotten (it was not this batch's)."""
        self._start = self.stopwatch.mark()

    def pause(self) -> None:
        """The open segment, if any, ends here."""
        if self._start is not None:
            self._segments.append((self._start, self.stopwatch.mark()))
        self._start = None

    def take_s(self) -> float:
        """The seconds of all segments since the last call."""
        segments, self._segments = self._segments, []
        return sum(self.stopwatch.seconds(start, end) for start, end in segments)


class Pace:
    """The usual seconds from the beginning of a step to that of the next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._step_s: deque[float] = deque(maxlen=9)

    def begin(self) -> None:
        """A step begins."""
        now = self._clock()
        if self._began is not None:
            self._step_s.append(now - self._began)
        self._began = now

    @property
    def usual_s(self) -> float | None:
        """The median of the last steps; None before the second one."""
        return statistics.median(self._step_s) if self._step_s else None
