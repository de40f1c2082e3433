"""Worker processes that load batches for a rank, and end when the rank does; and how long loading a batch takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ParamSpec

import numpy as np

from hvd_hetero.engine.loading import Loaders, loaders

from .batch import Batch
from .source import Source

P = ParamSpec("P")

_source: Source | None = None  # set in each worker process


class _Pool(ProcessPoolExecutor):
    """A process pool whose workers end by SIGTERM once one of them has died.

    Workers ignore SIGTERM while the rank needs them (see `engine.loading`). A pool of which a process has died ends the
    others by SIGTERM, so that has to be allowed then.
    """

    def submit(self, *arguments: Any, **named: Any) -> Future[Any]:
        """As of `ProcessPoolExecutor`."""
        future = super().submit(*arguments, **named)
        future.add_done_callback(self._end_if_broken)
        return future

    @staticmethod
    def _end_if_broken(future: Future[Any]) -> None:
        if not future.cancelled() and isinstance(future.exception(), BrokenProcessPool):
            loaders().end()


def processes(workers: int, source: Source) -> Executor:
    """A pool of `workers` processes, each with a copy of `source`. A batch is loaded by `submit(take, indices)`."""
    return _Pool(workers, initializer=_begin, initargs=(loaders(), source))


def take(indices: np.ndarray) -> Batch:
    """The batch of the samples at these indices. Runs in a worker process."""
    assert _source is not None
    return _source.take(indices)


def timed(load: Callable[P, Batch], *args: P.args, **kwargs: P.kwargs) -> tuple[Batch, float]:
    """The batch that `load` returns, and the seconds that it took."""
    began_s = time.perf_counter()
    batch = load(*args, **kwargs)
    return batch, time.perf_counter() - began_s


def _begin(those: Loaders, source: Source) -> None:
    """Prepares a worker process: keeps the source, and handles SIGTERM as `engine.loading` says."""
    global _source
    _source = source
    those.begin()
