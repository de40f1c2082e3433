"""Tracks how much each rank takes part in training (its rung, see `policy.ladder`), the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_hetero.policy.ladder import Move, Rung, moves, rungs


class Ladder:
    """The rungs of all ranks, from their shares and from how many merges of local SGD they take part in.

    Args:
        shares: the shares of the first plan, by rank.
        tell: is called with each move of a rank from one rung to another.

    Attributes:
        rungs: the present rung of each rank.
    """

    def __init__(self, shares: Sequence[int], *, tell: Callable[[Move], None]) -> None:
        self._shares, self._intervals, self._tell = tuple(shares), (1,) * len(shares), tell
        self.rungs: tuple[Rung, ...] = rungs(self._shares, self._intervals)

    def hear_shares(self, shares: Sequence[int], reason: str) -> None:
        """Sets the shares, by rank, when a new plan is heard of. `reason`: why it was made."""
        self._shares = tuple(shares)
        self._move(reason)

    def hear_intervals(self, intervals: Sequence[int], reason: str) -> None:
        """Sets the merge intervals, by rank: a rank with interval k takes part in every k-th merge. `reason`: why."""
        self._intervals = tuple(intervals)
        self._move(reason)

    def hear_together(self) -> None:
        """Sets all merge intervals to 1, as all ranks make synchronous steps from now on."""
        self.hear_intervals((1,) * len(self._shares), "ranks step together again")

    def _move(self, reason: str) -> None:
        """Works out the rungs again, and tells of each rank that has moved."""
        before, self.rungs = self.rungs, rungs(self._shares, self._intervals)
        for move in moves(before, self.rungs, reason):
            self._tell(move)
