"""Local SGD for `DistributedOptimizer(strategy=…)`: reads and writes parameters by fragments, and merges models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.routing import Routing
from hvd_hetero.optimizers.second_moments import SecondMoments

from .parameter_store import ParameterStore
from .second_moments import mix, moments_of
from .state import all_finite, average_state

MOVED = (
    "Expected parameters of a local strategy on the device, and of the type, that they had when local steps began. "
    "Received: others. Move the model before training, or, without synchronous steps first, before making "
    "hvd.DistributedOptimizer."
)


class LocalTraining:
    """Local steps of one optimizer, and their merges. Constructing one is a collective call.

    Args:
        rule: the numbers of the local strategy.
        parameters: those that are trained.
        gradient_exchange: of their gradients.
        routing: how merges travel.
        before: the object that this one replaces, for another layout.
    """

    def __init__(
        self,
        rule: LocalSGD,
        parameters: Sequence[torch.nn.Parameter],
        gradient_exchange: GradientExchange,
        *,
        routing: Routing,
        before: LocalTraining | None = None,
    ) -> None:
        self._gradient_exchange = gradient_exchange
        self._store = store = ParameterStore(parameters, rule.fragments, lambda p: routing.takes(tuple(p.shape)))
        self.steps = LocalSteps(
            rule, store, gradient_exchange=gradient_exchange, routing=routing,
            on_give_up=self._forget_what_is_not_finite,
        )  # fmt: skip
        find = moments_of if rule.second_moments == "global" else lambda optimizer: ()
        self._moments = SecondMoments(find, copy=torch.clone, mix=mix, exchanges=True)
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = before._optimizer if before else lambda: None

    @property
    def misplaced(self) -> bool:
        """Whether parameters have moved since this was made, as by `model.to(device)`."""
        return self._store.misplaced

    def take_over(self, before: LocalTraining) -> None:
        """Takes over from `before` what the codecs of merges have kept back, and the samples counted."""
        self.steps.take_over(before.steps)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer whose steps these are."""
        self._optimizer = weakref.ref(optimizer)

    @torch.compiler.disable  # a script may compile a whole step of training
    def before_step(self, *, by_rate: bool = False) -> float:
        """Prepares the update of a local step. Returns the factor for its learning rates: see `LocalSteps.before_step`.
        The first call is a collective one."""
        if self.misplaced:
            raise RuntimeError(MOVED)
        factor = self.steps.before_step(by_rate=by_rate)
        self._moments.before_step(self._optimizer())
        return factor

    def after_step(self, terms: float, *, lr: float) -> int:
        """Ends a local step over `terms` loss terms, after its update. Returns the bytes that it has sent."""
        sent = self.steps.after_step(terms, lr=lr)
        self._moments.after_step(self._optimizer(), self.steps.part(terms), sent=sent > 0)
        if self.steps.ends:
            self.come_together()
        return sent

    def _forget_what_is_not_finite(self) -> None:
        """Drops the optimizer's state of each parameter in which there is an infinity or a NaN; it begins anew.

        Is called on a rank that has given up its local steps since the last merge because of such values: with that
        state, all further steps would fail in the same way."""
        if (optimizer := self._optimizer()) is None:
            return
        for parameter, kept in list(optimizer.state.items()):
            if not all_finite(kept.values()):
                del optimizer.state[parameter]

    def merge(self) -> None:
        """Merges, and returns when all ranks hold one model. A collective call."""
        self.steps.merge()
        self._moments.end(self._optimizer())

    def come_together(self) -> None:
        """Ends the local steps: all ranks hold one model and one optimizer state afterwards. A collective call."""
        self.merge()
        optimizer, name = self._optimizer(), f"{self._gradient_exchange.name}.state"
        assert optimizer is not None
        average_state(optimizer, weight=self.steps.samples, engine=self._gradient_exchange.engine, name=name)
