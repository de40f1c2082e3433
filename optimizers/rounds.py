"""Local SGD in overlapped rounds: ranks train by themselves, and nobody waits for a merge.

At its own boundary, every `round_steps` global batches, a rank sends what it has done since the last time, weighted
as `policy.staleness` says, in an all-reduce that it does not wait for, and goes on training. When the last rank has
sent, the merge ends everywhere: see `Fragment`. So a rank that stalls holds up the merge and no rank; only one that
has gone on for `bound_rounds` rounds since it sent does wait. A rank whose single step takes several rounds of the
others says in advance that it contributes nothing to the next merges, and holds up none of them (`policy.ladder`).
With the bound at 0 ranks wait for every merge, and with rounds of one step as well that is synchronous training (for
SGD; Adam's steps are not linear in the gradient).

Sums need every rank, so the last rounds take all ranks, too: `finish` repeats empty merges until every rank has said
that it is finishing, and then all hold one model, in which every step of every rank has counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_hetero.codecs.verbs import arrays_like
from hvd_hetero.policy.staleness import step_part

from . import control, merge_control
from .balancer import Balancer
from .contributing import Contributing
from .fragment import Fragment, Lane, Store, Work
from .length import RoundLengths
from .local_sgd import LocalSGD

Lanes = tuple[Sequence[Lane], Callable[[int], Lane] | None]  # of a fragment, and what gives one a buffer of its own


class Rounds:
    """The rounds of one rank, over all fragments.

    Args:
        rule: the strategy.
        balancer: deals the batches; its measurements and plans travel with fragment 0 of one optimizer.
        store: this rank's parameters.
        lanes: of each fragment, see `Fragment`; as many merges in a row as there are further lanes can be missed. The
            control vector is of `merge_control.length(ranks)`. A function makes them, given what `outgoing` calls.
        part: of all data, this rank's own shard; for "fednova".
        batches: how many global batches an update takes.
        on_merge: is told of each merge of fragment 0.
    """

    def __init__(
        self,
        rule: LocalSGD,
        *,
        balancer: Balancer,
        store: Store,
        lanes: Callable[[Callable[[int], list[float]]], Sequence[Lanes]],
        part: float | None = None,
        batches: Callable[[], int] = lambda: 1,
        on_merge: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.rule, self.balancer = rule, balancer
        self.rank, self.size = balancer.rank, balancer.size
        self._batches, self._on_merge = batches, on_merge
        self.merges = 0  # of fragment 0
        self.waits = 0  # times that this rank had to wait
        self._stepped = self._heard = 0  # in this phase
        self._given_way = (-1, -1)  # the merge that it has not waited for, as others wait for this rank
        self._finishing = False
        self._ended: set[int] = set()  # fragments whose last merge came while all ranks were finishing
        self._contributing = Contributing(
            rule, balancer, part=part, leads=lambda: self._leads, most_ahead=lambda: self.most_ahead
        )
        self.fragments = [
            Fragment(index=index, store=store, lanes=list(own), spare=spare, outer=rule.outer,
                     compensation=rule.compensation)
            for index, (own, spare) in enumerate(lanes(self._outgoing))
        ]
        # Merges are missed only where that can do no harm: who waits for every merge has to be in it; ranks that miss
        # merges of several fragments could wait for each other's; and with shards of their own, those of ranks that
        # miss merges would count for less, which is what FedNova is there to prevent.
        harmless = rule.most_rounds > 0 and len(self.fragments) == 1 and rule.weights == "samples"
        self.lengths = RoundLengths(rule, self.size, most_missed=self.fragments[0].most_missed if harmless else 0)

    # A phase of local steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first local step: this rank's parameters, the same on all ranks, are the model."""
        self.balancer.strategies.begins(self)
        for fragment in self.fragments:
            fragment.begin()
        self._contributing.begin()
        self._stepped = 0
        self._heard = self.balancer.step - self._batches()  # the last batch that the model of all ranks has seen

    @property
    def round_steps(self) -> int:
        """Local steps of this rank between two contributions."""
        return self.lengths.by_rank[self.rank]

    @property
    def pace(self) -> float:
        """The part of its updates that this rank makes, see `policy.staleness`."""
        return step_part(self.balancer.plan.shares[self.rank], self.balancer.global_batch_size, self.size)

    @property
    def most_ahead(self) -> int:
        """Batches that a rank may begin after it has contributed and before it has to see the merge."""
        return max(1, math.ceil(self.rule.most_rounds * self.rule.round_steps)) * self._batches()

    def after_step(
        self, samples: float, *, lr: float = 1.0, compute: tuple[float, float] = (0.0, 0.0), gradients: float = 1.0
    ) -> bool:
        """Ends a local step over `samples`; sends what is due and takes in the merges that came. True if one came.

        Args:
            lr: the step's learning rate; 1 where there is none, on all ranks.
            compute: samples and seconds of this step, as measured; a zero for not measured.
            gradients: see `Work`.
        """
        self._stepped += 1
        self._contributing.measured(*compute)
        for fragment in self.fragments:
            fragment.work.add(samples, lr, self.part_of_batch(samples), gradients)
        came = self._serve(self._due)
        late = [fragment for fragment in self.fragments if self._at_bound(fragment)]
        self.waits += any(not fragment.done() for fragment in late)
        while late := [fragment for fragment in self.fragments if self._at_bound(fragment)]:
            merge = late[0].index, late[0].merges
            if merge == self._given_way or not self._wait_for_merge(late[0].operation):
                # Whoever waits for this rank, until it comes, may be the one whose contribution it waits for.
                self._given_way = merge
                self.balancer.dialogue.horizon.lift()
                break
            came |= self._serve(self._due)
        return came

    def part_of_batch(self, samples: float) -> float:
        """Which part of the global batch begun last was to be this rank's; a script may not keep to the plan."""
        return (self.balancer.plan.shares[self.rank] or samples) / self.balancer.global_batch_size

    def _wait_for_merge(self, name: str) -> bool:
        """Waits until one of the merges under way comes; False where another rank waits for this one elsewhere, as in a
        validation that all ranks make together."""
        return self.balancer.engine.wait_unless_awaited(self._one_came(), name=name)

    def _one_came(self) -> Callable[[], bool]:
        under_way = [fragment for fragment in self.fragments if fragment.under_way]
        return lambda: any(fragment.done() for fragment in under_way)

    def _serve(self, due: Callable[[Fragment], bool]) -> bool:
        """Takes in the merges that came and sends what is due. True if one came."""
        came = False
        for fragment in self.fragments:
            while fragment.under_way and fragment.done():
                self._merge(fragment)
                came = True
            if not fragment.under_way and due(fragment):
                self._send(fragment)
        return came

    def _take_next(self) -> None:
        """Takes in at least one of the merges under way, whichever comes: ranks may wait for different ones."""
        if len(self.fragments) == 1:
            self._merge(self.fragments[0])
            return
        while not self._serve(lambda fragment: False):
            # Who waits for this rank in a merge of another optimizer has to see that it waits itself, and to go on.
            first = next(fragment.operation for fragment in self.fragments if fragment.under_way)
            self.balancer.engine.wait_for(self._one_came(), name=first)

    def _at_bound(self, fragment: Fragment) -> bool:
        return fragment.under_way and fragment.work.steps >= self.rule.most_rounds * self.round_steps

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
                    self._take_next()
            if self._leads:
                self.balancer.departure.heard_by_all()
        finally:
            self.balancer.strategies.ends(self)
            self._finishing = False
            self._stepped = 0

    # One contribution and one merge ---------------------------------------------------------------------------------

    def _send(self, fragment: Fragment) -> None:
        if not fragment.send(self._contributing.weigh):
            given_up = self._contributing.steps
            self._on_merge({"fragment": fragment.index, "dropped_steps": given_up, "why": "not finite"})
        with self._contributing.missing():
            for _ in range(self._missed):
                fragment.miss()

    @property
    def _missed(self) -> int:
        """The number of merges that this rank will miss after the one that it contributes to."""
        return 0 if self._finishing else self.lengths.intervals[self.rank] - 1

    @property
    def unit(self) -> float:
        """See `Contributing`."""
        return self._contributing.unit

    @property
    def weight(self) -> float:
        """See `Contributing`."""
        return self._contributing.weight

    def _outgoing(self, index: int) -> list[float]:
        """The control vector of fragment `index`, right before it is sent."""
        return self._contributing.outgoing(index, finishing=self._finishing, answers=1 + self._missed)

    @property
    def _leads(self) -> bool:
        """Whether measurements and plans travel with these merges, and not with another optimizer's."""
        return self.balancer.strategies.leads(self)

    def _merge(self, fragment: Fragment) -> None:
        merge = fragment.merge(merge_control.scale)
        said = merge_control.unpack(merge.total, ranks=self.size)
        report = control.unpack(said.balancer, ranks=self.size)
        if said.finishing == self.size:
            self._ended.add(fragment.index)
        if report.failed:
            self.balancer.departure.final = True  # it makes no further merge
        if fragment.index == 0:
            self.merges += 1
            drift, noise = self.lengths.watch(said.sums, merge.square, said.steps, said.samples)
            at = int(max(said.positions))
            self.lengths.hear(self.balancer.planner.steadiness.alone_s(report.busy_s))
            self.balancer.ladder.hear_intervals(self.lengths.intervals, self.lengths.reason)
            leads = self._leads
            if leads:
                self.balancer.dialogue.staleness = merge.carried.steps / self.rule.round_steps
            self._on_merge({
                "merge": self.merges, "step": self.balancer.step, "behind": at - self.balancer.step,
                "samples": sum(said.samples), "carried_steps": merge.carried.steps, "waits": self.waits,
                "round_steps": self.round_steps, "drift": drift, "noise": noise,
            })
            steps = (at - self._heard) // self._batches()
            self._heard += steps * self._batches()
            self.balancer.dialogue.incoming(said.balancer, leads=leads, step=at, ahead=self.most_ahead, steps=steps)
        else:
            self.balancer.dialogue.hear_failed(report)

    # The end --------------------------------------------------------------------------------------------------------

    def withdraw(self) -> Callable[[], bool]:
        """Takes part with nothing from now on, without waiting; tells whether all have heard of it.

        The merges under way know nothing yet of this rank's failure: the next ones do, of whichever fragment the others
        wait for.
        """
        told: set[int] = set()

        def over() -> bool:
            heard = False
            for fragment in self.fragments:
                while fragment.under_way and fragment.done():
                    fragment.merge(merge_control.scale)
                if fragment.under_way:
                    continue
                if fragment.index in told:
                    heard = True
                else:
                    fragment.work = Work()
                    fragment.send(self._contributing.weigh)
                    told.add(fragment.index)
            return heard

        over()
        return over

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The outer momentum after the last merge, the same on all ranks, and the length of rounds. Parameters are the
        script's to save, after a `finish`."""
        return {
            "merges": self.merges,
            "round_steps": self.lengths.longest,
            "outer": [dict(fragment.outer_state) for fragment in self.fragments],
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """See `Strategy`."""
        lengths = [len(fragment.store.read(fragment.index)) for fragment in self.fragments]
        kept = [{len(array) for array in outer.values()} for outer in state["outer"]]
        return len(kept) == len(lengths) and all(has <= {mine} for has, mine in zip(kept, lengths, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; the parameters are those that the rank has then."""
        if len(state["outer"]) != len(self.fragments):
            raise ValueError(
                f"fragments: expected the state of {len(self.fragments)}. Received: one of {len(state['outer'])}."
            )
        for fragment, saved in zip(self.fragments, state["outer"], strict=True):
            self.rule.outer.check_state(saved)
            fragment.outer_state = arrays_like(fragment.lanes[0].buffer, saved)
            fragment.work = Work()  # what is owed is of what was done since
        self.merges = int(state["merges"])
        self.lengths.resume(int(state["round_steps"]))

    def restart(self) -> None:
        """Keeps nothing of the merges so far."""
        for fragment in self.fragments:
            fragment.outer_state, fragment.work = {}, Work()
        self.merges = 0
        self.lengths.resume(self.rule.round_steps)
