"""The consensus guard of local SGD: rounds become shorter where ranks drift apart, and longer again where they do not.

With u_i the progress of rank i in a round (delta over norm, see `staleness`) and means weighted by w:

    drift ratio = sqrt(mean ||u_i - mean u||^2) / ||mean u||

A limit on the ratio as such would be wrong. Pure noise of variance v_i gives, however short the round,

    noise ratio = sqrt(mean v / sum p_i^2 v_i - 1)          p = w / sum w;  sqrt(N - 1) for N equal ranks

and a common direction only makes it smaller. A ratio *above* the noise ratio needs deviations that cancel in the mean:
ranks that pull to different places. Noise grows with the root of the steps and such pulls with the steps, so the ratio
over the noise ratio, squared, is about 1 + steps * pull^2 / noise^2. The guard therefore bounds that quotient: rounds
are as long as drift hides in noise. Noise alone shortens none, and without noise different pulls end at single steps,
where the mean is exact.

Where few directions hold all the noise, a single mean may be short by luck and its quotient large. So 1 / quotient^2 is
averaged, in which such luck is a number near 0 among others and not a huge one: the squared means of several merges
pooled. Only after some merges of one length is anything decided.

Halving, and one step more after calm merges, as flodl's El Che does it. Between the two limits lies a factor of
(limit^2 - 1) / (calm^2 - 1), 2.8 as given: halving lands between them, and nothing swings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

HARMLESS = 0.5      # a noise ratio counts as no less: ranks that all go nearly the same way do not have to stop for it
CALMEST = 2.0       # 1 / quotient^2 counts as no more: one calm merge must not make up for many bad ones
MEMORY = 8          # merges that the mean reaches back to


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How many steps the fastest rank's rounds have, and what was seen of merges since that last changed."""

    round_steps: int            # the longest round
    length: int | None = None   # the present one; None: the longest
    limit: float = 1.5          # of drift ratio over noise ratio: above it the length is halved
    calm: float = 1.2           # below it a step is added
    settle_merges: int = 5      # after a change, so many are seen before the next
    merges: int = 0
    inverse_square: float = 0.0     # the mean of 1 / quotient^2 over those merges

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
        """The length of the next round: what `staleness.round_lengths` takes as round_steps."""
        return self.round_steps if self.length is None else self.length

    def after(self, drift: float, noise: float) -> Guard:
        """The guard after one more merge, from its `drift_ratio` and its `noise_ratio`.

        Ranks pass the same numbers, sums of the merge and not what each has on its own. Where unlike devices round them
        otherwise, rounds may be of unlike length for a while, which does no harm: a rank asks for its own alone.
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
    """The drift ratio of a merge, from sums over ranks: no second exchange is needed.

    Args:
        spread_sum: sum of all `Contribution.spread`.
        weight_sum: sum of all weights, the first of the two numbers summed beside the deltas.
        mean_square: squared norm of mean u, that is of the sum of the deltas over `weight_sum`.
    """
    if not (math.isfinite(spread_sum + mean_square) and spread_sum >= 0.0 and mean_square >= 0.0):
        raise ValueError("spread_sum and mean_square: expected finite numbers, 0 or more. "
                         f"Received: {spread_sum} and {mean_square}.")
    if not (math.isfinite(weight_sum) and weight_sum > 0.0):
        raise ValueError("weight_sum: expected a finite number above 0; nobody contributed to this merge. "
                         f"Received: {weight_sum}.")
    apart = max(spread_sum / weight_sum - mean_square, 0.0)      # below 0 only by rounding
    if mean_square == 0.0:
        return math.inf if apart > 0.0 else 0.0
    return math.sqrt(apart / mean_square)


def noise_ratio(weights: Sequence[float], variances: Sequence[float] | None = None) -> float:
    """The drift ratio that noise alone makes of these weights; 0.0 for a single rank.

    Args:
        variances: of each u_i, up to a common factor: 1 / its samples. None: all alike.
    """
    noise = [1.0] * len(weights) if variances is None else list(variances)
    if len(noise) != len(weights):
        raise ValueError(f"variances: expected one for each of {len(weights)} weights. Received: {len(noise)}.")
    if not all(math.isfinite(x) and x >= 0.0 for x in (*weights, *noise)):
        raise ValueError("weights and variances: expected finite numbers, 0 or more. "
                         f"Received: {list(weights)} and {noise}.")
    of_mean = math.fsum(w * w * v for w, v in zip(weights, noise, strict=True))
    if of_mean == 0.0:
        raise ValueError("weights and variances: expected a rank with both above 0. "
                         f"Received: {list(weights)} and {noise}.")
    mean = math.fsum(weights) * math.fsum(w * v for w, v in zip(weights, noise, strict=True))
    return math.sqrt(max(mean / of_mean - 1.0, 0.0))
