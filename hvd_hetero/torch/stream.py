"""Loads from an `IterableDataset`: every rank reads all of it, and makes batches of its own samples alone."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, Sampler, default_collate, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from hvd_hetero.optimizers.data_checksum import checksum_of_one
from hvd_hetero.optimizers.dealer import owners
from hvd_hetero.optimizers.draws import Draws
from hvd_hetero.optimizers.stream import Order, StreamPlace, StreamSampler
from hvd_hetero.optimizers.stream_state import Kept, iterator_at, keeper, state_of, tell_epoch

from .draws import TORCH, seed_of
from .feed import Loaded, WorkerSeed, iterating, outliving
from .row import none_of
from .whole import WHOLE

WRAPPED = operator.attrgetter("dataset")  # the user's dataset, from the object that reads it


class Read(NamedTuple):
    """A batch of this rank's samples; without the batch itself if that is only passed over."""

    batch: Any
    used: int  # samples of this rank; if 0, the one in `batch` is another rank's
    whole: int  # samples over all ranks; 0 if the stream has ended
    content: int  # checksum of samples that should be the same on all ranks
    reader: int  # number of the loading process
    place: StreamPlace = StreamPlace(0, 0)  # where that is in a stream of the rank's own, after this batch
    busy_s: float = 0.0  # seconds for which the process was busy with it, if that was measured


class _Reader:
    """Presents the stream to a `DataLoader` as a dataset: indexed with an `Order`, it gives the next global batch. Each
    loading process has one.

    Args:
        size: samples of a global batch.
        collate: makes a batch of samples.
        seed: of what is drawn at random while reading.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        seed: int,
    ) -> None:
        self.dataset = dataset
        self._size, self._drop_last, self._collate, self._seed = size, drop_last, collate, seed
        self._run = -1
        self._stream: Stream | None = None
        self._told = False  # whether the checksum of this iteration's first batch has been given

    def __getitem__(self, order: Order) -> Read:
        if order.run < self._run:
            raise RuntimeError(
                "Expected one iteration at a time over hvd.BalancedDataLoader of an IterableDataset. Received: another "
                "batch of one that a later one has taken over from."
            )
        if self._stream is None or order.run > self._run:
            self._run, self._told, self._stream = order.run, False, None
            self._stream = Stream(self.dataset, seed=self._seed, epoch=order.epoch, tells=True)
        stream, keeps = self._stream, order.shares is not None
        places = owners(order.shares).tolist() if order.shares is not None else [-1] * self._size
        looks = 0 if not keeps else 1 if self._told else self._size
        mine, first, whole, content = stream.take(places, order.rank, looks=looks)
        if whole == 0 or (self._drop_last and whole < self._size):
            return Read(None, 0, 0, 0, stream.reader)
        if not keeps:
            return Read(None, 0, whole, 0, stream.reader)
        self._told = True
        return Read(self._collate(mine or [first]), len(mine), whole, content, stream.reader)

    def leave(self, run: int) -> None:
        """Closes the stream if iteration `run` was the last to read it, so that its resources are freed at once."""
        if run == self._run:
            self._stream = None


class Stream:
    """One iteration over a stream in one loading process, with random numbers of its own.

    Args:
        tells: whether to call the dataset's `set_epoch`, if it has one.
        keeps: whether the dataset is to keep its places: see `keep`.
        kept: such a place, to go on from; None: from the beginning on.

    Attributes:
        passed_over: how many samples come before the first one that is read.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        seed: int,
        epoch: int,
        tells: bool = False,
        keeps: bool = False,
        kept: Kept | None = None,
    ) -> None:
        worker = get_worker_info()
        self.reader = 0 if worker is None else worker.id
        self._draws = Draws(seed_of(seed, epoch, self.reader), TORCH)
        with self._draws():
            if tells:
                tell_epoch(dataset, epoch)
            _seed_and_shard(dataset, seed_of(seed, epoch))
            self._samples, self.passed_over = iterator_at(dataset, kept)
            self._keeper = keeper(dataset, self._samples) if keeps else None
        if kept is not None:
            self._draws.states = kept.draws

    def keep(self, used: int) -> Kept:
        """The place after the `used` samples of this pass that were read, as the dataset keeps it."""
        with self._draws():
            state = state_of(self._keeper)
        return Kept(used, state, self._draws.states)

    def take(self, places: Sequence[int], rank: int, *, looks: int = 0) -> tuple[list[Any], Any, int, int]:
        """Reads one sample for each of `places`, which are the ranks that the samples belong to. Returns the samples of
        `rank`, the first sample of all, the number read, and a checksum of the first `looks` samples."""
        mine: list[Any] = []
        first, whole, content = None, 0, 0
        with self._draws():
            for owner, sample in zip(places, self._samples, strict=False):  # takes none beyond the last place
                first = sample if whole == 0 else first
                if whole < looks:
                    content = _checksum(sample, content)
                if owner == rank:
                    mine.append(sample)
                whole += 1
        return mine, first, whole, content

    def skip(self, samples: int) -> None:
        """Reads so many samples, and drops them."""
        with self._draws():
            for _ in itertools.islice(self._samples, samples):
                pass


