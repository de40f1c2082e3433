"""Local SGD in overlapped rounds: ranks train by themselves, and nobody waits for a merge.

At its own boundary, every `round_steps` global batches, a rank sends what it has done since the last time (its progress
times its samples) in an all-reduce that it does not wait for, and goes on training. When the last rank has sent, the
merge ends everywhere: see `Fragment`. So a rank that stalls holds up the merge and no rank; only one that has gone on
for `bound_rounds` rounds since it sent does wait. With the bound at 0 ranks wait for every merge, and with rounds of
one step as well that is synchronous training (for SGD; Adam's steps are not linear in the gradient).

Sums need every rank, so the last rounds take all ranks, too: `finish` repeats empty merges until every rank has said
that it is finishing, and then all hold one model, in which every step of every rank has counted once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_hetero.policy.staleness import Contribution, by_samples, by_shard, factor

from . import control
from .attachment import PeerError
from .balancer import Balancer
from .fragment import Fragment, Store, Work
from .length import RoundLengths
from .local_sgd import LocalSGD
from .weighted import WeightedExchange

# Places in the control vector of a fragment. Behind them each rank's steps, samples and position, and what the balancer
# has to say.
WEIGHT, NORMAL, SPREAD, FINISHING, HEAD = range(5)
POLL_S = 1e-3  # between two looks at several merges; a single one is waited for without
NOTHING = Contribution(weight=0.0)


def control_length(ranks: int) -> int:
    """The number of elements of a fragment's control vector."""
    return HEAD + 3 * ranks + control.length(ranks)


