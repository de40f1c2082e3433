"""What a rank's samples cost it: a stopwatch that runs while the rank computes and stands while it waits for others.

Where compute runs on the cores that also serve the communication (sums, copies, codecs), a rank with few cores needs
longer for that as well, whatever its share: so much time goes to its overhead. It is estimated from processor time,

    service = processor time while waiting / processor time per second of compute

A CPU quota, as a container has it, is handed out by the period, and a rank that has waited finds what it has not used:
it computes faster than it ever would if the others waited for it. What counts for a plan is the long run, in which its
compute takes at least

    processor time of the compute / cores of the quota

("CFS Bandwidth Control" in the documentation of Linux.)
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

LOOK_EVERY = 8  # steps between two looks at the quota, which take 0.1 ms
SMOOTHED = 16  # steps


class Stopwatch(Protocol):
    """Marks moments. A mark may be a device event, whose time is known only later."""

    def mark(self) -> Any: ...

    def passed(self, mark: Any) -> bool:
        """Whether the time until `mark` is known; never waits for it, as `seconds` does."""

    def seconds(self, start: Any, end: Any) -> float: ...


class WallClock:
    """A stopwatch of wall time, for ranks that compute where their Python runs."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class Moment(NamedTuple):
    """A moment of a rank's time."""

    mark: Any  # of the stopwatch
    processor_s: float


class Piece(NamedTuple):
    """A part of a segment, and what was aside of it: seconds, those of the processor and, at the end, by the clock."""

    segment: tuple[Any, Any]
    computing_s: float
    waiting_s: float
    aside_s: float


class Taken(NamedTuple):
    """Segments in which a rank computed."""

    stopwatch: Stopwatch  # whose marks these are
    segments: list[tuple[Any, Any]]

    def known(self) -> bool:
        """Whether `seconds` can be told without waiting."""
        return not self.segments or self.stopwatch.passed(self.segments[-1][1])

    def seconds(self) -> float:
        """Their sum; where the device is still at them, this waits for it."""
        return sum(self.stopwatch.seconds(start, end) for start, end in self.segments)


