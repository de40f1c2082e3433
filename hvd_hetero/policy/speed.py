"""Speed models: the seconds that one rank takes to compute on b samples, fitted to observed steps.

    t(b) = passes * overhead + b * seconds per sample        (t(0) = 0: a rank without samples computes nothing)

with one forward and backward pass, or with ceil(b / c) passes if a pass holds at most c samples. An observation of
several passes counts as that many passes over equal parts of its samples.

Time in which a rank waits for others does not count. In synchronous training every *step* takes equally long on all
ranks, so waiting would hide their speeds. If samples are loaded while the rank computes, b samples take as long as
loading or computing them, whichever is longer: see `loader_speed`.

- Outliers are dropped: observations far from the median time of their size or, if most sizes occur once, far from the
  line of Theil (1950) and Sen (1968), "Estimates of the regression coefficient based on Kendall's tau". The rest is
  fitted by least squares with noise proportional to the time. That has nearly all the precision of a mean, and no spike
  counts.
- The overhead is a posterior mean under a normal prior, weighted by its uncertainty. So two sizes close together do not
  invent an overhead, and two sizes far apart are believed.

When a speed has changed, `regime` says since when.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

SHORTEST_S = 1e-9            # no step is shorter, whatever a coarse clock said
LARGEST_OVERHEAD = 0.98      # of the time at the sizes seen: samples cost something even where none was noticed
OVERHEAD_SPREAD = 0.15       # standard deviation of the overhead from its prior, as a fraction of the step
WORTH_HEARING = 2.0          # a fitted overhead whose error is so many times that of the prior is ignored
USUAL_NOISE = 0.05           # relative noise assumed before anything was seen; weighs as much as one observation
OUTLIER = 0.2                # relative distance from the median of its size below which nothing is an outlier
MOST_OUTLIERS = 0.25         # fraction of all; with more, a rank alternates between two speeds: none is an outlier
DRIFT = 0.025                # relative error of one size's time that no number of observations reduces
ENOUGH_OF_A_SIZE = 3         # a median of fewer does not withstand one spike
LEAST_NOISE = 0.02           # relative noise between neighbouring steps, at the least


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One step of one rank, as measured.

    Attributes:
        samples: the samples that the rank processed.
        compute_s: seconds in which it computed and loaded data itself, without waiting for other ranks.
        passes: how many forward and backward passes that took.
    """

    samples: int
    compute_s: float
    passes: int = 1

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
    """Predicts how long a rank takes for a number of samples, and says how uncertain the prediction is.

    Attributes:
        overhead_s: seconds of one pass that do not depend on its samples.
        seconds_per_sample: seconds that each sample adds by computing.
        standard_error: of the predicted time at the observed sizes, relative to that time.
        observations: the number of observations that the model was fitted to.
        overhead_error: standard error of `overhead_s`, relative to the predicted time at the observed sizes.
        loading_s: seconds per sample of loaders that work while the rank computes (see `loader_speed`): b samples take
            at least b * `loading_s`. 0: loading does not limit the rank.
        measured: the fewest and the most samples of a step that occur at least `ENOUGH_OF_A_SIZE` times among the
            observations; (inf, 0): none does.
        halves: what the model's times are to be multiplied with for those of the older half of the observations, and of
            the newer; unlike each other where the rank's speed drifts. None: not known.
    """

    overhead_s: float
    seconds_per_sample: float
    standard_error: float = 0.0
    observations: int = 0
    overhead_error: float = OVERHEAD_SPREAD
    loading_s: float = 0.0
    measured: tuple[float, float] = (math.inf, 0)
    halves: tuple[float, float] | None = None

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
        """The predicted seconds of `samples` samples, in passes of at most `micro_batch`; 0.0 for no samples.

        It is the time of computing or of loading, whichever is longer.
        """
        if samples <= 0:
            return 0.0
        return max(self.compute_s(samples, micro_batch), samples * self.loading_s)

    def compute_s(self, samples: int, micro_batch: int | None = None) -> float:
        """The predicted seconds of computing `samples` samples, 1 or more, without regard to loading."""
        return passes_of(samples, micro_batch) * self.overhead_s + samples * self.seconds_per_sample

    def times(self, factor: float) -> SpeedModel:
        """The model of a rank that takes `factor` times as long to compute."""
        return replace(self, overhead_s=factor * self.overhead_s, seconds_per_sample=factor * self.seconds_per_sample)

    def ratio(self, seen: Observation) -> float:
        """The observed seconds of a pass over the predicted ones."""
        return seen.pass_s / (self.overhead_s + seen.size * self.seconds_per_sample)


