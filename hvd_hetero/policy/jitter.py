"""Jitter: how long a step takes on ranks that are not steady, when all wait for all.

A rank's step takes t (1 + noise), and now and then the rank is stopped: not by its own work, but by the clock on the
wall (another process has its cores), while it waits for the others just as well. With f the part of time stopped and L
the mean stop, a running rank stops r = f / ((1 - f) L) times a second:

    alone       t / (1 - f) seconds for each step
    together    E max_i F_i + what is still stopped then + exchange / prod_i (1 - f_i)

F_i, when rank i has finished, is t_i with lognormal noise and a Poisson number (mean r_i t_i) of exponential stops. The
ranks are independent, so P(max <= x) is the product of theirs and E max = integral of 1 - prod_i P(F_i <= x), done on a
grid. The exchange then needs all of them running, and goes on only while they are. A rank that ran a time u ago runs
with probability p(u) = 1 - f + f exp(-(r + 1 / L) u), the two-state Markov chain. From a renewal equation in that (all
running at u: first so at some time before, and again at u) the mean wait until all run, rank i having waited W_i, is

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

QUANTILES = 100         # parts of equal probability that the noise of a step is cut into
POINTS = 800            # of each part of the grid
MANY_STOPS = 30.0       # in one step: from here on they are a lower speed with more noise
LEVELS = 16             # times of the last to finish that are looked at
TINY = 1e-300           # for a logarithm, and a quotient
LONGEST_STOP = 40.0     # mean stops: what is longer has probability e^-40


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """How unsteady one rank is: its steps' noise, and its stops."""

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
        """How often the rank stops in a second of running."""
        return self.stalled / ((1.0 - self.stalled) * self.stall_s) if self.stalled else 0.0

    def alone_s(self, time_s: float) -> float:
        """The mean seconds that work of `time_s` takes this rank, when it waits for nobody."""
        return time_s / (1.0 - self.stalled)


class Ran(NamedTuple):
    """How long a rank computed, for how long it was stopped meanwhile, and how often; sums over some time."""

    running_s: float = 0.0
    stopped_s: float = 0.0
    stops: float = 0.0


def estimate(ran: Ran, *, variation: float = 0.0, least_stops: float = 0.0) -> Jitter:
    """What a rank's past says of it. Fewer stops than `least_stops` are taken for none: one says nothing yet."""
    if ran.stops <= 0.0 or ran.stops < least_stops or ran.running_s <= 0.0:
        return Jitter(variation=variation)
    return Jitter(variation=variation, stalled=ran.stopped_s / (ran.running_s + ran.stopped_s),
                  stall_s=ran.stopped_s / ran.stops)


def with_stops(model: SpeedModel, ran: Ran, *, least_stops: float = 0.0) -> SpeedModel:
    """The speed of a rank whose stops are a part of its time, as they are when nobody waits for it.

    What n stops take has a relative error of 1 / sqrt(n) at least, that of their number (Poisson); 1 / (1 - f) has f
    times that.
    """
    stalled = estimate(ran, least_stops=least_stops).stalled
    if not stalled:
        return model
    stretched = 1.0 / (1.0 - stalled)
    return replace(
        model, overhead_s=model.overhead_s * stretched, seconds_per_sample=model.seconds_per_sample * stretched,
        standard_error=math.hypot(model.standard_error, stalled / math.sqrt(ran.stops)),
    )


def synchronous_step_s(times_s: Sequence[float], jitters: Sequence[Jitter], *, exchange_s: float = 0.0) -> float:
    """The mean seconds of a step in which all ranks wait for all.

    Args:
        times_s: mean compute time of each rank's part, noise and stops left out; 0 for a rank without samples.
        exchange_s: what follows when the last is done and takes all of them: the exchange that backward does not hide.
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
    """The mean seconds from when the last has finished until all run at once, see above."""
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
    """A grid of times from 0, and for each rank P(F <= x) on it, where all start together and running."""
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
    """The same mean and variance without stops: a compound Poisson sum of n exponential stops has variance 2 n L^2."""
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
    """A grid from 0 to `reach`, fine against `scale` at its start."""
    return scale * np.expm1(np.linspace(0.0, math.log1p(reach / scale), POINTS))


def _area(grid: np.ndarray, height: np.ndarray) -> float:
    return float(0.5 * np.sum(np.diff(grid) * (height[1:] + height[:-1])))


def _finished(grid: np.ndarray, nodes: np.ndarray, time_s: float, j: Jitter) -> np.ndarray:
    """P(F <= x) for each x of the grid."""
    if not j.stalled:
        return np.asarray(np.searchsorted(nodes, grid, side="right") / len(nodes))
    mean_stops = time_s * j.stops_per_s
    late = _widening(LONGEST_STOP + 3.0 * mean_stops, 1.0)       # in mean stops
    by_then = _total_stop(late, mean_stops)
    return np.asarray(np.interp(grid[:, None] - nodes, j.stall_s * late, by_then, left=0.0).mean(axis=1))


def _total_stop(late: np.ndarray, mean_stops: float) -> np.ndarray:
    """P(all stops together <= late): Poisson many, each exponential with mean 1; k of them are an Erlang variable."""
    chance = math.exp(-mean_stops)
    term, below, total = np.exp(-late), np.zeros_like(late), np.full_like(late, chance)
    for k in range(1, math.ceil(mean_stops + 10.0 * math.sqrt(mean_stops)) + 20):
        below, term, chance = below + term, term * late / k, chance * mean_stops / k
        total += chance * (1.0 - below)
    return total
