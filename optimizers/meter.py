"""Measures how long one rank computes: `ComputeMeter` runs while it computes, and stands while it waits for others.

Two corrections are added to the measured compute time before it goes into the speed model.

A rank that computes on its CPU cores serves the communication (sums, copies, codecs) with the same cores. The fewer
cores it has, the longer that takes, whatever its share of the batch: it belongs to the overhead of its speed model. It
is estimated from processor time,

    service = processor time while waiting / processor time per second of compute

of the threads that serve the communication, where they are known: those of a pool, as OpenMP's, may spin for a while
when they have nothing to do.
Compute that sleeps, or waits for a device or a disk, does not tell how fast the cores are: a thread that runs all the
time needs no more than `1 / cores of the quota`, or as much longer as other processes hold it up. Where a thread spins
while it waits for other ranks, as with MPI, processor time says nothing of service, and none is counted: otherwise what
a fast rank waits would be taken for its own time, and its share would not grow.

A CPU quota, as of a container, is granted period by period. A rank that waited for others has not used all of its
quota, and then computes faster than it could if the others waited for it. A plan has to rest on the long run, in which
the rank's compute takes at least

    processor time of the compute / cores of the quota

("CFS Bandwidth Control" in the documentation of Linux.)
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hvd_hetero.engine.stopwatch import Stopwatch, WallClock

LOOK_EVERY = 8  # steps between two readings of the CPU quota, each of which takes 0.1 ms
SMOOTHED = 16  # steps whose median is taken for the head start that an unused quota gives


class Moment(NamedTuple):
    """A point in time on one rank."""

    mark: Any  # as the stopwatch returned it
    processor_s: float  # processor time that the process had used by then
    serving_s: float  # the same of the threads that serve the communication


class SegmentPart(NamedTuple):
    """A part of a segment of compute, up to an interruption by `ComputeMeter.aside`, and that interruption."""

    segment: tuple[Any, Any]  # marks at which the part begins and ends
    computing_s: float  # processor time of the part
    serving_s: float  # the same of the threads that serve the communication
    waiting_s: float  # these threads' processor time in the interruption; 0 unless the rank waited for others in it
    aside_s: float  # wall time of the interruption; 0 unless the rank waited for other ranks in it


class Segments(NamedTuple):
    """The segments of compute that `ComputeMeter.take` returns, usually those of one step."""

    stopwatch: Stopwatch  # that made the marks
    segments: list[tuple[Any, Any]]  # the marks at which each segment begins and ends

    def known(self) -> bool:
        """Whether the device has finished the segments, so that `seconds` does not wait."""
        return not self.segments or self.stopwatch.passed(self.segments[-1][1])

    def seconds(self) -> float:
        """The sum of the segments' seconds. Waits for the device if it still works on them."""
        return sum(self.stopwatch.seconds(start, end) for start, end in self.segments)