def passes_of(samples: int, micro_batch: int | None) -> int:
    """The number of passes for `samples` samples, of at most `micro_batch` each; None: one pass."""
    return 1 if micro_batch is None else max(1, -(-samples // micro_batch))


@dataclass(frozen=True, kw_only=True)
class _Size:      # summary of all observations of one size
    samples: float      # of one pass
    count: int          # observations
    time_s: float       # typical seconds of a pass


def fit(observations: Sequence[Observation], *, prior: SpeedModel | None = None) -> SpeedModel:
    """Fits the speed model of one rank to its observations. Single spikes have no influence.

    Args:
        observations: of one speed, see `regime.since_last_speed_change`; those without samples are ignored.
        prior: supplies the overhead, as a fraction of the step, if the observations cannot tell overhead from slope
            (one size, or sizes close together). None: the overhead is then 0.

    Returns:
        The model, without `loading_s`; `prior` itself if no observation has samples.

    Raises:
        ValueError: neither an observation with samples nor a prior.
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
        # Sizes are observed at different times, between which the machine drifts: more observations do not reduce that.
        error = math.hypot(error, DRIFT / math.sqrt(2.0) * mean_b * math.sqrt(math.fsum(weights) / lever))
        if prior is None or error < WORTH_HEARING * known:
            belief = known**2 / (known**2 + error**2)
            overhead, known = overhead + belief * (mean_t - slope * mean_b - overhead), min(known, error)
    overhead = min(max(overhead, 0.0), LARGEST_OVERHEAD * mean_t)
    often = [b for b, count in Counter(o.samples for o in observations if o.samples > 0).items()
             if count >= ENOUGH_OF_A_SIZE]
    # The line goes through (mean_b, mean_t) whatever the overhead: repeated fits of the same observations do not drift.
    model = SpeedModel(overhead_s=overhead, standard_error=noise * math.sqrt((1.0 + belief) / kept),
                       seconds_per_sample=(mean_t - overhead) / mean_b,
                       observations=sum(len(seen) for seen in times.values()), overhead_error=known,
                       measured=(min(often, default=math.inf), max(often, default=0)))
    ratios = [model.ratio(o) for o in observations if o.samples > 0]
    half = len(ratios) // 2
    return replace(model, halves=(middle(sorted(ratios[:half])), middle(sorted(ratios[half:]))) if half else None)


def by_size(observations: Sequence[Observation]) -> dict[float, list[float]]:
    """Maps each observed size (samples of a pass) to the sorted seconds of its passes."""
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
    """For each size the number and the mean time of its observations that are no outliers; and the relative noise of
    one observation.

    Sizes that occur once or twice (such as a short last batch) are left out, unless they have most of the observations.
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
    """The seconds of a pass at each size on the Theil-Sen line: its slope is the weighted median of all slopes between
    two sizes."""
    sizes = [_Size(samples=b, count=len(seen), time_s=middle(seen)) for b, seen in sorted(times.items())]
    slopes = sorted(((q.time_s - p.time_s) / (q.samples - p.samples), p.count * q.count)
                    for i, p in enumerate(sizes) for q in sizes[i + 1:])
    reached = list(itertools.accumulate(weight for _, weight in slopes))
    slope = slopes[bisect_left(reached, 0.5 * reached[-1])][0] if slopes else sizes[0].time_s / sizes[0].samples
    overhead = middle(sorted(z.time_s - slope * z.samples for z in sizes))
    return {z.samples: max(overhead + slope * z.samples, SHORTEST_S) for z in sizes}
