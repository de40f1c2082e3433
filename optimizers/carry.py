"""What codecs keep back of arrays that do not weigh the same each time.

An array is c x, a rank's x times its weight c, and the sum over the ranks is divided by that of their weights. What is
kept back of it is c e. Added as it is to an array that weighs c', in a sum whose weights are less, it would count for
c / c' times what it is: after rounds of some steps those of one step, after whole batches a short last one. So it goes
with the next array as c' e, as if it were a part of its x. And what is much less than a usual array takes nothing with
it: one rank's may be short where the others' are not, and would then count for too little. What an array of no weight
takes with it would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import arrays_like, verbs_of

USUAL = 0.5  # of a usual weight, at least, for an array that takes with it what was kept back


class Keeps(Protocol):
    """A reduction that may keep part of an array back (a codec's residual) for the next sum."""

    def release_into(self, array: Any) -> None:
        """Adds the residual to `array`, and clears it."""

    def kept_into(self, array: Any) -> None:
        """Adds the residual to `array`, and keeps it as well."""


class Carry:
    """Sees to it that what `routes` keep back counts for what it is, on one rank.

    Args:
        routes: one for each of the arrays that are summed together, from step to step.
    """

    def __init__(self, routes: Sequence[Keeps]) -> None:
        self._routes = list(routes)
        self._last: float | None = None  # weight of the last arrays of any weight: of what the routes keep
        self._usual = 0.0
        self._now: float | None = None  # weight of the arrays under way
        self._waits: dict[int, Any] = {}  # by array: e, kept back of arrays before the last
        self._given: dict[int, Any] = {}  # what others kept back, of a usual weight
        self._taken: set[int] = set()  # of those that wait, what is under way

    def weigh_as(self, before: Carry) -> None:
        """Goes on from what arrays weighed in sums by other routes; what these kept back, `give` is told."""
        self._last, self._usual = before._last, before._usual

    def add_to(self, index: int, array: Any, weight: float | None) -> None:
        """Adds to array `index`, which weighs `weight` (None: as much as ever) and is about to be summed, what it takes
        with it."""
        self._now = weight = self._last if weight is None else weight
        if weight is None:  # of no array is known yet what it weighs, nor of what is kept
            weight = 1.0
        if weight == self._last and index not in self._waits and index not in self._given:
            return  # and the route adds what it keeps
        verbs = verbs_of(array)
        waits = self._waits.get(index)
        if self._last is not None:
            kept = verbs.zeros([len(array)], array)
            self._routes[index].release_into(kept)
            if verbs.largest(kept):
                kept /= self._last
                waits = kept if waits is None else waits + kept
        if weight and index in self._given:
            given = self._given.pop(index) / (self._last or weight)
            waits = given if waits is None else waits + given
        if waits is None:
            return
        self._waits[index] = waits
        if weight and weight >= USUAL * self._usual:
            array += waits * weight
            self._taken.add(index)

    def end_step(self, counts: bool) -> None:
        """Ends a sum of all arrays. Of one that does not count, nothing was taken along."""
        if counts:
            for index in self._taken:
                del self._waits[index]
            if self._now is not None:
                self._last = self._now or self._last
                self._usual = max(self._now, USUAL * self._usual)
        self._taken.clear()

    def kept_back(self, likes: Sequence[Any]) -> list[Any]:
        """For each of arrays like these, what is not sent yet, of a usual weight; None where that is nothing."""
        found: list[Any] = []
        for index, (like, route) in enumerate(zip(likes, self._routes, strict=True)):
            verbs = verbs_of(like)
            kept = verbs.zeros([len(like)], like)
            route.kept_into(kept)
            if index in self._waits:
                kept += self._waits[index] * (self._last or 1.0)
            if index in self._given:
                kept += self._given[index]
            found.append(kept if verbs.largest(kept) else None)
        return found

    def release(self, likes: Sequence[Any]) -> list[Any]:
        """Returns what `kept_back` does, and clears it."""
        found = self.kept_back(likes)
        for like, route in zip(likes, self._routes, strict=True):
            route.release_into(verbs_of(like).zeros([len(like)], like))
        self._waits, self._given = {}, {}
        return found

    def give(self, arrays: Sequence[Any]) -> None:
        """Takes in what `kept_back` returned, of whatever ranks there were."""
        for index, array in enumerate(arrays):
            if array is not None:
                self._given[index] = self._given[index] + array if index in self._given else array

    def state_dict(self) -> dict[str, Any]:
        """The residuals that wait for an array to travel with, and the weights that arrays have had."""
        return {"last": self._last, "usual": self._usual, "waits": dict(self._waits), "given": dict(self._given)}

    def load_state_dict(self, state: Mapping[str, Any], likes: Sequence[Any]) -> None:
        """Goes on from `state`, with arrays like these."""
        self._last, self._usual = state["last"], state["usual"]
        self._waits = {int(index): arrays_like(likes[int(index)], one) for index, one in state["waits"].items()}
        self._given = {int(index): arrays_like(likes[int(index)], one) for index, one in state["given"].items()}
