"""Local SGD for `DistributedOptimizer(strategy=…)`: reads and writes variables by fragments, and merges models.

All of it runs on the host: inside `numpy_function` with the TensorFlow back end, directly with the torch one.
"""

from __future__ import annotations

import hashlib
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.routing import Routing
from hvd_hetero.optimizers.second_moments import SecondMoments
from hvd_hetero.optimizers.statistic import Statistic, merge_statistics
from hvd_hetero.optimizers.unsent_state import Count

from .accumulation import BatchWeights
from .factor import RateFactor
from .parameter_store import ParameterStore, bits_of
from .residuals import VariableMap
from .second_moments import copy, keepers_of, mix, moments_of

_TRAINED_BY: VariableMap[weakref.ref[LocalTraining]] = VariableMap()  # who made local steps with a variable last


class LocalTraining:
    """Local steps of one optimizer, and their merges. Constructing one is a collective call.

    Args:
        variables: those that the optimizer trains.
        gradient_exchange: of the optimizer's gradients.
        form: what is particular to the back end.
        optimizer: returns the optimizer.
        factor: the `RateFactor` of the optimizer; None if it has none.
        batches: global batches per update, where Keras itself adds up the gradients of several.
    """

    def __init__(
        self,
        rule: LocalSGD,
        variables: Sequence[Any],
        gradient_exchange: GradientExchange,
        *,
        routing: Routing,
        form: Any,
        optimizer: Callable[[], Any] = lambda: None,
        factor: RateFactor | None = None,
        batches: int | None = None,
    ) -> None:
        self._factor = factor if factor is not None and factor.makes_parts() else None
        self._variables, self._gradient_exchange = list(variables), gradient_exchange
        self._balancer = gradient_exchange.balancer
        store = ParameterStore(variables, form, count=rule.fragments, lossy=routing.takes)
        before = self._before()
        if before is not None and not gradient_exchange.inherits(before._gradient_exchange):
            before = None
        self.steps = LocalSteps(
            rule, store, gradient_exchange=gradient_exchange, routing=routing, batches=batches,
            on_give_up=self._forget_what_is_not_finite,
        )  # fmt: skip
        if before is not None:
            self.steps.take_over(before.steps)
        for variable in self._variables:
            _TRAINED_BY.put(variable, weakref.ref(self))
        self._weights = None if batches is None else BatchWeights(batches, optimizer)
        self._moments = SecondMoments(moments_of, copy=copy, mix=mix, exchanges=rule.second_moments == "global")
        self._optimizer: Callable[[], Any] = lambda: None  # the optimizer, once it has made an update
        self._terms: float | None = None  # loss terms of the local step under way; None: there is none
        self._given = Count([])  # loss terms of each batch that the optimizer was given since its last update
        gradient_exchange.unsent_state.put_count("given apart", self._given)
        if self._weights is not None:
            gradient_exchange.unsent_state.put_count("taken apart", self._weights.state)
        self._wait_s, self._bytes_sent = 0.0, 0  # of the last local step

    def _before(self) -> LocalTraining | None:
        """The local steps that were made last with exactly these variables, by an earlier optimizer, as of a model that
        was compiled anew; None if there are none."""
        reference = next((_TRAINED_BY.get(variable) for variable in self._variables), None)
        before = None if reference is None else reference()
        alike = before is not None and list(map(id, before._variables)) == list(map(id, self._variables))
        return before if alike else None

    def check(self, variables: Sequence[Any]) -> None:
        """Raises ValueError if these are not the variables that this was made for."""
        if [id(v) for v in variables] != [id(v) for v in self._variables]:
            raise ValueError(
                "trainable_variables: expected those of the first step, with a local strategy. Received: others. Make "
                "a new DistributedOptimizer after optimizer.merge()."
            )

    @property
    def written(self) -> list[Any]:
        """The variables that `before_step` may write."""
        return [] if self._weights is None else self._weights.sums

    @property
    def own(self) -> list[Any]:
        """The variables that are each rank's own now: gradients that the optimizer adds up for its next update; and in
        local steps that are not merged yet, all that it trains and keeps."""
        optimizer = self._optimizer() if self.steps.apart else None
        return self.written if optimizer is None else [*self._variables, *optimizer.variables]

    def before_step(self, terms: float) -> float:
        """Prepares the update of a local step over `terms` loss terms. The first call is a collective one.

        Returns:
            What the rank's mean gradient is to be multiplied by.
        """
        part = self.steps.before_step(by_rate=self._factor is not None)
        self._make_part(part)
        self._moments.before_step(self._optimizer())
        self._terms = terms
        leads = self._gradient_exchange.leads
        self._balancer.exchanged(wait_s=self._wait_s, bytes_sent=self._bytes_sent, leads=leads)
        return 1.0 if self._weights is None else self._weights.before_batch(self._share(terms))

    def _share(self, terms: float) -> float:
        """The loss terms that this rank would have in a whole batch: its share, by the plan, times the `terms` for each
        sample that it has. So of batches that are added up a short one counts as much as others, and one of which more
        is masked for less. 0 for a batch without `terms`."""
        samples = self._balancer.progress.samples
        planned = self._balancer.plan.shares[self._balancer.rank]
        return planned * terms / samples if planned and samples else terms

    def before_synchronous_step(self) -> None:
        """Prepares an update of a synchronous step, which is made in full."""
        self._make_part(1.0)

    def _make_part(self, part: float) -> None:
        if self._factor is not None:
            self._factor.make_part(part)

    def after_step(self, lr: float, optimizer: Any) -> None:
        """Ends a local step, after its update with the learning rate `lr`; nothing if the step was synchronous."""
        self._optimizer = weakref.ref(optimizer)
        if self._terms is None:
            return
        terms, self._terms = self._terms, None
        self._balancer.step_timer.pause()
        start = time.perf_counter()
        self._bytes_sent = 0
        given = self._given.value = [*self._given.value, terms]
        gradients = float(terms > 0) if self._weights is None else self._weights.after_batch(self._share(terms))
        if gradients is not None:
            terms, self._given.value = sum(given), []
            self._bytes_sent = self.steps.after_step(terms, lr=lr, gradients=gradients)
            self._moments.after_step(optimizer, self.steps.part(terms), sent=self._bytes_sent > 0)
        if self.steps.ends:
            # Merged now, as Keras announces a batch only when its gradients are there. Before those of a synchronous
            # step are computed, all ranks need one model and one optimizer state, or they would drift apart.
            self.steps.merge()
            self._moments.end(optimizer)
            self._given.value = []
            if self._weights is not None:
                self._weights.begin_anew()
            self._merge(optimizer.variables, weight=self.steps.samples)
        self._wait_s = time.perf_counter() - start
        self._balancer.step_timer.run()

    def _forget_what_is_not_finite(self) -> None:
        """Replaces optimizer state that holds an infinity or a NaN, with which all further steps would fail.

        Is called on a rank that has given up its local steps since the last merge because of such values. Second
        moments become what they were: Keras counts steps for all variables together, so moments of zero would make long
        steps. Averages of the weights become the weights, and all else becomes zero."""
        if (optimizer := self._optimizer()) is None:
            return
        for moments in moments_of(optimizer):
            before = self._moments.before(moments)
            if before is not None and not _finite(moments.second) and _finite(before):
                moments.second.assign(before)
        for variable, weight in averages_with_weights(optimizer):
            if not _finite(variable):
                variable.assign(weight)
        for variable in optimizer.variables:
            if not _finite(variable):
                variable.assign(keras.ops.zeros_like(variable))

    def merge(self, model: Any, optimizer: Any) -> None:
        """Returns when all ranks hold one model. A collective call."""
        self.steps.merge()
        self._moments.end(optimizer)
        if model is not None:
            variables, moments = statistics_of(model)
            self._merge([*variables, *averages_of(optimizer)], moments, weight=self.steps.take_samples())

    def merge_averages(self, optimizer: Any) -> None:
        """Returns when all ranks hold one model and the same averages of it. A collective call if the optimizer keeps
        averages; else nothing is done. The samples counted for a model's statistics are not reset."""
        if averages := averages_of(optimizer):
            self.steps.merge()
            self._moments.end(optimizer)
            self._merge(averages, weight=self.steps.samples)

    def _merge(
        self, variables: Sequence[Any], moments: Sequence[tuple[Any, Any]] = (), *, weight: float
    ) -> None:
        balancer, name = self._gradient_exchange.balancer, f"{self._gradient_exchange.name}.statistics"
        share = balancer.plan.shares[balancer.rank]
        merge_variables(
            variables, moments, weight=weight, otherwise=share, engine=self._gradient_exchange.engine, name=name
        )


