"""Chooses between synchronous and local training while the job runs: `strategy="auto"`. Rank 0 chooses, and announces
the strategy to all ranks with its plan.

The prediction uses what ranks report in the exchanges: their speeds (the planner's speed models), the stops and the
noise of their compute, and the time that a synchronous step takes beyond the compute of its slowest rank. That is the
part of the exchange that does not overlap with compute. A merge is assumed to take as long, as both send as many
values."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from hvd_hetero.policy.speed import Observation, SpeedModel
from hvd_hetero.policy.strategy import (
    SYNCHRONOUS,
    Prediction,
    StrategyChoice,
    choose_strategy,
    predict_local,
    predict_synchronous,
)

from .steadiness import Steadiness

EVERY = 10  # batches between two predictions, at least
PREDICTION_S = 2.5e-3  # seconds of a prediction for each rank that stalls; all ranks wait for rank 0 meanwhile
BUDGET = 0.005  # the fraction of the time that predictions may take
EXCHANGES = 32  # synchronous steps over whose exchanges the median is taken
LEAST_EXCHANGES = 8  # synchronous steps before the first choice


class StrategySelector:
    """Chooses the strategy for the next batches, on rank 0. The planner calls it.

    Args:
        steadiness: how often and how long each rank stalls.
        round_steps: local steps of the fastest rank in a round of local training.
        bound_rounds: rounds that a rank may go on while it misses merges; None: the default of `predict_local`.
        first_step: the first batch at which a choice is made.
        hold_steps: the number of batches for which a chosen strategy is kept at least.
    """

    def __init__(
        self, steadiness: Steadiness, *, round_steps: int, first_step: int, bound_rounds: float | None = None,
        hold_steps: int = 40,
    ) -> None:
        self._steadiness = steadiness
        self._round_steps, self._bound_rounds = round_steps, bound_rounds
        self._hold_steps = hold_steps
        self._exchange_s: deque[float] = deque(maxlen=EXCHANGES)
        self._next_look = self._first_look = first_step

    def hear(self, *, busy_s: Sequence[float], step_s: float | None) -> None:
        """Takes in the times of a batch.

        Args:
            busy_s: by rank, the seconds of its own work, without waiting for others.
            step_s: seconds from the beginning of the batch to its end; None if the step was not a synchronous one.
        """
        if step_s is not None and max(busy_s) > 0:
            self._exchange_s.append(max(0.0, step_s - max(busy_s)))

    def state_dict(self) -> list[float]:
        """The times of past exchanges, in seconds."""
        return list(self._exchange_s)

    def load_state_dict(self, exchange_s: Sequence[float], *, since: int | None = None) -> None:
        """Loads the times from `state_dict`. `since`: the batch from which the present strategy holds; None:
        unknown."""
        self._exchange_s = deque(exchange_s, maxlen=EXCHANGES)
        self._next_look = max(self._first_look, 0 if since is None else since + self._hold_steps)

    @property
    def exchange_s(self) -> float:
        """Seconds of a synchronous step beyond the work of its slowest rank. The median of the last steps, so that a
        single long wait for data does not count."""
        return statistics.median(self._exchange_s) if self._exchange_s else 0.0

    def predict(
        self, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]], shares: Sequence[int],
        micro_batch: Sequence[int | None] | None = None,
    ) -> tuple[Prediction, Prediction]:
        """Predicts the speed of synchronous and of local training, in this order.

        Args:
            models: by rank, its speed model.
            windows: by rank, its recent observations, which tell the noise of its compute.
            shares: by rank, its samples of a global batch.
            micro_batch: by rank, the samples of a forward and backward pass at most; None: no limit.
        """
        jitters = self._steadiness.jitters(models, windows)
        return (
            predict_synchronous(
                models, shares, jitters=jitters, exchange_s=self.exchange_s, micro_batch=micro_batch
            ),
            predict_local(
                models, shares, round_steps=self._round_steps, bound_rounds=self._bound_rounds,
                merge_s=self.exchange_s, jitters=jitters, micro_batch=micro_batch,
            ),
        )

    def look(
        self, step: int, current: str, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]],
        shares: Sequence[int], micro_batch: Sequence[int | None] | None = None,
    ) -> StrategyChoice | None:
        """Returns another strategy that should be used from now on, and why; None to keep the current one. Predictions
        are made for some batches only, so that they take little time.

        Args:
            step: the present global batch.
            current: the present strategy.
            models, windows, shares, micro_batch: see `predict`.
        """
        if step < self._next_look or (current == SYNCHRONOUS and len(self._exchange_s) < LEAST_EXCHANGES):
            return None
        if len(models) == 1:  # a single rank waits for nobody
            return None
        predicted = self.predict(models, windows, shares, micro_batch)
        cost_s = PREDICTION_S * self._steadiness.unsteady
        self._next_look = step + max(EVERY, math.ceil(cost_s / (BUDGET * predicted[0].period_s)))
        choice = choose_strategy(*predicted, current=current)
        if choice.strategy == current:
            return None
        self._next_look = step + self._hold_steps
        return choice
