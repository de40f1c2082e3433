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

from .steadiness import Steadiness

EVERY = 10  # batches between two looks, at least
PREDICTION_S = 2.5e-3  # a prediction takes for each rank that stops at times, and all wait for rank 0 meanwhile
BUDGET = 0.005  # the part of the time that predictions may take
EXCHANGES = 32  # synchronous steps that say how long an exchange takes
LEAST_EXCHANGES = 8


class Selection:
    """What is known of a job's ranks beside their speeds, and the strategy that follows.

    Args:
        steadiness: of the ranks.
        round_steps: local steps of the fastest rank in a round, if there should be rounds.
        bound_rounds: rounds for which a rank goes on without a merge; None: the usual ones.
        first_step: no choice before this batch.
        hold_steps: a strategy holds for so many batches at least.
    """

    def __init__(
        self, steadiness: Steadiness, *, round_steps: int, first_step: int, bound_rounds: float | None = None,
        hold_steps: int = 40, rule: StrategyRule | None = None,
    ) -> None:
        self._steadiness = steadiness
        self._round_steps, self._bound_rounds = round_steps, bound_rounds
        self._rule, self._hold_steps = rule or StrategyRule(), hold_steps
        self._exchange_s: deque[float] = deque(maxlen=EXCHANGES)
        self._next_look = self._first_look = first_step

    def hear(self, *, busy_s: Sequence[float], step_s: float | None) -> None:
        """Takes in what a batch took.

        Args:
            busy_s: of each rank, without waiting for others.
            step_s: from the batch's beginning to its end, where it was a synchronous one.
        """
        if step_s is not None and max(busy_s) > 0:
            self._exchange_s.append(max(0.0, step_s - max(busy_s)))

    def state_dict(self) -> list[float]:
        """The times of past exchanges, in seconds."""
        return list(self._exchange_s)

    def load_state_dict(self, exchange_s: Sequence[float], *, since: int | None = None) -> None:
        """Goes on from what `state_dict` returned, with a strategy that was chosen to hold from a batch on."""
        self._exchange_s = deque(exchange_s, maxlen=EXCHANGES)
        self._next_look = max(self._first_look, 0 if since is None else since + self._hold_steps)

    @property
    def exchange_s(self) -> float:
        """Seconds of a synchronous step beyond its slowest rank: the median, since a long wait for data is none."""
        return statistics.median(self._exchange_s) if self._exchange_s else 0.0

    def predict(
        self, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]], shares: Sequence[int],
        micro_batch: Sequence[int | None] | None = None,
    ) -> tuple[Prediction, Prediction]:
        """What synchronous and local training should achieve with these shares, of which a pass of each rank holds
        `micro_batch` samples at most."""
        jitters = self._steadiness.jitters(models, windows)
        return (
            predict_synchronous(
                models, shares, jitters=jitters, exchange_s=self.exchange_s, micro_batch=micro_batch
            ),
            predict_local(
                models, shares, round_steps=self._round_steps, bound_rounds=self._bound_rounds,
                merge_s=self.exchange_s, jitters=jitters, micro_batch=micro_batch, meet=True,
            ),
        )

    def look(
        self, step: int, current: str, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]],
        shares: Sequence[int], micro_batch: Sequence[int | None] | None = None,
    ) -> Choice | None:
        """Another strategy that should hold from now on, and why; None where the current one should stay."""
        if step < self._next_look or (current == SYNCHRONOUS and len(self._exchange_s) < LEAST_EXCHANGES):
            return None
        if len(models) == 1:  # which waits for nobody
            return None
        predicted = self.predict(models, windows, shares, micro_batch)
        cost_s = PREDICTION_S * self._steadiness.unsteady
        self._next_look = step + max(EVERY, math.ceil(cost_s / (BUDGET * predicted[0].period_s)))
        choice = choose(*predicted, current=current, rule=self._rule)
        if choice.strategy == current:
            return None
        self._next_look = step + self._hold_steps
        return choice
