"""Loads from an `IterableDataset` that is this rank's own: other ranks have other samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hvd_hetero.optimizers.shards import STATE, ShardSampler
from hvd_hetero.optimizers.stream import Order, StreamPlace
from hvd_hetero.optimizers.stream_state import Kept

from .draws import seed_of
from .feed import Loaded, WorkerSeed, end_persistent, iterating
from .row import none_of
from .stream import Read, Stream, reading


class _Reader:
    """Presents the stream to a `DataLoader` as a dataset: indexed with an `Order`, it gives this rank's samples of the
    next global batch. Each loading process has one.

    Args:
        collate: makes a batch of samples.
        seed: of what is drawn at random while reading, together with the rank.
        keeps: whether the dataset itself keeps its place, which is said with each batch.
    """

    def __init__(
        self, dataset: IterableDataset[Any], *, collate: Callable[[list[Any]], Any], seed: int, keeps: bool
    ) -> None:
        self.dataset = dataset
        self._collate, self._seed, self._keeps = collate, seed, keeps
        self._start = -1  # the number of the `Start` at which it was begun
        self._next: StreamPlace | None = None  # the place at which the stream is to be begun, if that is given
        self._stream: Stream | None = None
        self._pass = -1  # the number of times that the stream was begun; at least the epoch in which it was
        self._taken = 0  # samples of this pass that were read
        self._waiting: list[Any] = []  # samples that were read, and are in no batch yet
        self._kept: Kept | None = None  # a place of this pass that the dataset keeps, before those that wait

    def __getitem__(self, order: Order) -> Read:
        assert order.start is not None
        if order.shares is None:
            return Read(None, 0, 0, 0, 0)
        began_s = time.perf_counter()
        worker = get_worker_info()
        reader = 0 if worker is None else worker.id
        if order.start.number != self._start:
            self._start, self._next = order.start.number, order.start.places.get(reader)
            self._stream = None
            self._waiting.clear()
        share = order.shares[order.rank]
        self._read(max(1, share), order)
        # A rank without a sample gets one, for the shape of the batch, that stays the next one.
        batch = self._collate(self._waiting[: max(1, share)])
        del self._waiting[:share]
        if self._keeps and not self._waiting and self._stream is not None:
            self._kept = self._stream.keep(self._taken)
        place = StreamPlace(self._pass, self._taken - len(self._waiting), self._kept)
        return Read(batch, share, sum(order.shares), 0, reader, place, time.perf_counter() - began_s)

    def _begin(self, order: Order) -> Stream:
        """Begins a pass over the stream, at the place given if there is one."""
        place, self._next = self._next or StreamPlace(max(self._pass + 1, order.epoch), 0), None
        self._pass, self._taken, kept = place
        self._kept = kept if self._keeps else None
        stream = Stream(
            self.dataset,
            seed=seed_of(self._seed, order.rank),
            epoch=self._pass,
            tells=True,
            keeps=self._keeps,
            kept=self._kept,
        )
        stream.skip(self._taken - stream.passed_over)
        return stream

    def _read(self, count: int, order: Order) -> None:
        """Has at least `count` samples wait, beginning the stream anew where it ends."""
        while (missing := count - len(self._waiting)) > 0:
            if self._stream is None:
                self._stream = self._begin(order)
            read = self._stream.take([order.rank] * missing, order.rank)[0]
            self._waiting += read
            self._taken += len(read)
            if len(read) < missing:
                self._stream = None
            if self._taken == 0:
                raise ValueError(
                    "Expected samples from the stream of every rank, and of each of its loading processes "
                    f"(num_workers). Received: none from a stream of rank {order.rank}. Give each at least one file, "
                    "or take fewer processes."
                )


class ShardFeed:
    """Loads as many samples of this rank's own stream as its share of each global batch says.

    The stream goes on from one epoch to the next, and is begun anew where it ends. With loading processes, each takes
    its turn with a whole batch of this rank, as those of a `DataLoader` do, and they live on between epochs. Those that
    are begun anew, with an elastic job's ranks or from a checkpoint, go on where their streams were.

    Args:
        workers: loading processes; 0: this process loads itself.
        arguments: of `DataLoader`, except those that say how samples become batches.
    """

    def __init__(
        self, dataset: IterableDataset[Any], *, sampler: ShardSampler, workers: int, arguments: dict[str, Any]
    ) -> None:
        self.sampler = sampler
        self._worker_seed = WorkerSeed(arguments)
        collate = arguments.pop("collate_fn", None) or default_collate
        reader = _Reader(dataset, collate=collate, seed=sampler.seed, keeps=sampler.resumes == STATE)
        defaults = {"num_workers": workers, "persistent_workers": workers > 0}
        self.loader = reading(reader, sampler, {**defaults, **arguments})
        sampler.balancer.engine.on_reset_end(self._restart)

    def _restart(self) -> None:
        """Begins loading processes anew, which know the ranks of an elastic job as they were."""
        end_persistent(self.loader)

    def batches(self) -> Iterator[Loaded]:
        """The batches that are left of this epoch."""
        sampler = self.sampler
        if not sampler.begin():
            return
        self._worker_seed.begin(seed_of(sampler.seed, sampler.epoch, sampler.position, sampler.balancer.rank))
        with iterating(self.loader) as source:
            for _ in range(sampler.passed_over):
                next(source)
            for _ in range(sampler.steps - sampler.position):
                try:
                    read = next(source)
                except Exception:
                    sampler.miss()
                    raise
                sampler.answered()
                sampler.use(read.whole, read.content)
                sampler.reached(read.reader, read.place)
                yield Loaded(read.batch if read.used else none_of(read.batch), read.used, read.whole, read.busy_s)
