"""`EvaluationDataLoader`: deals each sample of a validation to one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hvd_hetero.optimizers.balancer import Balancer, check_balancer
from hvd_hetero.optimizers.dealer import evaluation_part

from .feed import iterating, outliving
from .loader import check_map_style
from .stream import WRAPPED, OwnSamples


class EvaluationDataLoader:
    """This rank's part of a dataset, in batches. Parts are in proportion to the shares, and each sample is in one part.

    For validation, which with equal parts would take as long as the slowest rank needs for its part. Nothing is
    exchanged meanwhile, and ranks may have different numbers of batches, or none. So sum losses and counts on each
    rank, sum these over all ranks, and divide once.

        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in loader:
                total += torch.tensor([loss_function(model(x), y) * len(x), len(x)])
        total = hvd.allreduce(total, op=hvd.Sum, name="validation")
        loss = total[0] / total[1]

    With a local strategy, all ranks call `optimizer.merge()` before it.

    Args:
        dataset: all of it on every rank, in the same order. Every rank reads all of an `IterableDataset`, with the same
            `num_workers` on all ranks: otherwise samples would be evaluated twice or never.
        balancer: says the shares, and with them the size of a batch.
        arguments: of `torch.utils.data.DataLoader`, except `batch_size`, `shuffle`, `sampler` and `batch_sampler`.
    """

    def __init__(self, dataset: Dataset[Any], *, balancer: Balancer, **arguments: Any) -> None:
        check_balancer(balancer)
        if arguments.get("drop_last"):
            raise TypeError("drop_last: expected False, because every sample is looked at once. Received: True.")
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler"):
            if name in arguments:
                raise TypeError(
                    f"{name}: expected none, because the balancer deals the samples. Received: {arguments[name]!r}."
                )
        streams = isinstance(dataset, IterableDataset)
        if not streams:
            check_map_style(dataset)
        arguments["worker_init_fn"] = outliving(arguments.get("worker_init_fn"), WRAPPED if streams else None)
        self.dataset, self._balancer, self._arguments = dataset, balancer, arguments

    def _loader(self) -> DataLoader[Any]:
        shares = self._balancer.plan_at(self._balancer.step + 1).shares
        if isinstance(self.dataset, IterableDataset):
            own: Dataset[Any] = OwnSamples(self.dataset, shares=shares, rank=self._balancer.rank)
            return DataLoader(own, batch_size=max(1, self._balancer.share), **self._arguments)
        mine = evaluation_part(len(self.dataset), shares, self._balancer.rank)  # type: ignore[arg-type]
        return DataLoader(Subset(self.dataset, mine), batch_size=max(1, self._balancer.share), **self._arguments)

    def __len__(self) -> int:
        return len(self._loader())

    def __iter__(self) -> Iterator[Any]:
        with iterating(self._loader()) as source:
            yield from source