def _seed_and_shard(pipe: Any, seed: int) -> None:
    """Does for an `IterDataPipe` what a `DataLoader` does: makes all loading processes shuffle alike, and gives each
    its part by the pipe's `sharding_filter`."""
    if not isinstance(pipe, IterDataPipe):
        return
    apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    worker = get_worker_info()
    if worker is not None:
        apply_sharding(pipe, worker.num_workers, worker.id)


class OwnSamples(IterableDataset[Any]):
    """This rank's samples of a stream that every rank reads once."""

    def __init__(self, dataset: IterableDataset[Any], *, shares: Sequence[int], rank: int) -> None:
        self.dataset = dataset
        self._shares, self._rank = tuple(shares), rank

    def __iter__(self) -> Iterator[Any]:
        stream, places = Stream(self.dataset, seed=0, epoch=0), owners(self._shares).tolist()
        whole = len(places)
        while whole == len(places):
            mine, _, whole, _ = stream.take(places, self._rank)
            yield from mine


def _checksum(sample: Any, start: int) -> int:
    """Continues the checksum `start` over what has to be the same in a sample on all ranks: whole numbers themselves,
    and of other tensors the shapes."""
    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            whole = leaf.dtype in WHOLE and leaf.layout is torch.strided
            leaf = leaf.detach().cpu().numpy() if whole else str(tuple(leaf.shape))
        start = checksum_of_one(leaf, start)
    return start


class _Orders(Sampler[Order]):
    def __init__(self, sampler: StreamSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Order]:
        return self._sampler.orders()


def reading(reader: Any, sampler: StreamSampler, arguments: dict[str, Any]) -> DataLoader[Any]:
    """A `DataLoader` that has `reader` carry out the orders of `sampler`.

    Args:
        reader: indexed with an `Order`, it gives a `Read`. Each loading process has a copy.
        arguments: of `DataLoader`, except those that say how samples become batches.
    """
    arguments["worker_init_fn"] = outliving(arguments.get("worker_init_fn"), WRAPPED)
    return DataLoader(reader, batch_size=None, sampler=_Orders(sampler), collate_fn=_as_it_is, **arguments)


class StreamFeed:
    """Loads this rank's part of each global batch from a stream.

    Each loading process makes whole global batches of what it reads, and they take turns, as those of a `DataLoader`
    do. So samples come in the same order as with a `DataLoader`, and all ranks need the same number of processes.

    Args:
        workers: loading processes; 0: this process loads itself.
        arguments: of `DataLoader`, except those that say how samples become batches.
    """

    def __init__(
        self, dataset: IterableDataset[Any], *, sampler: StreamSampler, workers: int, arguments: dict[str, Any]
    ) -> None:
        self.sampler = sampler
        self._readers = max(1, workers)
        self._worker_seed = WorkerSeed(arguments)
        self._reader = _Reader(
            dataset,
            size=sampler.balancer.global_batch_size,
            drop_last=sampler.drop_last,
            collate=arguments.pop("collate_fn", None) or default_collate,
            seed=sampler.seed,
        )
        self.loader = reading(self._reader, sampler, {**arguments, "num_workers": workers})

    def batches(self) -> Iterator[Loaded]:
        """The batches of one iteration, until all loading processes are at the end of their stream."""
        sampler = self.sampler
        if not sampler.begin():
            return
        passes_over = sampler.position
        ended: set[int] = set()
        self._worker_seed.begin(seed_of(sampler.seed, sampler.epoch, sampler.position, sampler.balancer.rank))
        with contextlib.ExitStack() as stack:
            stack.callback(self._reader.leave, sampler.run)
            source = stack.enter_context(iterating(self.loader))
            while len(ended) < self._readers:
                try:  # the loader never ends by itself: a StopIteration comes from the user's code, and is an error
                    read = next(source)
                except Exception:
                    if not passes_over:
                        sampler.miss()
                    raise
                sampler.answered()
                if not read.whole:
                    ended.add(read.reader)
                elif passes_over:
                    passes_over -= 1
                else:
                    sampler.use(read.whole, read.content)
                    yield Loaded(read.batch if read.used else none_of(read.batch), read.used, read.whole)


def _as_it_is(read: Any) -> Any:
    return read
