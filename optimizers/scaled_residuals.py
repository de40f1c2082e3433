"""Residuals of error feedback in weighted sums, where the sum of the weights differs from step to step.

A rank sends its gradient times its weight, and the sum over the ranks is divided by the sum of their weights, W. A
codec with error feedback keeps a residual, the part r of an array that it has not sent. Added unchanged to the next
array, in a sum that is divided by W', the residual would count W / W' times as much; so in a short last batch after
whole ones. Therefore `ScaledResiduals` adds r W' / W to the next array.

A rank does not know W before the sum. It passes an estimate from its own batch, in any unit: for gradients, its loss
terms divided by its share (`GradientExchange`); for merges of local SGD, `MergeSender.residual_weight`.

A rank without loss terms in a batch has no such estimate, but may keep a residual of it: of a sum that it encodes for
other ranks, as its part of an int8 sum, or its node's. That is scaled by W as well. So the rank takes the W of its last
step in proportion to the sizes of both batches, as far as they are known beforehand; and what the sum has left, in
proportion to the W's that both sums brought, in a unit of all ranks.

An array of much less than the usual weight takes no residual with it. Where only this rank's batch is short, W is as
usual, and the residual would count too little; with a weight of 0 it would be lost. The residual waits for the next
array of about the usual weight.

Residuals pass from one object to another, as after an elastic reset or where an optimizer is made anew, in the unit of
whole batches: what the residual would be if W were that of a whole batch. The last batch before, at the end of an
epoch, is often a short one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import arrays_like, verbs_of

USUAL = 0.5  # an array of at least this part of the usual weight takes a residual with it


class HasResidual(Protocol):
    """A reduction of one array over the ranks that may keep a residual, which it adds to the next array by itself."""

    def move_residual_to(self, array: Any) -> None:
        """Adds the residual to `array`, and clears the residual."""

    def add_residual_to(self, array: Any) -> None:
        """Adds the residual to `array`, and keeps the residual as well."""


class ScaledResiduals:
    """Rescales one rank's residuals from the weight of the sum that left them to the weight of the next sum.

    `WeightedExchange` calls `add_to` for each array before it is sent, and `end_step` once all arrays are summed.

    Args:
        routes: the reductions of the arrays that are summed in each step, one per array.
    """

    def __init__(self, routes: Sequence[HasResidual]) -> None:
        self._routes = list(routes)
        self._last: float | None = None  # the last weight above 0, which the routes' residuals are scaled by
        self._usual = 0.0  # the usual weight: the largest of the last ones; it halves at most from step to step
        self._part = 1.0  # the part of a whole batch that has the weight `_last`
        self._total: float | None = None  # the W that `_last` is an estimate of, in a unit of all ranks
        self._whole = 1.0  # the weight of a whole batch as long as there is no `_last`
        self._known = False  # whether weights are in this rank's own unit, and not 1 for a whole batch
        self._now: float | None = None  # weight of the arrays that are being summed
        self._part_now = 1.0  # the part of a whole batch that has that weight
        self._own = False  # whether that weight is from loss terms of this rank
        self._waits: dict[int, Any] = {}  # by array: residual divided by its weight, which no sum has taken yet
        self._given: dict[int, Any] = {}  # by array: residual from `add`, in the unit of whole batches
        self._taken: set[int] = set()  # arrays that are being summed together with their `_waits`

    def take_weights_from(self, before: ScaledResiduals) -> None:
        """Takes over the weights known to `before`, the object of other routes for the same arrays. Their residuals are
        passed to `add`."""
        self._last, self._usual, self._part = before._last, before._usual, before._part
        self._total, self._whole, self._known = before._total, before._whole, before._known

    def add_to(self, index: int, array: Any, weight: float | None, *, part: float = 1.0) -> None:
        """Adds to an array, right before it is summed, the residual that it takes with it.

        Where the weight is that of the last step and no other residual waits, nothing is added here: the route adds
        its residual itself.

        Args:
            index: index of the array among `routes`.
            array: this rank's weighted gradient or progress, flat; changed in place.
            weight: this rank's estimate of the sum's weights, W, in the unit of the other calls. 0: nothing says how
                large it is, and no residual is taken along. None: it is as in the last step, in proportion to `part`.
            part: the part of a whole batch that the arrays are over.
        """
        if weight and not self._known:
            self._learn(weight / part)
        self._own = bool(weight)
        if weight is None:
            weight = self._last * (part / self._part) if self._last else self._whole * part
        self._now, self._part_now = weight, part
        if weight == self._last and index not in self._waits and index not in self._given:
            return  # the route adds its residual itself
        verbs = verbs_of(array)
        waits = self._waits.get(index)
        if self._last is not None:
            kept = verbs.zeros([len(array)], array)
            self._routes[index].move_residual_to(kept)
            if verbs.largest(kept):
                kept /= self._last
                waits = kept if waits is None else waits + kept
        if weight and index in self._given:
            given = self._given.pop(index) / self._weight_of_whole
            waits = given if waits is None else waits + given
        if waits is None:
            return
        self._waits[index] = waits
        if weight and weight >= USUAL * self._usual:
            array += waits * weight
            self._taken.add(index)

    @property
    def _weight_of_whole(self) -> float:
        """The weight of a whole batch, by the last weight above 0."""
        return self._last / self._part if self._last else self._whole

    def _learn(self, whole: float) -> None:
        """Changes to this rank's own unit, in which a whole batch weighs `whole`, from that in which it weighs 1."""
        factor = whole / self._weight_of_whole
        if self._last is not None:
            self._last *= factor
        self._usual *= factor
        self._waits = {index: waits / factor for index, waits in self._waits.items()}
        self._whole, self._known = whole, True

    def end_step(self, counts: bool, total: float | None = None) -> None:
        """Ends a step, after all arrays were summed.

        Args:
            counts: whether the step counts. If not, as where a gradient is not finite, the residuals added by `add_to`
                stay for a later step.
            total: W, in a unit that is the same on all ranks in each step; None: not known.
        """
        if counts:
            for index in self._taken:
                del self._waits[index]
            if self._now is not None:
                self._end(self._now, total)
        self._taken.clear()

    def _end(self, now: float, total: float | None) -> None:
        """Notes the weight of what a step that counts has left, in whose arrays it was taken to be `now`."""
        self._usual, part = max(now, USUAL * self._usual), self._part_now
        if not self._own and self._last and self._total and total:
            ratio = total / self._total
            now, part = self._last * ratio, part if now else self._part * ratio
        elif not now and self._last is None:
            now = self._whole * part
        if now:
            self._last, self._part, self._total = now, part, total

    def residuals(self, likes: Sequence[Any]) -> list[Any]:
        """Returns all residual of each array, in the unit of whole batches; None for an array without any.

        Args:
            likes: arrays of the same lengths, type and device, one per route.
        """
        found: list[Any] = []
        whole = self._weight_of_whole
        for index, (like, route) in enumerate(zip(likes, self._routes, strict=True)):
            verbs = verbs_of(like)
            kept = verbs.zeros([len(like)], like)
            route.add_residual_to(kept)
            kept /= self._part
            if index in self._waits:
                kept += self._waits[index] * whole
            if index in self._given:
                kept += self._given[index]
            found.append(kept if verbs.largest(kept) else None)
        return found

    def take_residuals(self, likes: Sequence[Any]) -> list[Any]:
        """Returns the residuals as `residuals` does, and clears them."""
        found = self.residuals(likes)
        for like, route in zip(likes, self._routes, strict=True):
            route.move_residual_to(verbs_of(like).zeros([len(like)], like))
        self._waits, self._given = {}, {}
        return found

    def add(self, arrays: Sequence[Any]) -> None:
        """Adds residuals that the next sums are to send as well.

        Args:
            arrays: what `residuals` or `take_residuals` returned, of other routes or another rank; one per route, or
                None.
        """
        for index, array in enumerate(arrays):
            if array is not None:
                self._given[index] = self._given[index] + array if index in self._given else array

    def state_dict(self) -> dict[str, Any]:
        """Returns the last weights and the residuals that are held here; the routes save their own residuals."""
        residuals = {"waits": dict(self._waits), "given": dict(self._given)}
        unit = {"total": self._total, "whole": self._whole, "known": self._known}
        return {"last": self._last, "usual": self._usual, "part": self._part, **unit, **residuals}

    def load_state_dict(self, state: Mapping[str, Any], likes: Sequence[Any]) -> None:
        """Loads what `state_dict` returned. Residuals become arrays of the type and device of the arrays `likes`, one
        per route."""
        self._last, self._usual, self._part, self._now = state["last"], state["usual"], state["part"], None
        self._total, self._whole, self._known = state["total"], state["whole"], state["known"]
        self._taken.clear()
        self._waits = {int(index): arrays_like(likes[int(index)], one) for index, one in state["waits"].items()}
        self._given = {int(index): arrays_like(likes[int(index)], one) for index, one in state["given"].items()}
