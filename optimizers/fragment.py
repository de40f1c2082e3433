"""A fragment, the part of the model that one merge of local SGD is about: its contributions and its merges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvd_hetero.codecs.verbs import verbs_of
from hvd_hetero.policy.local_round import Contribution

from . import merge_control
from .outer import Outer, compensated
from .parameter_store import Store
from .weighted_exchange import WeightedExchange


@dataclass
class LocalWork:
    """Sums over the local steps that a rank made between two of its contributions.

    Attributes:
        steps: local steps, including those in which this rank had no sample.
        samples: loss terms of all steps.
        of_all: an estimate of the loss terms of all ranks in the global batches of these steps, each times this rank's
            planned part of that batch. Without short batches, as many as `samples`.
        lr_sum: sum of learning rate times `gradients` of each step with samples.
        gradients: number of steps with samples. A step counts for less than 1 where its gradient is a mean over several
            batches and this rank had no sample of some of them, or where this rank makes a part of each update
            (`policy.local_round`).
        batches: this rank's planned part of the global batch, summed over all steps.
        rate_batches: the same, each part times the learning rate of its step.
        rates: sum of the learning rates of all steps.
    """

    steps: int = 0
    samples: float = 0.0
    of_all: float = 0.0
    lr_sum: float = 0.0
    gradients: float = 0.0
    batches: float = 0.0
    rate_batches: float = 0.0
    rates: float = 0.0

    def add(
        self, samples: float, lr: float, part: float, gradients: float = 1.0, of_all: float | None = None
    ) -> None:
        """Adds a local step over `samples` loss terms, where `part` of the global batch was this rank's. `of_all`: see
        there; None: as many as `samples`."""
        self.steps += 1
        self.of_all += samples if of_all is None else of_all
        self.batches += part
        self.rate_batches += part * lr
        self.rates += lr
        if samples:
            self.samples += samples
            self.lr_sum += lr * gradients
            self.gradients += gradients

    def carry_reach(self, other: LocalWork) -> None:
        """Adds the `batches`, `rate_batches` and `rates` of `other`, whose merge did not move the model: the next one
        will."""
        self.batches += other.batches
        self.rate_batches += other.rate_batches
        self.rates += other.rates


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The result of a merge on one rank."""

    total: list[float]  # the control vectors, summed over ranks
    square: float  # squared norm of the merged progress, which the outer optimizer took; 0 if the model did not move
    carried: LocalWork  # the local steps of this rank since its contribution


@dataclass(frozen=True)
class Lane:
    """An exchange of one bucket, `buffer`, that carries one merge at a time.

    `buffer` is as long as the fragment, and longer where the control vector is its tail.
    """

    exchange: WeightedExchange
    buffer: Any


