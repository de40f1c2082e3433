"""How long a route takes, by timing it at several sizes: what predictions rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.hierarchy import Levels
from hvd_hetero.policy.link import Curve, fit_curve

from .route import Candidate

SIZES_BYTES = (2**14, 2**18, 2**21)  # timed; what lies beyond follows the line through them
# Timed as well where it promises to take no longer than this: on quick links, caches and codecs that work by the piece
# bend the line, and slow ones make it straight.
LARGE_BYTES = 2**23
LARGE_S = 0.2
REPEATS = 3
# Quick sums are timed more often, for so long and so often at most: they vary most.
QUICK_S, MOST_REPEATS = 0.05, 12
UNSEEN = 2  # sums before those that count: names are negotiated at their first use, and memory is touched


def timed_curve(levels: Levels, candidate: Candidate, like: Any, *, clock: Callable[[], float]) -> Curve:
    """The times of sums of arrays of the type of `like`, the same on all ranks. A collective call.

    Sizes are timed in turn: what disturbs the machine for a moment would otherwise spoil one of them alone.
    """
    sums = {size: _Sum(levels, candidate, like, size, clock=clock) for size in SIZES_BYTES}
    taken = {size: one.times(REPEATS) for size, one in sums.items()}
    largest = SIZES_BYTES[-1]
    if taken[largest].max() * LARGE_BYTES <= LARGE_S * largest:
        sums[LARGE_BYTES] = _Sum(levels, candidate, like, LARGE_BYTES, clock=clock)
        taken[LARGE_BYTES] = sums[LARGE_BYTES].times(REPEATS)
    wanted = {size: min(MOST_REPEATS, int(QUICK_S / float(np.median(times)))) for size, times in taken.items()}
    while more := [size for size, times in taken.items() if len(times) < wanted[size]]:
        for size in more:
            repeats = min(REPEATS, wanted[size] - len(taken[size]))
            taken[size] = np.concatenate([taken[size], sums[size].times(repeats)])
    at: np.ndarray = np.repeat(np.array(list(taken)), [len(times) for times in taken.values()])
    return fit_curve(at, np.concatenate(list(taken.values())))


class _Sum:
    """A sum of so many bytes, as a bucket's is: over and over in the same memory."""

    def __init__(
        self, levels: Levels, candidate: Candidate, like: Any, size_bytes: int, *, clock: Callable[[], float]
    ) -> None:
        self._engine, self._clock = levels.everyone, clock
        side = max(1, int((size_bytes / like.itemsize) ** 0.5))
        self._source = verbs_of(like).seeded([side * side], 0, like)
        self._array = verbs_of(like).copied(self._source)
        warm = candidate._replace(cross=replace(candidate.cross, warmup_steps=0))
        self._route = warm.route(levels, [(side, side)])
        self._name = f"{self._engine.unique('hvd_hetero.timing.')}.{size_bytes}"
        for _ in range(UNSEEN):
            self._seconds()

    def _seconds(self) -> float:
        self._array[:] = self._source
        self._engine.allreduce_async(np.zeros(1), name=f"{self._name}.ready").wait()
        begin = self._clock()
        self._route.start(self._array, name=self._name).wait()
        seconds = self._clock() - begin
        self._route.settle(True)
        return seconds

    def times(self, repeats: int) -> np.ndarray:
        """Seconds of each of so many sums, on the slowest rank."""
        found = np.array([self._seconds() for _ in range(repeats)])
        return np.asarray(self._engine.allreduce_async(found, name=f"{self._name}.slowest", op="max").wait())
