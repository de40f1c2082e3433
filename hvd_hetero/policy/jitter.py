"""Jitter: the mean duration of a step on ranks whose speed is unsteady, when all ranks wait for each other.

A rank's step takes t (1 + noise). In addition, the rank is stopped now and then, as when another process has its cores.
Stops come by wall-clock time, whether the rank computes or waits. With f the fraction of time in which a rank is
stopped and L the mean length of a stop, a running rank is stopped r = f / ((1 - f) L) times a second. A step takes

    alone       t / (1 - f) seconds, if the rank waits for nobody
    together    E max_i F_i + the wait until all ranks run + exchange / prod_i (1 - f_i)

F_i is the time at which rank i finishes computing: t_i with lognormal noise and a Poisson number (mean r_i t_i) of
exponential stops. The ranks are independent, so P(max <= x) is the product of their distributions, and E max is the
integral of 1 - prod_i P(F_i <= x), computed on a grid. The exchange needs all ranks running at once, and progresses
only while they are. A rank that ran a time u ago runs now with probability p(u) = 1 - f + f exp(-(r + 1 / L) u)
(two-state Markov chain). Let rank i have waited W_i when the last rank finishes. By a renewal equation (all run at u:
they first did at some time before, and do again at u) the mean wait until all run is

    integral of (prod_i p_i(u) - prod_i p_i(W_i + u)) du / prod_i (1 - f_i)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .speed import SpeedModel

QUANTILES = 100         # values of equal probability that stand for the noise of a step
POINTS = 800            # points of each part of the time grid
MANY_STOPS = 30.0       # mean stops in one step from which on they are treated as a lower speed with more noise
LEVELS = 16             # equally probable finishing times of the last rank that the wait is averaged over
TINY = 1e-300           # keeps logarithms and quotients finite
LONGEST_STOP = 40.0     # grids end at so many mean stops: a longer stop has probability e^-40


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """How unsteady one rank is: the noise of its steps, and its stops. The default is a steady rank."""

    variation: float = 0.0      # standard deviation of a step's compute time over its mean, stops left out
    stalled: float = 0.0        # fraction of time in which the rank is stopped
    stall_s: float = 0.0        # mean length of one stop

    def __post_init__(self) -> None:
        if not (math.isfinite(self.variation) and self.variation >= 0.0):
            raise ValueError(f"variation: expected a finite number, 0 or more. Received: {self.variation}.")
        if not 0.0 <= self.stalled < 1.0:
            raise ValueError("stalled: expected 0 or more and below 1; a rank that is always stopped is out. "
                             f"Received: {self.stalled}.")
        if not (math.isfinite(self.stall_s) and self.stall_s >= 0.0) or (self.stalled > 0.0 and self.stall_s == 0.0):
            raise ValueError("stall_s: expected a finite mean length of a stop, above 0 where the rank is stopped at "
                             f"times. Received: {self.stall_s} with stalled {self.stalled}.")

    @property
    def stops_per_s(self) -> float:
        """The mean number of stops in a second of running: r in the formulas above."""
        return self.stalled / ((1.0 - self.stalled) * self.stall_s) if self.stalled else 0.0

    def alone_s(self, time_s: float) -> float:
        """The mean seconds, stops included, of work that takes `time_s` without stops, if the rank waits for nobody."""
        return time_s / (1.0 - self.stalled)


class StopSums(NamedTuple):
    """Sums of a rank's compute and stops over some period. Ranks measure them and send them to each other."""

    running_s: float = 0.0      # seconds in which the rank computed, without stops
    stopped_s: float = 0.0      # seconds in which it was stopped
    stops: float = 0.0          # number of stops


def estimate(sums: StopSums, *, variation: float = 0.0, least_stops: float = 0.0) -> Jitter:
    """Estimates the jitter of a rank from its measured stops.

    Args:
        sums: over the rank's past.
        variation: the noise of its steps, which is passed on.
        least_stops: fewer stops than this count as none, since a few say too little.
    """
    if sums.stops <= 0.0 or sums.stops < least_stops or sums.running_s <= 0.0:
        return Jitter(variation=variation)
    return Jitter(variation=variation, stalled=sums.stopped_s / (sums.running_s + sums.stopped_s),
                  stall_s=sums.stopped_s / sums.stops)


