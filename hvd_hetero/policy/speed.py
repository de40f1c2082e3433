"""Speed models: how long one rank computes on b samples, from what it was seen to take.

    t(b) = passes * overhead + b * seconds per sample        (t(0) = 0: a rank without samples computes nothing)

where one forward and backward pass takes b, or ceil(b / c) of them do, which hold c samples at most. What many passes
took is that many times what one took on an equal part of the samples, and is seen as that.

Waiting for others is left out. In synchronous training every *step* takes equally long: waiting hides speed. Where
samples are loaded beside computing, b of them take as long as the longer of the two: see `loading`.

- Observations are judged by the median of their size or, where sizes are mostly seen once, by the line of Theil (1950)
  and Sen (1968), "Estimates of the regression coefficient based on Kendall's tau"; outliers go, and least squares with
  noise proportional to the time takes the rest: nearly all the precision of a mean, and no spike counts.
- The overhead is drawn towards a prior by its own uncertainty (the posterior mean under a normal prior), so that two
  sizes close together do not invent an overhead, and two sizes far apart are believed.

When a speed has changed, `regime` says since when.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHORTEST_S = 1e-9            # no step is shorter, whatever a coarse clock said
LARGEST_OVERHEAD = 0.98      # of the time at the sizes seen: samples cost something even where none was noticed
OVERHEAD_SPREAD = 0.15       # how far, as a fraction of the step, overhead may be expected to lie from the prior
WORTH_HEARING = 2.0          # an overhead known so many times better than it now shows itself is left as it is
USUAL_NOISE = 0.05           # relative noise assumed before anything was seen; weighs as much as one observation
OUTLIER = 0.2                # relative: what is nearer than this to its size's median is none
MOST_OUTLIERS = 0.25         # of all: where more are off, a rank has two speeds in turn, and neither is an outlier
DRIFT = 0.025                # relative: what one size is measured too long or too short by, for good
ENOUGH_OF_A_SIZE = 3         # a median of fewer does not withstand one spike
LEAST_NOISE = 0.02           # relative noise between neighbouring steps, at the least


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One step of one rank: the share it processed and the seconds that it needed, also for loading; no waiting."""

    samples: int
    compute_s: float
    passes: int = 1                 # so many times forward and backward

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples: expected 0 or more, what the rank processed. Received: {self.samples}.")
        if not (math.isfinite(self.compute_s) and self.compute_s >= 0.0):
            raise ValueError("compute_s: expected a finite number of seconds, 0 or more: the difference of two "
                             f"readings of a monotonic clock. Received: {self.compute_s}.")
        if self.passes < 1:
            raise ValueError(f"passes: expected 1 or more. Received: {self.passes}.")

    @property
    def size(self) -> float:
        """The samples of one pass, on average."""
        return self.samples / self.passes

    @property
    def pass_s(self) -> float:
        """The seconds of one pass, on average."""
        return self.compute_s / self.passes


@dataclass(frozen=True, kw_only=True)
class SpeedModel:
    """How long one pass of a rank computes: overhead_s + b * seconds_per_sample, and how well that is known.

    `loading_s`: seconds that a sample takes to be loaded beside computing, which b samples take at least.
    """

    overhead_s: float
    seconds_per_sample: float
    standard_error: float = 0.0     # of the predicted time at the sizes seen, relative to it
    observations: int = 0           # how many it was fitted to
    overhead_error: float = OVERHEAD_SPREAD      # standard error of overhead_s, relative to the time at the sizes seen
    loading_s: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.overhead_s) and self.overhead_s >= 0.0):
            raise ValueError(f"overhead_s: expected a finite number, 0 or more. Received: {self.overhead_s}.")
        if not (math.isfinite(self.seconds_per_sample) and self.seconds_per_sample > 0.0):
            raise ValueError("seconds_per_sample: expected a finite number above 0; leave a rank that cannot compute "
                             f"out with Bound(upper=0). Received: {self.seconds_per_sample}.")
        if not (self.standard_error >= 0.0 and self.overhead_error >= 0.0 and self.observations >= 0):
            raise ValueError("standard_error, overhead_error and observations: expected 0 or more. Received: "
                             f"{self.standard_error}, {self.overhead_error} and {self.observations}.")
        if not (math.isfinite(self.loading_s) and self.loading_s >= 0.0):
            raise ValueError(f"loading_s: expected a finite number, 0 or more. Received: {self.loading_s}.")

    def time_s(self, samples: int, micro_batch: int | None = None) -> float:
        """The predicted seconds that `samples` take, computed at most `micro_batch` at once; 0.0 for no samples."""
        if samples <= 0:
            return 0.0
        return max(self.compute_s(samples, micro_batch), samples * self.loading_s)

    def compute_s(self, samples: int, micro_batch: int | None = None) -> float:
        """The seconds that computing 1 sample or more takes, without loading them."""
        return passes_of(samples, micro_batch) * self.overhead_s + samples * self.seconds_per_sample

    def ratio(self, seen: Observation) -> float:
        """How many times as long as predicted something was computed."""
        return seen.pass_s / (self.overhead_s + seen.size * self.seconds_per_sample)


