"""What the planner knows of how fast each rank can load samples: a limit to its speed, however fast it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hvd_hetero.policy.replan import Plan
from hvd_hetero.policy.speed import SpeedModel

SLOWER = 1.25  # loading so many times slower than known is news: plans made before have overrated the rank


class LoadingLimits:
    """The loading time per sample of all ranks, and which plans were made before it was known.

    Args:
        size: number of ranks.

    Attributes:
        seconds: for each rank, the least seconds that it takes to load a sample while it computes; 0 where that is not
            known.
    """

    def __init__(self, size: int) -> None:
        self.seconds = [0.0] * size
        self._slowest = [0.0] * size  # for each rank, the highest value of `seconds` so far
        self._unaware = -1  # version of the last plan that was made before `_slowest` was known

    def observe(self, seconds: Sequence[float], *, version: int) -> None:
        """Takes in the `seconds` that all ranks report while the plan numbered `version` is the newest."""
        if any(new > SLOWER * most for new, most in zip(seconds, self._slowest, strict=True)):
            self._unaware = version
            self._slowest = list(map(max, seconds, self._slowest))
        self.seconds = list(seconds)

    def into(self, models: Iterable[SpeedModel]) -> tuple[SpeedModel, ...]:
        """Returns the speed models of all ranks, each with the rank's loading time."""
        return tuple(
            replace(model, loading_s=loading_s) if loading_s else model
            for model, loading_s in zip(models, self.seconds, strict=True)
        )

    def aware(self, plans: Iterable[Plan]) -> list[Plan]:
        """Returns the plans by which the planner may judge how often shares change.

        Left out are the early ones, made before the present loading times were known; only the last of those stays, as
        the plan that the others corrected.
        """
        return [plan for plan in plans if plan.version >= self._unaware]

    def state_dict(self) -> dict[str, Any]:
        """The loading times and the number of the last unaware plan, as plain numbers."""
        return {"loading_s": self.seconds, "unaware": self._unaware}

    def load_state_dict(self, state: dict[str, Any], places: Sequence[int | None]) -> None:
        """Goes on from `state`.

        Args:
            places: for each rank, its index among the ranks of `state`; None for a rank that was not among them.
        """
        self.seconds = [0.0 if place is None else state["loading_s"][place] for place in places]
        self._slowest = list(self.seconds)
        self._unaware = state["unaware"]