def include_stops(model: SpeedModel, sums: StopSums, *, least_stops: float = 0.0) -> SpeedModel:
    """The speed model of a rank with its stops included in its times, as is right for local steps.

    The time of n stops has a relative error of at least 1 / sqrt(n), that of their number (Poisson). The relative error
    of 1 / (1 - f), the factor on the rank's times, is f times that, and is combined with `standard_error`.

    Args:
        model: the speed without stops.
        sums: over the rank's past.
        least_stops: fewer stops than this count as none.
    """
    stalled = estimate(sums, least_stops=least_stops).stalled
    if not stalled:
        return model
    error = math.hypot(model.standard_error, stalled / math.sqrt(sums.stops))
    return replace(model.times(1.0 / (1.0 - stalled)), standard_error=error)


def synchronous_step_s(times_s: Sequence[float], jitters: Sequence[Jitter], *, exchange_s: float = 0.0) -> float:
    """The mean seconds of a synchronous step, in which every rank waits for all others.

    Args:
        times_s: mean compute time of each rank without stops; 0 for a rank without samples.
        jitters: by rank.
        exchange_s: seconds of the exchange that follows when the last rank has computed (the part that the backward
            pass does not hide) while all ranks run.
    """
    if not times_s or len(times_s) != len(jitters) or not all(math.isfinite(t) and t >= 0.0 for t in times_s):
        raise ValueError("times_s and jitters: expected one of each for every rank, seconds finite and 0 or more. "
                         f"Received: {list(times_s)} and {len(jitters)} jitters.")
    if not (math.isfinite(exchange_s) and exchange_s >= 0.0):
        raise ValueError(f"exchange_s: expected a finite number, 0 or more. Received: {exchange_s}.")
    running = max(math.prod(1.0 - j.stalled for j in jitters), TINY)
    if max(times_s) == 0.0:
        return exchange_s / running
    alike = Counter(zip(times_s, jitters, strict=True))      # many ranks are alike: once each
    counts = list(alike.values())
    grid, finished = _finished_by([rank if rank[0] * rank[1].stops_per_s <= MANY_STOPS else _smoothed(*rank)
                                   for rank in alike])
    done = np.prod([by ** n for by, n in zip(finished, counts, strict=True)], axis=0)
    stopped_s = _until_all_run_s([j for _, j in alike], counts, grid, finished, done)
    return _area(grid, 1.0 - done) + stopped_s + exchange_s / running


def _until_all_run_s(jitters: Sequence[Jitter], counts: Sequence[int], grid: np.ndarray, finished: Sequence[np.ndarray],
                     done: np.ndarray) -> float:
    """The mean seconds from the moment when the last rank finishes computing until all ranks run at once.

    Args:
        jitters: of each kind of rank.
        counts: how many ranks there are of each kind.
        grid: times in seconds.
        finished: for each kind, the probability that such a rank has finished by each time.
        done: the probability that all ranks have finished by each time.
    """
    stopping = [j.stops_per_s + 1.0 / j.stall_s for j in jitters if j.stalled]
    if not stopping:
        return 0.0
    at = np.searchsorted(done, (np.arange(LEVELS) + 0.5) / LEVELS)      # equally probable times of the last to finish
    since = _widening(LONGEST_STOP / min(stopping), 1.0 / max(stopping))
    after_all, after_waits = np.ones_like(since), np.ones((LEVELS, len(since)))
    of_last, lasts = np.zeros((LEVELS, len(since))), np.zeros((LEVELS, 1))
    for j, n, by in zip(jitters, counts, finished, strict=True):
        areas = np.concatenate([[0.0], np.cumsum(0.5 * np.diff(grid) * (by[1:] + by[:-1]))])
        waits_s = (areas[at] / by[at])[:, None]           # mean of m - F_i where F_i <= m
        last = n * np.log(by[at] / np.maximum(by[at - 1], TINY))[:, None]
        rate = j.stops_per_s + 1.0 / j.stall_s if j.stalled else 0.0
        runs, waited = (1.0 - j.stalled + j.stalled * np.exp(-rate * (since + w)) for w in (0.0, waits_s))
        after_all, after_waits = after_all * runs**n, after_waits * waited**n
        of_last, lasts = of_last + last * runs / waited, lasts + last
    running = max(math.prod((1.0 - j.stalled) ** n for j, n in zip(jitters, counts, strict=True)), TINY)
    return _area(since, after_all - (after_waits * of_last / lasts).mean(axis=0)) / running


