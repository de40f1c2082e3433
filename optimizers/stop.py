"""Distinguishes a stop of a rank, whose cores another process takes for a while, from a lower speed of the rank."""

from __future__ import annotations

import statistics
from collections import deque

from hvd_hetero.policy.jitter import StopSums

WINDOW = 16  # batches of one size over which the median is taken
LEAST = 5  # batches of one size, before the next one can count as stopped
FACTOR, FLOOR_S = 2.0, 0.05  # a batch was stopped if it took more than FACTOR times the usual, and FLOOR_S longer


class StopMeter:
    """Measures the stops of this rank from the compute times of its batches.

    A batch that takes much longer than the median of the last ones was stopped. If a rank becomes slower for good, the
    median follows after half a window, so that this is not taken for stops.
    """

    def __init__(self) -> None:
        self._samples = 0.0  # of the batches in the window
        self._recent_s: deque[float] = deque(maxlen=WINDOW)
        self._other = 0.0  # samples of the last batch, if another number
        self._running_s, self._stopped_s, self._stops = 0.0, 0.0, 0

    def add(self, samples: float, compute_s: float, *, batches: int = 1) -> None:
        """Takes in `batches` batches, each of `samples` samples and `compute_s` seconds.

        The second batch in a row of another size begins a new window. A single one, as the short last batch of an
        epoch, does not.
        """
        if samples <= 0 or compute_s <= 0:
            return
        self._other, before = samples if samples != self._samples else 0.0, self._other
        if self._other:
            if self._samples and self._other != before:
                self._running_s += batches * compute_s
                return
            self._recent_s.clear()
            self._samples, self._other = samples, 0.0
        usual_s = statistics.median(self._recent_s) if len(self._recent_s) >= LEAST else compute_s
        over_s = compute_s - usual_s
        if over_s > max((FACTOR - 1.0) * usual_s, FLOOR_S):
            self._stopped_s += batches * over_s
            self._stops += 1
        else:
            usual_s = compute_s
        self._running_s += batches * usual_s
        self._recent_s.append(compute_s)

    def take(self) -> StopSums:
        """Returns the seconds run, the seconds stopped and the number of stops since the last call."""
        sums = StopSums(self._running_s, self._stopped_s, float(self._stops))
        self._running_s, self._stopped_s, self._stops = 0.0, 0.0, 0
        return sums
