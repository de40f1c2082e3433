"""What a rank does between two exchanges: its batches, their samples, and the seconds that they take."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvd_hetero.policy.jitter import Ran
from hvd_hetero.policy.loading import LoadingPace

from .meter import ComputeMeter, Moment, Pace, Stopwatch, Taken, WallClock
from .stop import StopMeter

CLEARLY = 1.25  # times as long


class Entry(NamedTuple):
    """What was done since the last exchange."""

    samples: int
    data_s: float  # waited for data
    compute_s: float
    extra_s: float  # beyond that, as plans reckon: see `Timesheet.read`


class Ended(NamedTuple):
    """What was done, before it is known how long it took."""

    taken: Taken
    samples: int
    batches: int
    data_s: float
    own_s: float  # of these, in which this rank loaded its data itself
    step_s: float | None  # since the end before; None where that is not of the same iteration
    loading: LoadingPace | None  # of what loaded it beside this rank's computing
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

    Attributes:
        iteration: number of the last one over data that was told of.
        tell_limit: is told of the seconds that a sample takes to be loaded beside computing, where that is what limits
            this rank; of 0 where it no longer is.
    """

    def __init__(
        self,
        stopwatch: Stopwatch | None,
        *,
        quota_cores: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._meter, self._clock = ComputeMeter(stopwatch or WallClock(), quota_cores=quota_cores), clock
        self._given = stopwatch is not None
        self._ended: Ended | None = None  # whose time is not read yet
        self._late = False  # whether there ever was one
        self._by_itself = True  # whether this rank loads its data itself
        self.iteration = 0
        self.tell_limit: Callable[[float], None] = lambda seconds_per_sample: None
        self._beside = LoadingPace()  # of what loads beside this rank's computing, also while something else does
        self._loading: LoadingPace | None = None  # it, while that loads
        self.restart()

    def restart(self) -> None:
        """Forgets what was done: it was for other ranks."""
        self.read()
        self._meter.forget()
        self._pace = Pace(self._clock)
        self._stops = StopMeter()
        self._samples = self._batches = 0
        self._discarded = False
        self._data_s = self._own_s = 0.0
        self._ended_s: float | None = None  # when what was done last ended, of the present iteration
        self._limit_s = 0.0  # as was said last
        self.known: tuple[float, float] = (0.0, 0.0)  # samples and seconds per batch, as they were read last

    def measure_with(self, stopwatch: Stopwatch) -> None:
        """Measures compute with what suits the device, unless the constructor was told."""
        if not self._given:
            self._meter.stopwatch = stopwatch

    def begin(self, samples: int) -> None:
        """A batch of `samples` begins."""
        self._pace.begin()
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

    def will_load(self, *, beside: bool, in_parts: bool = True, loaders: int = 1) -> None:
        """Says that another iteration over data begins, or that one goes on within which there was another.

        Args:
            beside: others load it, while this rank computes.
            in_parts: a rank loads its share; else it reads all, and waits as long for it whatever its share.
            loaders: how many do, side by side.
        """
        self._by_itself = not beside
        self._beside.look_back(loaders)
        self._loading = self._beside if beside and in_parts else None
        self._ended_s = None  # for its first batch a rank waits once
        if not self._batches:
            self._data_s = self._own_s = 0.0  # waited for what was no training, as a validation's
        self.iteration += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While this rank waits for data, between two of its computations; what raises does not count."""
        start_s, processor_s = self._clock(), self._meter.processor_s()
        with self._meter.aside(waits=False):
            yield
        seconds = self._clock() - start_s
        if self._by_itself:
            self._own_s += seconds
            self._meter.count_loading(processor_s)
        self._data_s += seconds

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """While this rank does what is no computation of its samples."""
        return self._meter.aside(waits=False)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """While this rank waits for others in the middle of its computations, as for the statistics of a layer."""
        return self._meter.aside(waits=True)

    def take_waited_s(self) -> float:
        """The seconds of such waits since the last call."""
        return self._meter.take_aside_s()

    def now(self) -> Moment:
        """This moment, for `loaded`; also for another thread, which loads ahead."""
        return self._meter.now()

    def loaded(self, at: Moment) -> None:
        """Says that the batch that begins was there at a moment: where this rank was ready before, it waited."""
        self._data_s += self._meter.begin_at(at)

    def discard(self) -> None:
        """Says that what is done now takes longer than it will ever again."""
        self._discarded = True

    def end(self, tell: Callable[[Entry], None]) -> None:
        """Ends what was done since the last call; `tell` hears of it as soon as it is known how long it took."""
        self.read()
        now_s, before_s = self._clock(), self._ended_s
        ended = Ended(
            self._meter.take(), self._samples, self._batches, self._data_s, self._own_s,
            None if before_s is None else now_s - before_s, self._loading, self._discarded, tell,
        )  # fmt: skip
        self._ended_s = now_s
        self._samples, self._batches, self._discarded = 0, 0, False
        self._data_s = self._own_s = 0.0
        self._ended = ended
        if ended.taken.known():
            self.read()
        elif not self._late:
            self._late = True
            atexit.register(_read_at_exit, weakref.ref(self))  # the last step is known as well

    def read(self) -> None:
        """Reads how long it took what has ended; where the device is still at it, this waits for it.

        To plans a rank that loads its data itself takes as long as that and computing do, and one that others load for
        as long as the longer of the two.
        """
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        compute_s, loading, batches = ended.taken.seconds(), ended.loading, max(ended.batches, 1)
        own_s = ended.own_s
        if ended.step_s is not None:  # where nobody waits for a device, as in steps apart, it computes meanwhile
            own_s = min(own_s, max(0.0, ended.step_s - compute_s))
        extra_s = own_s + self._meter.take_extra_s(compute_s, own_s)
        if loading is not None and not ended.discarded:
            # All of one batch: where a device is behind, it is not the one that is in use now.
            loading.hear(ended.samples, step_s=ended.step_s, waited_s=ended.data_s, computed_s=compute_s)
            if loading.seconds_per_sample is not None:
                loading_s = loading.seconds_per_sample * ended.samples
                if 2 * ended.samples >= self.known[0] * batches:  # a short batch says nothing of the others
                    self._tell_limit(loading.seconds_per_sample, loading_s / max(compute_s + extra_s, 1e-9))
                extra_s = max(extra_s, loading_s - compute_s)
        pends = loading is not None and loading.pends
        if ended.discarded:
            compute_s = extra_s = 0.0
        self._stops.add(ended.samples / batches, compute_s / batches, batches=batches)
        self.known = (ended.samples / batches, 0.0 if pends else (compute_s + extra_s) / batches)
        ended.tell(Entry(samples=ended.samples, data_s=ended.data_s, compute_s=compute_s, extra_s=extra_s))

    def _tell_limit(self, seconds_per_sample: float, longer: float) -> None:
        """Says that loading is what limits this rank, or is no more, where it is clearly another than was said last:
        it takes so many times as long as all else does."""
        now = seconds_per_sample if longer >= 1.0 else 0.0
        said = self._limit_s
        if now and not 1.0 < CLEARLY * said / now < CLEARLY**2 or said and longer * CLEARLY < 1.0:
            self._limit_s = now
            self.tell_limit(now)

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
        self._data_s, self._own_s, self._ended_s = 0.0, 0.0, None
        self._samples, self._batches = state["begun"]
        self._discarded = self._batches > 0  # it is not known how long these took


def _read_at_exit(timesheet: weakref.ref[Timesheet]) -> None:
    found = timesheet()
    if found is not None:
        with contextlib.suppress(Exception):  # the device may be gone by now
            found.read()
