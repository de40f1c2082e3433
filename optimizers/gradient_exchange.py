"""The weights of one optimizer's gradients, and the control vector that is exchanged with them, for any framework.

See `weighted_exchange` for the formula. This module chooses its n_ref, and writes and reads the control vector.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hvd_hetero.engine.port import Engine

from .attachment import Attached
from .balancer import Balancer
from .control import failed_in, length, unpack
from .exchange_count import ExchangeCount
from .noise import Buckets, GradientNoise
from .parameter_guard import ParameterGuard, check_origins, check_together
from .parameter_store import ParameterStore
from .place import Place
from .routing import Routing
from .weighted_exchange import WeightedExchange

# Buckets are few and large, since Horovod negotiates each operation between the ranks.
BUCKET_BYTES = 8 << 20


class GradientExchange:
    """Weights the gradients of one optimizer in every exchange. The reducers of torch and Keras make one each.

    Args:
        balancer: counts this rank's loss terms, and receives what all ranks say in each exchange.
        attached: the reducer, which the balancer calls when a batch begins.
        routing: how buckets are summed.
        batches_per_exchange: global batches per exchange; their gradients are summed, as in Horovod.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        predivide: divides gradients before the sum, and multiplies them after it, so that float16 does not overflow.
        parameters: returns the parameters of these gradients, None until they are known; see `ParameterGuard`.
        lays_out: returns whether this rank asks for another layout of buckets.
        kind: the kind of the reducer, under which its state is found again: see `Places`.
        at: the index among those of this kind, for one that replaces an earlier one; None: the first free one.

    Attributes:
        count: counts the global batches of the next exchange.
        relayout: whether any rank asked for another layout in the last exchange.
        number: how many exchanges were attached to the balancer before this one.
        noise: measures the noise of the gradient.
        unsent_state: the state of this optimizer's exchanges, such as the residuals of codecs, on this rank.
        place: the name under which that state is found again in a checkpoint or after an elastic reset.
    """

    def __init__(
        self,
        balancer: Balancer,
        attached: Attached,
        *,
        routing: Routing,
        batches_per_exchange: int,
        scale: float,
        predivide: float,
        parameters: Callable[[], ParameterStore | None],
        lays_out: Callable[[], bool] = lambda: False,
        kind: str = "optimizer",
        at: int | None,
    ) -> None:
        self._lays_out, self.relayout = lays_out, False
        self._exchanges: weakref.WeakSet[WeightedExchange] = weakref.WeakSet()
        self._chosen = balancer.dialogue.links.asked  # the value of `LinkMonitor.asked` when routes were last chosen
        self._to_choose = False  # whether all ranks choose their routes anew when the next batch begins
        self.balancer, self._routing = balancer, routing
        self.scale, self._predivide = scale, predivide
        self.number, self._attached = balancer.exchanges.attach(attached), attached
        self.noise = GradientNoise()
        self.count = ExchangeCount(lambda: balancer.progress.backward_passes, batches_per_exchange)
        self._told: dict[int, tuple[int, int]] = {}  # by batch, of the last ones: samples of this rank and of all ranks
        self._generation = 0  # the number of `WeightedExchange`s made so far, a part of their names
        self._keepers = balancer.keepers
        self.unsent_state = balancer.keepers.take(kind, at)
        self.place = Place(lambda: "{} {}".format(*self._keepers.place_of(self.unsent_state)))
        self.unsent_state.keeps = routing.keeps
        self.unsent_state.put_message("noise", self.noise)
        self._guard = ParameterGuard(balancer.engine, parameters, name=self.name, tell=self._differed)

    def _differed(self, fields: dict[str, Any]) -> None:
        self.balancer.record.event("parameters", **fields)

    @property
    def leads(self) -> bool:
        """Whether this optimizer leads: its exchanges carry the balancer's measurements and plans. True also while the
        merges of a local strategy carry them instead: see `StrategyRegistry.lead`."""
        return self.balancer.exchanges.leads(self._attached)

    @property
    def _carries(self) -> bool:
        """Whether the next exchange carries the measurements and plans."""
        return self.leads and not self.balancer.strategies.lead

    @property
    def engine(self) -> Engine:
        """The ranks that train together."""
        return self.balancer.engine

    @property
    def tail(self) -> int:
        """The length of the control vector, in elements."""
        return length(self.engine.size)

    @property
    def name(self) -> str:
        """The prefix of the operations' names, the same on all ranks."""
        return f"hvd_hetero.{self.balancer.name}.{self.number}"

    def begin(self) -> None:
        """Counts a global batch that begins. If ranks have agreed to choose routes anew, does so, a collective call."""
        self.count.begin()
        progress, step = self.balancer.progress, self.balancer.step
        self._told.pop(step, None)
        if progress.whole is not None:
            self._told[step] = progress.samples, progress.whole
        while len(self._told) > self.count.batches_per_exchange:
            del self._told[next(iter(self._told))]
        # Not in `incoming`: exchanges of several optimizers may end in a different order on each rank.
        if self._to_choose:
            self._choose_anew()

    @property
    def gain(self) -> float:
        """The factor by which the mean over all loss terms is multiplied."""
        return self.scale * self.count.batches

    @property
    def unit(self) -> float:
        """The number of loss terms whose weight c_i is 1: n_ref times `predivide`. The same on all ranks."""
        whole, shares = self.balancer.global_batch_size, self.balancer.plan.shares
        # With n_ref = the whole batch the sum need not be multiplied by a factor. The mean share is taken for equal
        # shares, whose products with c_i = 1 are exact, and for codecs: float16 needs values of that size, and the unit
        # of residuals must stay the same when shares change.
        even = min(shares) == max(shares)
        return self._predivide * (whole / self.engine.size if even or not self._routing.exact else whole)

    @property
    def part_unit(self) -> float:
        """The fraction of a global batch whose weight is 1, the unit in which residuals pass to another set of ranks.
        Loss terms cannot be: without a balancer there is one for each rank, whatever the number of ranks."""
        return self.unit / self.balancer.global_batch_size

    def weight(self, terms: float) -> float:
        """Returns the weight c_i of a gradient that is a mean over `terms` loss terms."""
        return terms / self.unit

    def factor(self, total: Sequence[float]) -> float:
        """Returns the factor from sum_i c_i g_i to the gradient of the step: `gain` times the mean over all loss
        terms. `total`: the summed control vector. 0 if no rank had a loss term."""
        return self.gain * self.unit / total[0] if total[0] else 0.0

    def outgoing(self, terms: float) -> list[float]:
        """Returns this rank's control vector for an exchange in which its gradient is over `terms` loss terms."""
        return self.balancer.dialogue.outgoing(
            leads=self._carries, count=terms, noise=self.noise, comparison=self._guard.outgoing(),
            batch=self.balancer.batch, origin=self.balancer.origin, lays_out=self._lays_out(), chooses=self._chooses,
        )  # fmt: skip

    @property
    def _chooses(self) -> bool:
        """Whether this rank asks all ranks to choose anew how buckets are summed. Rank 0 does when it notices that the
        links have changed: see `LinkMonitor`."""
        return self._routing.chooses and self._chosen < self.balancer.dialogue.links.asked

    def _choose_anew(self) -> None:
        """Times the routes again and takes the fastest ones, between two steps. A collective call."""
        self._to_choose = False
        links = self.balancer.dialogue.links
        with self.balancer.step_timer.aside():
            self._routing.time_anew()
            # A list, so that every exchange chooses. No choice may need other ranks: exchanges that are no longer used
            # are garbage-collected at different times on each rank.
            changed = any([exchange.choose_anew() for exchange in self._exchanges])
        timing_s, self._chosen = self._routing.timing_s, links.asked
        links.chosen(self.number, timing_s, changed=changed)
        why = {"reason": links.reason} if links.reason else {}  # rank 0 alone knows it
        self.balancer.record.event("links", step=self.balancer.step, timing_s=timing_s, changed=changed, **why)

    def incoming(
        self, total: Sequence[float], *, norms: Callable[[], Sequence[Any]], terms: float, batches: int,
        counts: bool = True,
    ) -> None:
        """Reads the summed control vector, after the exchange of a step.

        Args:
            total: the sum of all ranks' control vectors.
            norms: returns the squared norms of the summed buckets; called on rank 0 alone: see `GradientNoise.end`.
            terms: loss terms of this rank in the step.
            batches: global batches of the step.
            counts: whether the step counts. If not, batches are not compared, as this rank may be between two.

        Raises:
            PeerError: a rank cannot go on.
            DivergedError: ranks are at different batches, or hold different parameters.
        """
        report = unpack(total, ranks=self.engine.size)
        self.balancer.dialogue.incoming(report, leads=self._carries, noise=self.noise)
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
        """Estimates the loss terms of a batch over all ranks, the mean of the batches that this rank's `terms` are of,
        in proportion to its samples of these. None if it has none. `ScaledResiduals` takes it as the weight of the sum
        that a residual goes into."""
        steps = self._steps
        own, whole = map(sum, zip(*map(self._samples_of, steps), strict=True))
        return terms * whole / (own * len(steps)) if own else None

    @property
    def _part(self) -> float:
        """The part of whole batches that all ranks have in those that the next exchange is over."""
        steps = self._steps
        return sum(self._samples_of(step)[1] for step in steps) / (self.balancer.global_batch_size * len(steps))

    @property
    def _steps(self) -> Sequence[int]:
        """The batches that the next exchange is over, the last one first."""
        last = max(self.balancer.step, 0)
        first = self.balancer.planner.plans[0].step  # later than some if ranks have changed between two exchanges
        return [max(last - before, first) for before in range(self.count.batches)]

    def _samples_of(self, step: int) -> tuple[int, int]:
        """The samples of this rank and of all ranks in a batch, by the plan if nobody has told how many all have."""
        planned = self.balancer.plan_at(step).shares[self.engine.rank], self.balancer.global_batch_size
        return self._told.get(step, planned)

    def exchange(
        self, layout: Buckets, shapes: Sequence[Sequence[tuple[int, ...]]], *, control: Any,
        terms: Callable[[], float], kind: str = "gradients",
    ) -> WeightedExchange:
        """Makes the exchange of a layout's buckets. A collective call.

        Args:
            layout: the buckets, and which of them ends in the control vector, if any.
            shapes: for each bucket, the shapes of the tensors in it.
            control: an array for the control vector, used if no bucket holds it.
            terms: returns the loss terms that this rank's gradients are over; called when they are sent.
            kind: the name under which the residuals of its codecs are kept; replaces the earlier exchange of that name.
        """
        self._generation += 1
        name = f"{self.name}.{self._generation}"
        routing = functools.partial(self._routing.routes_for, layout.buckets, shapes, layout.lossy)
        exchange = WeightedExchange(
            self.engine,
            layout.buckets,
            control if layout.tail is None else layout.tail,
            routes=routing(name),
            rides_in=layout.tail_in,
            outgoing=lambda: self.outgoing(terms()),
            name=name,
            keeps=self._routing.keeps,
            weight=lambda: self._reference(terms()),
            part=lambda: self._part,
            fails=lambda total: bool(failed_in(total, ranks=self.engine.size)),
            choose=routing,
        )
        self._exchanges.add(exchange)
        if self._routing.chooses and self.engine.rank == 0:
            self.balancer.dialogue.links.matter(
                self.number, timing_s=self._routing.timing_s, codec_warmup_steps=self._routing.codec_warmup_steps
            )
        self.unsent_state.put(kind, [exchange], lambda: self.part_unit)
        return exchange

    def succeeds(self, before: GradientExchange) -> bool:
        """Takes over the place and the strategy's state of `before`, the exchange of an earlier optimizer that shares
        parameters with this one. Returns whether residuals of its codecs can be sent here: if both have such codecs,
        and the same ranks. Not of one of before an elastic reset: the job's state hands those over."""
        if self._keepers is before._keepers:
            self._keepers.succeed(self.unsent_state, before.unsent_state)
            self.inherits(before)
        elif self.balancer is before.balancer:
            return False
        return self.unsent_state.keeps and before.unsent_state.keeps and self.engine.ranks == before.engine.ranks

    def inherits(self, before: GradientExchange) -> bool:
        """Takes over the strategy's state of `before`, the exchange of an earlier optimizer of the same parameters,
        which keeps its place, as it may be used again. Returns whether both have the same balancer, and the ranks have
        not become others in between."""
        alike = self._keepers is before._keepers
        if alike:
            self.balancer.strategies.hand_over(before.place, to=self.place)
        return alike

    def close(self) -> None:
        """Ends this optimizer's exchanges, and drops the state of its codecs and its strategy."""
        self.balancer.strategies.remove(self.place)
        if self.balancer.strategies.empty:
            self.balancer.planner.without_local_steps()
        self.balancer.dialogue.links.gone(self.number)
        if self._keepers is self.balancer.keepers:  # those of before an elastic reset still tell others their places
            self._keepers.remove(self.unsent_state)

    @property
    def at(self) -> int:
        """The index of this exchange among those of its kind; stays the same over an elastic reset."""
        return self._keepers.place_of(self.unsent_state)[1]
