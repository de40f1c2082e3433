"""Local SGD in overlapped rounds: ranks make local steps, and go on training while their models are merged.

Every `round_steps` local steps, at the end of its own round, a rank sends its contribution: the change of its
parameters since its last one, weighted as `policy.local_round` says. This is an all-reduce that the rank does not wait
for. It completes on all ranks when the last rank has sent its contribution: see `Fragment` for the merge that follows.
So a rank that stalls delays the merge, but no other rank, unless one has gone on for `bound_rounds` rounds since it
sent its contribution: that one waits. A rank whose single step takes as long as several rounds of the others announces
in advance that it contributes nothing to the next merges, and delays none of them (`policy.ladder`). With a bound of 0
ranks wait for every merge; with rounds of one step as well, this is synchronous training (for SGD; Adam's steps are not
linear in the gradient).

An all-reduce needs every rank, also at the end: `Rounds.finish` repeats merges, to which ranks may have nothing left to
contribute, until every rank has said that it is finishing. Then all ranks hold one model, in which every step of every
rank has counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_hetero.codecs.verbs import arrays_like
from hvd_hetero.policy.local_round import update_fraction

from . import merge_control
from .balancer import Balancer
from .fragment import Fragment, Lane, LocalWork
from .local_sgd import LocalSGD
from .merge_sender import MergeSender
from .parameter_store import Store
from .round_length import RoundLengths

# The lanes of a fragment, and a function that makes the lane of a number with a buffer of its own: see `Fragment`.
Lanes = tuple[Sequence[Lane], Callable[[int], Lane] | None]


class Rounds:
    """The rounds of one optimizer on one rank: sends contributions, and applies merges. `LocalSteps` drives it.

    The model is cut into fragments, which merge in turn, each with all-reduces of its own.

    Args:
        rule: the numbers of the local strategy.
        balancer: deals the batches; its measurements and plans travel with the merges of fragment 0 of one optimizer.
        store: this rank's parameters, by fragment.
        lanes: returns the lanes of each fragment (see `Fragment`), the exchanges that its merges use in turn. It is
            passed a function that returns the control vector of a fragment, of `merge_control.length(ranks)` elements,
            which the exchanges call as they send. With k lanes, a rank can miss k - 1 merges in a row.
        batches: returns the number of global batches per update.
        on_merge: is called with the fields of each merge of fragment 0, and of each contribution that was given up,
            for the trace.

    Attributes:
        merges: the number of merges of fragment 0 that this rank has applied.
        waits: how many times this rank had to wait for a merge.
        lengths: the length of each rank's rounds, and in which merges it takes part.
        merge_sender: weighs what this rank contributes.
    """

    def __init__(
        self,
        rule: LocalSGD,
        *,
        balancer: Balancer,
        store: Store,
        lanes: Callable[[Callable[[int], list[float]]], Sequence[Lanes]],
        batches: Callable[[], int] = lambda: 1,
        on_merge: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.rule, self.balancer = rule, balancer
        self.rank, self.size = balancer.rank, balancer.size
        self._batches, self._on_merge = batches, on_merge
        self.merges = 0
        self.waits = 0
        self._stepped = self._heard = 0  # local steps since `begin`; the last global batch that merges have reached
        self._given_way = (-1, -1)  # fragment and number of a merge not waited for, as other ranks wait for this one
        self._finishing = False
        self._ended: set[int] = set()  # fragments whose last merge came when all ranks were finishing
        self.merge_sender = MergeSender(rule, balancer, leads=lambda: self._leads, most_ahead=lambda: self.most_ahead)
        self.fragments = [
            Fragment(index=index, store=store, lanes=list(own), spare=spare, outer=rule.outer,
                     compensation=rule.compensation)
            for index, (own, spare) in enumerate(lanes(self._outgoing))
        ]
        # A rank may miss merges only where that does no harm. With a bound of 0 ranks wait for every merge, so every
        # rank has to be in it. With several fragments, ranks that miss merges of different ones could wait for each
        # other. With FedNova, the shards of ranks that miss merges would count for less, which it is to prevent.
        harmless = rule.most_rounds > 0 and len(self.fragments) == 1 and rule.weights == "samples"
        self.lengths = RoundLengths(rule, self.size, most_missed=self.fragments[0].most_missed if harmless else 0)

    # A phase of local steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Is called before the first local step of a phase, when all ranks hold the same parameters: this is the model
        that the first merge moves."""
        self.balancer.strategies.begins(self)
        for fragment in self.fragments:
            fragment.begin()
        self.merge_sender.begin()
        self._stepped = 0
        self._heard = self.balancer.step - self._batches()

    @property
    def round_steps(self) -> int:
        """The number of local steps between two contributions of this rank."""
        return self.lengths.by_rank[self.rank]

    @property
    def update_fraction(self) -> float:
        """The factor, at most 1, for each update of this rank: below 1 if its share is below the mean of all ranks. See
        "Small batches" in `policy.local_round`."""
        return update_fraction(self.balancer.plan.shares[self.rank], self.balancer.global_batch_size, self.size)

    @property
    def most_ahead(self) -> int:
        """The number of global batches that a rank may begin after it has contributed to a merge and before it has
        applied it."""
        return max(1, math.ceil(self.rule.most_rounds * self.rule.round_steps)) * self._batches()

    def after_step(
        self, samples: float, *, lr: float = 1.0, compute: tuple[float, float] = (0.0, 0.0), gradients: float = 1.0
    ) -> None:
        """Ends a local step: applies the merges that have come, and sends the contributions that are due. Waits for a
        merge if this rank has gone on without it for the bound of the strategy.

        Args:
            samples: of this rank in the step; 0 if it had none.
            lr: the step's learning rate; 1 on all ranks where there is no rate.
            compute: samples and seconds of this step, as measured; a zero for not measured.
            gradients: how many gradients the step counts as: see `LocalWork`.
        """
        self._stepped += 1
        self.merge_sender.measured(*compute)
        for fragment in self.fragments:
            fragment.work.add(samples, lr, self.part_of_batch(samples), gradients, self._part_of_all(samples))
        self._serve(self._due)
        late = [fragment for fragment in self.fragments if self._at_bound(fragment)]
        self.waits += any(not fragment.done() for fragment in late)
        while late := [fragment for fragment in self.fragments if self._at_bound(fragment)]:
            merge = late[0].index, late[0].merges
            if merge == self._given_way or not self._wait_for_merge(late[0].operation):
                # Another rank waits for this one elsewhere, and may be the one whose contribution this one waits for.
                self._given_way = merge
                self.balancer.dialogue.horizon.lift()
                break
            self._serve(self._due)

    def part_of_batch(self, samples: float) -> float:
        """The part of a global batch that is this rank's, by the plans: a script may not keep to them. The mean over
        the global batches of the update that the last one ends, between which the plan may change. For a rank without a
        share in any of them, `samples`, those of the whole update, count in its place."""
        batches, last = self._batches(), self.balancer.step
        planned = sum(self.balancer.plan_at(last - before).shares[self.rank] for before in range(batches))
        return (planned or samples) / (batches * self.balancer.global_batch_size)

    def _part_of_all(self, samples: float) -> float | None:
        """What a step over `samples` loss terms adds to `LocalWork.of_all`. None: it is not known how many samples
        all ranks have in its batch, or there are several."""
        progress = self.balancer.progress
        if progress.whole is None or self._batches() > 1:
            return None
        per_sample = samples / progress.samples if progress.samples else 1.0
        return per_sample * progress.whole * self.part_of_batch(samples)

    def _wait_for_merge(self, name: str) -> bool:
        """Waits until one of the merges under way has come. Returns False, and waits no longer, if another rank waits
        for this one elsewhere, as in a validation that all ranks make together.

        Args:
            name: of the operation that this rank waits for, as other ranks are told.
        """
        return self.balancer.engine.wait_avoiding_deadlock(self._one_came(), name=name)

    def _one_came(self) -> Callable[[], bool]:
        under_way = [fragment for fragment in self.fragments if fragment.under_way]
        return lambda: any(fragment.done() for fragment in under_way)

    def _serve(self, due: Callable[[Fragment], bool]) -> bool:
        """Applies the merges that have come, and sends the contributions of those fragments that are `due` and have no
        merge under way. Returns whether a merge was applied."""
        came = False
        for fragment in self.fragments:
            while fragment.under_way and fragment.done():
                self._merge(fragment)
                came = True
            if not fragment.under_way and due(fragment):
                self._send(fragment)
        return came

    def _take_next(self) -> None:
        """Waits for, and applies, at least one of the merges under way. With several fragments that is whichever comes
        first, as ranks may wait for different ones."""
        if len(self.fragments) == 1:
            self._merge(self.fragments[0])
            return
        while not self._serve(lambda fragment: False):
            # Says that this rank waits: another that waits for it, in a merge of another optimizer, must go on then.
            first = next(fragment.operation for fragment in self.fragments if fragment.under_way)
            self.balancer.engine.wait_for(self._one_came(), name=first)

    def _at_bound(self, fragment: Fragment) -> bool:
        """Whether this rank may go on no longer without the merge of `fragment` that is under way."""
        return fragment.under_way and fragment.work.steps >= self.rule.most_rounds * self.round_steps

    def _due(self, fragment: Fragment) -> bool:
        """Whether this rank has completed a round of `fragment`, and is to send its contribution."""
        # The first rounds of fragments have different lengths, so that fragments merge in turn.
        first = self.round_steps * (fragment.index + 1) // len(self.fragments)
        return fragment.work.steps >= (first if fragment.work.steps == self._stepped else self.round_steps)

    def finish(self) -> None:
        """Ends a phase of local steps: merges until all ranks are finishing, and then all hold one model. A collective
        call."""
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

    # One contribution and one merge ---------------------------------------------------------------------------------

    def _send(self, fragment: Fragment) -> None:
        """Sends a contribution of this rank, and nothing to those next merges that it will miss."""
        if not fragment.send(self.merge_sender.weigh):
            given_up = self.merge_sender.steps
            self._on_merge({"fragment": fragment.index, "dropped_steps": given_up, "why": "not finite"})
        with self.merge_sender.missing():
            for _ in range(self._missed):
                fragment.miss()

    @property
    def _missed(self) -> int:
        """The number of merges that this rank will miss after the one to which it contributes now."""
        return 0 if self._finishing else self.lengths.intervals[self.rank] - 1

    def _outgoing(self, index: int) -> list[float]:
        """The control vector for a contribution of fragment `index`. The exchange calls it as it sends."""
        return self.merge_sender.outgoing(index, finishing=self._finishing, answers=1 + self._missed)

    @property
    def _leads(self) -> bool:
        """Whether the balancer's measurements and plans travel with these merges, and not with another optimizer's."""
        return self.balancer.strategies.leads(self)

    def _merge(self, fragment: Fragment) -> None:
        """Applies the oldest merge under way of `fragment`, waiting for it if it has not come, and takes in what ranks
        said with it."""
        merge = fragment.merge()
        said = merge_control.unpack(merge.total, ranks=self.size)
        if said.finishing == self.size:
            self._ended.add(fragment.index)
        if said.control.failed:
            self.balancer.departure.final = True  # a rank has failed, so this one can make no further merge
        if fragment.index == 0:
            self.merges += 1
            drift, noise = self.lengths.watch(said.sums, merge.square, said.steps, said.samples)
            at = int(max(said.positions))
            self.lengths.hear(self.balancer.planner.steadiness.alone_s(said.control.busy_s))
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
            self.balancer.dialogue.incoming(said.control, leads=leads, step=at, ahead=self.most_ahead, steps=steps)
        else:
            self.balancer.dialogue.hear_failed(said.control)

    # The end --------------------------------------------------------------------------------------------------------

    def withdraw(self) -> Callable[[], bool]:
        """Withdraws this rank, which cannot go on, from the merges: from now on it contributes nothing, and waits for
        none.

        Its failure travels in the control vectors of the contributions that it sends from now on, not in those of the
        merges under way. So it sends one for each fragment, as any may be the one that the other ranks wait for.

        Returns:
            a function to be called again and again, which sends them, and returns whether a merge with one of them
            has completed: then all ranks have heard of the failure.
        """
        told: set[int] = set()

        def over() -> bool:
            heard = False
            for fragment in self.fragments:
                while fragment.under_way and fragment.done():
                    fragment.merge()
                if fragment.under_way:
                    continue
                if fragment.index in told:
                    heard = True
                else:
                    fragment.work = LocalWork()
                    fragment.send(self.merge_sender.weigh)
                    told.add(fragment.index)
            return heard

        over()
        return over

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the outer optimizer after the last merge, the same on all ranks, the number of merges, and the
        length of rounds. The script itself saves parameters, after a `finish`."""
        return {
            "merges": self.merges,
            "round_steps": self.lengths.longest,
            "outer": [dict(fragment.outer_state) for fragment in self.fragments],
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether `state` is one for the same fragments and such an outer optimizer: see `Strategy.fits`."""
        shapes = [fragment.store.shapes(fragment.index) for fragment in self.fragments]
        lengths = [sum(map(math.prod, each)) for each in shapes]  # not read: TensorFlow may be tracing, without values
        kept = [{len(array) for array in outer.values()} for outer in state["outer"]]
        alike = len(kept) == len(lengths) and all(has <= {mine} for has, mine in zip(kept, lengths, strict=True))
        return alike and all(map(self.rule.outer.fits, state["outer"]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. Parameters are not part of it: the model is what the rank holds at the next `begin`.

        Raises:
            ValueError: `state` has another number of fragments, or is of another outer optimizer.
        """
        if len(state["outer"]) != len(self.fragments):
            raise ValueError(
                f"fragments: expected the state of {len(self.fragments)}. Received: one of {len(state['outer'])}."
            )
        for fragment, saved in zip(self.fragments, state["outer"], strict=True):
            self.rule.outer.check_state(saved)
            fragment.outer_state = arrays_like(fragment.lanes[0].buffer, saved)
            fragment.work = LocalWork()  # steps that wait to be counted were made after the state was saved
        self.merges = int(state["merges"])
        self.lengths.resume(int(state["round_steps"]))

    def restart(self) -> None:
        """Discards the state of all merges so far, and begins anew: see `Strategy.restart`."""
        for fragment in self.fragments:
            fragment.outer_state, fragment.work = {}, LocalWork()
        self.merges = 0
        self.lengths.resume(self.rule.round_steps)
