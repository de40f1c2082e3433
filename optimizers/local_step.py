"""Local SGD for one optimizer, in any framework: synchronous steps first, then local steps with merges."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from hvd_hetero.codecs.verbs import arrays_like
from hvd_hetero.engine import script
from hvd_hetero.engine.port import numbered_name

from . import merge_control
from .fragment import Lane
from .gradient_exchange import GradientExchange
from .local_phase import install_local_phase
from .local_sgd import LocalSGD
from .parameter_store import ParameterStore
from .rounds import Lanes, Rounds
from .routing import Routing
from .start_check import StartCheck
from .unsent_state import Count
from .weighted_exchange import WeightedExchange


class LocalSteps:
    """Runs one optimizer's steps under a local strategy: tells which steps are local, and merges the ranks' models.

    The `LocalTraining` of a framework calls `before_step` and `after_step` around the update of each local step, and
    `merge` where the ranks have to hold one model again. Constructing one is a collective call, with the same rule on
    all ranks.

    Args:
        rule: the numbers of the strategy.
        store: reads and writes the trained parameters, in the same order on all ranks.
        gradient_exchange: of the optimizer's gradients; it knows the engine and the balancer.
        routing: chooses for each fragment the route by which its progress is summed over the ranks.
        batches: global batches per update; None: as many as per exchange of gradients.
        on_give_up: is called when this rank gives up its progress since the last merge because it is not finite.

    Attributes:
        rounds: the rounds of this rank between merges.
        begun: whether this rank's local steps have begun and no merge of all ranks has ended them.
        apart: whether ranks may have made local steps that no merge of all ranks has ended; the same on all ranks.
    """

    def __init__(
        self,
        rule: LocalSGD,
        store: ParameterStore,
        *,
        gradient_exchange: GradientExchange,
        routing: Routing,
        batches: int | None = None,
        on_give_up: Callable[[], None],
    ) -> None:
        engine, balancer = gradient_exchange.engine, gradient_exchange.balancer
        self.rule, self._engine, self._balancer, self._store, self._routing = rule, engine, balancer, store, routing
        self._name = f"hvd_hetero.{balancer.name}.{engine.unique('local.')}"
        self._phase = install_local_phase(rule, balancer)
        self.rounds = Rounds(
            rule, balancer=balancer, store=store, lanes=self._lanes,
            batches=lambda: batches or gradient_exchange.count.batches_per_exchange, on_merge=self._record,
        )  # fmt: skip
        balancer.strategies.add(gradient_exchange.place, self.rounds)
        # One lane stands for all: only plain sums have several (to let ranks miss merges), and these keep nothing back.
        merges = [fragment.lanes[0].exchange for fragment in self.rounds.fragments]
        gradient_exchange.unsent_state.put("merges", merges, lambda: self.rounds.merge_sender.part_unit)
        self._bytes = [fragment.lanes[0].buffer.nbytes for fragment in self.rounds.fragments]
        self.begun = self.apart = False
        self._start_check = StartCheck(engine, store, name=f"{self._name}.alike")
        self._newest = -1  # index of the global batch of the last local step, also if this rank left that out
        self._update_fraction = 1.0  # the part of the update that this rank makes in that step
        self._before: list[Any] = []  # parameters before that update, by fragment, if `after_step` blends them
        self._counted = Count(0.0)  # see `samples`
        gradient_exchange.unsent_state.put_count("samples apart", self._counted)
        self._on_give_up, self._warned = on_give_up, False
        atexit.register(_warn_at_exit, weakref.ref(self))

    def _lanes(self, outgoing: Callable[[int], list[float]]) -> list[Lanes]:
        """Makes the lanes of all fragments. `outgoing` returns the control vector for a merge of a fragment's index."""
        return [self._lanes_of(index, lossy, outgoing) for index, lossy in enumerate(self._store.lossy)]

    def _lanes_of(self, index: int, lossy: bool, outgoing: Callable[[int], list[float]]) -> Lanes:
        """Makes the lanes of fragment `index`, and a function that makes one of them anew with a buffer of its own.

        If a merge is one all-reduce, there is one lane more than merges that a rank may miss in a row. Otherwise there
        is one lane, and no rank misses a merge: the later stages of the sum would have to wait for it.
        """
        tail = merge_control.length(self._engine.size)
        name = f"{self._name}.fragment.{index}"
        shared = self._empty(index)
        route = self._routing.route_for(name, shared, self._store.shapes(index), lossy)

        def lane(number: int, buffer: Any) -> Lane:
            exchange = WeightedExchange(
                self._engine,
                [buffer],
                self._store.control(tail) if lossy else buffer[-tail:],
                routes=[route],
                rides_in=None if lossy else 0,
                outgoing=lambda: outgoing(index),
                name=numbered_name(name, number),
                keeps=lossy and self._routing.keeps,
                weight=lambda: self.rounds.merge_sender.residual_weight,
                part=lambda: self.rounds.merge_sender.residual_part,
            )
            return Lane(exchange, buffer)

        if not route.is_plain:
            return [lane(0, shared)], None
        lanes = [lane(number, shared) for number in range(self.rule.most_missed + 1)]
        return lanes, lambda number: lane(number, self._empty(index))

    def _empty(self, index: int) -> Any:
        """A buffer of zeros for fragment `index`; with a tail for the control vector, unless a lossy codec reads it."""
        return self._store.empty(index, 0 if self._store.lossy[index] else merge_control.length(self._engine.size))

    def _record(self, fields: dict[str, Any]) -> None:
        """Writes a merge, or progress that this rank has given up, to the trace."""
        self._balancer.record.event("merge", **fields)
        if "dropped_steps" in fields:
            self._on_give_up()
            self._warn()

    def _warn(self) -> None:
        """Warns, the first time, that this rank has given up its progress."""
        if not self._warned:
            self._warned = True
            script.warn(
                f"The local steps of rank {self._engine.ranks[self._engine.rank]} were not finite, and are given up: "
                "it goes on from the last merge. The trace has each time that this happens.",
                RuntimeWarning,
            )

    def is_local(self) -> bool:
        """Whether the global batch begun last is trained on in a local step. The same on all ranks for each batch."""
        return self._phase(self._balancer.step)

    @property
    def ends(self) -> bool:
        """Whether the local step that was made last is followed by a synchronous step.

        All ranks then merge and average their optimizer states, or synchronous steps would let their models differ.
        The answer is the same on all ranks: a plan never holds for a batch that a rank may begin before it hears of it.
        """
        return self.apart and not self._phase(self._balancer.step + 1)

    @property
    def leaves(self) -> bool:
        """Whether this rank was told to leave the job (SIGTERM)."""
        return self._balancer.departure.leaving.said

    @property
    def over(self) -> bool:
        """Whether the global batch begun last needs a synchronous step, but the local steps before are not merged."""
        return self.apart and not self.is_local()

    def passed(self) -> None:
        """Notes that the backward passes of a step are over. If the step is a local one, ranks are apart from now on,
        whether or not this rank makes the update: a script may leave it out on some ranks alone, as `GradScaler` does.
        """
        if self.is_local():
            self.apart, self._newest = True, self._balancer.step

    def before_step(self, *, by_rate: bool = False) -> float:
        """Prepares the update of a local step. The first call of a phase of local steps is a collective one.

        A rank whose share is below the mean makes only a part of each update (`Rounds.update_fraction`).

        Args:
            by_rate: whether the update is proportional to the learning rate, which the caller then multiplies by the
                returned factor.

        Returns:
            The factor for the learning rate: the part of the update to make. 1.0 without `by_rate`, where `after_step`
            takes back the rest of the update.

        Raises:
            RuntimeError: on every rank, when parameters differ between ranks before the first local step.
        """
        self._newest = self._balancer.step
        if not self.begun:
            self._begin()
        self._update_fraction = 1.0 if self._store.narrow else self.rounds.update_fraction
        if self._update_fraction == 1.0 or by_rate:
            self._before = []
            return self._update_fraction
        before: list[Any] = self._before or [None] * len(self._store.lossy)
        self._before = [self._store.read(index, into) for index, into in enumerate(before)]
        return 1.0

    def _begin(self) -> None:
        """Begins local steps, of which all ranks have made none since they held one model. A collective call."""
        self._start_check.begin()
        self.rounds.begin()
        self.begun = self.apart = True
        self._balancer.record.event("apart", step=self._newest)

    @property
    def samples(self) -> float:
        """Loss terms of this rank's local steps since the last `take_samples`; weighs its statistics in averages."""
        return float(self._counted.value)

    def after_step(self, samples: float, *, lr: float, gradients: float = 1.0) -> int:
        """Ends a local step, after its update: contributes to a merge if one is due, and applies merges that came.

        Waits for a merge only if this rank is `bound_rounds` rounds ahead of it.

        Args:
            samples: loss terms of the step on this rank.
            lr: its learning rate.
            gradients: what the step adds to `LocalWork.gradients`, before it is multiplied by the update fraction.

        Returns:
            The bytes that this rank has sent.
        """
        self._start_check.hear()
        self._counted.value += samples
        for index, parameters in enumerate(self._before):
            self._store.blend(index, parameters, self._update_fraction)
        gradients *= self._update_fraction
        before = [fragment.sends for fragment in self.rounds.fragments]
        self.rounds.after_step(samples, lr=lr, compute=self._balancer.step_timer.known, gradients=gradients)
        sends = [fragment.sends - first for fragment, first in zip(self.rounds.fragments, before, strict=True)]
        return sum(number * size for number, size in zip(sends, self._bytes, strict=True))

    def part(self, samples: float) -> float:
        """This rank's planned part of the global batch, in [0, 1]; 0 for a step without `samples`."""
        return self.rounds.part_of_batch(samples) if samples else 0.0

    def withdraw(self) -> Callable[[], bool]:
        """Ends this rank's part in merges because it has failed, without waiting: see `Rounds.withdraw`."""
        self.apart = False
        if self.begun:
            self.begun = False
            return self.rounds.withdraw()
        checksums = self._start_check.send()  # other ranks may wait for these before their first local step
        self.rounds.begin()
        over = self.rounds.withdraw()
        return lambda: over() and checksums.done()

    def merge(self) -> None:
        """Merges the local steps of all ranks; afterwards all hold one model. A collective call.

        Does nothing if no rank can have made a local step since the last call. A rank that has left out all of its own
        takes part: the others may have made theirs.

        Raises:
            RuntimeError: a rank has failed, so that no further merge is possible.
        """
        self._balancer.departure.check("merge")
        if self.apart:
            if not self.begun:
                self._begin()
            ends, start = self.ends, time.perf_counter()
            with self._balancer.step_timer.aside():  # told as an event, and as no wait of the step that follows
                self.rounds.finish()
                self._start_check.end()
            self.begun = self.apart = False
            self._balancer.record.event("together", step=self._newest + 1, wait_s=time.perf_counter() - start)
            if ends:
                self._balancer.ladder.hear_together()

    def abandon(self) -> None:
        """Ends the local steps without a merge, since the other ranks are gone (after an elastic reset)."""
        self.begun = self.apart = False
        self._start_check.forget()

    def take_over(self, before: LocalSteps) -> None:
        """Takes over the samples counted by `before`, made for the same parameters, and the residuals of its codecs,
        which `before` then no longer has.

        The residuals are taken only if the fragments have the same lengths.
        """
        self._counted.value += before.take_samples()
        lanes, others = ([each.lanes[0] for each in one.rounds.fragments] for one in (self, before))
        if [len(lane.buffer) for lane in lanes] != [len(lane.buffer) for lane in others]:
            return
        for lane, other in zip(lanes, others, strict=True):
            found = other.exchange.take_residuals()
            kept = arrays_like(lane.buffer, {str(at): each for at, each in enumerate(found) if each is not None})
            units = before.rounds.merge_sender.part_unit / self.rounds.merge_sender.part_unit
            lane.exchange.add_residuals([kept.get(str(at)) for at in range(len(found))], units)

    def take_samples(self) -> float:
        """Returns `samples` and sets it to 0."""
        taken, self._counted.value = self.samples, 0.0
        return taken


def _warn_at_exit(steps: weakref.ref[LocalSteps]) -> None:
    """Warns if the job ends with local steps that were not merged.

    No warning after an error, which says enough, nor on a rank that was told to leave, as the others went on without
    its last steps.
    """
    left = steps()
    if left is not None and left.begun and not left.leaves and not hasattr(sys, "last_value"):
        script.warn(
            "Expected optimizer.merge() after the last step of a local strategy. Received: the end of the job. "
            "What ranks did since the last merge is on each of them alone.",
            RuntimeWarning,
        )
