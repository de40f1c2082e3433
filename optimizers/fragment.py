"""A part of the model in local SGD: what is sent of it, what comes back, and what was done meanwhile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.policy.staleness import Contribution

from .outer import Outer, compensated
from .weighted import WeightedExchange


class Store(Protocol):
    """The parameters of a rank, as one flat array for each fragment."""

    def read(self, index: int, into: Any = None) -> Any:
        """A copy of fragment `index`, flat; in `into`, what an earlier call returned, if given."""

    def write(self, index: int, flat: Any) -> None:
        """Overwrites the parameters of fragment `index`."""

    def shift(self, index: int, by: Any) -> None:
        """Adds to the parameters of fragment `index`; may overwrite `by`."""

    def blend(self, index: int, flat: Any, part: float) -> None:
        """Makes the parameters of fragment `index` this part of what they are, and the rest of `flat`, which may be
        overwritten."""


@dataclass
class Work:
    """What lies between two contributions of a rank.

    Attributes:
        steps: all, also those in which it had no sample.
        lr_sum, gradients: of the others the learning rates, and how many they are; part of one where its gradient is a
            mean over batches of which it had a sample in that part.
        batches, rate_batches: the part of each step's global batch that was this rank's, summed, and times the rate.
    """

    steps: int = 0
    samples: float = 0.0
    lr_sum: float = 0.0
    gradients: float = 0.0
    batches: float = 0.0
    rate_batches: float = 0.0

    def add(self, samples: float, lr: float, part: float, gradients: float = 1.0) -> None:
        self.steps += 1
        self.batches += part
        self.rate_batches += part * lr
        if samples:
            self.samples += samples
            self.lr_sum += lr * gradients
            self.gradients += gradients

    def owe(self, other: Work) -> None:
        """Takes over what `other` has left to move the model by."""
        self.batches += other.batches
        self.rate_batches += other.rate_batches


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The result of a merge on one rank."""

    total: list[float]  # the control vectors, summed over ranks
    square: float  # squared norm of what moved the model, before an outer optimizer
    carried: Work  # what this rank did since its contribution


@dataclass(frozen=True)
class Lane:
    """What a merge travels in: an exchange of one bucket, `buffer`, which may have a tail."""

    exchange: WeightedExchange
    buffer: Any


