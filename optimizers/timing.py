"""Times a route at several sizes of array, to predict how long it takes for a bucket of any size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.engine.hierarchy import Levels
from hvd_hetero.policy.link import Curve, fit_curve

from .route import Candidate

LARGE_BYTES = 2**23
# Sizes in bytes, each with the seconds that one sum of this size may take at most, as predicted from the size before;
# a size that would take longer is not timed, and the fitted line stands for it. On fast links, where caches and codecs
# that work in pieces bend the line, all four sizes are timed; on slow links it is straight, and two sizes are enough.
SIZES_BYTES = {2**14: math.inf, 2**18: math.inf, 2**21: 0.2, LARGE_BYTES: 0.2}
REPEATS = 3
# Quick sums vary most, so they are repeated: up to QUICK_S seconds for one size, and up to MOST_REPEATS times.
QUICK_S, MOST_REPEATS = 0.05, 12
UNSEEN = 2  # untimed sums at first: Horovod negotiates a name, and memory is paged in, at the first use


def timed_curve(levels: Levels, candidate: Candidate, like: Any, *, name: str, clock: Callable[[], float]) -> Curve:
    """Times sums by one route, and returns the curve of seconds over bytes, the same on all ranks. A collective call.

    Sizes that are timed more often are timed in turn, so that a short disturbance of the machine does not fall on one
    size alone.

    Args:
        levels: the groups of ranks (within nodes, between nodes) that the route uses.
        candidate: the route.
        like: an array; those that are summed have its library, dtype and device.
        name: prefix of the operations' names, the same on all ranks.
        clock: returns the time in seconds.
    """
    sums: dict[int, _Sum] = {}
    taken: dict[int, np.ndarray] = {}
    promised_s = 0.0  # seconds per byte of the size timed last
    for size, most_s in SIZES_BYTES.items():
        if promised_s * size > most_s:
            break
        sums[size] = _Sum(levels, candidate, like, size, name=f"{name}.{size}", clock=clock)
        taken[size] = sums[size].times(REPEATS)
        promised_s = float(np.median(taken[size])) / size
    wanted = {size: min(MOST_REPEATS, int(QUICK_S / float(np.median(times)))) for size, times in taken.items()}
    while more := [size for size, times in taken.items() if len(times) < wanted[size]]:
        for size in more:
            repeats = min(REPEATS, wanted[size] - len(taken[size]))
            taken[size] = np.concatenate([taken[size], sums[size].times(repeats)])
    at: np.ndarray = np.repeat(np.array(list(taken)), [len(times) for times in taken.values()])
    return fit_curve(at, np.concatenate(list(taken.values())))


class _Sum:
    """Sums an array of `size_bytes` bytes by one route, repeatedly in the same memory, as a bucket is summed."""

    def __init__(
        self,
        levels: Levels,
        candidate: Candidate,
        like: Any,
        size_bytes: int,
        *,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._name, self._clock = levels.everyone, name, clock
        side = max(1, int((size_bytes / like.itemsize) ** 0.5))
        self._source = verbs_of(like).seeded([side * side], 0, like)
        self._array = verbs_of(like).copied(self._source)
        warm = candidate._replace(cross=replace(candidate.cross, warmup_steps=0))
        self._route = warm.route(levels, [(side, side)])
        for _ in range(UNSEEN):
            self._seconds()

    def _seconds(self) -> float:
        self._array[:] = self._source
        self._engine.allreduce_async(np.zeros(1), name=f"{self._name}.ready").wait()
        begin = self._clock()
        self._route.start(self._array, name=self._name).wait()
        seconds = self._clock() - begin
        self._route.end_step(True)
        return seconds

    def times(self, repeats: int) -> np.ndarray:
        """Times `repeats` sums. Returns the seconds of each on its slowest rank."""
        found = np.array([self._seconds() for _ in range(repeats)])
        return np.asarray(self._engine.allreduce_async(found, name=f"{self._name}.slowest", op="max").wait())
