"""Multiplies an optimizer's learning rate by a factor, during an update alone."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.latency_lr import LatencyLR
from hvd_hetero.optimizers.noise import NoiseMeter

from . import backend

if TYPE_CHECKING:
    from .reducer import GradientReducer

PLACE = "_factor"  # the attribute of an optimizer that holds its `RateFactor`
# Keras's optimizers whose updates, weight decay included, are in proportion to the learning rate. With a momentum (SGD,
# RMSprop) they are not: Keras's momentum is a sum of past updates, each with the learning rate of its own step.
PROPORTIONAL = ("SGD", "RMSprop", "Adam", "AdamW", "Nadam", "Adamax", "Adagrad", "Adadelta", "Lion", "Lamb")


def inner(optimizer: Any) -> Any:
    """The optimizer within a LossScaleOptimizer; any other optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


class RateFactor:
    """What the updates of one optimizer multiply the learning rate by: 1, unless a `LatencyLR` is followed.

    The optimizer's variable of the learning rate is not touched: an update reads the product instead of it. The factor
    is a number outside of the optimizer's variables, so no saved model has it; with TensorFlow the graph reads it at
    each update, so a factor that moves is no reason to trace again, and each of several steps in one execution has its
    own.

    Attributes:
        loaded: whether its state is one that a job goes on from, and was not left by a fit of this one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._form: Any = backend.form()
        self._optimizer = weakref.ref(optimizer)
        self._number = self._form.number(1.0)
        self._value, self._in_effect = 1.0, False
        self._part: Any = None  # a number by which updates multiply their rates on top, where parts of them are made
        self._part_value = 1.0
        self._core: LatencyLR | None = None
        self._balancer: Balancer | None = None
        self._meter: NoiseMeter | None = None
        self._new: dict[str, Any] = {}  # the state of one who has followed nothing yet
        self._waiting: dict[str, Any] = {}  # a state, until there is a core
        self.loaded = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RateFactor:
        """The factor itself, which is the optimizer's: a callback that is copied takes that of its own one in `fit`."""
        return self

    @property
    def reducer(self) -> GradientReducer | None:
        """What reduces the gradients of the optimizer, if it is a distributed one that lives."""
        reducer: GradientReducer | None = getattr(self._optimizer(), "_reducer", None)
        return reducer

    def follow(self, core: LatencyLR, balancer: Balancer, *, new: dict[str, Any]) -> None:
        """Puts the factor of `core` into effect from now on; it advances with each exchange of `balancer`, before the
        update that the exchange is for. `new`: the initial state of such a core."""
        self._core, self._balancer, self._new = core, balancer, new
        self._meter, self._waiting, self.loaded, self._in_effect = None, {}, False, True
        if core.measures_noise and self.reducer is not None:
            self._meter = self.reducer.noise
            self._meter.measuring = True
        balancer.dialogue.subscribe(self._advance)
        self._set(core.factor)

    def follows(self, core: LatencyLR) -> bool:
        """Whether `core` was the last to be followed."""
        return self._core is core

    def rest(self) -> None:
        """Takes the factor out of effect until `follow` is called again. Exchanges still advance it."""
        self._in_effect = False
        self._set(1.0)

    def makes_parts(self) -> bool:
        """Whether the optimizer can make a part of an update, as it can if updates are in proportion to the learning
        rate. If so, `make_part` says which part for all that ask for the factor from now on."""
        if self._part is None and in_proportion(self._optimizer()):
            self._part = self._form.number(1.0)
        return self._part is not None

    def make_part(self, part: float) -> None:
        """Sets which part of its next updates the optimizer makes."""
        if part != self._part_value:
            self._part_value = part
            self._form.set_number(self._part, part)

    @contextlib.contextmanager
    def applied(self, optimizer: Any, gradients: Sequence[Any]) -> Iterator[Any]:
        """A context in which `optimizer` updates with its learning rate times the factor, times the part to be made.
        Yields the learning rate times the factor. Both numbers are read once `gradients` are there, as the exchange of
        these may set them."""
        updates = inner(optimizer)
        rate = self._form.multiplied(optimizer.learning_rate, self._number, after=gradients)
        made = rate if self._part is None else self._form.multiplied(rate, self._part, after=gradients)
        # All that an update reads of its learning rate comes from this method of Keras's.
        vars(updates)["_get_current_learning_rate"] = lambda: made
        try:
            yield rate
        finally:
            del vars(updates)["_get_current_learning_rate"]

    def state_dict(self) -> dict[str, Any]:
        """The state of what the factor follows, as plain numbers; empty before the first fit."""
        return self._waiting if self._core is None else self._core.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, now or when there is a core; begins anew if it is empty."""
        self.loaded = bool(state)
        if self._core is None:
            self._waiting = dict(state)
            return
        self._core.load_state_dict(dict(state) or self._new)
        if self._in_effect:
            self._set(self._core.factor)

    def _advance(self) -> None:
        assert self._core is not None and self._balancer is not None
        self._core.hear(self._balancer, self._meter)
        if self._in_effect:
            self._set(self._core.factor)

    def _set(self, value: float) -> None:
        if value != self._value:
            self._value = value
            self._form.set_number(self._number, value)


class Factors:
    """The learning-rate factors of the optimizers of one balancer, whose state includes theirs. Callbacks cannot keep
    them, as a job that goes on, on other ranks or in another process, makes its callbacks anew.

    States are named by the optimizers' numbers; those of optimizers without one, because a tape reduces their
    gradients, by their order.
    """

    def __init__(self) -> None:
        self._live: list[RateFactor] = []
        self._plain: list[RateFactor] = []
        self._waiting: dict[str, Any] = {}  # states of those that are yet to come

    def add(self, factor: RateFactor) -> None:
        """Keeps the state of `factor` as well; the one that waits for it becomes its own."""
        if factor in self._live:
            return
        if factor.reducer is None:
            self._plain.append(factor)
        self._live.append(factor)
        if (state := self._waiting.pop(self._key(factor), None)) is not None:
            factor.load_state_dict(state)

    def _key(self, factor: RateFactor) -> str:
        if factor in self._plain:
            return f"plain.{self._plain.index(factor)}"
        return "" if factor.reducer is None else str(factor.reducer.gradient_exchange.number)

    def state_dict(self) -> dict[str, Any]:
        """The states, by number, as plain numbers."""
        live = {self._key(factor): factor.state_dict() for factor in self._live}
        return {key: state for key, state in {**self._waiting, **live}.items() if key and state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; what has none begins anew."""
        self._waiting = dict(state)
        for factor in self._live:
            factor.load_state_dict(self._waiting.pop(self._key(factor), {}))


def in_proportion(optimizer: Any) -> bool:
    """Whether the updates of a distributed optimizer are in proportion to its learning rate."""
    updates = inner(optimizer)
    base = type(optimizer).__mro__[1] if updates is optimizer else type(updates)
    if base.__module__.partition(".")[0] != "keras" or base.__name__ not in PROPORTIONAL:
        return False
    return not getattr(updates, "momentum", 0.0)


def factor_of(optimizer: Any) -> RateFactor | None:
    """The factor of an optimizer whose updates ask for it."""
    return vars(optimizer).get(PLACE)


def ask_from_now_on(optimizer: Any) -> RateFactor:
    """Gives a plain optimizer, whose gradients a tape has reduced, a factor for its updates. A `tf.function` that was
    traced before goes on without it."""
    factor, apply = RateFactor(optimizer), optimizer.apply

    def applied(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        grads = list(grads)
        with factor.applied(optimizer, grads):
            apply(grads, trainable_variables)

    vars(optimizer).update({PLACE: factor, "apply": applied})
    return factor
