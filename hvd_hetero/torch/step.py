"""Exchanges the gradients of one layout: sends buckets as their gradients come, and delivers the merged gradients."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.routing import Routing

from .accumulation import GradientAccumulation
from .layout import BucketLayout, Groups
from .sparse import SparseExchange

HOST = torch.device("cpu")

REENTRANT = (
    "Expected each parameter's gradient once per backward pass. Received: {}, as reentrant checkpointing does. Use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
BROKEN_OFF = (
    "Expected step() after a backward pass that ended. Received: one that an exception ended when part of its "
    "gradients were with the other ranks. Leave this step out on all ranks, if all had the exception; otherwise begin "
    "again from a checkpoint."
)

WITHIN = (
    "Expected step(), zero_grad() and begin() after backward(). Received: one of them within it, as from a hook, when "
    "not all gradients are reduced."
)


class ReducedStep:
    """Reduces the gradients of `parameters` in one step after another. Constructing one is a collective call.

    Args:
        accumulated: the gradients of the step under way.
        bucket_bytes, groups: see `BucketLayout`.
        seen: parameters whose gradients are known to be sparse: `sparse` of `BucketLayout`.
        rows: parameters whose gradients are sparse and not summed as dense ones: `dimensions` of `SparseExchange`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        gradient_exchange: GradientExchange,
        routing: Routing,
        accumulated: GradientAccumulation,
        bucket_bytes: int,
        groups: Groups,
        seen: dict[torch.nn.Parameter, int],
        rows: Mapping[torch.nn.Parameter, int],
    ) -> None:
        self._parameters, self._gradient_exchange, self._accumulated = parameters, gradient_exchange, accumulated
        # The control vector travels in a bucket, unless all buckets go through codecs, which would round it.
        tail = gradient_exchange.tail
        self.layout = BucketLayout(
            [parameter for parameter in parameters if parameter not in rows],
            bucket_bytes=bucket_bytes,
            groups=groups,
            tail=tail,
            lossy=lambda parameter: routing.takes(tuple(parameter.shape)),
            sparse=seen,
        )
        self._exchange = gradient_exchange.exchange(
            self.layout,
            [[tuple(p.shape) for p in members] for members in self.layout.members],
            control=torch.zeros(tail, dtype=torch.float64, device=HOST),
            terms=lambda: accumulated.terms,
        )
        self._sparse = SparseExchange(gradient_exchange.engine, rows, name=f"{self._exchange.name}.sparse")
        self._begin()

    def _begin(self) -> None:
        self._pending = [len(members) for members in self.layout.members]  # gradients that are yet to come, by bucket
        self._ready: set[int] = set()  # ids of the parameters whose gradients are taken
        self._weight: float | None = None
        self._watched: set[int] = set()  # ids of the parameters given to `watch`
        self._sparse.clear()

    def watch(self, parameter: torch.nn.Parameter) -> None:
        """Notes that a gradient is ready here that is not sent from here yet, though ranks with samples send theirs
        now. If all ranks break off the pass, this one has to complete the exchange that the others have begun."""
        self._watched.add(id(parameter))

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Notes that a gradient is ready, and sends its bucket if it was the last one missing there. The bucket with
        the control vector is sent in the end, as the vector describes all gradients."""
        key = id(parameter)
        if key in self._ready:
            raise RuntimeError(REENTRANT.format("one twice"))
        if self._weight is None:
            self._weight = self._weight_now()
        self._ready.add(key)
        index = self.layout.bucket_of.get(key)
        if index is None:
            with _full_precision(parameter.device):
                values = self._sparse.submit(parameter, self._weight)
                self._gradient_exchange.noise.sees_values(parameter, values)
            return
        self._pending[index] -= 1
        if self._pending[index] == 0 and index != self.layout.tail_in:
            self._send(index)

    def _send(self, index: int) -> None:
        assert self._weight is not None  # something is taken
        with _full_precision(self.layout.buckets[index].device):
            self.layout.fill(index, self._weight)
            self._gradient_exchange.noise.sees(self.layout, index)
            self._exchange.submit(index)

    @property
    def sent(self) -> bool:
        """Whether this rank, or a rank with samples, has sent part of this step's gradients."""
        return bool(self._exchange.submitted) or self._sparse.submitted or self._others_sent()

    def _others_sent(self) -> bool:
        """Whether ranks with samples have sent part of the gradients that this one has watched."""
        if any(key not in self.layout.bucket_of for key in self._watched):  # sparse gradients are sent one by one
            return True
        whole = [all(id(p) in self._watched for p in members) for members in self.layout.members]
        return any(done for index, done in enumerate(whole) if index != self.layout.tail_in)

    def drop(self) -> None:
        """Forgets the gradients that were taken, of which none is under way."""
        self._begin()

    def _weight_now(self) -> float:
        """The weight c_i of this rank's gradient: `p.grad` is in units of the loss terms of the last pass with any."""
        return self._gradient_exchange.weight(self._accumulated.unit)

    def take_rest(self) -> Callable[[], bool]:
        """Sends all gradients that are not sent yet. Returns a function that tells whether the exchange is over."""
        if self._accumulated.terms == 0:
            self._weight = 0.0  # nothing computed here counts, not even a NaN
        for parameter in self._parameters:
            if id(parameter) not in self._ready:
                self.take(parameter)
        if self.layout.tail_in is not None and self.layout.tail_in not in self._exchange.submitted:
            self._send(self.layout.tail_in)
        self._exchange.submit_nothing()
        return lambda: self._exchange.done() and self._sparse.done()

    def finish(self, *, counts: bool = True) -> tuple[float, int, Callable[[], None]]:
        """Ends the exchange, once all gradients are taken, and makes every `p.grad` the global gradient if the step
        `counts`. Returns the seconds waited, the bytes sent, and a function that reads what all ranks said in the
        control vector: see `GradientExchange.incoming`."""
        start = time.perf_counter()
        gradient_exchange, balancer = self._gradient_exchange, self._gradient_exchange.balancer
        terms, batches = self._accumulated.terms, gradient_exchange.count.batches
        balancer.step_timer.pause()
        try:
            with _full_precision(self._parameters[0].device if self._parameters else HOST):
                results, total = self._exchange.finish(gradient_exchange.factor, counts=counts)
                bytes_sent = sum(flat.numel() * flat.element_size() for flat in results) + self._sparse.bytes_sent
                sums = self._sparse.finish(gradient_exchange.factor(total))
                if self._exchange.counted:
                    self._sparse.end_step(sums)
        except BaseException:
            balancer.dialogue.unheard()  # otherwise a thread that deals ahead would wait for the answer
            raise
        finally:
            self._begin()
            self._accumulated.clear()
            gradient_exchange.count.end()
        waited_s = time.perf_counter() - start
        balancer.step_timer.run()
        if counts:
            for index, flat in enumerate(results):
                self.layout.deliver(index, flat)
            self._sparse.deliver(sums)
        sparse = [each.values() for each in sums.values()]
        norms = functools.partial(gradient_exchange.noise.of, self.layout, results, sparse)
        hear = functools.partial(
            gradient_exchange.incoming, total, norms=norms, terms=terms, batches=batches, counts=counts
        )
        return waited_s, bytes_sent, hear

    # What codecs keep back, from one layout to the next ---------------------------------------------------------------

    def residuals(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What codecs have kept back of this rank's gradients, weighted and not sent yet, by parameter."""
        kept = self._sparse.carried()
        for members, flat in zip(self.layout.members, self._exchange.residuals(), strict=True):
            parts = [] if flat is None else flat.split([parameter.numel() for parameter in members])
            kept.update(zip(members, parts, strict=False))
        return kept

    def take_over(self, before: ReducedStep) -> None:
        """Takes over from the optimizer's former layout: what its codecs have kept back is sent with the next sums that
        weigh as much as usual."""
        self._exchange.take_weights_from(before._exchange)
        self.add_residuals(before.residuals())

    def add_residuals(self, kept: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Sends with the next sums what `residuals` returned."""
        arrays = []
        for members, flat in zip(self.layout.members, self.layout.buckets, strict=True):
            parts = [
                kept[parameter].to(flat) if parameter in kept else flat.new_zeros(parameter.numel())
                for parameter in members
            ]
            arrays.append(torch.cat(parts) if any(parameter in kept for parameter in members) else None)
        self._exchange.add_residuals(arrays, 1.0)
        for parameter, rest in kept.items():
            if parameter in self._sparse:
                self._sparse.carry(parameter, rest)


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast: hooks run within autocast if the script calls backward() there, and it would round
    the products in codecs."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