def averages_of(optimizer: Any) -> list[Any]:
    """The averages of the parameters that an optimizer with `use_ema`, or an optimizer within it, keeps."""
    return [average for average, _ in averages_with_weights(optimizer)]


def averages_with_weights(optimizer: Any) -> list[tuple[Any, Any]]:
    """The averages as of `averages_of`, each with its parameter. Keras has no public name for them."""
    found: list[tuple[Any, Any]] = []
    for keeper in keepers_of(optimizer):
        averages = getattr(keeper, "_model_variables_moving_average", ())
        found += zip(averages, getattr(keeper, "_trainable_variables", ()), strict=False)
    return [(average, weight) for average, weight in found if average is not None]


def _finite(variable: Any) -> bool:
    """Whether no element is an infinity or a NaN."""
    return bool(keras.ops.all(keras.ops.isfinite(variable)))


def statistics_of(model: keras.Model) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The variables that layers of `model` keep beside those that are trained, and of these the pairs of a moving mean
    and a moving variance. No metrics and no seeds, which stay each rank's own."""
    pairs = []
    for layer in model._flatten_layers():
        mean, variance = getattr(layer, "moving_mean", None), getattr(layer, "moving_variance", None)
        if mean is not None and variance is not None:
            pairs.append((mean, variance))
    paired = {id(variable) for pair in pairs for variable in pair}
    return [v for v in model.non_trainable_weights if id(v) not in paired], pairs


