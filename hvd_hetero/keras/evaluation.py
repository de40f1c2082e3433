"""`EvaluationDataset`: deals each sample of a validation to one rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_hetero.optimizers.balancer import Balancer, check_balancer
from hvd_hetero.optimizers.dealer import evaluation_part

from .batch import Batch, with_texts
from .source import source_of
from .stream import StreamSource
from .untuned import UntunedDataset


class EvaluationDataset(UntunedDataset):
    """This rank's part of a dataset, in batches. Parts are in proportion to the shares, and each sample is in one part.

    For `validation_data`, where `MetricAverageCallback` makes the metrics those of all samples; and for `predict`: the
    results of all ranks, in the order of the ranks, are in the order of the samples. `evaluate` returns metrics of this
    rank's samples alone. Ranks may have different numbers of batches, since nothing is exchanged.

    Args:
        x, y, sample_weight: as of `BalancedDataset`.
        balancer: says the shares, and with them the size of a batch.
        options: of a `keras.utils.PyDataset`, such as `workers`; not for a tf.data.Dataset, which one thread reads.
    """

    def __init__(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, balancer: Balancer, **options: Any
    ) -> None:
        super().__init__(**options)
        check_balancer(balancer)
        self._source = source_of(x, y, sample_weight, global_batch_size=balancer.global_batch_size)
        if isinstance(self._source, StreamSource) and (self.workers > 1 or self.use_multiprocessing):
            raise ValueError(
                "x: expected workers=1, and no processes, with a tf.data.Dataset, which is read in its own order. "
                f"Received: workers={self.workers}, use_multiprocessing={self.use_multiprocessing}. Use its prefetch()."
            )
        self._balancer = balancer
        if len(self._source) < balancer.size:
            raise ValueError(
                f"x: expected at least one sample for each of {balancer.size} ranks. Received: {len(self._source)}. "
                "Give all samples to each rank."
            )

    def _mine(self) -> tuple[range, int]:
        """The numbers of this rank's samples, and how many of them make a batch."""
        shares = self._balancer.plan_at(self._balancer.step + 1).shares
        # At least one sample for each rank, as Keras needs a batch on every rank.
        mine = evaluation_part(len(self._source), shares, self._balancer.rank, least=1)
        return mine, max(1, self._balancer.share)

    def __len__(self) -> int:
        mine, size = self._mine()
        return -(-len(mine) // size)

    def __getitem__(self, index: int) -> Batch:
        mine, size = self._mine()
        if index * size >= len(mine):
            raise IndexError(index)  # ends a loop over it, where Keras's PyDataset has none of its own
        return with_texts(self._source.take(np.array(mine[index * size : (index + 1) * size])))
