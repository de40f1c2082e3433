"""Exchanges the gradients of one layout: fills and sends buckets as they come, and hands on the merged gradients.

This is the part on the host, on flat arrays: numpy arrays with the TensorFlow back end, tensors with the torch one.
"""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from hvd_hetero.codecs.verbs import arrays_like
from hvd_hetero.engine.port import GraphEngine
from hvd_hetero.optimizers.agreement import agree_text
from hvd_hetero.optimizers.weighted_exchange import WeightedExchange

from .accumulation import places
from .layout import BucketLayout, Spec
from .residuals import Residuals

if TYPE_CHECKING:
    from .reducer import GradientReducer


BROKEN_OFF = (
    "Expected each gradient once in a step. Received: one again, as after a step that broke off when part of its "
    "gradients had left. Go on from a checkpoint, in a new job."
)
TRACED_BEFORE = (
    "Expected what was traced for the ranks that there are now. Received a call of what was traced before they became "
    "others. Call the tf.function, which is traced anew, and not a concrete function that was made of it."
)


class ReducedStep:
    """Exchanges gradients of given shapes, step after step. Constructing one is a collective call.

    Args:
        owner: the reducer that makes it.
        specs: shapes and types of the gradients; None for a variable without one.
        place: distinguishes these gradients from others of the same shapes, alike in all processes.
    """

    def __init__(
        self, owner: GradientReducer, specs: Sequence[Spec | None], variables: Sequence[Any], *, place: Any
    ) -> None:
        self._owner, self._gradient_exchange, self._balancer = owner, owner.gradient_exchange, owner.balancer
        engine, form, self._count = self._gradient_exchange.engine, owner.form, self._gradient_exchange.count
        self._form = form
        agree_text(
            engine,
            lambda: ", ".join("none" if s is None else f"{s.dtype}{list(s.shape)}" for s in specs),
            title="gradients",
            name=engine.unique("hvd_hetero.gradients."),
        )
        present = [spec for spec in specs if spec is not None]
        self.layout = BucketLayout(
            present,
            bucket_bytes=owner.bucket_bytes(present),
            tail=self._gradient_exchange.tail,
            lossy=owner.routing.takes,
            zeros=form.zeros,
        )
        # Holds variables only if gradients are added up: a tape may be asked for tensors, which must not be kept alive.
        self.places = functools.partial(places, self.layout, specs, variables if owner.passes > 1 else ())
        self.kind = f"gradients {zlib.crc32(str((specs, place)).encode()):08x}"  # codecs keep a state for each
        self._terms, self._passes = 0.0, 0  # of this rank since the last exchange
        self._is_local: bool | None = None  # whether these passes are of a local step; None: not decided yet
        self._now = self._weight = 0.0  # terms of this pass, and what its gradients are multiplied by
        self._taken: set[int] = set()  # indices of the buckets taken in this pass
        self._start = 0.0  # when the graph began to wait for its sums
        self._arrived: Callable[[], None] = lambda: None  # is called when the graph waits no longer
        self._taking = threading.Lock()
        self._exchange: WeightedExchange = self._gradient_exchange.exchange(
            self.layout,
            self.layout.shapes,
            control=form.zeros(self._gradient_exchange.tail, "float64"),
            terms=lambda: self._terms,
            kind=self.kind,
        )
        owner.sums.put(self.kind, self)
        self.kept = Residuals(self._exchange, self.layout, specs, variables)
        self._balancer.step_timer.measure_with(form.stopwatch())

    def take(self, index: int, flat: Any, last: bool, part: int) -> None:
        """See `Step`."""
        if index in self._taken:
            raise RuntimeError(BROKEN_OFF)
        with self._taking:
            if not self._taken:
                self._begin_pass(part)
            self._taken.add(index)
            self._add(index, flat)
            if last and not self._is_local:
                self._send(index)

    def finish(self, last: bool) -> list[Any]:
        """See `Step`."""
        self._taken.clear()
        self._balancer.exchanges.arrivals.complete(self._owner)
        self._passes += 1
        flats = [bucket[:length] for bucket, length in zip(self.layout.buckets, self.layout.lengths, strict=True)]
        if not last:
            self._balancer.step_timer.pause()
            self._balancer.step_timer.run()  # the next batch, which may have to be waited for
            return [self._form.zeros_like(flat) for flat in flats]
        self._balancer.step_timer.pause()
        results = self._own(flats) if self._is_local else self._exchanged()
        # Copied if they are the buckets: the caller may keep these, and buckets are filled again in the next step.
        copied, layout = self._form.copied, self.layout
        return [
            copied(flat[:length]) if flat is bucket else flat[:length]
            for flat, bucket, length in zip(results, layout.buckets, layout.lengths, strict=True)
        ]

    def _begin_pass(self, part: int) -> None:
        if self._owner.closed:
            raise RuntimeError(TRACED_BEFORE)
        self._owner.last = self
        self._balancer.exchanges.arrivals.first(self._owner, part)
        terms = self._balancer.progress.terms
        assert terms is not None  # begun
        if self._passes == 0 and self._count.batches_per_exchange > 1:
            self._go_on()
        if self._passes == 0 or self._is_local is None:
            self._is_local = self._owner.is_local
        self._now = terms
        self._weight = terms if self._count.batches_per_exchange > 1 else self._gradient_exchange.weight(terms)
        self._terms += terms

    def _go_on(self) -> None:
        """Takes over what another step object has added up since the last exchange, if layers were frozen or thawed in
        between."""
        left = self._owner.left
        before = next((step for step in self._owner.steps.values() if step._passes), None)
        if before is None:
            left.clear()
            return
        left.update(before.places())
        for name, place in self.places().items():
            place[:] = left.pop(name, 0.0)
        self._terms, self._passes, self._is_local = before._terms, before._passes, before._is_local
        before._terms, before._passes = 0.0, 0

    def _add(self, index: int, flat: Any) -> None:
        """Adds this rank's mean gradient over the loss terms of this pass, weighted, to a bucket. One over no terms is
        ignored, whatever it holds."""
        mine = self.layout.buckets[index][: self.layout.lengths[index]]
        terms, weight = self._now, self._weight
        if self._passes == 0 and terms:
            self._form.scaled_into(mine, flat, weight)
        elif terms:
            mine += flat * weight
        elif self._passes == 0:
            mine[:] = 0.0

    def _send(self, index: int) -> None:
        if self._count.batches_per_exchange > 1:
            self.layout.buckets[index][: self.layout.lengths[index]] *= 1.0 / self._gradient_exchange.unit
        self._gradient_exchange.noise.sees(self.layout, index)
        self._exchange.submit(index)

    def _scale(self, total: Sequence[float]) -> float:
        """The factor that turns the sum of c_i g_i over the ranks into the gradient that the optimizer is given."""
        return self._gradient_exchange.factor(total) * self._count.batches_per_exchange / self._count.batches

    def _own(self, flats: Sequence[Any]) -> list[Any]:
        """This rank's own mean gradients, in a local step; zeros if it has no sample."""
        local, terms, factor = self._owner.local, self._terms, self._scale([self._terms])
        assert local is not None
        if self._count.batches_per_exchange > 1:
            factor /= self._gradient_exchange.unit
        self._terms, self._passes = 0.0, 0
        self._count.end()
        factor *= local.before_step(terms)
        return [flat * factor for flat in flats]

    def _exchanged(self) -> list[Any]:
        """The mean gradients over all ranks' loss terms."""
        if self._owner.local is not None:
            self._owner.local.before_synchronous_step()
        start = time.perf_counter()
        terms, batches = self._terms, self._count.batches
        try:
            results, total = self._exchange.finish(self._scale)
        except BaseException:
            self._balancer.dialogue.unheard()
            raise
        finally:
            self._terms, self._passes = 0.0, 0
            self._count.end()
        norms = functools.partial(self._gradient_exchange.noise.of, self.layout, results)
        self._heard(total, start, norms=norms, terms=terms, batches=batches)
        return results

    def _heard(
        self, total: Sequence[float], start: float, *, norms: Callable[[], Sequence[Any]], terms: float, batches: int
    ) -> None:
        """Reads what all ranks said in an exchange, for whose end this rank has waited since `start`."""
        self._owner.wait_s = time.perf_counter() - start
        self._balancer.step_timer.run()
        self._gradient_exchange.incoming(total, norms=norms, terms=terms, batches=batches)
        sent = sum(len(bucket) * bucket.itemsize for bucket in self.layout.buckets)
        leads = self._gradient_exchange.leads
        self._balancer.exchanged(wait_s=self._owner.wait_s, bytes_sent=sent, leads=leads)

    # Where the sums are operations of a graph: see `GraphStep` ------------------------------------------------------

    @property
    def in_graph(self) -> bool:
        """Whether the sums can be operations of the graph."""
        owner, engine = self._owner, self._gradient_exchange.engine
        plain = owner.routing.plain and owner.strategy is None and owner.passes == 1 and self.layout.tail is not None
        return plain and isinstance(engine, GraphEngine) and engine.sums_in_graph

    @property
    def _engine(self) -> GraphEngine:
        return cast("GraphEngine", self._gradient_exchange.engine)

    def begin(self, part: int) -> list[float]:
        """See `GraphStep`."""
        if self._taken:
            raise RuntimeError(BROKEN_OFF)
        self._begin_pass(part)
        self._taken.update(range(len(self.layout.buckets)))
        return [self._weight, float(self._gradient_exchange.noise.measuring)]

    def send(self) -> Sequence[float]:
        """See `GraphStep`."""
        self._balancer.step_timer.pause()
        self._start = time.perf_counter()
        control = self._exchange.outgoing()
        assert self.layout.tail_in is not None
        self._arrived = self._engine.awaits_in_graph(
            self._exchange.name_of(self.layout.tail_in), broken=self._balancer.dialogue.unheard
        )
        return control

    def sum(self, index: int, flat: Any) -> Any:
        """See `GraphStep`."""
        return self._engine.sum_in_graph(flat, name=self._exchange.name_of(index))

    def end(self, total: Sequence[float], own: Sequence[float], merged: Sequence[float]) -> float:
        """See `GraphStep`."""
        self._arrived()
        self._taken.clear()
        self._balancer.exchanges.arrivals.complete(self._owner)
        noise, factor = self._gradient_exchange.noise, self._scale(total)
        if noise.measuring:
            for index, squared_norm in enumerate(own):
                noise.add(index, squared_norm)
        terms, batches = self._terms, self._count.batches
        self._terms, self._passes = 0.0, 0
        self._count.end()
        norms = [factor**2 * squared_norm for squared_norm in merged] if noise.measuring else []
        self._heard(total, self._start, norms=lambda: norms, terms=terms, batches=batches)
        return factor

    def sums(self) -> dict[str, Any] | None:
        """See `GradientAccumulator`."""
        if self._passes == 0:
            return None
        arrays = [self._form.copied(part) for part in self.layout.parts]
        return {"terms": self._terms, "passes": self._passes, "apart": self._is_local, "arrays": arrays}

    def load_sums(self, sums: Mapping[str, Any] | None) -> None:
        """See `GradientAccumulator`."""
        sums = sums or {"terms": 0.0, "passes": 0, "arrays": ()}
        self._terms, self._passes, self._is_local = sums["terms"], sums["passes"], sums.get("apart")
        for part, array in zip(self.layout.parts, sums["arrays"], strict=False):
            part[:] = arrays_like(part, array)

    @property
    def unit(self) -> float:
        """The part of an update's global batches that has the weight 1 in the sums."""
        return self._gradient_exchange.part_unit / self._count.batches_per_exchange

    def gives_to(self, other: ReducedStep) -> bool:
        """Whether `other` may send what codecs have kept back here: it has the same ranks, and the loss is not scaled.
        """
        owner = self._owner
        ranks, others = self._gradient_exchange.engine.ranks, other._gradient_exchange.engine.ranks
        return owner.succeeds and not owner.closed and ranks == others

    def withdraw(self) -> Callable[[], bool]:
        """See `GradientReducer.withdraw`."""
        self._terms = 0.0
        for index, bucket in enumerate(self.layout.buckets):
            if index not in self._exchange.submitted:
                bucket[:] = 0.0
                self._exchange.submit(index)
        return self._exchange.done
