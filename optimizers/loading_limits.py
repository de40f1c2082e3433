"""What the planner knows of how fast ranks can load their samples, which no number of samples computes faster than."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hvd_hetero.policy.replan import Plan
from hvd_hetero.policy.speed import SpeedModel

SLOWER = 1.25  # times as slow as was known loading is that plans were wrong about


class LoadingLimits:
    """The limits of all ranks, and which plans were made before they were known.

    Args:
        size: ranks.

    Attributes:
        seconds: that a sample takes on each rank to be loaded beside computing, at least; 0: less than shows.
    """

    def __init__(self, size: int) -> None:
        self.seconds = [0.0] * size
        self._slowest = [0.0] * size  # the most of it that was known so far
        self._unaware = -1  # the last plan that was made before that was known

    def observe(self, seconds: Sequence[float], *, version: int) -> None:
        """Takes in what each rank says while plan `version` holds."""
        if any(new > SLOWER * most for new, most in zip(seconds, self._slowest, strict=True)):
            self._unaware = version
            self._slowest = list(map(max, seconds, self._slowest))
        self.seconds = list(seconds)

    def into(self, models: Iterable[SpeedModel]) -> tuple[SpeedModel, ...]:
        """The models of all ranks, with what loading takes."""
        return tuple(
            replace(model, loading_s=loading_s) if loading_s else model
            for model, loading_s in zip(models, self.seconds, strict=True)
        )

    def aware(self, plans: Iterable[Plan]) -> list[Plan]:
        """Of `plans` those that tell how restless shares are: from the last that did not know what is known now on."""
        return [plan for plan in plans if plan.version >= self._unaware]

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return {"loading_s": self.seconds, "unaware": self._unaware}

    def load_state_dict(self, state: dict[str, Any], places: Sequence[int | None]) -> None:
        """Goes on from `state`, or from none of an older version's; `places[rank]` is where a rank was in it."""
        seconds = state.get("loading_s")
        self.seconds = [0.0 if place is None or seconds is None else seconds[place] for place in places]
        self._slowest = list(self.seconds)
        self._unaware = state.get("unaware", -1)
