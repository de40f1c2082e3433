"""Measures what a rank does between two exchanges: its samples, and the seconds of loading and compute they take."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hvd_hetero.engine.stopwatch import Stopwatch, WallClock
from hvd_hetero.policy.jitter import StopSums

from .loading_meter import LoadingMeter, LoadingTimes
from .meter import ComputeMeter, Pace, Segments
from .stop import StopMeter

AFTER = 9  # steps whose lower quartile is what a rank does after each step: a validation now and then is not in it


class Entry(NamedTuple):
    """The samples and times of one rank between two exchanges, for the trace.

    Attributes:
        samples: the number of this rank's samples.
        data_s: seconds that the rank waited for data.
        compute_s: seconds that it computed.
        extra_s: further seconds that plans count as its own: loading that it did itself, what it does after each step,
            serving the communication, and what a CPU quota costs it in the long run (see `ComputeMeter.take_extra_s`).
        loading_s: seconds that workers need at least to load these samples while the rank computes.
    """

    samples: int
    data_s: float
    compute_s: float
    extra_s: float
    loading_s: float


class Ended(NamedTuple):
    """A step that has ended, but whose compute time the device may not have reported yet."""

    taken: Segments
    after: Segments  # what was done after the step before it
    samples: int
    batches: int
    supplied: LoadingTimes
    discarded: bool
    tell: Callable[[Entry], None]


class StepTimer:
    """Measures the times of this rank's batches, which the next exchange reports to the other ranks.

    A GPU may still compute an update when Python has issued it. To avoid waiting for the GPU, the time of a step is
    read only when the next exchange asks for it, or the next step ends.

    Args:
        stopwatch: measures compute; None: wall time, until `measure_with` sets another one.
        serving_s, quota_cores, crowding, spins: as of `ComputeMeter`.
        clock: returns wall time in seconds, for what runs on no device.
        processor_s: returns the processor time of this process in seconds.

    Attributes:
        loading_meter: measures how this rank gets its samples.
        known: samples per batch and seconds per batch, of the last step whose times were read; 0 s if not known.
        loading_s: seconds that workers need at least to load one sample while the rank computes, as read last; 0 if
            not known.
    """

    def __init__(
        self,
        stopwatch: Stopwatch | None,
        *,
        serving_s: Callable[[], float] | None = None,
        quota_cores: Callable[[], float | None] = lambda: None,
        crowding: Callable[[], float | None] = lambda: None,
        spins: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._meter = ComputeMeter(
            stopwatch or WallClock(), processor_s=processor_s, serving_s=serving_s, quota_cores=quota_cores,
            crowding=crowding, spins=spins,
        )  # fmt: skip
        self._clock, self._given = clock, stopwatch is not None
        self._ended: Ended | None = None  # the last step, while its time is not read
        self._late = False  # whether the time of any step was not known at its end; then the last one is read at exit
        self.loading_meter = LoadingMeter(self._meter, clock)
        self.loading_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Forgets the times of all steps so far; is called after an elastic reset."""
        self.read()
        self._meter.forget()
        self._pace = Pace(self._clock)
        self._stops = StopMeter()
        self._samples = self._batches = 0
        self._discarded = False
        self._has_stepped = False  # whether a step has ended since the last batch began
        self._after = Segments(self._meter.stopwatch, [])  # what was done between that step and that batch
        self._after_s: deque[float] = deque(maxlen=AFTER)
        self.loading_meter.restart()
        self.known: tuple[float, float] = (0.0, 0.0)

    def resume_loading(self, loading_s: float) -> None:
        """Sets `loading_s` to its value before a restart of this rank, unless it was measured since."""
        if loading_s and not self.loading_s:
            self.loading_meter.speed.resume(loading_s)
            self.loading_s = loading_s

    def measure_with(self, stopwatch: Stopwatch) -> None:
        """Sets the stopwatch that suits the device of the model, unless one was passed to the constructor."""
        if not self._given:
            self._meter.stopwatch = stopwatch

    def begin(self, samples: int) -> None:
        """Says that a batch with `samples` samples of this rank begins."""
        self._pace.begin()
        self.loading_meter.begin()
        self._batches += 1
        self._samples += samples

    def before_batch(self) -> None:
        """Says that a batch is about to begin. What this rank did since its last step, or since it waited for others
        after that, was work after that step, as on a metric; to wait for data was none."""
        if self._has_stepped:
            self._after, self._has_stepped = self._meter.take_open(), False

    @property
    def running(self) -> bool:
        """Whether this rank computes now: between `run` and `pause`."""
        return self._meter.running

    def run(self) -> None:
        """Says that compute begins, or goes on after a wait."""
        self._meter.run()

    def pause(self) -> None:
        """Says that compute ends, and waiting for other ranks begins."""
        self._meter.pause()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for work that is no computation of this rank's samples: its time is not counted."""
        return self._meter.aside(waits=False)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this rank waits for others within its compute, as `SyncBatchNorm` does."""
        return self._meter.aside(waits=True)

    def take_waited_s(self) -> float:
        """Returns the seconds spent in `waiting()` contexts since the last call."""
        return self._meter.take_aside_s()

    def discard(self) -> None:
        """Says that the present step is unusually slow, as when a model is compiled. Plans do not use its times."""
        self._discarded = True

    def end(self, tell: Callable[[Entry], None]) -> None:
        """Ends a step, which is what was done since the last call. `tell` is called with its `Entry` as soon as its
        times are known, by a later call if a GPU is still at the step."""
        self.read()
        supplied = self.loading_meter.end()
        ended = Ended(self._meter.take(), self._after, self._samples, self._batches, supplied, self._discarded, tell)
        self._samples, self._batches, self._discarded = 0, 0, False
        self._ended, self._after, self._has_stepped = ended, Segments(self._meter.stopwatch, []), True
        if ended.taken.known():
            self.read()
        elif not self._late:
            self._late = True
            atexit.register(_read_at_exit, weakref.ref(self))  # so that the trace has the last step, too

    def read(self) -> None:
        """Reads the times of the step that has ended, if they were not read yet. Waits for the device, if it is still
        at that step.

        If a rank loads its data itself, the seconds in `known` are those of loading and compute together. If workers
        load meanwhile, their time is in `loading_s`. As long as the rank waits for workers whose speed is not known
        yet, `known` has 0 s (no measurement), since a plan made from compute alone would be wrong.
        """
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        compute_s, supplied, batches = ended.taken.seconds(), ended.supplied, max(ended.batches, 1)
        own_s, loaders = supplied.own_s, supplied.speed
        if supplied.step_s is not None:  # in local steps, nobody waits for the device, which computes during loading
            own_s = min(own_s, max(0.0, supplied.step_s - compute_s))
        after_s = ended.after.seconds()
        if ended.after.segments:
            self._after_s.append(after_s)
        extra_s = own_s + self._meter.take_extra_s(compute_s, own_s + after_s)
        if len(self._after_s) > 1:  # what was done once need not belong to each step
            extra_s += sorted(self._after_s)[(len(self._after_s) - 1) // 4]
        if loaders is not None and not ended.discarded:
            # All numbers are those of the ended step: if the device is behind, another batch is in use by now.
            loaders.observe(ended.samples, step_s=supplied.step_s, waited_s=supplied.waited_s, computed_s=compute_s)
        self.loading_s = 0.0 if loaders is None else loaders.seconds_per_sample or 0.0
        if ended.discarded:
            compute_s = extra_s = 0.0
        self._stops.add(ended.samples / batches, compute_s / batches, batches=batches)
        pending = loaders is not None and loaders.is_pending
        self.known = (ended.samples / batches, 0.0 if pending else (compute_s + extra_s) / batches)
        ended.tell(Entry(
            samples=ended.samples, data_s=supplied.waited_s, compute_s=compute_s, extra_s=extra_s,
            loading_s=self.loading_s * ended.samples,
        ))  # fmt: skip

    @property
    def reported(self) -> tuple[float, float]:
        """Samples and seconds per batch of the last ended step, for the next exchange. May wait for the device."""
        self.read()
        return self.known

    def take_stops(self) -> StopSums:
        """Returns how long this rank ran and was stopped, and how often, in the steps read since the last call."""
        return self._stops.take()

    @property
    def last_step_s(self) -> float | None:
        """Seconds of the step before the present one, with all waits; None if there is none."""
        return self._pace.last_s

    @property
    def usual_step_s(self) -> float | None:
        """The usual duration of the last steps, in seconds, see `Pace.usual_s`; None before the second step."""
        return self._pace.usual_s

    # For checkpoints, through `UnsentState`: what the other ranks have not been told yet ------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The samples that the next exchange reports, and the batches begun. Their times are left out: they would say
        nothing of the process that loads this state."""
        return {"samples": self.reported[0], "begun": [self._samples, self._batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads `state`, which was saved by the same rank of as many ranks."""
        self.read()
        self._meter.forget()
        self.known = (state["samples"], 0.0)
        self.loading_meter.restart()
        self._samples, self._batches = state["begun"]
        if self._batches:
            self.loading_meter.begin()
        self._has_stepped = False
        self._discarded = self._batches > 0  # the time of the batches begun before is not known


def _read_at_exit(step_timer: weakref.ref[StepTimer]) -> None:
    found = step_timer()
    if found is not None:
        with contextlib.suppress(Exception):  # the device may be gone by now
            found.read()
