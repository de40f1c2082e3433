"""Decides after how many seconds a wait for other ranks is reported, and after how many it is ended.

Ranks wait for each other in every step, so what counts as long depends on the durations of recent steps. A wait is
reported after

    median + k * 1.4826 * MAD

of these (1.4826 MAD estimates a standard deviation, Rousseeuw and Croux 1993), but not before `min_warn_s`, because
pauses of some seconds are ordinary (a checkpoint, a collection of garbage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TO_DEVIATION = 1.4826  # standard deviation over MAD, for a normal distribution


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The time limits of waits for other ranks. The engine's watch (`engine.watch`) applies them.

    Args:
        fixed_warn_s: a wait is reported after so many seconds; None: after a time that follows from the durations of
            recent steps.
        bound_s: a wait is ended after so many seconds, with the job or with the rank that is waited for; see
            `end_after_s` for steps that are themselves so long.
        startup_warn_s: a wait is reported after so many seconds while fewer than `steps` steps are known. First steps
            take longer: they compile, or load data for the first time.
        min_warn_s: a limit that follows from durations of steps is no shorter, in seconds. Ranks that wait for each
            other, and so for ever, are reported after this time already.
        deviations: k in the formula above, in standard deviations.
        steps: the number of steps from which on their durations set the limit.

    Raises:
        ValueError: a number that is not above 0.
    """

    fixed_warn_s: float | None = None
    bound_s: float = 600.0
    startup_warn_s: float = 60.0
    min_warn_s: float = 5.0
    deviations: float = 20.0
    steps: int = 10

    def __post_init__(self) -> None:
        lengths = [self.bound_s, self.startup_warn_s, self.min_warn_s, self.deviations]
        if min(lengths) <= 0 or (self.fixed_warn_s is not None and self.fixed_warn_s <= 0) or self.steps < 1:
            raise ValueError(f"Expected lengths above 0, and at least 1 step. Received: {self}.")

    def warn_after_s(self, step_s: Sequence[float]) -> float:
        """The seconds after which a wait is reported, given the seconds of recent steps."""
        if self.fixed_warn_s is not None:
            return self.fixed_warn_s
        if len(step_s) < self.steps:
            return min(self.startup_warn_s, self.bound_s / 2)
        median = float(np.median(step_s))
        deviation = TO_DEVIATION * float(np.median(np.abs(np.asarray(step_s) - median)))
        return max(self.min_warn_s, median + self.deviations * deviation)

    def end_after_s(self, step_s: Sequence[float]) -> float:
        """The seconds after which a wait is ended: `bound_s`; twice `warn_after_s` if waits of `bound_s` are not even
        reported, because steps are as long, or because `fixed_warn_s` says so."""
        warn_s = self.warn_after_s(step_s)
        return self.bound_s if warn_s < self.bound_s else 2 * warn_s