def passes_of(samples: int, micro_batch: int | None) -> int:
    """How many passes `samples` take, of `micro_batch` at most each."""
    return 1 if micro_batch is None else max(1, -(-samples // micro_batch))


@dataclass(frozen=True, kw_only=True)
class _Size:      # all observations of one size
    samples: float
    count: int
    time_s: float


def fit(observations: Sequence[Observation], *, prior: SpeedModel | None = None) -> SpeedModel:
    """The speed model of one rank, unmoved by single spikes.

    `prior` lends its overhead, as a fraction of the step, where the observations cannot tell overhead from slope (one
    size, or sizes close together). Without one the overhead is taken as 0. Without observations the prior comes back.
    """
    times = by_size(observations)
    if not times:
        if prior is not None:
            return prior
        raise ValueError("observations: expected at least one with samples, or a prior; measure a step first. "
                         f"Received: {len(observations)}, none with samples.")
    sizes, noise = _typical_times(times)
    kept = sum(z.count for z in sizes)
    weights = [z.count / z.time_s**2 for z in sizes]
    mean_b = math.fsum(w * z.samples for w, z in zip(weights, sizes, strict=True)) / math.fsum(weights)
    mean_t = math.fsum(w * z.time_s for w, z in zip(weights, sizes, strict=True)) / math.fsum(weights)
    overhead, known, belief = 0.0, OVERHEAD_SPREAD, 0.0
    if prior is not None:
        overhead = mean_t * prior.overhead_s / (prior.overhead_s + mean_b * prior.seconds_per_sample)
        known = min(max(prior.overhead_error, LEAST_NOISE), OVERHEAD_SPREAD)
    if len(sizes) > 1:
        lever = math.fsum(w * (z.samples - mean_b) ** 2 for w, z in zip(weights, sizes, strict=True))
        slope = math.fsum(w * (z.samples - mean_b) * z.time_s for w, z in zip(weights, sizes, strict=True)) / lever
        error = noise * math.sqrt(1.0 / math.fsum(weights) + mean_b**2 / lever) / mean_t
        # Sizes are seen at different times, between which the machine drifts, however many observations there are.
        error = math.hypot(error, DRIFT / math.sqrt(2.0) * mean_b * math.sqrt(math.fsum(weights) / lever))
        if prior is None or error < WORTH_HEARING * known:
            belief = known**2 / (known**2 + error**2)
            overhead, known = overhead + belief * (mean_t - slope * mean_b - overhead), min(known, error)
    overhead = min(max(overhead, 0.0), LARGEST_OVERHEAD * mean_t)
    # Through the centre, whatever the overhead: fitting the same observations again and again then does not drift.
    return SpeedModel(overhead_s=overhead, standard_error=noise * math.sqrt((1.0 + belief) / kept),
                      seconds_per_sample=(mean_t - overhead) / mean_b,
                      observations=sum(len(seen) for seen in times.values()), overhead_error=known)


def by_size(observations: Sequence[Observation]) -> dict[float, list[float]]:
    """The times of a pass seen at each size, sorted."""
    times: dict[float, list[float]] = {}
    for o in observations:
        if o.samples > 0:
            times.setdefault(o.size, []).append(max(o.pass_s, SHORTEST_S))
    for seen in times.values():
        seen.sort()
    return times


def middle(ordered: Sequence[float]) -> float:
    """The median of a sorted, non-empty sequence."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def _typical_times(times: Mapping[float, Sequence[float]]) -> tuple[list[_Size], float]:
    """Per size how many observations are no outliers and their mean time; and the relative noise of one observation.

    Sizes seen once or twice (a short last batch) are left out where the others, being the most, can do without them.
    """
    often = {b: seen for b, seen in times.items() if len(seen) >= ENOUGH_OF_A_SIZE}
    if 2 * sum(map(len, often.values())) >= sum(map(len, times.values())):
        times = often
    expected = {b: middle(seen) for b, seen in times.items()}
    expected = _theil_sen(times) if len(times) > len(often) else expected
    off = {b: [(t, abs(t / expected[b] - 1.0)) for t in seen] for b, seen in times.items()}
    cut = max(OUTLIER, 3.0 * 1.4826 * middle(sorted(d for pairs in off.values() for _, d in pairs)))
    near = {b: [(t, d) for t, d in pairs if d <= cut] for b, pairs in sorted(off.items())}
    if sum(map(len, near.values())) < (1.0 - MOST_OUTLIERS) * sum(map(len, off.values())):
        near = dict(sorted(off.items()))
    sizes = [_Size(samples=b, count=len(pairs), time_s=math.fsum(t for t, _ in pairs) / len(pairs))
             for b, pairs in near.items() if pairs]
    squares = [d**2 for pairs in near.values() for _, d in pairs]
    freedom = max(len(squares) - min(2, len(sizes)), 0)
    return sizes, math.sqrt((math.fsum(squares) + USUAL_NOISE**2) / (freedom + 1))


def _theil_sen(times: Mapping[float, Sequence[float]]) -> dict[float, float]:
    """The time at each size on the line whose slope is the weighted median of all slopes between two sizes."""
    sizes = [_Size(samples=b, count=len(seen), time_s=middle(seen)) for b, seen in sorted(times.items())]
    slopes = sorted(((q.time_s - p.time_s) / (q.samples - p.samples), p.count * q.count)
                    for i, p in enumerate(sizes) for q in sizes[i + 1:])
    reached = list(itertools.accumulate(weight for _, weight in slopes))
    slope = slopes[bisect_left(reached, 0.5 * reached[-1])][0] if slopes else sizes[0].time_s / sizes[0].samples
    overhead = middle(sorted(z.time_s - slope * z.samples for z in sizes))
    return {z.samples: max(overhead + slope * z.samples, SHORTEST_S) for z in sizes}
