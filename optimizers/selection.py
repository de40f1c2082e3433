"""Choosing the strategy while the job runs: `strategy="auto"`. Rank 0 chooses, and its plan tells all.

What the prediction needs comes with the exchanges: speeds (the planner's models), stops and noise of each
rank's compute, and what a synchronous step takes beyond its slowest rank, which is the exchange that nothing hides. A
merge is taken to need as long as that: both move the model once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from hvd_hetero.policy.jitter import Jitter, Ran, estimate
from hvd_hetero.policy.speed import Observation, SpeedModel
from hvd_hetero.policy.strategy import (
    SYNCHRONOUS,
    Choice,
    Prediction,
    StrategyRule,
    choose,
    predict_local,
    predict_synchronous,
)

EVERY = 10  # batches between two looks: a prediction costs some milliseconds
MEMORY = 200  # batches after which what was measured of stops has faded to 1/e
LEAST_STOPS = 2.0
EXCHANGES = 32  # synchronous steps that say how long an exchange takes
LEAST_EXCHANGES = 8


class Selection:
    """What is known of a job's ranks beside their speeds, and the strategy that follows.

    Args:
        size: ranks.
        round_steps: local steps of the fastest rank in a round, if there should be rounds.
        first_step: no choice before this batch.
        hold_steps: a strategy holds for so many batches at least.
    """

    def __init__(
        self, size: int, *, round_steps: int, first_step: int, hold_steps: int = 40, rule: StrategyRule | None = None
    ) -> None:
        self._round_steps, self._rule, self._hold_steps = round_steps, rule or StrategyRule(), hold_steps
        self._ran: np.ndarray = np.zeros((size, len(Ran._fields)))
        self._exchange_s: deque[float] = deque(maxlen=EXCHANGES)
        self._next_look = first_step
        self._heard = 0

    def hear(
        self, step: int, ran: Sequence[Ran], *, compute_s: Sequence[float], step_s: float | None
    ) -> None:
        """Takes in what all ranks said of batch `step` and those before it.

        Args:
            ran: sums since the last call.
            compute_s: of each rank in batch `step`.
            step_s: from the beginning of that batch to its end, where it was a synchronous one.
        """
        fading = math.exp(-max(0, step - self._heard) / MEMORY)
        self._heard = step
        self._ran = self._ran * fading + np.asarray(ran)
        if step_s is not None and max(compute_s) > 0:
            self._exchange_s.append(max(0.0, step_s - max(compute_s)))

    @property
    def exchange_s(self) -> float:
        """Seconds of a synchronous step beyond its slowest rank: the median, since waits for data are none."""
        return statistics.median(self._exchange_s) if self._exchange_s else 0.0

    def jitters(self, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]]) -> list[Jitter]:
        """By rank, how unsteady its compute is."""
        return [
            estimate(Ran(*sums), variation=_variation(model, window), least_stops=LEAST_STOPS)
            for sums, model, window in zip(self._ran.tolist(), models, windows, strict=True)
        ]

    def predict(
        self, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]], shares: Sequence[int]
    ) -> tuple[Prediction, Prediction]:
        """What synchronous and local training should achieve with these shares."""
        jitters = self.jitters(models, windows)
        return (
            predict_synchronous(models, shares, jitters=jitters, exchange_s=self.exchange_s),
            predict_local(
                models, shares, round_steps=self._round_steps, merge_s=self.exchange_s, jitters=jitters
            ),
        )

    def look(
        self, step: int, current: str, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]],
        shares: Sequence[int],
    ) -> Choice | None:
        """Another strategy that should hold from now on, and why; None where the current one should stay."""
        if step < self._next_look or (current == SYNCHRONOUS and len(self._exchange_s) < LEAST_EXCHANGES):
            return None
        self._next_look = step + EVERY
        choice = choose(*self.predict(models, windows, shares), current=current, rule=self._rule)
        if choice.strategy == current:
            return None
        self._next_look = step + self._hold_steps
        return choice


def _variation(model: SpeedModel, window: Sequence[Observation]) -> float:
    """Standard deviation of a step's compute over what the model says, from the median so that stops do not count."""
    ratios = np.array([seen.compute_s / model.time_s(seen.samples) for seen in window])
    return float(1.4826 * np.median(np.abs(ratios / np.median(ratios) - 1.0))) if len(ratios) else 0.0
