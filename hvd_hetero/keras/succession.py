"""What codecs have kept back of a variable's gradients goes with whatever reduces them now: another optimizer that a
model was compiled with, or the same one after layers were frozen or thawed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.optimizers.weighted import WeightedExchange

from .layout import BucketLayout, Spec

if TYPE_CHECKING:
    from .step import ReducedStep


class KeptBack:
    """What the codecs of one exchange keep back, by variable: by its id, so that no variable lives on for it."""

    def __init__(
        self, exchange: WeightedExchange, layout: BucketLayout, specs: Sequence[Spec | None], variables: Sequence[Any]
    ) -> None:
        self._exchange, self._buckets = exchange, layout.buckets
        self._pieces: dict[int, tuple[int, slice]] = {}  # its bucket, and the part of that which is its gradient's
        owners = [id(v) for v, spec in zip(variables, specs, strict=False) if spec is not None]
        for bucket, members in enumerate(layout.members):
            at = 0
            for index in members:
                piece = slice(at, at := at + layout.specs[index].length)
                if index < len(owners):  # what follows are marks
                    self._pieces[owners[index]] = bucket, piece

    def by_variable(self) -> dict[int, Any]:
        """What is not sent yet of this rank's gradients, weighted."""
        flats = self._exchange.kept_back()
        return {key: flats[bucket][piece] for key, (bucket, piece) in self._pieces.items() if flats[bucket] is not None}

    def give(self, kept: Mapping[int, Any], *, factor: float = 1.0) -> None:
        """Sends what `by_variable` returned with the next sums, times `factor`."""
        flats: list[Any] = [None] * len(self._buckets)
        for key, array in kept.items():
            bucket, piece = self._pieces[key]
            if flats[bucket] is None:
                flats[bucket] = verbs_of(array).zeros([len(self._buckets[bucket])], self._buckets[bucket])
            flats[bucket][piece] = array
        self._exchange.give_back(flats, factor)

    def forget(self) -> None:
        """Keeps nothing back."""
        self._exchange.forget()


_REDUCED_BY: dict[int, tuple[weakref.ref[Any], weakref.ref[ReducedStep]]] = {}  # by id of the variable


def take_over(step: ReducedStep, variables: Sequence[Any]) -> None:
    """Says that `step` reduces the gradients of these variables from now on. On all ranks, between the same batches."""
    before: dict[ReducedStep, list[int]] = {}
    for variable in variables:
        known, by = _REDUCED_BY.get(id(variable), (None, None))
        last = by() if known is not None and by is not None and known() is variable else None
        if last is step:
            continue
        if last is not None and last.gives_to(step):
            before.setdefault(last, []).append(id(variable))
        _REDUCED_BY[id(variable)] = weakref.ref(variable, _forgotten(id(variable))), weakref.ref(step)
    for last, keys in before.items():
        kept = last.kept.by_variable()
        taken = {key: kept.pop(key) for key in keys if key in kept}
        if taken:
            last.kept.forget()
            last.kept.give(kept)
            step.kept.give(taken, factor=last.part_unit / step.part_unit)


def _forgotten(key: int) -> Callable[[Any], None]:
    def forget(_: Any) -> None:
        _REDUCED_BY.pop(key, None)

    return forget
