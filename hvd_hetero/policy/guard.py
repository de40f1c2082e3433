"""The consensus guard of local SGD: it shortens rounds when the ranks' models drift apart, and lengthens them again.

With u_i the progress of rank i in a round (its delta over its norm, see `local_round`) and means weighted by w:

    drift ratio = sqrt(mean ||u_i - mean u||^2) / ||mean u||

A fixed limit on this ratio would be wrong. Gradient noise of variance v_i alone gives, however short the round,

    noise ratio = sqrt(mean v / sum p_i^2 v_i - 1) = sqrt(N - 1)          p = w / sum w;  N ranks with samples

as the weights are the samples, to which the variances are inverse, or are equal (FedNova),
and a direction that all ranks have in common makes the drift ratio smaller. A drift ratio *above* the noise ratio needs
deviations that cancel in the mean: ranks that pull the model to different places. Noise grows with the root of the
number of steps and such pulls grow with the number of steps, so the square of drift ratio over noise ratio is about
1 + steps * pull^2 / noise^2. The guard therefore bounds the quotient of the two ratios: rounds are as long as noise
hides the drift. Noise alone shortens no round. Without noise, different pulls lead to rounds of a single step, in which
the mean is exact.

If few directions hold all the noise, a single mean u may by chance be short and its quotient large. So the guard
averages 1 / quotient^2 over several merges: there, such a merge is one number near 0 among others. Nothing is decided
before several merges of one round length were seen.

Rounds are halved above the limit, and get one step more after calm merges, as in flodl's El Che. Between the two limits
lies a factor of (limit^2 - 1) / (calm^2 - 1) in steps, 2.8 with the defaults: halving ends between them, so the length
does not oscillate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HARMLESS = 0.5      # a noise ratio counts as no less: drift below this is harmless, as ranks go nearly the same way
CALMEST = 2.0       # 1 / quotient^2 counts as no more: one calm merge must not make up for many bad ones
MEMORY = 8          # merges over which 1 / quotient^2 is averaged


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The present round length of local SGD, and statistics of the merges since it last changed.

    Immutable: `after` returns the guard with one more merge. Raises ValueError for numbers that do not fit together.
    """

    round_steps: int            # the longest round, in local steps of the fastest rank
    length: int | None = None   # the present round, in the same steps; None: the longest
    limit: float = 1.5          # above this drift ratio over noise ratio, the length is halved
    calm: float = 1.2           # below this drift ratio over noise ratio, the length grows by a step
    settle_merges: int = 5      # merges of one length that are needed before it changes
    merges: int = 0             # merges since the length last changed
    inverse_square: float = 0.0     # the mean of 1 / quotient^2 over these merges

    def __post_init__(self) -> None:
        if self.round_steps < 1 or not 1 <= self.steps <= self.round_steps:
            raise ValueError("round_steps and length: expected at least 1, and a length from 1 to round_steps. "
                             f"Received: {self.round_steps} and {self.length}.")
        if not 1.0 <= self.calm < self.limit:
            raise ValueError("calm and limit: expected 1 or more (noise alone comes to 1), and calm below limit. "
                             f"Received: {self.calm} and {self.limit}.")
        if self.settle_merges < 1 or self.merges < 0 or not 0.0 <= self.inverse_square <= CALMEST:
            raise ValueError("settle_merges, merges and inverse_square: expected at least 1, 0 or more and 0 to "
                             f"{CALMEST}. Received: {self.settle_merges}, {self.merges} and {self.inverse_square}.")

    @property
    def steps(self) -> int:
        """The next round's length in local steps of the fastest rank: `round_steps` of `local_round.round_lengths`."""
        return self.round_steps if self.length is None else self.length

    def after(self, drift: float, noise: float) -> Guard:
        """The guard after one more merge.

        Every rank passes the same numbers, which follow from sums over all ranks. If devices round these differently,
        round lengths may differ between ranks for a while. That does no harm, as each rank uses only its own length.

        Args:
            drift: `drift_ratio` of the merge.
            noise: `noise_ratio` of the merge.

        Raises:
            ValueError: a number that is negative or NaN, or noise that is not finite.
        """
        if math.isnan(drift) or not (drift >= 0.0 and math.isfinite(noise) and noise >= 0.0):
            raise ValueError("drift and noise: expected 0 or more, noise finite; leave a merge that is not finite out. "
                             f"Received: {drift} and {noise}.")
        least = max(noise, HARMLESS)
        seen = min((least / drift) ** 2, CALMEST) if drift > least / CALMEST else CALMEST
        merges = self.merges + 1
        mean = self.inverse_square + (seen - self.inverse_square) / min(merges, MEMORY)
        if merges >= self.settle_merges and mean < self.limit**-2:
            return replace(self, length=max(self.steps // 2, 1), merges=0, inverse_square=0.0)
        if merges >= self.settle_merges and mean > self.calm**-2:
            return replace(self, length=min(self.steps + 1, self.round_steps), merges=0, inverse_square=0.0)
        return replace(self, merges=merges, inverse_square=mean)


def drift_ratio(spread_sum: float, weight_sum: float, mean_square: float) -> float:
    """The drift ratio of a merge, from sums over ranks that travel with the merge: no second exchange is needed.

    Args:
        spread_sum: the sum of `Contribution.spread` over ranks.
        weight_sum: the sum of `Contribution.weight` over ranks, above 0.
        mean_square: the squared norm of the weighted mean of u, which is the sum of the scaled deltas over
            `weight_sum`.

    Returns:
        0.0 if all u are equal; infinity if the u differ but their mean is 0.
    """
    if not (math.isfinite(spread_sum + mean_square) and spread_sum >= 0.0 and mean_square >= 0.0):
        raise ValueError("spread_sum and mean_square: expected finite numbers, 0 or more. "
                         f"Received: {spread_sum} and {mean_square}.")
    if not (math.isfinite(weight_sum) and weight_sum > 0.0):
        raise ValueError("weight_sum: expected a finite number above 0; nobody contributed to this merge. "
                         f"Received: {weight_sum}.")
    variance = max(spread_sum / weight_sum - mean_square, 0.0)      # below 0 only by rounding
    if mean_square == 0.0:
        return math.inf if variance > 0.0 else 0.0
    return math.sqrt(variance / mean_square)


def noise_ratio(ranks: int) -> float:
    """The drift ratio that gradient noise alone would give, where so many ranks, 1 or more, contribute samples."""
    return math.sqrt(ranks - 1)
