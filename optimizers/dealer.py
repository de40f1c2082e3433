"""Dealing the samples of an epoch: one global order, cut by the plan.

Global batch k holds positions [k B, (k + 1) B) of the epoch's order, whatever the plan; rank i takes its contiguous
block of it. So every sample is used exactly once per epoch however often the plan changes, and a resumed run deals
the same samples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np


def proportional(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """Returns `total` samples split in proportion to `shares`, by rank; used for a short last batch.

    Samples left over by rounding down go to the largest remainders, one each, to the lower rank where they are equal.
    """
    whole = sum(shares)
    parts = [share * total // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(shares[rank] * total % whole), rank))
    for rank in by_remainder[: total - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


class Dealer:
    """The order of one epoch of `length` samples in global batches.

    Args:
        length: samples in the dataset.
        global_batch_size: samples in one global batch.
        shuffle: whether each epoch has an order of its own, which depends on `seed` and the epoch alone.
        seed: the same on all ranks.
        drop_last: whether samples at the end that do not fill a global batch are left out.
        block: the number of neighbouring samples that stay together in the order, because they are loaded together.

    Attributes:
        epoch: the present epoch, for `batches`; it may be set.

    Raises:
        ValueError: there is no sample or, with `drop_last`, not one whole global batch.
    """

    def __init__(
        self, length: int, *, global_batch_size: int, shuffle: bool, seed: int, drop_last: bool, block: int = 1
    ) -> None:
        if length < 1:
            raise ValueError(f"Expected a dataset with at least one sample. Received: {length}.")
        if drop_last and length < global_batch_size:
            raise ValueError(
                f"Expected a dataset of at least one global batch ({global_batch_size} samples) with drop_last=True. "
                f"Received: {length} samples. Use drop_last=False, or a smaller global batch."
            )
        self.length, self.global_batch_size = length, global_batch_size
        self.shuffle, self.seed, self.drop_last, self.block = shuffle, seed, drop_last, block
        self.epoch = 0
        self._orders: dict[int, np.ndarray] = {}  # the orders of the epoch dealt last and the one before it

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def order(self, epoch: int) -> np.ndarray:
        """Returns the sample indices in the order of an epoch: int64 of shape [length].

        RandomState's stream is frozen by NumPy for good: ranks with different NumPy versions agree.
        """
        if not self.shuffle:
            return np.arange(self.length)
        state = np.random.RandomState([self.seed & 0xFFFFFFFF, epoch])
        blocks = state.permutation(-(-self.length // self.block))
        order = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        return np.asarray(order[order < self.length])

    def batch(self, epoch: int, index: int) -> np.ndarray:
        """Returns the sample indices of global batch `index` of `epoch`."""
        if epoch not in self._orders:
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = self.order(epoch)
        return self._orders[epoch][index * self.global_batch_size : (index + 1) * self.global_batch_size]

    def batches(self) -> Iterator[np.ndarray]:
        """Yields the sample indices of each global batch of the present epoch."""
        for index in range(len(self)):
            yield self.batch(self.epoch, index)


def cut(batch: np.ndarray, shares: Sequence[int], rank: int) -> np.ndarray:
    """Returns the contiguous block of a global batch that is rank `rank`'s: as many samples as its share, or in
    proportion to `shares` if the batch is short."""
    parts = tuple(shares) if len(batch) == sum(shares) else proportional(shares, len(batch))
    start = sum(parts[:rank])
    return batch[start : start + parts[rank]]


@functools.lru_cache(maxsize=8)
def owners(shares: tuple[int, ...]) -> np.ndarray:
    """Returns the rank of each position of a global batch read from a stream, int64 of shape [sum of shares].

    Each rank has as many positions as its share, evenly spread, so that a batch that ends early is split in proportion
    to the shares as well, to within a sample or two.
    """
    ranks: np.ndarray = np.repeat(np.arange(len(shares)), shares)
    middles = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share] or [np.empty(0)])
    return np.asarray(ranks[np.argsort(middles, kind="stable")])


def evaluation_part(length: int, shares: Sequence[int], rank: int, *, least: int = 0) -> range:
    """Returns the indices of the samples that rank `rank` evaluates, of `length` samples that all ranks evaluate once.

    Args:
        least: samples that each rank has at least; the rest is split in proportion to `shares`.
    """
    parts = [least + part for part in proportional(shares, length - least * len(shares))]
    return range(sum(parts[:rank]), sum(parts[: rank + 1]))
