"""`BalancedDataLoader`: loads each rank's share of one global order of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.balancer import Balancer
from hvd_hetero.optimizers.data_checksum import checksum
from hvd_hetero.optimizers.sampler import LOADED, arguments_heard
from hvd_hetero.optimizers.shards import ShardSampler, check_resumes, check_unsharded
from hvd_hetero.optimizers.stream import StreamSampler
from hvd_hetero.optimizers.unused_balancer import warn_of_none

from .batch_sampler import ONE_AT_A_TIME, BalancedBatchSampler
from .epoch_order import check_sampler
from .feed import Feed, NumberedFeed
from .row import fewer_rows
from .shards import ShardFeed
from .stream import StreamFeed
from .whole import whole_numbers


def check_map_style(dataset: Any) -> None:
    """Raises TypeError for a dataset whose samples cannot be dealt by number."""
    if isinstance(dataset, DataLoader):
        raise TypeError("dataset: expected the dataset itself. Received: a DataLoader. Give loader.dataset, and the "
                        "loader's collate_fn, num_workers and so on as arguments.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            "dataset: expected a map-style dataset (with __getitem__ and __len__), so that every sample can be dealt "
            f"to any rank. Received: {type(dataset).__name__}."
        )


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Raises TypeError for arguments of a `DataLoader` that the balancer does not leave to a user."""
    for name, instead in (
        ("batch_size", "Give the global batch to hvd.Balancer."),
        ("batch_sampler", "Give what orders the samples as sampler=."),
    ):
        if name in arguments:
            raise TypeError(
                f"{name}: expected none, because the balancer deals the batches. Received: {arguments[name]!r}. "
                f"{instead}"
            )
    if not arguments.get("in_order", True):
        raise TypeError("in_order: expected True: sizes go with batches in the order dealt. Received: False.")


def _check_dataset(
    dataset: Any, *, sharded: bool, shuffle: bool | None, steps_per_epoch: int | None, resumes: bool | str
) -> None:
    """Raises TypeError or ValueError for a dataset that cannot be dealt as the other arguments say."""
    streams = isinstance(dataset, IterableDataset)
    if sharded and not streams:
        raise TypeError(
            "sharded: expected an IterableDataset of this rank's own samples. Received: "
            f"{type(dataset).__name__}. Of a map-style dataset give all to every rank, and leave sharded out."
        )
    if not sharded:
        check_unsharded(steps_per_epoch, resumes)
    check_resumes(resumes)
    if streams and shuffle:
        raise ValueError(
            "shuffle: expected False or none for an IterableDataset, whose samples have no numbers. Received: "
            "True. Shuffle in the dataset."
        )
    if not streams:
        check_map_style(dataset)


def _length_of(dataset: Any) -> int | None:
    """The number of samples of a dataset; None for an `IterableDataset` without a length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        if isinstance(dataset, IterableDataset):
            return None
        raise


def _progress_bar() -> Any:
    """tqdm's class of progress bars. Raises ImportError if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("progress=True: expected tqdm. Received: not installed. Run: pip install tqdm.") from error
    return tqdm


