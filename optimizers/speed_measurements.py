"""The measurements of every rank's speed that the planner keeps, and the speed models that are fitted to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hvd_hetero.policy.regime import last_plan_that_changed_speeds, since_last_speed_change
from hvd_hetero.policy.speed import Observation, SpeedModel, fit, passes_of

WINDOW = 64  # observations kept of each rank, for the fit of its speed model
# When a rank's speed changes by more than this part, the rank's earlier observations are left out of the fit. Smaller
# changes only age out of the window: ranks on a machine that drifts change together, and a rank judged by its last
# steps alone would be compared with the others' past.
CHANGED = 0.3


class PriorModels:
    """The speed models that were fitted for one rank, from which the prior of its next fit is taken.

    The prior is the newest model that rests on observations from before the fit's window alone. The model of the last
    look is no such prior: it rests on mostly the same observations, which would be counted again with every look, until
    they seem to be certain.
    """

    def __init__(self) -> None:
        self._models: deque[tuple[int, SpeedModel]] = deque()  # each with the step of its last observation

    def fit(self, window: Sequence[tuple[int, Observation]]) -> SpeedModel | None:
        """Fits the speed model of this rank to `window`, pairs of step and observation, oldest first.

        Returns:
            the model; if `window` is empty, that of the last fit, or None if there was none.
        """
        if not window:
            return self._models[-1][1] if self._models else None
        first, last = window[0][0], window[-1][0]
        while len(self._models) > 1 and self._models[1][0] < first:
            self._models.popleft()
        prior = self._models[0][1] if self._models and self._models[0][0] < first else None
        model = fit([seen for _, seen in window], prior=prior)
        while self._models and self._models[-1][0] >= last:  # rests on the same observations
            self._models.pop()
        self._models.append((last, model))
        return model


class SpeedMeasurements:
    """The last observations of each rank, and their speed models.

    Args:
        micro_caps: by rank, the most samples of one pass; None: no limit.
    """

    def __init__(self, micro_caps: Sequence[int | None]) -> None:
        self._micro_caps = micro_caps
        self._windows = tuple(deque[tuple[int, Observation]](maxlen=WINDOW) for _ in micro_caps)
        self._priors = tuple(PriorModels() for _ in micro_caps)

    def observe(self, step: int, samples: Sequence[float], compute_s: Sequence[float]) -> None:
        """Takes in the measurements of all ranks for batch `step`: samples, and seconds of compute for them. 0: not
        measured."""
        for window, number, seconds, cap in zip(
            self._windows, map(round, samples), compute_s, self._micro_caps, strict=True
        ):
            if number > 0 and seconds > 0:
                passes = passes_of(number, cap)
                window.append((step, Observation(samples=number, compute_s=seconds, passes=passes)))

    def forget(self, rank: int) -> None:
        """Forgets the observations of a rank; the models that were fitted to them stay as its prior."""
        self._windows[rank].clear()

    @property
    def recent(self) -> list[list[Observation]]:
        """By rank, the observations that are kept, oldest first."""
        return [[seen for _, seen in window] for window in self._windows]

    @property
    def longest_s(self) -> float:
        """The longest of the ranks' last measured compute times, in seconds; 0.0 if there is none."""
        return max((window[-1][1].compute_s for window in self._windows if window), default=0.0)

    def fit(self, plan_starts: Sequence[int]) -> list[SpeedModel | None]:
        """Fits the speed model of each rank to the observations that were made at its present speed.

        Those are the ones since the last plan with which any rank's speed changed, and since the rank's own last change
        of speed. For a rank that had no sample since that plan, its older observations are used.

        Args:
            plan_starts: the first global batches of all plans, ascending.

        Returns:
            by rank, the model: that of the last fit if there are no observations, or None if there was no fit.
        """
        shift = last_plan_that_changed_speeds(self._windows, plan_starts)
        models = []
        for window, prior in zip(self._windows, self._priors, strict=True):
            seen = [each for each in window if each[0] >= shift] or list(window)
            regime = since_last_speed_change([observation for _, observation in seen], tolerance=CHANGED)
            models.append(prior.fit(seen[len(seen) - len(regime) :]))
        return models

    def state_dict(self) -> list[list[Any]]:
        """By rank, its observations as plain numbers."""
        return [[(at, seen.samples, seen.compute_s, seen.passes) for at, seen in window] for window in self._windows]

    def load_state_dict(self, state: Sequence[Sequence[Sequence[Any]]], places: Sequence[int | None]) -> None:
        """Takes `state` in place of all observations and models.

        Args:
            places: by rank, its index among the ranks of `state`; None for a rank that was not among them.
        """
        self._priors = tuple(PriorModels() for _ in self._windows)
        for window, place in zip(self._windows, places, strict=True):
            window.clear()
            window.extend(
                (step, Observation(samples=samples, compute_s=seconds, passes=passes))
                for step, samples, seconds, passes in (() if place is None else state[place])
            )
