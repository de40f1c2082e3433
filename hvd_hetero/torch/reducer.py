"""Reduces the gradients of one optimizer: joins its hooks, the phases of its steps, its layouts and its strategy.

When `backward()` returns, every gradient is the exact gradient of the global batch, the same on all ranks, as with
DistributedDataParallel. So clipping, `GradScaler` and all else that reads `p.grad` gets the same on all ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_hetero.engine.stopwatch import stopwatch_of
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.noise import GradientNoise
from hvd_hetero.optimizers.routing import Routing

from .accumulation import GradientAccumulation
from .argument import check_devices
from .buffers import average_buffers
from .hooks import Hooks
from .layout import Groups, check_type
from .layouts import Layouts
from .local import LocalTraining
from .loss import mean_over_ranks
from .parameter_store import ParameterStore
from .phases import StepPhases
from .step import ReducedStep

MOVED = (
    "Expected parameters that stay where they are, and of their type, from one backward() to the next of a step. "
    "Received: some that have moved in between, so that what backward() adds to is lost. Move the model before."
)


class GradientReducer:
    """Reduces the gradients of `parameters` after each backward pass, weighted by `balancer`'s counts.

    Args:
        parameters: those that are trained, in the order of the model.
        passes: backward passes per step; the gradient is the sum over them, as Horovod's is.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        routing: how buckets travel.
        predivide: divides before the sum and multiplies after it, for narrow wires.
        sparse_as_dense: whether sparse gradients are summed as dense ones.
        all_sparse: whether the gradients of all parameters are sparse.
        bucket_bytes: at most so many bytes in one operation; None: what suits the links.
        groups: parameters that travel together, instead of buckets by size.
        strategy: a local one, or None.
        at: the place of the reducer that it replaces, if it is made anew: see `GradientExchange`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        balancer: Balancer,
        routing: Routing,
        passes: int,
        scale: float,
        predivide: float,
        sparse_as_dense: bool,
        all_sparse: bool,
        bucket_bytes: int | None,
        groups: Groups,
        strategy: LocalSGD | None = None,
        at: int | None = None,
    ) -> None:
        self._balancer = balancer
        self._parameters: list[torch.nn.Parameter] = []
        self._places: tuple[list[torch.device], list[torch.dtype]] = [], []  # of all parameters
        self.local: LocalTraining | None = None
        self._gradient_exchange = GradientExchange(
            balancer,
            self,
            routing=routing,
            batches_per_exchange=passes,
            scale=scale,
            predivide=predivide,
            parameters=lambda: ParameterStore(self._parameters),
            lays_out=lambda: self._layouts.asks,
            at=at,
        )
        self._accumulated = GradientAccumulation(self._parameters)  # since the last exchange
        self._phases = StepPhases(
            self._parameters,
            gradient_exchange=self._gradient_exchange,
            accumulated=self._accumulated,
            layouts=lambda: self._layouts,
            is_local=lambda: self.is_local,
            ended=self._passes_ended,
            follow=self._follow_in_pass,
        )
        self._hooks = Hooks(self, after=self._phases.gradient_added, before=self._phases.before_gradient)
        self.replaced = False  # another optimizer reduces these gradients
        self.released = False  # and that is none of ours
        self._at: int | None = None  # the place that it had until then
        self._closed = False
        self._inherited: dict[torch.nn.Parameter, torch.Tensor] = {}  # what codecs of earlier optimizers had kept back
        self._local_before: LocalTraining | None = None  # of an earlier optimizer, whose merges had kept something back
        try:
            self._take_in(parameters)
            if scale != 1.0 or passes > 1:
                self._hooks.look_before()
            self._layouts = Layouts(
                self._parameters,
                gradient_exchange=self._gradient_exchange,
                routing=routing,
                accumulated=self._accumulated,
                sparse_as_dense=sparse_as_dense,
                all_sparse=all_sparse,
                bucket_bytes=bucket_bytes,
                groups=groups,
            )
            if strategy is not None:
                self._make_local = functools.partial(
                    LocalTraining, strategy, self._parameters, self._gradient_exchange, routing=routing
                )
                self.local = self._make_local()
            self._take_over()
        except BaseException:
            self.replace()  # otherwise the balancer would go on calling a reducer that was never completed
            raise

    @property
    def noise(self) -> GradientNoise:
        """What measures the gradient's noise."""
        return self._gradient_exchange.noise

    @property
    def at(self) -> int:
        """See `GradientExchange.at`; of one that is replaced, what that was last."""
        return self._gradient_exchange.at if self._at is None else self._at

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._gradient_exchange.count.batches_per_exchange

    @passes.setter
    def passes(self, passes: int) -> None:
        self._gradient_exchange.count.batches_per_exchange = passes
        if passes > 1:
            self._hooks.look_before()

    @property
    def wait_s(self) -> float:
        """Seconds waited for communication in the last step."""
        return self._phases.wait_s

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in the last step."""
        return self._phases.bytes_sent

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that are trained, with those that are frozen for now."""
        return self._parameters

    @property
    def _step(self) -> ReducedStep:
        return self._layouts.step

    # Parameters -----------------------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Adds further parameters, the same on every rank. A collective call.

        Raises:
            RuntimeError: between backward() and step(), where they have gradients already, which nobody would reduce.
        """
        self._take_in(parameters)
        self._layouts.grow()
        self._take_over()

    def _take_in(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        new = self._hooks.new_of(parameters)
        if self._phases.ready and any(parameter.grad is not None for parameter in new):
            raise RuntimeError(
                "Expected add_param_group() before backward() or after step(). Received: parameters with gradients "
                "between them, which are each rank's own."
            )
        self._hooks.add(new)
        if self._gradient_exchange.leads and new:
            self._balancer.step_timer.measure_with(stopwatch_of(new[0].device))
        self._parameters += new
        devices, dtypes = _places_of(new)
        self._places = self._places[0] + devices, self._places[1] + dtypes

    def _follow_parameters(self) -> bool:
        """Follows parameters that `model.to()` has moved to another device or type; False if there are none. Hooks and
        stopwatch are renewed at once, the layout when all ranks have heard of it in an exchange."""
        places = _places_of(self._parameters)
        if places == self._places:
            return False
        check_devices(self._parameters)
        for parameter in self._parameters:
            check_type(parameter)
        if self._gradient_exchange.leads:
            self._balancer.step_timer.measure_with(stopwatch_of(places[0][0]))
        self._hooks.hook_anew()
        self._layouts.parameters_moved()
        self._places = places
        return True

    def _follow_in_pass(self) -> None:
        """Follows parameters that have moved, at the first gradient of a backward pass. Raises RuntimeError if an
        earlier pass of the step has left gradients: the hooks that keep those were on the former parameters."""
        if self._follow_parameters() and self._hooks.looks_before and self._accumulated.begun:
            raise RuntimeError(MOVED)

    def _take_over(self) -> None:
        """Sends, with the next sums, what codecs of earlier optimizers had kept back for these parameters."""
        if self._inherited:
            self._step.add_residuals(self._inherited)
        if self.local is not None and self._local_before is not None:
            self.local.take_over(self._local_before)
        self._inherited, self._local_before = {}, None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer whose gradients are reduced, or notes that its state may have been replaced."""
        self._layouts.learn(optimizer)
        if self.local is not None:
            self.local.follow(optimizer)

    def replace(self, by: GradientReducer | None = None) -> None:
        """Gives way to `by`, the reducer of another optimizer of the same parameters, which sends what codecs have kept
        back here; None: to something that is none of ours."""
        if not self.replaced:
            self._at, self.released = self.at, by is None
        if by is not None and not self._closed and by._gradient_exchange.succeeds(self._gradient_exchange):
            factor = self._gradient_exchange.part_unit / by._gradient_exchange.part_unit
            by._inherited.update({p: kept * factor for p, kept in self._step.residuals().items()})
            by._local_before = self.local
        self.close()
        self._balancer.exchanges.detach(self)
        self._gradient_exchange.close()
        self.replaced = True

    def check_in_use(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises RuntimeError if gradients of these parameter groups are not reduced here: because another optimizer
        has taken over, or because parameters were thawed since."""
        if self.replaced:
            raise RuntimeError(
                "Expected step() of the DistributedOptimizer that was made last for these parameters. Received: that "
                "of one before it, whose gradients are no longer reduced. Where two optimizers share parameters, give "
                "these a third one, and step it with either."
            )
        if thawed := self._hooks.thawed(groups):
            make = "Make" if self.local is None else "Call optimizer.merge(), and then make"
            raise RuntimeError(
                "Expected parameters that required a gradient when hvd.DistributedOptimizer was made. Received: "
                f"{thawed} that have come to since, whose gradients are each rank's own. {make} a new "
                "hvd.DistributedOptimizer with them."
            )

    def close(self) -> None:
        """Removes the hooks: no gradients are reduced here any more."""
        self._closed = True
        self._hooks.remove()
        if self.local is not None:
            self.local.steps.abandon()

    # A step ---------------------------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """Begins a global batch."""
        self._follow_parameters()
        self._phases.begin_batch()
        # Local training is made anew with a new layout, of which all ranks know; that parameters have moved, each rank
        # knows of its own alone.
        if self._layouts.renew() and self.local is not None and not self.local.steps.apart:
            self._make_local_anew()
        if self.local is not None and self.local.steps.over:
            self.local.come_together()  # local steps are over, and the other ranks do the same after their last one
        self._gradient_exchange.begin()

    def _make_local_anew(self) -> None:
        """Makes local training anew, for a new layout. A collective call."""
        strategies, place = self._balancer.strategies, self._gradient_exchange.place
        strategies.hand_over(place, to=place)
        strategies.remove(place)
        before, self.local = self.local, self._make_local(before=self.local)
        assert before is not None
        self.local.take_over(before)

    def on_count(self) -> None:
        """Prepares a pass; is called before it."""
        self._phases.begin_part()
        if self._balancer.progress.in_parts or not self._balancer.progress.last_pass:
            self._hooks.look_before()
        self._accumulated.expect()

    def _passes_ended(self) -> None:
        """Is called at the end of a step's backward passes."""
        self._balancer.exchanges.ended(self)
        if self.local is not None:
            self.local.steps.passed()

    @property
    def is_local(self) -> bool:
        """Whether this step is a local one, whose gradient is not exchanged."""
        return self.local is not None and self.local.steps.is_local()

    # A script may compile a whole training step. These methods are left out of it, as they differ from step to step.

    @torch.compiler.disable
    def forget(self) -> None:
        """See `StepPhases.forget`."""
        self._phases.forget()
        self._follow_parameters()

    @torch.compiler.disable
    def flush(self) -> None:
        """See `StepPhases.flush`."""
        self._phases.flush()

    @torch.compiler.disable
    def finished(self, *, lr: float) -> None:
        """Ends the step, after the update; `lr`: its learning rate."""
        phases = self._phases
        phases.begin_anew()
        leads = self._gradient_exchange.leads
        self._balancer.exchanged(wait_s=phases.wait_s, bytes_sent=phases.bytes_sent, leads=leads)
        phases.wait_s, phases.bytes_sent = 0.0, 0
        if self.local is not None and self.is_local:
            self._balancer.step_timer.pause()
            start = time.perf_counter()
            phases.bytes_sent = self.local.after_step(phases.terms, lr=lr)
            phases.wait_s = time.perf_counter() - start
            self._balancer.step_timer.run()

    def on_epoch_end(self) -> None:
        """Merges, if the local strategy does so at the end of an epoch, whose samples are used up."""
        if self.local is not None and self.local.steps.rule.merge_each_epoch:
            self._phases.check_unchanged()
            self.local.merge()

    def merge(self, model: torch.nn.Module | None) -> None:
        """Returns when all ranks hold one model and, if `model` is given, the same buffers. A collective call."""
        if self.local is not None:
            self._phases.check_unchanged()
            self.local.merge()
        if model is not None:
            # Weighted by the samples of local steps. There are none left for a second model, or in synchronous steps:
            # then by the shares.
            share = float(self._balancer.plan.shares[self._balancer.rank])
            weight = share if self.local is None else self.local.steps.take_samples()
            name = f"{self._gradient_exchange.name}.buffers"
            average_buffers(model, weight=weight, otherwise=share, engine=self._gradient_exchange.engine, name=name)

    def withdraw(self) -> Callable[[], bool] | None:
        """See `Attached.withdraw`."""
        return self.local.steps.withdraw() if self.local is not None and self.is_local else self.miss()

    def miss(self) -> Callable[[], bool] | None:
        """See `Attached.miss`."""
        if self.is_local:
            return None
        self._accumulated.clear()
        return self._phases.leave(self._step.take_rest())

    def passed(self, closure: Callable[[], Any]) -> Any:
        """Calls a closure and returns its loss; afterwards its gradients are reduced, and ready for an update."""
        loss = closure()
        self.flush()  # backward() has done it already, except on a rank without samples
        return loss

    def evaluated(self, closure: Callable[[], Any]) -> Any:
        """Calls a closure and returns the mean of its loss over all ranks' loss terms; its gradients are reduced.

        The loss is made global as well, because an optimizer that decides by it (LBFGS) must decide alike on all ranks.
        """
        loss = self.passed(closure)
        self._phases.begin_anew()  # it may be called again
        name, terms = f"{self._gradient_exchange.name}.loss", self._balancer.progress.batch_terms
        kind = self._parameters[0].dtype if self._parameters else None
        return mean_over_ranks(loss, terms=terms, engine=self._gradient_exchange.engine, name=name, kind=kind)


def _places_of(parameters: Sequence[torch.nn.Parameter]) -> tuple[list[torch.device], list[torch.dtype]]:
    """The devices and the types of the parameters: of each, as only a part of a model may move."""
    return [parameter.device for parameter in parameters], [parameter.dtype for parameter in parameters]
