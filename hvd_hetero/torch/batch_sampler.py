"""Each rank's share of one global order, as a batch sampler."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.sampler import LOADED, ShareSampler

ONE_AT_A_TIME = (
    "Expected one iteration at a time over data that is dealt to ranks. Received: another one, begun within it, so "
    "that samples would be used twice or never. Take an hvd.EvaluationDataLoader, or a BalancedDataLoader of its own."
)


class BalancedBatchSampler(Sampler[list[int]]):
    """This rank's indices of each global batch, for `DataLoader(batch_sampler=...)`.

    Every sample of an epoch comes up exactly once over all ranks, whatever the plan does. Unlike with
    `DistributedSampler`, nothing is repeated to make ranks even: the last batch may be short (`drop_last`).

    Args:
        length: samples in the dataset, the same on all ranks.
        shuffle, seed: the order of epoch e depends on the seed and e alone; call `set_epoch(e)`.
        lookahead: batches that may be dealt before they are used, `num_workers * prefetch_factor` of the `DataLoader`.
            A plan holds for batches that no rank has dealt.
        checksum: of the data, where ranks are to compare it.

    With a `DataLoader` of your own, begin each batch with `balancer.begin(sampler.used())`. Where `used()` is 0, this
    rank has no sample in a short last batch: the batch then holds one that is another rank's, to be cut off.
    """

    def __init__(
        self,
        length: int,
        *,
        balancer: Balancer,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lookahead: int = 0,
        checksum: int = 0,
    ) -> None:
        check_whole("lookahead", lookahead, least=0)
        self.balancer = balancer
        self.sampler = ShareSampler(
            length, balancer=balancer, shuffle=shuffle, seed=seed, drop_last=drop_last, checksum=checksum
        )
        balancer.lookahead = max(balancer.lookahead, lookahead)
        balancer.dependents.add(self)
        self._first = 0  # where the next iteration starts: not 0 after load_state_dict()
        self._iterations = 0

    def __len__(self) -> int:
        """Batches of an epoch, also of one that was resumed in the middle: what runs a loop by itself counts from its
        beginning."""
        return len(self.sampler.dealer)

    @property
    def batches_left(self) -> int:
        """Batches of the next iteration."""
        return len(self) - self._first

    @property
    def left(self) -> int:
        """The samples of the next iteration, over all ranks."""
        dealer = self.sampler.dealer
        whole = len(dealer) * dealer.global_batch_size if dealer.drop_last else dealer.length
        return whole - self._first * dealer.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of `epoch`, and starts at its beginning – unless it was resumed in the middle of it, or at
        its end: then nothing of it is left."""
        before = self.sampler.epoch
        self.sampler.set_epoch(epoch)
        if epoch != before:
            self._first = self.sampler.position

    def __iter__(self) -> Iterator[list[int]]:
        self._iterations = mine = self._iterations + 1
        nothing_left = self.batches_left == 0
        self.end_epoch()
        if nothing_left:
            return
        self.sampler.position, self._first = self._first, 0
        self.sampler.rewind()
        loaded = self.loaded
        for _ in range(len(self.sampler.dealer) - self.sampler.position):
            if self._iterations != mine:
                raise RuntimeError(ONE_AT_A_TIME)
            yield self.sampler.deal().indices.tolist()
            if self.loaded != loaded:
                raise RuntimeError(LOADED)

    @property
    def loaded(self) -> int:
        """So many times a state was."""
        return self.sampler.loaded

    def used(self) -> int:
        """The number of samples of the oldest batch dealt, which is now in use."""
        return self.sampler.used()

    @property
    def origin(self) -> int:
        """A number that stands for the epoch and the place in it of the batch in use."""
        return self.sampler.origin

    def end_epoch(self) -> None:
        """Goes to the next epoch if this one is used up: a script without set_epoch() still sees another order."""
        self.sampler.position = max(self.sampler.position, self._first)
        if self.sampler.position >= len(self.sampler.dealer):
            self.sampler.end_epoch()
            self._first = 0

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch: the number of global batches used."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved, on any number of ranks."""
        self.sampler.load_state_dict(state)
        self._first = self.sampler.position
