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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvd_hetero.engine.port import Engine

from . import control
from .balancer import Balancer
from .fragment import Fragment, Merge, Store, Work
from .outer import Outer
from .weighted import Way, WeightedExchange

WEIGHTS = ("samples", "fednova")
# Places in the control vector of a fragment; behind them each rank's position, and the balancer's own vector.
WEIGHT, NORMAL, SQUARE, FINISHING, AGE, HEAD = range(6)


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD as a strategy: what all ranks must have the same.

    Args:
        round_steps: global batches between two contributions of a rank.
        bound_rounds: a rank waits when it has gone on for so many rounds since its last contribution without a merge;
            0 to wait for each merge.
        warmup_steps: so many steps are synchronous first: far from the end of training, progress made apart adds up
            badly (post-local SGD, Lin et al. 2018, arXiv:1808.07217).
        fragments: parts of the model that merge one after the other, so that a merge uses the link for a part of it.
        outer: what a merge does to the model.
        weights: "samples": progress counts by the samples it is made of, for ranks that draw from one shared order
            (as BalancedDataLoader deals it). "fednova": by the rank's share over its steps, for ranks with data of
            their own (Wang et al. 2020, arXiv:2007.07481).
        compensation: lambda of `outer.compensated`; 0 for none, which is right for all but plain SGD.
        drift_limit: rounds are halved when ranks drift apart further, see `policy.staleness.Guard`; None for never.
    """

    round_steps: int = 8
    bound_rounds: float = 4.0
    warmup_steps: int = 20
    fragments: int = 1
    outer: Outer = Outer()
    weights: str = "samples"
    compensation: float = 0.0
    drift_limit: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("round_steps", 1), ("warmup_steps", 0), ("fragments", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}. Received: {value!r}.")
        for name in ("bound_rounds", "compensation"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name}: expected a finite number, 0 or more. Received: {value!r}.")
        if 0 < self.bound_rounds < 1:
            raise ValueError(
                "bound_rounds: expected 0, to wait for every merge, or at least 1, since a rank contributes once a "
                f"round. Received: {self.bound_rounds}."
            )
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights: expected one of {', '.join(WEIGHTS)}. Received: {self.weights!r}.")
        if not isinstance(self.outer, Outer):
            raise TypeError(f"outer: expected an Outer. Received: {self.outer!r}.")
        if self.drift_limit is not None and not self.drift_limit > 0:
            raise ValueError(f"drift_limit: expected a number above 0, or None. Received: {self.drift_limit!r}.")


class Rounds:
    """The rounds of one rank, over all fragments.

    Args:
        rule: the strategy.
        engine: the ranks that train together.
        balancer: deals the batches; its measurements and plans travel with fragment 0.
        store: this rank's parameters.
        buffers: for each fragment a flat array of its length and `control_length(engine.size)` more.
        ways: for each fragment, how it is summed; with `exact`, the control vector rides along.
        name: prefix of the operations' names.
    """

    def __init__(
        self,
        rule: LocalSGD,
        *,
        engine: Engine,
        balancer: Balancer,
        store: Store,
        buffers: Sequence[Any],
        controls: Sequence[Any],
        rides: bool,
        ways: Sequence[Way],
        keeps: bool,
        name: str,
        write: Callable[[Any, Sequence[float]], None],
        on_merge: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.rule, self.engine, self.balancer = rule, engine, balancer
        self._on_merge = on_merge
        self.round_steps = rule.round_steps
        self.merges = 0  # of fragment 0
        self.waits = 0  # times that this rank had to wait
        self._finishing = False
        self._stepped = 0  # in this phase
        self._recent: deque[tuple[float, float]] = deque(maxlen=64)
        self._weight = 0.0
        self._square = 0.0
        self._age = 0.0
        self.fragments = [
            Fragment(
                index=index,
                store=store,
                exchange=WeightedExchange(
                    engine,
                    [buffer if rides else buffer[: len(buffer)]],
                    tail,
                    routes=[way],
                    rides_in=0 if rides else None,
                    outgoing=lambda index=index: self._outgoing(index),  # type: ignore[misc]
                    name=f"{name}.fragment.{index}",
                    keeps=keeps,
                    write=write,
                ),
                buffer=buffer,
                length=len(buffer) - (len(tail) if rides else 0),
                outer=rule.outer,
                compensation=rule.compensation,
            )
            for index, (buffer, tail, way) in enumerate(zip(buffers, controls, ways, strict=True))
        ]

    # A phase of local steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the first local step: this rank's parameters, the same on all ranks, are the model."""
        for fragment in self.fragments:
            fragment.begin()
        self._stepped, self._finishing = 0, False

    @property
    def most_ahead(self) -> int:
        """Batches that a rank may begin after it has contributed and before it sees the merge."""
        return max(1, math.ceil(self.rule.bound_rounds * self.rule.round_steps))

    def after_step(self, samples: float, *, lr: float, compute: tuple[float, float] = (0.0, 0.0)) -> bool:
        """Ends a local step over `samples`; sends what is due and takes in the merges that came. True if one came.

        Args:
            lr: the step's learning rate.
            compute: samples and seconds of this step, as measured.
        """
        self._stepped += 1
        if compute[0] > 0:
            self._recent.append(compute)
        came = False
        for fragment in self.fragments:
            fragment.work.add(samples, lr)
            if fragment.under_way and fragment.exchange.done():
                self._merge(fragment)
                came = True
            if not fragment.under_way and self._due(fragment):
                self._send(fragment)
            if fragment.under_way and fragment.work.steps >= self.rule.bound_rounds * self.round_steps:
                if not fragment.exchange.done():
                    self.waits += 1
                self._merge(fragment)
                came = True
        return came

    def _due(self, fragment: Fragment) -> bool:
        # The first boundaries are spread over the round, so that fragments merge in turn.
        first = self.round_steps * (fragment.index + 1) // len(self.fragments)
        whole = fragment.work.steps == self._stepped  # has not contributed in this phase
        return fragment.work.steps >= (max(1, first) if whole else self.round_steps)

    def finish(self) -> None:
        """Merges until all ranks have finished; then all hold one model. Every rank must call it."""
        self._finishing = True
        try:
            for fragment in self.fragments:
                while True:
                    if fragment.under_way:
                        total = self._merge(fragment).total
                        if total[FINISHING] == self.engine.size:
                            break
                    else:
                        self._send(fragment)
        finally:
            self._finishing = False
            self._stepped = 0

    # One contribution -----------------------------------------------------------------------------------------------

    def _send(self, fragment: Fragment) -> None:
        fragment.send(self._weigh)

    def _weigh(self, work: Work, square: float) -> float:
        """c_i, in units of a rank's usual contribution, which narrow wires want near 1."""
        weight = 0.0
        if math.isfinite(square) and work.steps:
            if self.rule.weights == "fednova":
                weight = 1.0 / work.steps
            else:
                weight = work.samples * self.engine.size / (self.balancer.global_batch_size * self.rule.round_steps)
        self._weight, self._square, self._normal = weight, square if weight else 0.0, float(work.steps > 0)
        return weight
