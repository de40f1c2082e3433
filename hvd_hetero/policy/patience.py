"""Patience: after how long a wait is worth a word, and after how long it is too long.

Ranks wait for each other in every step, so what is long follows from how long steps take here: more than
median + k * 1.4826 * MAD of the last ones (1.4826 MAD estimates a standard deviation, Rousseeuw and Croux 1993), and
never less than some seconds, because pauses of that length are ordinary (a checkpoint, a collection of garbage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TO_DEVIATION = 1.4826


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a rank waits for others, all in seconds.

    Args:
        warn_s: a wait of so long is worth a word; None: follows from the steps seen.
        bound_s: a wait of so long ends the job, or the rank that is waited for.
        first_s: worth a word while too few steps were seen: they compile, or load data for the first time.
        least_s: no shorter wait is worth a word.
        deviations: k.
        steps: so many have to be seen.
    """

    warn_s: float | None = None
    bound_s: float = 600.0
    first_s: float = 60.0
    least_s: float = 5.0
    deviations: float = 20.0
    steps: int = 10

    def __post_init__(self) -> None:
        lengths = [self.bound_s, self.first_s, self.least_s, self.deviations]
        if min(lengths) <= 0 or (self.warn_s is not None and self.warn_s <= 0) or self.steps < 1:
            raise ValueError(f"Expected lengths above 0, and at least 1 step. Received: {self}.")

    def word_s(self, step_s: Sequence[float]) -> float:
        """The wait that is worth a word, after steps of these lengths."""
        if self.warn_s is not None:
            return self.warn_s
        if len(step_s) < self.steps:
            return min(self.first_s, self.bound_s / 2)
        median = float(np.median(step_s))
        deviation = TO_DEVIATION * float(np.median(np.abs(np.asarray(step_s) - median)))
        return max(self.least_s, median + self.deviations * deviation)

    def end_s(self, step_s: Sequence[float]) -> float:
        """The wait that is too long: the bound, but always longer than what is worth a word."""
        return max(self.bound_s, 2 * self.word_s(step_s))
