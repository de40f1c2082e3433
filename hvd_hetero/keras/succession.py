"""Which exchange is whose: variables have numbers, and what codecs have kept back of their gradients goes with another
optimizer that a model is compiled with."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.optimizers.weighted import WeightedExchange

from .layout import BucketLayout, Spec

if TYPE_CHECKING:
    from .step import ReducedStep

T = TypeVar("T")


class OfVariables(Generic[T]):
    """Values for variables, which it keeps alive no longer than others do. By identity: they compare elementwise."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, variable: Any) -> T | None:
        known, value = self._found.get(id(variable), (None, None))
        return value if known is not None and known() is variable else None

    def values(self) -> set[T]:
        """Those of all variables that live."""
        return {value for _, value in list(self._found.values())}  # one may die meanwhile

    def put(self, variable: Any, value: T) -> None:
        key = id(variable)

        def dies(reference: Any) -> None:
            if self._found.get(key, (None,))[0] is reference:  # and not that of another one in the same place
                del self._found[key]

        self._found[key] = weakref.ref(variable, dies), value


_NUMBERS: OfVariables[int] = OfVariables()
_NEXT = itertools.count(1)


def number_of(variable: Any) -> int:
    """A number that no other variable has or had in this process; 0 for a tensor, which is another one each time."""
    if not hasattr(variable, "assign"):
        return 0
    number = _NUMBERS.get(variable)
    if number is None:
        _NUMBERS.put(variable, number := next(_NEXT))
    return number


def are_gone(numbers: Sequence[int]) -> bool:
    """Whether there were variables of these numbers, none of which lives."""
    mine = set(numbers) - {0}
    return bool(mine) and not mine & _NUMBERS.values()


class KeptBack:
    """What the codecs of one exchange keep back, by the number of the variable."""

    def __init__(
        self, exchange: WeightedExchange, layout: BucketLayout, specs: Sequence[Spec | None], variables: Sequence[Any]
    ) -> None:
        self._exchange, self._buckets = exchange, layout.buckets
        self._pieces: dict[int, tuple[int, slice]] = {}  # its bucket, and the part of that which is its gradient's
        owners = [number_of(v) for v, spec in zip(variables, specs, strict=False) if spec is not None]
        for bucket, members in enumerate(layout.members):
            at = 0
            for index in members:
                piece = slice(at, at := at + layout.specs[index].length)
                if index < len(owners):  # what follows are marks
                    self._pieces[owners[index]] = bucket, piece

    def release(self) -> dict[int, Any]:
        """What is not sent yet of this rank's gradients, weighted, which is kept no longer."""
        flats = self._exchange.release()
        return {key: flats[bucket][piece] for key, (bucket, piece) in self._pieces.items() if flats[bucket] is not None}

    def give(self, kept: Mapping[int, Any], *, factor: float = 1.0) -> None:
        """Sends what `release` returned with the next sums, times `factor`."""
        flats: list[Any] = [None] * len(self._buckets)
        for key, array in kept.items():
            bucket, piece = self._pieces[key]
            if flats[bucket] is None:
                flats[bucket] = verbs_of(array).zeros([len(self._buckets[bucket])], self._buckets[bucket])
            flats[bucket][piece] = array
        self._exchange.give_back(flats, factor)


_REDUCED_BY: OfVariables[weakref.ref[ReducedStep]] = OfVariables()


def take_over(step: ReducedStep, variables: Sequence[Any]) -> None:
    """Says that `step` reduces the gradients of these variables from now on, and takes over what codecs of another one
    have kept back of them. No rank has to hear of it: what it takes over is this rank's own."""
    before: dict[ReducedStep, list[int]] = {}
    for variable in variables:
        reference = _REDUCED_BY.get(variable)
        last = None if reference is None else reference()
        if last is step:
            continue
        if last is not None and last.gives_to(step):
            before.setdefault(last, []).append(number_of(variable))
        _REDUCED_BY.put(variable, weakref.ref(step))
    for last, numbers in before.items():
        kept = last.kept.release()
        taken = {number: kept.pop(number) for number in numbers if number in kept}
        last.kept.give(kept)
        step.kept.give(taken, factor=last.unit / step.unit)
