"""Deals a stream (an `IterableDataset`), whose samples have no index and which every rank reads in the same order.

Global batch k of an epoch is what the stream yields next, whatever the plan is. Each rank reads all of it, keeps the
samples of its own share, and discards those of the others. So every sample is used exactly once, however often the plan
changes, as with `ShareSampler`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .agreement import agree_on
from .argument import check_integer, check_state, check_whole
from .balancer import Balancer, check_balancer
from .control import ORIGINS
from .sampler import agreement_of
from .stream_state import Kept

A_STREAM = "a stream (IterableDataset)"


class StreamPlace(NamedTuple):
    """A place in a stream that is begun anew where it ends.

    Attributes:
        number: of the pass over the stream.
        used: samples of this pass that were used.
        kept: this place or an earlier one of the pass, as the stream itself keeps it; None if it keeps none.
    """

    number: int
    used: int
    kept: Kept | None = None

    @property
    def saved(self) -> list[Any]:
        """The place as lists of values, from which `restored` makes it again."""
        return [self.number, self.used, None if self.kept is None else list(self.kept)]

    @classmethod
    def restored(cls, saved: Sequence[Any]) -> StreamPlace:
        """The place of `saved`."""
        number, used, kept = saved
        return cls(number, used, None if kept is None else Kept(*kept))


class Start(NamedTuple):
    """Where readers are to begin, or to go on.

    Attributes:
        number: another one whenever places were loaded, or readers have to be begun anew. A reader goes to its place
            once for each number.
        places: by the number of the reader; one without an entry begins its stream.
    """

    number: int
    places: Mapping[int, StreamPlace]


class Order(NamedTuple):
    """Tells a reader (a loading process, or this one) to read the next global batch of its stream.

    Attributes:
        run: the number of the iteration that the batch is for.
        epoch: the epoch of that iteration.
        rank: the rank whose samples are kept.
        shares: the shares of all ranks in this batch. None: the batch was used before a checkpoint, and is skipped.
        start: where readers of a stream that is this rank's own begin.
    """

    run: int
    epoch: int
    rank: int
    shares: tuple[int, ...] | None
    start: Start | None = None


class StreamSampler:
    """Says which samples of each global batch of a stream this rank takes, and counts the batches that were used.

    It issues an `Order` for each global batch, to be carried out by reading processes ahead of the use of the batch.
    Only batches that were used count as done. An epoch ends when the stream ends. To resume within an epoch, the stream
    is read again from its beginning.

    Args:
        length: samples of an epoch over all ranks; None if the stream has no length.
        balancer: gives the shares.
        seed: random numbers that are drawn while reading are seeded with it and the epoch.
        drop_last: whether a short last batch is dropped.
        workers: the number of reading processes. Each makes whole global batches, so the order of samples depends on
            it.
        lookahead: how many batches may be ordered before they are used. If some readers are at the end of their stream,
            the step, and thus the plan, for which a batch is ordered depends on it.

    Attributes:
        epoch: the present epoch.
        position: the number of global batches of this epoch that were used.
        run: the number of iterations begun so far.
        loaded: how many times `load_state_dict` was called.

    Raises:
        TypeError: `balancer` is not a balancer.
        ValueError: on every rank, when the arguments differ between ranks.
    """

    def __init__(
        self, length: int | None, *, balancer: Balancer, seed: int, drop_last: bool, workers: int, lookahead: int
    ) -> None:
        check_balancer(balancer)
        self.balancer, self.length, self.seed, self.drop_last = balancer, length, seed, drop_last
        self._workers, self._lookahead = workers, lookahead
        self._agree()
        check_integer("seed", seed)  # the same on all ranks by now
        self.epoch = 0
        self.position = 0
        self._first = 0  # the `position` at which the next iteration starts: not 0 after load_state_dict()
        self._resumed = False  # whether a state was loaded, and no iteration begun since
        self._over = False  # whether the loaded state is at the end of the epoch that set_epoch() has chosen
        self.run = 0
        self._answers = 0  # orders of the present iteration that were carried out
        self.loaded = 0
        self._whole = self._content = 0  # samples of the batch in use, over all ranks, and their checksum
        balancer.lookahead = max(balancer.lookahead, lookahead)
        balancer.stateful_parts.add(self)
        balancer.engine.on_reset_end(self._agree)

    def _agree(self) -> None:
        alike: dict[str, Any] = {
            "dataset length": A_STREAM if self.length is None else f"{self.length} samples of {A_STREAM}",
            "seed": self.seed,
            "drop_last": self.drop_last,
            "num_workers": self._workers,
            "num_workers * prefetch_factor": self._lookahead,
        }
        agree_on(self.balancer.engine, alike, name=agreement_of(self.balancer))

    def __len__(self) -> int:
        """The number of global batches in the next iteration.

        Raises:
            TypeError: the stream has no length.
        """
        if self.length is None:
            raise TypeError("len(): expected a dataset of known length. Received: an IterableDataset without __len__.")
        whole, rest = divmod(self.length, self.balancer.global_batch_size)
        return max(0, whole + (rest > 0 and not self.drop_last) - self._first) if not self._over else 0

    @property
    def left(self) -> int | None:
        """The number of samples in the next iteration, over all ranks; None if the stream has no length."""
        size = self.balancer.global_batch_size
        if self.length is None or self._over:
            return None if self.length is None else 0
        return max(0, self.length - (self.length % size if self.drop_last else 0) - self._first * size)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which starts at the beginning of `epoch`. If a state from within this
        epoch was loaded, the iteration starts there; if the state is from the end of this epoch, the iteration is
        empty."""
        check_whole("epoch", epoch, least=0)
        if self._resumed and (epoch + 1, 0) == (self.epoch, self._first):
            self.epoch, self._over = epoch, True
        elif epoch != self.epoch or not self._resumed:
            self.epoch, self.position, self._first, self._resumed, self._over = epoch, 0, 0, False, False

    def bookmark(self) -> Callable[[], None]:
        """Returns a function that goes back to the present place in the epoch, after an iteration that was no training.
        """
        place = self.epoch, self.position, self._first, self._resumed, self._over

        def go_back() -> None:
            self.epoch, self.position, self._first, self._resumed, self._over = place

        return go_back

    def begin(self) -> bool:
        """Begins an iteration. Returns False if nothing of the epoch is left."""
        over, self._over = self._over, False
        self.position, self._first, self._resumed = self._first, 0, False
        self.run, self._answers = self.run + 1, 0
        return not over

    def orders(self) -> Iterator[Order]:
        """Yields the orders of an iteration, without end: first those to skip the batches that were used before it."""
        run, epoch, passed_over = self.run, self.epoch, self.position
        for _ in range(passed_over):
            yield Order(run, epoch, self.balancer.rank, None)
        for ordered in itertools.count():
            # The number of orders that are not carried out yet: at most so many batches come before this one. Orders to
            # readers that have ended yield no batch. If they counted, `step` would run ever further ahead of the steps
            # that are made, into those for which a new plan may hold.
            ahead = ordered - max(0, self._answers - passed_over)
            shares = self.balancer.deal(self.balancer.step + 1 + ahead).shares
            yield Order(run, epoch, self.balancer.rank, tuple(shares))

    def answered(self) -> None:
        """Says that the oldest order was carried out: its reader has returned a batch, or has ended."""
        self._answers += 1

    def use(self, whole: int, content: int) -> None:
        """Says that the next batch is in use from now on: `whole` samples over all ranks, whose checksum is `content`.
        """
        self.position += 1
        self._whole, self._content = whole, content

    def miss(self) -> None:
        """Says that this rank could not load the next batch, which the other ranks use: it counts as used."""
        self.position += 1

    @property
    def origin(self) -> int:
        """A hash, below `ORIGINS`, of the position in the epoch and the content of the batch in use. Ranks compare it
        in each exchange, to notice that their loaders are at different batches, or that the stream of one ends early.
        """
        return (zlib.crc32(f"{self.position} {self._content}".encode()) + self._whole) % ORIGINS

    def end_epoch(self) -> None:
        """Goes to the beginning of the next epoch; is called when the stream has ended."""
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, the number of its global batches that were used, and the settings that decide the order."""
        return {"epoch": self.epoch + self._over, "position": self.position, **self._order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from `state`, which any number of ranks may have saved.

        Raises:
            TypeError, ValueError: `state` is not that of a sampler, or was saved with another seed, global batch size,
                or number of workers.
        """
        check_state(state, "epoch", "position", of="a sampler or loader")
        for name, expected in self._order.items():
            if state.get(name) != expected:
                raise ValueError(f"Expected the state of a stream's sampler with {name} {expected}. Received: "
                                 f"{state.get(name)}.")
        self.epoch, self.position, self._resumed, self._over = state["epoch"], state["position"], True, False
        self._first, self.loaded = self.position, self.loaded + 1

    @property
    def _order(self) -> dict[str, int]:
        """The settings on which the order of samples in an epoch depends, beside the stream itself."""
        size = self.balancer.global_batch_size
        return {"seed": self.seed, "global_batch_size": size, "num_workers": self._workers}
