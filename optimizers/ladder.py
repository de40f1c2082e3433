"""Where each rank stands on the ladder, as all ranks have heard it: see `policy.ladder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_hetero.policy.ladder import Move, Rung, moves, rungs


class Ladder:
    """The rungs of all ranks.

    Args:
        shares: of the first plan.
        tell: is told of each move.

    Attributes:
        rungs: by rank.
    """

    def __init__(self, shares: Sequence[int], *, tell: Callable[[Move], None]) -> None:
        self._shares, self._intervals, self._tell = tuple(shares), (1,) * len(shares), tell
        self.rungs: tuple[Rung, ...] = rungs(self._shares, self._intervals)

    def hear_shares(self, shares: Sequence[int], reason: str) -> None:
        """Takes in a plan's shares, and why it was made."""
        self._shares = tuple(shares)
        self._move(reason)

    def hear_intervals(self, intervals: Sequence[int], reason: str) -> None:
        """Takes in that each rank takes part in every k-th merge, and why."""
        self._intervals = tuple(intervals)
        self._move(reason)

    def hear_together(self) -> None:
        """Takes in that ranks make synchronous steps from now on."""
        self.hear_intervals((1,) * len(self._shares), "ranks step together again")

    def _move(self, reason: str) -> None:
        before, self.rungs = self.rungs, rungs(self._shares, self._intervals)
        for move in moves(before, self.rungs, reason):
            self._tell(move)
