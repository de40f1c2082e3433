"""`DistributedOptimizer`: Horovod's, and with a balancer one whose gradients are exactly weighted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import horovod.torch as horovod
import torch

from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.engine.process_set import check_process_set
from hvd_hetero.optimizers.argument import check_divisor, check_whole
from hvd_hetero.optimizers.balancer import Balancer, check_balancer
from hvd_hetero.optimizers.equal_weights import EqualWeights
from hvd_hetero.optimizers.local_sgd import LocalSGD, strategy_of
from hvd_hetero.optimizers.routing import Routing, arguments_heard
from hvd_hetero.policy.topology import Topology

from .argument import (
    check_devices,
    check_named_parameters,
    check_names,
    check_optimizer,
    described,
    groups_of,
    numbered,
)
from .compression import codecs_of, is_ours
from .factor import BALANCED, PLACE, check_no_factor, reduces, root_of
from .methods import Distributed, methods_of
from .plain import plain_optimizer, release_plain

if TYPE_CHECKING:
    from .reducer import GradientReducer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = horovod.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = horovod.global_process_set,
    *,
    balancer: Balancer | None = None,
    topology: Topology | str | None = None,
    strategy: LocalSGD | str = "synchronous",
    bucket_bytes: int | None = None,
) -> Distributed:
    """The optimizer, of its own class, with gradients reduced over all ranks before each update.

    Without `balancer` this is Horovod's own `DistributedOptimizer`; its arguments mean what they mean there. With one,
    ranks may take unequal shares, and when `backward()` returns every `p.grad` is the gradient of the mean loss over
    the whole global batch: g = sum_i n_i g_i / sum_i n_i, with n_i the samples (or, after `balancer.count(n)`, the
    loss terms) of rank i. `op=Sum` multiplies it by the number of ranks. `backward_passes_per_step=k` gives k times the
    mean over all terms of k batches, which is Horovod's sum over them if they are of one size.

    A topology, or one of our codecs as `compression`, works with a balancer and without; without one, every rank's
    gradient counts alike, as in Horovod, and is there when `backward()` returns.

    It has Horovod's `synchronize()` and `skip_synchronize()`. With a local strategy it also has `merge(model=None)`, a
    collective call after which all ranks hold one model, with every step of every rank in it; with `model`, its buffers
    are merged as well.

    Args:
        optimizer: the optimizer of the script; the returned one shares its state and its parameter groups.
        named_parameters: names for Horovod's operations. With a balancer, a topology or a codec of ours they are only
            checked: they have to be unique, with one for every parameter of the optimizer.
        compression: one of `hvd.Compression`, or an object with Horovod's `compress` and `decompress`.
        backward_passes_per_step: calls of `backward()` for each `step()`.
        op: `hvd.Average` or `hvd.Sum`; others only without a balancer, a topology and a codec of ours.
        gradient_predivide_factor: gradients are divided by it before the sum over the ranks, and multiplied after it.
        num_groups, groups: which gradients travel in one operation, instead of buckets by size: the number of groups,
            or lists of parameters.
        sparse_as_dense: sums sparse gradients as dense ones. Otherwise, with a balancer, a topology or a codec of ours,
            only the rows that a batch has touched travel, gathered from all ranks and without a codec; the first
            gradient of a parameter travels dense.
        process_set: the ranks, where there is no balancer; a balancer has its own.
        balancer: deals the shares and carries the counts.
        topology: how gradients are summed. "flat" (and None): over all ranks at once. "rails", "scatter", "leader":
            within nodes and between them, by that algorithm (see `hvd_hetero.engine.hierarchy`). "auto": whichever is
            fastest when measured, for each bucket. A `Topology`: its nodes instead of those that are found; in an
            elastic job, as "auto" while the number of ranks is not that of the topology. Where nodes have several
            ranks, all but "flat" need `hvd.init(process_sets="dynamic")`.
        strategy: "synchronous": ranks wait for each other in each step. "local", or an `hvd.LocalSGD(...)` with its
            settings: each rank takes steps of its own, and what it has learned is merged now and then, so that a rank
            that is slow, stalls, or sits behind a slow link holds nobody up. Call `optimizer.merge()` before the job
            ends, and before saving or evaluating: then all ranks hold one model, and nothing is lost. "auto":
            synchronous, and local while that is clearly faster, as measured; `balancer.plan` says which, and why.
        bucket_bytes: at most so many bytes of gradients in one operation (default: 8 MiB; with a topology, what suits
            its links, down to 1 MiB behind slow ones).

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on any rank, or differ between ranks. With no
            balancer, topology, codec of ours or local strategy: only on the rank that passed them, as with Horovod.
    """
    # Imported here, as these import torch's compiler, which takes as long as torch itself. Making an optimizer has
    # imported it already; a process that only loads data is spared it.
    from .hooks import release
    from .reducer import GradientReducer

    if balancer is None and topology is None and strategy == "synchronous" and not is_ours(compression):
        optimizer = _checked(optimizer, named_parameters)
        codecs_of(compression)
        check_process_set(process_set)
        check_no_factor(optimizer)
        release(p for group in optimizer.param_groups for p in group["params"])
        return plain_optimizer(
            optimizer,
            named_parameters=named_parameters,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    if balancer is not None:
        check_balancer(balancer)
    weights = EqualWeights(HorovodEngine(process_set)) if balancer is None else balancer
    with arguments_heard(weights.engine):
        optimizer = _checked(optimizer, named_parameters)
        local = strategy_of(strategy)
        codecs = codecs_of(compression)
        if balancer is None:
            check_no_factor(optimizer)
        elif process_set is not horovod.global_process_set:
            raise ValueError(
                "process_set: expected none with a balancer, whose ranks share the batch: "
                "hvd.Balancer(process_set=...). Received: both."
            )
        if op not in (horovod.Average, horovod.Sum):
            raise ValueError(
                "op: expected hvd.Average or hvd.Sum with a balancer, a topology or our codecs. Received: "
                f"{'hvd.Adasum' if op == horovod.Adasum else repr(op)}."
            )
        check_whole("backward_passes_per_step", backward_passes_per_step, least=1)
        check_divisor("gradient_predivide_factor", gradient_predivide_factor)
        check_whole("bucket_bytes", bucket_bytes, least=1, optional=True)
        together = groups_of(groups, num_groups)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if named_parameters is not None:
            check_names(list(named_parameters), parameters)

    def reducer_of(
        trained: Sequence[torch.nn.Parameter], passes: int, *, at: int | None = None
    ) -> GradientReducer:
        """Makes a reducer of the gradients for the present ranks. A collective call."""
        routing = Routing(
            weights.engine,
            codecs=codecs,
            topology=topology,
            alike={
                "optimizer": type(optimizer).__name__,
                "strategy": local or strategy,
                "backward_passes_per_step": passes,
                "op": "Sum" if op == horovod.Sum else "Average",
                "gradient_predivide_factor": gradient_predivide_factor,
                "bucket_bytes": bucket_bytes,
                "sparse_as_dense": bool(sparse_as_dense),
                "groups": numbered(together, trained),
                "parameters": described(trained),
            },
            tell=weights.record.route,
        )
        return GradientReducer(
            trained,
            balancer=weights,
            routing=routing,
            passes=passes,
            scale=float(weights.size) if op == horovod.Sum else 1.0,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            all_sparse=isinstance(optimizer, torch.optim.SparseAdam),
            bucket_bytes=bucket_bytes,
            groups=together,
            strategy=local,
            at=at,
        )

    release_plain(optimizer)
    reducer = reducer_of([p for p in parameters if p.requires_grad], backward_passes_per_step)
    distributed = _subclassed(optimizer, _reducer=reducer, _reducer_of=reducer_of, _balancer=weights)
    reducer.follow(distributed)
    reduces(distributed)
    weights.engine.on_reset_end(distributed._rebuild)
    return distributed


def _subclassed(optimizer: torch.optim.Optimizer, **attributes: Any) -> Distributed:
    """An optimizer with the methods of `methods_of` and these `attributes`. Its class is derived from that of
    `optimizer`, and it shares its state and parameter groups: a scheduler made before goes on working."""
    base = type(optimizer)
    # horovod.torch.broadcast_optimizer_state recognises a distributed optimizer by its module, and then steps the base.
    methods = {**methods_of(base), "__module__": "horovod.torch.optimizer"}
    distributed: Any = object.__new__(type(base.__name__, (base,), methods))
    # Without what the wrapped one alone is to hold: the balanced optimizer before this one would live as long as this.
    own = ("step", BALANCED, PLACE)
    distributed.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in own})
    distributed.__dict__.update(attributes, _wrapped=optimizer, _should_synchronize=True)
    return distributed  # type: ignore[no-any-return]


def _checked(optimizer: torch.optim.Optimizer, named_parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that the script made, if `optimizer` is a balanced one around it; else `optimizer` itself. Scripts
    wrap anew after layers were thawed.

    Raises:
        TypeError, ValueError: it is no optimizer, one of Horovod's own, or one of parameters where Horovod cannot go.
    """
    check_optimizer(optimizer)
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise ValueError(
            "optimizer: expected one that is not distributed yet. Received: a DistributedOptimizer of Horovod's own. "
            "Pass the optimizer that it was made of."
        )
    if named_parameters is not None:
        check_named_parameters(named_parameters)
    check_devices(p for group in optimizer.param_groups for p in group["params"])
    return root_of(optimizer)  # type: ignore[no-any-return]
