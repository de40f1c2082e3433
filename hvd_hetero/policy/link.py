"""Links: the time of a message of s bytes between two ranks, fitted to measured transfers.

    t(s) = latency + s / bandwidth

is the alpha-beta model of Hockney (1994), "The communication challenge for MPP: Intel Paragon and Meiko CS-2".

- The latency is fitted to the fastest repeat of each size, as noise only ever makes a transfer longer. The bandwidth is
  fitted to the medians, as it should be what a job gets on average.
- Least squares are weighted by 1/t: the noise of a transfer grows with its time, and without weights the largest size
  alone would decide.
- The slope is fitted to sizes whose time is at least twice the smallest time, if there are two such sizes. With smaller
  ones, a shaper's burst allowance or a switch's buffer makes a link look faster than it is in the long run.
- The latency is fitted to sizes for which it is at least half of the time, and to the smallest size in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIZE_SHOWS = 2.0        # from so many times the smallest time on, bandwidth and not latency makes most of the time


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two ranks: its latency and its bandwidth. Raises ValueError for numbers that are not valid."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0.0):
            raise ValueError(f"latency_s: expected a finite number, 0 or more. Received: {self.latency_s}.")
        if not (math.isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0.0):
            raise ValueError("bandwidth_bytes_per_s: expected a finite number above 0; ranks that cannot reach one "
                             f"another have no link. Received: {self.bandwidth_bytes_per_s}.")

    def time_s(self, size_bytes: float) -> float:
        """The predicted seconds for one message of `size_bytes`."""
        if not size_bytes >= 0:
            raise ValueError(f"size_bytes: expected 0 or more. Received: {size_bytes}.")
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Curve(Link):
    """A link whose times are interpolated linearly between measured sizes; beyond the largest, its bandwidth holds.

    It is more accurate than a straight line if a shaper's burst, caches, or an algorithm that works in chunks make the
    time depend on the size in another way.

    Attributes:
        sizes_bytes: the measured sizes, ascending.
        seconds: the median time of each size.
    """

    sizes_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def time_s(self, size_bytes: float) -> float:
        """The predicted seconds for one message of `size_bytes`."""
        if not size_bytes >= 0:
            raise ValueError(f"size_bytes: expected 0 or more. Received: {size_bytes}.")
        rising = np.maximum.accumulate(self.seconds)  # that more bytes take less time can only be noise
        beyond = max(0.0, size_bytes - self.sizes_bytes[-1]) / self.bandwidth_bytes_per_s
        return float(np.interp(size_bytes, self.sizes_bytes, rising)) + beyond


def fit_curve(sizes_bytes: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> Curve:
    """The curve through the medians of measured transfers.

    Args:
        sizes_bytes: the size of each transfer; a size may occur any number of times.
        seconds: the time of each transfer.
    """
    line = fit_link(sizes_bytes, seconds, typical=True)
    sizes: np.ndarray = np.asarray(sizes_bytes, dtype=float)
    times: np.ndarray = np.asarray(seconds, dtype=float)
    each, middle = _medians(sizes, times)
    return Curve(latency_s=line.latency_s, bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
                 sizes_bytes=tuple(each.tolist()), seconds=tuple(middle.tolist()))


def fit_link(sizes_bytes: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray, *,
             typical: bool = False) -> Link:
    """Fits latency and bandwidth to measured transfers.

    If noise hides the slope (it would be 0 or negative), or if there is a single size, the latency is 0 and the
    bandwidth is that of the largest size: a lower bound. A latency is at most the time of the fastest transfer.

    Args:
        sizes_bytes: the size of each transfer; a size may occur any number of times.
        seconds: the time of each transfer.
        typical: fit the latency to the median transfer of each size, which predicts times better, instead of to the
            fastest one.

    Raises:
        ValueError: no transfers, lists of unequal length, or numbers that are not finite and above 0.
    """
    sizes: np.ndarray = np.asarray(sizes_bytes, dtype=float)
    times: np.ndarray = np.asarray(seconds, dtype=float)
    if sizes.shape != times.shape or sizes.ndim != 1 or not len(sizes):
        raise ValueError("sizes_bytes and seconds: expected two sequences of one length, at least 1. "
                         f"Received: shapes {list(sizes.shape)} and {list(times.shape)}.")
    if not (np.isfinite(sizes).all() and np.isfinite(times).all() and (sizes > 0).all() and (times > 0).all()):
        raise ValueError("sizes_bytes and seconds: expected finite numbers above 0; a time of 0 means a clock that is "
                         f"too coarse. Received: {list(sizes)} and {list(times)}.")
    each, middle = _medians(sizes, times)
    fastest = middle if typical else np.array([np.min(times[sizes == size]) for size in each])
    shows = middle >= SIZE_SHOWS * middle.min()
    if shows.sum() < 2:
        shows[:] = True
    slope = _slope(each[shows], middle[shows])
    if not slope > 0.0:
        return Link(latency_s=0.0, bandwidth_bytes_per_s=float(each[-1] / middle[-1]))
    transfer = slope * each
    mostly_latency = transfer <= fastest / SIZE_SHOWS
    mostly_latency[0] = True
    latency = float(np.median((fastest - transfer)[mostly_latency]))
    return Link(latency_s=min(max(latency, 0.0), float(fastest.min())), bandwidth_bytes_per_s=float(1.0 / slope))


def _medians(sizes: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct sizes, ascending, and the median time of each."""
    each = np.unique(sizes)
    return each, np.array([np.median(times[sizes == size]) for size in each])


def _slope(sizes: np.ndarray, times: np.ndarray) -> float:
    """Seconds per byte: the slope of the least-squares line with weights 1/t; 0.0 for a single size."""
    weights = 1.0 / times
    off = sizes - np.average(sizes, weights=weights)
    lever = float(np.sum(weights * off**2))
    return float(np.sum(weights * off * times) / lever) if lever > 0.0 else 0.0
