"""`DistributedOptimizer`: a Keras optimizer whose gradients are those of the global batch."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvd_hetero.optimizers.argument import check_divisor, check_whole
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.equal import EqualWeights
from hvd_hetero.optimizers.local_sgd import LocalSGD, strategy_of
from hvd_hetero.optimizers.recipe import Wire
from hvd_hetero.optimizers.ways import Ways
from hvd_hetero.policy.topology import Topology

from . import backend
from .accumulation import begin_anew
from .argument import check_unused, op_of
from .compression import Compression
from .factor import PLACE, RateFactor
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
        name, device_dense, device_sparse, sparse_as_dense, num_groups, groups, scale_local_gradients: Horovod's; of no
            effect. Gradients travel dense, and `bucket_bytes` says in how many operations.
        compression: one of `hvd.Compression`.
        gradient_predivide_factor: divides before the sum and multiplies after it.
        op: hvd.Average, or hvd.Sum, which multiplies by the number of ranks.
        backward_passes_per_step: sets the optimizer's `gradient_accumulation_steps`, where it is more than 1. That
            optimizer has to have no variables yet, or as many steps already, as one that was saved.
        average_aggregated_gradients: whether what is applied is the mean over these batches, as in Keras; False: their
            sum, so many times the mean, as in Horovod.
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
    if hasattr(optimizer, "_inner_optimizers"):
        raise TypeError(
            f"optimizer: expected one with a learning rate. Received: a {type(optimizer).__name__}, whose optimizers "
            "have one each. Make a DistributedOptimizer of each of those, and apply them in a train_step."
        )
    check_unused(name=name, device_dense=device_dense, device_sparse=device_sparse)
    steps = _accumulated(optimizer, backward_passes_per_step)
    local = strategy_of(strategy)
    balancer = weights_of(balancer, process_set)
    if keras.config.dtype_policy().name == "mixed_float16" and not _scales(optimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    # Loss scaling skips batches, and changes the scale of the next: there each batch is exchanged by itself.
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
        succeeds=not _scales(optimizer),  # or what is kept back is of a loss at some scale
        sums=1 if average_aggregated_gradients else backward_passes_per_step,
        strategy=local,
    )
    begin_anew(optimizer, passes)
    cls = distributed_class(type(optimizer))
    distributed: Any = object.__new__(cls)
    # The same state: what was trained, loaded or scheduled before goes on.
    distributed.__dict__.update(vars(optimizer))
    distributed.__dict__.pop("apply", None)  # of one whose updates have asked for a factor: see `factor`
    distributed.__dict__[PLACE] = RateFactor(distributed)
    if backward_passes_per_step > 1:
        getattr(distributed, "inner_optimizer", distributed).gradient_accumulation_steps = steps
    distributed.__dict__["_reducer_of"] = reducer_of
    distributed._reduce_anew()
    balancer.engine.remember(distributed._reduce_anew)
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
    sums: int = 1,
    batches: int | None = None,
    succeeds: bool = False,
    strategy: LocalSGD | None = None,
    kind: str = "optimizer",
    at: int | None = None,
) -> GradientReducer:
    """What reduces gradients, from a user's arguments, and gives `sums` times their mean; `batches`,
    `succeeds`, `at`: see `GradientReducer`; `kind`: see `Places`. A collective call."""
    reduction = op_of(op, "Average", "Sum")
    check_divisor("gradient_predivide_factor", predivide)
    if bucket_bytes is not None:
        check_whole("bucket_bytes", bucket_bytes, least=1)
    wire = Compression.named(compression)
    if not isinstance(wire, Wire):
        raise TypeError(f"compression: expected one of hvd.Compression. Received: {compression!r}.")
    return GradientReducer(
        balancer=balancer,
        ways=Ways(
            balancer.engine,
            wire=wire,
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
    """Over how many batches the optimizer, or the one within it, accumulates gradients: over `passes`, where that is
    more than 1.

    Raises:
        ValueError: it cannot be changed any more, or `passes` is no number.
    """
    check_whole("backward_passes_per_step", passes, least=1)
    inner = optimizer.inner_optimizer if _scales(optimizer) else optimizer
    has: int | None = inner.gradient_accumulation_steps
    if passes == 1 or passes == has:
        return has or 1
    if has or inner.built:
        raise ValueError(
            f"backward_passes_per_step: expected 1, or an optimizer that has no variables and no "
            f"gradient_accumulation_steps yet. Received: {passes}, and {type(inner).__name__} with {has}, which is "
            f"{'' if inner.built else 'not '}built. Make a new one with gradient_accumulation_steps={passes}."
        )
    return passes


def _named(optimizer: Any) -> str:
    """Its class, and that of the one within it."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return type(optimizer).__name__ + ("" if inner is None else f"({_named(inner)})")


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
