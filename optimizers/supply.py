"""How a rank gets the samples of its batches: it loads them between its computations, or others do beside those."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hvd_hetero.policy.loading import LoadingPace

from .meter import ComputeMeter, Moment


class Supplied(NamedTuple):
    """How long a rank waited for the samples of one step, and how fast they came."""

    waited_s: float
    own_s: float  # of these, in which it loaded them itself
    step_s: float | None  # since the end before; None where that is not of the same iteration
    pace: LoadingPace | None  # of what loaded them beside its computing


class Supply:
    """The samples of one rank, as loaders say it.

    Args:
        meter: measures compute.
        clock: seconds.

    Attributes:
        iteration: number of the last one over data that was told of.
        by_itself: whether this rank loads its data itself.
        pace: of what loads beside its computing, also while something else does.
    """

    def __init__(self, meter: ComputeMeter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._meter, self._clock = meter, clock
        self.iteration, self.by_itself, self.pace = 0, True, LoadingPace()
        self._paced = False  # whether a pace can be told of what loads now
        self.restart()

    def restart(self) -> None:
        """Forgets the waits so far."""
        self._waited_s = self._own_s = 0.0
        self._trains = False  # whether a batch has begun since
        self._ended_s: float | None = None  # when what was done last ended, of the present iteration

    def begin(self) -> None:
        """A batch begins."""
        self._trains = True

    def will_load(self, *, beside: bool, in_parts: bool = True, loaders: int = 1) -> None:
        """Says that another iteration over data begins, or that one goes on within which there was another.

        Args:
            beside: others load it, while this rank computes.
            in_parts: a rank loads its share; else it reads all, and waits as long for it whatever its share.
            loaders: how many do, side by side.
        """
        self.by_itself, self._paced = not beside, beside and in_parts
        self.pace.look_back(loaders)
        self._ended_s = None  # for its first batch a rank waits once
        if not self._trains:
            self._waited_s = self._own_s = 0.0  # for what was no training, as a validation's
        self.iteration += 1

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While this rank waits for data, between two of its computations; what raises does not count."""
        start_s, processor_s = self._clock(), self._meter.processor_s()
        with self._meter.aside(waits=False):
            yield
        seconds = self._clock() - start_s
        if self.by_itself:
            self._own_s += seconds
            self._meter.count_loading(processor_s)
        self._waited_s += seconds

    def now(self) -> Moment:
        """This moment, for `loaded`; also for another thread, which loads ahead."""
        return self._meter.now()

    def loaded(self, at: Moment) -> None:
        """Says that the batch that begins was there at a moment: where this rank was ready before, it waited."""
        self._waited_s += self._meter.begin_at(at)

    def end(self) -> Supplied:
        """Returns the waits and the pace since the last call, and begins anew."""
        now_s, before_s = self._clock(), self._ended_s
        supplied = Supplied(
            self._waited_s, self._own_s, None if before_s is None else now_s - before_s,
            self.pace if self._paced else None,
        )  # fmt: skip
        self._waited_s = self._own_s = 0.0
        self._trains, self._ended_s = False, now_s
        return supplied
