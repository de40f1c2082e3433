"""How long the rounds of each rank are, so that boundaries fall together and ranks do not drift apart; and which merges
a rank takes part in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_hetero.policy.guard import Guard, drift_ratio, noise_ratio
from hvd_hetero.policy.ladder import merge_intervals
from hvd_hetero.policy.staleness import round_lengths

from .local_sgd import LocalSGD

ALIKE = 1.1  # ranks whose steps differ by less have rounds of one length: measurements are no better


class RoundLengths:
    """Local steps of each rank between two merges, the same on all ranks, from what merges bring.

    Args:
        most_missed: merges in a row that a rank may miss.

    Attributes:
        by_rank: for the next round.
        intervals: each rank takes part in every so-many-th merge.
    """

    def __init__(self, rule: LocalSGD, size: int, *, most_missed: int = 0) -> None:
        self._limited = rule.drift_limit is not None
        self._guard = Guard(round_steps=rule.round_steps, limit=rule.drift_limit or math.inf)
        self._most = most_missed + 1
        self._idle = [False] * size  # ranks whose last steps were without samples: no measure of anybody's
        self._step_s: np.ndarray = np.zeros(size)  # of each rank's local step, smoothed over merges
        self.by_rank = (rule.round_steps,) * size
        self.intervals = (1,) * size

    @property
    def longest(self) -> int:
        """The round length of the fastest rank, in local steps."""
        return self._guard.steps

    def watch(
        self, sums: Sequence[float], square: float, steps: Sequence[float], samples: Sequence[float]
    ) -> tuple[float, float]:
        """Drift ratio and noise ratio of a merge, see `policy.guard`; rounds are shortened where there is a limit.

        Args:
            sums: over ranks, of weights, of reaches, and of `Contribution.spread`.
            square: squared norm of what was merged.
            steps, samples: of each rank in this merge.
        """
        self._idle = [n == 0 if k > 0 else idle for idle, k, n in zip(self._idle, steps, samples, strict=True)]
        weight, reach, spread = sums
        if weight <= 0 or reach <= 0 or not math.isfinite(spread + square):
            return 0.0, 0.0
        drift = drift_ratio(spread, weight, square / reach**2)
        whole = all(k > 0 or idle for idle, k in zip(self._idle, steps, strict=True))  # nobody missed it
        some = [n for n in samples if n > 0]
        noise = noise_ratio(some, [1 / n for n in some]) if some else 0.0
        if self._limited and whole:
            self._guard = self._guard.after(drift, noise)
        return drift, noise

    def hear(self, compute_s: Sequence[float]) -> None:
        """Takes in the seconds of each rank's local step; 0 where there is nothing to say."""
        heard = np.asarray(compute_s)
        self._step_s = np.where(self._step_s == 0, heard, np.where(heard > 0, (self._step_s + heard) / 2, self._step_s))
        working = [rank for rank, idle in enumerate(self._idle) if not idle]
        step_s = self._step_s[working]
        if not len(working) or not (step_s > 0).all():
            self._start_over()
            return
        fastest = step_s.min()
        even = np.where(step_s < ALIKE * fastest, fastest, step_s).tolist()
        lengths = round_lengths(even, self.longest)
        current = [self.intervals[rank] for rank in working]
        intervals = merge_intervals(even, lengths, current=current, most=self._most)
        self._start_over()
        self.by_rank = _replaced(self.by_rank, working, lengths)
        self.intervals = _replaced(self.intervals, working, intervals)

    def _start_over(self) -> None:
        self.by_rank, self.intervals = (self.longest,) * len(self.by_rank), (1,) * len(self.by_rank)

    @property
    def reason(self) -> str:
        """Why intervals are as they are."""
        steps = ", ".join(f"{seconds:.3g}" for seconds in self._step_s.tolist())
        every = ", ".join(map(str, self.intervals))
        return f"a local step takes {steps} s, by rank: each takes part in one merge of {every}"

    def resume(self, longest: int) -> None:
        """Goes on with rounds of this length, and with nothing of the merges before."""
        most, limit = self._guard.round_steps, self._guard.limit
        self._guard = Guard(round_steps=most, limit=limit, length=min(longest, most))
        self._idle, self._step_s = [False] * len(self._idle), np.zeros(len(self._idle))
        self._start_over()


def _replaced(all_ranks: Sequence[int], some: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """The first, with `values` at the places `some`."""
    found = dict(zip(some, values, strict=True))
    return tuple(found.get(rank, value) for rank, value in enumerate(all_ranks))
