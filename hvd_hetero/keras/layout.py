"""Lays out gradients in few flat buckets, each of one type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvd_hetero.policy.buckets import WIRE, as_ready, last_of_widest

ITEM_BYTES = {"float64": 8, "float32": 4}


@dataclass(frozen=True)
class Spec:
    """A gradient's shape and type; `exact`: it goes through no codec, whatever its shape."""

    shape: tuple[int, ...]
    dtype: str
    exact: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in WIRE:
            raise TypeError(f"Expected gradients of a real floating type. Received: {self.dtype}, {list(self.shape)}.")

    @property
    def wire(self) -> str:
        """The type in which it travels."""
        return WIRE[self.dtype]

    @property
    def length(self) -> int:
        return math.prod(self.shape)


class BucketLayout:
    """Places every gradient in exactly one bucket. The model's last gradients, which are ready first, are in the first.

    Args:
        specs: of the gradients, in the order of the model.
        bucket_bytes: at most so many bytes in a bucket, unless a single gradient is larger.
        tail: so many more elements at the end of a bucket that goes through no codec, if there is one: the last one of
            the widest type.
        lossy: whether a gradient of a shape goes through a codec.
        zeros: makes a flat array of a length and a type.

    Attributes:
        members: for each bucket, the indices of its gradients.
        buckets, lossy, tail, tail_in: see `optimizers.noise.Buckets`.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        bucket_bytes: int,
        tail: int,
        lossy: Callable[[tuple[int, ...]], bool],
        zeros: Callable[[int, str], Any],
    ) -> None:
        self.specs = list(specs)
        sizes = [spec.length * ITEM_BYTES[spec.wire] for spec in specs]
        kinds = [(spec.wire, not spec.exact and lossy(spec.shape)) for spec in specs]
        back = len(specs) - 1  # backward, gradients are ready in the opposite order
        buckets = as_ready(sizes[::-1], kinds[::-1], cap_bytes=bucket_bytes)
        self.members = [[back - i for i in bucket] for bucket in buckets]
        self.lossy = [kinds[members[0]][1] for members in self.members]
        exact = [index for index, through in enumerate(self.lossy) if not through]
        self.tail_in = last_of_widest({index: ITEM_BYTES[specs[self.members[index][0]].wire] for index in exact})
        self.lengths = [sum(specs[i].length for i in members) for members in self.members]
        self.buckets = [
            zeros(length + (tail if index == self.tail_in else 0), specs[members[0]].wire)
            for index, (length, members) in enumerate(zip(self.lengths, self.members, strict=True))
        ]
        self.tail = None if self.tail_in is None else self.buckets[self.tail_in][self.lengths[self.tail_in] :]

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of each bucket's gradients."""
        return [[self.specs[i].shape for i in members] for members in self.members]

    @property
    def parts(self) -> list[Any]:
        """Each gradient's part of its bucket, in the order of the model."""
        found: dict[int, Any] = {}
        for bucket, members in zip(self.buckets, self.members, strict=True):
            at = 0
            for index in members:
                found[index] = bucket[at : (at := at + self.specs[index].length)]
        return [found[index] for index in range(len(self.specs))]


class Step(Protocol):
    """Exchanges the gradients of a layout, through host memory."""

    layout: BucketLayout

    def take(self, index: int, flat: Any, last: bool, part: int) -> None:
        """Takes in bucket `index` of this rank's gradients, flat; from any thread, in any order. `last`: an exchange
        follows, and it leaves at once. `part`: see `GradientArrivals.first`."""

    def finish(self, last: bool) -> list[Any]:
        """The merged gradients, flat, once all buckets are taken in; zeros where more passes come before the exchange.
        """
