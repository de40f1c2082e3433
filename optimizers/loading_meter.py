"""Measures how a rank gets its samples: how long it waits for them, and how fast they are loaded.

A rank loads its samples itself between its computations (`num_workers=0`), or other processes or threads load them
while it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hvd_hetero.policy.loader_speed import LoaderSpeed

from .meter import ComputeMeter, Moment


class LoadingTimes(NamedTuple):
    """How long a rank waited for the samples of one step, and how fast they were loaded.

    Attributes:
        waited_s: seconds that the rank waited for samples.
        own_s: those of the seconds `waited_s` in which it loaded samples itself.
        step_s: seconds from the end of the step before to that of this one; None for the first step of an iteration.
        speed: the speed of the workers that load while the rank computes; None if there are none, or if they read all
            samples on every rank, whatever the shares.
    """

    waited_s: float
    own_s: float
    step_s: float | None
    speed: LoaderSpeed | None


class LoadingMeter:
    """Measures the waits of one rank for its samples. The data loaders report to it, and `StepTimer` reads it.

    Args:
        meter: measures this rank's compute; waits for samples are taken out of that.
        clock: returns the time in seconds.

    Attributes:
        iteration: number of iterations over data so far, as `will_load` counts them.
        by_itself: whether this rank loads its data itself, and no workers do.
        speed: the speed of workers that load while this rank computes; kept while other data is loaded without them.
    """

    def __init__(self, meter: ComputeMeter, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        self.iteration, self.by_itself, self.speed = 0, True, LoaderSpeed()
        self._measures_speed = False  # whether `speed` is measured in the present iteration
        self.restart()

    def restart(self) -> None:
        """Forgets the waits so far."""
        self._waited_s = self._own_s = 0.0
        self._trains = False  # whether a training batch has begun since the last `end`
        self._ended_s: float | None = None  # when the last step of the present iteration ended

    def begin(self) -> None:
        """Says that a training batch begins, so that the waits so far are counted."""
        self._trains = True

    def will_load(self, *, beside: bool, in_parts: bool = True, loaders: int = 1, ahead: int = 0) -> None:
        """Says that an iteration over data begins, or continues after another loop (a validation, say) within it. The
        data loaders call it.

        Args:
            beside: whether workers load the data while this rank computes.
            in_parts: whether this rank loads its share only. If not, as with an `IterableDataset`, it reads all
                samples, and how long it waits does not depend on its share.
            loaders: the number of workers.
            ahead: the most batches that they load ahead.
        """
        self.by_itself, self._measures_speed = not beside, beside and in_parts
        self.speed.begin(loaders, ahead)
        self._ended_s = None  # the wait for the first batch of an iteration says nothing of the speed
        if not self._trains:
            self._waited_s = self._own_s = 0.0  # those waits were not for training, but for a validation, say
        self.iteration += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which this rank waits for data, or loads it, between two computations. If its body raises, the
        time is not counted."""
        start_s, before = self._clock(), self._meter.clocks()
        with self._meter.aside(waits=False):
            yield
        seconds = self._clock() - start_s
        if self.by_itself:
            self._own_s += seconds
            self._meter.count_loading(before)
        self._waited_s += seconds

    def tell(self, samples: int, seconds: float) -> None:
        """Says for how many seconds the loading of a batch has kept one worker busy; has no effect unless the speed of
        workers is measured. May be called from a thread that loads ahead."""
        if self._measures_speed:
            self.speed.tell(samples, seconds)

    def now(self) -> Moment:
        """Returns the present moment, to be passed to `loaded`. May be called from a thread that loads ahead."""
        return self._meter.now()

    def loaded(self, at: Moment) -> None:
        """Says that the samples of the batch that begins were loaded at the moment `at`. If this rank was ready
        earlier, the time in between is a wait, and no compute."""
        self._waited_s += self._meter.begin_at(at)

    def end(self) -> LoadingTimes:
        """Ends a step: returns its waits and the speed of loading, and begins to measure the next step."""
        now_s, before_s = self._clock(), self._ended_s
        supplied = LoadingTimes(
            self._waited_s, self._own_s, None if before_s is None else now_s - before_s,
            self.speed if self._measures_speed else None,
        )  # fmt: skip
        self._waited_s = self._own_s = 0.0
        self._trains, self._ended_s = False, now_s
        return supplied
