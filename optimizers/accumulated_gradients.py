"""Gradients that a rank has accumulated and not yet exchanged: they are kept in checkpoints and over elastic resets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Sums = Mapping[str, Any]  # see `AccumulatedGradients.state_dict`


class BatchCounter(Protocol):
    """Counts the global batches since the last exchange of gradients. In training, this is an `ExchangeCount`."""

    begun: int  # the same on all ranks


class _Nobody:
    begun = 0


class GradientAccumulator(Protocol):
    """Accumulates the gradients of one list of variables over several batches, as Keras' `ReducedStep` does."""

    def sums(self) -> dict[str, Any] | None:
        """A copy of the accumulated gradients, one array for each variable, with the number of their loss terms; None
        if nothing is accumulated. It does not depend on the layout of buckets."""

    def load_sums(self, sums: Mapping[str, Any] | None) -> None:
        """Replaces the accumulated gradients by what `sums()` returned; None: by nothing.

        The entry "apart" says whether the batches belong to a local step, whose gradients are not exchanged. Without
        it, the next batch decides that.
        """


class AccumulatedGradients:
    """The accumulated gradients of one optimizer on one rank, by kind: each kind stands for a list of variables.

    There is one `GradientAccumulator` for each kind. State may be loaded before an accumulator is made, as after an
    elastic reset: then the gradients are kept here until `put` registers the accumulator of their kind. They are stored
    with their number of loss terms, by which they are weighted, so that they count correctly on another set of ranks as
    well.

    Args:
        count: of the global batches since the last exchange; None if it is given later, with `follow`.
    """

    def __init__(self, count: BatchCounter | None = None) -> None:
        self._count: BatchCounter = count or _Nobody()
        self._accumulators: dict[str, GradientAccumulator] = {}
        self._waiting: dict[str, Any] = {}  # sums by kind, for accumulators that are not made yet

    @property
    def begun(self) -> int:
        """The number of global batches since the last exchange."""
        return self._count.begun

    def follow(self, count: BatchCounter) -> None:
        """Lets `count` count the global batches from now on, beginning with the present count."""
        count.begun, self._count = self.begun, count

    def put(self, kind: str, accumulator: GradientAccumulator) -> None:
        """Registers the accumulator of a kind, and loads into it the gradients that are kept here for this kind. An
        earlier accumulator of the kind is replaced; what that has accumulated is not carried over."""
        self._accumulators[kind] = accumulator
        accumulator.load_sums(self._waiting.pop(kind, None))

    def drop(self, kind: str) -> None:
        """Removes the accumulator of a kind, and with it the gradients that it has accumulated."""
        self._accumulators.pop(kind, None)

    def state_dict(self) -> dict[str, Any]:
        """Copies of this rank's accumulated gradients under "kinds", and the number of global batches under "begun"."""
        live = {kind: accumulator.sums() for kind, accumulator in self._accumulators.items()}
        kinds = self._waiting | {kind: sums for kind, sums in live.items() if sums is not None}
        return {"begun": self.begun, "kinds": kinds}

    def load_state_dict(self, state: Sums) -> None:
        """Goes on from a `state_dict()` of the same rank among as many ranks; an empty one discards everything.

        All ranks call it, or none.
        """
        self._count.begun = state.get("begun", 0)
        self._waiting = dict(state.get("kinds", {}))
        for kind, accumulator in self._accumulators.items():
            accumulator.load_sums(self._waiting.pop(kind, None))

    def restore(self, state: Sums, *, begun: int) -> None:
        """Goes on from `state` after an elastic reset, on any set of ranks.

        Args:
            state: this rank's own from before the reset; empty if it has none, or none that still count.
            begun: the number of global batches since the last exchange; the same on all ranks.
        """
        kinds = {
            # Without "apart": the next batch decides it on all ranks alike, also on those that have joined.
            kind: {key: value for key, value in sums.items() if key != "apart"}
            for kind, sums in state.get("kinds", {}).items()
        }
        self.load_state_dict({"begun": begun, "kinds": kinds})