class ComputeMeter:
    """Measures the compute time of one rank, as segments between `run` and `pause`. `StepTimer` drives it.

    Args:
        stopwatch: marks the beginnings and ends of segments.
        processor_s: returns the seconds of processor time of this process, all threads; used only for ranks that
            compute on their CPU cores.
        serving_s: the same of the threads that serve the communication, of which one is that of the script; None: of
            all threads.
        quota_cores: returns the number of cores that a CPU quota allows this process; None if there is no quota.
        crowding: returns how many seconds a thread of this process takes, of late, for a second of processor time;
            None if not known.
        spins: whether a thread keeps a core busy while the rank waits for others.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        *,
        processor_s: Callable[[], float] = time.process_time,
        serving_s: Callable[[], float] | None = None,
        quota_cores: Callable[[], float | None] = lambda: None,
        crowding: Callable[[], float | None] = lambda: None,
        spins: bool = False,
    ) -> None:
        self._stopwatch, self._spins = stopwatch, spins
        self._processor_s, self._serving_s = processor_s, serving_s or processor_s
        self._quota_cores, self._crowding, self._until_look = quota_cores, crowding, 0
        self._quota: float | None = None
        self._slowest = math.inf  # seconds that a thread which always runs may take for a second of processor time
        # By step since the quota changed: how much longer compute and loading would take at the quota's long-run rate.
        self._ahead_s: deque[float] = deque(maxlen=SMOOTHED)
        self._segments: list[tuple[Any, Any]] = []  # closed ones, until `take`
        self._start: Moment | None = None  # the beginning of the open segment; None if no segment is open
        self._paused_s: float | None = None  # `serving_s` when the present pause began; None if there is none
        # Processor time since the last `take_extra_s`; of the threads that serve: while computing, and while waiting.
        self._computing_s = self._other_s = self._serving_computing_s = self._waiting_s = 0.0
        self._aside_s = 0.0  # wall time of waits for other ranks within compute, since the last `take_aside_s`
        self._is_aside = False  # whether the rank is within `aside`
        self._pieces: list[SegmentPart] = []  # earlier parts of the open segment, each ended by an interruption

    @property
    def stopwatch(self) -> Stopwatch:
        """Marks the beginnings and ends of segments. One of another type discards the segments not taken yet, and an
        open segment begins anew at this moment."""
        return self._stopwatch

    @stopwatch.setter
    def stopwatch(self, stopwatch: Stopwatch) -> None:
        before, self._stopwatch = self._stopwatch, stopwatch
        if type(stopwatch) is not type(before):  # marks of two types cannot be compared
            self._segments.clear()
            self._pieces.clear()
            self._start = None if self._start is None else self.now()

    @property
    def running(self) -> bool:
        return self._start is not None

    def run(self) -> None:
        """Begins a segment. A segment that is open already is discarded, with its interruptions: it was not part of the
        batch that begins now."""
        self._start = self.now()
        if self._paused_s is not None:
            # Less than nothing if Horovod's threads are others by now.
            self._waiting_s += max(0.0, self._start.serving_s - self._paused_s)
        self._paused_s = None
        self._pieces.clear()

    def pause(self) -> None:
        """Ends the open segment, if there is one."""
        for piece in self._close(self.now()) if self._start is not None else ():
            self._segments.append(piece.segment)
            self._computing_s += piece.computing_s
            self._serving_computing_s += piece.serving_s
            self._waiting_s += piece.waiting_s
            self._aside_s += piece.aside_s

    def take_open(self) -> Segments:
        """Returns the open segment up to now, if there is one, from this rank's last wait for others in it on, and
        begins another. It was no compute, but other work of this rank, whose processor time counts like that of
        loading. What came before such a wait is left out: the others have waited for it, whatever anybody's share."""
        if self._start is None:
            return Segments(self._stopwatch, [])
        now = self.now()
        pieces = self._close(now)
        self._start, self._paused_s = now, None
        since = max((number + 1 for number, piece in enumerate(pieces) if piece.aside_s), default=0)
        self._aside_s += sum(piece.aside_s for piece in pieces)
        self._other_s += sum(piece.computing_s for piece in pieces[since:])
        return Segments(self._stopwatch, [piece.segment for piece in pieces[since:]])

    def _close(self, end: Moment) -> list[SegmentPart]:
        """Ends the open segment, and returns its parts."""
        start, pieces, self._start = self._start, self._pieces, None  # without a call in between, for other threads
        assert start is not None
        self._pieces, self._paused_s = [], end.serving_s
        return [*pieces, _part(start, end, end, aside_s=0.0, waits=False)]

    def now(self) -> Moment:
        """The present moment. May be called from any thread."""
        return Moment(self.stopwatch.mark(), *self.clocks())

    @contextlib.contextmanager
    def aside(self, *, waits: bool) -> Iterator[None]:
        """A context manager that excludes what is done within it from the open segment, as it is no compute.

        Args:
            waits: whether the rank waits for other ranks within it, as for the statistics of a layer. Then its
                processor time counts as service of the communication, and its wall time as `take_aside_s`.
        """
        start = self._start
        if start is None or self._is_aside:  # no segment is open, or this time is excluded from it already
            yield
            return
        since, began = self.now(), time.perf_counter()
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
            until = self.now()
            part = _part(start, since, until, aside_s=time.perf_counter() - began, waits=waits)
            if self._start is start:  # another thread may end the segment at any moment
                self._start = until
                self._pieces.append(part)

    def clocks(self) -> tuple[float, float]:
        """Seconds of processor time of this process, and of its threads that serve the communication. 0 for a rank that
        does not compute on its CPU cores, which needs none."""
        if not isinstance(self._stopwatch, WallClock):
            return 0.0, 0.0
        processor_s = self._processor_s()
        return processor_s, processor_s if self._serving_s is self._processor_s else self._serving_s()

    def count_loading(self, since: tuple[float, float]) -> None:
        """Counts the processor time since `since`, values of `clocks`, as loading of data: neither as compute nor as
        service of the communication. The caller has kept it out of an open segment, see `aside`."""
        processor_s, serving_s = self.clocks()
        self._other_s += processor_s - since[0]
        if self._paused_s is not None:
            self._paused_s += serving_s - since[1]

    def take_aside_s(self) -> float:
        """The seconds of wall time that this rank waited for others in the middle of its compute, since the last call.
        """
        seconds, self._aside_s = self._aside_s, 0.0
        return seconds

    def begin_at(self, moment: Moment) -> float:
        """Moves the beginning of the open segment to `moment`, if that is later: up to then, the rank waited for data.

        Returns:
            the seconds by which the beginning moved; 0 if it did not, or no segment is open.
        """
        later_s = 0.0 if self._start is None else self.stopwatch.seconds(self._start.mark, moment.mark)
        if later_s > 0.0:
            self._pieces.clear()
            self._start = moment
        return max(0.0, later_s)

    def take(self) -> Segments:
        """Returns the segments that have ended since the last call."""
        segments, self._segments = self._segments, []
        return Segments(self._stopwatch, segments)

    def forget(self) -> None:
        """Discards everything that was measured and not taken yet, except that an open segment stays open. A wait for
        others is over: as after a failure, what comes next is not theirs."""
        self.take()
        self._pieces.clear()
        self._paused_s = None
        self._computing_s = self._other_s = self._serving_computing_s = self._waiting_s = self._aside_s = 0.0

    def take_extra_s(self, compute_s: float, elsewhere_s: float = 0.0) -> float:
        """Seconds to add to the measured compute time: service of the communication, and what a CPU quota costs in the
        long run (see the formulas of this module). 0 for a rank that does not compute on its CPU cores.

        Args:
            compute_s: wall time of the compute since the last call.
            elsewhere_s: wall time since the last call of what `count_loading` and `take_open` have counted.
        """
        computing_s, other_s = self._computing_s, self._other_s
        serving_computing_s, waiting_s = self._serving_computing_s, self._waiting_s
        self._computing_s = self._other_s = self._serving_computing_s = self._waiting_s = 0.0
        if not isinstance(self.stopwatch, WallClock) or computing_s <= 0.0:
            return 0.0
        self._look_at_cores()
        cores, head_start_s = self._quota, 0.0
        if cores is not None:
            # The median of several steps: a single one is off by up to a period of the quota, as compute falls into it.
            self._ahead_s.append((computing_s + other_s) / cores - compute_s - elsewhere_s)
            head_start_s = max(0.0, statistics.median(self._ahead_s))
        if self._spins:
            return head_start_s
        # Other threads of a script may work while it waits, so service is counted as `compute_s` at the most. The rate
        # of the cores is that of compute, as loading may wait for a disk.
        slowness = min(compute_s / max(serving_computing_s, 1e-9), self._slowest)  # wall time per processor time
        if head_start_s > 0.0:
            slowness = (compute_s + elsewhere_s + head_start_s) / (computing_s + other_s)
        return head_start_s + min(compute_s, waiting_s * slowness)

    def _look_at_cores(self) -> None:
        """Looks at the CPU quota, and at how crowded the cores are, now and then: `LOOK_EVERY` calls lie between two
        readings of the files that tell."""
        self._until_look -= 1
        if self._until_look >= 0:
            return
        before, self._quota, self._until_look = self._quota, self._quota_cores(), LOOK_EVERY
        if self._quota != before:
            self._ahead_s.clear()
        crowding = self._crowding()
        self._slowest = math.inf if crowding is None else max(crowding, 1.0 / (self._quota or 1.0))


def _part(start: Moment, since: Moment, until: Moment, *, aside_s: float, waits: bool) -> SegmentPart:
    """The part of a segment from `start` to `since`, with the interruption from `since` to `until`."""
    return SegmentPart(
        segment=(start.mark, since.mark),
        computing_s=since.processor_s - start.processor_s,
        serving_s=since.serving_s - start.serving_s,
        waiting_s=until.serving_s - since.serving_s if waits else 0.0,
        aside_s=aside_s if waits else 0.0,
    )


class Pace:
    """Measures the time from the beginning of one step to the beginning of the next, waiting included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._step_s: deque[float] = deque(maxlen=9)

    def begin(self) -> None:
        """Is called when a step begins."""
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
        """The mean duration of the last 9 steps without the two longest and shortest, in seconds; None before the
        second step begins. Where two loaders finish together, every second step waits, and a median is of one kind."""
        kept = sorted(self._step_s)[(out := (len(self._step_s) + 1) // 4) : len(self._step_s) - out]
        return statistics.fmean(kept) if kept else None
