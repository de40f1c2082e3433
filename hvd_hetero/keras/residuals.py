"""Passes the codecs' residuals of error feedback from one optimizer to the next that trains the same variables.

A residual is what a lossy codec has kept back of a gradient, to be sent with a later one. Without this it would be lost
when a model is compiled with another optimizer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange

from .layout import BucketLayout, Spec

if TYPE_CHECKING:
    from .step import ReducedStep

T = TypeVar("T")


class VariableMap(Generic[T]):
    """A mapping from variables to values, by identity, as variables compare elementwise. It holds variables weakly."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, variable: Any) -> T | None:
        """The value of a variable; None if it has none."""
        known, value = self._found.get(id(variable), (None, None))
        return value if known is not None and known() is variable else None

    def values(self) -> set[T]:
        """The values of all variables that are alive."""
        return {value for _, value in list(self._found.values())}  # a copy, as variables may die meanwhile

    def put(self, variable: Any, value: T) -> None:
        """Sets the value of a variable, until the variable dies."""
        key = id(variable)

        def dies(reference: Any) -> None:
            if self._found.get(key, (None,))[0] is reference:  # another variable may have got the same id
                del self._found[key]

        self._found[key] = weakref.ref(variable, dies), value


_NUMBERS: VariableMap[int] = VariableMap()
_NEXT = itertools.count(1)


def number_of(variable: Any) -> int:
    """The number of a variable, unique in this process; 0 for a tensor, which is a new object each time."""
    if not hasattr(variable, "assign"):
        return 0
    number = _NUMBERS.get(variable)
    if number is None:
        _NUMBERS.put(variable, number := next(_NEXT))
    return number


def are_gone(numbers: Sequence[int]) -> bool:
    """Whether all variables with these numbers are garbage-collected; False if the numbers are all of tensors."""
    mine = set(numbers) - {0}
    return bool(mine) and not mine & _NUMBERS.values()


class Residuals:
    """Reads and writes the residuals of the codecs of one exchange, by variable.

    Args:
        exchange: the all-reduce of the buckets, which has the residuals as flat buckets.
        layout: the place of each gradient in the buckets.
        specs: shapes and types of the gradients; None for a variable without one.
        variables: the variables of the gradients, in the same order.
    """

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
                if index < len(owners):  # what follows are no gradients, but marks of which ranks have one: `presence`
                    self._pieces[owners[index]] = bucket, piece

    def take_residuals(self) -> dict[int, Any]:
        """Returns the residuals of this rank, by the variables' numbers, and clears them.

        They are weighted, as the gradients are in the buckets.
        """
        flats = self._exchange.take_residuals()
        return {key: flats[bucket][piece] for key, (bucket, piece) in self._pieces.items() if flats[bucket] is not None}

    def add(self, kept: Mapping[int, Any], *, factor: float = 1.0) -> None:
        """Adds residuals that `take_residuals` returned, times `factor`, to the next gradients that are sent."""
        flats: list[Any] = [None] * len(self._buckets)
        for key, array in kept.items():
            bucket, piece = self._pieces[key]
            if flats[bucket] is None:
                flats[bucket] = verbs_of(array).zeros([len(self._buckets[bucket])], self._buckets[bucket])
            flats[bucket][piece] = array
        self._exchange.add_residuals(flats, factor)


_REDUCED_BY: VariableMap[weakref.ref[ReducedStep]] = VariableMap()


def take_over(step: ReducedStep, variables: Sequence[Any]) -> None:
    """Makes `step` the one that reduces the gradients of these variables, and moves their residuals to it.

    Residuals come from the steps that reduced these gradients before, if these allow it (`ReducedStep.gives_to`).
    Residuals of other variables stay where they are. This needs no communication, as each rank has its own residuals.

    Args:
        step: the step whose codecs get the residuals.
        variables: the variables whose gradients it reduces.
    """
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
        kept = last.kept.take_residuals()
        taken = {number: kept.pop(number) for number in numbers if number in kept}
        last.kept.add(kept)
        step.kept.add(taken, factor=last.unit / step.unit)
