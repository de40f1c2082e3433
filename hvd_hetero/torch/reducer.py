"""From `backward()` to reduced gradients: hooks, and when the exchange begins and ends.

When `backward()` returns, every gradient is the exact gradient of the global batch, the same on all ranks – as with
DistributedDataParallel – so clipping, `GradScaler` and whatever else looks at `p.grad` sees the same on all ranks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.noise import GradientNoise
from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.optimizers.weighing import Weighing

from .backward import backward_pass
from .buffers import average_buffers
from .hooks import Hooks
from .layout import Groups
from .layouts import Layouts
from .local import LocalTraining, ParameterStore
from .loss import mean_over_ranks
from .passes import Passes, is_zero
from .step import BROKEN_OFF, WITHIN, ReducedStep
from .stopwatch import stopwatch_of


class Phase(enum.Enum):
    """Where a step is, from one update to the next."""

    BETWEEN = "no backward pass is under way; what `p.grad` holds is of this rank alone"
    PASS = "a backward pass is under way, and others follow before the exchange"
    LAST_PASS = "the last backward pass before the exchange is under way"
    BROKEN_OFF = "an exception ended the last pass when part of its gradients were sent"
    READY = "what `p.grad` holds is what the update takes"


_IN_PASS = (Phase.PASS, Phase.LAST_PASS)


class GradientReducer:
    """Reduces the gradients of `parameters` after each backward pass, weighted by `balancer`'s counts.

    Args:
        parameters: those that are trained, in the order of the model.
        passes: backward passes per step; the gradient is the sum over them, as Horovod's is.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        ways: how buckets travel.
        predivide: divides before the sum and multiplies after it, for narrow wires.
        all_sparse: whether the gradients of all parameters are sparse.
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
        all_sparse: bool,
        bucket_bytes: int | None,
        groups: Groups,
        strategy: LocalSGD | None = None,
    ) -> None:
        self._balancer = balancer
        self._parameters: list[torch.nn.Parameter] = []
        self.local: LocalTraining | None = None
        self._weighing = Weighing(
            balancer,
            self,
            ways=ways,
            passes=passes,
            scale=scale,
            predivide=predivide,
            parameters=lambda: ParameterStore(self._parameters),
            lays_out=lambda: self._layouts.asks,
        )
        self._hooks = Hooks(self, after=self._hook, before=self._before_gradient)
        self._passes = Passes(self._parameters)  # since the last exchange
        self._phase = Phase.BETWEEN
        self._taker: ReducedStep | None = None  # of the gradients of the backward pass under way
        self._passed = -1  # the part of a batch that the last backward pass was over: see `Balancer.part`
        self._last = False  # whether the exchange follows the backward pass that has ended
        self._terms = 0.0  # of the last step, on this rank
        self.replaced = False  # another optimizer reduces these gradients
        self.wait_s = 0.0  # for communication, in the last step
        self.bytes_sent = 0
        self._closed = False
        self._inherited: dict[torch.nn.Parameter, torch.Tensor] = {}  # what optimizers before this one kept back
        self._take_in(parameters)
        if scale != 1.0 or passes > 1:
            self._hooks.look_before()
        self._layouts = Layouts(
            self._parameters,
            weighing=self._weighing,
            ways=ways,
            passes=self._passes,
            sparse_as_dense=sparse_as_dense,
            all_sparse=all_sparse,
            bucket_bytes=bucket_bytes,
            groups=groups,
        )
        self._take_over()
        if strategy is not None:
            self.local = LocalTraining(strategy, self._parameters, self._weighing, ways=ways)

    @property
    def noise(self) -> GradientNoise:
        """Measures how noisy the gradient is."""
        return self._weighing.noise

    @property
    def number(self) -> int:
        """Its place in the order in which the balancer's optimizers are made."""
        return self._weighing.number

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._weighing.passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._weighing.passes = passes
        if passes > 1:
            self._hooks.look_before()

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Those that are trained, also where they are frozen for now."""
        return self._parameters

    @property
    def _step(self) -> ReducedStep:
        return self._layouts.step

    # Parameters -----------------------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Takes further parameters; every rank adds the same.

        Raises:
            RuntimeError: between backward() and step(), where they have gradients already, which nobody would reduce.
        """
        self._take_in(parameters)
        self._layouts.grow()
        self._take_over()

    def _take_in(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        new = self._hooks.add(parameters)
        if self._phase is Phase.READY and any(parameter.grad is not None for parameter in new):
            raise RuntimeError(
                "Expected add_param_group() before backward() or after step(). Received: parameters with gradients "
                "between them, which are each rank's own."
            )
        if self._weighing.leads and new:
            self._balancer.measure_with(stopwatch_of(new[0].device))
        self._parameters += new

    def _take_over(self) -> None:
        """Sends what others kept back whose parameters these were."""
        if self._inherited:
            self._step.give_back(self._inherited)
            self._inherited = {}

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Says whose gradients these are, and that its state may be another one."""
        self._layouts.learn(optimizer)
        if self.local is not None:
            self.local.follow(optimizer)

    def replace(self, by: GradientReducer | None = None) -> None:
        """Gives way to another optimizer of the same parameters, which sends what codecs have kept back here."""
        if by is not None and not self._closed and by._weighing.succeeds(self._weighing):
            factor = self._weighing.part_unit / by._weighing.part_unit
            by._inherited.update({p: kept * factor for p, kept in self._step.kept_back().items()})
        self.close()
        self._balancer.exchanges.detach(self)
        self._weighing.close()
        self.replaced = True

    def check_in_use(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises RuntimeError where gradients of these parameter groups are not reduced here: another optimizer has
        taken over, or parameters have come to require a gradient."""
        if self.replaced:
            raise RuntimeError(
                "Expected step() of the DistributedOptimizer that was made last for these parameters. Received: that "
                "of one before it, whose gradients are no longer reduced."
            )
        if thawed := self._hooks.thawed(groups):
            raise RuntimeError(
                "Expected parameters that required a gradient when hvd.DistributedOptimizer was made. Received: "
                f"{thawed} that have come to since, whose gradients are each rank's own. Make a new "
                "hvd.DistributedOptimizer with them."
            )

    def close(self) -> None:
        """Sees no gradient any more."""
        self._closed = True
        self._hooks.remove()
        if self.local is not None:
            self.local.steps.abandon()

    # During backward ------------------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """A global batch begins."""
        self.break_off()
        if self._passes_by and self._weighing.passes > 1:
            self._passes.pass_by(self._balancer.part_terms)
        self._passes.end_batch(counts=self._weighing.passes > 1, loop=self._balancer.loop)
        self._phase = Phase.BETWEEN  # also where a script skipped the last step
        self._layouts.renew()
        if self.local is not None and self.local.steps.over:
            self.local.come_together()  # so did this rank, with the last step apart
        self._weighing.begin()

    def on_count(self, terms: float) -> None:
        """Before a pass over `terms` loss terms."""
        self.break_off()
        if not self._balancer.in_parts:  # what follows is another loss, as that of a GAN's other model
            self._passes.end_loss()
        elif self._passes_by:
            self._passes.pass_by(self._balancer.part_terms)
        if self._balancer.in_parts or not self._balancer.last_pass:
            self._hooks.look_before()
        self._passes.expect()

    def forget(self) -> None:
        """The gradients so far are to be zero. After a pass that did not end, a collective call."""
        self.break_off()  # or what it has left would be of the next one
        self._passes.clear()
        # By any parameters' passes, which all ranks make alike: whether there was one with these depends on samples.
        passed = self._balancer.passed == self._balancer.part
        self._weighing.forget(present=passed or self._balancer.batch_order.over)

    def break_off(self) -> None:
        """Clears up after a backward pass that an exception ended: the gradients since the last exchange do not count.

        What was sent of them is a part of an exchange, which is brought to its end and left. That is a collective call,
        for ranks that have had the exception alike. Of ranks where one alone had it, that one has missed a step.
        """
        if not self._in_pass:
            return
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError(WITHIN)
        self._phase = Phase.BROKEN_OFF if self._step.sent else Phase.BETWEEN
        if self._phase is Phase.BROKEN_OFF:
            self._step.take_rest()
            _, _, hear = self._step.finish(counts=False)
            self._layouts.take_in(hear)
            self._weighing.noise.forget()
        self._step.drop()
        self._passes.clear()
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _in_pass(self) -> bool:
        return self._phase in _IN_PASS

    def _begin_pass(self) -> None:
        """At the first gradient of a backward pass."""
        self._balancer.begin_unseen()
        terms = self._balancer.count_now
        if terms is None:
            raise RuntimeError(
                "Expected the number of samples of this batch before backward(). Received: none. Iterate over "
                "hvd.BalancedDataLoader, or call balancer.begin(samples) for each batch."
            )
        self._balancer.batch_order.passes()
        backward_pass().add(self)
        last = self._balancer.last_pass and self._weighing.complete
        self._phase = Phase.LAST_PASS if last else Phase.PASS
        self._passes.begin(terms, earlier=self._balancer.batch_terms - terms, loop=self._balancer.loop)
        self._passed = self._balancer.passed = self._balancer.part
        # Without a term in an earlier pass either, zeros are sent: like the others, also of a pass that all break off.
        self._taker = self._step if last and (terms or not self._passes.terms) and not self.apart else None

    @torch.compiler.disable  # these four run within backward(), which may be within what a script compiles
    def _before_gradient(self, gradients: Any) -> None:
        """Before a gradient is added to `p.grad`; called where that may have to keep what it holds."""
        if gradients[0] is None:
            return
        if not self._in_pass:
            self._begin_pass()
        self._passes.keep(last=self._phase is Phase.LAST_PASS, gain=self._weighing.gain)

    @torch.compiler.disable
    def _hook(self, parameter: torch.nn.Parameter) -> None:
        if self._phase not in _IN_PASS:
            self._begin_pass()
        if self._taker is not None:
            self._taker.take(parameter)

    @property
    def apart(self) -> bool:
        """Whether this step's gradient stays this rank's own."""
        return self.local is not None and self.local.steps.apart()

    @torch.compiler.disable
    def end_pass(self, *, sends: bool) -> None:
        """All gradients of a backward pass are there."""
        self._last, self._phase = self._phase is Phase.LAST_PASS, Phase.BETWEEN
        if sends and self._last:
            self._send_rest()
        elif sends:
            self._passes.end()

    @torch.compiler.disable
    def after_pass(self) -> None:
        """Others' gradients of the same backward pass are sent as well."""
        if self._last:
            self._finish()
        else:
            self._balancer.pause()

    # The end of a step ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduces what has not been: a rank without a sample, or one that stops, still takes part."""
        if self._phase is Phase.READY:
            return
        self.break_off()
        if self._phase is Phase.BROKEN_OFF:
            raise RuntimeError(BROKEN_OFF)
        self._passes.warn_of_changes()
        if self._passes_by:
            self._passes.pass_by(self._balancer.part_terms)
        elif not self._passes.begun and (self._balancer.begin_unseen() or self._set_by_hand()):
            self._balancer.batch_order.passes()
            self._passes.put(self._balancer.batch_terms)
        self._passes.end_batch(counts=True, loop=self._balancer.loop)
        self._send_rest()
        self._finish()

    def _send_rest(self) -> None:
        """Sends what has not been, but for a step whose gradient stays this rank's own."""
        self._passes.complete(self._weighing.gain)
        if not self.apart:
            self._step.take_rest()

    @property
    def _passes_by(self) -> bool:
        """Whether the present batch, or part of one, whose exchange is yet to come, had backward passes on this rank,
        but none with a gradient of these parameters. It is zero then, over as many terms."""
        return self._balancer.passed == self._balancer.part != self._passed and self._weighing.begun > 0

    def _set_by_hand(self) -> bool:
        """Whether a script has put gradients of this batch's samples where no backward pass did."""
        if not self._balancer.count_now:
            return False
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return not all(is_zero(gradient) for gradient in found)

    def finished(self, *, lr: float) -> None:
        """Ends the step, after the update; `lr`: its learning rate."""
        if self._phase is Phase.READY:
            self._phase = Phase.BETWEEN
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
            self.local.merge()

    def merge(self, model: torch.nn.Module | None) -> None:
        """Returns when all ranks hold one model, and one model's buffers. A collective call."""
        if self.local is not None:
            self.local.merge()
        if model is not None:
            share = self._balancer.plan.shares[self._balancer.rank]
            weight = float(share) if self.local is None else self.local.steps.take_samples()
            name = f"{self._weighing.name}.buffers"
            average_buffers(model, weight=weight, engine=self._weighing.engine, name=name)

    def withdraw(self) -> Callable[[], bool]:
        """Takes part in the next exchange with nothing, without waiting; tells whether it is over."""
        if self.local is not None and self.apart:
            return self.local.steps.withdraw()
        self._passes.clear()
        return self._step.take_rest()

    def evaluated(self, closure: Callable[[], Any]) -> Any:
        """The mean over all ranks' loss terms of what a closure returns, whose gradients are reduced then.

        The loss is made global as well, because an optimizer that decides by it (LBFGS) must decide alike on all ranks.
        """
        loss = closure()
        self.flush()  # backward() has done it, but for a rank without samples
        self._phase = Phase.BETWEEN  # it may be called again
        name, terms = f"{self._weighing.name}.loss", self._balancer.batch_terms
        return mean_over_ranks(loss, terms=terms, engine=self._weighing.engine, name=name)

    def _finish(self) -> None:
        self._terms = self._passes.terms
        self._balancer.batch_order.steps()
        self._balancer.exchanges.ended(self)
        if self.apart:
            self._finish_apart()
            return
        waited_s, bytes_sent, hear = self._step.finish()
        self.wait_s += waited_s
        self.bytes_sent += bytes_sent
        self._phase = Phase.READY
        self._layouts.take_in(hear)

    def _finish_apart(self) -> None:
        """Ends the passes of a step whose gradient stays this rank's own."""
        self._layouts.see()
        self._passes.average(self._weighing.gain)
        self._passes.clear()
        self._weighing.end()
        self._phase = Phase.READY
