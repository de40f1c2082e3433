"""Telling a stop from a slow step: a rank whose cores are taken away for a while is not a slower rank."""

from __future__ import annotations

import statistics
from collections import deque

from hvd_hetero.policy.jitter import Ran

WINDOW = 16  # batches of one size
LEAST = 5  # of them, before one is told from the others
FACTOR, FLOOR_S = 2.0, 0.05  # a stop makes a batch so many times longer than usual, and by so much at least


class StopMeter:
    """What this rank's batches say of its stops.

    The median of half a window follows a rank that has become slower for good: that is no stop.
    """

    def __init__(self) -> None:
        self._samples = 0.0
        self._recent_s: deque[float] = deque(maxlen=WINDOW)
        self._running_s, self._stopped_s, self._stops = 0.0, 0.0, 0

    def add(self, samples: float, compute_s: float, *, batches: int = 1) -> None:
        """Takes in `batches` batches that took `compute_s` each."""
        if samples <= 0 or compute_s <= 0:
            return
        if samples != self._samples:
            self._recent_s.clear()
            self._samples = samples
        usual_s = statistics.median(self._recent_s) if len(self._recent_s) >= LEAST else compute_s
        over_s = compute_s - usual_s
        if over_s > max((FACTOR - 1.0) * usual_s, FLOOR_S):
            self._stopped_s += batches * over_s
            self._stops += 1
        else:
            usual_s = compute_s
        self._running_s += batches * usual_s
        self._recent_s.append(compute_s)

    def take(self) -> Ran:
        """The sums since the last call."""
        ran = Ran(self._running_s, self._stopped_s, float(self._stops))
        self._running_s, self._stopped_s, self._stops = 0.0, 0.0, 0
        return ran
