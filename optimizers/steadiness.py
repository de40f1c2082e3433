"""How steady each rank is: for which part of the time it was stopped lately, as all ranks have heard it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_hetero.policy.jitter import Jitter, Ran, estimate, with_stops
from hvd_hetero.policy.speed import Observation, SpeedModel

MEMORY = 200  # batches after which what was measured of stops has faded to 1/e
LEAST_STOPS = 2.0
ENOUGH_STOPS = 4.0  # to give a rank another share for them: two may be chance


class Steadiness:
    """Statistics of how often and how long each rank stalls; the same on all ranks."""

    def __init__(self, size: int) -> None:
        self._ran: np.ndarray = np.zeros((size, len(Ran._fields)))
        self._heard = 0

    def hear(self, step: int, ran: Sequence[Ran]) -> None:
        """Takes in what all ranks said of batch `step` and of those before it since the last call."""
        fading = math.exp(-max(0, step - self._heard) / MEMORY)
        self._heard = step
        self._ran = self._ran * fading + np.asarray(ran)

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain numbers."""
        return {"heard": self._heard, "ran": self._ran.tolist()}

    def load_state_dict(self, state: Mapping[str, Any], places: Sequence[int | None]) -> None:
        """Goes on from `state`: each rank from what was known of the one in its place there; None: from nothing."""
        nothing = [0.0] * len(Ran._fields)
        ran = state.get("ran")
        self._heard = int(state.get("heard", 0))
        self._ran = np.array([nothing if ran is None or place is None else ran[place] for place in places])

    @property
    def _lately(self) -> list[Ran]:
        return [Ran(*sums) for sums in self._ran.tolist()]

    @property
    def unsteady(self) -> int:
        """The number of ranks that stall at times."""
        return sum(estimate(ran, least_stops=LEAST_STOPS).stalled > 0.0 for ran in self._lately)

    def jitters(self, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]]) -> list[Jitter]:
        """By rank, how unsteady its compute is."""
        return [
            estimate(ran, variation=_variation(model, window), least_stops=LEAST_STOPS)
            for ran, model, window in zip(self._lately, models, windows, strict=True)
        ]

    def alone(self, models: Sequence[SpeedModel]) -> tuple[SpeedModel, ...]:
        """By rank, its speed when nobody waits for it: its stops are a part of its time."""
        return tuple(
            with_stops(model, ran, least_stops=ENOUGH_STOPS)
            for ran, model in zip(self._lately, models, strict=True)
        )

    def alone_s(self, compute_s: Sequence[float]) -> list[float]:
        """By rank, the seconds between the beginnings of such batches when it waits for nobody."""
        return [
            estimate(ran, least_stops=ENOUGH_STOPS).alone_s(seconds)
            for ran, seconds in zip(self._lately, compute_s, strict=True)
        ]


def _variation(model: SpeedModel, window: Sequence[Observation]) -> float:
    """Standard deviation of a step's compute over what the model says, from the median so that stops do not count."""
    ratios = np.array([model.ratio(seen) for seen in window])
    return float(1.4826 * np.median(np.abs(ratios / np.median(ratios) - 1.0))) if len(ratios) else 0.0
