"""What a rank does between two exchanges: its batches, their samples, and the seconds that they take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hvd_hetero.policy.jitter import Ran

from .meter import ComputeMeter, Moment, Pace, Stopwatch, WallClock
from .stop import StopMeter


class Entry(NamedTuple):
    """What was done since the last exchange."""

    samples: int
    data_s: float  # waited for data
    compute_s: float


class Timesheet:
    """The batches of this rank, as the next exchange tells the others of them.

    Args:
        stopwatch: measures compute; None: wall time, until somebody knows better (see `measure_with`).
    """

    def __init__(self, stopwatch: Stopwatch | None) -> None:
        self._meter = ComputeMeter(stopwatch or WallClock())
        self._given = stopwatch is not None
        self.restart()

    def restart(self) -> None:
        """Forgets what was done: it was for other ranks."""
        self._pace = Pace()
        self._stops = StopMeter()
        self._samples = self._batches = 0
        self._discarded = False
        self.data_s = 0.0
        self.reported: tuple[float, float] = (0.0, 0.0)  # samples and seconds per batch, for the next exchange

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

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While this rank waits for data, between two of its computations."""
        start, since = time.perf_counter(), self._meter.now()
        try:
            yield
        finally:
            self._meter.leave_out(since, self._meter.now())
            self.data_s += time.perf_counter() - start

    def now(self) -> Moment:
        """This moment, for `loaded`; also for another thread, which loads ahead."""
        return self._meter.now()

    def loaded(self, at: Moment) -> None:
        """Says that the batch that begins was there at a moment: where this rank was ready before, it waited."""
        self.data_s += self._meter.begin_at(at)

    def discard(self) -> None:
        """Says that what is done now takes longer than it will ever again."""
        self._discarded = True

    def end(self) -> Entry:
        """What was done since the last call; `reported` tells the others."""
        compute_s = self._meter.take_s()
        service_s = self._meter.take_service_s(compute_s)
        batches = max(self._batches, 1)
        if self._discarded:
            compute_s = service_s = 0.0
        self._stops.add(self._samples / batches, compute_s / batches, batches=batches)
        self.reported = (self._samples / batches, (compute_s + service_s) / batches)
        entry = Entry(samples=self._samples, data_s=self.data_s, compute_s=compute_s)
        self._samples, self._batches, self.data_s, self._discarded = 0, 0, 0.0, False
        return entry

    def take_stops(self) -> Ran:
        """How long this rank ran and was stopped since the last call."""
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
        self.reported = (state["samples"], 0.0)
        self._samples, self._batches = state["begun"]
        self._discarded = self._batches > 0  # it is not known how long these took