@dataclass
class Fragment:
    """One fragment on one rank.

    With z the model after the last merge – the same on all ranks, bit for bit – and x this rank's own, every rank
    sends c_i (x - z) and goes on from x. When all have, the merge is, for plain averaging,

        z' = z + f sum_i c_i (x_i - z);    x' = z' + (x - what x was when sent)

    with c_i and f of `policy.staleness`, so each step enters the model once: in this merge, or in the next (Liu et al.
    2024, arXiv:2401.09135, let contributions come late in a similar way, through a server).

    A rank may miss merges: it says so in advance, by contributing nothing to them as well, and so is waited for in none
    of them. In those, z moves, and with it x, which keeps its distance:

        x' = z' + (x - z)

    Either moves x by as much as z' is from what x was when sent, or from z.

    Where nobody who contributes has had a sample, as when a rank without one in a short last batch comes alone, nothing
    says which way to go: what they have worked off stays with them, for the next merge. Progress that is given up, as
    it is not finite, is not: where that is all there is, the merge moves nothing, as a step that is left out.

    Args:
        index: of this fragment in `store`.
        lanes: merges take them in turn, the same on all ranks. They may share one buffer.
        spare: the lane of this number with a buffer of its own, for a rank that contributes to several at once.
        outer: what a merge does to z.
        compensation: lambda of `compensated`.
    """

    index: int
    store: Store
    lanes: list[Lane]
    outer: Outer
    compensation: float = 0.0
    spare: Callable[[int], Lane] | None = None
    work: Work = field(default_factory=Work)  # since the last contribution
    z: Any = None
    outer_state: dict[str, Any] = field(default_factory=dict)
    sends: int = 0
    _turn: int = field(default=0, init=False)  # the lane of the next contribution
    # Copies that are no longer needed: new memory costs page faults.
    _free: list[Any] = field(default_factory=list, init=False)
    # What was sent and has not come back: x when it was sent is None where it was nothing.
    _pending: deque[tuple[Lane, Any, Work]] = field(default_factory=deque, init=False)

    @property
    def under_way(self) -> bool:
        """Whether a contribution was sent and its merge has not come."""
        return bool(self._pending)

    def done(self) -> bool:
        """Whether the oldest merge under way has come, or none is."""
        return not self._pending or self._pending[0][0].exchange.done()

    @property
    def merges(self) -> int:
        """The number of merges that have been applied."""
        return self.sends - len(self._pending)

    @property
    def operation(self) -> str:
        """The name of the oldest merge under way."""
        return self._pending[0][0].exchange.operation

    @property
    def most_missed(self) -> int:
        """The number of merges in a row that a rank may miss."""
        return len(self.lanes) - 1

    def begin(self) -> None:
        """Takes this rank's parameters for the model that all ranks share."""
        before, self.work = self.work, Work()
        if before.steps == 0:
            self.work.owe(before)
        self.z, self._turn = self.store.read(self.index, self.z), 0
        self._free += [sent for _, sent, _ in self._pending if sent is not None]
        self._pending.clear()

    def _read(self) -> Any:
        """A copy of this rank's parameters."""
        return self.store.read(self.index, self._free.pop() if self._free else None)

    def _copied(self, flat: Any) -> Any:
        if not self._free:
            return verbs_of(flat).copied(flat)
        copy = self._free.pop()
        copy[:] = flat
        return copy

    def _submit(self, lane: Lane, sent: Any, work: Work) -> None:
        self._turn = (self._turn + 1) % len(self.lanes)
        self._pending.append((lane, sent, work))
        self.sends += 1
        lane.exchange.submit(0)

    def send(self, weigh: Callable[[Work, float], Contribution]) -> bool:
        """Contributes all work since the last time; `weigh(work, |Delta|^2)` says what it counts.

        False where the progress is not finite: it is given up, and this rank goes on from the last merge.
        """
        own, lane = self._read(), self.lanes[self._turn]
        delta, verbs = lane.buffer[: len(own)], verbs_of(own)
        verbs.difference_into(delta, own, self.z)
        square = verbs.squares(delta)
        contribution = weigh(self.work, square)
        if finite := math.isfinite(square):
            if contribution.before != 1.0:
                delta *= contribution.before
        else:
            delta[:] = 0.0
            own[:] = self.z
            self.store.write(self.index, own)
        done, self.work = self.work, Work()
        self._submit(lane, own, done if finite else Work())  # what is given up is not owed, either
        return finite

    def miss(self) -> None:
        """Contributes nothing to the merge after those under way."""
        if self.spare is not None:  # the lane used last keeps the buffer that all shared
            last = (self._turn - 1) % len(self.lanes)
            self.lanes = [lane if number == last else self.spare(number) for number, lane in enumerate(self.lanes)]
            self.spare = None
        lane = self.lanes[self._turn]
        lane.buffer[:] = 0.0
        self._submit(lane, None, Work())

    def merge(self, scale: Callable[[Sequence[float]], float]) -> Merge:
        """Ends the merge under way, waiting for those who have not sent; `scale`: of the sum, from the control."""
        lane, sent, work = self._pending[0]
        results, total = lane.exchange.finish(scale)
        self._pending.popleft()
        factor, square, mean = scale(total), 0.0, results[0][: len(self.z)]
        before = sent
        if self.work.steps and sent is None:
            before = self._copied(self.z)  # which is about to move
        if factor > 0.0:
            square = verbs_of(mean).squares(mean)
            self.outer.move(self.z, mean, self.outer_state)
        else:
            self.work.owe(work)
        if self.work.steps:
            self._carry_over(before)
        else:
            self.store.write(self.index, self.z)
        if before is not None:
            self._free.append(before)
        return Merge(total=total, square=square, carried=self.work)

    def _carry_over(self, before: Any) -> None:
        """This rank's parameters keep what was done since they, or the model, were `before`, which is overwritten."""
        if self.compensation:
            progress = self._read()
            progress -= before
            moved = self.z - before
            progress = compensated(progress, moved, strength=self.compensation, lr_sum=self.work.lr_sum)
            progress += self.z
            self.store.write(self.index, progress)
            self._free.append(progress)
        else:
            verbs_of(before).difference_into(before, self.z, before)
            self.store.shift(self.index, before)


def fragments_by_kind(kinds: Sequence[Hashable], sizes: Sequence[int], count: int) -> list[list[int]]:
    """The indices of tensors of these kinds and sizes in fragments of one kind each: `count` of each kind, at most."""
    chosen = []
    for kind in dict.fromkeys(kinds):
        members = [index for index, one in enumerate(kinds) if one == kind]
        for fragment in fragments_of([sizes[index] for index in members], count):
            chosen.append([members[place] for place in fragment])
    return chosen


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
