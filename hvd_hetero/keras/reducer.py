"""From a list of gradients to those of the global batch: one exchange, in which all buckets travel.

The host's part, on flat arrays: numpy arrays with the TensorFlow back end, tensors with the torch one. What comes
before and after it – gradients made flat, and back – is in `gradient_tensorflow` and `gradient_torch`.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_hetero.optimizers.agreement import agree_text
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.noise import GradientNoise
from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.optimizers.weighing import BUCKET_BYTES, Weighing
from hvd_hetero.optimizers.weighted import WeightedExchange

from . import backend
from .layout import BucketLayout, Spec
from .local import LocalTraining, ParameterStore


class GradientReducer:
    """Reduces the gradients of one optimizer or tape, weighted by `balancer`'s counts.

    Args:
        passes: global batches per exchange.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        predivide: divides before the sum and multiplies after it, for narrow wires.
        bucket_bytes: at most so much in one operation; None: what suits the links.
        strategy: a local one, where ranks make steps apart.
    """

    def __init__(
        self,
        *,
        balancer: Balancer,
        ways: Ways,
        passes: int = 1,
        scale: float = 1.0,
        predivide: float = 1.0,
        bucket_bytes: int | None = None,
        strategy: LocalSGD | None = None,
    ) -> None:
        self._balancer, self._ways, self._bucket_bytes = balancer, ways, bucket_bytes
        self._variables: Sequence[Any] = ()
        self._weighing = Weighing(
            balancer,
            self,
            ways=ways,
            passes=passes,
            scale=scale,
            predivide=predivide,
            parameters=lambda: ParameterStore(self._variables, self._form) if self._variables else None,
        )
        self._form: Any = importlib.import_module(f"{__package__}.gradient_{backend.NAME}")
        self._steps: dict[tuple[Spec | None, ...], ReducedStep] = {}
        self._last: ReducedStep | None = None
        self.strategy = strategy
        self.wait_s = 0.0  # for the exchange, in the last step
        self.local: LocalTraining | None = None  # made with the first gradients: then the variables are known

    @property
    def noise(self) -> GradientNoise:
        """Measures how noisy the gradient is."""
        return self._weighing.noise

    @property
    def balancer(self) -> Balancer:
        """Knows the counts."""
        return self._balancer

    @property
    def passes(self) -> int:
        """Global batches per exchange."""
        return self._weighing.passes

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], iterations: Any) -> list[Any]:
        """The gradients of the mean loss over the global batch, where there is one; None stays None.

        With several `passes`, those of their mean times their number, at each `passes`-th of the `iterations`; zeros
        in between. The first call for gradients of these shapes is a collective one.
        """
        # What a tape is asked for may be a tensor as well.
        self._variables = [
            v for g, v in zip(gradients, variables, strict=True) if g is not None and hasattr(v, "assign")
        ]
        found = [self._form.dense(g, v) for g, v in zip(gradients, variables, strict=True)]
        specs = tuple(None if g is None else self._form.spec(g) for g in found)
        if self.strategy is not None:
            if self.local is None:
                self.local = LocalTraining(self.strategy, variables, self._weighing, ways=self._ways, form=self._form)
            self.local.check(variables)
        if specs not in self._steps:
            self._steps[specs] = ReducedStep(self, specs)
        if self._form.tracing():
            self._balancer.discard()
        step = self._steps[specs]
        present = [g for g in found if g is not None]
        if not present:
            return found
        last = self._form.last_of(iterations, self.passes)
        reduced = iter(self._form.through(step, present, last, self._variables))
        return [None if g is None else next(reduced) for g in found]

    # Steps apart ----------------------------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Whether the gradients of the batch begun last stay this rank's own."""
        return self.local is not None and self.local.steps.apart()

    @property
    def merges(self) -> int:
        """Merges so far."""
        return 0 if self.local is None else self.local.steps.rounds.merges

    def updated(self, optimizer: Any, variables: Sequence[Any], rate: Any) -> None:
        """Follows the update of `variables`: sends what a step apart has done, and takes in merges, on the host."""
        if (local := self.local) is not None:
            touched = [*variables, *optimizer.variables]
            self._form.afterwards(lambda lr: local.after_step(lr, optimizer), touched, rate)

    def merge(self, model: Any) -> None:
        """Returns when all ranks hold one model, and with `model` its statistics as well. A collective call."""
        if self.local is not None:
            self.local.merge(model)

    def close(self) -> None:
        """Reduces no more: the ranks have become others."""
        if self.local is not None:
            self.local.steps.abandon()

    # What the balancer asks -----------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """A global batch begins."""
        self._weighing.begin()

    def on_count(self, terms: float) -> None:
        """A batch is over so many loss terms; read when its gradients are there."""

    def on_epoch_end(self) -> None:
        """The samples of an epoch are used up."""
        if self.local is not None and self.local.steps.rule.merge_each_epoch:
            self.local.steps.merge()

    def withdraw(self) -> Callable[[], bool]:
        """Takes part in the next exchange with nothing, without waiting; tells whether it is over."""
        if self.local is not None and self.apart:
            return self.local.steps.withdraw()
        if self._last is None:  # the others wait for this rank's shapes, and hear when its process ends
            return lambda: False
        return self._last.withdraw()


