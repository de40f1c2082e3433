"""Measures how noisy the gradient is, for learning-rate rules: squared norms of each rank's gradient and of the mean.

The norms are summed over the ranks in the control vector of the exchanges. Buckets are sent in any order, so the norms
of a step may not be complete when its control vector is sent. They travel with the next one, as compute times do; by
then a GPU has computed them, and nobody waits for it. So the learning-rate factor of a step rests on earlier steps
alone, and does not depend on the gradient that it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.policy.scaling import NoiseSums

from .control import Norms


class NoiseMeter:
    """Collects the squared norms of one optimizer's gradients on one rank, and takes in their sums over the ranks.

    Squared norms may be scalars of a framework on a device; they are read one step later.

    Attributes:
        measuring: whether norms are measured; False until a learning-rate rule sets it, on all ranks alike.
    """

    def __init__(self) -> None:
        self.measuring = False
        self._buckets: dict[Any, Any] = {}  # squared norms of this rank's gradients as they are sent: see `add`
        # The arguments of `end` that the next control vector is made from:
        self._next: tuple[Sequence[Any], float, float, Sequence[Any], float] | None = None
        self._terms, self._batches = 0.0, 1  # loss terms of all ranks, and global batches, of the step that ended last
        self._sums: NoiseSums | None = None

    def add(self, of: Any, squared_norm: Any) -> None:
        """Notes the squared norm of gradients that this rank is about to send.

        Args:
            of: stands for these gradients: the index of their bucket, or the parameter of gradients that are in none.
            squared_norm: of the gradients as they are sent, multiplied by this rank's weight.
        """
        self._buckets[of] = squared_norm

    def end(
        self, *, terms: float, weight: float, merged: Sequence[Any], gain: float, all_terms: float, batches: int
    ) -> None:
        """Ends a step, after its exchange.

        Args:
            terms: the number of loss terms of this rank.
            weight: the factor by which this rank's mean gradient was multiplied in the buckets.
            merged: on rank 0 the squared norms of the merged buckets; on other ranks empty, as the control vector is
                summed over the ranks.
            gain: the factor by which the mean gradient of all ranks is multiplied in the merged buckets.
            all_terms, batches: the number of loss terms of all ranks, and of global batches, in this step.
        """
        buckets, self._buckets = list(self._buckets.values()), {}
        self._next = (buckets, terms, weight, merged, gain) if self.measuring else None
        self._terms, self._batches = all_terms, batches

    def forget(self) -> None:
        """Discards the norms of a step that does not count."""
        self._buckets, self._next, self._terms = {}, None, 0.0

    def outgoing(self) -> Norms:
        """This rank's norms of the step before, for the control vector of the next exchange; all zeros if there are
        none."""
        if self._next is None:
            return Norms()
        (buckets, terms, weight, merged, gain), self._next = self._next, None
        own = sum(map(float, buckets)) / weight**2 if terms and weight else math.nan
        whole = sum(map(float, merged)) / gain**2 if gain else math.nan
        told = Norms(merged=whole) if math.isfinite(whole) else Norms()
        # A value that is not finite is not sent: it would spoil the sum, and all ranks skip such a step anyway.
        if not math.isfinite(own):
            return told
        return Norms(squared_norm=own, inverse_terms=1.0 / terms, ranks=1.0, merged=told.merged)

    def incoming(self, norms: Norms, samples: float) -> None:
        """Takes in the norms of a step, summed over the ranks; `samples`: the size of each of its global batches."""
        if norms.merged <= 0 or not self._terms > 0:
            return
        batch = samples * self._batches
        terms_per_sample = self._terms / batch if batch else 1.0
        self._sums = NoiseSums(
            squared_norms=norms.squared_norm,
            inverse_batches=norms.inverse_terms * terms_per_sample,
            ranks=norms.ranks,
            merged=norms.merged,
            batch=self._terms / terms_per_sample,
        )

    def take(self) -> NoiseSums | None:
        """Returns the sums of the last step for which they have come; None if they were taken already."""
        sums, self._sums = self._sums, None
        return sums

    # Norms on their way: see `UnsentState` ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The norms that this rank will send with the next exchange, and the sums that nobody has taken yet, as plain
        numbers; empty if there are neither."""
        if self._next is None and self._sums is None:
            return {}
        said = None
        if self._next is not None:
            buckets, terms, weight, merged, gain = self._next
            said = [list(map(float, buckets)), terms, weight, list(map(float, merged)), gain]
        heard = None if self._sums is None else asdict(self._sums)
        return {"next": said, "terms": self._terms, "batches": self._batches, "sums": heard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict()` of the same rank among as many ranks."""
        said, heard = state.get("next"), state.get("sums")
        self._next = None if said is None else (said[0], said[1], said[2], said[3], said[4])
        self._sums = None if heard is None else NoiseSums(**heard)
        self._terms, self._batches = float(state.get("terms", 0.0)), int(state.get("batches", 1))


class Buckets(Protocol):
    """A layout of buckets: flat arrays of gradients, one of which may end in the control vector."""

    buckets: list[Any]
    lossy: list[bool]  # for each bucket, whether all of it goes through a codec; if not, none of it does
    tail: Any  # the control vector, as a part of a bucket; None if it is in none
    tail_in: int | None  # the index of that bucket


class GradientNoise(NoiseMeter):
    """A `NoiseMeter` that computes the squared norms of buckets; it does nothing unless `measuring` is set."""

    def sees(self, layout: Buckets, index: int) -> None:
        """Notes the norm of bucket `index`, which holds this rank's weighted gradients and is about to be sent."""
        if self.measuring:
            self.add(index, _squared_norm(layout, index, layout.buckets[index]))

    def sees_values(self, of: Any, values: Any) -> None:
        """Notes the norm of weighted gradients that are in no bucket, as the `values` of a sparse one, and are about to
        be sent; `of`: their parameter."""
        if self.measuring:
            self.add(of, _squared_values(values))

    def of(self, layout: Buckets, results: Sequence[Any], values: Sequence[Any] = ()) -> list[Any]:
        """The squared norms of merged buckets, and of merged `values` that are in none; empty if not `measuring`."""
        if not self.measuring:
            return []
        merged = [_squared_norm(layout, index, flat) for index, flat in enumerate(results)]
        return merged + [_squared_values(each) for each in values]


def _squared_values(values: Any) -> Any:
    return verbs_of(values).squared_norm(values.reshape(-1))


def _squared_norm(layout: Buckets, index: int, flat: Any) -> Any:
    """The squared norm of the gradients in bucket `index`: a scalar on its device."""
    tail = len(layout.tail) if layout.tail is not None and index == layout.tail_in else 0
    return _squared_values(flat[: len(flat) - tail])
