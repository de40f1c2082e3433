"""The strategy of one optimizer: synchronous steps first, and then steps that ranks make apart. For any framework."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvd_hetero.codecs.verbs import arrays_like
from hvd_hetero.engine import script
from hvd_hetero.engine.port import in_lane

from . import merge_control
from .fragment import Lane, Store
from .keeping import Count
from .local_sgd import LocalSGD
from .phase import phase_of
from .rounds import Lanes, Rounds
from .ways import Ways
from .weighted import WeightedExchange

if TYPE_CHECKING:
    from .weighing import Weighing


class ParameterStore(Store, Protocol):
    """A rank's parameters, flat, by fragment; each fragment is of one type and device, and wholly lossy or not."""

    @property
    def lossy(self) -> Sequence[bool]:
        """For each fragment, whether it goes through a codec."""

    @property
    def narrow(self) -> bool:
        """Whether parameters are of a type in which the part of an update may be none."""

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """The shapes of the parameters in fragment `index`, in its order."""

    def empty(self, index: int, tail: int) -> Any:
        """An array of zeros as long as fragment `index` and `tail` more."""

    def control(self, length: int) -> Any:
        """Zeros in double precision."""

    def checksum(self, index: int) -> int:
        """A number below 2**63 that stands for the bits of fragment `index`."""


