"""Keeps the unsent residuals of one optimizer's codecs over checkpoints, and from one set of ranks to the next.

With error feedback, a codec keeps back what it could not send: the residual, which is sent in a later exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .place import Stateful

# By kind of exchange: what `ResidualExchange.residuals` returned for each, and the unit of weights: see
# `UnsentState.put`.
Kept = Mapping[str, tuple[Sequence[Any], float]]
GIVEN = "given"  # key in a state for what `UnsentState.add_residuals` was given and no exchange has taken yet


class ResidualExchange(Stateful, Protocol):
    """An exchange whose codecs may keep residuals back, to be sent later. In practice a `WeightedExchange`."""

    def residuals(self) -> Sequence[Any]:
        """Returns for each bucket what this rank has not sent yet; None where that is nothing."""

    def add_residuals(self, kept: Sequence[Any], factor: float) -> bool:
        """Sends `kept` times `factor` with the next sums. False, without effect, if the buckets are others."""


@dataclass
class Count:
    """A value that a rank counts by itself, as an object with a state for checkpoints.

    Args:
        value: a number, or a list that is replaced and never changed in place.
    """

    value: Any

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class _Group:
    """The exchanges of one kind, and the unit of their weights: see `UnsentState.put`."""

    exchanges: Sequence[ResidualExchange]
    unit: Callable[[], float]


def _unsent(group: _Group) -> tuple[Sequence[Any], float]:
    """What each exchange of a group keeps back, and the unit of its weights now."""
    return [each.residuals() for each in group.exchanges], group.unit()


class UnsentState:
    """Everything that the exchanges of one optimizer have not sent yet, on one rank.

    It holds, each under a name called its kind:

    - groups of exchanges (as "gradients" and "merges"), for the residuals and other state of their codecs;
    - messages: objects with facts of this rank that go into the next control vector (samples, gradient noise);
    - counts of this rank that no exchange carries, such as samples of local steps.

    A state is loaded, or residuals are given back, by kind. If the exchanges of a kind do not exist yet, the state or
    the residuals wait until `put` is called for it: exchanges are made anew where ranks have changed, and some are made
    only at the first step after a checkpoint was loaded.

    `Balancer.keepers` holds one object for each optimizer or tape; `GradientExchange` and `LocalSteps` fill it;
    checkpoints and elastic training read it.

    Args:
        keeps: whether any codec keeps residuals. Codecs without residuals may have a state all the same.
        messages: the first messages, by kind.
    """

    def __init__(self, *, keeps: bool = True, messages: Mapping[str, Stateful] | None = None) -> None:
        self.keeps = keeps
        self._groups: dict[str, _Group] = {}
        self._messages: dict[str, Stateful] = dict(messages or {})
        self._new: dict[str, Any] = {}  # by kind: states that exchanges and counts began with
        self._states: dict[str, Any] = {}  # by kind: loaded states that wait for their exchanges
        self._given: dict[str, tuple[Sequence[Any], float]] = {}  # by kind: residuals that wait for exchanges
        self._said: dict[str, tuple[Sequence[Any], float]] = {}  # what `residuals` returned last

    def put(self, kind: str, exchanges: Sequence[ResidualExchange], unit: Callable[[], float]) -> None:
        """Registers new exchanges for a kind, in place of the earlier ones, and hands them what waits for that kind.

        Args:
            exchanges: the same number and order on all ranks.
            unit: returns the part of a global batch that has weight 1 in their sums now (`GradientExchange.part_unit`,
                `MergeSender.part_unit`). Residuals given back are scaled by the ratio of the units.
        """
        self._new[kind] = [exchange.state_dict() for exchange in exchanges]
        self._groups[kind] = _Group(exchanges, unit)
        self._take_in(kind)

    def drop(self, kind: str) -> None:
        """Removes the exchanges of a kind, with their residuals."""
        self._groups.pop(kind, None)
        self._new.pop(kind, None)

    def put_message(self, kind: str, message: Stateful) -> None:
        """Registers an object with facts for the next control vector, and hands it the state that waits for it."""
        self._messages[kind] = message
        self._take_in(kind)

    def put_count(self, kind: str, count: Count) -> None:
        """Registers a count of this rank, and hands it the state that waits for it.

        `load_state_dict` resets the count to its present value if the loaded state lacks it.
        """
        self._new[kind] = [count.state_dict()]
        self.put_message(kind, count)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by kind: residuals, scales and factors of codecs, messages, counts, and all that waits."""
        live = {kind: [each.state_dict() for each in parts] for kind, parts in self._parts.items()}
        return {**self._states, **live, **({GIVEN: dict(self._given)} if self._given else {})}

    @property
    def _parts(self) -> dict[str, Sequence[Stateful]]:
        """All objects with a state, by kind."""
        groups = {kind: group.exchanges for kind, group in self._groups.items()}
        return {**{kind: [message] for kind, message in self._messages.items()}, **groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, which was saved by this rank among as many ranks. All ranks do, or none.

        Exchanges and counts that `state` lacks begin anew.
        """
        self._states = {**self._new, **state}
        self._given = dict(self._states.pop(GIVEN, {}))
        for kind in self._parts:
            self._take_in(kind)

    def residuals(self) -> Kept:
        """The residuals of this rank's codecs, for `add_residuals` after an elastic reset; empty without such codecs.

        A loaded state that waits for its exchanges is not part of it yet. When exchanges take that state, their
        residuals are added to the mapping that the last call returned.
        """
        if not self.keeps:
            return {}
        self._said = {**self._given, **{kind: _unsent(group) for kind, group in self._groups.items()}}
        return self._said

    def add_residuals(self, kept: Kept) -> None:
        """Sends residuals that `residuals` returned with the next sums, whatever the set of ranks is now."""
        self._given = dict(kept)
        for kind in self._groups:
            self._take_in(kind)

    def _take_in(self, kind: str) -> None:
        """Hands the objects of a kind the state and the residuals that wait for it."""
        waits = kind in self._states
        for part, state in zip(self._parts[kind], self._states.pop(kind, ()), strict=False):
            part.load_state_dict(state)
        if (group := self._groups.get(kind)) is None:
            return
        if waits and self.keeps and kind not in self._said:
            self._said[kind] = _unsent(group)  # the residuals of the loaded state
        kept, unit = self._given.pop(kind, ((), 1.0))
        taken = [
            exchange.add_residuals(arrays, unit / group.unit())
            for exchange, arrays in zip(group.exchanges, kept, strict=False)
        ]
        if taken and not any(taken):  # they wait for other buckets, as are made once gradients turn out to be sparse
            self._given[kind] = (kept, unit)
