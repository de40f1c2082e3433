"""`DistributedOptimizer`: makes a Keras optimizer apply the gradient of the global batch."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvd_hetero.optimizers.argument import check_divisor, check_whole
from hvd_hetero.optimizers.balancer import Balancer, check_balancer
from hvd_hetero.optimizers.compression import Compression
from hvd_hetero.optimizers.equal_weights import EqualWeights
from hvd_hetero.optimizers.local_sgd import LocalSGD, strategy_of
from hvd_hetero.optimizers.routing import Routing, arguments_heard
from hvd_hetero.policy.topology import Topology

from . import backend
from .accumulation import begin_anew
from .argument import check_unused, op_of
from .factor import PLACE, RateFactor, inner
from .reducer import GradientReducer
from .subclass import distributed_class


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = backend.horovod.Average,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    balancer: Balancer | None = None,
    topology: Topology | str | None = None,
    strategy: LocalSGD | str = "synchronous",
    bucket_bytes: int | None = None,
) -> keras.optimizers.Optimizer:
    """Returns an optimizer that reduces gradients over all ranks before each update.

    It is of a subclass of the given optimizer's class, and shares its state. A collective call.

    Without `balancer` the gradients of all ranks have equal weights, as in Horovod. With one, ranks may take unequal
    shares, and the gradient of the mean loss over the whole global batch is applied: g = sum_i n_i g_i / sum_i n_i,
    with n_i the samples (or, after `balancer.count(n)`, the loss terms) of rank i. Clipping, weight decay, averages of
    the weights and loss scaling come after that, and so are the same on all ranks. With `gradient_accumulation_steps=k`
    there is one exchange for k batches, in which all their loss terms have equal weights.

    Under the global policy "mixed_float16" the loss is scaled, as `compile()` would do it: by a `LossScaleOptimizer`
    within this one. Saved models name the plain optimizer, so that they open without this package; `hvd.load_model`
    makes it a distributed one again.

    Args:
        optimizer: the optimizer of the script; the returned one shares its variables and settings.
        name, device_dense, device_sparse, sparse_as_dense, num_groups, groups, scale_local_gradients: arguments of
            Horovod without effect. Gradients travel dense, and `bucket_bytes` sets the number of operations.
        compression: one of `hvd.Compression`, or a compressor of your own in Horovod's form, with
            `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)` for tensors of the back end.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied by it afterwards.
        op: hvd.Average, or hvd.Sum, which multiplies the mean by the number of ranks.
        backward_passes_per_step: a value above 1 sets the optimizer's `gradient_accumulation_steps`. The optimizer must
            not have variables yet, unless it has that value already, as one that was saved.
        average_aggregated_gradients: whether to apply the mean gradient over these batches, as Keras does; False: their
            sum, which is `backward_passes_per_step` times the mean, as Horovod does.
        process_set: the ranks that train together (default: the balancer's, or all).
        balancer: deals the shares, and knows the number of samples or loss terms of each rank.
        topology: how gradients are summed; see `hvd_hetero.torch.DistributedOptimizer`.
        strategy: "synchronous", "local", "auto", or a `hvd.LocalSGD(...)`; see `hvd_hetero.torch.DistributedOptimizer`.
            Models are merged by `hvd.callbacks.LocalSGDCallback` before validations and at the end of epochs and of
            training; in a custom loop, by `optimizer.merge(model)`.
        bucket_bytes: the most bytes of gradients in one operation (default: 8 MiB; with a topology, what suits its
            links).

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on any rank, or differ between ranks.
    """
    balancer = weights_of(balancer, process_set)
    with arguments_heard(balancer.engine):
        _check(optimizer)
        check_unused(name=name, device_dense=device_dense, device_sparse=device_sparse)
        steps = _accumulated(optimizer, backward_passes_per_step)
        local = strategy_of(strategy)
    if keras.config.dtype_policy().name == "mixed_float16" and not _scales(optimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    # Loss scaling may skip a batch, and change the scale for the next. So each batch has an exchange of its own then.
    passes = 1 if _scales(optimizer) else steps
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
        batches=steps if steps > passes else None,
        succeeds=not _scales(optimizer),  # residuals of a scaled loss do not suit the next optimizer's scale
        sums=1 if average_aggregated_gradients else backward_passes_per_step,
        strategy=local,
    )
    begin_anew(optimizer, passes)
    cls = distributed_class(type(optimizer))
    distributed: Any = object.__new__(cls)
    # The same state, so that iterations, moments and schedules continue.
    distributed.__dict__.update(vars(optimizer))
    distributed.__dict__.pop("apply", None)  # set on an optimizer that `factor.ask_from_now_on` has changed
    distributed.__dict__[PLACE] = RateFactor(distributed)
    if backward_passes_per_step > 1:
        inner(distributed).gradient_accumulation_steps = steps
    distributed.__dict__["_reducer_of"] = reducer_of
    distributed._reduce_anew()
    balancer.engine.on_reset_end(distributed._reduce_anew)
    return distributed  # type: ignore[no-any-return]


def weights_of(balancer: Balancer | None, process_set: Any) -> Balancer:
    """The balancer that weights gradients: `balancer`, or one of equal weights if that is None.

    A collective call without `balancer`.

    Raises:
        TypeError: `balancer` is no Balancer; on this rank alone, which then does not know the others.
        ValueError: a process set in addition to a balancer. The other ranks hear of it when they make their reducers.
    """
    if balancer is None:
        return EqualWeights(backend.engine(process_set))
    check_balancer(balancer)
    with arguments_heard(balancer.engine):
        if process_set is not None:
            raise ValueError("process_set: expected None with a balancer, which has its own. Received: both.")
    return balancer


def _check(optimizer: Any) -> None:
    """Raises TypeError or ValueError for what is no optimizer, has none of its own learning rate, or is distributed."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer: expected a keras.optimizers.Optimizer. Received: {optimizer!r}.")
    if "_reducer" in vars(optimizer):
        raise ValueError("optimizer: expected one that is not distributed yet. Received: a DistributedOptimizer.")
    if hasattr(optimizer, "_inner_optimizers"):
        raise TypeError(
            f"optimizer: expected one with a learning rate. Received: a {type(optimizer).__name__}, whose optimizers "
            "have one each. Make a DistributedOptimizer of each of those, and apply them in a train_step."
        )


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
    sums: int = 1,
    batches: int | None = None,
    succeeds: bool = False,
    strategy: LocalSGD | None = None,
    kind: str = "optimizer",
    at: int | None = None,
) -> GradientReducer:
    """Makes the reducer of an optimizer or a tape from a user's arguments, which it checks. A collective call.

    Args:
        optimizer: the class name of the optimizer. Ranks compare it, as they do other arguments, and all raise if it
            differs.
        compression, op, predivide, balancer, topology, bucket_bytes: see `DistributedOptimizer`.
        sums: the result is so many times the mean gradient.
        passes, batches, succeeds, strategy, kind, at: see `GradientReducer`.

    Raises:
        ValueError, TypeError: on every rank, wrong arguments on any rank, or unlike ones.
    """
    with arguments_heard(balancer.engine):
        reduction = op_of(op, "Average", "Sum")
        check_divisor("gradient_predivide_factor", predivide)
        check_whole("bucket_bytes", bucket_bytes, least=1, optional=True)
        codecs = Compression.named(compression) or backend.form().Compressor(compression)
    return GradientReducer(
        balancer=balancer,
        routing=Routing(
            balancer.engine,
            codecs=codecs,
            topology=topology,
            alike={
                "optimizer": optimizer,
                "strategy": strategy or "synchronous",
                "gradient_accumulation_steps": batches or passes,
                "op": reduction,
                "backward_passes_per_step": sums,
                "gradient_predivide_factor": predivide,
                "bucket_bytes": bucket_bytes,
            },
            tell=balancer.record.route,
        ),
        passes=passes,
        scale=float(sums * (balancer.size if reduction == "Sum" else 1)),
        predivide=predivide,
        bucket_bytes=bucket_bytes,
        strategy=strategy,
        batches=batches,
        succeeds=succeeds,
        kind=kind,
        at=at,
    )


def _accumulated(optimizer: Any, passes: int) -> int:
    """The number of batches over which the optimizer, or the one within a LossScaleOptimizer, accumulates gradients.

    Args:
        passes: the number that a script asks for; 1: what the optimizer has.

    Raises:
        ValueError: `passes` differs from what the optimizer has, and that cannot be changed any more.
    """
    check_whole("backward_passes_per_step", passes, least=1)
    updates = inner(optimizer)
    has: int | None = updates.gradient_accumulation_steps
    if passes == 1 or passes == has:
        return has or 1
    if has or updates.built:
        raise ValueError(
            f"backward_passes_per_step: expected 1, or an optimizer that has no variables and no "
            f"gradient_accumulation_steps yet. Received: {passes}, and {type(updates).__name__} with {has}, which is "
            f"{'' if updates.built else 'not '}built. Make a new one with gradient_accumulation_steps={passes}."
        )
    return passes


def _named(optimizer: Any) -> str:
    """The class name of an optimizer, followed by that of its inner optimizer in parentheses, if it has one."""
    within = inner(optimizer)
    return type(optimizer).__name__ + ("" if within is optimizer else f"({_named(within)})")


def _scales(optimizer: Any) -> bool:
    """Whether the optimizer scales the loss, as for float16."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
