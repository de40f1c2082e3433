"""Local SGD for `DistributedOptimizer(strategy=…)`: reads and writes variables by fragments, and merges models.

All of it runs on the host: inside `numpy_function` with the TensorFlow back end, directly with the torch one.
"""

from __future__ import annotations

import hashlib
import math
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.fragment import fragments_by_kind
from hvd_hetero.optimizers.gradient_exchange import GradientExchange
from hvd_hetero.optimizers.local_sgd import LocalSGD
from hvd_hetero.optimizers.local_step import LocalSteps
from hvd_hetero.optimizers.routing import Routing
from hvd_hetero.optimizers.second_moments import SecondMoments
from hvd_hetero.optimizers.statistic import Statistic, merge_statistics
from hvd_hetero.optimizers.unsent_state import Count

from .factor import RateFactor
from .layout import Spec
from .second_moments import copy, keepers_of, mix, moments_of


class ParameterStore:
    """Reads and writes a rank's variables as flat fragments. All variables of a fragment have one type, and go through
    a codec all or none.

    Args:
        form: what is particular to the back end, `gradient_tensorflow` or `gradient_torch`.
        count: fragments of each kind.
        lossy: whether a variable of a shape goes through a codec.
    """

    def __init__(
        self, variables: Sequence[Any], form: Any, *, count: int = 1, lossy: Callable[..., bool] = lambda shape: False
    ) -> None:
        self._form = form
        specs = [Spec(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
        kinds = [(spec.wire, lossy(spec.shape)) for spec in specs]
        fragments = fragments_by_kind(kinds, [spec.length for spec in specs], count)
        self._members = [[variables[index] for index in chosen] for chosen in fragments]
        self._specs = [[specs[index] for index in chosen] for chosen in fragments]
        self.lossy: list[bool] = [kinds[chosen[0]][1] for chosen in fragments]
        self.narrow = any(spec.dtype != spec.wire for spec in specs)

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        return [spec.shape for spec in self._specs[index]]

    def empty(self, index: int, tail: int) -> Any:
        specs = self._specs[index]
        return self._form.zeros(sum(spec.length for spec in specs) + tail, specs[0].wire)

    def control(self, length: int) -> Any:
        return self._form.zeros(length, "float64")

    def checksum(self, index: int) -> int:
        found = 0
        for variable in self._members[index]:
            found = zlib.crc32(_bits(variable), found)
        return found

    def read(self, index: int, into: Any = None) -> Any:
        return self._form.flat(self._members[index], self._specs[index][0].wire, into)

    def write(self, index: int, flat: Any) -> None:
        at = 0
        for variable, spec in zip(self._members[index], self._specs[index], strict=True):
            variable.assign(flat[at : at + spec.length].reshape(spec.shape))
            at += spec.length

    def shift(self, index: int, by: Any) -> None:
        at = 0
        for variable, spec in zip(self._members[index], self._specs[index], strict=True):
            by[at : at + spec.length] += self._form.flat([variable], spec.wire)
            at += spec.length
        self.write(index, by)

    def blend(self, index: int, flat: Any, part: float) -> None:
        own = self.read(index)
        own -= flat
        own *= part
        own += flat
        self.write(index, own)


class LocalTraining:
    """Local steps of one optimizer, and their merges. Constructing one is a collective call.

    Args:
        variables: those that the optimizer trains.
        gradient_exchange: of the optimizer's gradients.
        form: what is particular to the back end.
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
        factor: RateFactor | None = None,
        batches: int | None = None,
    ) -> None:
        self._factor = factor if factor is not None and factor.makes_parts() else None
        self._variables, self._gradient_exchange = list(variables), gradient_exchange
        self._balancer = gradient_exchange.balancer
        store = ParameterStore(variables, form, count=rule.fragments, lossy=routing.takes)
        self.steps = LocalSteps(
            rule, store, gradient_exchange=gradient_exchange, routing=routing, batches=batches,
            on_give_up=self._forget_what_is_not_finite,
        )  # fmt: skip
        self._batches = batches
        self._moments = SecondMoments(moments_of, copy=copy, mix=mix, exchanges=rule.second_moments == "global")
        self._optimizer: Callable[[], Any] = lambda: None  # the optimizer, once it has made an update
        self._terms: float | None = None  # loss terms of the local step under way; None: there is none
        self._given = Count([])  # loss terms of each batch that the optimizer was given since its last update
        gradient_exchange.unsent_state.put_count("given apart", self._given)
        self._before: int | None = None  # how many batches the optimizer had been given before this one
        self._wait_s, self._bytes_sent = 0.0, 0  # of the last local step

    def check(self, variables: Sequence[Any]) -> None:
        """Raises ValueError if these are not the variables that this was made for."""
        if [id(v) for v in variables] != [id(v) for v in self._variables]:
            raise ValueError(
                "trainable_variables: expected those of the first step, with a local strategy. Received: others. Make "
                "a new DistributedOptimizer after optimizer.merge()."
            )

    def before_step(self, terms: float) -> None:
        """Prepares the update of a local step over `terms` loss terms. The first call is a collective one."""
        part = self.steps.before_step(by_rate=self._factor is not None)
        self._make_part(part)
        optimizer = self._optimizer()
        self._moments.before_step(optimizer)
        self._before = None if optimizer is None or self._batches is None else _batches_of(optimizer)
        self._terms = terms
        leads = self._gradient_exchange.leads
        self._balancer.exchanged(wait_s=self._wait_s, bytes_sent=self._bytes_sent, leads=leads)

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
        self._balancer.pause()
        start = time.perf_counter()
        self._bytes_sent = 0
        given = self._given.value = [*self._given.value, terms]
        if self._has_updated(optimizer):
            terms, gradients = sum(given), sum(each > 0 for each in given) / len(given)
            self._given.value = []
            self._bytes_sent = self.steps.after_step(terms, lr=lr, gradients=gradients)
            self._moments.after_step(optimizer, self.steps.part(terms), sent=self._bytes_sent > 0)
        if self.steps.ends:
            # Merged now, as Keras announces a batch only when its gradients are there. Before those of a synchronous
            # step are computed, all ranks need one model and one optimizer state, or they would drift apart.
            self.steps.merge()
            self._moments.end(optimizer)
            self._given.value = []
            self._merge(optimizer.variables, weight=self.steps.samples)
        self._wait_s = time.perf_counter() - start
        self._balancer.resume()

    def _has_updated(self, optimizer: Any) -> bool:
        """Whether the optimizer has made an update with the batch given last. With loss scaling Keras itself
        accumulates several batches per update, and does not count a batch that it skips."""
        if self._batches is None:
            return True
        batches = _batches_of(optimizer)
        return batches % self._batches == 0 and batches != self._before

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


def _batches_of(optimizer: Any) -> int:
    """How many batches an optimizer has been given. Keras has no public name for that."""
    return int(keepers_of(optimizer)[0]._iterations)


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
    return int.from_bytes(hashlib.blake2b(_bits(variable), digest_size=8).digest(), "little") >> 1


def _bits(variable: Any) -> memoryview:
    """The bytes of a variable's values."""
    values: np.ndarray = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
    return values.reshape(-1).view(np.uint8).data
