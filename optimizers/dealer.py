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
    """`total` samples split like `shares` (largest remainders, lower rank first); for a short last batch."""
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
        shuffle: a new order each epoch, from `seed` and the epoch alone.
        drop_last: leave out what does not fill a global batch.
        block: so many neighbouring samples stay together in the order, because they are loaded together.
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
        self._orders: dict[int, np.ndarray] = {}  # of this epoch and, while dealing runs ahead, the next

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def order(self, epoch: int | None = None) -> np.ndarray:
        """The order of an epoch, by default this one, int64 of shape [length].

        RandomState's stream is frozen by NumPy for good: ranks with different NumPy versions agree.
        """
        if not self.shuffle:
            return np.arange(self.length)
        state = np.random.RandomState([self.seed & 0xFFFFFFFF, self.epoch if epoch is None else epoch])
        blocks = state.permutation(-(-self.length // self.block))
        order = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)
        return np.asarray(order[order < self.length])

    def batch(self, epoch: int, index: int) -> np.ndarray:
        """Global batch `index` of `epoch`, as an array of indices."""
        if epoch not in self._orders:
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = self.order(epoch)
        return self._orders[epoch][index * self.global_batch_size : (index + 1) * self.global_batch_size]

    def batches(self, first: int = 0) -> Iterator[np.ndarray]:
        """The global batches of this epoch from batch `first` on, as arrays of indices."""
        order = self.order()
        for batch in range(first, len(self)):
            yield order[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]


def cut(batch: np.ndarray, shares: Sequence[int], rank: int) -> np.ndarray:
    """Rank `rank`'s block of a global batch, cut like `shares` (in proportion when the batch is short)."""
    parts = tuple(shares) if len(batch) == sum(shares) else proportional(shares, len(batch))
    start = sum(parts[:rank])
    return batch[start : start + parts[rank]]


@functools.lru_cache(maxsize=8)
def owners(shares: tuple[int, ...]) -> np.ndarray:
    """The rank of each place of a global batch that is read in order, int64 of shape [sum of shares].

    As many for each rank as its share, evenly spread, so that a batch that ends early is split like shares as well, to
    a sample or two.
    """
    ranks: np.ndarray = np.repeat(np.arange(len(shares)), shares)
    middles = np.concatenate([(np.arange(share) + 0.5) / share for share in shares if share] or [np.empty(0)])
    return np.asarray(ranks[np.argsort(middles, kind="stable")])


def evaluation_part(length: int, shares: Sequence[int], rank: int, *, least: int = 0) -> range:
    """Rank `rank`'s of `length` samples that are looked at once over all ranks: at least so many, and the others in
    proportion to shares."""
    parts = [least + part for part in proportional(shares, length - least * len(shares))]
    return range(sum(parts[:rank]), sum(parts[: rank + 1]))