class LocalSteps:
    """The strategy of one optimizer: synchronous steps first, and then steps that ranks make apart.

    Constructing one is a collective call, with the same rule on all ranks.

    Args:
        store: the parameters that are trained, in the same order on all ranks.
        weighing: of the optimizer's gradients.
        ways: how a fragment's progress travels.
        batches: global batches per update; None: as many as per exchange.
        on_give_up: is called where this rank gives up what it did, as that is not finite.
    """

    def __init__(
        self,
        rule: LocalSGD,
        store: ParameterStore,
        *,
        weighing: Weighing,
        ways: Ways,
        batches: int | None = None,
        on_give_up: Callable[[], None] = lambda: None,
    ) -> None:
        engine, balancer = weighing.engine, weighing.balancer
        self.rule, self._engine, self._balancer, self._store, self._ways = rule, engine, balancer, store, ways
        self._name = f"hvd_hetero.{balancer.name}.{engine.unique('local.')}"
        self._phase = phase_of(rule, balancer)
        self.rounds = Rounds(
            rule, balancer=balancer, store=store, lanes=self._lanes,
            batches=lambda: batches or weighing.batches_per_exchange, on_merge=self._record,
        )  # fmt: skip
        balancer.strategies.add(weighing.place, self.rounds)
        # Where merges can be missed, and so have several lanes, no codec keeps anything.
        merges = [fragment.lanes[0].exchange for fragment in self.rounds.fragments]
        weighing.keeping.put("merges", merges, lambda: self.rounds.unit)
        self._bytes = [fragment.lanes[0].buffer.nbytes for fragment in self.rounds.fragments]
        self.begun = False  # whether ranks make steps apart
        self._newest = -1  # global batch of the newest step apart
        self._pace = 1.0  # of its update
        self._before: list[Any] = []  # the parameters before it, by fragment, where a part of it is made afterwards
        self._counted = Count(0.0)
        weighing.keeping.put_count("samples apart", self._counted)
        self._on_give_up, self._warned = on_give_up, False
        atexit.register(_warn_at_exit, weakref.ref(self))

    def _lanes(self, outgoing: Callable[[int], list[float]]) -> list[Lanes]:
        return [self._lanes_of(index, lossy, outgoing) for index, lossy in enumerate(self._store.lossy)]

    def _lanes_of(self, index: int, lossy: bool, outgoing: Callable[[int], list[float]]) -> Lanes:
        """Several lanes where a merge is a single sum: stages that follow would need this rank, which is not there."""
        tail = merge_control.length(self._engine.size)
        name = f"{self._name}.fragment.{index}"
        shared = self._empty(index)
        way = self._ways.way(name, shared, self._store.shapes(index), lossy)

        def lane(number: int, buffer: Any) -> Lane:
            exchange = WeightedExchange(
                self._engine,
                [buffer],
                self._store.control(tail) if lossy else buffer[-tail:],
                routes=[way],
                rides_in=None if lossy else 0,
                outgoing=lambda: outgoing(index),
                name=in_lane(name, number),
                keeps=self._ways.keeps,
                weight=lambda: self.rounds.weight,
            )
            return Lane(exchange, buffer)

        if not way.is_plain:
            return [lane(0, shared)], None
        lanes = [lane(number, shared) for number in range(self.rule.most_missed + 1)]
        return lanes, lambda number: lane(number, self._empty(index))

    def _empty(self, index: int) -> Any:
        return self._store.empty(index, 0 if self._store.lossy[index] else merge_control.length(self._engine.size))

    def _record(self, fields: dict[str, Any]) -> None:
        self._balancer.record.event("merge", **fields)
        if "dropped_steps" in fields:
            self._on_give_up()
            self._warn()

    def _warn(self) -> None:
        """Says once that this rank has given up what it did."""
        if not self._warned:
            self._warned = True
            script.warn(
                f"What rank {self._engine.rank} did apart was not finite, and is given up: it goes on from the last "
                "merge. The trace has each time that this happens.",
                RuntimeWarning,
            )

    def apart(self) -> bool:
        """Whether the global batch begun last is one that ranks take apart."""
        return self._phase(self._balancer.step)

    @property
    def ends(self) -> bool:
        """Whether the next global batch is a synchronous one, after steps apart; asked after a step.

        Then ranks have to merge, and to agree on their optimizers' states, or synchronous steps would part them. All
        ranks know it then: a plan holds for no batch that a rank may begin before it hears of the plan.
        """
        return self.begun and not self._phase(self._balancer.step + 1)

    @property
    def leaves(self) -> bool:
        """Whether this rank was told to leave."""
        return self._balancer.departure.leaving.said

    @property
    def over(self) -> bool:
        """Whether the global batch begun last is a synchronous one, and this rank has not merged yet."""
        return self.begun and not self.apart()

    def before_step(self, *, by_rate: bool = False) -> float:
        """Before an update that ranks make apart. The first one is a collective call.

        Args:
            by_rate: the update is in proportion to its rate, which the caller multiplies by what this returns. Else
                that is 1, and `after_step` makes a part of the update where this rank is to make no more.

        Raises:
            RuntimeError: on every rank, when parameters differ before ranks train apart.
        """
        if not self.begun:
            self._check_alike()
            self.rounds.begin()
            self.begun = True
            self._balancer.record.event("apart", step=self._balancer.step)
        self._newest = self._balancer.step
        self._pace = 1.0 if self._store.narrow else self.rounds.pace
        if self._pace == 1.0 or by_rate:
            self._before = []
            return self._pace
        before: list[Any] = self._before or [None] * len(self._store.lossy)
        self._before = [self._store.read(index, into) for index, into in enumerate(before)]
        return 1.0

    def _check_alike(self) -> None:
        """Law 5, checked."""
        row = np.array([[self._store.checksum(index) for index in range(len(self._store.lossy))]], dtype=np.int64)
        found = np.asarray(self._engine.allgather_async(row, name=f"{self._name}.alike").wait()).tolist()
        if others := [rank for rank, value in enumerate(found) if value != found[0]]:
            raise RuntimeError(
                "Expected the same parameters on every rank before ranks train apart. Received: others than rank 0's "
                f"on rank {', '.join(map(str, others))}. Broadcast the parameters from rank 0 after making the "
                "optimizer, and load checkpoints on all ranks or before it. Where another optimizer has trained them "
                "apart, call its merge() before making this one, or what ranks did is lost. What moves them within a "
                "step and back, as SAM does, has to go back to a copy. A Keras model that is "
                "built by its first step is broadcast after that: begin it with keras.Input(...)."
            )

    @property
    def samples(self) -> float:
        """This rank's of steps apart, since they were last taken."""
        return float(self._counted.value)

    def after_step(self, samples: float, *, lr: float, gradients: float = 1.0) -> int:
        """The bytes that this rank has sent after an update over `samples`; `gradients`: see `Work`."""
        self._counted.value += samples
        for index, parameters in enumerate(self._before):
            self._store.blend(index, parameters, self._pace)
        gradients *= self._pace
        before = [fragment.sends for fragment in self.rounds.fragments]
        self.rounds.after_step(samples, lr=lr, compute=self._balancer.timesheet.known, gradients=gradients)
        sends = [fragment.sends - first for fragment, first in zip(self.rounds.fragments, before, strict=True)]
        return sum(number * size for number, size in zip(sends, self._bytes, strict=True))

    def part(self, samples: float) -> float:
        """The part that a batch of this rank is of the global one."""
        return self.rounds.part_of_batch(samples) if samples else 0.0

    def withdraw(self) -> Callable[[], bool]:
        """See `Rounds.withdraw`; others may be about to take their first step apart."""
        self.before_step()
        self.begun = False
        return self.rounds.withdraw()

    def merge(self) -> None:
        """Returns when all ranks hold one model, with every step of every rank in it. A collective call.

        Raises:
            RuntimeError: a rank could not go on, and makes no further merge.
        """
        self._balancer.departure.check("merge")
        if self.begun:
            ends, start = self.ends, time.perf_counter()
            self.rounds.finish()
            self.begun = False
            self._balancer.record.event("together", step=self._newest + 1, wait_s=time.perf_counter() - start)
            if ends:
                self._balancer.ladder.hear_together()

    def abandon(self) -> None:
        """Forgets what was done since the last merge: the ranks are gone that it would be merged with."""
        self.begun = False

    def take_over(self, before: LocalSteps) -> None:
        """Goes on in the place of another one of the same parameters: with what it counted, and, where fragments are of
        the same ones, with what its codecs kept back."""
        self._counted.value = before._counted.value
        lanes, others = ([each.lanes[0] for each in one.rounds.fragments] for one in (self, before))
        if [len(lane.buffer) for lane in lanes] != [len(lane.buffer) for lane in others]:
            return
        for lane, other in zip(lanes, others, strict=True):
            found = other.exchange.kept_back()
            kept = arrays_like(lane.buffer, {str(at): each for at, each in enumerate(found) if each is not None})
            units = before.rounds.unit / self.rounds.unit
            lane.exchange.give_back([kept.get(str(at)) for at in range(len(found))], units)

    def take_samples(self) -> float:
        """This rank's samples of steps apart since the last call."""
        taken, self._counted.value = self.samples, 0.0
        return taken


def _warn_at_exit(steps: weakref.ref[LocalSteps]) -> None:
    """Says so where a job ends between merges – unless it ended in an error, which says enough, or this rank was told
    to leave: the others have gone on without what it did."""
    left = steps()
    if left is not None and left.begun and not left.leaves and not hasattr(sys, "last_value"):
        script.warn(
            "Expected optimizer.merge() after the last step of a local strategy. Received: the end of the job. "
            "What ranks did since the last merge is on each of them alone.",
            RuntimeWarning,
        )
