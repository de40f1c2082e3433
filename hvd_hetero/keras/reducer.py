"""Reduces a list of gradients to those of the global batch, in one exchange of all buckets.

`gradient_tensorflow` and `gradient_torch` flatten gradients before it, and shape them after it; `step` exchanges them.
"""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.gradient_exchange import BUCKET_BYTES, GradientExchange
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.noise import GradientNoise
from hvd_hetero.optimizers.routing import Routing

from . import backend
from .factor import factor_of
from .layout import Spec
from .local import LocalTraining
from .parameter_store import ParameterStore
from .presence import marked, unmarked
from .residuals import are_gone, number_of, take_over
from .step import ReducedStep


class GradientReducer:
    """Reduces the gradients of one optimizer or tape, weighted by `balancer`'s counts.

    Args:
        passes: global batches per exchange.
        scale: multiplies the weighted mean (the number of ranks for op=Sum).
        predivide: divides before the sum and multiplies after it, for narrow wires.
        bucket_bytes: at most so many bytes in one operation; None: what suits the links.
        strategy: a local one, or None.
        succeeds: whether what codecs keep back passes from one optimizer to the next of the same variables.
        batches: global batches per update, if Keras itself adds up exchanged gradients; None: as many as per exchange.
        kind: what these gradients are for: see `Places`.
        at: the place of the reducer that it replaces, if it is made anew: see `GradientExchange`.
    """

    def __init__(
        self,
        *,
        balancer: Balancer,
        routing: Routing,
        passes: int,
        scale: float,
        predivide: float,
        bucket_bytes: int | None,
        strategy: LocalSGD | None,
        succeeds: bool,
        batches: int | None,
        kind: str,
        at: int | None,
    ) -> None:
        self.balancer, self.routing, self._bucket_bytes = balancer, routing, bucket_bytes
        self._variables: Sequence[Any] = ()
        self.gradient_exchange = GradientExchange(
            balancer,
            self,
            routing=routing,
            batches_per_exchange=passes,
            scale=scale,
            predivide=predivide,
            parameters=lambda: ParameterStore(self._variables, self.form) if self._variables else None,
            kind=kind,
            at=at,
        )
        self.sums = balancer.sums.take(kind, at)
        self.sums.follow(self.gradient_exchange.count)
        self.form: Any = backend.form()
        tensorflow = backend.NAME == "tensorflow"
        self._graph: Any = importlib.import_module(f"{__package__}.graph_tensorflow") if tensorflow else None
        self.steps: dict[tuple[Hashable, tuple[int, ...]], ReducedStep] = {}
        self._alike: Counter[Hashable] = Counter()  # how many steps were made so far, by shapes
        # What was added up since the last exchange for variables that are frozen now, and may be thawed again.
        self.left: dict[Hashable, Any] = {}
        self.last: ReducedStep | None = None  # the one that has begun an exchange last
        self.strategy, self._batches, self.succeeds = strategy, batches, succeeds
        self.wait_s = 0.0  # for the exchange, in the last step
        self.local: LocalTraining | None = None  # made with the first gradients: then the variables are known
        self.closed = False
        self._of: Callable[[], Any] = lambda: self  # the optimizer whose gradients these are, or None if it is gone

    def follow(self, optimizer: Any) -> None:
        """Sets the optimizer whose gradients these are. Once it is gone, as after a model was compiled anew, there will
        be no more."""
        self._of = weakref.ref(optimizer)

    @property
    def noise(self) -> GradientNoise:
        """What measures the gradient's noise."""
        return self.gradient_exchange.noise

    @property
    def passes(self) -> int:
        """Global batches per exchange."""
        return self.gradient_exchange.count.batches_per_exchange

    def reduced(
        self, gradients: Sequence[Any], variables: Sequence[Any], iterations: Any, *, among: Sequence[Any] | None = None
    ) -> list[Any]:
        """The gradients of the mean loss over the global batch; None where no rank has one.

        With several `passes`, those of their mean times their number, at each `passes`-th of the `iterations`; zeros
        in between. The first call for gradients of these shapes is a collective one. `among`: all variables of an
        optimizer, if it has been given any yet.
        """
        found = [self.form.dense(g, v) for g, v in zip(gradients, variables, strict=True)]
        tracing = self.form.tracing()
        if not tracing:  # in a graph, the program decides which gradients there are, alike on all ranks
            found = marked(found, variables, self.form)
        # Without tensors, for which a tape may be asked as well.
        self._variables = [v for g, v in zip(found, variables, strict=False) if g is not None and hasattr(v, "assign")]
        specs = tuple(None if g is None else self.form.spec(g) for g in found)
        if not tracing and specs[-1] is not None:  # the marks
            specs = (*specs[:-1], replace(specs[-1], exact=True))
        if self.strategy is not None:
            self._make_local(self.strategy, variables)
        step = self._step_for(specs, variables, among)
        if tracing:
            self.balancer.step_timer.discard()
            self.form.traced(self.balancer.engine)
        present = [g for g in found if g is not None]
        if not present:
            return list(gradients)
        part = self.form.part_of(self)
        last = True
        if tracing and step.in_graph:
            reduced = iter(self._graph.through(step, present, part, self._variables))
        else:
            last = self.form.last_of(iterations, self.passes)
            touched = [*self._variables, *(self.local.written if self.local is not None else ())]
            reduced = iter(self.form.through(step, present, last, part, touched))
        every = [None if g is None else next(reduced) for g in found]
        return every if tracing else unmarked(every, last=last, is_local=self.is_local, keeps=self.routing.keeps)

    def _make_local(self, strategy: LocalSGD, variables: Sequence[Any]) -> None:
        """Makes what trains locally, with the first gradients, and checks that later ones are of the same variables."""
        if self.local is None:
            self.local = LocalTraining(
                strategy, variables, self.gradient_exchange, routing=self.routing, form=self.form,
                optimizer=self._of, factor=factor_of(self._of()), batches=self._batches,
            )  # fmt: skip
        self.local.check(variables)

    def _step_for(
        self, specs: tuple[Spec | None, ...], variables: Sequence[Any], among: Sequence[Any] | None
    ) -> ReducedStep:
        """The step that exchanges such gradients of these variables. It is made at the first call, a collective one."""
        # With the variables' numbers if something is added up or kept back by codecs: others may have the same shapes.
        key = (specs, tuple(map(number_of, variables)) if self.passes > 1 or self.routing.keeps else ())
        if key not in self.steps:
            self._drop_those_gone()
            self.steps[key] = ReducedStep(self, specs, variables, place=self._place(specs, variables, among))
        if self.routing.keeps and self.succeeds:
            take_over(self.steps[key], variables)
        return self.steps[key]

    def _drop_those_gone(self) -> None:
        """Forgets steps of variables that are no longer alive, as of earlier models."""
        self._drop(lambda key: are_gone(key[1]))

    def _drop(self, chosen: Callable[[tuple[Hashable, tuple[int, ...]]], bool]) -> None:
        for key in list(filter(chosen, self.steps)):
            kind = self.steps.pop(key).kind
            self.gradient_exchange.unsent_state.drop(kind)
            self.sums.drop(kind)

    def _place(self, specs: Hashable, variables: Sequence[Any], among: Sequence[Any] | None) -> Any:
        """What distinguishes gradients from others of the same shapes, alike in all processes: the places of their
        variables among the optimizer's; for a tape, the number of steps with these shapes so far."""
        if among is None:
            self._alike[specs] += 1
            return self._alike[specs]
        places = {id(v): place for place, v in enumerate(among or variables)}
        return [places.get(id(v)) for v in variables]

    def bucket_bytes(self, specs: Sequence[Spec]) -> int:
        """The most bytes of such gradients that travel in one operation. The first call may be a collective one."""
        if self._bucket_bytes is None and specs:
            self._bucket_bytes = self.routing.bucket_bytes(self.form.zeros(0, specs[0].wire), most=BUCKET_BYTES)
        return self._bucket_bytes or BUCKET_BYTES

    # Local steps ----------------------------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """Whether the batch begun last is of a local step, whose gradients are not exchanged."""
        return self.local is not None and self.local.steps.is_local()

    @property
    def merges(self) -> int:
        """Merges so far."""
        return 0 if self.local is None else self.local.steps.rounds.merges

    def updated(self, optimizer: Any, variables: Sequence[Any], rate: Any) -> None:
        """Ends a local step after the update of `variables`: sends what it has done, and takes in merges, on the host.
        """
        if (local := self.local) is not None:
            touched = [*variables, *optimizer.variables]
            self.form.afterwards(lambda lr: local.after_step(lr, optimizer), touched, rate)

    def merge(self, model: Any, optimizer: Any) -> None:
        """Returns when all ranks hold one model, and with `model` its statistics and the optimizer's averages of it as
        well. A collective call."""
        if self.local is not None:
            self.local.merge(model, optimizer)

    def merge_averages(self, optimizer: Any) -> None:
        """See `LocalTraining.merge_averages`."""
        if self.local is not None:
            self.local.merge_averages(optimizer)

    def close(self) -> None:
        """Stops reducing gradients, after an elastic reset."""
        self.closed = True
        if self.local is not None:
            self.local.steps.abandon()

    # What the balancer asks -----------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """Begins a global batch."""
        self.gradient_exchange.begin()
        if self._of() is None:
            self._let_go()

    def _let_go(self) -> None:
        """Lets go of the variables of a model that may be gone, except those that a local strategy holds. Stays
        attached to the balancer, as on other ranks the optimizer may still be alive."""
        self._variables, self.last = (), None
        self.left.clear()
        self._drop(lambda key: not self.routing.keeps or are_gone(key[1]))  # else the next optimizer sends what is kept

    def on_count(self) -> None:
        """Does nothing: the number of loss terms is read when the batch's gradients are there."""

    def on_epoch_end(self) -> None:
        """Merges, if the local strategy does so at the end of an epoch, whose samples are used up."""
        if self.local is not None and self.local.steps.rule.merge_each_epoch:
            self.local.steps.merge()

    def withdraw(self) -> Callable[[], bool] | None:
        """See `Attached.withdraw`."""
        return self.local.steps.withdraw() if self.local is not None and self.is_local else self.miss()

    def miss(self) -> Callable[[], bool] | None:
        """See `Attached.miss`."""
        if self.is_local or self.last is None:  # the other ranks wait for this one's shapes until its process ends
            return None
        return self.last.withdraw()


def reducer_of(optimizer: Any) -> GradientReducer | None:
    """What reduces the gradients of `optimizer`; None if it is no distributed one."""
    return getattr(optimizer, "_reducer", None)