class ReducedStep:
    """The exchange of gradients of given shapes. Making one is a collective call."""

    def __init__(self, owner: GradientReducer, specs: Sequence[Spec | None]) -> None:
        self._owner, self._weighing, self._balancer = owner, owner._weighing, owner._balancer
        engine, ways, form = self._weighing.engine, owner._ways, owner._form
        agree_text(
            engine,
            lambda: ", ".join("none" if s is None else f"{s.dtype}{list(s.shape)}" for s in specs),
            title="gradients",
            name=engine.unique("hvd_hetero.gradients."),
        )
        present = [spec for spec in specs if spec is not None]
        if owner._bucket_bytes is None and present:
            owner._bucket_bytes = ways.bucket_bytes(form.zeros(0, present[0].wire), most=BUCKET_BYTES)
        self.layout = BucketLayout(
            present,
            bucket_bytes=owner._bucket_bytes or BUCKET_BYTES,
            tail=self._weighing.tail,
            lossy=ways.takes,
            zeros=form.zeros,
        )
        self._terms, self._passes = 0.0, 0  # of this rank since the last exchange
        self._apart = False  # these passes
        self._now = 0.0  # terms of this pass
        self._taken: set[int] = set()  # buckets of this pass
        self._taking = threading.Lock()
        self._exchange: WeightedExchange = self._weighing.exchange(
            self.layout,
            self.layout.shapes,
            control=form.zeros(self._weighing.tail, "float64"),
            outgoing=lambda: self._weighing.outgoing(self._terms),
            write=form.write,
        )
        self._balancer.measure_with(form.stopwatch())

    def take(self, index: int, flat: Any, last: bool) -> None:
        """See `Step`."""
        if index in self._taken:
            raise RuntimeError(
                "Expected each gradient once in a step. Received: one again, as after a step that broke off when part "
                "of its gradients had left. Go on from a checkpoint, in a new job."
            )
        with self._taking:
            if not self._taken:
                self._begin_pass()
            self._taken.add(index)
            self._add(index, flat)
            if last and not self._apart:
                self._send(index)

    def finish(self, last: bool) -> list[Any]:
        """See `Step`."""
        self._taken.clear()
        self._passes += 1
        flats = [bucket[:length] for bucket, length in zip(self.layout.buckets, self.layout.lengths, strict=True)]
        if not last:
            return [self._owner._form.zeros_like(flat) for flat in flats]
        self._balancer.pause()
        results = self._own(flats) if self._apart else self._exchanged()
        # Who gets these may keep them, and buckets are filled again in the next step.
        copied, layout = self._owner._form.copied, self.layout
        return [
            copied(flat[:length]) if flat is bucket else flat[:length]
            for flat, bucket, length in zip(results, layout.buckets, layout.lengths, strict=True)
        ]

    def _begin_pass(self) -> None:
        self._owner._last = self
        self._balancer.runs(self._owner)
        terms = self._balancer.count_now
        assert terms is not None  # begun
        if self._passes == 0:
            self._apart = self._owner.apart
        self._now = terms
        self._terms += terms

    def _add(self, index: int, flat: Any) -> None:
        """Adds this rank's mean gradient over the terms of this pass to a bucket; one over none counts for nothing,
        whatever it is."""
        mine = self.layout.buckets[index][: self.layout.lengths[index]]
        terms, several = self._now, self._weighing.passes > 1
        weight = terms if several else self._weighing.weight(terms)
        if self._passes == 0 and terms:
            self._owner._form.scaled_into(mine, flat, weight)
        elif terms:
            mine += flat * weight
        elif self._passes == 0:
            mine[:] = 0.0

    def _send(self, index: int) -> None:
        if self._weighing.passes > 1:
            self.layout.buckets[index][: self.layout.lengths[index]] *= 1.0 / self._weighing.unit
        self._weighing.noise.sees(self.layout, index)
        self._exchange.submit(index)

    def _scale(self, total: Sequence[float]) -> float:
        """What turns the sum of c_i g_i over all terms into what an optimizer that accumulates is given."""
        return self._weighing.factor(total) * self._weighing.passes / self._weighing.batches

    def _own(self, flats: Sequence[Any]) -> list[Any]:
        """This rank's own mean gradients, of a step apart; zeros where it has no sample."""
        local, terms, factor = self._owner.local, self._terms, self._scale([self._terms])
        assert local is not None
        if self._weighing.passes > 1:
            factor /= self._weighing.unit
        self._terms, self._passes = 0.0, 0
        self._weighing.end()
        local.before_step(terms)
        return [flat * factor for flat in flats]

    def _exchanged(self) -> list[Any]:
        """The mean gradients over all ranks' loss terms."""
        start = time.perf_counter()
        terms, batches = self._terms, self._weighing.batches
        try:
            results, total = self._exchange.finish(self._scale)
        except BaseException:
            self._balancer.dialogue.unheard()
            raise
        finally:
            self._terms, self._passes = 0.0, 0
            self._weighing.end()
        self._owner.wait_s = time.perf_counter() - start
        self._balancer.resume()
        self._weighing.incoming(self.layout, results, total, terms=terms, batches=batches)
        if self._weighing.leads:
            sent = sum(len(flat) * flat.itemsize for flat in results)
            self._balancer.finished(wait_s=self._owner.wait_s, bytes_sent=sent)
        return results

    def withdraw(self) -> Callable[[], bool]:
        """See `GradientReducer.withdraw`."""
        self._terms = 0.0
        for index, bucket in enumerate(self.layout.buckets):
            if index not in self._exchange.submitted:
                bucket[:] = 0.0
                self._exchange.submit(index)
        return self._exchange.done
