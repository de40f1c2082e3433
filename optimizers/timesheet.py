"""What a rank does between two exchanges: its batches, their samples, and the seconds that they take."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvd_hetero.policy.jitter import Ran

from .meter import ComputeMeter, Pace, Stopwatch, Taken, WallClock
from .stop import StopMeter
from .supply import Supplied, Supply


class Entry(NamedTuple):
    """The samples and times of one rank since the last exchange."""

    samples: int
    data_s: float  # waited for data
    compute_s: float
    extra_s: float  # beyond that, as plans reckon: see `Timesheet.read`
    loading_s: float  # that its samples take to be loaded beside computing, at least


class Ended(NamedTuple):
    """A step that has ended, whose times are not yet known."""

    taken: Taken
    samples: int
    batches: int
    supplied: Supplied
    discarded: bool
    tell: Callable[[Entry], None]


class Timesheet:
    """The batches of this rank, as the next exchange tells the others of them.

    A GPU is still at an update when Python is done with it. Nobody waits for it there: how long a step took is read
    when the next exchange asks, or the next step ends.

    Args:
        stopwatch: measures compute; None: wall time, until somebody knows better (see `measure_with`).
        quota_cores: the cores that a CPU quota allows this process; None: as many as there are.
        clock: seconds, for what no device has a part in.
        processor_s: seconds of processor time of this process.

    Attributes:
        supply: how this rank gets its samples.
        known: samples and seconds per batch, as they were read last.
        loading_s: seconds that a sample takes to be loaded beside computing, at least, as it was read last; 0: less
            than was noticed.
    """

    def __init__(
        self,
        stopwatch: Stopwatch | None,
        *,
        quota_cores: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._meter = ComputeMeter(stopwatch or WallClock(), processor_s=processor_s, quota_cores=quota_cores)
        self._clock, self._given = clock, stopwatch is not None
        self._ended: Ended | None = None  # whose time is not read yet
        self._late = False  # whether there ever was one
        self.supply = Supply(self._meter, clock)
        self.loading_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Forgets the steps so far, after an elastic reset."""
        self.read()
        self._meter.forget()
        self._pace = Pace(self._clock)
        self._stops = StopMeter()
        self._samples = self._batches = 0
        self._discarded = False
        self.supply.restart()
        self.known: tuple[float, float] = (0.0, 0.0)

    def resume_loading(self, loading_s: float) -> None:
        """Goes on from what was known of this rank's loaders, see `loading_s`: it may be another process now."""
        if loading_s and not self.loading_s:
            self.supply.pace.resume(loading_s)
            self.loading_s = loading_s

    def measure_with(self, stopwatch: Stopwatch) -> None:
        """Measures compute with what suits the device, unless the constructor was told."""
        if not self._given:
            self._meter.stopwatch = stopwatch

    def begin(self, samples: int) -> None:
        """A batch of `samples` begins."""
        self._pace.begin()
        self.supply.begin()
        self._batches += 1
        self._samples += samples

    @property
    def running(self) -> bool:
        """Whether this rank computes, as far as it has said."""
        return self._meter.running

    def run(self) -> None:
        """Compute begins, or goes on."""
        self._meter.run()

    def pause(self) -> None:
        """Compute ends; what follows is waiting."""
        self._meter.pause()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """While this rank does what is no computation of its samples."""
        return self._meter.aside(waits=False)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """While this rank waits for others in the middle of its computations, as for the statistics of a layer."""
        return self._meter.aside(waits=True)

    def take_waited_s(self) -> float:
        """The seconds of such waits since the last call."""
        return self._meter.take_aside_s()

    def discard(self) -> None:
        """Says that what is done now takes longer than it will ever again."""
        self._discarded = True

    def end(self, tell: Callable[[Entry], None]) -> None:
        """Ends what was done since the last call; `tell` hears of it as soon as it is known how long it took."""
        self.read()
        supplied = self.supply.end()
        ended = Ended(self._meter.take(), self._samples, self._batches, supplied, self._discarded, tell)
        self._samples, self._batches, self._discarded = 0, 0, False
        self._ended = ended
        if ended.taken.known():
            self.read()
        elif not self._late:
            self._late = True
            atexit.register(_read_at_exit, weakref.ref(self))  # the last step is known as well

    def read(self) -> None:
        """Reads how long it took what has ended; where the device is still at it, this waits for it.

        A rank that loads its data itself takes as long as that and computing do. Where others load it meanwhile, that
        takes its time by itself: see `loading_s`. Until it is known how long, where this rank waits for it, better
        nothing is known than what a plan would be wrong with.
        """
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        compute_s, supplied, batches = ended.taken.seconds(), ended.supplied, max(ended.batches, 1)
        own_s, pace = supplied.own_s, supplied.pace
        if supplied.step_s is not None:  # where nobody waits for a device, as in steps apart, it computes meanwhile
            own_s = min(own_s, max(0.0, supplied.step_s - compute_s))
        extra_s = own_s + self._meter.take_extra_s(compute_s, own_s)
        if pace is not None and not ended.discarded:
            # All of one batch: where a device is behind, it is not the one that is in use now.
            pace.hear(ended.samples, step_s=supplied.step_s, waited_s=supplied.waited_s, computed_s=compute_s)
        self.loading_s = 0.0 if pace is None else pace.seconds_per_sample or 0.0
        if ended.discarded:
            compute_s = extra_s = 0.0
        self._stops.add(ended.samples / batches, compute_s / batches, batches=batches)
        pends = pace is not None and pace.pends
        self.known = (ended.samples / batches, 0.0 if pends else (compute_s + extra_s) / batches)
        ended.tell(Entry(
            samples=ended.samples, data_s=supplied.waited_s, compute_s=compute_s, extra_s=extra_s,
            loading_s=self.loading_s * ended.samples,
        ))  # fmt: skip

    @property
    def reported(self) -> tuple[float, float]:
        """Samples and seconds per batch, for the next exchange: of what ended last."""
        self.read()
        return self.known

    def take_stops(self) -> Ran:
        """How long this rank ran and was stopped since the last call, as far as it is read."""
        return self._stops.take()

    @property
    def last_step_s(self) -> float | None:
        """Seconds of the step before the present one, waiting included; None where there is none."""
        return self._pace.last_s

    @property
    def usual_step_s(self) -> float | None:
        """The median of the last steps; None before the second one."""
        return self._pace.usual_s

    # What is not said yet: see `Keeping` -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The samples that the next exchanges tell the others of; what they took says nothing of another process."""
        return {"samples": self.reported[0], "begun": [self._samples, self._batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, of this rank of as many."""
        self.read()
        self._meter.forget()
        self.known = (state["samples"], 0.0)
        self.supply.restart()
        self._samples, self._batches = state["begun"]
        if self._batches:
            self.supply.begin()
        self._discarded = self._batches > 0  # it is not known how long these took


def _read_at_exit(timesheet: weakref.ref[Timesheet]) -> None:
    found = timesheet()
    if found is not None:
        with contextlib.suppress(Exception):  # the device may be gone by now
            found.read()