def _finished_by(ranks: Sequence[tuple[float, Jitter]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A grid of times from 0, and for each rank P(F <= x) on it, if all ranks start at 0 and are running then.

    Args:
        ranks: compute time without stops, and jitter, of each.
    """
    nodes = [t * _noise(j.variation) for t, j in ranks]
    last = max(float(n[-1]) for n in nodes)
    grid = np.linspace(0.0, last, POINTS)
    stops = [(t * j.stops_per_s, j.stall_s) for t, j in ranks if j.stalled and t]
    if stops:
        shortest, longest = min(s for _, s in stops), max(s for _, s in stops)
        beyond = _widening(longest * (LONGEST_STOP + 3.0 * max(count for count, _ in stops)), shortest)
        grid = np.concatenate([grid, last + beyond[1:]])
    return grid, [_finished(grid, n, t, j) for n, (t, j) in zip(nodes, ranks, strict=True)]


def _smoothed(time_s: float, j: Jitter) -> tuple[float, Jitter]:
    """A time and a jitter without stops, of the same mean and variance as the given ones with stops.

    A compound Poisson sum of exponential stops, n on average, has variance 2 n L^2.
    """
    mean_s = j.alone_s(time_s)
    variance = (j.variation * mean_s) ** 2 + 2.0 * time_s * j.stops_per_s * j.stall_s**2
    return mean_s, Jitter(variation=math.sqrt(variance) / mean_s)


def _noise(variation: float) -> np.ndarray:
    """Equally probable values of lognormal noise with mean 1, ascending."""
    sigma = math.sqrt(math.log1p(variation**2))
    normal = [NormalDist().inv_cdf((k + 0.5) / QUANTILES) for k in range(QUANTILES)]
    values = np.exp(sigma * np.array(normal))
    return values / values.mean()


def _widening(reach: float, scale: float) -> np.ndarray:
    """A grid from 0 to `reach` whose spacing is small against `scale` at its start, and widens."""
    return scale * np.expm1(np.linspace(0.0, math.log1p(reach / scale), POINTS))


def _area(grid: np.ndarray, height: np.ndarray) -> float:
    return float(0.5 * np.sum(np.diff(grid) * (height[1:] + height[:-1])))


def _finished(grid: np.ndarray, nodes: np.ndarray, time_s: float, j: Jitter) -> np.ndarray:
    """P(F <= x) of one rank for each time x of the grid.

    Args:
        nodes: equally probable compute times of the rank without stops, ascending.
        time_s: their mean.
    """
    if not j.stalled:
        return np.asarray(np.searchsorted(nodes, grid, side="right") / len(nodes))
    mean_stops = time_s * j.stops_per_s
    late = _widening(LONGEST_STOP + 3.0 * mean_stops, 1.0)       # unit: the mean length of a stop
    by_then = _total_stop(late, mean_stops)
    return np.asarray(np.interp(grid[:, None] - nodes, j.stall_s * late, by_then, left=0.0).mean(axis=1))


def _total_stop(late: np.ndarray, mean_stops: float) -> np.ndarray:
    """P(the sum of all stops <= x) for each x of `late`, in units of the mean stop.

    The number of stops is Poisson with mean `mean_stops`, and each is exponential with mean 1: k of them sum to an
    Erlang variable.
    """
    chance = math.exp(-mean_stops)
    term, below, total = np.exp(-late), np.zeros_like(late), np.full_like(late, chance)
    for k in range(1, math.ceil(mean_stops + 10.0 * math.sqrt(mean_stops)) + 20):
        below, term, chance = below + term, term * late / k, chance * mean_stops / k
        total += chance * (1.0 - below)
    return total
