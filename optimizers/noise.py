"""Measuring how noisy the gradient is: what each rank adds to the control vector, and the sums that come back.

Buckets leave in any order, so when the control vector goes out the step's norms may not be complete. They travel with
the next one, as compute times do; on a GPU they are then there without waiting for it. And the factor of a step rests
on the steps before it alone: it does not know the gradient that it multiplies.
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
    """The norms of one exchange, from step to step.

    Squared norms may be a framework's scalars, perhaps on a device: they are read a step later.

    Attributes:
        measuring: False until somebody wants the norms; the same on all ranks.
    """

    def __init__(self) -> None:
        self.measuring = False
        self._buckets: dict[Any, Any] = {}  # squared norms of this rank's buckets as they are sent, by what they are of
        self._next: tuple[Sequence[Any], float, float, Sequence[Any], float] | None = None  # to be said
        self._terms, self._batches = 0.0, 1  # of the step that will be heard of next
        self._sums: NoiseSums | None = None

    def add(self, of: Any, squared_norm: Any) -> None:
        """Takes in what this rank is about to send: `of` a bucket, by its index, or of what is in none."""
        self._buckets[of] = squared_norm

    def end(
        self, *, terms: float, weight: float, merged: Sequence[Any], gain: float, all_terms: float, batches: int
    ) -> None:
        """Ends a step.

        Args:
            terms: loss terms of this rank.
            weight: what this rank's mean gradient was multiplied by in the buckets.
            merged: on rank 0 squared norms of the merged buckets; on the others nothing, since all ranks' are summed.
            gain: what the mean over all ranks' terms is multiplied by in them.
            all_terms, batches: loss terms of all ranks in this step, and global batches.
        """
        buckets, self._buckets = list(self._buckets.values()), {}
        self._next = (buckets, terms, weight, merged, gain) if self.measuring else None
        self._terms, self._batches = all_terms, batches

    def forget(self) -> None:
        """Discards what was noted of a step that does not count."""
        self._buckets, self._next, self._terms = {}, None, 0.0

    def outgoing(self) -> Norms:
        """What this rank says of the step before; all zeros where it has nothing to say."""
        if self._next is None:
            return Norms()
        (buckets, terms, weight, merged, gain), self._next = self._next, None
        own = sum(map(float, buckets)) / weight**2 if terms and weight else math.nan
        whole = sum(map(float, merged)) / gain**2 if gain else math.nan
        told = Norms(merged=whole) if math.isfinite(whole) else Norms()
        # What is not finite stays here: it would spoil the sum, and a step with it is skipped by all ranks anyhow.
        if not math.isfinite(own):
            return told
        return Norms(squared_norm=own, inverse_terms=1.0 / terms, ranks=1.0, merged=told.merged)

    def incoming(self, norms: Norms, samples: float) -> None:
        """Takes in the sum over all ranks, of a step whose global batches had `samples` each."""
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
        """The sums of the last step heard of, once."""
        sums, self._sums = self._sums, None
        return sums


    # What is not said yet: see `Keeping` -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank will say with the next exchange, and what it has heard that nobody has taken yet, as plain
        numbers."""
        if self._next is None and self._sums is None:
            return {}
        said = None
        if self._next is not None:
            buckets, terms, weight, merged, gain = self._next
            said = [list(map(float, buckets)), terms, weight, list(map(float, merged)), gain]
        heard = None if self._sums is None else asdict(self._sums)
        return {"next": said, "terms": self._terms, "batches": self._batches, "sums": heard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, of this rank of as many."""
        said, heard = state.get("next"), state.get("sums")
        self._next = None if said is None else (said[0], said[1], said[2], said[3], said[4])
        self._sums = None if heard is None else NoiseSums(**heard)
        self._terms, self._batches = float(state.get("terms", 0.0)), int(state.get("batches", 1))


class Buckets(Protocol):
    """Flat arrays of gradients, one of which may end in a control vector; either of them whole through a codec or not.
    """

    buckets: list[Any]
    lossy: list[bool]
    tail: Any
    tail_in: int | None


class GradientNoise(NoiseMeter):
    """A `NoiseMeter` that looks at buckets; it costs nothing until something is `measuring`."""

    def sees(self, layout: Buckets, index: int) -> None:
        """Bucket `index` holds this rank's gradients, and is about to be sent."""
        if self.measuring:
            self.add(index, _squared_norm(layout, index, layout.buckets[index]))

    def sees_values(self, of: Any, values: Any) -> None:
        """`values` of this rank's gradients, which lie in no bucket, are about to be sent; `of`: whose they are."""
        if self.measuring:
            self.add(of, _squared_values(values))

    def of(self, layout: Buckets, results: Sequence[Any], values: Sequence[Any] = ()) -> list[Any]:
        """The squared norms of merged buckets, and of `values` in none, where they are measured."""
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
