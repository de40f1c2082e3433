"""One rank's part in merges of local SGD: the weight of its progress, and the control vector sent beside it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hvd_hetero.policy.local_round import NOTHING, Contribution, contribution

from . import merge_control
from .balancer import Balancer
from .fragment import LocalWork
from .local_sgd import LocalSGD


@dataclass(frozen=True)
class Outgoing:
    """What a rank contributes to one merge. The defaults are those of a merge that it misses.

    Attributes:
        contribution: the weight, norm and reach of the rank's delta; see `policy.local_round`.
        work: the local steps that the delta is made of.
        spread: `Contribution.spread` of the delta, from which the drift between ranks is measured.
    """

    contribution: Contribution = NOTHING
    work: LocalWork = field(default_factory=LocalWork)
    spread: float = 0.0


class MergeSender:
    """Weighs one rank's deltas and writes its control vectors, for the merges of one optimizer (`Rounds`).

    Args:
        rule: the local strategy.
        balancer: its measurements and plans travel with the merges of fragment 0, if `leads()`.
        leads: returns whether measurements and plans travel with these merges, and not with another optimizer's.
        most_ahead: returns how many batches this rank may begin between its contribution and the end of that merge.
    """

    def __init__(
        self,
        rule: LocalSGD,
        balancer: Balancer,
        *,
        leads: Callable[[], bool],
        most_ahead: Callable[[], int],
    ) -> None:
        self._fednova, self._balancer = rule.weights == "fednova", balancer
        self._rank, self._size = balancer.rank, balancer.size
        self._leads, self._most_ahead = leads, most_ahead
        self._recent: list[tuple[float, float]] = []  # samples and seconds of steps since the last contribution
        self._usual: tuple[float, float] | None = None  # samples and seconds of a median step before that contribution
        self._sending = Outgoing()
        self._in_advance = False

    def begin(self) -> None:
        """Begins a phase of local steps, before the first one: forgets the step time measured in earlier phases."""
        self._usual = None

    def measured(self, samples: float, seconds: float) -> None:
        """Notes the samples and the seconds of compute of a local step, unless either is 0, which is: not measured."""
        if min(samples, seconds) > 0:
            self._recent.append((samples, seconds))

    @property
    def unit(self) -> float:
        """The number of samples that has weight 1 in a merge: the mean share, which suits the range of fp16. With
        FedNova weights are not in samples, and this is 1.0."""
        if self._fednova:
            return 1.0
        return self._balancer.global_batch_size / self._size

    def weigh(self, work: LocalWork, square: float) -> Contribution:
        """Returns the weight, norm and reach of this rank's delta in the merge that it is about to send for.

        `Fragment.send` calls it. `outgoing` then describes this contribution.

        Args:
            work: the local steps since the last contribution.
            square: squared L2 norm of the delta. Where it is not finite, the delta weighs 0, as after steps without
                samples.
        """
        norm, reach = work.gradients, work.batches
        if self._fednova:  # in units of learning rates, on all ranks alike, also where it is 0
            norm, reach = work.lr_sum, work.rate_batches
        # FedNova's shards are taken to be equal parts of all data.
        weight = 1.0 / self._size if self._fednova else work.samples / self.unit
        chosen = contribution(weight, norm if math.isfinite(square) else 0.0, reach)
        self._sending = Outgoing(chosen, work, chosen.spread(square) if chosen.weight else 0.0)
        return chosen

    @property
    def steps(self) -> int:
        """The number of local steps in the contribution that is being sent."""
        return self._sending.work.steps

    @property
    def part_unit(self) -> float:
        """The part of a global batch that has weight 1 in a merge, the unit in which residuals pass to other ranks.

        The weight alone would not do: a merge multiplies the summed deltas by about this number (`policy.local_round`:
        sum r / sum w), which changes with the number of ranks. With FedNova it does not, and this is 1.0.
        """
        return 1.0 if self._fednova else self.unit / self._balancer.global_batch_size

    @property
    def residual_weight(self) -> float:
        """The weight by which `ScaledResiduals` scales residuals in the contribution that is being sent: w / r.

        The merge multiplies what is sent by sum r / sum w, for which r / w of this rank is an estimate. So a residual
        moves the model as far as it would have in the merge that left it, also where the rank's share has changed. In
        short batches, of which this rank's part is rounded, w is what it would be of all samples, in proportion. With
        FedNova w is the same whatever the share, and r is taken as if all of each global batch were this rank's.
        """
        sent, work = self._sending.contribution, self._sending.work
        if not sent.weight:
            return 0.0
        weight, reach = (sent.weight, work.rates) if self._fednova else (work.of_all / self.unit, sent.reach)
        # Rounded, so that it is the same number in each round of the same batches: then nothing has to be rescaled.
        return round(weight / reach, 9)

    @property
    def residual_part(self) -> float:
        """The part of whole batches that the contribution is over that is being sent, as `ScaledResiduals` takes it:
        less than 1 if a short one is among them. With FedNova samples do not count, and this is 1.0."""
        whole = self._balancer.global_batch_size / self.unit
        return 1.0 if self._fednova else (self.residual_weight / whole or 1.0)

    @contextlib.contextmanager
    def missing(self) -> Iterator[None]:
        """A context in which `outgoing` is about merges that this rank misses, and so contributes nothing to.

        `Rounds` enters it right after a contribution was sent, and sends the empty ones for the next merges in advance.
        """
        self._sending, self._in_advance = Outgoing(), True
        try:
            yield
        finally:
            self._in_advance = False

    def outgoing(self, index: int, *, finishing: bool, answers: int) -> list[float]:
        """Returns this rank's control vector for a merge; it is called right before that is sent.

        Args:
            index: the fragment. Measurements and plans travel with fragment 0.
            finishing: whether this rank is in `Rounds.finish`.
            answers: merges until this rank contributes again, 1 if it misses none: see `Dialogue.outgoing`.

        Returns:
            `merge_control.length(ranks)` numbers.
        """
        sending, first = self._sending, index == 0
        leads = first and self._leads()
        if first and self._recent:
            # The median, by seconds per sample: a stall tells nothing of the rank's speed.
            self._usual = sorted(self._recent, key=lambda each: each[1] / each[0])[len(self._recent) // 2]
            self._recent = []
        dialogue, work = self._balancer.dialogue, sending.work
        if self._in_advance and leads:
            said = dialogue.outgoing_in_advance()
        else:
            said = dialogue.outgoing(
                leads=leads, measured=(self._usual or self._balancer.step_timer.known) if first else (0.0, 0.0),
                count=work.samples, ahead=self._most_ahead(), answers=answers,
            )  # fmt: skip
        return merge_control.pack(
            sending.contribution, spread=sending.spread, finishing=finishing, rank=self._rank, ranks=self._size,
            own=(work.steps, work.samples, self._balancer.step), control=said,
        )  # fmt: skip
