"""Deals each rank its share of one global order of samples, as a PyTorch batch sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.sampler import LOADED, ShareSampler, arguments_heard

from .epoch_order import EpochOrder, check_sampler

ONE_AT_A_TIME = (
    "Expected one iteration at a time over data that is dealt to ranks. Received: another one, begun within it, so "
    "that samples would be used twice or never. Take an hvd.EvaluationDataLoader, or a BalancedDataLoader of its own."
)


class Dealing(Iterator[list[Any]]):
    """One iteration over a `BalancedBatchSampler`, which deals `batches`.

    A loader that saves its own position, as torchdata's `StatefulDataLoader` does, takes the state of the sampler and
    of this object each time that it passes a batch on to its workers, so before training uses the batch. The sampler's
    state has the batches used, this object's the batches dealt.
    """

    def __init__(self, sampler: BalancedBatchSampler, batches: Iterator[list[Any]]) -> None:
        self._sampler, self._batches = sampler, batches

    def __next__(self) -> list[Any]:
        return next(self._batches)

    def state_dict(self) -> dict[str, int]:
        """The position after the batches dealt so far."""
        state = self._sampler.state_dict()
        return {**state, "position": state["position"] + self._sampler.sampler.pending}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved. Is called before the first batch."""
        self._sampler.load_state_dict(state)


class BalancedBatchSampler(Sampler[list[Any]]):
    """This rank's indices of each global batch, for `DataLoader(batch_sampler=...)`.

    Every sample of an epoch comes up exactly once over all ranks, whatever the plan does. Unlike with
    `DistributedSampler`, nothing is repeated to make ranks even: the last batch may be short (`drop_last`).

    Args:
        length: samples of an epoch, the same on all ranks: those of the dataset, or `len(sampler)`.
        sampler: draws the indices of each epoch in their order; None: each of the dataset's once. See
            `BalancedDataLoader`.
        shuffle, seed: the order of epoch e depends on the seed and e alone; call `set_epoch(e)`. Without a sampler,
            samples are shuffled unless `shuffle` is False.
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
        sampler: Iterable[Any] | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lookahead: int = 0,
        checksum: int = 0,
    ) -> None:
        self._order: EpochOrder | None = None
        with arguments_heard(balancer):
            check_whole("lookahead", lookahead, least=0)
            if sampler is not None:
                if (expected := check_sampler(sampler, shuffle)) != length:
                    raise ValueError(f"length: expected {expected}, that of the sampler. Received: {length}.")
                self._order = EpochOrder(sampler, length=length, seed=seed)
        self.balancer = balancer
        self.sampler = ShareSampler(
            length,
            balancer=balancer,
            shuffle=sampler is None and shuffle is not False,
            seed=seed,
            drop_last=drop_last,
            checksum=checksum,
            ordered_by=str(self._order or ""),
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

    def __iter__(self) -> Iterator[list[Any]]:
        return Dealing(self, self._deal())

    def _deal(self) -> Iterator[list[Any]]:
        self._iterations = mine = self._iterations + 1
        if self.batches_left == 0:
            self.end_epoch()
            return
        self.draw()
        self.sampler.position, self._first = self._first, 0
        self.sampler.rewind()
        loaded = self.loaded
        for _ in range(len(self.sampler.dealer) - self.sampler.position):
            if self._iterations != mine:
                raise RuntimeError(ONE_AT_A_TIME)
            places = self.sampler.deal().indices
            yield places.tolist() if self._order is None else self._order.at(places)
            if self.loaded != loaded:
                raise RuntimeError(LOADED)

    def draw(self) -> None:
        """Lets a user's sampler draw the order of this epoch, if it has not, or of the next one if this is used up."""
        self.end_epoch()
        if self._order is not None:
            self._order.begin(self.sampler.epoch)
            self.sampler.content = self._order.checksum

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
