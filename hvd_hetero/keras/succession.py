"""Hands on what codecs have kept back of variables' gradients, when a model is compiled with another optimizer."""

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
    """A mapping from variables, held weakly, to values. By identity, as variables compare elementwise."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, variable: Any) -> T | None:
        known, value = self._found.get(id(variable), (None, None))
        return value if known is not None and known() is variable else None

    def values(self) -> set[T]:
        """The values of all variables that are alive."""
        return {value for _, value in list(self._found.values())}  # a copy, as variables may die meanwhile

    def put(self, variable: Any, value: T) -> None:
        key = id(variable)

        def dies(reference: Any) -> None:
            if self._found.get(key, (None,))[0] is reference:  # another variable may have got the same id
                del self._found[key]

        self._found[key] = weakref.ref(variable, dies), value


_NUMBERS: OfVariables[int] = OfVariables()
_NEXT = itertools.count(1)


def number_of(variable: Any) -> int:
    """A number of the variable, unique in this process; 0 for a tensor, which is a new object each time."""
    if not hasattr(variable, "assign"):
        return 0
    number = _NUMBERS.get(variable)
    if number is None:
        _NUMBERS.put(variable, number := next(_NEXT))
    return number


def are_gone(numbers: Sequence[int]) -> bool:
    """Whether all variables with these numbers are gone; False if there were none."""
    mine = set(numbers) - {0}
    return bool(mine) and not mine & _NUMBERS.values()


class KeptBack:
    """Takes and gives what the codecs of one exchange keep back, by the number of the variable."""

    def __init__(
        self, exchange: WeightedExchange, layout: BucketLayout, specs: Sequence[Spec | None], variables: Sequence[Any]
    ) -> None:
        self._exchange, self._buckets = exchange, layout.buckets
        self._pieces: dict[int, tuple[int, slice]] = {}  # a variable's bucket, and its gradient's place in that
        owners = [number_of(v) for v, spec in zip(variables, specs, strict=False) if spec is not None]
        for bucket, members in enumerate(layout.members):
            at = 0
            for index in members:
                piece = slice(at, at := at + layout.specs[index].length)
                if index < len(owners):  # what follows are marks
                    self._pieces[owners[index]] = bucket, piece

    def release(self) -> dict[int, Any]:
        """Returns, and forgets, what is kept back of this rank's gradients, weighted, by the variables' numbers."""
        flats = self._exchange.release()
        return {key: flats[bucket][piece] for key, (bucket, piece) in self._pieces.items() if flats[bucket] is not None}

    def give(self, kept: Mapping[int, Any], *, factor: float = 1.0) -> None:
        """Sends with the next sums what `release` returned, times `factor`."""
        flats: list[Any] = [None] * len(self._buckets)
        for key, array in kept.items():
            bucket, piece = self._pieces[key]
            if flats[bucket] is None:
                flats[bucket] = verbs_of(array).zeros([len(self._buckets[bucket])], self._buckets[bucket])
            flats[bucket][piece] = array
        self._exchange.give_back(flats, factor)


_REDUCED_BY: OfVariables[weakref.ref[ReducedStep]] = OfVariables()


def take_over(step: ReducedStep, variables: Sequence[Any]) -> None:
    """Makes `step` the one that reduces these variables' gradients, and gives it what the codecs of another step have
    kept back of them. Needs no communication, as what is kept back is this rank's own."""
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
