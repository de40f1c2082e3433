"""Processes that load batches for a rank, and end with it."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from hvd_hetero.engine.loading import Loaders, loaders

from .batch import Batch
from .source import Source

_source: Source | None = None  # in such a process


class _Pool(ProcessPoolExecutor):
    """A pool that, where one of its processes has died, can end the others by SIGTERM, as pools do."""

    def submit(self, *arguments: Any, **named: Any) -> Future[Any]:
        future = super().submit(*arguments, **named)
        future.add_done_callback(self._end_if_broken)
        return future

    @staticmethod
    def _end_if_broken(future: Future[Any]) -> None:
        if not future.cancelled() and isinstance(future.exception(), BrokenProcessPool):
            loaders().end()


def processes(workers: int, source: Source) -> Executor:
    """So many processes, each with this source: `submit(take, indices)`."""
    return _Pool(workers, initializer=_begin, initargs=(loaders(), source))


def take(indices: np.ndarray) -> Batch:
    """The samples at these indices; called in one of the processes."""
    assert _source is not None
    return _source.take(indices)


def _begin(those: Loaders, source: Source) -> None:
    global _source
    _source = source
    those.begin()
