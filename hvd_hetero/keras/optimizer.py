"""`DistributedOptimizer`: a Keras optimizer whose gradients are those of the global batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import keras

from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.equal import EqualWeights
from hvd_hetero.optimizers.local_sgd import LocalSGD, strategy_of
from hvd_hetero.optimizers.recipe import Wire
from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.policy.topology import Topology

from . import backend
from .compression import Compression
from .reducer import GradientReducer


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: Any = Compression.none,
    op: Any = backend.horovod.Average,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = None,
    *,
    balancer: Balancer | None = None,
    topology: Topology | str | None = None,
    strategy: LocalSGD | str = "synchronous",
    bucket_bytes: int | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer, of its own class and with its state, with gradients reduced over all ranks before each update.

    Without `balancer` every rank's gradient counts alike, as in Horovod. With one, ranks may take unequal shares, and
    what is applied is the gradient of the mean loss over the whole global batch: g = sum_i n_i g_i / sum_i n_i, with
    n_i the samples (or, after `balancer.count(n)`, the loss terms) of rank i. Clipping, weight decay, averages of the
    weights and loss scaling come after that, and so are the same on all ranks. With `gradient_accumulation_steps=k`
    there is one exchange for k batches, in which all their loss terms count alike.

    Under the global policy "mixed_float16" the loss is scaled, as `compile()` would do it: by a `LossScaleOptimizer`
    within this one. Saved models name the plain optimizer, so that they open without this package; `hvd.load_model`
    makes it a distributed one again.

    Args:
        compression: one of `hvd.Compression`.
        op: hvd.Average, or hvd.Sum, which multiplies by the number of ranks.
        gradient_predivide_factor: divides before the sum and multiplies after it.
        process_set: the ranks that train together (default: the balancer's, or all).
        balancer: deals the shares and carries the counts.
        topology: how gradients are summed; see `hvd_hetero.torch.DistributedOptimizer`.
        strategy: "synchronous", "local", "auto", or a `hvd.LocalSGD(...)`; see `hvd_hetero.torch.DistributedOptimizer`.
            `hvd.callbacks.LocalSGDCallback` merges before validations, at the end of epochs and of training; in a loop
            of one's own `optimizer.merge(model)` does.
        bucket_bytes: at most so many bytes of gradients in one operation (default: 8 MiB; with a topology, what suits
            its links).

    Raises:
        ValueError, TypeError: arguments that do not fit together, on the rank that passed them.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer: expected a keras.optimizers.Optimizer. Received: {optimizer!r}.")
    if "_reducer" in vars(optimizer):
        raise ValueError("optimizer: expected one that is not distributed yet. Received: a DistributedOptimizer.")
    local = strategy_of(strategy)
    balancer = weights_of(balancer, process_set)
    if keras.config.dtype_policy().name == "mixed_float16" and not _scales(optimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    # Loss scaling skips batches, and changes the scale of the next: there each batch is exchanged by itself.
    passes = 1 if _scales(optimizer) else optimizer.gradient_accumulation_steps or 1
    reducer_of = functools.partial(
        make_reducer,
        optimizer=_named(optimizer),
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        balancer=balancer,
        topology=topology,
        bucket_bytes=bucket_bytes,
        passes=passes,
        strategy=local,
    )
    cls = _distributed_class(type(optimizer))
    distributed: Any = object.__new__(cls)
    # The same state: what was trained, loaded or scheduled before goes on.
    distributed.__dict__.update(vars(optimizer))
    distributed.__dict__["_reducer"] = reducer_of()
    distributed.__dict__["_reducer_of"] = reducer_of
    balancer.engine.remember(distributed._rebuild)
    return distributed  # type: ignore[no-any-return]


def weights_of(balancer: Balancer | None, process_set: Any) -> Balancer:
    """The balancer, or where there is none, equal weights on the process set: that is a collective call."""
    if balancer is None:
        return EqualWeights(backend.engine(process_set))
    if not isinstance(balancer, Balancer):
        raise TypeError(f"balancer: expected an hvd.Balancer. Received: {balancer!r}.")
    if process_set is not None:
        raise ValueError("process_set: expected None with a balancer, which has its own. Received: both.")
    return balancer


def make_reducer(
    *,
    optimizer: str = "none, but a tape",
    compression: Any,
    op: Any,
    predivide: float,
    balancer: Balancer,
    topology: Topology | str | None,
    bucket_bytes: int | None,
    passes: int = 1,
    strategy: LocalSGD | None = None,
) -> GradientReducer:
    """What reduces gradients, from a user's arguments. A collective call."""
    if op not in (backend.horovod.Average, backend.horovod.Sum):
        raise ValueError(f"op: expected hvd.Average or hvd.Sum. Received: {op!r}.")
    if bucket_bytes is not None:
        check_whole("bucket_bytes", bucket_bytes, least=1)
    wire = Compression.named(compression)
    if not isinstance(wire, Wire):
        raise TypeError(f"compression: expected one of hvd.Compression. Received: {compression!r}.")
    trace = balancer.trace
    return GradientReducer(
        balancer=balancer,
        ways=Ways(
            balancer.engine,
            wire=wire,
            topology=topology,
            alike={
                "optimizer": optimizer,
                "strategy": strategy or "synchronous",
                "gradient_accumulation_steps": passes,
                "op": "Sum" if op == backend.horovod.Sum else "Average",
                "gradient_predivide_factor": predivide,
                "bucket_bytes": bucket_bytes,
            },
            tell=lambda name, choice: trace.event("route", bucket=name, **asdict(choice)) if trace else None,
        ),
        passes=passes,
        scale=float(balancer.size) if op == backend.horovod.Sum else 1.0,
        predivide=predivide,
        bucket_bytes=bucket_bytes,
        strategy=strategy,
    )


