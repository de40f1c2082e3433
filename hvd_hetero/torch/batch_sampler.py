"""Deals each rank its share of one global order of samples, as a PyTorch batch sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import Sampler

from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.sampler import LOADED, ShareSampler, arguments_heard

ONE_AT_A_TIME = (
    "Expected one iteration at a time over data that is dealt to ranks. Received: another one, begun within it, so "
    "that samples would be used twice or never. Take an hvd.EvaluationDataLoader, or a BalancedDataLoader of its own."
)


class Dealing(Iterator[list[int]]):
    """One iteration over a `BalancedBatchSampler`, which deals `batches`.

    A loader that saves its own position, as torchdata's `StatefulDataLoader` does, takes the state of the sampler and
    of this object each time that it passes a batch on to its workers, so before training uses the batch. The sampler's
    state has the batches used, this object's the batches dealt.
    """

    def __init__(self, sampler: BalancedBatchSampler, batches: Iterator[list[int]]) -> None:
        self._sampler, self._batches = sampler, batches

    def __next__(self) -> list[int]:
        return next(self._batches)

    def state_dict(self) -> dict[str, int]:
        """The position after the batches dealt so far."""
        state = self._sampler.state_dict()
        return {**state, "position": state["position"] + self._sampler.sampler.pending}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved. Is called before the first batch."""
        self._sampler.load_state_dict(state)


class BalancedBatchSampler(Sampler[list[int]]):
    """This rank's indices of each global batch, for `DataLoader(batch_sampler=...)`.

    Every sample of an epoch comes up exactly once over all ranks, whatever the plan does. Unlike with
    `DistributedSampler`, nothing is repeated to make ranks even: the last batch may be short (`drop_last`).

    Args:
        length: samples in the dataset, the same on all ranks.
        shuffle, seed: the order of epoch e depends on the seed and e alone; call `set_epoch(e)`.
        lookahead: batches that may be dealt before they are used, `num_workers * prefetch_factor` of the `DataLoader`.
            A new plan takes effect at the first batch that no rank has dealt yet.
        checksum: of the data, for ranks to compare; 0 if they need not.

    With a `DataLoader` of your own, begin each batch with `balancer.begin(sampler.used())`. Where `used()` is 0, this
    rank has no sample in a short last batch: the batch then holds one of another rank's, to be cut off.
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
        with arguments_heard(balancer):
            check_whole("lookahead", lookahead, least=0)
        self.balancer = balancer
        self.sampler = ShareSampler(
            length, balancer=balancer, shuffle=shuffle, seed=seed, drop_last=drop_last, checksum=checksum
        )
        balancer.lookahead = max(balancer.lookahead, lookahead)
        balancer.stateful_parts.add(self)
        self._first = 0  # where the next iteration starts: not 0 after load_state_dict()
        self._iterations = 0

    def __len__(self) -> int:
        """Batches of a whole epoch, also if it was resumed in the middle: frameworks that run the loop themselves count
        from the epoch's beginning."""
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
        """Chooses the order of `epoch`, and starts at its beginning. If `epoch` was resumed in the middle, it goes on
        from there; if at its end, nothing of it is left."""
        before = self.sampler.epoch
        self.sampler.set_epoch(epoch)
        if epoch != before:
            self._first = self.sampler.position

    def bookmark(self) -> Callable[[], None]:
        """Returns a function that goes back to the present place in the data, after an iteration that was no training.
        """
        first, sampler_goes_back = self._first, self.sampler.bookmark()

        def go_back() -> None:
            self._first = first
            sampler_goes_back()

        return go_back

    def __iter__(self) -> Iterator[list[int]]:
        return Dealing(self, self._deal())

    def _deal(self) -> Iterator[list[int]]:
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
        """How many times a state was loaded."""
        return self.sampler.loaded

    def used(self) -> int:
        """This rank's number of samples in the oldest batch dealt and not used yet, which is in use from now on."""
        return self.sampler.used()

    @property
    def origin(self) -> int:
        """A number that identifies the epoch of the batch in use, and its place in it."""
        return self.sampler.origin

    def end_epoch(self) -> None:
        """Moves to the next epoch if this one is used up, so that a script without set_epoch() sees a new order."""
        self.sampler.position = max(self.sampler.position, self._first)
        if self.sampler.position >= len(self.sampler.dealer):
            self.sampler.end_epoch()
            self._first = 0

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and how many global batches of it are used."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved, on any number of ranks."""
        self.sampler.load_state_dict(state)
        self._first = self.sampler.position
