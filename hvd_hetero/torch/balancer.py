"""The balancer of a torch script."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers import balancer as framework_free
from hvd_hetero.policy.partition import micro_batches
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.trace.own import own_trace

from .loss import mean_over_ranks
from .row import Batch, cut, has_samples


class Balancer(framework_free.Balancer):
    """Shares of the global batch in proportion to each rank's measured speed; one per training loop.

    Constructing it is a collective call.

    Args:
        global_batch_size: samples of one optimizer step over all ranks; it never changes, so what is learned and the
            right learning rate do not change either.
        min_share, max_share: bounds for *this* rank, in samples; `max_share` is what its memory holds.
        quantum: this rank's share is a multiple of it.
        max_micro_batch: the most samples of one forward and backward pass on this rank, for `micro_batches`.
        shares: the shares of the first plan, by rank (default: equal ones).
        adaptive: False keeps the first plan for good.
        rule: an `hvd.ReplanRule`, which decides when a new plan pays.
        process_set: the ranks that train together (default: all).
        run: a folder for this run's trace, one file per rank; default: `HVD_HETERO_RUN`, or no trace. A second balancer
            has to have one of its own: by default `HVD_HETERO_RUN` with "-2" at the end, and so on.

    Raises:
        ValueError: on every rank, when the arguments are wrong on any rank or differ between ranks.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        min_share: int = 1,
        max_share: int | None = None,
        quantum: int = 1,
        max_micro_batch: int | None = None,
        shares: Sequence[int] | None = None,
        adaptive: bool = True,
        rule: ReplanRule | None = None,
        process_set: Any = None,
        run: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        engine = engine if engine is not None else HorovodEngine(process_set)
        super().__init__(
            engine,
            global_batch_size=global_batch_size,
            min_share=min_share,
            max_share=max_share,
            quantum=quantum,
            max_micro_batch=max_micro_batch,
            shares=shares,
            adaptive=adaptive,
            rule=rule,
            trace=own_trace(run, ranks=engine.ranks, rank=engine.rank),
        )

    def mean(self, value: Any) -> Any:
        """The mean of `value` over the loss terms of all ranks in this batch; `value` is this rank's mean over its own
        terms, of a loss or a metric to be shown. NaN if no rank has any. A collective call, to be made between two
        batches of training. For a validation, which has other batches, sum up on each rank and all-reduce once.

        Horovod's `allreduce` counts every rank alike, which is no mean over samples where shares differ. What a rank
        without a sample gives counts for nothing, NaN included.

        Args:
            value: a number, or a tensor of one element. For one of integers or bools, the mean is floating-point.
        """
        name = f"hvd_hetero.{self.name}.mean"
        return mean_over_ranks(value, terms=self.progress.batch_terms, engine=self.engine, name=name, of_none=math.nan)

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """The parts of `batch`, each of at most this rank's `max_micro_batch` samples, for one `backward()` each.

        Their gradients add up to that of the whole, weighted by their sizes; ranks may have different numbers of
        parts. Gradients travel during the last one.

        Args:
            batch: the one that was begun. Tensors and numpy arrays with as many rows as it has samples are cut, and
                lists and tuples with as many elements; what else it holds is in each part.

        Raises:
            TypeError: nothing in it is of so many samples.
        """
        samples = self.samples
        if not has_samples(batch, samples):
            raise TypeError(
                f"batch: expected tensors with samples along their first axis, {samples} as the batch that was begun. "
                f"Received: {[list(leaf.shape) for leaf in pytree.tree_leaves(batch) if hasattr(leaf, 'shape')]}."
            )
        sizes = micro_batches(samples, self.arguments.max_micro_batch) or (0,)
        at = 0
        for index, size in enumerate(sizes):
            part = slice(at, at + size)
            at += size
            self.progress.last_pass = index == len(sizes) - 1
            if len(sizes) > 1:
                self._begin_micro_batch(float(size), first=index == 0)
            yield cut(batch, part, samples)
        if len(sizes) > 1:
            self.progress.end_micro_batches()
