"""How long the rounds of each rank are: so that boundaries fall together, and ranks do not drift apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvd_hetero.policy.guard import Guard, drift_ratio, noise_ratio
from hvd_hetero.policy.staleness import round_lengths

from .local_sgd import LocalSGD

ALIKE = 1.1  # ranks whose steps differ by less have rounds of one length: measurements are no better


class RoundLengths:
    """Local steps of each rank between two merges, the same on all ranks, from what merges bring.

    Attributes:
        by_rank: for the next round.
    """

    def __init__(self, rule: LocalSGD, size: int) -> None:
        self._limited = rule.drift_limit is not None
        self._guard = Guard(round_steps=rule.round_steps, limit=rule.drift_limit or math.inf)
        self._step_s: np.ndarray = np.zeros(size)  # of each rank's local step, smoothed over merges
        self.by_rank = (rule.round_steps,) * size

    @property
    def longest(self) -> int:
        """That of the fastest rank."""
        return self._guard.steps

    def watch(
        self, sums: Sequence[float], mean_square: float, steps: Sequence[float], samples: Sequence[float]
    ) -> tuple[float, float]:
        """Drift ratio and noise ratio of a merge, see `policy.guard`; rounds are shortened where there is a limit.

        Args:
            sums: over ranks, of weights, of weights times norms, and of `Contribution.spread`.
            mean_square: squared norm of what was merged.
            steps, samples: of each rank in this merge.
        """
        weight, normal, spread = sums
        if weight <= 0 or not math.isfinite(spread + mean_square):
            return 0.0, 0.0
        norm = normal / weight  # the merged delta is so many times the mean of deltas over their norms
        drift = drift_ratio(spread, weight, mean_square / norm**2)
        some = [(n, k) for n, k in zip(samples, steps, strict=True) if n > 0 and k > 0]
        noise = noise_ratio([n for n, _ in some], [k * k / n for n, k in some]) if some else 0.0
        if self._limited:
            self._guard = self._guard.after(drift, noise)
        return drift, noise

    def hear(self, compute_s: Sequence[float]) -> None:
        """Takes in the seconds of each rank's local step; 0 where there is nothing to say."""
        heard = np.asarray(compute_s)
        self._step_s = np.where(self._step_s == 0, heard, np.where(heard > 0, (self._step_s + heard) / 2, self._step_s))
        if (self._step_s > 0).all():
            fastest = self._step_s.min()
            even = np.where(self._step_s < ALIKE * fastest, fastest, self._step_s)
            self.by_rank = round_lengths(even.tolist(), self.longest)
        else:
            self.by_rank = (self.longest,) * len(self.by_rank)

    def resume(self, longest: int) -> None:
        """Goes on with rounds of this length."""
        self._guard = replace(self._guard, length=min(longest, self._guard.round_steps))
        self.by_rank = (self.longest,) * len(self.by_rank)
