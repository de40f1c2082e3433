"""What one rank has to say in merges of local SGD: what its progress weighs, and what its balancer tells the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hvd_hetero.policy.staleness import NOTHING, Contribution, contribution

from . import merge_control
from .balancer import Balancer
from .fragment import Work
from .local_sgd import LocalSGD


@dataclass(frozen=True)
class Sending:
    """What a rank contributes to the merge that it is about to send for, and how far its gradients were apart."""

    contribution: Contribution = NOTHING
    work: Work = field(default_factory=Work)
    spread: float = 0.0


class Contributing:
    """One rank's side of it.

    Args:
        rule: the strategy.
        balancer: whose measurements and plans travel with fragment 0 where `leads` says so.
        part: of all data, this rank's own shard; for "fednova".
        leads: whether they travel with these merges, and not with another optimizer's.
        most_ahead: batches that this rank may begin after it has contributed and before it has to see the merge.
    """

    def __init__(
        self,
        rule: LocalSGD,
        balancer: Balancer,
        *,
        part: float | None,
        leads: Callable[[], bool],
        most_ahead: Callable[[], int],
    ) -> None:
        self._rule, self._balancer = rule, balancer
        self._rank, self._size = balancer.rank, balancer.size
        self._part = 1.0 / self._size if part is None else part
        self._leads, self._most_ahead = leads, most_ahead
        self._recent: list[tuple[float, float]] = []  # samples and seconds of steps since the last contribution
        self._usual: tuple[float, float] | None = None  # of those before it
        self._sending = Sending()
        self._in_advance = False

    def begin(self) -> None:
        """Before the first of some local steps: what was measured before says nothing of them."""
        self._usual = None

    def measured(self, samples: float, seconds: float) -> None:
        """Notes what a local step took; a zero for not measured."""
        if min(samples, seconds) > 0:
            self._recent.append((samples, seconds))

    @property
    def unit(self) -> float:
        """How many samples of a step weigh 1: a usual share, for narrow wires. With FedNova no samples do."""
        if self._rule.weights == "fednova":
            return 1.0
        return self._balancer.global_batch_size / self._size

    def weigh(self, work: Work, square: float) -> Contribution:
        """What this rank's progress counts; where it is not finite, it is as if its steps had been without samples."""
        norm, reach = work.gradients, work.batches
        if self._rule.weights == "fednova":  # all ranks in rates, also who has come to a rate of 0
            norm, reach = work.lr_sum, work.rate_batches
        weight = self._part if self._rule.weights == "fednova" else work.samples / self.unit
        chosen = contribution(weight, norm if math.isfinite(square) else 0.0, reach)
        self._sending = Sending(chosen, work, chosen.spread(square) if chosen.weight else 0.0)
        return chosen

    @property
    def steps(self) -> int:
        """The number of local steps in the contribution that is being sent."""
        return self._sending.work.steps

    @property
    def weight(self) -> float:
        """What this rank's progress is multiplied by in the contribution that is being sent."""
        return self._sending.contribution.before

    @contextlib.contextmanager
    def missing(self) -> Iterator[None]:
        """Once the contribution is on its way: within it what is sent is nothing, and said in advance."""
        self._sending, self._in_advance = Sending(), True
        try:
            yield
        finally:
            self._in_advance = False

    def outgoing(self, index: int, *, finishing: bool, answers: int) -> list[float]:
        """The control vector of fragment `index`, right before it is sent; `answers`: see `Dialogue.outgoing`."""
        sending, first = self._sending, index == 0
        leads = first and self._leads()
        if first and self._recent and not self._in_advance:
            # The median: a stall is no property of the share.
            self._usual = sorted(self._recent, key=lambda each: each[1] / each[0])[len(self._recent) // 2]
            self._recent = []
        dialogue, work = self._balancer.dialogue, sending.work
        if self._in_advance and leads:
            said = dialogue.outgoing_in_advance()
        else:
            said = dialogue.outgoing(
                leads=leads, measured=(self._usual or self._balancer.timesheet.known) if first else (0.0, 0.0),
                count=work.samples, ahead=self._most_ahead(), answers=answers,
            )  # fmt: skip
        return merge_control.pack(
            sending.contribution, spread=sending.spread, finishing=finishing, rank=self._rank, ranks=self._size,
            own=(work.steps, work.samples, self._balancer.step), balancer=said,
        )  # fmt: skip
