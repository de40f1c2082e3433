"""Loads batches for a `BalancedDataLoader` through PyTorch's `DataLoader`, from a dataset whose samples have numbers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info

from hvd_hetero.engine.loading import Loaders, loaders

from .batch_sampler import BalancedBatchSampler
from .busy import timing_loader
from .draws import seed_of
from .row import none_of

_IN_USE: dict[int, Any] = {}  # iterators, held here so that the garbage collector does not find them


class Loaded(NamedTuple):
    """This rank's part of a global batch."""

    batch: Any
    samples: int  # of this rank
    whole: int  # samples of the global batch
    busy_s: float = 0.0  # seconds for which the process that loaded it was busy with it, if that was measured


class Sampler(Protocol):
    """The position of a loader: its epoch, and how far it is in that. See `BalancedBatchSampler`."""

    @property
    def loaded(self) -> int: ...

    def __len__(self) -> int: ...

    @property
    def left(self) -> int | None: ...

    @property
    def origin(self) -> int: ...

    def bookmark(self) -> Callable[[], None]: ...

    def set_epoch(self, epoch: int) -> None: ...

    def end_epoch(self) -> None: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Feed(Protocol):
    """What loads this rank's part of each global batch."""

    loader: DataLoader[Any]

    @property
    def sampler(self) -> Sampler: ...

    def batches(self) -> Iterator[Loaded]:
        """The batches of one iteration."""


def outliving(
    worker_init_fn: Callable[[int], None] | None, dataset: Any = None
) -> Callable[[int], None]:
    """A `worker_init_fn` for a `DataLoader`, with which workers outlive a SIGTERM that is sent to all processes of a
    job.

    Args:
        worker_init_fn: a user's function, called in turn.
        dataset: makes of the worker's dataset the one that the user's function finds in `get_worker_info()`; None: it
            finds the worker's own.
    """
    return functools.partial(_begin, loaders(), worker_init_fn, dataset)


def _begin(
    those: Loaders, worker_init_fn: Callable[[int], None] | None, dataset: Callable[[Any], Any] | None, worker: int
) -> None:
    those.begin()
    info = get_worker_info()
    if dataset is not None and info is not None:
        object.__setattr__(info, "dataset", dataset(info.dataset))  # the info refuses ordinary assignment
    if worker_init_fn is not None:
        worker_init_fn(worker)


@contextlib.contextmanager
def iterating(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """An iterator over `loader` whose workers end with it, unless they are persistent.

    Workers are told to end through a queue. That queue no longer sends once the garbage collector has found it and the
    iterator in a reference cycle, such as an exception's traceback makes: PyTorch would then wait for each worker until
    a time-out, and kill it. So iterators are held here, and ended explicitly.
    """
    with torch.device("cpu"):  # where its generator is, also if the script has set another default device
        source = iter(loader)
    for worker in getattr(source, "_workers", ()):
        worker.terminate = worker._popen.kill  # for one that is stuck in a read: ours outlive terminate()'s SIGTERM
    if id(source) not in _IN_USE:
        _IN_USE[id(source)] = source
        if loader.persistent_workers:
            weakref.finalize(loader, _end, source, os.getpid()).atexit = False  # at exit, PyTorch ends them itself
    try:
        yield source
    finally:
        if not loader.persistent_workers:
            _end(source)


def end_persistent(loader: DataLoader[Any]) -> None:
    """Ends persistent workers of `loader`; its next iteration begins others."""
    source, loader._iterator = loader._iterator, None
    if source is not None:
        _end(source)


def _end(source: Any, process: int | None = None) -> None:
    """Ends the workers of `source`. In another process than `process`, one that was forked from it, does nothing: they
    are no children of that one."""
    if process not in (None, os.getpid()):
        return
    _IN_USE.pop(id(source), None)
    if hasattr(source, "_shutdown_workers"):
        source._shutdown_workers()


class WorkerSeed:
    """Seeds the workers of a `DataLoader` from a generator of its own.

    An iteration must not draw its seed from torch's default generator, or a resumed job would draw other numbers. A
    generator that the user gave is left alone.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._generator: torch.Generator | None = None
        if arguments.get("generator") is None:
            self._generator = arguments["generator"] = torch.Generator()

    def begin(self, seed: int) -> None:
        """Sets the seed of the next iteration's workers."""
        if self._generator is not None:
            self._generator.manual_seed(seed)


class NumberedFeed:
    """Loads samples by number.

    Args:
        sampler: deals them.
        length: samples that the dataset has to have in each iteration; None where a user's sampler gives the order.
        arguments: of `DataLoader`, except those that the sampler replaces.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: BalancedBatchSampler,
        length: int | None,
        seed: int,
        arguments: dict[str, Any],
    ) -> None:
        self.sampler, self._seed = sampler, seed
        self._dataset, self._length = dataset, length
        self._worker_seed = WorkerSeed(arguments)
        arguments["worker_init_fn"] = outliving(arguments.get("worker_init_fn"))
        collate_fn = arguments.pop("collate_fn", None)
        self._timed = arguments["num_workers"] > 0
        make = timing_loader if self._timed else DataLoader
        self.loader = make(dataset, batch_sampler=sampler, collate_fn=collate_fn, **arguments)

    def batches(self) -> Iterator[Loaded]:
        """The batches of one iteration.

        Raises:
            ValueError: the dataset has more or fewer samples than it has to have.
        """
        sampler, left = self.sampler, self.sampler.left
        if self._length is not None and (now := len(self._dataset)) != self._length:
            raise ValueError(
                f"dataset: expected {self._length} samples, as there were when the loader was made. Received: {now}. "
                "Make a new BalancedDataLoader for them, on all ranks."
            )
        batches, size = sampler.batches_left, sampler.balancer.global_batch_size
        if not batches:
            return
        # The same seed in a job that was resumed at this batch, and a different one on each rank.
        self._worker_seed.begin(seed_of(self._seed, sampler.sampler.epoch, batches, sampler.balancer.rank))
        sampler.draw()  # which may fail, and then has no workers to end
        with iterating(self.loader) as source:
            for index in range(batches):
                try:
                    batch = next(source)
                finally:
                    samples = sampler.used()  # also if loading fails: then all ranks miss this batch
                batch, busy_s = batch if self._timed else (batch, 0.0)
                yield Loaded(
                    none_of(batch) if samples == 0 else batch, samples, min(size, left - index * size), busy_s
                )