class BalancedDataLoader:
    """Batches of a dataset, each as large as this rank's share at that moment.

    Takes what `torch.utils.data.DataLoader` takes, except `batch_size` and `batch_sampler`, which are the balancer's.
    Each batch tells the balancer its size, so that gradients are weighted by it. When loading raises on one rank, the
    others raise `PeerError` in the same step. Constructing one is a collective call.

    With `num_workers`, batches are dealt `num_workers * prefetch_factor` steps ahead, and a new plan takes effect that
    much later. A loop under `torch.no_grad()` that trains on nothing, as in `update_bn`, uses up no epoch.

    Args:
        dataset: all of it on every rank, in the same order: map-style, or an `IterableDataset`, which every rank reads
            from beginning to end, keeping its own samples.
        balancer: deals the shares, and is told the size of each batch.
        sharded: `dataset` is an `IterableDataset` of this rank's own samples. It takes as many of them for a global
            batch as its share says, so that a fast rank uses up more; streams go on from one epoch to the next, and
            start again where they end.
        steps_per_epoch: with `sharded`, global batches of an epoch.
        resumes: with `sharded`, how a rank that goes on from a checkpoint finds its place in its stream. True: it reads
            what it has used of the present pass, and drops it. "state": by the stream's own `state_dict()`. False: it
            starts the stream again.
        sampler: draws the indices of each epoch, of all ranks' samples in their order, as PyTorch's
            `WeightedRandomSampler` does. Its length does not change. What it draws at random on the CPU follows from
            `seed`, the seed of its `generator`, if it has one, and the epoch; its `set_epoch` is called, if it has one.
        shuffle: whether each epoch has an order of its own (default: True for a map-style dataset without a sampler; an
            `IterableDataset` shuffles by itself).
        seed: of that order, and of the random numbers in loading processes.
        drop_last: leaves out what does not fill a global batch.
        num_workers, prefetch_factor: loading processes, and batches that each loads ahead, as of `DataLoader`. Ranks
            may have different numbers, except for an `IterableDataset` that all read.
        progress: shows a bar on rank 0, with the global samples per second and the shares (it needs tqdm).

    Raises:
        ValueError, TypeError: on every rank, when arguments are wrong on any rank, or differ between ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        balancer: Balancer,
        sampler: Iterable[Any] | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        sharded: bool = False,
        steps_per_epoch: int | None = None,
        resumes: bool | str = True,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        progress: bool = False,
        **arguments: Any,
    ) -> None:
        self.balancer, self.dataset, self._sharded = balancer, dataset, sharded
        streams = isinstance(dataset, IterableDataset)
        length: Any = None
        content = 0
        arguments["prefetch_factor"] = prefetch_factor
        with arguments_heard(balancer):
            _check_arguments(arguments)
            check_whole("num_workers", num_workers, least=0)
            check_whole("prefetch_factor", prefetch_factor, least=1, optional=True)
            _check_dataset(
                dataset, sharded=sharded, shuffle=shuffle, steps_per_epoch=steps_per_epoch, resumes=resumes
            )
            # It says what it cannot take.
            DataLoader(dataset, num_workers=num_workers, sampler=sampler, **arguments)  # type: ignore[arg-type]
            self._bar = _progress_bar() if progress and balancer.rank == 0 else None
            self._lookahead = lookahead = num_workers * (2 if prefetch_factor is None else prefetch_factor)
            if sampler is not None:
                length = check_sampler(sampler, shuffle)
            elif not sharded:
                length = _length_of(dataset)
            if not streams:
                content = checksum(whole_numbers(dataset))
        if sharded:
            shards = ShardSampler(
                steps_per_epoch,
                balancer=balancer,
                seed=seed,
                lookahead=lookahead,
                readers=max(1, num_workers),
                resumes=resumes,
            )
            self._feed: Feed = ShardFeed(dataset, sampler=shards, workers=num_workers, arguments=arguments)
        elif streams:
            stream = StreamSampler(
                length,
                balancer=balancer,
                seed=seed,
                drop_last=drop_last,
                workers=num_workers,
                lookahead=lookahead,
            )
            self._feed = StreamFeed(dataset, sampler=stream, workers=num_workers, arguments=arguments)
        else:
            numbered = BalancedBatchSampler(
                length,
                checksum=content,
                balancer=balancer,
                sampler=sampler,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                lookahead=lookahead,
            )
            arguments["num_workers"] = num_workers
            self._feed = NumberedFeed(
                dataset,
                sampler=numbered,
                length=length if sampler is None else None,
                seed=seed,
                arguments=arguments,
            )
        self._iterations = 0
        self.batch_sampler = self._feed.sampler
        self.loader = self._feed.loader

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of `epoch`, and starts at its beginning. If `epoch` was resumed in the middle, it goes on
        from there; if at its end, nothing of it is left."""
        self.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        left, go_back = self.batch_sampler.left, self.batch_sampler.bookmark()
        try:
            with self._bar(total=left, unit="samples") if self._bar else contextlib.nullcontext() as bar:
                yield from self._batches(bar)
        except GeneratorExit:
            self.balancer.batch_order.leaves()
            raise
        self.batch_sampler.end_epoch()
        self.balancer.batch_order.ends()
        self.balancer.end_epoch()
        if torch.is_grad_enabled():
            warn_of_none(self.balancer, evaluates="hvd.EvaluationDataLoader, or iterate under torch.no_grad()")
        elif not self.balancer.batch_order.used:  # it looked at the data only, as `update_bn` does
            go_back()

    def _batches(self, bar: Any) -> Iterator[Any]:
        self._iterations = mine = self._iterations + 1
        batches = self._feed.batches()
        loading_meter, iteration = self.balancer.step_timer.loading_meter, None
        first, begun_at = True, self.batch_sampler.loaded
        while True:
            if self.batch_sampler.loaded != begun_at:
                raise RuntimeError(LOADED)
            if self._iterations != mine:
                raise RuntimeError(ONE_AT_A_TIME)
            if loading_meter.iteration != iteration:  # this iteration begins, or goes on after another loader's
                loading_meter.will_load(
                    beside=self.loader.num_workers > 0,
                    in_parts=self._sharded or not isinstance(self.dataset, IterableDataset),
                    loaders=self.loader.num_workers,
                    ahead=self._lookahead,
                )
                iteration = loading_meter.iteration
            try:
                with loading_meter.loading():
                    loaded = next(batches)
            except StopIteration:
                return
            except Exception:
                self.balancer.fail()
                self.balancer.batch_order.leaves()
                raise
            self.balancer.origin = self.batch_sampler.origin
            self.balancer.begin(loaded.samples, whole=loaded.whole)
            loading_meter.tell(loaded.samples, loaded.busy_s)
            if loaded.samples and self.balancer.count_warnings.looks_at_rows:
                self.balancer.count_warnings.deals(fewer_rows(loaded.batch, loaded.samples))
            self.balancer.batch_order.begins(loaded.samples, first=first)
            first = False
            yield loaded.batch
            if bar is not None:
                bar.set_postfix_str("shares " + ":".join(map(str, self.balancer.plan.shares)), refresh=False)
                bar.update(loaded.whole)

    def state_dict(self) -> dict[str, int]:
        """The position in the epoch."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a saved position."""
        self.batch_sampler.load_state_dict(state)
