"""What one optimizer's exchanges weigh and say, whatever the framework: counts, weights, the factor, and the control.

See `weighted` for the formula. Here n_ref is chosen, and what every exchange tells and hears is put together.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hvd_hetero.engine.port import Engine

from .attachment import Attached
from .balancer import Balancer
from .control import Look, failed_in, length
from .local_step import ParameterStore
from .noise import Buckets, GradientNoise
from .parameter_guard import ParameterGuard, check_origins, check_together
from .place import Place
from .ways import Ways
from .weighted import WeightedExchange

# Few and large: an operation costs each rank a negotiation.
BUCKET_BYTES = 8 << 20


class Weighing:
    """The weights of one optimizer's gradients over the steps.

    Args:
        balancer: knows this rank's counts, and is told of each exchange.
        attached: is told of batches by the balancer.
        ways: how buckets travel.
        batches_per_exchange: global batches per exchange; their gradients are summed, as in Horovod.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        predivide: divides before the sum and multiplies after it, for narrow wires.
        parameters: those that the gradients are of, once they are known; see `ParameterGuard`.
        lays_out: tells whether this rank has come to want another layout of buckets.
        kind: of what exchanges them: see `Places`.
        at: its place among those, of one that is made anew.

    Attributes:
        relayout: whether a rank has said so with the last exchange: then all agree on one.
    """

    def __init__(
        self,
        balancer: Balancer,
        attached: Attached,
        *,
        ways: Ways,
        batches_per_exchange: int = 1,
        scale: float = 1.0,
        predivide: float = 1.0,
        parameters: Callable[[], ParameterStore | None],
        lays_out: Callable[[], bool] = lambda: False,
        kind: str = "optimizer",
        at: int | None = None,
    ) -> None:
        self._lays_out, self.relayout = lays_out, False
        self._exchanges: weakref.WeakSet[WeightedExchange] = weakref.WeakSet()
        self._chosen = balancer.dialogue.links.asked  # of the times that ways were to be chosen anew
        self._to_choose = False  # as all ranks have heard
        self.balancer, self.batches_per_exchange, self._ways = balancer, batches_per_exchange, ways
        self.scale, self._predivide = scale, predivide
        self.number, self._attached = balancer.exchanges.attach(attached), attached
        self.noise = GradientNoise()
        self._begun = 0  # see `begun`
        self._left_out: int | None = None  # the present one, once so many backward passes had been made
        self._over = False  # whether the present one went with an exchange
        self._generation = 0
        self._keepers = balancer.keepers
        self.keeping = balancer.keepers.take(kind, at)
        self.place = Place(lambda: "{} {}".format(*self._keepers.place_of(self.keeping)))
        self.keeping.keeps = ways.keeps
        self.keeping.put_saying("noise", self.noise)
        self._guard = ParameterGuard(balancer.engine, parameters, name=self.name, tell=self._differed)

    def _differed(self, fields: dict[str, Any]) -> None:
        self.balancer.record.event("parameters", **fields)

    @property
    def leads(self) -> bool:
        """Whether this exchange carries measurements and plans, unless merges do."""
        return self.balancer.exchanges.leads(self._attached)

    @property
    def _carries(self) -> bool:
        return self.leads and not self.balancer.strategies.lead

    @property
    def engine(self) -> Engine:
        """The ranks that train together."""
        return self.balancer.engine

    @property
    def tail(self) -> int:
        """The elements of the control vector."""
        return length(self.engine.size)

    @property
    def name(self) -> str:
        """The prefix of the operations' names, the same on all ranks."""
        return f"hvd_hetero.{self.balancer.name}.{self.number}"

    def begin(self) -> None:
        """A global batch begins. May be a collective call."""
        self.begun += 1
        self._over = False
        # Not where it was heard: exchanges of several optimizers may end in another order on each rank.
        if self._to_choose:
            self._choose_anew()

    @property
    def begun(self) -> int:
        """Global batches since the last exchange, the same on all ranks. The present one is among them also where it
        was left out and has had another pass since, with gradients of whichever optimizer: which parameters a pass has
        some for depends on samples."""
        again = self._left_out is not None and self.balancer.progress.backward_passes > self._left_out
        return self._begun + again

    @begun.setter
    def begun(self, number: int) -> None:
        self._begun, self._left_out = number, None

    def forget(self, *, present: bool) -> None:
        """The batches before the present one are not to count, nor is that one where it is meant as well."""
        self.begun = min(self.begun, 0 if present else 1)
        self._left_out = self.balancer.progress.backward_passes if present and not self._over else None

    def end(self) -> None:
        """An exchange is over."""
        self.begun = 0
        self._over = True

    @property
    def complete(self) -> bool:
        """Whether the batches begun are all that go into the next exchange."""
        return max(1, self.begun) >= self.batches_per_exchange

    @property
    def batches(self) -> int:
        """The global batches that the gradient is the sum of: fewer than usual where an exchange came early."""
        return max(1, min(self.begun, self.batches_per_exchange))

    @property
    def gain(self) -> float:
        """The factor by which the mean over all loss terms is multiplied."""
        return self.scale * self.batches

    @property
    def unit(self) -> float:
        """How many terms weigh 1 in a bucket: n_ref, the same on all ranks, and the predivision."""
        whole, shares = self.balancer.global_batch_size, self.balancer.plan.shares
        # The whole batch makes the sum's factor 1; but equal shares have exact products with c_i = 1, narrow wires need
        # that range, and what a codec keeps back must keep its unit.
        even = min(shares) == max(shares)
        return self._predivide * (whole / self.engine.size if even or not self._ways.exact else whole)

    @property
    def part_unit(self) -> float:
        """The part of a global batch that weighs 1. Terms are not the same part of it on other ranks, without a
        balancer."""
        return self.unit / self.balancer.global_batch_size

    def weight(self, terms: float) -> float:
        """c_i of a mean over `terms` loss terms."""
        return terms / self.unit

    def factor(self, total: Sequence[float]) -> float:
        """What turns the sum of c_i g_i into the mean over all loss terms – zero when there were none."""
        return self.gain * self.unit / total[0] if total[0] else 0.0

    def outgoing(self, terms: float) -> list[float]:
        """The control vector of a rank whose gradient is over `terms` loss terms."""
        found, interval = self._guard.outgoing()
        look = Look(hash=found, interval=interval)
        return self.balancer.dialogue.outgoing(
            leads=self._carries, count=terms, noise=self.noise, look=look, batch=self.balancer.batch,
            origin=self.balancer.origin, lays_out=self._lays_out(), chooses=self._chooses,
        )  # fmt: skip

    @property
    def _chooses(self) -> bool:
        """Whether this rank wants all to choose anew how buckets travel."""
        return self._ways.chooses and self._chosen < self.balancer.dialogue.links.asked

    def _choose_anew(self) -> None:
        """Between two steps. A collective call."""
        self._to_choose = False
        links = self.balancer.dialogue.links
        with self.balancer.timesheet.aside():
            self._ways.time_anew()
            # Each by itself: how long exchanges live that are no longer needed differs from rank to rank.
            changed = any([exchange.choose_anew() for exchange in self._exchanges])
        timing_s, self._chosen = self._ways.timing_s, links.asked
        links.chosen(self.number, timing_s, changed=changed)
        why = {"reason": links.reason} if links.reason else {}  # which rank 0 knows
        self.balancer.record.event("links", step=self.balancer.step, timing_s=timing_s, changed=changed, **why)

    def incoming(
        self, total: Sequence[float], *, norms: Callable[[], Sequence[Any]], terms: float, batches: int,
        counts: bool = True,
    ) -> None:
        """Takes in what all ranks said with the gradients of a step of `batches` global batches.

        Args:
            total: the sum of the control vectors.
            norms: the squared norms of the merged buckets: see `NoiseMeter.end`.
            terms: this rank's.
            counts: whether the step does; a rank that leaves it out may be between two batches.

        Raises:
            PeerError: a rank cannot go on.
            DivergedError: ranks are at different batches, or hold different parameters.
        """
        report = self.balancer.dialogue.incoming(total, leads=self._carries, noise=self.noise)
        self.relayout = report.lays_out
        if counts:
            check_together(report.batches, self.engine.ranks)
            check_origins(report.origins, self.engine.ranks)
        self._guard.incoming(report.hashes, report.interval)
        self.noise.end(
            terms=terms, weight=self.weight(terms), merged=norms() if self.engine.rank == 0 else (),
            gain=self.scale * batches, all_terms=total[0], batches=batches,
        )  # fmt: skip
        self._to_choose |= report.chooses

    def _reference(self, terms: float) -> float | None:
        """How many loss terms a global batch has, as far as a rank knows that has so many, of its share; None where its
        share says nothing."""
        share = self.balancer.plan.shares[self.engine.rank]
        return terms / self.batches * self.balancer.global_batch_size / share if share else None

    def exchange(
        self, layout: Buckets, shapes: Sequence[Sequence[tuple[int, ...]]], *, control: Any,
        terms: Callable[[], float], kind: str = "gradients",
    ) -> WeightedExchange:
        """The exchange of a layout's buckets, of tensors of these shapes, which are over so many loss `terms` when they
        are sent; `control`: where none of them has a tail. It takes the place of the one before it of its `kind`. A
        collective call."""
        self._generation += 1
        name = f"{self.name}.{self._generation}"
        ways = functools.partial(self._ways.of, layout.buckets, shapes, layout.lossy)
        exchange = WeightedExchange(
            self.engine,
            layout.buckets,
            control if layout.tail is None else layout.tail,
            routes=ways(name),
            rides_in=layout.tail_in,
            outgoing=lambda: self.outgoing(terms()),
            name=name,
            keeps=self._ways.keeps,
            weight=lambda: self._reference(terms()),
            fails=lambda total: bool(failed_in(total, ranks=self.engine.size)),
            choose=ways,
        )
        self._exchanges.add(exchange)
        if self._ways.chooses and self.engine.rank == 0:
            self.balancer.dialogue.links.matter(
                self.number, timing_s=self._ways.timing_s, gentle_steps=self._ways.gentle_steps
            )
        self.keeping.put(kind, [exchange], lambda: self.part_unit)
        return exchange

    def succeeds(self, before: Weighing) -> bool:
        """Takes the place of an exchange of some of the same gradients; whether that keeps back what this one can send.
        """
        if self._keepers is before._keepers:
            self._keepers.succeed(self.keeping, before.keeping)
            self.balancer.strategies.hand_over(before.place, to=self.place)
        return self.keeping.keeps and before.keeping.keeps and self.engine.ranks == before.engine.ranks

    def close(self) -> None:
        """Exchanges no more: what its codecs and its strategy keep is nobody's any longer."""
        self.balancer.strategies.remove(self.place)
        self.balancer.dialogue.links.gone(self.number)
        self._keepers.remove(self.keeping)

    @property
    def at(self) -> int:
        """The index of this weighing among those of its kind, which outlives an elastic reset."""
        return self._keepers.place_of(self.keeping)[1]
