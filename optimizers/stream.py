"""Dealing a stream: samples that have no number, in the one order in which every rank reads them.

Global batch k of an epoch is what the stream gives next, whatever the plan; each rank keeps its places of it and passes
over those of the others. So every sample is used exactly once however often the plan changes, as with `ShareSampler`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from .agreement import agree_on
from .argument import check_integer, check_whole
from .balancer import Balancer
from .control import ORIGINS

A_STREAM = "a stream (IterableDataset)"


class Order(NamedTuple):
    """What to read next, for whoever reads: a global batch, of the iteration `run` over `epoch`."""

    run: int
    epoch: int
    rank: int
    shares: tuple[int, ...] | None  # None: of a batch that was used before, nothing is kept


class StreamSampler:
    """What each rank takes of one global batch of a stream after the other, and how far it has come.

    Batches may be ordered before they are used; what counts as done is what was used. An epoch ends when the stream
    does. Going on in the middle of an epoch means reading it from its beginning.

    Args:
        length: samples of an epoch, where the stream knows.
        seed: whatever draws at random while the stream is read begins from it and the epoch.
        workers: how many read, each of which makes whole global batches: part of the order.
        lookahead: batches that may be ordered before they are used. The step for which one is ordered, and so its plan,
            depends on it where some of those who read have come to their end.

    Raises:
        ValueError: on every rank, when the arguments differ between ranks.
    """

    def __init__(
        self, length: int | None, *, balancer: Balancer, seed: int, drop_last: bool, workers: int, lookahead: int
    ) -> None:
        if not isinstance(balancer, Balancer):
            raise TypeError(f"balancer: expected an hvd.Balancer. Received: {balancer!r}.")
        self.balancer, self.length, self.seed, self.drop_last = balancer, length, seed, drop_last
        self._workers, self._lookahead = workers, lookahead
        self._agree()
        check_integer("seed", seed)  # the same on all ranks by now
        self.epoch = 0
        self.position = 0  # global batches of this epoch that were used
        self._first = 0  # where the next iteration starts: not 0 after load_state_dict()
        self._resumed = False  # and not iterated since
        self._over = False  # resumed where nothing is left
        self.run = 0  # number of the last iteration
        self._answers = 0  # to its orders
        self.loaded = 0  # so many times a state was
        self._content = 0  # checksum of the batch in use
        balancer.lookahead = max(balancer.lookahead, lookahead)
        balancer.dependents.add(self)
        balancer.engine.remember(self._agree)

    def _agree(self) -> None:
        alike: dict[str, Any] = {
            "dataset length": A_STREAM if self.length is None else f"{self.length} samples of {A_STREAM}",
            "seed": self.seed,
            "drop_last": self.drop_last,
            "num_workers": self._workers,
            "num_workers * prefetch_factor": self._lookahead,
        }
        agree_on(self.balancer.engine, alike, name=f"hvd_hetero.{self.balancer.name}.dealer")

    def __len__(self) -> int:
        """The global batches of the next iteration.

        Raises:
            TypeError: where the stream does not know.
        """
        if self.length is None:
            raise TypeError("len(): expected a dataset of known length. Received: an IterableDataset without __len__.")
        whole, rest = divmod(self.length, self.balancer.global_batch_size)
        return max(0, whole + (rest > 0 and not self.drop_last) - self._first) if not self._over else 0

    @property
    def left(self) -> int | None:
        """The samples of the next iteration, over all ranks; None where the stream does not know."""
        size = self.balancer.global_batch_size
        if self.length is None or self._over:
            return None if self.length is None else 0
        return max(0, self.length - (self.length % size if self.drop_last else 0) - self._first * size)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of `epoch`, and starts at its beginning – unless it was resumed in the middle of it, or at
        its end: then nothing of it is left."""
        check_whole("epoch", epoch, least=0)
        if self._resumed and (epoch + 1, 0) == (self.epoch, self._first):
            self.epoch, self._over = epoch, True
        elif epoch != self.epoch or not self._resumed:
            self.epoch, self.position, self._first, self._resumed, self._over = epoch, 0, 0, False, False

    def begin(self) -> bool:
        """Begins an iteration; whether anything of the epoch may be left."""
        over, self._over = self._over, False
        self.position, self._first, self._resumed = self._first, 0, False
        self.run, self._answers = self.run + 1, 0
        return not over

    def orders(self) -> Iterator[Order]:
        """The orders of an iteration, without end: first of what was used before it."""
        run, epoch, passed_over = self.run, self.epoch, self.position
        for _ in range(passed_over):
            yield Order(run, epoch, self.balancer.rank, None)
        for ordered in itertools.count():
            # As many may come before it, fewer where a reader has ended; counting those would lead ever further ahead
            # of the steps that there are, to where a new plan could hold.
            ahead = ordered - max(0, self._answers - passed_over)
            shares = self.balancer.deal(self.balancer.step + 1 + ahead).shares
            yield Order(run, epoch, self.balancer.rank, tuple(shares))

    def answered(self) -> None:
        """The oldest order is, by a batch or by the end of what its reader reads."""
        self._answers += 1

    def use(self, content: int) -> None:
        """The next batch, of this checksum, is in use now."""
        self.position += 1
        self._content = content

    def miss(self) -> None:
        """The next batch is in use on the other ranks, and this one cannot load it: all miss it."""
        self.position += 1

    @property
    def origin(self) -> int:
        """A number that stands for the place in the epoch and the content of the batch in use: others have other ones,
        but for a few."""
        return zlib.crc32(f"{self.position} {self._content}".encode()) % ORIGINS

    def end_epoch(self) -> None:
        """Goes to the next epoch: the stream has ended."""
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch: the number of global batches used."""
        return {"epoch": self.epoch + self._over, "position": self.position, **self._order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was saved, on any number of ranks."""
        for name, expected in self._order.items():
            if state.get(name) != expected:
                raise ValueError(f"Expected the state of a stream's sampler with {name} {expected}. Received: "
                                 f"{state.get(name)}.")
        self.epoch, self.position, self._resumed, self._over = state["epoch"], state["position"], True, False
        self._first, self.loaded = self.position, self.loaded + 1

    @property
    def _order(self) -> dict[str, int]:
        """The settings that, beside the stream, decide the order of an epoch."""
        size = self.balancer.global_batch_size
        return {"seed": self.seed, "global_batch_size": size, "num_workers": self._workers}
