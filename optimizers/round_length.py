"""Chooses how many local steps each rank makes per round of local SGD, and which merges a rank takes part in.

Slower ranks get shorter rounds, so that all ranks end theirs at about the same time. With a drift limit, all rounds
become shorter when ranks drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_hetero.policy.guard import Guard, drift_ratio, noise_ratio
from hvd_hetero.policy.ladder import merge_intervals
from hvd_hetero.policy.local_round import round_lengths

from .local_sgd import LocalSGD

ALIKE = 1.1  # a rank less than so many times slower than the fastest counts as equally fast: noise of measurement


class RoundLengths:
    """The round length and the merge interval of each rank.

    All ranks hold the same numbers, as they follow from the summed control vectors of merges alone.

    Args:
        rule: the numbers of the local strategy.
        size: number of ranks.
        most_missed: merges in a row that a rank may miss.

    Attributes:
        by_rank: local steps of each rank in the next round.
        intervals: for each rank k: it takes part in every k-th merge.
    """

    def __init__(self, rule: LocalSGD, size: int, *, most_missed: int = 0) -> None:
        self._guard = Guard(round_steps=rule.round_steps, limit=rule.drift_limit or math.inf)
        self._most = most_missed + 1
        self._idle = [False] * size  # by rank: whether its last steps had no sample, and so no valid time
        self._step_s: np.ndarray = np.zeros(size)  # by rank: seconds of a local step, smoothed; 0: not known
        self.by_rank = (rule.round_steps,) * size
        self.intervals = (1,) * size

    @property
    def longest(self) -> int:
        """The round length of the fastest rank, in local steps."""
        return self._guard.steps

    def watch(
        self, sums: Sequence[float], square: float, steps: Sequence[float], samples: Sequence[float]
    ) -> tuple[float, float]:
        """Takes in a merge: computes how far ranks have drifted, and adapts round lengths if there is a drift limit.

        Args:
            sums: the sums over all ranks of `Contribution.weight`, `Contribution.reach` and `Contribution.spread`.
            square: squared norm of the merged progress.
            steps, samples: for each rank, the local steps and the samples of its contribution; 0 steps if it missed
                the merge.

        Returns:
            Drift ratio and noise ratio, see `policy.guard`; 0.0 for both if there is no finite progress.
        """
        self._idle = [n == 0 if k > 0 else idle for idle, k, n in zip(self._idle, steps, samples, strict=True)]
        weight, reach, spread = sums
        if weight <= 0 or reach <= 0 or not math.isfinite(spread + square):
            return 0.0, 0.0
        drift = drift_ratio(spread, weight, square / reach**2)
        whole = all(k > 0 or idle for idle, k in zip(self._idle, steps, strict=True))  # no rank with samples missed it
        noise = noise_ratio(sum(n > 0 for n in samples))
        if whole:
            self._guard = self._guard.after(drift, noise)
        return drift, noise

    def hear(self, compute_s: Sequence[float]) -> None:
        """Chooses `by_rank` and `intervals` anew, from the seconds of each rank's local step (0: not measured)."""
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
        """Gives all ranks the longest round and a place in every merge."""
        self.by_rank, self.intervals = (self.longest,) * len(self.by_rank), (1,) * len(self.by_rank)

    @property
    def reason(self) -> str:
        """The measured seconds per step from which the intervals follow, in words."""
        steps = ", ".join(f"{seconds:.3g}" for seconds in self._step_s.tolist())
        every = ", ".join(map(str, self.intervals))
        return f"a local step takes {steps} s, by rank: each takes part in one merge of {every}"

    def resume(self, longest: int) -> None:
        """Starts anew with `longest` steps as the fastest rank's round; forgets all measurements."""
        most, limit = self._guard.round_steps, self._guard.limit
        self._guard = Guard(round_steps=most, limit=limit, length=min(longest, most))
        self._idle, self._step_s = [False] * len(self._idle), np.zeros(len(self._idle))
        self._start_over()


def _replaced(all_ranks: Sequence[int], some: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Returns a copy of `all_ranks` with the `values` at the indices `some`."""
    found = dict(zip(some, values, strict=True))
    return tuple(found.get(rank, value) for rank, value in enumerate(all_ranks))