class ComputeMeter:
    """Sums the seconds of the segments in which a rank computed.

    Args:
        processor_s: seconds of processor time of this process, all threads; for ranks that compute on their cores.
        quota_cores: the cores that a quota allows this process; None: as many as there are.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        *,
        processor_s: Callable[[], float] = time.process_time,
        quota_cores: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._stopwatch, self._processor_s = stopwatch, processor_s
        self._quota_cores, self._until_look = quota_cores, 0
        self._quota: float | None = None
        self._ahead_s: deque[float] = deque(maxlen=SMOOTHED)  # of compute, in steps since it changed
        self._segments: list[tuple[Any, Any]] = []
        self._start: Any = None
        self._mark_s: float | None = None  # of processor time, where the present segment or pause began
        self._computing_s = self._waiting_s = self._loading_s = 0.0  # of processor time
        self._aside_s = 0.0  # waited for others in the middle of compute
        self._is_aside = False
        self._pieces: list[Piece] = []  # of the open segment, up to where it begins now

    @property
    def stopwatch(self) -> Stopwatch:
        """What marks moments. With another one what is under way is measured anew, from here on."""
        return self._stopwatch

    @stopwatch.setter
    def stopwatch(self, stopwatch: Stopwatch) -> None:
        if type(stopwatch) is not type(self._stopwatch):  # their marks do not go together
            self._segments.clear()
            self._pieces.clear()
            self._start = None if self._start is None else stopwatch.mark()
        self._stopwatch = stopwatch

    @property
    def running(self) -> bool:
        return self._start is not None

    def run(self) -> None:
        """A segment begins here; one that is open is forgotten (it was not this batch's), with what was aside of it."""
        now_s = self._processor_s()
        if self._start is None and self._mark_s is not None:
            self._waiting_s += now_s - self._mark_s
        self._pieces.clear()
        self._mark_s = now_s
        self._start = self.stopwatch.mark()

    def pause(self) -> None:
        """The open segment, if any, ends here."""
        if self._start is not None:
            end = self.now()
            for piece in (*self._pieces, self._piece(end, end, aside_s=0.0, waits=False)):
                self._segments.append(piece.segment)
                self._computing_s += piece.computing_s
                self._waiting_s += piece.waiting_s
                self._aside_s += piece.aside_s
            self._mark_s = end.processor_s
        self._pieces.clear()
        self._start = None

    def now(self) -> Moment:
        """This moment, as any thread may ask."""
        return Moment(self.stopwatch.mark(), self._processor_s())

    @contextlib.contextmanager
    def aside(self, *, waits: bool) -> Iterator[None]:
        """Takes what is done within it out of the open segment: it is no compute. `waits`: for other ranks, and what
        it takes of the processor is service of the communication."""
        start = self._start
        if start is None or self._is_aside:  # nothing is open, or that is out of it already
            yield
            return
        since, began = self.now(), time.perf_counter()
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
            if self._start is start:
                until = self.now()
                self._pieces.append(self._piece(since, until, aside_s=time.perf_counter() - began, waits=waits))
                self._start, self._mark_s = until

    def _piece(self, since: Moment, until: Moment, *, aside_s: float, waits: bool) -> Piece:
        """The open segment up to a moment, and what was aside of it until another one."""
        return Piece(
            segment=(self._start, since.mark),
            computing_s=0.0 if self._mark_s is None else since.processor_s - self._mark_s,
            waiting_s=until.processor_s - since.processor_s if waits else 0.0,
            aside_s=aside_s if waits else 0.0,
        )

    def processor_s(self) -> float:
        """Seconds of processor time of this process."""
        return self._processor_s()

    def count_loading(self, since_s: float) -> None:
        """Says that what this process has done since a moment of processor time, beside the open segment, was loading.
        """
        seconds = self._processor_s() - since_s
        self._loading_s += seconds
        if self._start is None and self._mark_s is not None:
            self._mark_s += seconds

    def take_aside_s(self) -> float:
        """The seconds since the last call that this rank waited for others in the middle of its compute."""
        seconds, self._aside_s = self._aside_s, 0.0
        return seconds

    def begin_at(self, moment: Moment) -> float:
        """Lets the open segment begin at a moment, if that is later; the seconds by which it is."""
        later_s = 0.0 if self._start is None else self.stopwatch.seconds(self._start, moment.mark)
        if later_s > 0.0:
            self._pieces.clear()
            self._start, self._mark_s = moment
        return max(0.0, later_s)

    def take(self) -> Taken:
        """The segments since the last call."""
        segments, self._segments = self._segments, []
        return Taken(self._stopwatch, segments)

    def forget(self) -> None:
        """Discards the segments that no `take` has returned."""
        self.take()
        self._pieces.clear()
        self._computing_s = self._waiting_s = self._loading_s = self._aside_s = 0.0

    def take_extra_s(self, compute_s: float, loaded_s: float = 0.0) -> float:
        """The seconds that what was done since the last call takes this rank's cores beyond `compute_s` of computing,
        and `loaded_s` of loading that was counted: for serving the communication, and because of a quota; 0 where
        compute does not run on them. How fast they are is told from computing: who loads may wait for a disk."""
        computing_s, waiting_s, loading_s = self._computing_s, self._waiting_s, self._loading_s
        self._computing_s = self._waiting_s = self._loading_s = 0.0
        if not isinstance(self.stopwatch, WallClock) or computing_s <= 0.0:
            return 0.0
        cores, head_start_s = self._look_at_quota(), 0.0
        if cores is not None:
            # The median of some steps: how compute falls into the quota's periods moves it by one of them.
            self._ahead_s.append((computing_s + loading_s) / cores - compute_s - loaded_s)
            head_start_s = max(0.0, statistics.median(self._ahead_s))
        # Who waits without sleeping, as MPI does, spends much more: that is no service.
        slowness = compute_s / computing_s
        if head_start_s > 0.0:
            slowness = (compute_s + loaded_s + head_start_s) / (computing_s + loading_s)
        return head_start_s + min(compute_s, waiting_s * slowness)

    def _look_at_quota(self) -> float | None:
        """The quota's cores, looked at now and then: files are to be read for that."""
        self._until_look -= 1
        if self._until_look < 0:
            before, self._quota, self._until_look = self._quota, self._quota_cores(), LOOK_EVERY
            if self._quota != before:
                self._ahead_s.clear()
        return self._quota


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
    def last_s(self) -> float | None:
        """The duration of the step before the present one, in seconds; None if there is none."""
        return self._step_s[-1] if self._step_s else None

    @property
    def usual_s(self) -> float | None:
        """The median of the last steps; None before the second one."""
        return statistics.median(self._step_s) if self._step_s else None
