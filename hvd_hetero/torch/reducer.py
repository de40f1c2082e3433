"""From `backward()` to reduced gradients: hooks, flat buckets, and the weighted exchange.

When `backward()` returns, every gradient is the exact gradient of the global batch, the same on all ranks – as with
DistributedDataParallel – so clipping, `GradScaler` and whatever else looks at `p.grad` sees the same on all ranks.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.noise import GradientNoise
from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.optimizers.weighing import BUCKET_BYTES, Weighing

from .layout import WIRE, BucketLayout, check_type
from .local import LocalTraining, ParameterStore
from .loss import mean_over_ranks
from .passes import Passes
from .stopwatch import stopwatch_of

_REENTRANT = (
    "Expected each parameter's gradient once per backward pass. Received: {}, as reentrant checkpointing does. Use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)

# Who reduces a parameter's gradient: the optimizer made last, as its step() would otherwise see what another one did.
_REDUCED_BY: WeakIdKeyDictionary = WeakIdKeyDictionary()


class GradientReducer:
    """Reduces the gradients of `parameters` after each backward pass, weighted by `balancer`'s counts.

    Args:
        parameters: those that require a gradient, in the order of the model.
        passes: backward passes per step; the gradient is the sum over them, as Horovod's is.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        ways: how buckets travel.
        predivide: divides before the sum and multiplies after it, for narrow wires.
        bucket_bytes: at most so much in one operation; None: what suits the links.
        groups: parameters that travel together, instead of buckets by size.
        strategy: a local one, where ranks make steps apart.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        balancer: Balancer,
        ways: Ways,
        passes: int,
        scale: float,
        predivide: float,
        sparse_as_dense: bool,
        bucket_bytes: int | None,
        groups: Sequence[Sequence[torch.nn.Parameter]] | int | None,
        strategy: LocalSGD | None = None,
    ) -> None:
        self._balancer, self._ways = balancer, ways
        self._sparse_as_dense, self._bucket_bytes, self._groups = sparse_as_dense, bucket_bytes, groups
        self._parameters: list[torch.nn.Parameter] = []
        self._hooks: list[Any] = []
        self.local: LocalTraining | None = None
        self._weighing = Weighing(
            balancer,
            self,
            ways=ways,
            passes=passes,
            scale=scale,
            predivide=predivide,
            parameters=lambda: ParameterStore(self._parameters),
        )
        self._passes = Passes(self._parameters)  # since the last exchange
        self._callback_queued = False
        self._terms = 0.0  # of the last step, on this rank
        self._final = False  # this backward pass is the last before the exchange
        self.reduced = False  # gradients are the global ones
        self.replaced = False  # another optimizer reduces these gradients
        self.wait_s = 0.0  # for communication, in the last step
        self.bytes_sent = 0
        self.add(parameters)
        if strategy is not None:
            self.local = LocalTraining(strategy, self._parameters, self._weighing, ways=ways)

    @property
    def noise(self) -> GradientNoise:
        """Measures how noisy the gradient is."""
        return self._weighing.noise

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._weighing.passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._weighing.passes = passes

    # Layout ---------------------------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Takes further parameters; every rank adds the same."""
        known = {id(parameter) for parameter in self._parameters}
        new = [p for p in parameters if p.requires_grad and id(p) not in known]
        for parameter in new:
            check_type(parameter)
            before = _REDUCED_BY.get(parameter, lambda: None)()
            if before is not None:
                before.replace()
            _REDUCED_BY[parameter] = weakref.ref(self)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook))
        if self._weighing.leads and new:
            self._balancer.measure_with(stopwatch_of(new[0].device))
        self._parameters += new
        self._lay_out()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Says whose gradients these are."""
        if self.local is not None:
            self.local.follow(optimizer)

    def replace(self) -> None:
        """Gives way to another optimizer of the same parameters."""
        self.close()
        self._balancer.detach(self)
        self._weighing.close()
        self.replaced = True

    def check_in_use(self) -> None:
        """Raises RuntimeError where another optimizer has taken over."""
        if self.replaced:
            raise RuntimeError(
                "Expected step() of the DistributedOptimizer that was made last for these parameters. Received: that "
                "of one before it, whose gradients are no longer reduced."
            )

    def close(self) -> None:
        """Sees no gradient any more."""
        for hook in self._hooks:
            hook.remove()
        if self.local is not None:
            self.local.steps.abandon()

    def _lay_out(self) -> None:
        # The control vector rides in a bucket unless a codec would round it.
        tail = self._weighing.tail
        if self._bucket_bytes is None and self._parameters:
            first = self._parameters[0]
            like = torch.empty(0, dtype=WIRE[first.dtype], device=first.device)
            self._bucket_bytes = self._ways.bucket_bytes(like, most=BUCKET_BYTES)
        self._layout = BucketLayout(
            self._parameters,
            bucket_bytes=self._bucket_bytes or BUCKET_BYTES,
            groups=self._groups,
            tail=tail,
            sparse_as_dense=self._sparse_as_dense,
            lossy=lambda parameter: self._ways.takes(tuple(parameter.shape)),
        )
        self._exchange = self._weighing.exchange(
            self._layout,
            [[tuple(p.shape) for p in members] for members in self._layout.members],
            control=torch.zeros(tail, dtype=torch.float64),
            outgoing=lambda: self._weighing.outgoing(self._passes.terms),
            write=lambda view, values: view.copy_(torch.tensor(values, dtype=view.dtype)),
        )
        self._pending = [len(members) for members in self._layout.members]
        self._ready: set[torch.nn.Parameter] = set()
        self._weight: float | None = None

    # During backward ------------------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """A global batch begins."""
        self.reduced = False  # where a script skipped the last step
        if self.local is not None and self.local.steps.over:
            self.local.come_together()  # so did this rank, with the last step apart
        self._weighing.begin()

    def on_count(self, terms: float) -> None:
        """Before a pass over `terms` loss terms."""
        if self._callback_queued:  # an exception ended the last pass before its callback
            self._callback_queued = False
            self._passes.undo()
        self._passes.expect(terms)

    def _begin_pass(self) -> None:
        """At the first gradient of a backward pass."""
        self._balancer.begin_unseen()
        terms = self._balancer.count_now
        if terms is None:
            raise RuntimeError(
                "Expected the number of samples of this batch before backward(). Received: none. Iterate over "
                "hvd.BalancedDataLoader, or call balancer.begin(samples) for each batch."
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._callback_queued = True
        self.reduced = False
        self._passes.begin(terms)
        self._final = self._balancer.last_pass and self._weighing.complete

    def _hook(self, parameter: torch.nn.Parameter) -> None:
        if not self._callback_queued:
            self._begin_pass()
        if self._final and self._balancer.count_now and not self.apart:
            self._take(parameter)

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """Notes that a gradient is ready, and sends its bucket when that was the last one."""
        if parameter in self._ready:
            raise RuntimeError(_REENTRANT.format("one twice"))
        if self._weight is None:
            self._weight = self._weight_now()
        index, _ = self._layout.slot[parameter]
        self._ready.add(parameter)
        self._pending[index] -= 1
        if self._pending[index] == 0:
            with _full_precision(parameter.device):
                self._layout.fill(index, self._weight)
                self.noise.sees(self._layout, index)
                self._exchange.submit(index)

    def _weight_now(self) -> float:
        """c_i of this step: `p.grad` is a mean over as many terms as the last pass that had any."""
        return self._weighing.weight(self._balancer.count_now or self._passes.unit)

    @property
    def apart(self) -> bool:
        """Whether this step's gradient stays this rank's own."""
        return self.local is not None and self.local.steps.apart()

    def _after_backward(self) -> None:
        self._callback_queued = False
        if torch._C._current_autograd_node() is not None:  # its end is not that of the backward pass around it
            raise RuntimeError(_REENTRANT.format("some in a backward pass within another"))
        self._passes.end(final=self._final)
        if self._final:
            self._finish()
        else:
            self._balancer.pause()

    # The end of a step ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduces what has not been: a rank without a sample, or one that stops, still takes part."""
        if self.reduced:
            return
        if not self._passes.begun and self._balancer.begin_unseen():
            self._passes.begin(self._balancer.count_now or 0.0)
        self._finish()

    def finished(self, *, lr: float) -> None:
        """Ends the step, after the update; `lr`: its learning rate."""
        self.reduced = False
        if self._weighing.leads:
            self._balancer.finished(wait_s=self.wait_s, bytes_sent=self.bytes_sent)
        self.wait_s, self.bytes_sent = 0.0, 0
        if self.local is not None and self.apart:
            self._balancer.pause()
            start = time.perf_counter()
            self.bytes_sent = self.local.after_step(self._terms, lr=lr)
            self.wait_s = time.perf_counter() - start
            self._balancer.resume()

    def on_epoch_end(self) -> None:
        """The samples of an epoch are used up."""
        if self.local is not None and self.local.steps.rule.merge_each_epoch:
            self.local.steps.merge()

    def merge(self, model: torch.nn.Module | None) -> None:
        """Returns when all ranks hold one model, and one model's buffers. A collective call."""
        if self.local is not None:
            self.local.merge(model)

    def _submit_rest(self) -> None:
        """Sends what no hook has sent."""
        self._passes.restore()
        if self._passes.terms == 0:
            self._weight = 0.0  # nothing computed here counts, not even a NaN
        for parameter in self._parameters:
            if parameter not in self._ready:
                self._take(parameter)

    def withdraw(self) -> Callable[[], bool]:
        """Takes part in the next exchange with nothing, without waiting; tells whether it is over."""
        if self.local is not None and self.apart:
            return self.local.steps.withdraw()
        self._passes.clear()
        self._submit_rest()
        return self._exchange.done

    def mean_over_ranks(self, loss: Any) -> Any:
        """The mean of `loss` over all ranks' loss terms."""
        name, terms = f"{self._weighing.name}.loss", self._balancer.count_now or 0.0
        return mean_over_ranks(loss, terms=terms, engine=self._weighing.engine, name=name)

    def _finish(self) -> None:
        self._terms = self._passes.terms
        if self.apart:
            self._finish_apart()
            return
        self._submit_rest()
        self._balancer.pause()
        start = time.perf_counter()
        terms, batches = self._passes.terms, self._weighing.batches
        try:
            with _full_precision(self._parameters[0].device):
                results, total = self._exchange.finish(self._weighing.factor)
        finally:
            self._pending = [len(members) for members in self._layout.members]
            self._ready.clear()
            self._weight = None
            self._passes.clear()
            self._weighing.end()
        self.wait_s += time.perf_counter() - start
        self._balancer.resume()
        for index, flat in enumerate(results):
            self._layout.deliver(index, flat)
            self.bytes_sent += flat.numel() * flat.element_size()
        self.reduced = True
        self._weighing.incoming(self._layout, results, total, terms=terms, batches=batches)

    def _finish_apart(self) -> None:
        """Ends the passes of a step whose gradient stays this rank's own."""
        self._passes.average(self._weighing.gain)
        self._passes.clear()
        self._weighing.end()
        self.reduced = True


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Without autocast: a script may call backward() within it, hooks then run within it, and codecs multiply."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