class Rounds:
    """The rounds of one rank, over all fragments.

    Args:
        rule: the strategy.
        balancer: deals the batches; its measurements and plans travel with fragment 0.
        store: this rank's parameters.
        exchanges: for each fragment its exchange of one bucket, and that bucket; the control vector is of
            `control_length(ranks)`. Made by a function, which is given what `outgoing` calls.
        part: of all data, this rank's own shard; for "fednova".
        on_merge: is told of each merge of fragment 0.
    """

    def __init__(
        self,
        rule: LocalSGD,
        *,
        balancer: Balancer,
        store: Store,
        exchanges: Callable[[Callable[[int], list[float]]], Sequence[tuple[WeightedExchange, Any]]],
        part: float | None = None,
        on_merge: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.rule, self.balancer = rule, balancer
        self.rank, self.size = balancer.rank, balancer.size
        self._part = 1.0 / self.size if part is None else part
        self._on_merge = on_merge
        self.lengths = RoundLengths(rule, self.size)
        self.merges = 0  # of fragment 0
        self.waits = 0  # times that this rank had to wait
        self._stepped = 0  # in this phase
        self._finishing = False
        self._ended: set[int] = set()  # fragments whose last merge came while all ranks were finishing
        self._recent: list[tuple[float, float]] = []
        self._sending: tuple[Contribution, Work, float] = (NOTHING, Work(), 0.0)
        self.fragments = [
            Fragment(index=index, store=store, exchange=exchange, buffer=buffer, outer=rule.outer,
                     compensation=rule.compensation)
            for index, (exchange, buffer) in enumerate(exchanges(self._outgoing))
        ]

    # A phase of local steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first local step: this rank's parameters, the same on all ranks, are the model."""
        for fragment in self.fragments:
            fragment.begin()
        self._stepped = 0

    @property
    def round_steps(self) -> int:
        """Local steps of this rank between two contributions."""
        return self.lengths.by_rank[self.rank]

    @property
    def most_ahead(self) -> int:
        """Batches that a rank may begin after it has contributed and before it has to see the merge."""
        return max(1, math.ceil(self.rule.bound_rounds * self.rule.round_steps))

    def after_step(self, samples: float, *, lr: float = 0.0, compute: tuple[float, float] = (0.0, 0.0)) -> bool:
        """Ends a local step over `samples`; sends what is due and takes in the merges that came. True if one came.

        Args:
            lr: the step's learning rate.
            compute: samples and seconds of this step, as measured; zeros for not measured.
        """
        self._stepped += 1
        if compute[0] > 0:
            self._recent.append(compute)
        for fragment in self.fragments:
            fragment.work.add(samples, lr)
        came = self._serve(self._due)
        late = [fragment for fragment in self.fragments if self._at_bound(fragment)]
        self.waits += any(not fragment.exchange.done() for fragment in late)
        while any(map(self._at_bound, self.fragments)):
            came |= self._serve(self._due, wait=True)
        return came

    def _serve(self, due: Callable[[Fragment], bool], *, wait: bool = False) -> bool:
        """Takes in the merges that came and sends what is due. True if one came; with `wait`, one comes.

        Whoever waits goes on serving all fragments: ranks may wait for different ones.
        """
        came = False
        while True:
            for fragment in self.fragments:
                if fragment.under_way and (fragment.exchange.done() or (wait and len(self.fragments) == 1)):
                    self._merge(fragment)
                    came = True
                if not fragment.under_way and due(fragment):
                    self._send(fragment)
            if came or not wait:
                return came
            time.sleep(POLL_S)

    def _at_bound(self, fragment: Fragment) -> bool:
        return fragment.under_way and fragment.work.steps >= self.rule.bound_rounds * self.round_steps

    def _due(self, fragment: Fragment) -> bool:
        # The first boundaries are spread over the round, so that fragments merge in turn.
        first = max(1, self.round_steps * (fragment.index + 1) // len(self.fragments))
        return fragment.work.steps >= (first if fragment.work.steps == self._stepped else self.round_steps)

    def finish(self) -> None:
        """Merges until all ranks have finished; then all hold one model. Every rank must call it."""
        self._finishing, self._ended = True, set()
        try:
            while len(self._ended) < len(self.fragments):
                self._serve(lambda fragment: fragment.index not in self._ended)
                if len(self._ended) < len(self.fragments):
                    self._serve(lambda fragment: False, wait=True)
        finally:
            self._finishing = False
            self._stepped = 0

    # One contribution and one merge ---------------------------------------------------------------------------------

    def _send(self, fragment: Fragment) -> None:
        if not fragment.send(self._weigh):
            self._on_merge({"fragment": fragment.index, "dropped_steps": fragment.work.steps, "why": "not finite"})

    def _weigh(self, work: Work, square: float) -> Contribution:
        """What this rank's progress counts; samples in units of a usual contribution, for narrow wires."""
        chosen = NOTHING
        if work.steps and math.isfinite(square):
            if self.rule.weights == "fednova":
                chosen = by_shard(self._part, work.lr_sum or float(work.steps))
            else:
                usual = self.balancer.global_batch_size * self.rule.round_steps / self.size
                chosen = by_samples(work.samples / usual)
        self._sending = (chosen, work, chosen.spread(square) if chosen.weight else 0.0)
        return chosen

    def _outgoing(self, index: int) -> list[float]:
        """The control vector of fragment `index`, right before it is sent."""
        (contribution, work, spread), leads = self._sending, index == 0
        vector = [*contribution.beside, spread, float(self._finishing)]
        for value in (work.steps, work.samples, self.balancer.step):
            row = [0.0] * self.size
            row[self.rank] = float(value)
            vector += row
        if leads and self._recent:
            # The median: a stall is no property of the share.
            samples, seconds = sorted(self._recent, key=lambda each: each[1] / each[0])[len(self._recent) // 2]
            self.balancer.timesheet.reported, self._recent = (samples, seconds), []
        return vector + self.balancer.outgoing(leads=leads, count=work.samples, ahead=self.most_ahead)

    def _merge(self, fragment: Fragment) -> None:
        merge = fragment.merge(_scale)
        total, n = merge.total, self.size
        steps, samples, positions = (total[HEAD + i * n : HEAD + (i + 1) * n] for i in range(3))
        if round(total[FINISHING]) == n:
            self._ended.add(fragment.index)
        if fragment.index == 0:
            self.merges += 1
            drift, noise = self.lengths.watch(total[WEIGHT:FINISHING], merge.mean_square, steps, samples)
            at = int(max(positions))
            report = control.unpack(total[HEAD + 3 * n :], ranks=n)
            self.lengths.hear(self.balancer.planner.steadiness.alone_s(report.compute_s))
            self.balancer.staleness = merge.carried.steps / self.rule.round_steps
            self._on_merge({
                "merge": self.merges, "step": self.balancer.step, "behind": at - self.balancer.step,
                "samples": sum(samples), "carried_steps": merge.carried.steps, "waits": self.waits,
                "round_steps": self.round_steps, "drift": drift, "noise": noise,
            })
            self.balancer.incoming(total[HEAD + 3 * n :], leads=True, step=at, ahead=self.most_ahead)
        elif failed := control.unpack(total[HEAD + 3 * n :], ranks=n).failed:
            raise PeerError(f"Expected every rank to go on. Received: rank {failed[0]} could not.")

    # The end --------------------------------------------------------------------------------------------------------

    def withdraw(self) -> Callable[[], bool]:
        """Takes part with nothing from now on, without waiting; tells whether all have heard of it.

        The merge under way knows nothing yet of this rank's failure: the next one does.
        """
        fragment, told = self.fragments[0], [False]

        def over() -> bool:
            if fragment.under_way:
                if not fragment.exchange.done():
                    return False
                fragment.merge(_scale)
                if told[0]:
                    return True
            fragment.work = Work()
            fragment.send(self._weigh)
            told[0] = True
            return False

        over()
        return over

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Outer momentum and the length of rounds. Parameters are the script's to save, after a `finish`."""
        if any(fragment.under_way for fragment in self.fragments):
            raise RuntimeError(
                "Expected a state between rounds. Received: a call while a merge is under way. Call "
                "optimizer.merge() on all ranks first."
            )
        return {
            "merges": self.merges,
            "round_steps": self.lengths.longest,
            "outer": [dict(fragment.outer_state) for fragment in self.fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; the parameters are those that the rank has then."""
        if len(state["outer"]) != len(self.fragments):
            raise ValueError(
                f"fragments: expected the state of {len(self.fragments)}. Received: one of {len(state['outer'])}."
            )
        for fragment, saved in zip(self.fragments, state["outer"], strict=True):
            self.rule.outer.check_state(saved)
            fragment.outer_state = dict(saved)
        self.merges = int(state["merges"])
        self.lengths.resume(int(state["round_steps"]))


def _scale(total: Sequence[float]) -> float:
    """What turns the sum of weighted deltas into the merged one."""
    return factor(total[WEIGHT : NORMAL + 1])