def merge_variables(
    variables: Sequence[Any], moments: Sequence[tuple[Any, Any]] = (), *, weight: float, otherwise: float = 1.0,
    engine: Engine, name: str,
) -> None:
    """Gives all ranks the same values, see `optimizers.statistic.merge_statistics`. A collective call.

    Variables that are alike on all ranks, as frozen weights are, do not travel.

    Raises:
        TypeError: on every rank, for a variable of neither floating point nor whole numbers.
    """
    types = [keras.backend.standardize_dtype(v.dtype) for v in variables]
    floats = [v for v, dtype in zip(variables, types, strict=True) if "float" in dtype]
    whole = [v for v, dtype in zip(variables, types, strict=True) if "int" in dtype]
    for other in [v for v, dtype in zip(variables, types, strict=True) if "float" not in dtype and "int" not in dtype]:
        raise TypeError(
            "model: expected statistics of floating point or whole numbers, which ranks can agree on. Received: "
            f"{other.path} of {other.dtype}. Call optimizer.merge() without the model, and broadcast it yourself."
        )
    unlike = _unlike([*floats, *whole], engine=engine, name=f"{name}.alike")
    floats, whole = [v for v in floats if id(v) in unlike], [v for v in whole if id(v) in unlike]
    merge_statistics(
        list(map(_statistic_of, floats)),
        [(_statistic_of(mean), _statistic_of(variance)) for mean, variance in moments],
        list(map(_statistic_of, whole)),
        weight=weight,
        otherwise=otherwise,
        engine=engine,
        name=name,
    )


def _statistic_of(variable: Any) -> Statistic:
    """A variable's values, for `merge_statistics`: those of float32 and float64 as they are, others as the widest
    type."""
    shape = tuple(variable.shape)

    def read() -> np.ndarray:
        values = np.asarray(keras.ops.convert_to_numpy(variable))
        if values.dtype not in (np.float32, np.float64):
            values = values.astype(np.int64 if "int" in keras.backend.standardize_dtype(variable.dtype) else np.float64)
        return np.require(values.reshape(-1), requirements="W")

    return Statistic(math.prod(shape), read, lambda merged: variable.assign(merged.reshape(shape)))


def _unlike(variables: Sequence[Any], *, engine: Engine, name: str) -> set[int]:
    """The `id` of those that are not the same on all ranks, bit for bit. A collective call if there are any variables.
    """
    if not variables:
        return set()
    mine = np.array([_fingerprint(variable) for variable in variables])
    most, least = np.split(engine.allreduce_async(np.concatenate([mine, -mine]), name=name, op="max").wait(), 2)
    return {id(variable) for variable, differs in zip(variables, most != -least, strict=True) if differs}


def _fingerprint(variable: Any) -> int:
    """63 bits, which differ where the bits of the values do."""
    return int.from_bytes(hashlib.blake2b(bits_of(variable), digest_size=8).digest(), "little") >> 1
