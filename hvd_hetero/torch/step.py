"""The exchange of one layout of gradients: buckets are sent as their gradients come, and what they become is delivered.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.optimizers.weighing import Weighing

from .layout import BucketLayout, Groups
from .passes import Passes

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
    """Reduces the gradients of `parameters` in one step after the other. Making one is a collective call.

    Args:
        passes: of the step under way; their gradients are there.
        bucket_bytes, groups, sparse_as_dense: see `BucketLayout`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        weighing: Weighing,
        ways: Ways,
        passes: Passes,
        bucket_bytes: int,
        groups: Groups,
        sparse_as_dense: bool,
    ) -> None:
        self._parameters, self._weighing, self._passes = parameters, weighing, passes
        self._device = parameters[0].device if parameters else torch.device("cpu")
        # The control vector rides in a bucket unless a codec would round it.
        tail = weighing.tail
        self.layout = BucketLayout(
            parameters,
            bucket_bytes=bucket_bytes,
            groups=groups,
            tail=tail,
            sparse_as_dense=sparse_as_dense,
            lossy=lambda parameter: ways.takes(tuple(parameter.shape)),
        )
        self._exchange = weighing.exchange(
            self.layout,
            [[tuple(p.shape) for p in members] for members in self.layout.members],
            control=torch.zeros(tail, dtype=torch.float64),
            terms=lambda: passes.terms,
            write=lambda view, values: view.copy_(torch.tensor(values, dtype=view.dtype)),
        )
        self._begin()

    def _begin(self) -> None:
        self._pending = [len(members) for members in self.layout.members]  # gradients that are yet to come, by bucket
        self._ready: set[torch.nn.Parameter] = set()
        self._weight: float | None = None

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Notes that a gradient is ready, and sends its bucket when that was the last one."""
        if parameter in self._ready:
            raise RuntimeError(REENTRANT.format("one twice"))
        if self._weight is None:
            self._weight = self._weight_now()
        index, _ = self.layout.slot[parameter]
        self._ready.add(parameter)
        self._pending[index] -= 1
        if self._pending[index] == 0:
            with _full_precision(parameter.device):
                self.layout.fill(index, self._weight)
                self._weighing.noise.sees(self.layout, index)
                self._exchange.submit(index)

    @property
    def sent(self) -> bool:
        """Whether part of this step is with the other ranks."""
        return bool(self._exchange.submitted)

    def drop(self) -> None:
        """Forgets the gradients that were taken, where nothing is sent."""
        self._begin()

    def _weight_now(self) -> float:
        """c_i of this step: `p.grad` is a mean over as many terms as the last pass that had any."""
        return self._weighing.weight(self._weighing.balancer.count_now or self._passes.unit)

    def take_rest(self) -> Callable[[], bool]:
        """Sends what has not been; what it returns tells whether the exchange is over."""
        self._passes.restore()
        if self._passes.terms == 0:
            self._weight = 0.0  # nothing computed here counts, not even a NaN
        for parameter in self._parameters:
            if parameter not in self._ready:
                self.take(parameter)
        self._exchange.submit_nothing()
        return self._exchange.done

    def finish(self, *, counts: bool = True) -> tuple[float, int, Callable[[], None]]:
        """Makes every `p.grad` the global one, once all are taken – unless the step does not count. Returns the seconds
        waited, the bytes sent, and what takes in what all ranks said with them: `Weighing.incoming`."""
        start = time.perf_counter()
        weighing, balancer = self._weighing, self._weighing.balancer
        terms, batches = self._passes.terms, weighing.batches
        balancer.pause()
        try:
            with _full_precision(self._device):
                results, total = self._exchange.finish(weighing.factor, counts=counts)
        finally:
            self._begin()
            self._passes.clear()
            weighing.end()
        waited_s = time.perf_counter() - start
        balancer.resume()
        if counts:
            for index, flat in enumerate(results):
                self.layout.deliver(index, flat)
        norms = functools.partial(weighing.noise.of, self.layout, results)
        hear = functools.partial(weighing.incoming, total, norms=norms, terms=terms, batches=batches, counts=counts)
        return waited_s, sum(flat.numel() * flat.element_size() for flat in results), hear


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Without autocast: a script may call backward() within it, hooks then run within it, and codecs multiply."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