def _named(optimizer: Any) -> str:
    """Its class, and that of the one within it."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return type(optimizer).__name__ + ("" if inner is None else f"({_named(inner)})")


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _distributed_class(base: type) -> type:
    """A subclass of `base` that reduces what it applies, and that Keras saves as `base`."""
    public = _public(base)
    cls = type(public.__name__, (base,), {**_methods(base), "__module__": _module(public), "__doc__": base.__doc__})
    name = keras.saving.get_registered_name(base)
    if ">" in name:
        # A user's own class: under its name Keras finds that class when it loads, and that name when it saves ours.
        package, _, registered = name.partition(">")
        for one in (cls, base):
            keras.saving.register_keras_serializable(package, registered)(one)
    return cls


def _public(base: type) -> type:
    """The class under whose name a model with an optimizer of class `base` is saved.

    The torch back end makes Keras's own optimizers of private classes, which no other back end could load.
    """
    own = getattr(keras.optimizers, base.__name__, None)
    return own if isinstance(own, type) and issubclass(base, own) else base


def _module(public: type) -> str:
    return "keras.optimizers" if getattr(keras.optimizers, public.__name__, None) is public else public.__module__


def _methods(base: type) -> dict[str, Any]:
    """What a distributed optimizer does differently from its base class."""

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        if len(grads) != len(variables):
            base.apply(self, grads, trainable_variables)  # type: ignore[attr-defined]  # says what is wrong
            return
        rate = self.learning_rate
        grads = self._reducer.reduced(grads, variables, self._iterations)
        base.apply(self, grads, trainable_variables)  # type: ignore[attr-defined]
        self._reducer.updated(self, variables, rate)

    def merge(self: Any, model: keras.Model | None = None) -> None:
        """Returns when all ranks hold one model, in which every step of every rank counts once. A collective call.

        With `model`, its statistics (of BatchNormalization) become those of all ranks' samples as well, and the
        averages of the weights (`use_ema`) those of all ranks.
        """
        self._reducer.merge(model, self)

    def finalize_variable_values(self: Any, var_list: Sequence[Any]) -> None:
        """Overwrites the weights with their averages, if this optimizer keeps any, as `fit` does in the end: with those
        of all ranks, also where ranks have trained apart. Then it is a collective call."""
        self._reducer.merge_averages(self)
        base.finalize_variable_values(self, var_list)  # type: ignore[attr-defined]

    def rebuild(self: Any) -> None:
        """Reduces over the ranks that there are now. A collective call."""
        self._reducer.close()
        self.__dict__["_reducer"] = self._reducer_of()

    def from_config(cls: type, config: dict[str, Any], **arguments: Any) -> Any:
        """A plain optimizer: what makes one distributed is no part of a configuration."""
        return base.from_config(config, **arguments)  # type: ignore[attr-defined]

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # as a LossScaleOptimizer does to what it is put around
            raise ValueError(
                "Expected hvd.DistributedOptimizer outermost, so that all ranks skip the same steps. Received: a "
                "LossScaleOptimizer around it, as compile() makes for a model of the policy mixed_float16. Pass "
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)."
            )
        base.__setattr__(self, name, value)  # type: ignore[call-arg]

    return {
        "apply": apply,
        "merge": merge,
        "finalize_variable_values": finalize_variable_values,
        "_rebuild": rebuild,
        "from_config": classmethod(from_config),
        "__setattr__": set_attribute,
    }
