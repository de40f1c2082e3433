"""Estimates how often and how long each rank was stopped lately, from what all ranks report in the exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_hetero.policy.jitter import Jitter, StopSums, estimate, include_stops
from hvd_hetero.policy.speed import Observation, SpeedModel

MEMORY = 200  # batches after which a measurement of stops has decayed to 1/e
LEAST_STOPS = 2.0  # stops, with decay, from which on a rank counts as one that stalls
ENOUGH_STOPS = 4.0  # stops from which on a rank's share takes them into account: two may be chance


class Steadiness:
    """Statistics of how often and how long each of `size` ranks stalls; the same on all ranks."""

    def __init__(self, size: int) -> None:
        self._ran: np.ndarray = np.zeros((size, len(StopSums._fields)))
        self._heard = 0

    def hear(self, step: int, sums: Sequence[StopSums]) -> None:
        """Takes in all ranks' reports, by rank, of batch `step` and of the batches before it since the last call."""
        fading = math.exp(-max(0, step - self._heard) / MEMORY)
        self._heard = step
        self._ran = self._ran * fading + np.asarray(sums)

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain numbers."""
        return {"heard": self._heard, "ran": self._ran.tolist()}

    def load_state_dict(self, state: Mapping[str, Any], places: Sequence[int | None]) -> None:
        """Loads `state`. `places`: by rank, the former rank whose statistics it continues; None: it starts with
        none."""
        nothing = [0.0] * len(StopSums._fields)
        self._heard = state["heard"]
        self._ran = np.array([nothing if place is None else state["ran"][place] for place in places])

    @property
    def _lately(self) -> list[StopSums]:
        return [StopSums(*sums) for sums in self._ran.tolist()]

    @property
    def unsteady(self) -> int:
        """The number of ranks that stall at times."""
        return sum(estimate(sums, least_stops=LEAST_STOPS).stalled > 0.0 for sums in self._lately)

    def jitters(self, models: Sequence[SpeedModel], windows: Sequence[Sequence[Observation]]) -> list[Jitter]:
        """Returns by rank how unsteady its compute is: its stops, and the noise of its steps.

        Args:
            models: by rank, its speed model.
            windows: by rank, recent observations, whose deviation from the model is the noise.
        """
        return [
            estimate(sums, variation=_variation(model, window), least_stops=LEAST_STOPS)
            for sums, model, window in zip(self._lately, models, windows, strict=True)
        ]

    def alone(self, models: Sequence[SpeedModel]) -> tuple[SpeedModel, ...]:
        """Returns by rank its speed model in local steps, which includes its stops, as no other rank waits for it."""
        return tuple(
            include_stops(model, sums, least_stops=ENOUGH_STOPS)
            for sums, model in zip(self._lately, models, strict=True)
        )

    def alone_s(self, compute_s: Sequence[float]) -> list[float]:
        """Returns by rank the seconds per batch in local steps, in which it waits for nobody, with its stops included.
        `compute_s`: by rank, the seconds of a batch without stops."""
        return [
            estimate(sums, least_stops=ENOUGH_STOPS).alone_s(seconds)
            for sums, seconds in zip(self._lately, compute_s, strict=True)
        ]


def _variation(model: SpeedModel, window: Sequence[Observation]) -> float:
    """Returns the standard deviation of compute time over the time that the model predicts, relative to its median. It
    is estimated from the median absolute deviation (times 1.4826), so that stops do not count."""
    ratios = np.array([model.ratio(seen) for seen in window])
    return float(1.4826 * np.median(np.abs(ratios / np.median(ratios) - 1.0))) if len(ratios) else 0.0
