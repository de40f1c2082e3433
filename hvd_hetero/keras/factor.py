"""A factor on the learning rate that is there during an update alone, and the optimizer that asks for it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.latency_lr import LatencyLR
from hvd_hetero.optimizers.noise import NoiseMeter

from . import backend

PLACE = "_factor"  # the attribute of an optimizer that holds its `RateFactor`


class RateFactor:
    """What the updates of one optimizer multiply the learning rate by: 1, unless a `LatencyLR` is followed.

    The optimizer's variable of the learning rate is not touched: an update reads the product instead of it. The factor
    is a number outside of the optimizer's variables, so no saved model has it; with TensorFlow the graph reads it at
    each update, so a factor that moves is no reason to trace again, and each of several steps in one execution has its
    own.
    """

    def __init__(self) -> None:
        self._form: Any = importlib.import_module(f"{__package__}.gradient_{backend.NAME}")
        self._number = self._form.number(1.0)
        self._value, self._in_effect = 1.0, False
        self.core: LatencyLR | None = None
        self._balancer: Balancer | None = None
        self._meter: NoiseMeter | None = None

    def follow(self, core: LatencyLR, balancer: Balancer, meter: NoiseMeter | None) -> None:
        """Is in effect from now on, as `core` says: with each exchange of `balancer`, after which the update is made
        that the exchange was for. `meter`: measures the noise of the optimizer's gradient, for a rule that asks."""
        self.core, self._balancer, self._meter = core, balancer, None
        self._in_effect = True
        if core.measures_noise and meter is not None:
            meter.measuring = True
            self._meter = meter
        balancer.dialogue.subscribe(self._advance)
        self._set(core.factor)

    def rest(self) -> None:
        """Is not in effect until `follow` is called again. What is exchanged is counted all the same."""
        self._in_effect = False
        self._set(1.0)

    @contextlib.contextmanager
    def applied(self, optimizer: Any, gradients: Sequence[Any]) -> Iterator[Any]:
        """Within it, what `optimizer` updates with is the learning rate times the factor, which this gives. Once the
        `gradients` are there, which an exchange may have moved it for."""
        updates = getattr(optimizer, "inner_optimizer", optimizer)
        rate = self._form.multiplied(optimizer.learning_rate, self._number, after=gradients)
        # All that an update reads of its learning rate comes from this method of Keras's.
        vars(updates)["_get_current_learning_rate"] = lambda: rate
        try:
            yield rate
        finally:
            del vars(updates)["_get_current_learning_rate"]

    def _advance(self) -> None:
        assert self.core is not None and self._balancer is not None
        said = self._balancer.dialogue
        self.core.advance(
            samples=said.entered,
            global_batch_size=self._balancer.global_batch_size,
            steps=said.steps,
            staleness=said.mean_staleness,
            noise=None if self._meter is None else self._meter.take(),
        )
        if self._in_effect:
            self._set(self.core.factor)

    def _set(self, value: float) -> None:
        if value != self._value:
            self._value = value
            self._form.set_number(self._number, value)


def factor_of(optimizer: Any) -> RateFactor | None:
    """The factor of an optimizer whose updates ask for it."""
    return vars(optimizer).get(PLACE)


def ask_from_now_on(optimizer: Any) -> RateFactor:
    """Lets the updates of a plain optimizer, whose gradients a tape has reduced, ask for a factor: what was traced of
    them before does not."""
    factor, apply = RateFactor(), optimizer.apply

    def applied(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        grads = list(grads)
        with factor.applied(optimizer, grads):
            apply(grads, trainable_variables)

    vars(optimizer).update({PLACE: factor, "apply": applied})
    return factor
