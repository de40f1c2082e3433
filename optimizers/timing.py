"""How long a route takes, by timing it at several sizes: what predictions rest on."""

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
# Sizes that are timed, each where a sum of it promises to take no longer than so many seconds; what lies beyond follows
# the line through them. On quick links, caches and codecs that work by the piece bend the line, and slow ones make it
# straight: two sizes tell it.
SIZES_BYTES = {2**14: math.inf, 2**18: math.inf, 2**21: 0.2, LARGE_BYTES: 0.2}
REPEATS = 3
# Quick sums are timed more often, for so long and so often at most: they vary most.
QUICK_S, MOST_REPEATS = 0.05, 12
UNSEEN = 2  # sums before those that count: names are negotiated at their first use, and memory is touched


def timed_curve(levels: Levels, candidate: Candidate, like: Any, *, name: str, clock: Callable[[], float]) -> Curve:
    """The times of sums of arrays of the type of `like`, in operations of this name, the same on all ranks. A
    collective call.

    Sizes that are timed more often are timed in turn: what disturbs the machine for a moment would otherwise spoil one
    of them alone.
    """
    sums: dict[int, _Sum] = {}
    taken: dict[int, np.ndarray] = {}
    promised_s = 0.0  # for a byte
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
    """A sum of so many bytes, as a bucket's is: over and over in the same memory."""

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
        """Seconds of each of so many sums, on the slowest rank."""
        found = np.array([self._seconds() for _ in range(repeats)])
        return np.asarray(self._engine.allreduce_async(found, name=f"{self._name}.slowest", op="max").wait())
