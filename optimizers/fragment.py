"""A part of the model in local SGD: what is sent of it, what comes back, and what was done meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import verbs_of

from .outer import Outer, compensated
from .weighted import WeightedExchange


class Store(Protocol):
    """The parameters of a rank, as one flat array for each fragment."""

    def read(self, index: int) -> Any:
        """A copy of fragment `index`, flat."""

    def write(self, index: int, flat: Any) -> None:
        """Overwrites the parameters of fragment `index`."""


@dataclass
class Work:
    """What lies between two contributions of a rank: steps, samples, and the sum of their learning rates."""

    steps: int = 0
    samples: float = 0.0
    lr_sum: float = 0.0

    def add(self, samples: float, lr: float) -> None:
        self.steps += 1
        self.samples += samples
        self.lr_sum += lr


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What a merge brought: the control vector summed over ranks, and how this rank's part of it stood."""

    total: list[float]
    merged_square: float  # |mean Delta|^2
    carried: Work  # done since this rank's contribution


@dataclass
class Fragment:
    """One fragment on one rank.

    With z the model after the last merge – the same on all ranks, bit for bit – and x this rank's own, every rank
    sends c_i (x - z) and goes on from x. When all have, the merge is

        z' = outer(z, sum_i c_i (x_i - z) / sum_i c_i);    x' = z' + (x - what x was when sent)

    so each step enters the model once: in this merge, or in the next (Liu et al. 2024, arXiv:2401.09135, let
    contributions come late in the same way, through a server).

    Args:
        index: of this fragment in `store`.
        exchange: of one bucket, `buffer`.
        outer: what a merge does to z.
        compensation: lambda of `compensated`.
    """

    index: int
    store: Store
    exchange: WeightedExchange
    buffer: Any
    length: int
    outer: Outer
    compensation: float = 0.0
    work: Work = field(default_factory=Work)  # since the last contribution
    z: Any = None
    outer_state: dict[str, Any] = field(default_factory=dict)
    _sent: Any = None

    @property
    def under_way(self) -> bool:
        """Whether a contribution was sent and its merge has not come."""
        return self._sent is not None

    def begin(self) -> None:
        """Takes this rank's parameters for the model that all ranks share."""
        self.z, self._sent, self.work = self.store.read(self.index), None, Work()

    def send(self, weigh: Callable[[Work, float], float]) -> None:
        """Contributes all work since the last time; `weigh(work, |Delta|^2)` is c_i, and 0 sends nothing."""
        own = self.store.read(self.index)
        delta = own - self.z
        square = float((delta * delta).sum())
        weight = weigh(self.work, square)
        if weight == 0.0:
            self.buffer[: self.length] = 0.0
        else:
            self.buffer[: self.length] = delta if weight == 1.0 else delta * weight
        self._sent, self.work = own, Work()
        self.exchange.submit(0)

    def drop(self) -> None:
        """Gives up what this rank has done since the last merge, and goes on from there."""
        self.store.write(self.index, self.z)

    def merge(self, weights_at: int) -> Merge:
        """Ends the merge under way, which waits for those who have not sent; `weights_at`: of sum c_i in the control."""
        results, total = self.exchange.finish(lambda said: 1.0 / said[weights_at] if said[weights_at] > 0 else 0.0)
        mean, sent = results[0][: self.length], self._sent
        self._sent = None
        square = 0.0
        if total[weights_at] > 0:
            before = self.z
            self.z = self.outer.moved(before, mean, self.outer_state)
            square = float((mean * mean).sum())
        if self.work.steps == 0:
            self.store.write(self.index, self.z)
        else:
            progress = self.store.read(self.index) - sent
            progress = compensated(
                progress, self.z - sent, strength=self.compensation, lr_sum=self.work.lr_sum
            )
            self.store.write(self.index, self.z + progress)
        return Merge(total=total, merged_square=square, carried=self.work)


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The indices of tensors of these sizes in `count` fragments of nearly equal size, in order within each.

    The largest go first, each to the smallest fragment so far (longest processing time first, Graham 1969).
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1. Received: {count}.")
    count = max(1, min(count, len(sizes)))
    held = [0] * count
    chosen: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = min(range(count), key=lambda fragment: (held[fragment], len(chosen[fragment]), fragment))
        chosen[least].append(index)
        held[least] += sizes[index]
    return [sorted(members) for members in chosen]