@dataclass
class Fragment:
    """Contributes this rank's progress on one fragment to merges, and applies the merges to its parameters.

    `Rounds` calls `send` and `merge`. Let z be the fragment after the last merge (the same on all ranks, bit for bit)
    and x this rank's parameters. Every rank sends c_i (x_i - z) and trains on from x_i. When all ranks have sent, the
    merge is, for plain averaging, with s the value of x when it was sent,

        z' = z + f sum_i c_i (s_i - z);    x' = z' + (x - s)

    where c_i is `Contribution.delta_factor` and f is `policy.local_round.merge_factor`. So each local step enters z
    exactly once, in this merge or in the next (Liu et al. 2024, arXiv:2401.09135, let contributions come late in a
    similar way, through a server).

    A rank may miss merges. It then sends zeros for them in advance, together with its own contribution, so that no
    other rank waits for it. A missed merge moves x as far as z, so that the rank keeps its progress:

        x' = z' + (x - z)

    If no contributing rank had a sample (for instance a rank without one in a short last batch, when all others miss
    the merge), all weights are 0 and z stays. The contributors then keep their part of the global batches
    (`LocalWork.batches`), and the next merge moves z that much further. Nothing is kept of progress that a rank
    gave up because it was not finite: as with a synchronous step that is left out, its batches move z in no later
    merge.

    Args:
        index: number of this fragment in `store`.
        lanes: the merges use them in turn, in the same order on all ranks. They may share one buffer.
        spare: makes the lane of a given number anew, with a buffer of its own. Needed before this rank misses its first
            merge, as it then sends to several merges at once.
        outer: the outer optimizer, which moves z.
        compensation: lambda of `outer.compensated`; 0 for none.

    Attributes:
        work: local steps since the last contribution.
        z: the fragment after the last merge, flat; None before `begin`.
        outer_state: state of the outer optimizer, the same on all ranks.
        sends: number of contributions sent, including zeros for missed merges.
    """

    index: int
    store: Store
    lanes: list[Lane]
    outer: Outer
    compensation: float = 0.0
    spare: Callable[[int], Lane] | None = None
    work: LocalWork = field(default_factory=LocalWork)
    z: Any = None
    outer_state: dict[str, Any] = field(default_factory=dict)
    sends: int = 0
    _turn: int = field(default=0, init=False)  # the lane of the next contribution
    # Arrays as long as the fragment, to be reused: new memory costs page faults.
    _free: list[Any] = field(default_factory=list, init=False)
    # For each merge under way, oldest first: its lane, x when it was sent (None if this rank misses it), and the work.
    _pending: deque[tuple[Lane, Any, LocalWork]] = field(default_factory=deque, init=False)

    @property
    def under_way(self) -> bool:
        """Whether this rank has sent to a merge that it has not applied yet."""
        return bool(self._pending)

    def done(self) -> bool:
        """Whether the oldest merge under way can be applied without waiting, or no merge is under way."""
        return not self._pending or self._pending[0][0].exchange.done()

    @property
    def merges(self) -> int:
        """The number of merges that have been applied."""
        return self.sends - len(self._pending)

    @property
    def operation(self) -> str:
        """The name of the engine's operation in the oldest merge under way."""
        return self._pending[0][0].exchange.operation

    @property
    def most_missed(self) -> int:
        """The number of merges in a row that a rank may miss."""
        return len(self.lanes) - 1

    def begin(self) -> None:
        """Starts a phase of local steps: z becomes this rank's parameters, which are the same on all ranks.

        Merges that are still under way, as after a failure, are forgotten.
        """
        before, self.work = self.work, LocalWork()
        if before.steps == 0:
            self.work.carry_reach(before)
        self.z, self._turn = self.store.read(self.index, self.z), 0
        self._free += [sent for _, sent, _ in self._pending if sent is not None]
        self._pending.clear()

    def _read(self) -> Any:
        """Returns a flat copy of this rank's parameters, in a reused array if there is one."""
        return self.store.read(self.index, self._free.pop() if self._free else None)

    def _copied(self, flat: Any) -> Any:
        """Returns a copy of `flat`, in a reused array if there is one."""
        if not self._free:
            return verbs_of(flat).copied(flat)
        copy = self._free.pop()
        copy[:] = flat
        return copy

    def _submit(self, lane: Lane, sent: Any, work: LocalWork) -> None:
        self._turn = (self._turn + 1) % len(self.lanes)
        self._pending.append((lane, sent, work))
        self.sends += 1
        lane.exchange.submit(0)

    def send(self, weigh: Callable[[LocalWork, float], Contribution]) -> bool:
        """Contributes the progress Delta = x - z of all local steps since the last contribution.

        Args:
            weigh: returns the weight of the contribution, given the work and |Delta|^2.

        Returns:
            False if Delta is not finite. It is then given up: this rank sends zeros, and trains on from z.
        """
        own, lane = self._read(), self.lanes[self._turn]
        delta, verbs = lane.buffer[: len(own)], verbs_of(own)
        verbs.difference_into(delta, own, self.z)
        square = verbs.squares(delta)
        contribution = weigh(self.work, square)
        if finite := math.isfinite(square):
            if contribution.delta_factor != 1.0:
                delta *= contribution.delta_factor
        else:
            delta[:] = 0.0
            own[:] = self.z
            self.store.write(self.index, own)
        done, self.work = self.work, LocalWork()
        self._submit(lane, own, done if finite else LocalWork())  # no later merge makes up for what is given up
        return finite

    def miss(self) -> None:
        """Sends zeros to the merge after those under way, so that no rank waits for this one in it."""
        if self.spare is not None:  # the lane used last keeps the shared buffer, the others get one each
            last = (self._turn - 1) % len(self.lanes)
            self.lanes = [lane if number == last else self.spare(number) for number, lane in enumerate(self.lanes)]
            self.spare = None
        lane = self.lanes[self._turn]
        lane.buffer[:] = 0.0
        self._submit(lane, None, LocalWork())

    def merge(self) -> Merge:
        """Applies the oldest merge under way, after waiting for ranks that have not sent to it yet."""
        lane, sent, work = self._pending[0]
        results, total = lane.exchange.finish(merge_control.scale)
        self._pending.popleft()
        factor, square, mean = merge_control.scale(total), 0.0, results[0][: len(self.z)]
        before = sent
        if self.work.steps and sent is None:
            before = self._copied(self.z)  # as z is about to move
        if factor > 0.0:
            square = verbs_of(mean).squares(mean)
            self.outer.move(self.z, mean, self.outer_state)
        else:
            self.work.carry_reach(work)
        if self.work.steps:
            self._carry_over(before)
        else:
            self.store.write(self.index, self.z)
        if before is not None:
            self._free.append(before)
        return Merge(total=total, square=square, carried=self.work)

    def _carry_over(self, before: Any) -> None:
        """Sets this rank's parameters to z + (x - `before`), with z after the merge. Overwrites `before`.

        `before` is x when it was sent, or z before a merge that this rank misses. With `compensation`, x - `before` is
        first corrected for the distance from `before` to z.
        """
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
